"""Many runs: what is finished is left alone, what was interrupted goes on, what fails stops nothing else."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.run import stop
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import Progress, load_weights, train
from parzen.lab.tasks.task import Task
from parzen.models.backbone import Backbone
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import SequenceModel

ENGINES = ("process", "ray")
FAILED, LOG = "error.txt", "log.txt"
# How long a run that another process trains is waited for: on a cluster, for one that is just being killed.
PATIENCE = {"process": 2.0, "ray": 120.0}


@dataclass(frozen=True)
class Execution:
    """How runs are carried out; what they compute does not depend on it, but for rounding.

    Attributes:
        device: where a model runs.
        compiled: whether models go through ``torch.compile``.
        tensorboard: whether losses go to TensorBoard too, in a folder of each run.
        gpus_per_run: processes that share one run, a GPU each; more than one start with ``torchrun``.
        save_seconds: between two checkpoints, about; so much is done again after a kill.
        engine: "process": one run after the other in this process; "ray": tasks of a Ray cluster.
        address: of a Ray cluster that is running, "auto" or HOST:PORT; None starts one on this machine.
        cpus_per_run: threads of a run on a Ray cluster, which decide how many run at once.
    """

    device: str = "cpu"
    compiled: bool = False
    tensorboard: bool = False
    gpus_per_run: int = 1
    save_seconds: float = 60.0
    engine: str = "process"
    address: str | None = None
    cpus_per_run: int = 1


LOCAL = Execution()


@dataclass(frozen=True)
class Workload:
    """What a run trains on, and what is written of its model, with the best weights, at the end."""

    task: Task
    results: Callable[[Backbone], Mapping[str, Any]]


@dataclass(frozen=True)
class RunSet:
    """Runs of one experiment.

    Attributes:
        root: the folder of their folders.
        configs: of the runs.
        work: finds what a run needs.
        files: what else belongs into the folder of each run, by name. With them the folder says it all.
        tuned: of runs that differ in what is tuned, the best by validation counts.
        missing: what must be given before they can be trained; without it they can be counted only.
    """

    root: Path
    configs: Sequence[RunConfig]
    work: Callable[[Run], Workload]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tuned: bool = False
    missing: str = ""

    def planned(self) -> dict[Path, RunConfig]:
        """Each config by the folder of its run."""
        return {self.root / config.digest(): config for config in self.configs}


# Trains runs, and gives each as it ends, with why it failed.
CarryOut: TypeAlias = Callable[[Sequence[tuple[Run, RunSet]], Execution], Iterator[tuple[Run, str | None]]]
# Finds a run and what it needs through its folder alone, in any process.
Reopen: TypeAlias = Callable[[Path], tuple[Run, Workload]]


def build(config: RunConfig) -> Backbone:
    """The untrained model of a run; its weights depend on the seed."""
    torch.manual_seed(config.seed)
    return Mosaic(config.model) if isinstance(config.model, MosaicConfig) else SequenceModel(config.model)


def in_turn(todo: Sequence[tuple[Run, RunSet]], execution: Execution) -> Iterator[tuple[Run, str | None]]:
    """Each run as it ends, one after the other in this process, and why it failed."""
    steps = max((run.config.train.steps for run, _ in todo), default=1)
    with console.progress(max(1, len(todo)), steps) as progress:
        for run, part in todo:
            yield run, attempt(run, partial(part.work, run), execution, progress)


def sweep(
    sets: Sequence[RunSet], execution: Execution, carry_out: CarryOut = in_turn
) -> tuple[list[Run], int]:
    """Trains every run of ``sets`` that is not finished; all of them, and an exit status.

    It is 0, 1 if a run failed, 130 if Ctrl-C ended it.

    Raises:
        Terminated: SIGTERM came; how to go on is printed.
        UserError: nothing can be written, or there is no such cluster. What is wrong with a single run is
            printed at the end, after the others, and left in its error.txt.
    """
    # Under torchrun the first process alone writes.
    first = os.environ.get("RANK", "0") == "0"
    runs: dict[Path, Run] = {}
    todo = []
    for part in sets:
        if part.missing:
            raise UserError(part.missing)
        for folder, config in part.planned().items():
            if folder in runs:
                continue
            run = runs[folder] = Run.create(part.root, config) if first else Run(folder, config)
            if run.finished:
                continue
            todo.append((run, part))
            for name, data in part.files.items():
                if first:
                    write_whole(run.folder / name, data)
    places = ", ".join(dict.fromkeys(str(part.root) for part in sets))
    failed: list[str] = []
    status = 0
    try:
        print(
            f"{console.count(len(runs), 'run')}, {len(runs) - len(todo)} of them done; in {places}",
            flush=True,
        )
        for run, error in carry_out(todo, execution):
            if error is not None:
                failed.append(f"failed: {run.config.label}: {error}")
                status = 1
    except stop.Terminated:
        left = next((run.folder for run, _ in todo if not run.finished), None)
        if first and left is not None:
            print(
                "stopped by SIGTERM, with everything saved; the same command goes on from here, or: "
                f"parzen resume {left}",
                flush=True,
            )
        raise
    except KeyboardInterrupt:
        failed.append("interrupted; the same command goes on from here")
        status = 130
    for line in failed:
        print(line, file=sys.stderr if status == 1 else sys.stdout)
    return [*runs.values()], status


def attempt(
    run: Run, work: Callable[[], Workload], execution: Execution, progress: console.Progress | None = None
) -> str | None:
    """Trains ``run`` to its end, in this process or one of its own for each GPU; why that failed, or None.

    A mistake of ours, too, ends this run only: its whole traceback is in error.txt.
    """
    try:
        if execution.gpus_per_run > 1 and "RANK" not in os.environ:
            torchrun(run, execution)
        else:
            _train(run, work, execution, progress)
    except UserError as error:
        reason, text = str(error), f"{error}\n"
    # Of whatever kind: hours of other runs are not lost to it, and nothing of it is hidden.
    except Exception as error:
        text = traceback.format_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())} (see {run.folder / FAILED})"
    else:
        return None
    if os.environ.get("RANK", "0") == "0":
        write_whole(run.folder / FAILED, text.encode(errors="replace"))
    return reason


def _train(
    run: Run, work: Callable[[], Workload], execution: Execution, progress: console.Progress | None = None
) -> None:
    config, needed = run.config, work()
    options: dict[str, Any] = {
        "device": execution.device,
        "compiled": execution.compiled,
        "save_seconds": execution.save_seconds,
    }
    if os.environ.get("RANK", "0") != "0":
        train(build(config), needed.task, config.train, config.seed, run, **options)
        return
    # Under torchrun the other processes would wait for one that gave up.
    patience = math.inf if "WORLD_SIZE" in os.environ else PATIENCE[execution.engine]
    with run.locked(patience), _losses(run, execution.tensorboard) as write:
        if run.finished:
            return
        if progress:
            progress.part(config.label)

        def report(now: Progress) -> None:
            write("loss/train", now.loss, now.step)
            if now.valid is not None:
                write("loss/validation", now.valid, now.step)
            if progress:
                status = f"train {now.loss:.3f}, {now.tokens / now.seconds:,.0f} tokens/s"
                progress.step(status, now.step)
                if now.valid is not None:
                    progress.mark(f"valid {now.valid:.3f}, {status}")

        train(build(config), needed.task, config.train, config.seed, run, report=report, **options)
        model = best_model(run)
        counted = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": run.metrics()[-1]["tokens"],
        }
        run.finish({**needed.results(model.to(execution.device)), **counted})
        (run.folder / FAILED).unlink(missing_ok=True)


def torchrun(run: Run, execution: Execution) -> None:
    """Trains ``run`` with ``execution.gpus_per_run`` processes; what they print goes to its log.txt.

    Raises:
        UserError: they failed.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={execution.gpus_per_run}", "-m", "parzen", "resume", str(run.folder)),
        *("--device", execution.device, "--save-seconds", str(execution.save_seconds)),
        *(*["--compile"] * execution.compiled, *["--tensorboard"] * execution.tensorboard),
    ]
    log, error = run.folder / LOG, run.folder / FAILED
    error.unlink(missing_ok=True)
    with open(log, "ab") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=_die_together
        )
        try:
            status = child.wait()
        finally:
            # Asked to end, the processes of the run save where they are.
            child.terminate()
            child.wait()
    if status:
        said = error.read_text().splitlines()[-1] if error.exists() else f"exit status {status}"
        raise UserError(f"{said} (see {log})")


