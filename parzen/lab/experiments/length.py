"""``parzen length``: Table 2, models trained on short sources of a task and tested on ever longer ones.

Source: arXiv 2601.22766, section 5.3 (mosaics); Vasylenko et al. (2506.16640), section 5 and its public
configs (tasks and Transformers). *small* fits two CPU cores.
"""

from __future__ import annotations

import itertools
import math
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from parzen.kernels import kernel, spell
from parzen.lab import console
from parzen.lab.arguments import kernel_names, names_among, path, positive, whole
from parzen.lab.arguments import lengths as lengths_of
from parzen.lab.errors import UserError
from parzen.lab.experiments.claims import (
    MOSAICS,
    NEAREST,
    Claim,
    Outcome,
    Place,
    Results,
    Table,
    Within,
    alone,
    exact,
    over,
)
from parzen.lab.experiments.experiment import EIGHT, Command, Experiment, Trained
from parzen.lab.experiments.experiment import SCALES as FOLDERS
from parzen.lab.experiments.kernel_use import attention_use, kernel_use
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import LOCAL, Execution, RunSet, Workload
from parzen.lab.run.train import TrainConfig
from parzen.lab.tasks.length import TASKS, LengthConfig, Lengths, answer_start, score, to_device, written
from parzen.lab.tasks.sequence import Batch
from parzen.models.backbone import Backbone
from parzen.models.generate import TransformerReader
from parzen.models.mosaic import MosaicConfig
from parzen.models.sequence import SequenceConfig, SequenceModel
from parzen.nn import BANDWIDTHS, POSITIONS

MODELS = ("mosaic", "transformer")
# What Vasylenko et al. compare: kernel and bandwidth of the Transformers if neither is given.
TRANSFORMERS = (
    ("gaussian", "fixed"),
    ("gaussian", "ssmax"),
    ("biweight", "fixed"),
    ("biweight", "asentmax"),
)
# Samples that are generated, and that show what attention does, at each length.
GENERATED, SEEN = 100, 32
# A model has escaped at the first evaluation with more exact matches than this.
ESCAPED = 0.5


@dataclass(frozen=True)
class Recipe:
    """A model and its training.

    Attributes:
        sizes: arguments of ``MosaicConfig`` or ``SequenceConfig``.
        steps, batch, lr, warmup, norm_lr, scalar_lr: see ``TrainConfig``; the rate falls to a twentieth.
    """

    sizes: Mapping[str, Any]
    steps: int
    batch: int
    lr: float
    warmup: float = 0.05
    norm_lr: float = 1.0
    scalar_lr: float = 1.0


@dataclass(frozen=True)
class Sizes:
    """A task at a scale: its data, and the recipe of each kind of model."""

    data: LengthConfig
    mosaic: Recipe
    transformer: Recipe
    kernels: Sequence[str] = EIGHT


def _tiny(data: LengthConfig) -> Sizes:
    mosaic = {"layers": 1, "heads": 2, "width": 32, "slots": 32}
    transformer = {"layers": 1, "heads": 2, "width": 32}
    return Sizes(
        data,
        Recipe(mosaic, 60, 32, 1e-2, norm_lr=10.0),
        Recipe(transformer, 60, 32, 3e-3),
        kernels=("gaussian", "biweight"),
    )


def _small(data: LengthConfig, steps: int) -> Sizes:
    mosaic = {"layers": 2, "heads": 8, "width": 128, "slots": 448}
    transformer = {"layers": 2, "heads": 8, "width": 128}
    return Sizes(
        data,
        Recipe(mosaic, steps, 32, 5e-3, norm_lr=10.0, scalar_lr=0.3),
        Recipe(transformer, 5 * steps, 32, 1e-3),
    )


def _paper(data: LengthConfig, heads: int, transformer: Recipe) -> Sizes:
    sizes = {"layers": 2, "heads": heads, "width": 512, "slots": 2688}
    return Sizes(data, Recipe(sizes, 156_250, 256, 1e-3, warmup=0.256), transformer)


