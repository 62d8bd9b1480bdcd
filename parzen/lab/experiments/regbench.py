"""``parzen regbench``: Table 1, in-context language learning with mosaics of every kernel and six baselines.

Source: arXiv 2601.22766, section 5.2 and its public configs; the baselines' sizes lie in the range that the
search of 2401.12973 chose from, but for *small*, which fits two CPU cores.
"""

from __future__ import annotations

import itertools
import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from parzen.kernels import kernel, spell
from parzen.lab import console
from parzen.lab.arguments import kernel_names, names_among, path, positive, whole
from parzen.lab.errors import UserError
from parzen.lab.experiments.claims import (
    ACCURACY,
    ALIKE,
    MOSAICS,
    POLYNOMIALS,
    SLIGHTLY,
    TVD,
    All,
    Claim,
    Narrows,
    Outcome,
    Place,
    Results,
    Table,
    Within,
    alone,
    over,
)
from parzen.lab.experiments.experiment import EIGHT, Command, Experiment, Trained
from parzen.lab.experiments.experiment import SCALES as FOLDERS
from parzen.lab.experiments.kernel_use import attention_map, kernel_use
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import LOCAL, Execution, RunSet, Workload
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
class RegBenchSettings:
    """Every model × kernel × number of examples × seed of a scale.

    Attributes:
        scale: a name of ``SCALES``; what is None comes from it.
        models: "mosaic", and names of ``MIXERS``.
        kernels: of the mosaic.
        examples, seeds: what else differs.
        epochs, lr: of training.
        states, letters: of the automata: exactly so many in place of the public bounds.
        runs: the folder of run folders.
        execution: they are carried out.
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
    execution: Execution = LOCAL
    grid: bool = False
    bounds: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        given = {"states": self.states, "letters": self.letters}
        object.__setattr__(self, "bounds", {k: (v, v) for k, v in given.items() if v is not None})


# What Table 1 is made of, by folder.
TABLE1: dict[str, dict[str, tuple[RegBenchSettings, ...]]] = {
    "tiny": {"regbench": (RegBenchSettings("tiny", seeds=(0, 1)),)},
    "small": {
        "regbench": (
            RegBenchSettings(models=("mosaic",), seeds=(0, 1)),
            RegBenchSettings(models=BASELINES),
            RegBenchSettings(models=("mosaic",), kernels=("gaussian", "epanechnikov"), epochs=200, lr=1e-4),
        ),
        # What stays at the unigram's level with a thousand examples can learn here, given time.
        "regbench-easier": (
            RegBenchSettings(models=("transformer", "mamba", "s4"), states=4, letters=6),
            RegBenchSettings(models=("mamba",), states=4, letters=6, epochs=40),
            RegBenchSettings(models=("transformer",), states=4, letters=6, epochs=60, lr=2e-3),
        ),
    },
    "paper": {"regbench": (RegBenchSettings("paper", seeds=(0, 1, 2)),)},
}


def sets(settings: RegBenchSettings) -> list[RunSet]:
    """The runs of each size.

    Raises:
        UserError: settings that nothing can be made of.
    """
    sizes = settings.examples or SCALES[settings.scale].examples
    return [RunSet(settings.runs, plan(settings, examples), work, tuned=settings.grid) for examples in sizes]


def work(run: Run) -> Workload:
    """What a run on RegBench needs."""
    data, baselines = _data(run.config.task)
    # An n-gram that has seen no continuation gives it probability 0: its loss is no number.
    finite = {n: {k: v for k, v in b.items() if math.isfinite(v)} for n, b in baselines.items()}
    return Workload(InContext(data), lambda model: {**results(model, data.test), "baselines": finite})


def plan(settings: RegBenchSettings, examples: int) -> list[RunConfig]:
    """The configs of all runs on so many examples, seed by seed.

    Raises:
        UserError: settings that nothing can be made of.
    """
    scale = SCALES[settings.scale]
    try:
        task = RegBenchConfig(
            **settings.bounds, examples=examples, validation=scale.held_out[0], test=scale.held_out[1]
        )
        models = [pair for name in settings.models for pair in _models(settings, scale, name, examples)]
    except ValueError as error:
        raise UserError(str(error)) from error
    return [
        RunConfig(task, model, training, seed)
        for seed, (model, training) in itertools.product(settings.seeds, models)
    ]


def _models(
    settings: RegBenchSettings, scale: Scale, name: str, examples: int
) -> Iterator[tuple[MosaicConfig | SequenceConfig, TrainConfig]]:
    if name == "mosaic":
        for k in settings.kernels or scale.kernels:
            model = MosaicConfig(VOCAB, **scale.mosaic, kernel=spell(kernel(k)), dropout=0.05)
            yield model, _training(settings, scale, examples)
        return
    grid: dict[str, tuple[Any, ...]] = GRIDS[settings.scale] if settings.grid else {}
    if not MIXERS[name].heads:
        grid = {key: values for key, values in grid.items() if key != "heads"}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        sizes = dict(scale.mixers.get(name, scale.mixer))
        sizes |= {key: point.pop(key) for key in ("width", "layers", "heads") if key in point}
        training = _training(settings, scale, examples, **point)
        yield SequenceConfig(VOCAB, mixer=name, **sizes), training


def _training(
    settings: RegBenchSettings,
    scale: Scale,
    examples: int,
    epochs: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.01,
) -> TrainConfig:
    lr, epochs = settings.lr or lr or scale.lr, settings.epochs or epochs or scale.epochs
    steps = -(-examples // BATCH)
    return TrainConfig(
        epochs * steps, BATCH, lr=lr, lr_end=lr / 10, warmup=0.1, weight_decay=weight_decay,
        norm_lr=scale.norm_lr, scalar_lr=scale.scalar_lr, evaluate_every=scale.every * steps,
    )  # fmt: skip


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


SHOWN = (
    ("accuracy_all", ".3f"),
    ("accuracy_last", ".3f"),
    ("tvd", ".3f"),
    ("loss", ".3f"),
    ("share_of_keys", ".1%"),
)
HEADERS = ("model", "seed", "accuracy", "accuracy, last", "TVD", "loss", "keys with weight", "run")


def show(runs: Sequence[Run]) -> None:
    """A table for each size, the smallest distance first; what is unfinished last."""
    for examples in dict.fromkeys(run.config.task.examples for run in runs):
        here = [run for run in runs if run.config.task.examples == examples]
        known = [
            (r.config.name, str(r.config.seed), r.folder.name, r.results() if r.finished else {})
            for r in here
        ]
        baselines: dict[str, Any] = next((found["baselines"] for *_, found in known if found), {})
        rows = [*((n, "—", "—", found) for n, found in baselines.items()), *known]
        rows.sort(key=lambda row: row[-1].get("tvd", 9.0))
        print(f"\n{examples:,} examples\n")
        console.show_table(
            HEADERS,
            [
                (*names, *(_cell(found.get(key), form) for key, form in SHOWN), folder)
                for *names, folder, found in rows
            ],
        )


def _cell(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else "—"


# ---- claims --------------------------------------------------------------------------------------


def _place(scale: str, examples: int) -> Place:
    return Place(f"n = {examples:,}", f"{FOLDERS[scale]}regbench", (("task.examples", examples),))


def _claims(scale: str, examples: int) -> list[Claim]:
    place = _place(scale, examples)

    def both(pairs: tuple[tuple[str, str | None], ...], low: float, high: float = math.inf) -> All:
        return All((Within(place, TVD, pairs, low, high), Within(place, ACCURACY, pairs, low, high)))

    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {}
    if examples <= 5000:
        rows["polynomials-match"] = (
            "with little data the rectified polynomials match or beat the Gaussian in accuracy and TVD",
            both(over(POLYNOMIALS, ("gaussian",)), low=-ALIKE),
        )
    else:
        rows["around-95"] = (
            "with more data all compact kernels with adaptive support reach an accuracy of about 95 %",
            Within(place, ACCURACY, alone(*POLYNOMIALS, "relumax"), low=0.95 - ALIKE, high=0.95 + ALIKE),
        )
        rows["alike"] = (
            "and end alike in TVD",
            Within(place, TVD, over((*POLYNOMIALS, "relumax"), ("gaussian",)), low=-ALIKE, high=ALIKE),
        )
    rows["sparsemax-best"] = (
        "sparsemax is the best of the Epanechnikov family",
        Within(place, TVD, over(("epanechnikov",), ("relumax", "normrelu"))),
    )
    rows["relumax-next"] = (
        "ReLUmax follows it closely",
        Within(place, TVD, over(("epanechnikov",), ("relumax",)), low=-SLIGHTLY, high=SLIGHTLY),
    )
    rows["normrelu-worse"] = (
        "normReLU is clearly worse than sparsemax and ReLUmax in accuracy and TVD",
        both(over(("epanechnikov", "relumax"), ("normrelu",)), low=ALIKE),
    )
    rows["uniform-worst"] = (
        "top-k uniform is behind every other mosaic",
        Within(place, TVD, over([m for m in MOSAICS if m != "knn_uniform"], ("knn_uniform",))),
    )
    if examples == 40_000:
        pairs = over(POLYNOMIALS, ("gaussian",))
        rows["scarce-data"] = (
            "compact kernels help most where data is scarce: their lead over the Gaussian is larger at 1,000",
            Narrows(Within(_place(scale, 1000), TVD, pairs), Within(place, TVD, pairs)),
        )
    return [
        Claim(f"table1/{scale}/{examples}/{key}", "Table 1", scale, *row, "regbench")
        for key, row in rows.items()
    ]


def claims(scale: str) -> list[Claim]:
    sizes = SCALES[scale].examples if scale in SCALES else ()
    return [claim for examples in sizes for claim in _claims(scale, examples)]


# Accuracy / TVD, read off the figures of the works that the paper builds on.
PUBLISHED = {
    "gaussian": (".934 / .215", ".941 / .185", "", "", "", ".960 / .122"),
    "transformer": (".546 / .626", ".926 / .208", ".941 / .175", ".950 / .155", ".956 / .139", ".958 / .127"),
    "mamba": (".695 / .511", ".845 / .370", ".894 / .301", ".911 / .278", ".921 / .259", ".918 / .264"),
    "retnet": (".503 / .664", ".800 / .392", ".838 / .305", ".881 / .264", ".911 / .214", ".919 / .212"),
    "h3": (".530 / .627", ".651 / .524", ".709 / .474", ".764 / .415", ".795 / .375", ".835 / .333"),
    "s4": (".528 / .627", ".533 / .615", ".535 / .594", ".635 / .528", ".742 / .438", ".788 / .402"),
    "gla": (".518 / .652", ".521 / .618", "", "", "", ".927 / .186"),
}


def tables(scale: str) -> list[Table]:
    places = [_place(scale, examples) for examples in SCALES[scale].examples] if scale in SCALES else []
    caption = "Accuracy at the last position / TVD, by training examples (in brackets: published elsewhere)."
    columns = tuple((place.name, place, (ACCURACY, TVD)) for place in places)
    rows = (*MOSAICS, *(name for name in PUBLISHED if name in BASELINES))
    return [Table(caption, rows, columns, PUBLISHED)] if columns else []


# ---- the row -------------------------------------------------------------------------------------


def options(command: ArgumentParser) -> None:
    models = ("mosaic", *MIXERS)
    command.add_argument("--scale", choices=tuple(SCALES), help="default: small")
    command.add_argument("--models", type=names_among(models), metavar="A,B", help=f"of {', '.join(models)}")
    command.add_argument("--kernels", type=kernel_names, metavar="A,B", help="of the mosaic (default: eight)")
    command.add_argument("--examples", type=whole(1), nargs="+", metavar="N", help="training instances")
    command.add_argument("--seeds", type=whole(0), nargs="+", metavar="S", help="default: 0")
    command.add_argument("--epochs", type=whole(1), help="default: that of the scale")
    command.add_argument("--lr", type=positive, help="peak learning rate (default: that of the scale)")
    command.add_argument("--states", type=whole(2), help="of every automaton (default: 4 to 12)")
    command.add_argument("--letters", type=whole(1), help="of every automaton (default: 4 to 18)")
    command.add_argument(
        "--grid", action="store_true", help="tune the baselines: show the best by validation of many runs"
    )
    command.add_argument(
        "--runs", type=path, metavar="DIR", help="folder of run folders (default: runs/regbench)"
    )


def grid_option(command: ArgumentParser) -> None:
    command.add_argument(
        "--grid", action="store_true", help="Table 1: tune the baselines, the best by validation counts"
    )


def measure(run: Run, model: Backbone) -> Mapping[str, Any]:
    return work(run).results(model)


EXPERIMENT = Experiment(
    "Table 1",
    "in-context language learning (RegBench)",
    claims,
    tables,
    Trained(
        task=RegBenchConfig,
        commands=(
            Command(
                "regbench",
                "learn languages in context: every kernel, and six baselines",
                options,
                RegBenchSettings,
            ),
        ),
        scales=TABLE1,
        sets=sets,
        work=work,
        show=show,
        options=grid_option,
        measure=measure,
    ),
)
