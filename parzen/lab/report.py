"""``parzen report``: what runs found, as tables, figures and one page. It reads run folders, nothing else.

Runs that differ in nothing but the seed are a *group*; groups that differ in nothing but the kernel (or
mixer) share a *setting* and a panel. The same folders give the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from parzen.kernels import KERNELS
from parzen.lab import console, figures, page, statistics
from parzen.lab.errors import UserError
from parzen.lab.figures import Chart, Map, Series
from parzen.lab.files import write_whole
from parzen.lab.page import NONE, Cell, Section
from parzen.lab.runs import Run, read_json

if TYPE_CHECKING:
    from parzen.lab.ledger import Claim, Outcome

Claims: TypeAlias = "Sequence[tuple[Claim, Outcome]]"
# Of a sentence, on the axes of an attention map.
MOST_WORDS = 24


# ---- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A run as it was read; ``results`` is empty until it is finished."""

    name: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    speed: float | None
    results: Mapping[str, Any]
    environment: Mapping[str, Any]

    def numbers(self, key: str) -> list[float]:
        """The finite number that the results hold at ``key`` ("a.b" where objects are nested), or nothing."""
        value: Any = self.results
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return [float(value)] if _finite(value) else []


@dataclass(frozen=True, eq=False)
class Group:
    """Finished runs that differ in their seed only, or unfinished ones.

    Attributes:
        name: kernel or mixer, and what else tells it from others of its setting.
        setting: what its panel is called.
        layers: of the model.
        config: of its runs, without the seed.
        finished: whether its runs are.
        tokens: trained on by each of them, if that is known.
        runs: in order of seeds.
    """

    name: str
    setting: str
    layers: int
    config: Mapping[str, Any]
    finished: bool
    tokens: int | None
    runs: tuple[Record, ...]

    def values(self, key: str) -> list[float]:
        """The numbers that the results hold at ``key``, one of each run that has it."""
        return [value for run in self.runs for value in run.numbers(key)]

    def estimate(self, key: str) -> statistics.Estimate | None:
        """Their mean over seeds; None if no run has it."""
        values = self.values(key)
        return statistics.mean(values) if values else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _record(run: Run) -> Record:
    try:
        curve = tuple((line["tokens"], line["loss"]) for line in run.metrics())
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.folder / 'metrics.jsonl'} is damaged ({error!r})") from error
    results = run.results() if run.finished else {}
    environment = read_json(run.folder / "environment.json")
    for file, value in (("results.json", results), ("environment.json", environment)):
        if not isinstance(value, dict):
            raise UserError(f"{run.folder / file} is damaged: it holds no JSON object")
    return Record(run.folder.name, run.config.seed, curve, run.speed, results, environment)


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) for every value that is no mapping."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _count(number: int | None) -> str:
    return NONE if number is None else f"{number:,}"


def about(tokens: int | None) -> float | None:
    """Two digits: batches of whole instances hold some tokens more with one seed than with another."""
    return None if tokens is None else float(f"{tokens:.2g}")


# What the name of a group says, so that groups that differ in it can be compared.
NAMED = ("model.kernel", "model.mixer", "model.bandwidth")


def setting_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What groups that are compared with one another have in common, by flat key."""
    return {k: v for k, v in flat(config) if k not in NAMED}


def _varying(maps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all ``maps``."""
    keys = dict.fromkeys(key for one in maps for key in one)
    return [key for key in keys if len({json.dumps(one.get(key, "")) for one in maps}) > 1]


