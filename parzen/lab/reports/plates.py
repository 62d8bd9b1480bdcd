"""The figures of a report, as data: charts over tokens and lengths, maps of support and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parzen.kernels import KERNELS
from parzen.lab import statistics
from parzen.lab.reports import figures, page
from parzen.lab.reports.figures import Chart, Map, Series
from parzen.lab.reports.groups import Group, finite

# Of a sentence, on the axes of an attention map.
MOST_WORDS = 24


def style_of(name: str, groups: Sequence[Group]) -> int:
    """The same for a kernel in all charts; the rows of the table of kernels come first, in its order."""
    names = sorted({one.name for one in groups}, key=lambda n: ([*KERNELS, n].index(n), n))
    return names.index(name)


def _loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """Mean validation loss over training tokens and, for two seeds or more, its interval among the groups."""

    def chart(setting: str) -> Chart:
        series, tops, bottoms = [], [], []
        shown = [one for one in groups if one.setting == setting and all(run.curve for run in one.runs)]
        runs = [run for one in shown for run in one.runs]
        for one in shown:
            # An evaluation is at the same step for all; the tokens by then may differ from seed to seed.
            # A loss that is no number, of a run that diverged, is left out.
            estimates, places = [], []
            for i in range(min(len(run.curve) for run in one.runs)):
                scores = {
                    f"{other.name}, {other.finished}": {
                        run.seed: run.curve[i][1]
                        for run in other.runs
                        if i < len(run.curve) and finite(run.curve[i][1])
                    }
                    for other in shown
                }
                if len(scores[f"{one.name}, {one.finished}"]) == len(one.runs):
                    estimates.append(statistics.among(scores, f"{one.name}, {one.finished}"))
                    places.append(float(np.mean([r.curve[i][0] for r in runs if i < len(r.curve)])))
            if not estimates:
                continue
            x = tuple(places)
            y = tuple(e.mean for e in estimates)
            half = tuple(e.half() for e in estimates) if len(one.runs) > 1 else ()
            two = len(one.runs) == 2
            series.append(Series(one.name, x, y, half, style_of(one.name, groups), one.finished, two))
            # The first steps fall so far that nothing else could be seen.
            first = min(len(y) - 1, len(y) // 5)
            tops.append(y[first])
            # A band is shown to its end.
            ends = [at - wide for at, wide in zip(y, half, strict=True)][first:] if half else []
            bottoms.append(min([*y, *ends]))
        room = 0.06 * (max(tops, default=1) - min(bottoms, default=0)) or 0.1
        limits = min(bottoms, default=0) - room, max(tops, default=1) + room
        label = "validation loss (nats per token)"
        return Chart(setting, "training tokens", label, tuple(series), limits)

    found = [chart(setting) for setting in dict.fromkeys(one.setting for one in groups)]
    return [one for one in found if one.series]


# By source length: where results hold it, and what it is called.
BY_LENGTH = (("exact_match", "exact match"), ("token_accuracy", "token accuracy"))


def _length_charts(groups: Sequence[Group]) -> list[Chart]:
    """Exact match and token accuracy over source length: means over seeds and Student t intervals."""

    def chart(setting: str, key: str, label: str) -> Chart:
        series = []
        for one in groups:
            tables = [t for run in one.runs if isinstance(t := run.results.get(key), Mapping)]
            lengths = sorted({int(at) for table in tables for at in table if at.isdecimal()})
            found = {n: one.values(f"{key}.{n}") for n in lengths}
            estimates = {n: statistics.mean(v) for n, v in found.items() if len(v) == len(one.runs)}
            if one.setting == setting and estimates:
                y = tuple(e.mean for e in estimates.values())
                half = tuple(e.half() for e in estimates.values()) if len(one.runs) > 1 else ()
                style, two = style_of(one.name, groups), len(one.runs) == 2
                series.append(Series(one.name, tuple(estimates), y, half, style, two=two))
        task = tasks[setting]
        title = setting if task["name"] in setting else f"{task['name']}, {setting}"
        return Chart(
            f"{title}: {label}",
            "source length",
            label,
            tuple(series),
            limits=(-0.03, 1.03),
            bounds=(0, 1),
            ticks=tuple(sorted({int(x) for s in series for x in s.x})),
            shaded=(task["shortest"], task["longest"]),
        )

    tasks = {one.setting: task for one in groups if "shortest" in (task := one.config["task"])}
    charts = [chart(setting, *measure) for setting in tasks for measure in BY_LENGTH]
    return [one for one in charts if one.series]


def _matrices(one: Group, key: str) -> list[np.ndarray]:
    """What the runs hold at ``key`` as (layers, heads), where it is there and whole."""
    found = []
    for run in one.runs:
        try:
            matrix = np.array(run.results.get(key, []), dtype=float)
        except (TypeError, ValueError):
            continue
        if matrix.ndim == 2 and matrix.size and np.isfinite(matrix).all():
            found.append(matrix)
    return [matrix for matrix in found if matrix.shape == found[0].shape]


def _support_maps(groups: Sequence[Group]) -> list[Map]:
    """Mean number of keys with weight, over queries and seeds, by layer and head; one scale for all."""
    found = [(one, np.mean(m, axis=0)) for one in groups if (m := _matrices(one, "support"))]
    top = max((float(matrix.max()) for _, matrix in found), default=1.0) or 1.0
    maps = []
    for one, support in found:
        layers, heads = (tuple(str(i + 1) for i in range(n)) for n in support.shape)
        maps.append(Map(one.name, one.setting, "layer", "head", support, layers, heads, top, written=True))
    return maps


def _words(one: Group) -> tuple[list[str], np.ndarray] | None:
    """The sentence and its weights in each head of the last layer, of the first run that has them."""
    for run in one.runs:
        attention: Any = run.results.get("attention")
        try:
            words = [str(word) for word in attention["words"]]
            weights: np.ndarray = np.array(attention["layers"][-1], dtype=float)
        except (TypeError, ValueError, KeyError, IndexError):
            continue
        if words and weights.ndim == 3 and weights.shape[1:] == (len(words), len(words)):
            return words[:MOST_WORDS], weights[:, :MOST_WORDS, :MOST_WORDS]
    return None


def _visible(word: str) -> str:
    """A token as a short label: no space around it, no sign that cannot be printed."""
    printable = "".join(c if c.isprintable() else "·" for c in word.strip()) or "␣"
    return printable if len(printable) <= 14 else f"{printable[:13]}…"


def _attention_maps(groups: Sequence[Group]) -> list[Map]:
    """Who looks at whom: each head of the last layer, a part for each group."""
    maps = []
    for one in groups:
        if found := _words(one):
            shown = tuple(map(_visible, found[0]))
            # A memory holds what came before; the word itself and those after it are no keys.
            hidden = ~np.tri(len(shown), k=-1, dtype=bool)
            axes = ("looking", "looked at")
            maps += [
                Map(f"head {i}", f"{one.name}, {one.setting}", *axes, head, shown, shown, 1.0, False, hidden)
                for i, head in enumerate(found[1], 1)
            ]
    return maps


@dataclass(frozen=True)
class Plate:
    """A figure: panels of one kind, each of ``size`` inches in a file; ``html`` makes it part of a page."""

    title: str
    panels: Sequence[Chart] | Sequence[Map]
    size: tuple[float, float]
    caption: str
    html: Callable[[Any, str], str]


def plates_of(groups: Sequence[Group]) -> dict[str, Plate]:
    """The figures, by file name; those for which there is something to show."""
    drawn = {
        "length": Plate(
            "Results by length",
            _length_charts(groups),
            (4.6, 3.6),
            "Exact match and token accuracy by source length, the right target being read: the mean over "
            "seeds and its 95 % interval († from two seeds). Grey: the lengths of training.",
            page.charts,
        ),
        "loss": Plate(
            "Validation loss",
            _loss_charts(groups),
            (4.6, 3.6),
            "Validation loss while training: the mean over seeds. The band is its 95 % interval for "
            "comparing kernels, without what a seed does to all of them (Loftus and Masson); one seed has "
            f"none, and {figures.TWO} marks one from two seeds. The first steps are above the picture.",
            page.charts,
        ),
        "support": Plate(
            "Support",
            _support_maps(groups),
            (3.4, 2.4),
            "How many keys get a weight > 0, by layer and head: the mean over queries and seeds.",
            page.maps,
        ),
        "attention": Plate(
            "A sentence",
            _attention_maps(groups),
            (3.0, 3.0),
            "Weights on one sentence in every head of the last layer: how much the word of a row looks at "
            "that of a column, from nearly 0 (dark) to 1 (light). Grey is exactly 0, to the 4 digits kept; "
            "blank is what cannot be looked at, since it comes later.",
            page.maps,
        ),
    }
    return {name: plate for name, plate in drawn.items() if plate.panels}
