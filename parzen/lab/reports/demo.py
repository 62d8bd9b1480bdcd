"""``parzen demo``: ``parzen compare stories`` at a size that takes minutes, and its report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from parzen.lab.data.text import MOST_TEXT
from parzen.lab.experiments import stories as experiment
from parzen.lab.experiments import train
from parzen.lab.experiments.stories import Comparison
from parzen.lab.files import write_whole
from parzen.lab.reports.document import report
from parzen.lab.tasks.stories import Stories

SIZE = Comparison(
    kernels=("gaussian", "epanechnikov", "biweight", "relumax"),
    layers=(2,),
    minutes=4.0,
    context=128,
    batch=4,
    curve=8,
    most=MOST_TEXT,
    sample=64,
)

ABOUT = b"""What `parzen demo` found: index.html shows everything, table.md the numbers.

Finished kernels are not trained again; remove the folder runs to start anew.
"""


def run(comparison: Comparison, to: Path) -> int:
    """Trains and reports into ``to``, run folders in a folder of it; the exit status, 130 after Ctrl-C.

    Raises:
        UserError: files that cannot be read or written.
    """
    # Better to learn now than in four minutes that nothing can be written.
    write_whole(to / "README.md", ABOUT)
    stories = experiment.load(comparison)
    _choose_threads(comparison, stories)
    sets = [experiment.sets_on(stories, replace(comparison, runs=to / "runs"))]
    runs, status = train(sets, comparison.execution)
    experiment.show(runs)
    if begun := [r for r in runs if r.finished or r.metrics()]:
        report(begun, to)
        print(f"\nsaved in {to}: index.html, table.md, loss.png, …")
    return status


def _choose_threads(comparison: Comparison, stories: Stories) -> None:
    """All cores that this process may use, or one if others keep them busy.

    Threads that wait for a core taken by another program can make a step many times slower.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = {}
    for threads in {1, cores}:
        torch.set_num_threads(threads)
        times[threads] = experiment.seconds_a_step(comparison, stories, steps=5)
    torch.set_num_threads(min(times, key=times.__getitem__))
