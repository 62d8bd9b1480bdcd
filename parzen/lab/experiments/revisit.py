"""What a run folder can be asked for: to go on, to be measured once more, to write."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parzen.lab import console
from parzen.lab.data.text import END
from parzen.lab.data.tokens import read_tokenizer
from parzen.lab.errors import UserError
from parzen.lab.experiments import experiment_of, open_run, train
from parzen.lab.files import write_whole
from parzen.lab.run.config import flat
from parzen.lab.run.folder import find_folders, to_bytes
from parzen.lab.run.sweep import Execution, RunSet, best_model
from parzen.lab.tasks.stories import StoriesConfig
from parzen.models.generate import generate
from parzen.models.mosaic import Mosaic

# By layer and head, and what they are called.
BY_HEAD = {"support": "support", "bandwidth": "bandwidth H", "entropy": "entropy"}


def list_runs(places: Sequence[Path]) -> int:
    """Prints the runs in and below ``places``; the exit status, 1 if one of them is damaged.

    Raises:
        UserError: a place does not exist, or holds no run.
    """
    rows, status = [], 0
    for folder in find_folders(places):
        try:
            run = open_run(folder)
            last = next(iter(run.metrics()[-1:]), {})
        except UserError as error:
            print(f"parzen: warning: {error}", file=sys.stderr)
            rows.append((str(folder), "—", "—", "—", "—", "damaged", "—"))
            status = 1
            continue
        config, loss = run.config, last.get("loss")
        state = "finished" if run.finished else f"step {last.get('step', 0)} of {config.train.steps}"
        rows.append(
            (
                str(folder),
                " ".join((config.task.kind, *([config.task.name] if hasattr(config.task, "name") else ()))),
                config.name,
                str(config.model.layers),
                str(config.seed),
                state,
                "—" if loss is None else f"{loss:.3f}",
            )
        )
    console.show_table(("run", "task", "model", "layers", "seed", "state", "validation loss"), rows)
    return status


def resume(folders: Sequence[Path], execution: Execution) -> int:
    """Goes on with the runs in ``folders``, prints their tables; the exit status, as of ``sweep``.

    Raises:
        UserError: a folder that holds no run.
    """
    opened = [open_run(folder) for folder in folders]
    sets = [RunSet(run.folder.resolve().parent, [run.config], experiment_of(run).work) for run in opened]
    runs, status = train(sets, execution)
    for kind in dict.fromkeys(run.config.task.kind for run in runs):
        alike = [run for run in runs if run.config.task.kind == kind]
        experiment_of(alike[0]).show(alike)
    return status


def evaluate_run(folder: Path, *, to: Path | None = None, **given: Any) -> int:
    """Prints the numbers, and what the kernel does in each head; everything goes to ``to`` as JSON.

    Args:
        folder: of the run.
        to: a file, or None.
        given: options of the run's experiment, such as another text or other lengths.

    Raises:
        UserError: no such run, or an option that the run's experiment does not have.
    """
    if not (folder / "config.json").exists() and folder.is_dir() and any(folder.rglob("config.json")):
        list_runs([folder])
        raise UserError(f"{folder} is not the folder of a run but of those above; give one of them")
    run = open_run(folder)
    model = best_model(run)
    measure = experiment_of(run).measure
    for name in given.keys() - inspect.signature(measure).parameters.keys():
        raise UserError(f"{folder} is a run on {run.config.task.kind}: --{name} has no meaning for it")
    got = measure(run, model, **given)
    if to is not None:
        write_whole(to, to_bytes(dict(got)))
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


def generate_from(
    folder: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int
) -> int:
    """Prints ``prompt`` and what the run's best weights write after it."""
    run = open_run(folder)
    model = best_model(run)
    if not isinstance(run.config.task, StoriesConfig) or not isinstance(model, Mosaic):
        raise UserError(f"{folder} is no mosaic that was trained on stories")
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not UTF-8") from error
    ids = tokenizer.encode(prompt or END).ids
    generator = torch.Generator().manual_seed(seed)
    written = generate(model, torch.tensor([ids]), tokens, temperature, top_k, generator)
    print(prompt + tokenizer.decode(written[0].tolist(), skip_special_tokens=False).split(END)[0])
    return 0
