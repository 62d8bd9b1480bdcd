"""Claims: a few numbers (a score, or how far one kernel is ahead of another) and their range.

A claim *holds* if all their intervals lie inside, *does not hold* if one lies outside, and otherwise we
*cannot tell*. The numbers are read from the ``summary.json`` files that reports write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parzen.lab import console, statistics
from parzen.lab.errors import UserError
from parzen.lab.run.config import about, flat, setting_of
from parzen.lab.run.folder import read_json
from parzen.lab.statistics import Estimate

HOLDS, FAILS, UNSURE, NOT_RUN = "holds", "**does not hold**", "cannot tell", "*not run*"

POLYNOMIALS = ("epanechnikov", "biweight", "triweight")
NEAREST = ("knn_gaussian", "knn_uniform")
MOSAICS = ("gaussian", *POLYNOMIALS, "relumax", "normrelu", *NEAREST)

# What "alike" and "slightly" mean, in nats per token, in TVD or accuracy, and in exact match.
ALIKE, SLIGHTLY = 0.02, 0.05


@dataclass(frozen=True)
class Place:
    """Where the numbers of a claim come from.

    Attributes:
        name: in words.
        folder: below ``results``.
        having: what the config holds, by flat key.
    """

    name: str
    folder: str
    having: tuple[tuple[str, Any], ...] = ()


class Results:
    """All ``summary.json`` files below ``root``.

    Raises:
        UserError: one is damaged.
    """

    def __init__(self, root: Path) -> None:
        self.groups: list[tuple[str, dict[str, Any]]] = []
        for path in sorted(root.rglob("summary.json")):
            data = read_json(path)
            if not isinstance(data, dict) or not isinstance(data.get("groups"), list):
                raise UserError(f"{path} is damaged: it holds no list of groups; write the report again")
            folder = f"{path.parent.relative_to(root).as_posix()}/"
            self.groups += [(folder, group) for group in data["groups"]]

    def settings(self, place: Place, measure: Measure) -> list[dict[str, dict[int, float]]]:
        """``measure`` by name and seed, for each setting at ``place``: those with the most names first."""
        found: dict[str, dict[str, dict[int, float]]] = {}
        for folder, group in self.groups:
            config = dict(flat(group["config"]))
            here = folder.startswith(f"{place.folder}/")
            if not here or any(config.get(key) != value for key, value in place.having):
                continue
            values = {run["seed"]: measure.of(run) for run in group["runs"]}
            known = {seed: value for seed, value in values.items() if value is not None}
            if known:
                key = json.dumps([setting_of(group["config"]), about(group["tokens"])])
                found.setdefault(key, {}).setdefault(group["name"], {}).update(known)
        return sorted(found.values(), key=lambda names: (-len(names), -sum(map(len, names.values()))))

    def scores(self, place: Place, measure: Measure) -> dict[str, dict[int, float]]:
        """Of the largest setting: numbers of different ones are never compared."""
        return next(iter(self.settings(place, measure)), {})

    def estimate(self, place: Place, measure: Measure, name: str) -> Estimate | None:
        """The mean over seeds of ``name``, in the largest setting that has it."""
        found = (names[name] for names in self.settings(place, measure) if name in names)
        values = next(found, None)
        return statistics.mean([*values.values()]) if values else None


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    Attributes:
        name: in words.
        of: reads it from a run of a summary; None if it is not there.
        better: +1 if more is better, −1 if less.
        pooled: whether kernels scatter alike, so that the scatter of a difference is taken from all.
    """

    name: str
    of: Callable[[Mapping[str, Any]], float | None]
    better: int = -1
    pooled: bool = True


