"""Tables of groups: Markdown, CSV and LaTeX, and the summary that is kept under version control."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parzen.lab import console, statistics
from parzen.lab.reports.figures import TWO
from parzen.lab.reports.groups import Group, count_of, finite, kind_of, typed
from parzen.lab.reports.page import NONE
from parzen.lab.run.config import about, flat

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
        return g.setting, kind_of(dict(flat(g.config))), about(g.tokens)

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
    """(name, settings, measures) of what needs no model; what several settings have in common comes once."""
    merged: dict[str, tuple[str, list[str], Mapping[str, Any]]] = {}
    for name, setting, measures in _of_settings(groups):
        merged.setdefault(json.dumps([name, measures]), (name, [], measures))[1].append(setting)
    for name, settings, measures in merged.values():
        yield name, "; ".join(settings), measures


def _of_settings(groups: Sequence[Group]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The same for each setting, as its first run holds it."""
    for setting in dict.fromkeys(one.setting for one in groups):
        runs = (run for one in groups if one.setting == setting for run in one.runs)
        found = next((b for run in runs if isinstance(b := run.results.get("baselines"), Mapping)), {})
        for name, measures in found.items():
            yield name, setting, measures if isinstance(measures, Mapping) else {"loss": measures}


def cells(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
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
            *(f"{v:{form}}" if finite(v := measures.get(key)) else NONE for key, _, form in columns),
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
                count_of(one.tokens) if one.finished else "unfinished",
                f"{sum(speeds) / len(speeds):,.0f}" if speeds else NONE,
                str(len(one.runs)) + TWO * (len(one.runs) == 2),
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
    if any(len(one.runs) == 2 for one in done):
        said.append(
            f"{TWO} two seeds: the interval rests on the least that an interval can, and may be far off."
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
    headers, rows = cells(groups)
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
    TWO: r"\dag{}",
}


def latex(groups: Sequence[Group]) -> str:
    """The table for a document that uses booktabs."""
    headers, rows = cells(groups)
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
                "metrics": {k: v for k, v in flat(run.results) if finite(v)},
                "curve": run.curve,
                "environment": {**run.environment, "command": typed(str(run.environment.get("command")))},
            }
            for run in one.runs
        ]
        entry = {"name": one.name, "layers": one.layers, "config": one.config, "tokens": one.tokens}
        lines.append(json.dumps({**entry, "runs": runs}, ensure_ascii=False))
    return '{"groups": [\n' + ",\n".join(lines) + "\n]}\n"
