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
NAMES = [*parzen.KERNELS, *COMBINATIONS]
COMPACT = [name for name in NAMES if parzen.kernel(name).compact]
NEVER_EMPTY = [n for n in NAMES if not isinstance(parzen.kernel(n).rule, parzen.kernels.WithinRadius)]
