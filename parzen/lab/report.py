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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import EngFormatter

from parzen.kernels import KERNELS
from parzen.lab import console, figures, statistics
from parzen.lab.errors import UserError
from parzen.lab.experiments import length
from parzen.lab.files import write_whole
from parzen.lab.runs import Run, read_json

# Of a sentence, on the axes of an attention map.
MOST_WORDS = 24
NONE = "—"


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


def _kind(setting: Mapping[str, Any]) -> Any:
    return setting.get("model.kind")


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[Any, list[str]]:
    """By kind of model what tells its settings from one another: kinds differ by what they are called."""
    outside = [{k: v for k, v in one.items() if not k.startswith("model.")} for one in settings]
    shared = _varying(outside)
    return {
        kind: [
            *(key for key in _varying(alike) if key.startswith("model.") and key != "model.layers"),
            *shared,
        ]
        for kind in {_kind(one) for one in settings}
        for alike in [[one for one in settings if _kind(one) == kind]]
    }


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
    differ = _differing(settings)
    groups = []
    for setting, (config, finished, tokens, records) in zip(settings, found.values(), strict=True):
        layers = config["model"]["layers"]
        title = [f"{layers} layer{'s' if layers > 1 else ''}"]
        title += [
            f"{key.partition('.')[2]} = {setting[key]}" for key in differ[_kind(setting)] if key in setting
        ]
        others = {about(other[2]) for other in found.values() if finished and other[1] and other[0] == config}
        name = names[json.dumps(config)] + (f" ({_count(tokens)} tokens)" if len(others) > 1 else "")
        ordered = tuple(sorted(records, key=lambda record: record.seed))
        groups.append(Group(name, ", ".join(title), layers, config, finished, tokens, ordered))

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
        "loss − gaussian",
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


# ---- panels --------------------------------------------------------------------------------------

# Draws into its axes and returns what a colour bar is for, if it needs one.
Panel = Callable[[Axes], AxesImage | None]
# Grey, also on a dark page: 0, which no colour of the map is.
MAP = colormaps["viridis"].with_extremes(bad="#88888838")
# Takes the colour of the text around it once the figure is part of a page.
TEXT = "#555555"
PAGE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), TEXT),
}


