"""What an experiment is: everything that differs from one to the next, in one row of ``EXPERIMENTS``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parzen.lab.experiments.claims import Claim, Table
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import RunSet, Workload
from parzen.lab.tasks.task import TaskConfig

# Every scale, and the folder below results/ that its reports go into.
SCALES = {"tiny": "tiny/", "small": "", "paper": "paper/"}
# The kernels that the paper compares.
EIGHT = (
    "gaussian",
    "epanechnikov",
    "biweight",
    "triweight",
    "normrelu",
    "relumax",
    "knn_uniform",
    "knn_gaussian",
)


@dataclass(frozen=True)
class Command:
    """A subcommand of ``parzen`` that trains.

    Attributes:
        name, about: of the subcommand.
        options: adds its options; those that are given make the settings.
        settings: of them; a dataclass with ``runs`` (the folder of run folders), ``seeds`` and ``execution``.
    """

    name: str
    about: str
    options: Callable[[argparse.ArgumentParser], None]
    settings: Callable[..., Any]


def nothing(*ignored: Any) -> Any:
    """An empty list: no options, claims, tables."""
    return []


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How an experiment trains.

    Attributes:
        task: the type of its runs' task config.
        commands: that train.
        scales: by scale and folder of the report, the settings that make the figure or table.
        sets: the runs that settings make.
        work: what a run trains on, and how it is measured; found through its folder.
        show: prints the table of some of its runs.
        options: of ``parzen reproduce``: those with the name of a setting replace it.
        measure: measures a run with its best weights once more, with the options given to
            ``parzen evaluate``; these, ``measured_with`` adds.
    """

    task: type[TaskConfig]
    commands: Sequence[Command]
    scales: Mapping[str, Mapping[str, Sequence[Any]]]
    sets: Callable[[Any], list[RunSet]]
    work: Callable[[Run], Workload]
    show: Callable[[Sequence[Run]], None]
    options: Callable[[argparse.ArgumentParser], object] = nothing
    measure: Callable[..., Mapping[str, Any]]
    measured_with: Callable[[argparse.ArgumentParser], object] = nothing


@dataclass(frozen=True)
class Experiment:
    """A row.

    Attributes:
        where: a figure or table of the paper.
        title: what it is about.
        claims: what the paper says of it at a scale.
        tables: its numbers at a scale.
        trained: None if it needs no runs.
    """

    where: str
    title: str
    claims: Callable[[str], Sequence[Claim]] = nothing
    tables: Callable[[str], Sequence[Table]] = nothing
    trained: Trained | None = None
