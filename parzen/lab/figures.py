"""Figures, as PNG or SVG bytes."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from parzen.attention import weights
from parzen.kernels import KERNELS, Everywhere, Exp, Kernel, Nearest, WithinMargin, WithinRadius
from parzen.lab.errors import UserError

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 9,
    "legend.frameon": False,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.hashsalt": "parzen",
}
COLORS = ("#1b6ca8", "#d1495b", "#e9a03b", "#2a9d63", "#7b5ea7", "#555555", "#a0683a", "#45b7c9")
FORMATS = ("png", "svg")


def file_format(name: str) -> str:
    """ "png" or "svg", from the end of a file's name."""
    form = name.rpartition(".")[2].lower()
    if form not in FORMATS:
        raise UserError(f"a figure is written as .png or .svg, got {name!r}")
    return form


def rendered(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a file of that kind."""
    out = io.BytesIO()
    # A date in the file would make equal figures differ.
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, dpi=160, metadata=metadata)
    return out.getvalue()


def _cycle(n: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(n)]


# ---- the kernels ---------------------------------------------------------------------------------


def reach(kernel: Kernel, h: float = 1.0) -> float:
    """The distance at which the weight becomes 0 on unit keys, the best key being at distance 0.

    The support of a unit-mass or nearest rule adapts to the keys; it is shown where it ends at h.
    """
    rule = kernel.rule
    if isinstance(rule, Everywhere):
        return math.inf
    if isinstance(rule, WithinRadius):
        return h if rule.radius is None else rule.radius
    if isinstance(rule, WithinMargin):
        return h * math.sqrt(2 * float(rule.margin))
    return h


def falloff(kernel: Kernel, u: np.ndarray, h: float = 1.0) -> np.ndarray:
    """K(u), 1 at distance u = 0: exp(−u²/2h²) or [1 − u²/H²]₊ʳ, and 0 beyond H = ``reach``."""
    end = reach(kernel, h)
    inside = np.abs(u) <= end
    if isinstance(kernel.profile, Exp):
        return np.exp(-(u**2) / (2 * h**2)) * inside
    return np.where(inside, 1 - (u / end) ** 2, 0.0).clip(0) ** float(kernel.profile.r) * inside


def kernels_figure(form: str = "png", extent: float = 3.0) -> bytes:
    """Every kernel of the table: K(u) on [−2, 2], and the weight w₁ over two scores against a third, 0.

    Kernels with the same K(u) share a curve. On the maps grey is a weight of exactly 0.

    Source: arXiv 2601.22766, Figure 1.
    """
    shown: dict[Kernel, str] = {}
    for name, row in KERNELS.items():
        shown.setdefault(row.kernel, name)
    u = np.linspace(-2, 2, 1601)
    curves: dict[bytes, list[str]] = {}
    for kernel, name in shown.items():
        curves.setdefault(falloff(kernel, u).round(9).tobytes(), []).append(name)
    columns = -(-len(shown) // 2)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 7.2), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.25))
        above, below = halves
        axes = above.add_subplot()
        for (raw, names), color in zip(curves.items(), _cycle(len(curves)), strict=True):
            heights = np.frombuffer(raw)
            # Dashes where the neighbourhood ends in a cliff: part of such a curve lies on another one.
            style = "--" if np.abs(np.diff(heights)).max() > 0.1 else "-"
            axes.plot(u, heights, style, color=color, label=", ".join(names), linewidth=1.6)
        axes.set(xlabel="distance u of key and query, in bandwidths h", ylabel="K(u) / K(0)", xlim=(-2, 2))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
        grid = below.subplots(2, columns, sharex=True, sharey=True, squeeze=False)
        image = None
        for panel, (kernel, name) in zip(grid.flat, shown.items(), strict=False):
            image = panel.imshow(
                _first_weight(kernel, extent),
                origin="lower",
                extent=(-extent, extent, -extent, extent),
                vmin=0,
                vmax=1,
                cmap=colormaps["viridis"].with_extremes(bad="#e4e4e4"),
                interpolation="nearest",
            )
            nearest = isinstance(kernel.rule, Nearest)
            panel.set_title(f"{name}, k = 2" if nearest else name)
            panel.set_xticks((-2, 0, 2))
            panel.set_yticks((-2, 0, 2))
        for panel in grid.flat[len(shown) :]:
            panel.set_axis_off()
        below.supxlabel("score s₁ (the third score is 0)", fontsize=9)
        below.supylabel("score s₂", fontsize=9)
        if image is not None:
            below.colorbar(image, ax=grid, label="weight w₁ (grey: exactly 0)", shrink=0.9)
        return rendered(figure, form)


def _first_weight(kernel: Kernel, extent: float, points: int = 181) -> np.ma.MaskedArray:
    """w₁ of the scores (s₁, s₂, 0), s₁ along columns; exact zeros are masked."""
    if isinstance(kernel.rule, Nearest):
        # Of three keys, so that one is left out.
        kernel = replace(kernel, rule=Nearest(2))
    axis = torch.linspace(-extent, extent, points, dtype=torch.float64)
    s2, s1 = torch.meshgrid(axis, axis, indexing="ij")
    w = weights(torch.stack([s1, s2, torch.zeros_like(s1)], -1), kernel)[..., 0].numpy()
    return np.ma.masked_equal(w, 0)
