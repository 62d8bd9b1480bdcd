"""The experiments of the paper: a row is one file, which owns all that differs from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parzen.lab.experiments import kernels, length, regbench, stories
from parzen.lab.experiments.experiment import Experiment, Trained
from parzen.lab.run import cluster, sweep
from parzen.lab.run.folder import Run, find_folders
from parzen.lab.run.sweep import Execution, RunSet, Workload

EXPERIMENTS: dict[str, Experiment] = {
    "kernels": kernels.EXPERIMENT,
    "stories": stories.EXPERIMENT,
    "regbench": regbench.EXPERIMENT,
    "length": length.EXPERIMENT,
}


def trained() -> list[Trained]:
    """Those that need runs."""
    return [row.trained for row in EXPERIMENTS.values() if row.trained]


def targets() -> dict[str, Experiment]:
    """Figures and tables, by the names that ``parzen reproduce`` knows."""
    return {row.where.lower().replace(" ", ""): row for row in EXPERIMENTS.values()}


def open_run(folder: Path) -> Run:
    """The run in ``folder``.

    Raises:
        UserError: there is none, its config is damaged, or was edited after the run began.
    """
    return Run.open(folder, [one.task for one in trained()])


def find_runs(places: Iterable[Path]) -> list[Run]:
    """All runs in and below ``places``, in order of folder name.

    Raises:
        UserError: a place does not exist, or holds none.
    """
    return [open_run(folder) for folder in find_folders(places)]


def experiment_of(run: Run) -> Trained:
    """What ``run`` is a part of."""
    return next(one for one in trained() if one.task.kind == run.config.task.kind)


def reopen(folder: Path) -> tuple[Run, Workload]:
    """The run in ``folder`` and what it needs.

    Raises:
        UserError: as ``open_run``; data that are gone, or have changed.
    """
    run = open_run(folder)
    return run, experiment_of(run).work(run)


def train(sets: Sequence[RunSet], execution: Execution) -> tuple[list[Run], int]:
    """``sweep`` of the runs of ``sets``: those that are not tuned away, and the exit status."""
    carry_out = partial(cluster.carry_out, reopen=reopen) if execution.engine == "ray" else sweep.in_turn
    runs, status = sweep.sweep(sets, execution, carry_out)
    return sweep.chosen(sets, runs), status


def run(experiment: Trained, settings: Any) -> int:
    """Trains what is not finished yet, prints the table; the exit status, as of ``sweep``.

    Raises:
        UserError: settings that nothing can be made of, or nothing can be written.
    """
    runs, status = train(experiment.sets(settings), settings.execution)
    experiment.show(runs)
    return status
