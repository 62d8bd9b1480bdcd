"""``parzen reproduce``: a figure or table of the paper, or all of them, in one command.

It plans the runs, says what they will cost, trains those that are not finished, and writes below ``results``
the report of each experiment with the paper's claims beside it, and a ledger of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.experiments import EXPERIMENTS, targets, train
from parzen.lab.experiments.claims import Claim, Results
from parzen.lab.experiments.experiment import SCALES, Trained
from parzen.lab.files import write_whole
from parzen.lab.reports import figures
from parzen.lab.reports.document import report
from parzen.lab.reports.groups import group
from parzen.lab.reports.ledger import ledger
from parzen.lab.reports.page import NONE
from parzen.lab.reports.tables import summary
from parzen.lab.run.config import RunConfig
from parzen.lab.run.cost import LEAST, PEAK, SHARE, cost_of, size_of
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import LOCAL, Execution, RunSet


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        scale: a name of ``SCALES``.
        to: reports go below it, and run folders into ``runs`` beside each.
        seeds: in place of the scale's.
        given: settings of experiments that have them, such as ``data`` or ``grid``.
        dry: nothing is trained.
        execution: runs are carried out.
    """

    scale: str = "tiny"
    to: Path = Path("results")
    seeds: Sequence[int] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    dry: bool = False
    execution: Execution = LOCAL

    def folder(self, name: str) -> Path:
        """Of a report."""
        return self.to / SCALES[self.scale] / name


# The runs of each report, by its folder.
Plan: TypeAlias = dict[str, list[RunSet]]


def planned(experiment: Trained, request: Request) -> Plan:
    """The runs that the figure or table is made of at the scale of the request.

    Raises:
        UserError: a text that cannot be used.
    """
    plan: Plan = {}
    for name, several in experiment.scales[request.scale].items():
        plan[name] = []
        for one in several:
            own = {key: value for key, value in request.given.items() if hasattr(one, key)}
            seeds, runs = request.seeds or one.seeds, request.folder(name) / "runs"
            settings = replace(one, **own, seeds=seeds, runs=runs, execution=request.execution)
            plan[name] += experiment.sets(settings)
    return plan


def reproduce(target: str, request: Request) -> int:
    """Everything that ``target`` (of ``targets``, or "all") needs; the exit status, as of ``sweep``.

    Raises:
        UserError: a text that is missing or cannot be used, or nothing can be written.
    """
    asked = [row for name, row in targets().items() if target in (name, "all")]
    plan: Plan = {}
    for row in asked:
        if row.trained and request.scale in row.trained.scales:
            plan |= planned(row.trained, request)
        elif row.trained and target != "all":
            known = ", ".join(row.trained.scales)
            raise UserError(f"{row.where} has no runs at the scale {request.scale}; it has {known}")
    sets = [part for several in plan.values() for part in several]
    for part in sets:
        if part.missing and not request.dry:
            raise UserError(part.missing)
    if plan:
        _show(plan, request)
    if request.dry:
        return 0
    runs, status = train(sets, request.execution)
    claims = [claim for row in asked for scale in ("exact", request.scale) for claim in row.claims(scale)]
    written = [_kernels(request)] if EXPERIMENTS["kernels"] in asked else []
    for name, several in plan.items():
        folders = {folder for part in several for folder in part.planned()}
        begun = [run for run in runs if run.folder in folders and (run.finished or run.metrics())]
        if begun:
            written.append(_reported(begun, name, request, [c for c in claims if c.folder == name]))
    written.append(_ledger(claims, request))
    print("\nsaved " + "\n      ".join(map(str, written)))
    return status


# ---- what is written -----------------------------------------------------------------------------


def _kernels(request: Request) -> Path:
    for form in figures.FORMATS:
        write_whole(request.folder("kernels") / f"kernels.{form}", figures.kernels_figure(form))
    return request.folder("kernels") / "kernels.png"


def _reported(runs: Sequence[Run], name: str, request: Request, claims: Sequence[Claim]) -> Path:
    folder = request.folder(name)
    # Claims are decided on summaries.
    write_whole(folder / "summary.json", summary(group(runs)).encode())
    results = Results(request.to)
    report(runs, folder, [(claim, claim.decide(results)) for claim in claims])
    return folder / "index.html"


def _ledger(claims: Sequence[Claim], request: Request) -> Path:
    head = (
        f"# What holds at the scale {request.scale}\n\nWritten by `parzen reproduce`; how claims are decided "
        "is in docs/results.md of the repository.\n"
    )
    path = request.folder("ledger.md")
    write_whole(path, ledger(Results(request.to), claims, head).encode())
    return path


# ---- what it will cost ---------------------------------------------------------------------------


def _show(plan: Plan, request: Request) -> None:
    rows, total = [], 0.0
    all_runs = all_left = 0
    measured = request.scale != "paper" or torch.device(request.execution.device).type == "cuda"
    for name, parts in plan.items():
        for kind, configs in _kinds(parts).items():
            left = [c for folder, c, _ in configs if not (folder / "results.json").exists()]
            sizes = [size_of(config) for _, config, _ in configs]
            # The first that is left stands for all of its kind; times go with tokens.
            first = next(((c, part) for _, c, part in configs if c in left), None)
            hours, memory, mark = 0.0, NONE, ""
            if first is not None:
                cost = cost_of(*first, request.execution, measured)
                per_token = cost.seconds / size_of(first[0])[1]
                hours = per_token * sum(size_of(c)[1] for c in left) / 3600
                memory, mark = f"{cost.memory / 2**30:.1f} GB", "*" * cost.computed
            total, all_runs, all_left = total + hours, all_runs + len(configs), all_left + len(left)
            rows.append(
                (
                    name,
                    kind,
                    str(len(configs)),
                    str(len(configs) - len(left)),
                    _range([n for n, _ in sizes]),
                    _range([n for _, n in sizes]),
                    console.duration(3600 * hours) + mark,
                    memory,
                )
            )
    headers = ("folder", "model", "runs", "done", "parameters", "tokens a run", "time left", "memory")
    console.show_table(headers, rows)
    marked = any("*" in row[6] for row in rows)
    unit = "GPU-hours" if marked else "hours of one process"
    print(
        f"{all_runs} runs, {all_runs - all_left} done; about {total:,.1f} {unit} of training to go"
        + (
            f" (*: computed, at {SHARE:.0%} of an A100's {PEAK / 1e12:.0f} TFLOP/s and at least "
            f"{LEAST * 1e3:g} ms a layer and step)"
            if marked
            else " (from one step of each model)"
        ),
        flush=True,
    )


def _kinds(parts: Sequence[RunSet]) -> dict[str, list[tuple[Path, RunConfig, RunSet]]]:
    """Runs whose steps cost about the same, by what they are called; each run once."""
    found: dict[str, dict[Path, tuple[Path, RunConfig, RunSet]]] = {}
    for part in parts:
        for folder, config in part.planned().items():
            mixer = getattr(config.model, "mixer", "mosaic")
            layers = config.model.layers
            kind = f"{mixer}, {layers} layer{'s' if layers > 1 else ''}"
            found.setdefault(kind, {}).setdefault(folder, (folder, config, part))
    return {kind: [*runs.values()] for kind, runs in found.items()}


def _range(numbers: Sequence[int]) -> str:
    low, high = (_short(n) for n in (min(numbers), max(numbers)))
    return low if low == high else f"{low} – {high}"


def _short(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
