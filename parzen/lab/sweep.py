"""Runs, one after the other: what is finished is left alone, what was interrupted goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parzen.lab import console
from parzen.lab.config import RunConfig
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.runs import Run
from parzen.lab.train import Progress, Task, load_weights, train
from parzen.models.backbone import Backbone
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import SequenceModel


def build(config: RunConfig) -> Backbone:
    """The untrained model of a run; its weights depend on the seed."""
    torch.manual_seed(config.seed)
    return Mosaic(config.model) if isinstance(config.model, MosaicConfig) else SequenceModel(config.model)


def sweep(
    root: Path,
    configs: Sequence[RunConfig],
    task: Task,
    results: Callable[[Backbone, RunConfig], Mapping[str, Any]],
    *,
    device: str = "cpu",
    compiled: bool = False,
    tensorboard: bool = False,
    files: Mapping[str, bytes] | None = None,
) -> tuple[list[Run], int]:
    """Trains every run below ``root`` that is not finished; all of them, and an exit status.

    It is 0, 1 if a run failed, 130 if Ctrl-C ended it.

    Args:
        root: the folder of run folders.
        configs: of the runs, all of the same ``task``.
        results: what is written of a model, with its best weights, when its training is done.
        device: where it runs.
        compiled: whether models go through ``torch.compile``.
        tensorboard: whether losses go to TensorBoard too, in a folder of each run.
        files: what else belongs into the folder of each run, by name.

    Raises:
        UserError: nothing can be written. What is wrong with a single run is printed at the end, after the
            others, and left in its error.txt.
    """
    # Under torchrun the first process alone writes.
    first = os.environ.get("RANK", "0") == "0"
    runs = [Run.create(root, c) if first else Run(root / c.digest(), c) for c in configs]
    todo = [run for run in runs if not run.finished]
    steps = max((run.config.train.steps for run in todo), default=1)
    failed: list[str] = []
    status = 0
    try:
        print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done; in {root}")
        with console.progress(max(1, len(todo)), steps) as progress:
            for run in todo:
                try:
                    if not first:
                        train(
                            build(run.config), task, run.config.train, run.config.seed, run,
                            device=device, compiled=compiled,
                        )  # fmt: skip
                        continue
                    for name, data in (files or {}).items():
                        write_whole(run.folder / name, data)
                    writer = _writer(run.folder / "tensorboard") if tensorboard else None
                    _finish(run, task, results, progress, writer, device=device, compiled=compiled)
                except UserError as error:
                    failed.append(f"failed: {run.config.label}: {error}")
                    if first:
                        write_whole(run.folder / "error.txt", f"{error}\n".encode())
                    status = 1
    except KeyboardInterrupt:
        failed.append("interrupted; the same command goes on from here")
        status = 130
    for line in failed:
        print(line, file=sys.stderr if status == 1 else sys.stdout)
    return runs, status


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


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError("tensorboard is not installed; run: pip install 'parzen[tensorboard]'") from error
    return SummaryWriter(folder)


def _finish(
    run: Run,
    task: Task,
    results: Callable[[Backbone, RunConfig], Mapping[str, Any]],
    progress: console.Progress,
    writer: Any,
    **options: Any,
) -> None:
    config = run.config
    progress.part(config.label)

    def report(now: Progress) -> None:
        status = f"train {now.loss:.3f}, {now.tokens / now.seconds:,.0f} tokens/s"
        progress.step(status)
        if writer:
            writer.add_scalar("loss/train", now.loss, now.step)
        if now.valid is not None:
            progress.mark(f"valid {now.valid:.3f}, {status}")
            if writer:
                writer.add_scalar("loss/validation", now.valid, now.step)

    model = build(config)
    train(model, task, config.train, config.seed, run, report=report, **options)
    if writer:
        writer.close()
    _, model = best_model(run.folder)
    counted = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": run.metrics()[-1]["tokens"],
    }
    run.finish({**results(model, config), **counted})
