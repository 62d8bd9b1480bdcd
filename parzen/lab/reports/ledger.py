"""The ledger: every figure, table and claim of the paper, at its own scale and a small one, and what holds.

The list is this file; what was measured comes from the ``summary.json`` files below ``results/``. A claim
is a few numbers (a score, or how far one kernel is ahead of another) and the range that they must lie in:
it *holds* if all their intervals lie inside, *does not hold* if one lies outside, and otherwise we
*cannot tell*.

Source: *Sparse Attention as Compact Kernel Regression* (arXiv 2601.22766), sections 4 and 5.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parzen.attention import attention_weights
from parzen.lab import console, statistics
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.reports.groups import about, flat, setting_of
from parzen.lab.reports.page import NONE
from parzen.lab.run.folder import read_json
from parzen.lab.statistics import Estimate

HOLDS, FAILS, UNSURE, NOT_RUN = "holds", "**does not hold**", "cannot tell", "*not run*"

POLYNOMIALS = ("epanechnikov", "biweight", "triweight")
NEAREST = ("knn_gaussian", "knn_uniform")
MOSAICS = ("gaussian", *POLYNOMIALS, "relumax", "normrelu", *NEAREST)
BASELINES = ("transformer", "mamba", "retnet", "h3", "s4", "gla")

# What "alike" and "slightly" mean, in nats per token, in TVD or accuracy, and in exact match.
ALIKE, SLIGHTLY = 0.02, 0.05


# ---- what was measured ---------------------------------------------------------------------------


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


# ---- claims --------------------------------------------------------------------------------------


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
    """A row: what the paper says of ``where``, in our words, and how that is decided at ``scale``."""

    id: str
    where: str
    scale: str
    text: str
    decide: Callable[[Results], Outcome]


@dataclass(frozen=True)
class Table:
    """Numbers of a figure or table of the paper.

    Attributes:
        names: its rows.
        columns: a header, where the numbers are from, and which they are.
        published: what is known from elsewhere, by name, a column each.
    """

    where: str
    scale: str
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


def _over(names: Sequence[str], others: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    return tuple((name, other) for name in names for other in others if name != other)


def _alone(*names: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((name, None) for name in names)


# ---- Figure 1: the kernels, which need no training ------------------------------------------------


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


# ---- Figure 2: language modelling ----------------------------------------------------------------

# Below results/.
FOLDERS = {"tiny": "tiny/", "small": "", "paper": "paper/"}


def _stories(scale: str, layers: int) -> Place:
    name = f"{layers} layer{'s' if layers > 1 else ''}"
    return Place(name, f"{FOLDERS[scale]}stories", (("model.layers", layers),))


def _figure2(scale: str, layers: int) -> list[Claim]:
    place, where = _stories(scale, layers), "Figure 2"
    lead = Within(place, LOSS, _over(POLYNOMIALS, ("gaussian",)))
    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {}
    if layers < 12:
        rows["compact-over-gaussian"] = (
            "Epanechnikov, biweight and triweight end below the Gaussian",
            lead,
        )
        rows["compact-over-nearest"] = (
            "Epanechnikov, biweight and triweight end below both top-k kernels",
            Within(place, LOSS, _over(POLYNOMIALS, NEAREST)),
        )
    if 1 < layers < 12:
        rows["along"] = (
            "and they are ahead of the Gaussian and of top-k all along training",
            Within(place, ALONG, _over(POLYNOMIALS, ("gaussian", *NEAREST))),
        )
        rows["nearest-competitive"] = (
            "top-k Gaussian is competitive: behind the Gaussian by no more than what counts as alike",
            Within(place, LOSS, _over(("knn_gaussian",), ("gaussian",)), low=-ALIKE),
        )
        rows["nearest-unstable"] = (
            "but mildly unstable: its validation loss rises more between evaluations than the Gaussian's",
            Within(place, RISES, _over(("gaussian",), ("knn_gaussian",))),
        )
    rows["unit-mass-over-normrelu"] = (
        "sparsemax and the entmax family, whose bandwidth adapts, beat normReLU, whose bandwidth is fixed",
        Within(place, LOSS, _over(POLYNOMIALS, ("normrelu",))),
    )
    if layers > 1:
        rows["relumax-over-normrelu"] = (
            "ReLUmax beats normReLU",
            Within(place, LOSS, _over(("relumax",), ("normrelu",))),
        )
        rows["relumax-slightly-behind"] = (
            "ReLUmax is slightly behind the kernels with an adaptive bandwidth",
            Within(place, LOSS, _over(POLYNOMIALS, ("relumax",)), high=SLIGHTLY),
        )
    if layers == 12:
        rows["alike"] = (
            "all kernels but normReLU and uniform kNN end alike",
            Within(
                place,
                LOSS,
                _over((*POLYNOMIALS, "relumax", "knn_gaussian"), ("gaussian",)),
                low=-ALIKE,
                high=ALIKE,
            ),
        )
        rows["worse"] = (
            "normReLU and uniform kNN end worse than the Gaussian, by more than what counts as alike",
            Within(place, LOSS, _over(("gaussian",), ("normrelu", "knn_uniform")), low=ALIKE),
        )
        rows["gap-narrows"] = (
            "the lead of the rectified polynomials over the Gaussian is smaller than with 8 layers",
            Narrows(Within(_stories(scale, 8), LOSS, lead.pairs), lead),
        )
        if scale == "paper":
            rows["reference"] = (
                "the Gaussian mosaic reaches the published 1.498–1.501 nats",
                Within(place, LOSS, _alone("gaussian"), low=1.5 - ALIKE, high=1.5 + ALIKE),
            )
    return [Claim(f"figure2/{scale}/{layers}/{key}", where, scale, *row) for key, row in rows.items()]


# ---- Table 1: in-context language learning -------------------------------------------------------

SIZES = {"tiny": (64,), "small": (1000,), "paper": (1000, 2500, 5000, 10_000, 20_000, 40_000)}


def _regbench(scale: str, examples: int) -> Place:
    return Place(f"n = {examples:,}", f"{FOLDERS[scale]}regbench", (("task.examples", examples),))


def _table1(scale: str, examples: int) -> list[Claim]:
    place = _regbench(scale, examples)

    def both(pairs: tuple[tuple[str, str | None], ...], low: float, high: float = math.inf) -> All:
        return All((Within(place, TVD, pairs, low, high), Within(place, ACCURACY, pairs, low, high)))

    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {}
    if examples <= 5000:
        rows["polynomials-match"] = (
            "with little data the rectified polynomials match or beat the Gaussian in accuracy and TVD",
            both(_over(POLYNOMIALS, ("gaussian",)), low=-ALIKE),
        )
    else:
        rows["around-95"] = (
            "with more data all compact kernels with adaptive support reach an accuracy of about 95 %",
            Within(place, ACCURACY, _alone(*POLYNOMIALS, "relumax"), low=0.95 - ALIKE, high=0.95 + ALIKE),
        )
        rows["alike"] = (
            "and end alike in TVD",
            Within(place, TVD, _over((*POLYNOMIALS, "relumax"), ("gaussian",)), low=-ALIKE, high=ALIKE),
        )
    rows["sparsemax-best"] = (
        "sparsemax is the best of the Epanechnikov family",
        Within(place, TVD, _over(("epanechnikov",), ("relumax", "normrelu"))),
    )
    rows["relumax-next"] = (
        "ReLUmax follows it closely",
        Within(place, TVD, _over(("epanechnikov",), ("relumax",)), low=-SLIGHTLY, high=SLIGHTLY),
    )
    rows["normrelu-worse"] = (
        "normReLU is clearly worse than sparsemax and ReLUmax in accuracy and TVD",
        both(_over(("epanechnikov", "relumax"), ("normrelu",)), low=ALIKE),
    )
    rows["uniform-worst"] = (
        "top-k uniform is behind every other mosaic",
        Within(place, TVD, _over([m for m in MOSAICS if m != "knn_uniform"], ("knn_uniform",))),
    )
    if examples == 40_000:
        pairs = _over(POLYNOMIALS, ("gaussian",))
        rows["scarce-data"] = (
            "compact kernels help most where data is scarce: their lead over the Gaussian is larger at 1,000",
            Narrows(Within(_regbench(scale, 1000), TVD, pairs), Within(place, TVD, pairs)),
        )
    return [Claim(f"table1/{scale}/{examples}/{key}", "Table 1", scale, *row) for key, row in rows.items()]


# ---- Table 2: length generalisation --------------------------------------------------------------

# Test lengths; the first is in distribution.
LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {"sort": (3, 6), "reverse": (3, 6), "mqmtar": (8, 16)},
    "small": dict.fromkeys(("sort", "reverse", "mqmtar"), (16, 32, 64, 128)),
    "paper": {
        "sort": tuple(64 * 2**i for i in range(7)),
        "reverse": (64, 96, 128, 256, 512),
        "mqmtar": tuple(64 * 2**i for i in range(11)),
    },
}


def _length(scale: str, task: str) -> Place:
    return Place(task, f"{FOLDERS[scale]}length/{task}", (("model.kind", "mosaic"),))


def _table2(scale: str, task: str, lengths: tuple[int, ...]) -> list[Claim]:
    place = _length(scale, task)
    inside, beyond, far = exact(lengths[0]), exact(*lengths[1:]), exact(lengths[-1])
    adaptive = ("epanechnikov", "relumax")
    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {
        "gaussian-in-distribution": (
            "the Gaussian solves the task in distribution",
            Within(place, inside, _alone("gaussian"), low=0.95),
        ),
        "gaussian-collapses": (
            "and fails at the greatest length",
            Within(place, far, _alone("gaussian"), low=-1.0, high=0.1),
        ),
        "uniform-fails": (
            "top-k uniform does not extrapolate",
            Within(place, beyond, _alone("knn_uniform"), low=-1.0, high=0.1),
        ),
        "nearest-between": (
            "top-k Gaussian loses less than the Gaussian beyond the training length",
            Within(place, beyond, _over(("knn_gaussian",), ("gaussian",))),
        ),
        "nearest-poor": (
            "but is poor at the greatest length",
            Within(place, far, _alone("knn_gaussian"), low=-1.0, high=0.5),
        ),
        "sparse-in-distribution": (
            "sparsemax and ReLUmax are perfect in distribution",
            Within(place, inside, _alone(*adaptive), low=0.99),
        ),
        "sparse-extrapolate": (
            "and extrapolate better than the Gaussian and both top-k kernels",
            Within(place, beyond, _over(adaptive, ("gaussian", *NEAREST))),
        ),
        "sparsemax-over-relumax": (
            "sparsemax extrapolates better than ReLUmax",
            Within(place, beyond, _over(("epanechnikov",), ("relumax",))),
        ),
        "relumax-over-normrelu": (
            "ReLUmax extrapolates better than normReLU",
            Within(place, beyond, _over(("relumax",), ("normrelu",))),
        ),
    }
    if task == "mqmtar":
        rows["polynomials-lead"] = (
            "biweight and triweight extrapolate better than the Gaussian and both top-k kernels",
            Within(place, beyond, _over(("biweight", "triweight"), ("gaussian", *NEAREST))),
        )
    if task == "reverse":
        rows["triweight-leads"] = (
            "triweight extrapolates best",
            Within(place, beyond, _over(("triweight",), [m for m in MOSAICS if m != "triweight"])),
        )
    return [Claim(f"table2/{scale}/{task}/{key}", "Table 2", scale, *row) for key, row in rows.items()]


# ---- the list ------------------------------------------------------------------------------------

DEPTHS = {"tiny": (1,), "small": (1, 4, 8, 12), "paper": (1, 8, 12)}
SCALES = ("exact", "small", "paper")


def claims(*scales: str) -> tuple[Claim, ...]:
    """All of some scales, in the order of the paper; Figure 1, which needs no runs, is at "exact"."""
    learned = [scale for scale in scales if scale in DEPTHS]
    exact = FORMULAS.items() if "exact" in scales else ()
    return (
        *(Claim(f"figure1/{k}", "Figure 1", "exact", text, Identity(k)) for k, (text, _) in exact),
        *(c for scale in learned for layers in DEPTHS[scale] for c in _figure2(scale, layers)),
        *(c for scale in learned for n in SIZES[scale] for c in _table1(scale, n)),
        *(
            c
            for scale in learned
            for task, lengths in LENGTHS[scale].items()
            for c in _table2(scale, task, lengths)
        ),
    )


CLAIMS = claims(*SCALES)

# Accuracy / TVD, read off the figures of the works that the paper builds on.
PUBLISHED = {
    "gaussian": (".934 / .215", ".941 / .185", "", "", "", ".960 / .122"),
    "transformer": (".546 / .626", ".926 / .208", ".941 / .175", ".950 / .155", ".956 / .139", ".958 / .127"),
    "mamba": (".695 / .511", ".845 / .370", ".894 / .301", ".911 / .278", ".921 / .259", ".918 / .264"),
    "retnet": (".503 / .664", ".800 / .392", ".838 / .305", ".881 / .264", ".911 / .214", ".919 / .212"),
    "h3": (".530 / .627", ".651 / .524", ".709 / .474", ".764 / .415", ".795 / .375", ".835 / .333"),
    "s4": (".528 / .627", ".533 / .615", ".535 / .594", ".635 / .528", ".742 / .438", ".788 / .402"),
    "gla": (".518 / .652", ".521 / .618", "", "", "", ".927 / .186"),
}

TABLES: tuple[Table, ...] = (
    *(
        Table(
            "Figure 2",
            scale,
            "Validation loss in nats per token, by depth.",
            MOSAICS,
            tuple((_stories(scale, n).name, _stories(scale, n), (LOSS,)) for n in DEPTHS[scale]),
        )
        for scale in DEPTHS
    ),
    *(
        Table(
            "Table 1",
            scale,
            "Accuracy at the last position / TVD, by training examples (in brackets: published elsewhere).",
            (*MOSAICS, *BASELINES),
            tuple((_regbench(scale, n).name, _regbench(scale, n), (ACCURACY, TVD)) for n in SIZES[scale]),
            PUBLISHED,
        )
        for scale in DEPTHS
    ),
    *(
        Table(
            "Table 2",
            scale,
            f"Exact match on {task}, by source length; the first is in distribution.",
            MOSAICS,
            tuple((str(n), _length(scale, task), (exact(n),)) for n in lengths),
        )
        for scale in DEPTHS
        for task, lengths in LENGTHS[scale].items()
    ),
)


# ---- the document --------------------------------------------------------------------------------

TITLES = {
    "Figure 1": "kernels and attention maps are the same thing",
    "Figure 2": "language modelling on stories",
    "Table 1": "in-context language learning (RegBench)",
    "Table 2": "length generalisation",
}

HEAD = f"""# Results: what of the paper holds

