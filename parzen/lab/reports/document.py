"""``parzen report``: what runs found, as tables, figures and one page. It reads run folders, nothing else.

Runs that differ in nothing but the seed are a *group*; groups that differ in nothing but the kernel (or
mixer) share a *setting* and a panel. The same folders give the same bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from parzen.lab.experiments.claims import Claim, Outcome
from parzen.lab.files import write_whole
from parzen.lab.reports import figures, page
from parzen.lab.reports.groups import Group, group, task_of, typed, varying
from parzen.lab.reports.page import NONE, Cell, Section
from parzen.lab.reports.plates import plates_of, style_of
from parzen.lab.reports.tables import DIFFERENCE, against, cells, latex, markdown, notes, summary, to_csv
from parzen.lab.run.config import flat
from parzen.lab.run.folder import Run

Claims: TypeAlias = Sequence[tuple[Claim, Outcome]]


def _results_section(groups: Sequence[Group]) -> Section:
    """The table, what needs no model last, with pictures of the differences."""
    headers, rows = cells(groups)
    without = len(rows) - len(groups)
    differences = [*(against(one, groups) for one in groups), *[None] * without]
    reach = max((abs(e.mean) + (e.half() if e.freedom else 0) for e in differences if e), default=0)
    at = headers.index(DIFFERENCE)
    shown: list[list[str | Cell]] = []
    counts = [*(len(one.runs) for one in groups), *[0] * without]
    for row, difference, seeds in zip(rows[without:] + rows[:without], differences, counts, strict=True):
        picture = page.whisker(difference, reach, seeds == 2) if reach else ""
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
    commands = dict.fromkeys(typed(str(run.environment.get("command", ""))) for _, run in runs)
    environments = [
        {k: _plain(v) for k, v in flat(run.environment) if k not in ("command", "started")} for _, run in runs
    ]
    own = varying(environments)
    shared = {k: v for k, v in environments[0].items() if k not in own} if environments else {}
    configs = [dict(flat(one.config)) for one in groups]
    settings = {k: _plain(v) for k, v in configs[0].items() if k not in varying(configs)} if configs else {}
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
    kinds = dict.fromkeys(task_of(dict(flat(one.config))) for one in groups)
    n = sum(len(one.runs) for one in groups)
    names = sorted({one.name for one in groups}, key=lambda name: style_of(name, groups))
    settings = dict.fromkeys(one.setting for one in groups)
    return f"{', '.join(kinds)}: {n} run{'s' * (n != 1)}", [
        f"Compared: {', '.join(names)}. Settings: {'; '.join(settings)}.",
        *notes(groups),
    ]


def html(groups: Sequence[Group], claims: Claims = ()) -> str:
    """Everything as one HTML page; see ``parzen.lab.reports.page``."""
    title, said = _lead(groups)
    sections = [_claims_section(claims)] if claims else []
    sections.append(_results_section(groups))
    sections += [
        Section(name, plate.title, plate.html(plate.panels, plate.caption))
        for name, plate in plates_of(groups).items()
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
    for name, plate in plates_of(groups).items():
        for form in figures.FORMATS:
            files[f"{name}.{form}"] = figures.draw(plate.panels, plate.size, form, columns=4)
    for name, data in files.items():
        write_whole(to / name, data)
    return [to / name for name in files]
