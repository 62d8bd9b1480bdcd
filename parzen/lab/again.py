"""``parzen evaluate``: what a run's best weights achieve, measured once more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.experiments import length, regbench, stories
from parzen.lab.files import write_whole
from parzen.lab.report import flat
from parzen.lab.runs import to_bytes
from parzen.lab.sweep import best_model
from parzen.lab.tasks.length import LengthConfig
from parzen.lab.tasks.regbench import RegBenchConfig

# By layer and head, and what they are called.
BY_HEAD = {"support": "support", "bandwidth": "bandwidth H", "entropy": "entropy"}


def evaluate_run(folder: Path, valid: Path | None, to: Path | None) -> int:
    """Prints the numbers, and what the kernel does in each head; everything goes to ``to`` as JSON.

    Args:
        folder: of the run.
        valid: another text, for a run on stories.
        to: a file, or None.

    Raises:
        UserError: no such run, or a text where none is read.
    """
    run, model = best_model(folder)
    task = run.config.task
    if isinstance(task, RegBenchConfig | LengthConfig):
        if valid is not None:
            raise UserError(f"{folder} was not trained on stories: --valid has no meaning for it")
        got = (regbench if isinstance(task, RegBenchConfig) else length).again(run, model)
    else:
        got = stories.again(run, model, valid)
    if to is not None:
        write_whole(to, to_bytes(got))
    rows = [(key, f"{value:.4g}") for key, value in flat(got) if isinstance(value, int | float)]
    rows += [
        (f"{name}, layer {i + 1}", _list(heads))
        for key, name in BY_HEAD.items()
        for i, heads in enumerate(got.get(key, ()))
    ]
    console.show_table(("", run.config.label), rows)
    return 0


def _list(values: Sequence[float | None]) -> str:
    return "  ".join("∞" if x is None else f"{x:.2f}" for x in values)