def _metric(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda run: run["metrics"].get(key)


def _along(run: Mapping[str, Any]) -> float | None:
    return float(np.mean([loss for _, loss in run["curve"]])) if run["curve"] else None


def _rises(run: Mapping[str, Any]) -> float | None:
    losses = [loss for _, loss in run["curve"]]
    return float(np.clip(np.diff(losses), 0, None).sum()) if len(losses) > 1 else None


LOSS = Measure("validation loss", _metric("loss"))
ALONG = Measure("mean validation loss over all evaluations", _along)
RISES = Measure("sum of all rises of the validation loss from one evaluation to the next", _rises)
TVD = Measure("TVD", _metric("tvd"))
ACCURACY = Measure("accuracy at the last position", _metric("accuracy_last"), better=1)


def exact(*lengths: int) -> Measure:
    """Exact match, in [0, 1], mean over ``lengths``; results.json holds it by length."""

    def of(run: Mapping[str, Any]) -> float | None:
        values = [run["metrics"].get(f"exact_match.{length}") for length in lengths]
        return None if None in values else float(np.mean(values))

    where = f"length {lengths[0]}" if len(lengths) == 1 else f"lengths {lengths[0]} … {lengths[-1]} (mean)"
    # A kernel that is always right does not scatter like one that sometimes fails.
    return Measure(f"exact match at {where}", of, better=1, pooled=False)


@dataclass(frozen=True)
class Outcome:
    """A verdict, and the number that it hangs on."""

    verdict: str
    result: str = ""


@dataclass(frozen=True)
class Within:
    """All of some numbers lie in [low, high].

    A number is how far the first of a pair is ahead of the second, > 0 if it is better, or the value
    itself where there is no second.
    """

    place: Place
    measure: Measure
    pairs: tuple[tuple[str, str | None], ...]
    low: float = 0.0
    high: float = math.inf

    def __str__(self) -> str:
        who = dict.fromkeys(a for a, _ in self.pairs)
        whom = dict.fromkeys(b for _, b in self.pairs if b)
        over = f" over {', '.join(whom)}" if whom else ""
        most = "" if self.high == math.inf else f" and ≤ {self.high:g}"
        least = "> 0" if self.low == 0 and whom else f"≥ {self.low:g}"
        return f"{self.measure.name}, {self.place.name}: {', '.join(who)}{over} {least}{most}"

    def estimates(self, results: Results) -> dict[str, Estimate] | None:
        """The numbers by what they are; None if one of them was not measured."""
        scores = results.scores(self.place, self.measure)
        found = {}
        for a, b in self.pairs:
            if a not in scores or (b and not scores.get(b, {}).keys() & scores[a].keys()):
                return None
            if b is None:
                found[a] = statistics.mean([*scores[a].values()])
            else:
                first, second = (a, b) if self.measure.better > 0 else (b, a)
                found[f"{a} over {b}"] = statistics.difference(scores, first, second, self.measure.pooled)
        return found

    def __call__(self, results: Results) -> Outcome:
        """The verdict, with the number that has the least room."""
        estimates = self.estimates(results)
        return Outcome(NOT_RUN) if estimates is None else judge(estimates, self.low, self.high)


def judge(estimates: Mapping[str, Estimate], low: float, high: float) -> Outcome:
    """Whether all ``estimates`` lie in [low, high].

    That all do needs no correction for their number; that one does not, out of many, does: Bonferroni's.
    """
    strict = 1 - 0.05 / len(estimates)
    bounds = {name: (e.mean - e.half(), e.mean + e.half()) for name, e in estimates.items()}
    outer = [(e.mean - e.half(strict), e.mean + e.half(strict)) for e in estimates.values()]
    if all(low < a and b < high for a, b in bounds.values()):
        verdict = HOLDS
    elif any(b <= low or a >= high for a, b in outer):
        verdict = FAILS
    else:
        verdict = UNSURE
    name = min(bounds, key=lambda n: min(estimates[n].mean - low, high - estimates[n].mean))
    one = "" if all(e.freedom for e in estimates.values()) else " (one seed)"
    return Outcome(verdict, f"{name}: {estimates[name].show()}{one}")


@dataclass(frozen=True)
class Narrows:
    """The mean lead of some kernels at ``wide`` is larger than at ``narrow``."""

    wide: Within
    narrow: Within

    def __str__(self) -> str:
        return f"({self.wide}) minus the same at {self.narrow.place.name} > 0"

    def __call__(self, results: Results) -> Outcome:
        """The verdict, on the least of the differences."""
        wide, narrow = self.wide.estimates(results), self.narrow.estimates(results)
        if wide is None or narrow is None:
            return Outcome(NOT_RUN)
        return judge({name: wide[name] - narrow[name] for name in wide}, 0, math.inf)


@dataclass(frozen=True)
class All:
    """Several conditions that hold together."""

    parts: tuple[Within, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts))

    def __call__(self, results: Results) -> Outcome:
        """The worst verdict among the parts."""
        outcomes = [part(results) for part in self.parts]
        for verdict in (NOT_RUN, FAILS, UNSURE):
            for outcome in outcomes:
                if outcome.verdict == verdict:
                    return outcome
        return outcomes[0]


@dataclass(frozen=True)
class Claim:
    """What the paper says of ``where``, in our words, and how that is decided at ``scale``.

    Attributes:
        folder: of the report that it is shown in, below the scale's; empty: of none.
    """

    id: str
    where: str
    scale: str
    text: str
    decide: Callable[[Results], Outcome]
    folder: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers of a figure or table of the paper.

    Attributes:
        names: its rows.
        columns: a header, where the numbers are from, and which they are.
        published: what is known from elsewhere, by name, a column each.
    """

    caption: str
    names: tuple[str, ...]
    columns: tuple[tuple[str, Place, tuple[Measure, ...]], ...]
    published: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def render(self, results: Results) -> str:
        """As Markdown; a cell that nothing was measured for says so."""
        rows = []
        for name in self.names:
            row = [f"`{name}`"]
            for i, (_, place, measures) in enumerate(self.columns):
                found = [results.estimate(place, measure, name) for measure in measures]
                cell = " / ".join(e.show() for e in found if e) if any(found) else NOT_RUN
                known = self.published.get(name, ())
                row.append(f"{cell} ({known[i]})" if i < len(known) and known[i] else cell)
            rows.append(row)
        return f"{self.caption}\n\n{console.markdown_table(['', *(c[0] for c in self.columns)], rows)}"


def over(names: Sequence[str], others: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    return tuple((name, other) for name in names for other in others if name != other)


def alone(*names: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((name, None) for name in names)
