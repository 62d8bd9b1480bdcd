"""``parzen regbench``: Table 1, in-context language learning with mosaics of every kernel and six baselines.

Source: arXiv 2601.22766, section 5.2 and its public configs; the baselines' sizes lie in the range that the
search of 2401.12973 chose from, but for *small*, which fits two CPU cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from parzen.kernels import kernel, spell
from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.experiments.kernel_use import attention_map, kernel_use
from parzen.lab.run.config import EIGHT, RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import HERE, How, Part, Work, sweep
from parzen.lab.run.train import TrainConfig
from parzen.lab.tasks.regbench import (
    TEXT,
    VOCAB,
    InContext,
    Instance,
    RegBench,
    RegBenchConfig,
    Scores,
    batch_of,
    load_regbench,
    ngram,
    score,
    summary,
    truth_of,
)
from parzen.models.backbone import Backbone
from parzen.models.mosaic import MosaicConfig
from parzen.models.sequence import MIXERS, SequenceConfig

# Of Table 1.
BASELINES = ("transformer", "s4", "h3", "retnet", "gla", "mamba")
MODELS = ("mosaic", *BASELINES)
# What the benchmark's search chooses from, and what a small one does.
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tiny": {"width": (16, 32), "lr": (2e-3, 1e-2)},
    "small": {"width": (64, 128), "layers": (2, 4), "lr": (2e-3, 5e-3)},
    "paper": {
        "width": (64, 128, 256, 512, 1024),
        "layers": (1, 2, 4, 8, 12),
        "heads": (1, 2, 4),
        "epochs": (200, 400),
        "lr": (1e-4, 2.5e-4),
        "weight_decay": (0.01, 0.1),
    },
}
BATCH = 32
# Instances that show what a kernel does, each cut to so many tokens; of the first one, a map.
USE_INSTANCES, USE_LENGTH, MAP_TOKENS = 32, 256, 24


@dataclass(frozen=True)
class Scale:
    """Sizes of everything.

    Attributes:
        examples: training instances.
        held_out: validation and test instances.
        epochs, lr: of training; the rate falls to a tenth.
        norm_lr, scalar_lr: see ``TrainConfig``.
        every: epochs between two evaluations.
        mosaic: arguments of ``MosaicConfig``.
        mixer: arguments of ``SequenceConfig``, of every mixer that ``mixers`` does not name.
        mixers: by name, those that are chosen for it.
    """

    examples: tuple[int, ...]
    held_out: tuple[int, int]
    epochs: int
    lr: float
    every: int
    mosaic: Mapping[str, Any]
    mixer: Mapping[str, Any]
    mixers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    norm_lr: float = 1.0
    scalar_lr: float = 1.0
    kernels: Sequence[str] = EIGHT


SCALES = {
    "tiny": Scale(
        (64,), (16, 32), 2, 2e-3, 1,
        {"layers": 1, "heads": 2, "width": 32, "slots": 32}, {"width": 32, "layers": 1},
        kernels=("gaussian", "epanechnikov"),
    ),
    "small": Scale(
        (1000,), (500, 1000), 10, 5e-3, 1,
        {"layers": 2, "heads": 8, "width": 128, "slots": 448}, {"width": 64, "layers": 2},
        norm_lr=10.0, scalar_lr=0.3,
    ),
    "paper": Scale(
        (1000, 2500, 5000, 10_000, 20_000, 40_000), (500, 1000), 200, 1e-4, 1,
        {"layers": 2, "heads": 8, "width": 128, "slots": 448},
        {"width": 128, "layers": 8},
        {
            "transformer": {"width": 128, "layers": 8, "heads": 2},
            "retnet": {"width": 256, "layers": 8, "heads": 2},
            "gla": {"width": 256, "layers": 8, "heads": 2},
            "mamba": {"width": 256, "layers": 8},
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """Every model × kernel × number of examples × seed of a scale.

    Attributes:
        scale: a name of ``SCALES``; what is None comes from it.
        models: "mosaic", and names of ``MIXERS``.
        kernels: of the mosaic.
        examples, seeds: what else differs.
        epochs, lr: of training.
        states, letters: of the automata: exactly so many in place of the public bounds.
        runs: the folder of run folders.
        how: they are carried out.
        grid: baselines are trained with every combination of the scale's ``GRIDS``; the best by validation
            loss is shown.
    """

    scale: str = "small"
    models: Sequence[str] = MODELS
    kernels: Sequence[str] | None = None
    examples: Sequence[int] | None = None
    seeds: Sequence[int] = (0,)
    epochs: int | None = None
    lr: float | None = None
    states: int | None = None
    letters: int | None = None
    runs: Path = Path("runs/regbench")
    how: How = HERE
    grid: bool = False
    bounds: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        given = {"states": self.states, "letters": self.letters}
        object.__setattr__(self, "bounds", {k: (v, v) for k, v in given.items() if v is not None})


# What Table 1 is made of, by folder.
TABLE1: dict[str, dict[str, tuple[Experiment, ...]]] = {
    "tiny": {"regbench": (Experiment("tiny", seeds=(0, 1)),)},
    "small": {
        "regbench": (
            Experiment(models=("mosaic",), seeds=(0, 1)),
            Experiment(models=BASELINES),
            Experiment(models=("mosaic",), kernels=("gaussian", "epanechnikov"), epochs=200, lr=1e-4),
        ),
        # What stays at the unigram's level with a thousand examples can learn here, given time.
        "regbench-easier": (
            Experiment(models=("transformer", "mamba", "s4"), states=4, letters=6),
            Experiment(models=("mamba",), states=4, letters=6, epochs=40),
            Experiment(models=("transformer",), states=4, letters=6, epochs=60, lr=2e-3),
        ),
    },
    "paper": {"regbench": (Experiment("paper", seeds=(0, 1, 2)),)},
}


def run(experiment: Experiment) -> int:
    """Trains what is not finished yet, prints a table for each size; the exit status, as of ``sweep``.

    Raises:
        UserError: no such data, or nothing can be written.
    """
    runs, status = sweep(parts(experiment), experiment.how)
    for examples in experiment.examples or SCALES[experiment.scale].examples:
        here = [run for run in runs if run.config.task.examples == examples]
        print(f"\n{examples:,} examples")
        _show(best(here) if experiment.grid else here, _data(here[0].config.task)[1])
    return status


def parts(experiment: Experiment) -> list[Part]:
    """The runs of each size.

    Raises:
        UserError: settings that nothing can be made of.
    """
    sizes = experiment.examples or SCALES[experiment.scale].examples
    return [Part(experiment.runs, plan(experiment, examples), work) for examples in sizes]


def work(run: Run) -> Work:
    """What a run on RegBench needs."""
    data, baselines = _data(run.config.task)
    # An n-gram that has seen no continuation gives it probability 0: its loss is no number.
    finite = {n: {k: v for k, v in b.items() if math.isfinite(v)} for n, b in baselines.items()}
    return Work(InContext(data), lambda model: {**results(model, data.test), "baselines": finite})


def plan(experiment: Experiment, examples: int) -> list[RunConfig]:
    """The configs of all runs on so many examples, seed by seed.

    Raises:
        UserError: settings that nothing can be made of.
    """
    scale = SCALES[experiment.scale]
    try:
        task = RegBenchConfig(
            **experiment.bounds, examples=examples, validation=scale.held_out[0], test=scale.held_out[1]
        )
        models = [pair for name in experiment.models for pair in _models(experiment, scale, name, examples)]
    except ValueError as error:
        raise UserError(str(error)) from error
    return [
        RunConfig(task, model, training, seed)
        for seed, (model, training) in itertools.product(experiment.seeds, models)
    ]


def _models(
    experiment: Experiment, scale: Scale, name: str, examples: int
) -> Iterator[tuple[MosaicConfig | SequenceConfig, TrainConfig]]:
    if name == "mosaic":
        for k in experiment.kernels or scale.kernels:
            model = MosaicConfig(VOCAB, **scale.mosaic, kernel=spell(kernel(k)), dropout=0.05)
            yield model, _training(experiment, scale, examples)
        return
    grid: dict[str, tuple[Any, ...]] = GRIDS[experiment.scale] if experiment.grid else {}
    if not MIXERS[name].heads:
        grid = {key: values for key, values in grid.items() if key != "heads"}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        sizes = dict(scale.mixers.get(name, scale.mixer))
        sizes |= {key: point.pop(key) for key in ("width", "layers", "heads") if key in point}
        training = _training(experiment, scale, examples, **point)
        yield SequenceConfig(VOCAB, mixer=name, **sizes), training


def _training(
    experiment: Experiment,
    scale: Scale,
    examples: int,
    epochs: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.01,
) -> TrainConfig:
    lr, epochs = experiment.lr or lr or scale.lr, experiment.epochs or epochs or scale.epochs
    steps = -(-examples // BATCH)
    return TrainConfig(
        epochs * steps, BATCH, lr=lr, lr_end=lr / 10, warmup=0.1, weight_decay=weight_decay,
        norm_lr=scale.norm_lr, scalar_lr=scale.scalar_lr, evaluate_every=scale.every * steps,
    )  # fmt: skip


def best(runs: Sequence[Run]) -> list[Run]:
    """Of the finished runs of each model, size and seed: the one with the least validation loss."""
    found: dict[tuple[str, int, int], Run] = {}
    for run in sorted((run for run in runs if run.finished), key=_validation):
        found.setdefault((run.config.name, run.config.task.examples, run.config.seed), run)
    return [run for run in runs if run in found.values()]


def _validation(run: Run) -> float:
    return min(line["loss"] for line in run.metrics())


@lru_cache(maxsize=1)
def _data(task: RegBenchConfig) -> tuple[RegBench, dict[str, dict[str, float]]]:
    """The instances, and how n-grams do on the test instances."""
    data = load_regbench(
        task.examples, seed=task.data_seed, validation=task.validation, test=task.test, bounds=task
    )
    return data, {f"{n}-gram": summary(score_ngram(data.test, n)) for n in (1, 2, 3)}


@torch.no_grad()
def score_ngram(instances: Sequence[Instance], order: int, batch: int = 200) -> Scores:
    """How the n-gram that is counted in context does."""
    scores = Scores()
    ordered = sorted(instances, key=len)
    for start in range(0, len(ordered), batch):
        some = ordered[start : start + batch]
        tokens, labels, lengths = batch_of(some)
        scores.add(ngram(tokens, order), truth_of(some), labels, lengths)
    return scores


def results(model: Backbone, instances: Sequence[Instance]) -> dict[str, Any]:
    """Scores on ``instances``, by position too, and what the kernel does on some of them."""
    scores = score(model, instances)
    long = [i for i in instances if len(i) >= USE_LENGTH][:USE_INSTANCES] or list(instances[:1])
    tokens = batch_of(long)[0][:, :USE_LENGTH]
    by_position = {name: _listed(values.tolist()) for name, values in scores.by_position().items()}
    found = {**summary(scores), "by_position": by_position, **kernel_use(model, tokens)}
    if layers := attention_map(model, tokens[0, :MAP_TOKENS]):
        words = [TEXT[token] for token in tokens[0, :MAP_TOKENS].tolist()]
        found["attention"] = {"words": words, "layers": layers}
    return found


def _listed(values: Sequence[float]) -> list[float | None]:
    return [None if value != value else round(value, 5) for value in values]


HEADERS = ("model", "seed", "accuracy", "accuracy, last", "TVD", "loss", "keys with weight")


def _show(runs: Sequence[Run], baselines: Mapping[str, Mapping[str, float]]) -> None:
    """The table, the smallest distance first; what is unfinished last."""
    rows: list[tuple[str, str, Mapping[str, float]]] = [(n, "—", found) for n, found in baselines.items()]
    rows += [(r.config.name, str(r.config.seed), r.results() if r.finished else {}) for r in runs]
    rows.sort(key=lambda row: row[2].get("tvd", 9.0))
    measures = [("accuracy_all", ".3f"), ("accuracy_last", ".3f"), ("tvd", ".3f"), ("loss", ".3f")]
    measures.append(("share_of_keys", ".1%"))
    print()
    console.show_table(
        HEADERS,
        [
            (
                name,
                seed,
                *(
                    format(found[key], form) if math.isfinite(found.get(key, math.nan)) else "—"
                    for key, form in measures
                ),
            )
            for name, seed, found in rows
        ],
    )
