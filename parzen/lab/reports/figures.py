"""Figures: charts and maps as data, which a page can draw in its own way, and files of them, PNG or SVG."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import EngFormatter

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
# Of the second and the third round of colours, in line widths.
DASHES = ((), (1.5, 1.5), (5, 1.5, 1.5, 1.5))
UNFINISHED = (4, 2)
# Grey, also on a dark page: 0, which no colour of the map is.
MAP = colormaps["viridis"].with_extremes(bad="#88888838")
FORMATS = ("png", "svg")
# What marks an interval from two seeds alone.
TWO = "†"


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


# Draws into its axes and returns what a colour bar is for, if it needs one.
Panel = Callable[[Axes], AxesImage | None]


def draw(panels: Sequence[Panel], size: tuple[float, float], form: str, columns: int = 1) -> bytes:
    """``panels`` in rows of at most ``columns``, each of ``size`` inches, as PNG or SVG bytes.

    Maps of one part have rows of their own.
    """
    columns = min(columns, max(Counter(map(_part, panels)).values()))
    places: list[Panel | None] = []
    for _, together in itertools.groupby(panels, _part):
        places += together
        places += [None] * (-len(places) % columns)
    rows = len(places) // columns
    with rc_context({**STYLE, "text.parse_math": False}), warnings.catch_warnings():
        # A box stands for a letter that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes: Any = figure.subplots(rows, columns, squeeze=False)
        image = None
        for panel, at in zip(places, axes.flat, strict=True):
            if panel is None:
                at.set_axis_off()
            else:
                image = panel(at)
        if image is not None:
            figure.colorbar(image, ax=axes, shrink=0.9 / rows, anchor=(0, 1)).outline.set_visible(False)
        return rendered(figure, form)


def _part(panel: Panel) -> str:
    return panel.part if isinstance(panel, Map) else ""


# ---- charts and maps -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: in the legend.
        x, y: its points.
        half: half of the interval at each point; empty: there is none.
        style: which colour, and beyond ``COLORS`` which dashes; one name has one style in all charts.
        finished: else its line is broken.
        two: whether its intervals come from two seeds alone: they are marked.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    half: tuple[float, ...] = ()
    style: int = 0
    finished: bool = True
    two: bool = False

    @property
    def label(self) -> str:
        """Its name, whether it is unfinished, and the mark of two seeds."""
        return self.name + TWO * self.two + " (unfinished)" * (not self.finished)

    @property
    def color(self) -> int:
        """Its place in ``COLORS``."""
        return self.style % len(COLORS)

    @property
    def dashes(self) -> tuple[float, ...]:
        """On and off, in line widths; empty: an unbroken line."""
        return DASHES[self.style // len(COLORS) % len(DASHES)] if self.finished else UNFINISHED


@dataclass(frozen=True)
class Chart:
    """Curves with their intervals.

    Attributes:
        title, x_label, y_label: in words.
        series: at least one point each.
        limits: of the y that is shown.
        bounds: of the values that y may have; an interval ends there.
        ticks: of x, on a scale of doublings; empty: x is linear, from 0.
        shaded: a range of x.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limits: tuple[float, float]
    bounds: tuple[float, float] = (-math.inf, math.inf)
    ticks: tuple[int, ...] = ()
    shaded: tuple[float, float] | None = None

    def band(self, one: Series) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of the interval of ``one``; two empty arrays if there is none."""
        y = np.array(one.y[: len(one.half)])
        return np.clip(y - one.half, *self.bounds), np.clip(y + one.half, *self.bounds)

    def __call__(self, axes: Axes) -> None:
        """Draws it."""
        for one in self.series:
            style: Any = (0, one.dashes) if one.dashes else "-"
            marker = "o" if self.ticks or len(one.x) == 1 else None
            color = COLORS[one.color]
            axes.plot(one.x, one.y, ls=style, marker=marker, ms=3, lw=1.4, color=color, label=one.label)
            if one.half:
                edge: Any = {"linewidth": 0.6, "linestyle": ":"} if one.two else {"linewidth": 0}
                axes.fill_between(one.x, *self.band(one), color=color, alpha=0.2, **edge)
        if self.shaded:
            axes.axvspan(*self.shaded, color="#888888", alpha=0.15, linewidth=0)
        if self.ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.ticks, [str(tick) for tick in self.ticks])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_xlim(left=0)
        axes.set_title(self.title)
        axes.set(xlabel=self.x_label, ylabel=self.y_label, ylim=self.limits)
        axes.grid(alpha=0.25)
        if len(self.series) > len(COLORS):
            # More names than there is room for inside.
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            axes.legend(fontsize=8)


@dataclass(frozen=True, eq=False)
class Map:
    """A matrix as colours, which go by the square root.

    Attributes:
        title, part, row_label, column_label: in words; maps of one part belong together.
        values: 0 or more.
        rows, columns: what its lines are called.
        top: the value of the last colour.
        written: whether cells show their values (at most 16 a row fit); else 0, which is no small number,
            is grey.
        hidden: True where nothing could be, which is left blank; None: nowhere.
    """

    title: str
    part: str
    row_label: str
    column_label: str
    values: np.ndarray
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    top: float
    written: bool
    hidden: np.ndarray | None = None

    @property
    def zeros(self) -> np.ndarray:
        """Where a value could be and is exactly 0."""
        return (self.values == 0) & ~(
            np.zeros_like(self.values, bool) if self.hidden is None else self.hidden
        )

    def color(self, value: float) -> tuple[float, float, float]:
        """Red, green and blue, each in [0, 1]."""
        red, green, blue, _ = MAP(math.sqrt(min(1.0, value / self.top)))
        return red, green, blue

    def __call__(self, axes: Axes) -> AxesImage:
        """Draws it."""
        shown = self.values if self.written else np.ma.masked_equal(self.values, 0)
        norm = PowerNorm(0.5, 0, self.top)
        aspect: Any = "auto" if self.written else "equal"
        image = axes.imshow(shown, norm=norm, cmap=MAP, aspect=aspect, interpolation="nearest")
        if self.hidden is not None:
            blank: Any = np.ma.masked_where(~self.hidden, np.ones(self.values.shape))
            axes.imshow(blank, cmap=ListedColormap(["white"]), aspect=aspect, interpolation="nearest")
        for row, column in np.ndindex(self.values.shape) if self.written and len(self.columns) <= 16 else ():
            value = self.values[row, column]
            ink = on(self.color(value))
            axes.text(column, row, digits(value), ha="center", va="center", color=ink, fontsize=7)
        words: Any = {} if self.written else {"fontsize": 7}
        axes.set_xticks(range(len(self.columns)), self.columns, rotation=0 if self.written else 90, **words)
        axes.set_yticks(range(len(self.rows)), self.rows, **words)
        axes.tick_params(length=0)
        axes.set_title(f"{self.title}, {self.part}")
        axes.set(xlabel=self.column_label, ylabel=self.row_label)
        return image


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def luminance(color: Sequence[float]) -> float:
    """Relative luminance of an sRGB color, in [0, 1].

    Source: Web Content Accessibility Guidelines 2.2.
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def on(color: Sequence[float]) -> str:
    """ "black" or "white", whichever can be read on ``color``: their contrast is at least 4.5 to 1."""
    return "black" if luminance(color) > 0.179 else "white"


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