def draw(panels: Sequence[Panel], size: tuple[float, float], form: str, columns: int = 1) -> bytes:
    """``panels`` in rows of at most ``columns``, each of ``size`` inches, as PNG or SVG bytes."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context({**figures.STYLE, "text.parse_math": False}), warnings.catch_warnings():
        # A box stands for a letter that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes: Any = figure.subplots(rows, columns, squeeze=False)
        images = [panel(at) for panel, at in zip(panels, axes.flat, strict=False)]
        if images[-1] is not None:
            figure.colorbar(images[-1], ax=axes, shrink=0.9 / rows, anchor=(0, 1)).outline.set_visible(False)
        for at in axes.flat[len(panels) :]:
            at.set_axis_off()
        return figures.rendered(figure, form)


def _color(name: str, groups: Sequence[Group]) -> str:
    """The same for a kernel in all panels; the rows of the table come first, in its order."""
    names = sorted({one.name for one in groups}, key=lambda n: ([*KERNELS, n].index(n), n))
    return figures.COLORS[names.index(name) % len(figures.COLORS)]


def _loss_panel(setting: str, groups: Sequence[Group]) -> Panel:
    """Mean validation loss over training tokens and, for two seeds or more, its interval among the groups."""

    def panel(axes: Axes) -> AxesImage | None:
        tops, bottoms = [], []
        shown = [one for one in groups if one.setting == setting and all(run.curve for run in one.runs)]
        curves = {one: {run.seed: dict(run.curve) for run in one.runs} for one in shown}
        for one in shown:
            shared = sorted(set.intersection(*map(set, curves[one].values())))
            if not shared:
                continue
            estimates = []
            for t in shared:
                scores = {
                    f"{other.name}, {other.finished}": {seed: c[t] for seed, c in by_seed.items() if t in c}
                    for other, by_seed in curves.items()
                }
                estimates.append(statistics.among(scores, f"{one.name}, {one.finished}"))
            x, y = np.array(shared), np.array([e.mean for e in estimates])
            color = _color(one.name, groups)
            label = one.name if one.finished else f"{one.name} (unfinished)"
            style = ("-" if one.finished else "--") if len(x) > 1 else "o"
            axes.plot(x, y, style, color=color, label=label, markersize=3, linewidth=1.4)
            if len(one.runs) > 1:
                half = np.array([e.half() for e in estimates])
                axes.fill_between(x, y - half, y + half, color=color, alpha=0.2, linewidth=0)
            # The first steps fall so far that nothing else could be seen.
            tops.append(y[min(len(y) - 1, len(y) // 5)])
            bottoms.append(y.min())
        axes.set_title(setting)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel="training tokens", ylabel="validation loss (nats per token)")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        if tops:
            room = 0.06 * (max(tops) - min(bottoms)) or 0.1
            axes.set_ylim(min(bottoms) - room, max(tops) + room)
            axes.legend(fontsize=8)
        return None

    return panel


def _title(one: Group) -> str:
    return f"{one.name}, {one.setting}"


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


def _support_panels(groups: Sequence[Group]) -> list[Panel]:
    """Mean number of keys with weight, over queries and seeds, by layer and head; one scale for all."""
    found = [(one, np.mean(m, axis=0)) for one in groups if (m := _matrices(one, "support"))]
    top = max((float(matrix.max()) for _, matrix in found), default=1.0)
    norm = PowerNorm(0.5, 0, top or 1.0)

    def panel_of(one: Group, support: np.ndarray) -> Panel:
        def panel(axes: Axes) -> AxesImage | None:
            layers, heads = support.shape
            image = axes.imshow(support, norm=norm, cmap=MAP, aspect="auto")
            for layer, head in np.ndindex(layers, heads) if heads <= 16 else ():
                value = support[layer, head]
                dark = "black" if norm(value) > 0.6 else "white"
                axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=dark, fontsize=7)
            axes.set_title(_title(one))
            axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
            axes.set_xticklabels([str(head + 1) for head in range(heads)])
            axes.set_yticklabels([str(layer + 1) for layer in range(layers)])
            axes.tick_params(length=0)
            return image

        return panel

    return [panel_of(one, support) for one, support in found]


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


def _attention_panels(groups: Sequence[Group]) -> list[Panel]:
    """Who looks at whom: the mean over heads of the last layer; grey where every head gives 0."""

    def panel_of(one: Group, words: list[str], weights: np.ndarray) -> Panel:
        def panel(axes: Axes) -> AxesImage | None:
            shown = [_visible(word) for word in words]
            image = axes.imshow(
                np.ma.masked_equal(weights, 0), cmap=MAP, vmin=0, vmax=1, interpolation="nearest"
            )
            axes.set_title(_title(one))
            axes.set_xticks(range(len(shown)))
            axes.set_yticks(range(len(shown)))
            axes.set_xticklabels(shown, rotation=90, fontsize=7)
            axes.set_yticklabels(shown, fontsize=7)
            axes.tick_params(length=0)
            axes.set(xlabel="looked at", ylabel="looking")
            return image

        return panel

    found = ((one, _words(one)) for one in groups)
    return [panel_of(one, *words) for one, words in found if words]


def _figures(groups: Sequence[Group]) -> dict[str, tuple[list[Panel], tuple[float, float], str]]:
    """By file name: panels, the size of one, and what they show."""
    settings = dict.fromkeys(one.setting for one in groups)
    drawn = {
        "loss": (
            [_loss_panel(setting, groups) for setting in settings],
            (4.6, 3.6),
            "Validation loss while training: the mean over seeds. The band is its 95 % interval for "
            "comparing kernels, without what a seed does to all of them (Loftus and Masson); one seed has "
            "none. The first steps are above the picture.",
        ),
        "support": (
            _support_panels(groups),
            (3.4, 2.4),
            "How many keys get a weight > 0, by layer and head: the mean over queries and seeds.",
        ),
        "attention": (
            _attention_panels(groups),
            (3.6, 3.6),
            "Weights on one sentence, the mean over the heads of the last layer, from 0 (dark) to 1 (light); "
            "grey is 0 in every head, to the 4 digits kept.",
        ),
    }
    if by_length := length.panels(groups, lambda name: _color(name, groups)):
        drawn["length"] = (
            by_length,
            (4.6, 3.6),
            "Exact match and token accuracy by source length, the right target being read: the mean over "
            "seeds and its 95 % interval. Grey: the lengths of training.",
        )
    return {name: entry for name, entry in drawn.items() if entry[0]}


# ---- the page ------------------------------------------------------------------------------------

HEADINGS = {"length": "Length", "loss": "Loss", "support": "Support", "attention": "A sentence"}

STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2024; --soft: #5a636c; --line: #d8dde2; --paper: #fff; --hot: #1b6ca8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a9b2bb; --line: #3a424a; --paper: #15191d; --hot: #79b8e8 } }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p, figcaption { max-width: 44rem; margin: .4rem 0; color: var(--soft) }
figure { margin: 0 }
.wide { overflow-x: auto }
.wide:focus-visible, button:focus-visible { outline: 2px solid var(--hot) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 1rem .3rem 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line) }
th button { all: unset; cursor: pointer; font-weight: 600 }
th button:hover { color: var(--hot) }
th[aria-sort=ascending] button::after { content: " ↑" }
th[aria-sort=descending] button::after { content: " ↓" }
.panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least)), 1fr)) }
svg { width: 100%; height: auto }
"""