def _paper_transformer(layers: int, width: int, heads: int, lr: float, samples: int) -> Recipe:
    steps = samples // 128
    return Recipe({"layers": layers, "width": width, "heads": heads}, steps, 128, lr, 20_000 / steps)


_TINY: dict[str, Any] = {
    "shortest": 2,
    "longest": 3,
    "lengths": (3, 6),
    "symbols": 4,
    "validation": 64,
    "test": 40,
}
_SHORT = (64, 96, 128, 256, 512)
_LONG = tuple(64 * 2**i for i in range(11))

SCALES: dict[str, dict[str, Sizes]] = {
    "tiny": {
        **{name: _tiny(LengthConfig(name, **_TINY)) for name in ("sort", "reverse", "copy")},
        "mqmtar": _tiny(
            LengthConfig(
                "mqmtar", 6, 8, (8, 16), symbols=4, keys=16, fewest_pairs=1, queries=1, validation=64, test=40
            )
        ),
    },
    "small": {
        "sort": _small(LengthConfig("sort"), 2000),
        "reverse": _small(LengthConfig("reverse"), 1500),
        "copy": _small(LengthConfig("copy"), 1500),
        # Two pairs and four queries: some pair is asked for twice, and the question after it is then hard to
        # find again. That, and not recall, would decide the score.
        "mqmtar": _small(LengthConfig("mqmtar", shortest=12, symbols=64, queries=2), 1000),
    },
    "paper": {
        "sort": _paper(
            LengthConfig("sort", 32, 64, _LONG[:7]), 8, _paper_transformer(2, 256, 8, 4e-4, 40_000_000)
        ),
        "reverse": _paper(
            LengthConfig("reverse", 32, 64, _SHORT), 8, _paper_transformer(6, 256, 8, 4e-4, 30_000_000)
        ),
        "copy": _paper(
            LengthConfig("copy", 32, 64, _LONG[:7]), 8, _paper_transformer(6, 256, 8, 4e-4, 30_000_000)
        ),
        "mqmtar": _paper(
            LengthConfig("mqmtar", 32, 64, _LONG, symbols=256, keys=10_000, fewest_pairs=1, queries=4),
            8,
            _paper_transformer(4, 512, 16, 2e-4, 50_000_000),
        ),
    },
}


@dataclass(frozen=True)
class LengthSettings:
    """Every model × kernel × bandwidth × positions × seed on one task.

    Attributes:
        task: a name of ``parzen.lab.tasks.length.TASKS``.
        scale: a name of ``SCALES``; what is None comes from it.
        models: names of ``MODELS``.
        kernels: of mosaics and Transformers; None: the scale's for mosaics.
        bandwidths: names of ``parzen.nn.BANDWIDTHS``, or "published" for mosaics; None: "published" and
            "fixed". Transformers given neither kernels nor bandwidths are the four ``TRANSFORMERS``.
        positions: of Transformers: "learned" or names of ``parzen.nn.POSITIONS``.
        lengths: source lengths of the tests, ascending.
        seeds: of weights and training samples.
        tokens: training tokens of each run (rounded up to whole steps), or
        steps: instead.
        lr: peak learning rate.
        runs: the folder of run folders; None: runs/length/ and the task.
        execution: they are carried out.
    """

    task: str
    scale: str = "small"
    models: Sequence[str] = ("mosaic",)
    kernels: Sequence[str] | None = None
    bandwidths: Sequence[str] | None = None
    positions: Sequence[str] = ("nape",)
    lengths: Sequence[int] | None = None
    seeds: Sequence[int] = (0,)
    tokens: int | None = None
    steps: int | None = None
    lr: float | None = None
    runs: Path | None = None
    execution: Execution = LOCAL


