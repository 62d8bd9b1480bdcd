"""Many runs: what is finished is left alone, what was interrupted goes on, what fails stops nothing else."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import Progress, load_weights, train
from parzen.lab.tasks.task import Task
from parzen.models.backbone import Backbone
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import SequenceModel

ENGINES = ("process", "ray")
FAILED = "error.txt"
# How long a run that another process trains is waited for: on a cluster, for one that is just being killed.
PATIENCE = {"process": 2.0, "ray": 120.0}


@dataclass(frozen=True)
class How:
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


HERE = How()


@dataclass(frozen=True)
class Work:
    """What a run trains on, and what is written of its model, with the best weights, at the end."""

    task: Task
    results: Callable[[Backbone], Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """Runs of one experiment.

    Attributes:
        root: the folder of their folders.
        configs: of the runs.
        work: finds what a run needs.
        files: what else belongs into the folder of each run, by name. With them the folder says it all:
            ``again.work_of`` gives the same as ``work``.
    """

    root: Path
    configs: Sequence[RunConfig]
    work: Callable[[Run], Work]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def planned(self) -> dict[Path, RunConfig]:
        """Each config by the folder of its run."""
        return {self.root / config.digest(): config for config in self.configs}


def build(config: RunConfig) -> Backbone:
    """The untrained model of a run; its weights depend on the seed."""
    torch.manual_seed(config.seed)
    return Mosaic(config.model) if isinstance(config.model, MosaicConfig) else SequenceModel(config.model)


def sweep(parts: Sequence[Part], how: How) -> tuple[list[Run], int]:
    """Trains every run of ``parts`` that is not finished; all of them, and an exit status.

    It is 0, 1 if a run failed, 130 if Ctrl-C ended it.

    Raises:
        UserError: nothing can be written, or there is no such cluster. What is wrong with a single run is
            printed at the end, after the others, and left in its error.txt.
    """
    # Under torchrun the first process alone writes.
    first = os.environ.get("RANK", "0") == "0"
    runs: dict[Path, Run] = {}
    todo = []
    for part in parts:
        for folder, config in part.planned().items():
            if folder in runs:
                continue
            run = runs[folder] = Run.create(part.root, config) if first else Run(folder, config)
            if not run.finished:
                todo.append((run, part))
    places = ", ".join(dict.fromkeys(str(part.root) for part in parts))
    failed: list[str] = []
    status = 0
    try:
        print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done; in {places}", flush=True)
        for run, part in todo:
            for name, data in part.files.items():
                if first:
                    write_whole(run.folder / name, data)
        for run, error in _carried_out(todo, how):
            if error is not None:
                failed.append(f"failed: {run.config.label}: {error}")
                status = 1
    except KeyboardInterrupt:
        failed.append("interrupted; the same command goes on from here")
        status = 130
    for line in failed:
        print(line, file=sys.stderr if status == 1 else sys.stdout)
    return [*runs.values()], status


def _carried_out(todo: Sequence[tuple[Run, Part]], how: How) -> Iterator[tuple[Run, str | None]]:
    """Each run as it ends, and why it failed."""
    if how.engine == "ray":
        from parzen.lab.run import cluster

        yield from cluster.carry_out([run for run, _ in todo], how)
        return
    steps = max((run.config.train.steps for run, _ in todo), default=1)
    with console.progress(max(1, len(todo)), steps) as progress:
        for run, part in todo:
            yield run, attempt(run, part.work, how, progress)


def attempt(
    run: Run, work: Callable[[Run], Work], how: How, progress: console.Progress | None = None
) -> str | None:
    """Trains ``run`` to its end, in this process or one of its own for each GPU; why that failed, or None.

    A mistake of ours, too, ends this run only: its whole traceback is in error.txt.
    """
    try:
        if how.gpus_per_run > 1 and "RANK" not in os.environ:
            from parzen.lab.run import cluster

            cluster.torchrun(run, how)
        else:
            _train(run, work, how, progress)
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


def _train(run: Run, work: Callable[[Run], Work], how: How, progress: console.Progress | None = None) -> None:
    config, needed = run.config, work(run)
    options: dict[str, Any] = {
        "device": how.device,
        "compiled": how.compiled,
        "save_seconds": how.save_seconds,
    }
    if os.environ.get("RANK", "0") != "0":
        train(build(config), needed.task, config.train, config.seed, run, **options)
        return
    # Under torchrun the other processes would wait for one that gave up.
    patience = math.inf if "WORLD_SIZE" in os.environ else PATIENCE[how.engine]
    with run.locked(patience), _losses(run, how.tensorboard) as write:
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
                progress.step(status)
                if now.valid is not None:
                    progress.mark(f"valid {now.valid:.3f}, {status}")

        train(build(config), needed.task, config.train, config.seed, run, report=report, **options)
        _, model = best_model(run.folder)
        counted = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": run.metrics()[-1]["tokens"],
        }
        run.finish({**needed.results(model.to(how.device)), **counted})
        (run.folder / FAILED).unlink(missing_ok=True)


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


def best_model(folder: Path) -> tuple[Run, Backbone]:
    """The run in ``folder`` and its model with the best weights so far.

    Raises:
        UserError: no such run, or it has no checkpoint yet.
    """
    run = Run.open(folder)
    saved = run.load("best")
    if saved is None:
        advice = "remove its results.json to train it again" if run.finished else "train it for longer"
        raise UserError(f"{folder} has no best.safetensors: {advice}")
    model = build(run.config)
    load_weights(model, saved[0])
    return run, model.eval()
