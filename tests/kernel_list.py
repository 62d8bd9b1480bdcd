"""The kernels that every sweep visits: the whole table, and free combinations of every valid cell."""

import parzen

COMBINATIONS = [
    "entmax?alpha=1.02",
    "power?r=1.5",
    "power?r=2&margin=1",
    "power?r=0.5&margin=0.7",
    "power?r=0&margin=1",
    "exp?margin=2",
    "power?r=2&radius=h",
    "power?r=1.5&radius=1.5",
    "exp?radius=0.8",
    "knn_gaussian?k=3",
    "knn_uniform?k=3",
]
# What the reference alone serves.
BEYOND = ["entmax?alpha=0.3", "entmax?alpha=0.9", "entmax?alpha=2.5", "normmax", "normmax?alpha=1.2"]
NAMES = [*parzen.KERNELS, *COMBINATIONS]
COMPACT = [name for name in NAMES if parzen.kernel(name).compact]
NEVER_EMPTY = [n for n in NAMES if not isinstance(parzen.kernel(n).rule, parzen.kernels.WithinRadius)]