# What Table 2 is made of, by folder.
_TASKS = ("sort", "reverse", "mqmtar")
_FOUR = ("gaussian", "epanechnikov", "biweight", "relumax")
TABLE2: dict[str, dict[str, tuple[LengthSettings, ...]]] = {
    "tiny": {
        **{f"length/{task}": (LengthSettings(task, "tiny", seeds=(0, 1)),) for task in _TASKS[1:]},
        "length/sort": (LengthSettings("sort", "tiny", MODELS, seeds=(0, 1)),),
    },
    "small": {
        "length/sort": (
            LengthSettings("sort"),
            LengthSettings("sort", kernels=_FOUR, seeds=(0, 1)),
            LengthSettings("sort", models=("transformer",)),
        ),
        "length/mqmtar": (LengthSettings("mqmtar"), LengthSettings("mqmtar", kernels=_FOUR, seeds=(0, 1))),
        "length/reverse": (LengthSettings("reverse"),),
    },
    "paper": {f"length/{task}": (LengthSettings(task, "paper", MODELS, seeds=(0, 1, 2)),) for task in _TASKS},
}


def sets(settings: LengthSettings) -> list[RunSet]:
    """The runs.

    Raises:
        UserError: settings that nothing can be made of.
    """
    root = settings.runs or Path("runs/length") / settings.task
    return [RunSet(root, plan(settings), work)]


def work(run: Run) -> Workload:
    """What a run on a task of lengths needs."""
    return Workload(Lengths(run.config.task), lambda model: measure(run, model))


def plan(settings: LengthSettings) -> list[RunConfig]:
    """The configs of all runs, seed by seed.

    Raises:
        UserError: settings that nothing can be made of.
    """
    # A task that is not of the paper is as large as copying is.
    sizes = SCALES[settings.scale].get(settings.task, SCALES[settings.scale]["copy"])
    try:
        data = replace(sizes.data, name=settings.task)
        if settings.lengths is not None:
            data = replace(data, lengths=tuple(settings.lengths))
        # Generation writes all samples of a test side by side: hours of training must not end in a refusal.
        answer_start(data.task().batch(data.data_seed, "test", np.arange(SEEN), data.longest).labels)
        models: list[tuple[Recipe, MosaicConfig | SequenceConfig]] = []
        if "mosaic" in settings.models:
            models += [(sizes.mosaic, config) for config in _mosaics(settings, sizes, data)]
        if "transformer" in settings.models:
            models += [(sizes.transformer, config) for config in _transformers(settings, sizes, data)]
        return [
            RunConfig(data, model, _training(settings, recipe, data), seed)
            for seed, (recipe, model) in itertools.product(settings.seeds, models)
        ]
    except ValueError as error:
        raise UserError(str(error)) from error


def _mosaics(settings: LengthSettings, sizes: Sizes, data: LengthConfig) -> list[MosaicConfig]:
    pairs = itertools.product(
        settings.kernels or sizes.kernels, settings.bandwidths or (MosaicConfig.bandwidth,)
    )
    return [
        MosaicConfig(
            data.task().vocab, **sizes.mosaic.sizes, kernel=spell(kernel(k)), bandwidth=b, dropout=0.0
        )
        for k, b in pairs
    ]


def _transformers(settings: LengthSettings, sizes: Sizes, data: LengthConfig) -> list[SequenceConfig]:
    pairs: Sequence[tuple[str, str]] = TRANSFORMERS
    if settings.kernels or settings.bandwidths:
        kernels = settings.kernels or tuple(dict.fromkeys(k for k, _ in TRANSFORMERS))
        pairs = [*itertools.product(kernels, settings.bandwidths or (SequenceConfig.bandwidth,))]
    models = []
    for positions, (k, b) in itertools.product(settings.positions, pairs):
        # Those beyond the training length are never trained; they are there so that tests can run.
        most = data.row(data.lengths[-1]) if positions == "learned" else SequenceConfig.max_length
        models.append(
            SequenceConfig(
                data.task().vocab,
                **sizes.transformer.sizes,
                kernel=spell(kernel(k)),
                positions=positions,
                bandwidth=b,
                max_length=most,
                dropout=0.0,
            )
        )
    return models