def _telling(maps: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Those of ``keys`` whose values tell ``maps`` apart, each some that those before it did not."""
    told, said = [], [""] * len(maps)
    for key in keys:
        more = [text + json.dumps(one.get(key, "")) for text, one in zip(said, maps, strict=True)]
        if len(set(more)) > len(set(said)):
            told.append(key)
            said = more
    return told


def _kind(setting: Mapping[str, Any]) -> Any:
    return setting.get("model.kind")


def _task(setting: Mapping[str, Any]) -> str:
    return " ".join(str(setting[key]) for key in ("task.kind", "task.name") if key in setting)


def _titles(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each is called: its layers, its task if there are several, and what tells it from others of it.

    Kinds of models differ by the names of their groups.
    """
    keys = dict.fromkeys(key for one in settings for key in one)
    of_models = [key for key in keys if key.startswith("model.") and key != "model.layers"]
    others = [key for key in keys if not key.startswith("model.")]
    titles = []
    for one in settings:
        alike = [other for other in settings if _task(other) == _task(one)]
        kin = [other for other in alike if _kind(other) == _kind(one)]
        layers = one["model.layers"]
        parts = [f"{layers} layer{'s' if layers > 1 else ''}"]
        if len(alike) < len(settings):
            parts.append(_task(one))
        differ = _telling(kin, of_models) + _telling(alike, others)
        parts += [f"{key.partition('.')[2]} = {one[key]}" for key in differ if key in one]
        titles.append(", ".join(parts))
    return titles


def group(runs: Sequence[Run]) -> list[Group]:
    """The groups of ``runs``, setting by setting, the lowest TVD or loss first and unfinished ones last.

    Runs that were finished after different numbers of tokens, to two digits, are different groups.

    Raises:
        UserError: a folder holds something else than a run writes.
    """
    found: dict[str, tuple[dict[str, Any], bool, int | None, list[Record]]] = {}
    names = {}
    for run in runs:
        config, record = run.config.to_json(), _record(run)
        del config["seed"]
        names[json.dumps(config)] = run.config.name
        tokens = record.curve[-1][0] if record.curve else None
        # How far an unfinished run has come may differ from seed to seed.
        key = (config, run.finished, about(tokens) if run.finished else None)
        records = found.setdefault(json.dumps(key), (config, run.finished, tokens, []))[-1]
        # The same folder may be named twice.
        if all(record.seed != other.seed for other in records):
            records.append(record)
    settings = [setting_of(config) for config, *_ in found.values()]
    groups = []
    for title, (config, finished, tokens, records) in zip(_titles(settings), found.values(), strict=True):
        layers = config["model"]["layers"]
        others = {about(other[2]) for other in found.values() if finished and other[1] and other[0] == config}
        name = names[json.dumps(config)] + (f" ({_count(tokens)} tokens)" if len(others) > 1 else "")
        ordered = tuple(sorted(records, key=lambda record: record.seed))
        groups.append(Group(name, title, layers, config, finished, tokens, ordered))

    def order(one: Group) -> tuple[Any, ...]:
        # Where accuracies saturate early the distance decides.
        found = one.estimate("tvd") or one.estimate("loss")
        return one.layers, one.setting, not one.finished, found.mean if found else math.inf, one.name

    return sorted(groups, key=order)


# ---- tables --------------------------------------------------------------------------------------

# What results may hold, how its column is called, and how it is shown; the first two are always there.
MEASURES: tuple[tuple[str, str, str], ...] = (
    ("loss", "validation loss", ".3f"),
    ("share_of_keys", "share of keys", ".1%"),
    ("accuracy_all", "accuracy", ".3f"),
    ("accuracy_last", "accuracy, last", ".3f"),
    ("tvd", "TVD", ".3f"),
)


DIFFERENCE = "loss − gaussian"


def _columns(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """What is measured: those of ``MEASURES`` that are there, and exact match at each length."""
    tables = [run.results.get("exact_match") for one in groups for run in one.runs]
    lengths = {int(at) for table in tables if isinstance(table, Mapping) for at in table if at.isdecimal()}
    exact = [(f"exact_match.{at}", f"exact match, {at:,}", ".3f") for at in sorted(lengths)]
    return [m for i, m in enumerate(MEASURES) if i < 2 or any(g.values(m[0]) for g in groups)] + exact


def against(one: Group, groups: Sequence[Group], other: str = "gaussian") -> statistics.Estimate | None:
    """The loss of ``one`` minus that of ``other`` in its setting, seed by seed; None if there is no such."""

    def alike(g: Group) -> tuple[Any, ...]:
        return g.setting, _kind(dict(flat(g.config))), about(g.tokens)

    peers = [g for g in groups if g.finished and alike(g) == alike(one)]
    scores = {g.name: {run.seed: value for run in g.runs for value in run.numbers("loss")} for g in peers}
    if one.name == other or not scores.get(one.name, {}).keys() & scores.get(other, {}).keys():
        return None
    return statistics.difference(scores, one.name, other)


def _shown(estimate: statistics.Estimate | None, form: str) -> str:
    if estimate is None:
        return NONE
    spread = f" ± {estimate.half():{form.lstrip('+')}}" if estimate.freedom else ""
    return f"{estimate.mean:{form}}{spread}".replace("-", "−")


def _baselines(groups: Sequence[Group]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(name, setting, measures) of what needs no model, as the first run of each setting holds it."""
    for setting in dict.fromkeys(one.setting for one in groups):
        runs = (run for one in groups if one.setting == setting for run in one.runs)
        found = next((b for run in runs if isinstance(b := run.results.get("baselines"), Mapping)), {})
        for name, measures in found.items():
            yield name, setting, measures if isinstance(measures, Mapping) else {"loss": measures}


def _table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows; a group that is unfinished says so in place of its tokens."""
    columns = _columns(groups)
    headers = [
        "kernel",
        "setting",
        *(c[1] for c in columns),
        DIFFERENCE,
        "tokens",
        "tokens/s",
        "seeds",
    ]
    rows = [
        [
            name,
            setting,
            *(f"{v:{form}}" if _finite(v := measures.get(key)) else NONE for key, _, form in columns),
            *(NONE,) * 4,
        ]
        for name, setting, measures in _baselines(groups)
    ]
    for one in groups:
        speeds = [run.speed for run in one.runs if run.speed]
        rows.append(
            [
                one.name,
                one.setting,
                *(_shown(one.estimate(key), form) for key, _, form in columns),
                _shown(against(one, groups), "+.3f"),
                _count(one.tokens) if one.finished else "unfinished",
                f"{sum(speeds) / len(speeds):,.0f}" if speeds else NONE,
                str(len(one.runs)),
            ]
        )
    return headers, rows


def notes(groups: Sequence[Group]) -> list[str]:
    """What a reader of the table must know, in sentences."""
    said = []
    done = [one for one in groups if one.finished]
    if not done:
        said.append("No run is finished: there are curves only.")
    if any(len(one.runs) > 1 for one in done):
        said.append(
            "± is half a 95 % Student t interval over seeds. A difference is taken seed by seed, on the same "
            "batches, with the scatter pooled over all kernels of its setting."
        )
    if any(len(one.runs) == 1 for one in done):
        said.append("A row of one seed has no interval: small differences from it mean nothing.")
    if unfinished := sum(len(one.runs) for one in groups if not one.finished):
        said.append(f"{unfinished} run{'s are' if unfinished > 1 else ' is'} unfinished (dashed curves).")
    for setting in dict.fromkeys(one.setting for one in done):
        tokens = {about(one.tokens) for one in done if one.setting == setting}
        if len(tokens) > 1:
            said.append(f"{setting}: not all rows are trained on the same number of tokens.")
    return said


def markdown(groups: Sequence[Group]) -> str:
    """The table and its notes as Markdown."""
    headers, rows = _table(groups)
    escaped = [[re.sub(r"([|<&*_`\\])", r"\\\1", cell) for cell in row] for row in rows]
    return console.markdown_table(headers, escaped) + "".join(f"\n{note}\n" for note in notes(groups))


def to_csv(groups: Sequence[Group]) -> str:
    """Numbers in full, each with half its interval (empty: none)."""
    columns = _columns(groups)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [*(key for key, _, _ in columns), "loss_minus_gaussian"]
    names = [name for key in keys for name in (key, f"{key}_interval")]
    writer.writerow(["kernel", "setting", "layers", *names, "tokens", "seeds", "finished"])
    for one in groups:
        numbers: list[object] = []
        for estimate in (*(one.estimate(key) for key, _, _ in columns), against(one, groups)):
            numbers += [estimate.mean if estimate else ""]
            numbers += [estimate.half() if estimate and estimate.freedom else ""]
        numbers += ["" if one.tokens is None else one.tokens, len(one.runs), one.finished]
        writer.writerow([one.name, one.setting, one.layers, *numbers])
    return out.getvalue()


_LATEX = {c: rf"\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    NONE: "---",
}


def latex(groups: Sequence[Group]) -> str:
    """The table for a document that uses booktabs."""
    headers, rows = _table(groups)
    escaped = [["".join(_LATEX.get(c, c) for c in cell) for cell in row] for row in [headers, *rows]]
    lines = [" & ".join(row) + r" \\" for row in escaped]
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{ll{'r' * (len(headers) - 2)}}}\n{body}\n\\end{{tabular}}\n"


def summary(groups: Sequence[Group]) -> str:
    """``summary.json``: the small record of a report that is kept under version control.

    {"groups": [{"name", "layers", "config", "tokens", "runs": [{"run", "seed", "curve": [[tokens, loss], …],
    "metrics": {every number of results.json, lists left out; "a.b" where objects are nested},
    "environment": {…}}]}]}; a group a line, finished ones only.
    """
    lines = []
    for one in groups:
        if not one.finished:
            continue
        runs = [
            {
                "run": run.name,
                "seed": run.seed,
                "metrics": {k: v for k, v in flat(run.results) if _finite(v)},
                "curve": run.curve,
                "environment": {**run.environment, "command": _command(str(run.environment.get("command")))},
            }
            for run in one.runs
        ]
        entry = {"name": one.name, "layers": one.layers, "config": one.config, "tokens": one.tokens}
        lines.append(json.dumps({**entry, "runs": runs}, ensure_ascii=False))
    return '{"groups": [\n' + ",\n".join(lines) + "\n]}\n"


# ---- figures -------------------------------------------------------------------------------------


def _style(name: str, groups: Sequence[Group]) -> int:
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
                        if i < len(run.curve) and _finite(run.curve[i][1])
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
            series.append(Series(one.name, x, y, half, _style(one.name, groups), one.finished))
            # The first steps fall so far that nothing else could be seen.
            tops.append(y[min(len(y) - 1, len(y) // 5)])
            bottoms.append(min(y))
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
                series.append(Series(one.name, tuple(estimates), y, half, _style(one.name, groups)))
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
    """The sentence and its weights in the last layer, mean over heads, of the first run that has them."""
    for run in one.runs:
        attention: Any = run.results.get("attention")
        try:
            words = [str(word) for word in attention["words"]]
            weights: np.ndarray = np.array(attention["layers"][-1], dtype=float).mean(0)
        except (TypeError, ValueError, KeyError, IndexError):
            continue
        if words and weights.shape == (len(words), len(words)):
            return words[:MOST_WORDS], weights[:MOST_WORDS, :MOST_WORDS]
    return None


def _visible(word: str) -> str:
    """A token as a short label: no space around it, no sign that cannot be printed."""
    printable = "".join(c if c.isprintable() else "·" for c in word.strip()) or "␣"
    return printable if len(printable) <= 14 else f"{printable[:13]}…"


def _attention_maps(groups: Sequence[Group]) -> list[Map]:
    """Who looks at whom: the mean over heads of the last layer."""
    maps = []
    for one in groups:
        if found := _words(one):
            shown = tuple(map(_visible, found[0]))
            maps.append(
                Map(one.name, one.setting, "looking", "looked at", found[1], shown, shown, 1.0, written=False)
            )
    return maps


@dataclass(frozen=True)
class Plate:
    """A figure: panels of one kind, each of ``size`` inches in a file; ``html`` makes it part of a page."""

    title: str
    panels: Sequence[Chart] | Sequence[Map]
    size: tuple[float, float]
    caption: str
    html: Callable[[Any, str], str]


def _plates(groups: Sequence[Group]) -> dict[str, Plate]:
    """The figures, by file name; those for which there is something to show."""
    drawn = {
        "length": Plate(
            "Results by length",
            _length_charts(groups),
            (4.6, 3.6),
            "Exact match and token accuracy by source length, the right target being read: the mean over "
            "seeds and its 95 % interval. Grey: the lengths of training.",
            page.charts,
        ),
        "loss": Plate(
            "Validation loss",
            _loss_charts(groups),
            (4.6, 3.6),
            "Validation loss while training: the mean over seeds. The band is its 95 % interval for "
            "comparing kernels, without what a seed does to all of them (Loftus and Masson); one seed has "
            "none. The first steps are above the picture.",
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
            (3.6, 3.6),
            "Weights on one sentence: how much the word of a row looks at that of a column, from 0 (dark) to "
            "1 (light); the mean over the heads of the last layer. Grey is 0 in every head, to the 4 digits "
            "kept.",
            page.maps,
        ),
    }
    return {name: plate for name, plate in drawn.items() if plate.panels}


# ---- the page ------------------------------------------------------------------------------------


def _command(text: str) -> str:
    """As it is typed, and without the folders of the machine that it ran on."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    if words and Path(words[0]).name in ("cli.py", "__main__.py"):
        words[0] = "parzen"
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def _results_section(groups: Sequence[Group]) -> Section:
    """The table, what needs no model last, with pictures of the differences."""
    headers, rows = _table(groups)
    without = len(rows) - len(groups)
    differences = [*(against(one, groups) for one in groups), *[None] * without]
    reach = max((abs(e.mean) + (e.half() if e.freedom else 0) for e in differences if e), default=0)
    at = headers.index(DIFFERENCE)
    shown: list[list[str | Cell]] = []
    for row, difference in zip(rows[without:] + rows[:without], differences, strict=True):
        picture = page.whisker(difference, reach) if reach else ""
        shown.append([*row[:at], Cell(row[at], picture), *row[at + 1 :]])
    return Section("results", "Results", page.table(headers, shown, "Results"))


# By verdict, without its emphasis: the class of its colour, and a sign for those who see no colours.
SIGNS = {
    "holds": ("holds", "✓"),
    "does not hold": ("fails", "✗"),
    "cannot tell": ("unsure", "?"),
    "not run": ("absent", "–"),
}


def _claims_section(claims: Claims) -> Section:
    verdicts = [outcome.verdict.strip("*") for _, outcome in claims]
    count = Counter(verdicts)
    counts = "".join(
        f'<li class="{kind}"><b>{count[verdict]}</b>{verdict}</li>'
        for verdict, (kind, _) in SIGNS.items()
        if count[verdict]
    )
    rows: list[list[str | Cell]] = [
        [
            Cell(claim.text, f"<small>{escape(_minus(str(claim.decide)))}</small>", "long"),
            Cell(f"{SIGNS[verdict][1]} {verdict}", kind=SIGNS[verdict][0]),
            Cell(_minus(outcome.result) or NONE, kind="result"),
            claim.id,
        ]
        for (claim, outcome), verdict in zip(claims, verdicts, strict=True)
    ]
    headers = ["claim", "verdict", "result", "row of the ledger"]
    return Section(
        "claims", "Claims", f'<ul class="verdicts">{counts}</ul>\n{page.table(headers, rows, "Claims")}'
    )


def _minus(text: str) -> str:
    return re.sub(r"(?<= )-(?=\d)", "−", text)


def _runs_section(groups: Sequence[Group]) -> Section:
    """How to get these runs again: their commands, what all have in common, and what each has of its own."""
    runs = [(one, run) for one in groups for run in one.runs]
    commands = dict.fromkeys(_command(str(run.environment.get("command", ""))) for _, run in runs)
    environments = [
        {k: _plain(v) for k, v in flat(run.environment) if k not in ("command", "started")} for _, run in runs
    ]
    own = _varying(environments)
    shared = {k: v for k, v in environments[0].items() if k not in own} if environments else {}
    configs = [dict(flat(one.config)) for one in groups]
    settings = {k: _plain(v) for k, v in configs[0].items() if k not in _varying(configs)} if configs else {}
    headers = ["run", "kernel", "setting", "seed", "evaluations", *own, "started"]
    rows: list[list[str]] = [
        [
            run.name,
            one.name,
            one.setting,
            str(run.seed),
            str(len(run.curve)),
            *(known.get(key, NONE) for key in own),
            str(run.environment.get("started", NONE)),
        ]
        for (one, run), known in zip(runs, environments, strict=True)
    ]
    body = "<h3>Commands</h3>\n" + "".join(page.command(text) for text in commands if text)
    body += f"<h3>Environment of all runs</h3>\n{page.pairs(shared)}"
    body += page.folded("Settings of all runs", page.pairs(settings), "setting")
    return Section("runs", "Runs", f"{body}<h3>Each run</h3>\n{page.table(headers, rows, 'Runs')}")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lead(groups: Sequence[Group]) -> tuple[str, list[str]]:
    """The title of the page and what is said below it."""
    kinds = dict.fromkeys(_task(dict(flat(one.config))) for one in groups)
    n = sum(len(one.runs) for one in groups)
    names = sorted({one.name for one in groups}, key=lambda name: _style(name, groups))
    settings = dict.fromkeys(one.setting for one in groups)
    return f"{', '.join(kinds)}: {n} run{'s' * (n != 1)}", [
        f"Compared: {', '.join(names)}. Settings: {'; '.join(settings)}.",
        *notes(groups),
    ]


def html(groups: Sequence[Group], claims: Claims = ()) -> str:
    """Everything as one HTML page; see ``parzen.lab.page``."""
    title, said = _lead(groups)
    sections = [_claims_section(claims)] if claims else []
    sections.append(_results_section(groups))
    sections += [
        Section(name, plate.title, plate.html(plate.panels, plate.caption))
        for name, plate in _plates(groups).items()
    ]
    return page.document(title, page.paragraphs(said), [*sections, _runs_section(groups)])


def report(runs: Sequence[Run], to: Path, claims: Claims = ()) -> list[Path]:
    """Writes the report of ``runs`` into the folder ``to`` and returns its files.

    table.md, table.csv, table.tex; length, loss, support and attention as .png and .svg, as far as the runs
    hold them; summary.json, from which the ledger is made; index.html.

    Args:
        runs: finished or not.
        to: made if it is not there.
        claims: what the page says first: pairs of a claim of the ledger and its outcome, in order. A claim
            is decided on summaries, so write these first::

                write_whole(to / "summary.json", summary(group(runs)).encode())
                results = Results(root)
                report(runs, to, [(claim, claim.decide(results)) for claim in CLAIMS if …])

    Raises:
        UserError: a damaged run, or a folder that cannot be written.
    """
    groups = group(runs)
    texts = {
        "table.md": markdown(groups),
        "table.csv": to_csv(groups),
        "table.tex": latex(groups),
        "summary.json": summary(groups),
        "index.html": html(groups, claims),
    }
    files = {name: text.encode(errors="replace") for name, text in texts.items()}
    for name, plate in _plates(groups).items():
        for form in figures.FORMATS:
            files[f"{name}.{form}"] = figures.draw(plate.panels, plate.size, form, columns=4)
    for name, data in files.items():
        write_whole(to / name, data)
    return [to / name for name in files]
