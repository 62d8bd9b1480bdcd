"""``parzen reproduce``: a figure or table of the paper, or all of them, in one command.

It plans the runs, says what they will cost, trains those that are not finished, and writes below ``results``
the report of each experiment with the paper's claims beside it, and a ledger of them all.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.experiments import length, regbench, stories
from parzen.lab.experiments.regbench import best
from parzen.lab.files import write_whole
from parzen.lab.reports import figures, ledger
from parzen.lab.reports.document import report
from parzen.lab.reports.groups import group
from parzen.lab.reports.page import NONE
from parzen.lab.reports.tables import summary
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import HERE, How, Part, Work, build, sweep
from parzen.lab.run.train import Keeper, Progress, train
from parzen.lab.tasks.regbench import RegBenchConfig
from parzen.lab.tasks.stories import StoriesConfig
from parzen.lab.tasks.task import Task

SCALES = ("tiny", "small", "paper")
# What computed times assume: a share of the peak of an A100 in bfloat16, FLOP/s, and that a layer of a step
# takes so many seconds at least, which small models are bound by.
PEAK, SHARE, LEAST = 312e12, 0.3, 2e-3


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        scale: a name of ``SCALES``.
        to: reports go below it, and run folders into ``runs`` beside each.
        seeds: in place of the scale's.
        data, valid, tokenizer: stories, as in ``load_stories``; *tiny* has its own.
        grid: whether baselines of Table 1 are tuned.
        dry: nothing is trained.
        how: runs are carried out.
    """

    scale: str = "tiny"
    to: Path = Path("results")
    seeds: Sequence[int] | None = None
    data: Path | None = None
    valid: Path | None = None
    tokenizer: Path | None = None
    grid: bool = False
    dry: bool = False
    how: How = HERE

    def folder(self, name: str) -> Path:
        """Of a report."""
        return self.to / ledger.FOLDERS[self.scale] / name

    def given(self, name: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Options of every experiment."""
        return {"runs": self.folder(name) / "runs", "seeds": self.seeds or seeds, "how": self.how}


Plan = dict[str, list[Part]]


def _figure2(request: Request) -> Plan:
    found = []
    for one in stories.FIGURE2[request.scale]:
        texts = {name: getattr(request, name) for name in ("data", "valid", "tokenizer")}
        comparison = replace(one, **texts, **request.given("stories", one.seeds))
        if request.data is not None or request.scale == "tiny":
            found.append(stories.part(comparison, stories.load(comparison), comparison.tokens))
        elif request.dry:
            # No text, no hashes: the runs can be counted, not looked for.
            text = StoriesConfig(vocab=comparison.vocab, context=comparison.context)
            found.append(Part(comparison.runs, stories.plan(comparison, text, comparison.tokens), _no_text))
        else:
            _no_text()
    return {"stories": found}


def _no_text(run: Run | None = None) -> Work:
    raise UserError(
        "Figure 2 learns real stories at this scale: get them with `parzen data babistories --to DIR` (the "
        "paper's) or `parzen data tinystories --to DIR`, and give them with --data and --valid"
    )


def _table1(request: Request) -> Plan:
    return {
        name: [
            part
            for one in experiments
            for part in regbench.parts(
                replace(one, **request.given(name, one.seeds), grid=request.grid and name == "regbench")
            )
        ]
        for name, experiments in regbench.TABLE1[request.scale].items()
    }


def _table2(request: Request) -> Plan:
    return {
        name: [length.part(replace(one, **request.given(name, one.seeds))) for one in experiments]
        for name, experiments in length.TABLE2[request.scale].items()
    }


# Each figure or table that needs runs, and how its parts are found, by folder.
TRAINED: dict[str, Callable[[Request], Plan]] = {
    "figure2": _figure2,
    "table1": _table1,
    "table2": _table2,
}
TARGETS = ("figure1", *TRAINED)


def reproduce(target: str, request: Request) -> int:
    """Everything that ``target`` (of ``TARGETS``, or "all") needs; the exit status, as of ``sweep``.

    Raises:
        UserError: a text that is missing or cannot be used, or nothing can be written.
    """
    asked = TARGETS if target == "all" else (target,)
    plan: Plan = {}
    for name in asked:
        if name in TRAINED:
            plan |= TRAINED[name](request)
    if plan:
        _show(plan, request)
    if request.dry:
        return 0
    runs, status = sweep([part for parts in plan.values() for part in parts], request.how)
    written = [_kernels(request)] if "figure1" in asked else []
    for name, parts in plan.items():
        folders = {folder for part in parts for folder in part.planned()}
        begun = [run for run in runs if run.folder in folders and (run.finished or run.metrics())]
        if request.grid and name == "regbench":
            begun = best(begun)
        if begun:
            written.append(_reported(begun, name, request))
    written.append(_ledger(asked, request))
    print("\nsaved " + "\n      ".join(map(str, written)))
    return status


# ---- what is written -----------------------------------------------------------------------------


def _kernels(request: Request) -> Path:
    for form in figures.FORMATS:
        write_whole(request.folder("kernels") / f"kernels.{form}", figures.kernels_figure(form))
    return request.folder("kernels") / "kernels.png"


def _reported(runs: Sequence[Run], name: str, request: Request) -> Path:
    folder = request.folder(name)
    # Claims are decided on summaries.
    write_whole(folder / "summary.json", summary(group(runs)).encode())
    results = ledger.Results(request.to)
    about = [claim for claim in ledger.claims(request.scale) if _folder_of(claim) == name]
    report(runs, folder, [(claim, claim.decide(results)) for claim in about])
    return folder / "index.html"


def _folder_of(claim: ledger.Claim) -> str:
    where, _, rest = claim.id.partition("/")
    if where == "table2":
        return f"length/{rest.split('/')[1]}"
    return {"figure2": "stories", "table1": "regbench"}.get(where, "")


def _ledger(asked: Sequence[str], request: Request) -> Path:
    chosen = ledger.claims("exact", request.scale)
    claims = [claim for claim in chosen if claim.id.partition("/")[0] in asked]
    head = (
        f"# What holds at the scale {request.scale}\n\nWritten by `parzen reproduce`; how claims are decided "
        "is in docs/results.md of the repository.\n"
    )
    path = request.folder("ledger.md")
    write_whole(path, ledger.ledger(ledger.Results(request.to), claims, head).encode())
    return path


# ---- what it will cost ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds of training, and bytes of memory; ``computed`` if no step was timed."""

    seconds: float
    memory: float
    computed: bool


def _show(plan: Plan, request: Request) -> None:
    rows, total = [], 0.0
    all_runs = all_left = 0
    measured = request.scale != "paper" or torch.device(request.how.device).type == "cuda"
    for name, parts in plan.items():
        for kind, configs in _kinds(parts).items():
            left = [c for folder, c, _ in configs if not (folder / "results.json").exists()]
            sizes = [_size(config) for _, config, _ in configs]
            # The first that is left stands for all of its kind; times go with tokens.
            first = next(((c, part) for _, c, part in configs if c in left), None)
            hours, memory, mark = 0.0, NONE, ""
            if first is not None:
                cost = _cost(*first, request.how, measured)
                per_token = cost.seconds / _size(first[0])[1]
                hours = per_token * sum(_size(c)[1] for c in left) / 3600
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


def _kinds(parts: Sequence[Part]) -> dict[str, list[tuple[Path, RunConfig, Part]]]:
    """Runs whose steps cost about the same, by what they are called; each run once."""
    found: dict[str, dict[Path, tuple[Path, RunConfig, Part]]] = {}
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


def sequence_length(config: RunConfig) -> int:
    """Tokens of a sequence of training, the mean where lengths differ."""
    task = config.task
    if isinstance(task, StoriesConfig):
        return task.context
    if isinstance(task, RegBenchConfig):
        return round(mean(task.strings) * (mean(task.string_length) + 1))
    return int(task.row(task.longest))


def _size(config: RunConfig) -> tuple[int, int]:
    """(parameters, training tokens)."""
    key = (type(config.model), config.model)
    if key not in _PARAMETERS:
        with torch.device("meta"):
            _PARAMETERS[key] = sum(p.numel() for p in build(config).parameters())
    return _PARAMETERS[key], config.train.steps * config.train.batch * sequence_length(config)


_PARAMETERS: dict[Any, int] = {}


def _cost(config: RunConfig, part: Part, how: How, measured: bool) -> Cost:
    if not measured or part.work is _no_text:
        return computed(config)
    run = Run(part.root / config.digest(), config)
    return timed(config, part.work(run).task, how)


def computed(config: RunConfig) -> Cost:
    """Six operations a parameter and token, twelve a layer, channel, key and query of causal attention (half
    of them allowed), on the GPU that ``PEAK``, ``SHARE`` and ``LEAST`` describe. Memory: weights, gradient
    and two moments in float32; of a micro-batch, 16 activations a layer and channel, and the logits twice.
    """
    parameters, tokens = _size(config)
    training, model, T = config.train, config.model, sequence_length(config)
    operations = tokens * (6 * parameters + 6 * model.layers * model.width * T)
    least = LEAST * model.layers * training.steps * training.accumulate
    half = 2 if training.precision == "bf16" else 4
    held = (
        T * training.batch // training.accumulate * (16 * half * model.layers * model.width + 8 * model.vocab)
    )
    return Cost(max(operations / (SHARE * PEAK), least), 16 * parameters + held, True)


class _Unscored:
    """The batches of a task; its evaluation costs nothing."""

    def __init__(self, task: Task) -> None:
        self.vocab, self.batch = task.vocab, task.batch

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nothing."""
        return {"loss": 0.0}


def timed(config: RunConfig, task: Task, how: How) -> Cost:
    """Of a step after a first one, which pays for what is set up once."""
    clock: list[float] = []

    def tick(now: Progress) -> None:
        clock.append(now.seconds)

    gc.collect()
    cuda = torch.device(how.device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = replace(config.train, steps=2, evaluate_every=2)
    train(build(config), _Unscored(task), training, config.seed, Keeper(), device=how.device, report=tick)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if cuda or sys.platform == "darwin" else 1024
    return Cost((clock[1] - clock[0]) * config.train.steps, float(peak * unit), False)