def _training(settings: LengthSettings, recipe: Recipe, data: LengthConfig) -> TrainConfig:
    steps = settings.steps or recipe.steps
    if settings.tokens is not None:
        steps = math.ceil(settings.tokens / (recipe.batch * data.row(data.longest)))
    lr = settings.lr or recipe.lr
    return TrainConfig(
        steps, recipe.batch, lr=lr, lr_end=lr / 20, warmup=recipe.warmup, norm_lr=recipe.norm_lr,
        scalar_lr=recipe.scalar_lr, evaluate_every=max(1, round(steps / 50)),
    )  # fmt: skip


# ---- what is measured ----------------------------------------------------------------------------


def results(model: Backbone, config: RunConfig) -> dict[str, Any]:
    """Scores by test length, and what attention does there.

    Returns:
        ``loss``: of the validation split, and ``validation``: all its scores;
        by test length, as "16": ``exact_match``, ``token_accuracy`` and ``loss_by_length`` with the right
        target given, ``samples`` (how many), ``token_accuracy_generated`` (greedy, up to 8 times the training
        length);
        if attention can be read: ``heads`` (see ``attention_use``) by length, and their summary:
        ``mean_support`` over all heads, ``right_weight`` of the head that gives the right keys most;
        of mosaics, ``kernel_use`` on samples of the longest training length.
    """
    data: LengthConfig = config.task
    validation = Lengths(data).evaluate(model)
    found: dict[str, Any] = {"loss": validation["loss"], "validation": validation}
    names = ("exact_match", "token_accuracy", "token_accuracy_generated", "loss_by_length", "samples")
    found.update({name: {} for name in names})
    for length in data.lengths:
        at, count = str(length), data.tests(length)
        scores = score(model, data.samples("test", count, length))
        found["exact_match"][at] = scores["exact_match"]
        found["token_accuracy"][at] = scores["token_accuracy"]
        found["loss_by_length"][at] = scores["loss"]
        found["samples"][at] = count
        if length <= 8 * data.longest:
            found["token_accuracy_generated"][at] = _generated(model, data, length)
        if heads := attention_use(model, data.task(), _some(model, data, length)):
            found.setdefault("heads", {})[at] = heads
            found.setdefault("mean_support", {})[at] = float(np.mean(heads["support"]))
            found.setdefault("right_weight", {})[at] = max(map(max, heads["right_weight"]))
    # A whole map of the weights is affordable on short sources only.
    return {**found, **kernel_use(model, _some(model, data, data.longest).tokens)}


def measure(
    run: Run, model: Backbone, lengths: Sequence[int] | None = None, keep: bool = False
) -> dict[str, Any]:
    """``results``, and ``escape_step``: of the first evaluation with more exact matches than ``ESCAPED``.

    Args:
        run: what ``model`` comes from.
        model: with its best weights.
        lengths: other source lengths for the tests, ascending; None: the run's own.
        keep: add what is found at them to the results of the run, which is finished.

    Raises:
        UserError: lengths that the task or the model cannot have, or nothing to keep.
    """
    if keep and lengths is None:
        raise UserError("--keep goes with --lengths: what else is measured is kept already")
    if keep and not run.finished:
        raise UserError(f"{run.folder} is not finished, so that nothing can be added: see parzen resume")
    steps = (line["step"] for line in run.metrics() if line["exact_match"] > ESCAPED)
    config = run.config if lengths is None else replace(run.config, task=_tested_at(run.config, lengths))
    measured = {**results(model, config), "escape_step": next(steps, None)}
    if keep:
        _add(run, measured)
    return measured


def _tested_at(config: RunConfig, lengths: Sequence[int]) -> LengthConfig:
    model = config.model
    try:
        data = replace(config.task, lengths=tuple(lengths))
    except ValueError as error:
        raise UserError(str(error)) from error
    longest = data.row(data.lengths[-1])
    if isinstance(model, SequenceConfig) and model.learned_positions and longest > model.max_length:
        raise UserError(
            f"{longest} tokens are more than the {model.max_length} positions that were learned; "
            "test it at shorter sources"
        )
    return data


