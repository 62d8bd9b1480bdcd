"""What a run folder can be asked for: to go on, or to be measured once more. The folder says it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.experiments import length, regbench, stories
from parzen.lab.files import write_whole
from parzen.lab.reports.groups import flat
from parzen.lab.run.folder import Run, to_bytes
from parzen.lab.run.sweep import How, Part, Work, best_model, sweep
from parzen.lab.tasks.length import LengthConfig
from parzen.lab.tasks.regbench import RegBenchConfig
from parzen.lab.tasks.stories import StoriesConfig

# What a run of each task needs.
WORK: dict[type, Callable[[Run], Work]] = {
    StoriesConfig: stories.work,
    RegBenchConfig: regbench.work,
    LengthConfig: length.work,
}
# By layer and head, and what they are called.
BY_HEAD = {"support": "support", "bandwidth": "bandwidth H", "entropy": "entropy"}


def work_of(run: Run) -> Work:
    """What ``run`` trains on and is measured by, found through its folder."""
    return WORK[type(run.config.task)](run)


def resume(folders: Sequence[Path], how: How) -> int:
    """Goes on with the runs in ``folders``; the exit status, as of ``sweep``.

    Raises:
        UserError: a folder that holds no run.
    """
    runs = [Run.open(folder) for folder in folders]
    return sweep([Part(run.folder.resolve().parent, [run.config], work_of) for run in runs], how)[1]


def evaluate_run(
    folder: Path,
    *,
    valid: Path | None = None,
    lengths: Sequence[int] | None = None,
    keep: bool = False,
    to: Path | None = None,
) -> int:
    """Prints the numbers, and what the kernel does in each head; everything goes to ``to`` as JSON.

    Args:
        folder: of the run.
        valid: another text, for a run on stories.
        lengths: other source lengths for the tests, ascending, for a run on a task of lengths.
        keep: add what is found at ``lengths`` to the run's results, for its reports.
        to: a file, or None.

    Raises:
        UserError: no such run, or what the run's task does not have.
    """
    run, model = best_model(folder)
    task = run.config.task
    if valid is not None and not isinstance(task, StoriesConfig):
        raise UserError(f"{folder} was not trained on stories: --valid has no meaning for it")
    if lengths is not None and not isinstance(task, LengthConfig):
        raise UserError(f"{folder} is no run of parzen length: --lengths has no meaning for it")
    if keep and lengths is None:
        raise UserError("--keep goes with --lengths: what else is measured is kept already")
    if keep and not run.finished:
        raise UserError(f"{folder} is not finished, so that nothing can be added: see parzen resume")
    if isinstance(task, StoriesConfig):
        got = stories.again(run, model, valid)
    elif isinstance(task, LengthConfig):
        got = length.again(run, model, lengths)
        if keep:
            length.keep(run, got)
    else:
        got = dict(work_of(run).results(model))
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