Every figure, table and claim of *Sparse Attention as Compact Kernel Regression* (arXiv 2601.22766), at the
paper's scale and at a *small* one that two CPU cores can run. `parzen report --ledger` writes this file from
the list in `parzen/lab/reports/` and the `summary.json` files below `results/`; nothing in it is typed.

A mean is given ± half its 95 % Student t interval over seeds; without ±, there is one seed. Claims compare
kernels at equal settings, seed by seed, on the same batches; the scatter of a difference of losses or TVDs is
pooled over all kernels of the setting. A claim *holds* if the intervals of all its numbers lie in the range
given, *does not hold* if one lies outside (Bonferroni-corrected for their number), and else we *cannot tell*:
the intervals overlap, or there is one seed. The result shown is the number with the least room. What counts
as alike is ±{ALIKE:g}, as slightly {SLIGHTLY:g} (nats per token, TVD, or accuracy).
"""


def ledger(results: Results, chosen: Sequence[Claim] = CLAIMS, head: str = HEAD) -> str:
    """Everything about the ``chosen`` claims as Markdown: how many hold, the tables they are about, each."""
    outcomes = {claim.id: claim.decide(results) for claim in chosen}
    places = list(dict.fromkeys((claim.where, claim.scale) for claim in chosen))
    verdicts = (HOLDS, FAILS, UNSURE, NOT_RUN)
    overview, sections = [], []
    for where, scale in places:
        claims = [claim for claim in chosen if (claim.where, claim.scale) == (where, scale)]
        count = Counter(outcomes[claim.id].verdict for claim in claims)
        overview.append([where, scale, *(str(count[verdict]) for verdict in verdicts)])
        tables = [t.render(results) for t in TABLES if (t.where, t.scale) == (where, scale)]
        rows = [
            [
                f"`{claim.id}`",
                claim.text,
                str(claim.decide),
                outcomes[claim.id].result or NONE,
                outcomes[claim.id].verdict,
            ]
            for claim in claims
        ]
        title = f"## {where}, {scale}: {TITLES[where]}\n"
        listed = console.markdown_table(["row", "claim", "decided by", "result", "verdict"], rows)
        sections.append("\n".join([title, *tables, listed]))
    table = console.markdown_table(["where", "scale", *verdicts], overview)
    return "\n".join([head, table, *sections])


def write(results: Path = Path("results"), to: Path = Path("docs/results.md")) -> None:
    """Writes the ledger of the summaries below ``results``.

    Raises:
        UserError: a damaged summary, or a file that cannot be written.
    """
    write_whole(to, ledger(Results(results)).encode())