def _add(run: Run, more: Mapping[str, Any]) -> None:
    """Adds what ``more`` says of its lengths to the results of a finished run."""
    results = run.results()
    for name, table in more.items():
        if isinstance(table, Mapping) and all(at.isdecimal() for at in table):
            joined = {**results.get(name, {}), **table}
            results[name] = {at: joined[at] for at in sorted(joined, key=int)}
    run.finish(results)


def _some(model: nn.Module, data: LengthConfig, length: int) -> Batch:
    """The samples that show what attention does."""
    first = next(data.samples("test", min(SEEN, data.tests(length)), length))
    return to_device(first, model)


@torch.no_grad()
def _generated(model: Backbone, data: LengthConfig, length: int) -> float:
    """Token accuracy of greedy generation."""
    reader: Any = TransformerReader(model) if isinstance(model, SequenceModel) else model
    right = []
    for batch in data.samples("test", min(GENERATED, data.tests(length)), length):
        said, due = written(reader, to_device(batch, model))
        right.append((said == due).double().mean(1))
    return float(torch.cat(right).mean())


def show(runs: Sequence[Run]) -> None:
    """Exact match by test length, in the order of the runs, a table for each task."""
    for task in dict.fromkeys(r.config.task for r in runs):
        lengths = [str(length) for length in task.lengths]
        rows = []
        for r in [r for r in runs if r.config.task == task]:
            model, found = r.config.model, r.results() if r.finished else {}
            name = r.config.name if isinstance(model, MosaicConfig) else f"{r.config.name}, {model.positions}"
            exact = found.get("exact_match", {})
            escaped = found.get("escape_step")
            rows.append(
                (
                    name,
                    str(r.config.seed),
                    *(f"{exact[at]:.3f}" if at in exact else "—" for at in lengths),
                    "—" if escaped is None else str(escaped),
                    r.folder.name,
                )
            )
        print()
        print(f"{task.name}: exact match by source length")
        console.show_table(("model", "seed", *lengths, "escape step", "run"), rows)


# ---- claims --------------------------------------------------------------------------------------


def _place(scale: str, task: str) -> Place:
    return Place(task, f"{FOLDERS[scale]}length/{task}", (("model.kind", "mosaic"),))


def _claims(scale: str, task: str, lengths: tuple[int, ...]) -> list[Claim]:
    place = _place(scale, task)
    inside, beyond, far = exact(lengths[0]), exact(*lengths[1:]), exact(lengths[-1])
    adaptive = ("epanechnikov", "relumax")
    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {
        "gaussian-in-distribution": (
            "the Gaussian solves the task in distribution",
            Within(place, inside, alone("gaussian"), low=0.95),
        ),
        "gaussian-collapses": (
            "and fails at the greatest length",
            Within(place, far, alone("gaussian"), low=-1.0, high=0.1),
        ),
        "uniform-fails": (
            "top-k uniform does not extrapolate",
            Within(place, beyond, alone("knn_uniform"), low=-1.0, high=0.1),
        ),
        "nearest-between": (
            "top-k Gaussian loses less than the Gaussian beyond the training length",
            Within(place, beyond, over(("knn_gaussian",), ("gaussian",))),
        ),
        "nearest-poor": (
            "but is poor at the greatest length",
            Within(place, far, alone("knn_gaussian"), low=-1.0, high=0.5),
        ),
        "sparse-in-distribution": (
            "sparsemax and ReLUmax are perfect in distribution",
            Within(place, inside, alone(*adaptive), low=0.99),
        ),
        "sparse-extrapolate": (
            "and extrapolate better than the Gaussian and both top-k kernels",
            Within(place, beyond, over(adaptive, ("gaussian", *NEAREST))),
        ),
        "sparsemax-over-relumax": (
            "sparsemax extrapolates better than ReLUmax",
            Within(place, beyond, over(("epanechnikov",), ("relumax",))),
        ),
        "relumax-over-normrelu": (
            "ReLUmax extrapolates better than normReLU",
            Within(place, beyond, over(("relumax",), ("normrelu",))),
        ),
    }
    if task == "mqmtar":
        rows["polynomials-lead"] = (
            "biweight and triweight extrapolate better than the Gaussian and both top-k kernels",
            Within(place, beyond, over(("biweight", "triweight"), ("gaussian", *NEAREST))),
        )
    if task == "reverse":
        rows["triweight-leads"] = (
            "triweight extrapolates best",
            Within(place, beyond, over(("triweight",), [m for m in MOSAICS if m != "triweight"])),
        )
    return [
        Claim(f"table2/{scale}/{task}/{key}", "Table 2", scale, *row, f"length/{task}")
        for key, row in rows.items()
    ]


