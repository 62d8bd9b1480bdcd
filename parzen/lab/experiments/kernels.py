"""Figure 1: kernels and attention maps are the same thing. Nothing is trained for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from parzen.attention import attention_weights
from parzen.lab.experiments.claims import FAILS, HOLDS, Claim, Outcome, Results
from parzen.lab.experiments.experiment import Experiment


def _unit_mass(s: np.ndarray, r: int) -> float:
    """τ of Σ [s/r − τ]₊ʳ = 1, by bisection."""
    low, high = s.max() / r - 1, s.max() / r
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (np.clip(s / r - middle, 0, None) ** r).sum() > 1 else (low, middle)
    return low


def _polynomial(r: int) -> Callable[[np.ndarray, float], np.ndarray]:
    """[1 − u²/H²]₊ʳ with H² = 2 − 2rγτ, γ = h²: the right-hand side of Proposition 3.1."""

    def k(squared: np.ndarray, h: float) -> np.ndarray:
        tau = _unit_mass((1 - squared / 2) / h**2, r)
        return np.clip(1 - squared / (2 - 2 * r * h**2 * tau), 0, None) ** r

    return k


def _nearest(squared: np.ndarray) -> np.ndarray:
    return squared <= np.sort(squared)[15]


# K(u) from ‖u‖² and h, before normalisation.
FORMULAS: dict[str, tuple[str, Callable[[np.ndarray, float], np.ndarray]]] = {
    "gaussian": ("softmax is the Gaussian kernel, h² its temperature", lambda u, h: np.exp(-u / 2 / h**2)),
    "epanechnikov": ("sparsemax is the Epanechnikov kernel (r = 1)", _polynomial(1)),
    "biweight": ("1.5-entmax is the biweight kernel (r = 2)", _polynomial(2)),
    "triweight": ("4/3-entmax is the triweight kernel (r = 3)", _polynomial(3)),
    "normrelu": (
        "normalised ReLU is the Epanechnikov kernel with a fixed bandwidth",
        lambda u, h: np.clip(1 - u / h**2, 0, None),
    ),
    "relumax": (
        "ReLUmax (b = 1) is the Epanechnikov kernel that ends a margin below the best key",
        lambda u, h: np.clip(1 - (u - u.min()) / 2 / h**2, 0, None),
    ),
    "knn_uniform": ("top-k averaging is the uniform kernel on k neighbours", lambda u, h: _nearest(u) * 1.0),
    "knn_gaussian": (
        "top-k softmax is the Gaussian kernel cut off after k neighbours",
        lambda u, h: np.exp(-u / 2 / h**2) * _nearest(u),
    ),
}


@dataclass(frozen=True)
class Identity:
    """The weights that the library gives are kernel regression with the formula of that kernel."""

    kernel: str

    def __str__(self) -> str:
        return "32 random queries, 64 unit keys, h = 0.6 and 1.2, float64: weights against K(u)/ΣK(u)"

    def __call__(self, results: Results) -> Outcome:
        """Holds if they are equal to rounding."""
        rng = np.random.default_rng(0)
        q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.normal(size=(2, 64, 8)))
        worst = 0.0
        for h in (0.6, 1.2):
            query, key = (torch.from_numpy(x)[None, None] for x in (q[:32], k))
            w = attention_weights(query, key, scale=1 / h**2, kernel=self.kernel).weights[0, 0].numpy()
            for row, squared in zip(w, ((q[:32, None] - k) ** 2).sum(2), strict=True):
                expected = FORMULAS[self.kernel][1](squared, h)
                expected /= max(expected.sum(), np.finfo(float).tiny)
                worst = max(worst, float(np.abs(row - expected).max()))
        small = worst < 1e-9
        return Outcome(
            HOLDS if small else FAILS, f"largest difference {'< 1e-9' if small else f'{worst:.1g}'}"
        )


def claims(scale: str) -> list[Claim]:
    """They need no runs, so that every scale has them; the ledger lists them once, as *exact*."""
    rows = FORMULAS.items() if scale == "exact" else ()
    return [Claim(f"figure1/{name}", "Figure 1", "exact", text, Identity(name)) for name, (text, _) in rows]


EXPERIMENT = Experiment("Figure 1", "kernels and attention maps are the same thing", claims)