def _die_together() -> None:
    """Linux ends this process when its parent dies: nothing else may train the run then."""
    if sys.platform == "linux":
        death = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death, signal.SIGTERM)


@contextmanager
def _losses(run: Run, tensorboard: bool) -> Iterator[Callable[[str, float, int], object]]:
    if not tensorboard:
        yield lambda name, value, step: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError("tensorboard is not installed; run: pip install 'parzen[tensorboard]'") from error
    writer = SummaryWriter(run.folder / "tensorboard")
    try:
        yield writer.add_scalar
    finally:
        writer.close()


def best_model(run: Run) -> Backbone:
    """The model of ``run`` with the best weights so far.

    Raises:
        UserError: it has no checkpoint yet.
    """
    saved = run.load("best")
    if saved is None:
        advice = (
            "put it back; or move its results.json and last.safetensors aside, and it is trained again"
            if run.finished
            else "train it for longer"
        )
        raise UserError(f"{run.folder} has no best.safetensors: {advice}")
    model = build(run.config)
    load_weights(model, saved[0])
    return model.eval()


def chosen(sets: Sequence[RunSet], runs: Sequence[Run]) -> list[Run]:
    """``runs``, but of those that are tuned, for each task, model and seed, the one that validates best."""
    tuned = {folder for part in sets if part.tuned for folder in part.planned()}
    best: dict[str, Run] = {}
    for run in sorted((run for run in runs if run.folder in tuned and run.finished), key=_validation):
        best.setdefault(repr((run.config.task, run.config.name, run.config.seed)), run)
    return [run for run in runs if run.folder not in tuned or run in best.values()]


def _validation(run: Run) -> float:
    return min(line["loss"] for line in run.metrics())