def _tested(scale: str) -> dict[str, tuple[int, ...]]:
    """The test lengths of each task of the paper; the first is in distribution."""
    return {task: SCALES[scale][task].data.lengths for task in _TASKS} if scale in SCALES else {}


def claims(scale: str) -> list[Claim]:
    return [claim for task, lengths in _tested(scale).items() for claim in _claims(scale, task, lengths)]


def tables(scale: str) -> list[Table]:
    return [
        Table(
            f"Exact match on {task}, by source length; the first is in distribution.",
            MOSAICS,
            tuple((str(n), _place(scale, task), (exact(n),)) for n in lengths),
        )
        for task, lengths in _tested(scale).items()
    ]


# ---- the row -------------------------------------------------------------------------------------


def options(command: ArgumentParser) -> None:
    command.add_argument("--task", choices=tuple(TASKS), required=True, help="what is learned")
    command.add_argument(
        "--models", type=names_among(MODELS), metavar="A,B", help="mosaic (default), transformer"
    )
    command.add_argument(
        "--kernels",
        type=kernel_names,
        metavar="A,B",
        help="default: eight of the table for mosaics; for Transformers without --bandwidths, softmax with "
        "fixed and ssmax, 1.5-entmax with fixed and asentmax",
    )
    command.add_argument(
        "--bandwidths",
        type=names_among(("published", *BANDWIDTHS)),
        metavar="A,B",
        help=f"published (mosaics only), {', '.join(BANDWIDTHS)}",
    )
    command.add_argument(
        "--positions",
        type=names_among(("learned", *POSITIONS)),
        metavar="A,B",
        help=f"of Transformers: learned, {', '.join(POSITIONS)} (default: nape)",
    )
    command.add_argument(
        "--lengths",
        type=lengths_of,
        metavar="N,M",
        help="source lengths of the tests (default: the scale's)",
    )
    command.add_argument("--scale", choices=tuple(SCALES), help="default: small")
    command.add_argument("--seeds", type=whole(0), nargs="+", metavar="S", help="default: 0")
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=whole(1), help="training tokens of each run (default: the scale's)")
    amount.add_argument("--steps", type=whole(1), help="training steps of each run, instead of --tokens")
    command.add_argument("--lr", type=positive, help="peak learning rate (default: that of the scale)")
    command.add_argument(
        "--runs", type=path, metavar="DIR", help="folder of run folders (default: runs/length/TASK)"
    )


def measure_options(command: ArgumentParser) -> None:
    command.add_argument(
        "--lengths",
        type=lengths_of,
        metavar="N,M",
        help="other source lengths (runs of parzen length)",
    )
    command.add_argument("--keep", action="store_true", help="add those lengths to the run's results")


EXPERIMENT = Experiment(
    "Table 2",
    "length generalisation",
    claims,
    tables,
    Trained(
        task=LengthConfig,
        commands=(
            Command(
                "length",
                "learn a task on short sources, and test it on longer and longer ones",
                options,
                LengthSettings,
            ),
        ),
        scales=TABLE2,
        sets=sets,
        work=work,
        show=show,
        measure=measure,
        measured_with=measure_options,
    ),
)