# A button in each header sorts its table; numbers by value, and what is no number last.
SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = row => row.cells[head.cellIndex].textContent;
  const value = row => parseFloat(text(row).replaceAll(",", "").replace("−", "-"));
  const compare = (a, b) => {
    const x = value(a), y = value(b);
    if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y);
    return sign * (isNaN(x) ? text(a).localeCompare(text(b)) : x - y);
  };
  body.append(...[...body.rows].sort(compare));
});
"""


def _html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    head = "".join(f'<th scope="col"><button type="button">{escape(h)}</button></th>' for h in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _inline(svg: bytes, prefix: str) -> str:
    """A figure as part of a page: no header, ids of its own, the page's text colour and font."""
    text = svg.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    return text.replace(TEXT, "currentColor").replace("'DejaVu Sans', ", "")


def _command(text: str) -> str:
    """Without the folders of the machine that it ran on."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def _environments(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    said = ("parzen", "commit", "torch", "machine")
    headers = ["run", "kernel", "setting", "seed", "evaluations", *said, "command"]
    rows = []
    for one in groups:
        for run in one.runs:
            known = [str(run.environment.get(key, NONE)) for key in said]
            command = _command(str(run.environment.get("command", NONE)))
            rows.append(
                [run.name, one.name, one.setting, str(run.seed), str(len(run.curve)), *known, command]
            )
    return headers, rows


def page(groups: Sequence[Group]) -> str:
    """Everything in one HTML file that asks the network for nothing."""
    parts = []
    with rc_context(PAGE):
        for name, (panels, size, caption) in _figures(groups).items():
            drawings = "".join(
                _inline(draw([panel], size, "svg"), f"{name}{i}-") for i, panel in enumerate(panels)
            )
            parts.append(
                f"<h2>{HEADINGS[name]}</h2>\n<figure><figcaption>{escape(caption)}</figcaption>"
                f'<div class="panels" style="--least:{5 * size[0]:.0f}rem">{drawings}</div></figure>\n'
            )
    said = "".join(f"<p>{escape(note)}</p>\n" for note in notes(groups))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>parzen report</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{sum(len(one.runs) for one in groups)} runs</h1>\n{said}"
        f"<h2>Results</h2>\n{_html_table(*_table(groups), 'results')}{''.join(parts)}"
        f"<h2>Runs</h2>\n{_html_table(*_environments(groups), 'runs')}"
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def report(runs: Sequence[Run], to: Path) -> list[Path]:
    """Writes the report of ``runs`` into the folder ``to`` and returns its files.

    table.md, table.csv, table.tex; loss, support and attention as .png and .svg, as far as the runs hold
    them; summary.json, from which the ledger is made; index.html.

    Raises:
        UserError: a damaged run, or a folder that cannot be written.
    """
    groups = group(runs)
    texts = {
        "table.md": markdown(groups),
        "table.csv": to_csv(groups),
        "table.tex": latex(groups),
        "summary.json": summary(groups),
        "index.html": page(groups),
    }
    files = {name: text.encode(errors="replace") for name, text in texts.items()}
    for name, (panels, size, _) in _figures(groups).items():
        for form in figures.FORMATS:
            files[f"{name}.{form}"] = draw(panels, size, form, columns=4)
    for name, data in files.items():
        write_whole(to / name, data)
    return [to / name for name in files]
