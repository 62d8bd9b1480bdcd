"""``parzen train`` and ``parzen compare``: Figure 2, runs on stories that see the same batches."""

from __future__ import annotations

import itertools
import math
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from parzen.kernels import kernel, spell
from parzen.lab import console
from parzen.lab.arguments import kernel_names, names_among, one_kernel, path, positive, whole
from parzen.lab.data.text import open_text
from parzen.lab.data.tokens import read_tokenizer, token_stream
from parzen.lab.errors import UserError
from parzen.lab.experiments.claims import (
    ALIKE,
    ALONG,
    LOSS,
    MOSAICS,
    NEAREST,
    POLYNOMIALS,
    RISES,
    SLIGHTLY,
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
from parzen.lab.experiments.experiment import EIGHT, SCALES, Command, Experiment, Trained
from parzen.lab.experiments.kernel_use import attention_map, kernel_use
from parzen.lab.files import write_whole
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run, read_json, to_bytes
from parzen.lab.run.sweep import LOCAL, Execution, RunSet, Workload, build
from parzen.lab.run.train import Storage, TrainConfig, train
from parzen.lab.tasks.stories import (
    Language,
    Stories,
    StoriesConfig,
    Windows,
    load_stories,
    loss,
    loss_by_position,
)
from parzen.models.backbone import Backbone
from parzen.models.mosaic import MosaicConfig
from parzen.models.sequence import MIXERS, SequenceConfig

# How many validation windows show what the kernel does, and how many words the attention map has.
USE_WINDOWS, MAP_TOKENS = 32, 24
FEWEST = 257


@dataclass(frozen=True)
class Comparison:
    """Every kernel × depth × seed on the same text, batches and number of tokens.

    Attributes:
        data, valid, tokenizer: as in ``load_stories``.
        runs: the folder that holds the run folders.
        models: "mosaic", and names of ``MIXERS``.
        kernels, layers, seeds: what else differs; mosaics and transformers have a kernel.
        tokens: training tokens of each run (rounded up to whole steps).
        minutes: instead: about how long all runs take together, turned once into a common number of tokens.
        width, heads, vocab, context, dropout: of every model.
        slots: of mosaics.
        positions: of transformers (see ``SequenceConfig``).
        batch, accumulate, lr, norm_lr, scalar_lr, warmup, precision: of training (see ``TrainConfig``).
        curve: how often the validation loss is taken.
        sample: on how many windows, spread over the validation text; None: all, as at the end.
        most: bytes of text to read or to generate; None: all.
        needs_text: whether the built-in stories will not do.
        execution: how runs are carried out.
    """

    data: Path | None = None
    valid: Path | None = None
    tokenizer: Path | None = None
    runs: Path = Path("runs/stories")
    models: Sequence[str] = ("mosaic",)
    kernels: Sequence[str] = EIGHT
    layers: Sequence[int] = (1,)
    seeds: Sequence[int] = (0,)
    tokens: int = 2_200_000
    minutes: float | None = None
    width: int = 128
    heads: int = 4
    slots: int = 448
    positions: str = "rotary"
    vocab: int = 2048
    context: int = 256
    dropout: float = 0.0
    batch: int = 8
    accumulate: int = 1
    lr: float = 1e-2
    norm_lr: float = 30.0
    scalar_lr: float = 0.1
    warmup: float = 0.05
    precision: str = "float32"
    curve: int = 20
    sample: int | None = None
    most: int | None = None
    needs_text: bool = False
    execution: Execution = LOCAL


# What Figure 2 is made of. *paper* is 80,000 steps, 2,000 of them rising.
FIGURE2: dict[str, tuple[Comparison, ...]] = {
    "tiny": (
        Comparison(
            seeds=(0, 1), tokens=10_000, width=32, heads=2, slots=32, vocab=512, context=64, most=300_000
        ),
    ),
    "small": (
        Comparison(layers=(1, 4), seeds=(0, 1), needs_text=True),
        Comparison(layers=(8,), needs_text=True),
    ),
    "paper": (
        Comparison(
            layers=(1, 8, 12), seeds=(0, 1, 2), tokens=80_000 * 512 * 512, width=768, heads=12, slots=2688,
            vocab=50_304, context=512, dropout=0.05, batch=512, accumulate=16, lr=5e-3, norm_lr=1.0,
            scalar_lr=1.0, warmup=0.025, precision="bf16", curve=80, needs_text=True,
        ),
    ),
}  # fmt: skip


def load(comparison: Comparison) -> Stories:
    """The text that all runs learn.

    Raises:
        UserError: settings that nothing can be made of, before a text is read; or the text.
    """
    # A byte-level tokeniser has a token for each byte, and one for the end.
    if comparison.tokenizer is None and comparison.vocab < FEWEST:
        raise UserError(
            f"--vocab must be at least {FEWEST}, a token for each byte and one for the end of a story; "
            f"got {comparison.vocab}"
        )
    plan(comparison, StoriesConfig(vocab=comparison.vocab, context=comparison.context), 1)
    return load_stories(
        comparison.data,
        comparison.valid,
        vocab=comparison.vocab,
        tokenizer=comparison.tokenizer,
        context=comparison.context,
        most=comparison.most,
        say=print,
    )


def sets(comparison: Comparison) -> list[RunSet]:
    """The runs.

    Raises:
        UserError: settings that nothing can be made of, or files that cannot be used.
    """
    if comparison.needs_text and comparison.data is None:
        # No text, no hashes: the runs can be counted, not looked for.
        text = StoriesConfig(vocab=comparison.vocab, context=comparison.context)
        configs = plan(comparison, text, comparison.tokens)
        return [RunSet(comparison.runs, configs, work, missing=NO_TEXT)]
    return [sets_on(load(comparison), comparison)]


NO_TEXT = (
    "Figure 2 learns real stories at this scale: get them with `parzen data babistories --to DIR` (the "
    "paper's) or `parzen data tinystories --to DIR`, and give them with --data and --valid"
)


def sets_on(stories: Stories, comparison: Comparison) -> RunSet:
    """The runs on a text that is loaded.

    Raises:
        UserError: settings that nothing can be made of.
    """
    tokens = _tokens(comparison, stories)
    print(f"{tokens:,} training tokens a run")
    needed = _work(stories, comparison.context, comparison.sample)
    paths = {"data": comparison.data, "valid": comparison.valid}
    return RunSet(
        comparison.runs,
        plan(comparison, stories.config, tokens),
        lambda run: needed,
        {
            "tokenizer.json": stories.tokenizer.to_str().encode(),
            "text.json": to_bytes(
                {
                    **{k: str(v.resolve()) if v else None for k, v in paths.items()},
                    "most": comparison.most,
                    "sample": comparison.sample,
                    **stories.hashes,
                    "baselines": stories.baselines,
                }
            ),
        },
    )


def work(run: Run) -> Workload:
    """What a run on stories needs.

    Raises:
        UserError: a text that is gone, or has changed.
    """
    config: StoriesConfig = run.config.task
    text = read_json(run.folder / "text.json")
    stories = load_stories(
        *(Path(text[name]) if text[name] else None for name in ("data", "valid")),
        tokenizer=run.folder / "tokenizer.json",
        context=config.context,
        most=text["most"],
    )
    if stories.config != config:
        changed = text["data"] if stories.config.train != config.train else text["valid"] or text["data"]
        raise UserError(f"{changed} has changed since {run.folder} was begun; put the old text back")
    return _work(stories, config.context, text.get("sample"))


def _work(stories: Stories, context: int, sample: int | None) -> Workload:
    windows = stories.windows(context)
    return Workload(
        Language(stories, context, _sampled(windows, sample)),
        lambda model: {**results(model, windows, stories.tokenizer), "baselines": stories.baselines},
    )


def _sampled(windows: Windows, count: int | None) -> Windows:
    """So many windows, spread over all."""
    n = len(windows[0])
    spread = torch.linspace(0, n - 1, min(n, count or n)).long()
    return windows[0][spread], windows[1][spread]


def plan(comparison: Comparison, text: StoriesConfig, tokens: int) -> list[RunConfig]:
    """The configs of all runs, seed by seed, then depth by depth.

    Raises:
        UserError: settings that nothing can be made of.
    """
    steps = max(1, math.ceil(tokens / (comparison.batch * comparison.context)))
    try:
        schedule = TrainConfig(
            steps,
            comparison.batch,
            comparison.accumulate,
            lr=comparison.lr,
            norm_lr=comparison.norm_lr,
            scalar_lr=comparison.scalar_lr,
            warmup=comparison.warmup,
            evaluate_every=max(1, round(steps / comparison.curve)),
            precision=comparison.precision,
        )
        return [
            RunConfig(text, model, schedule, seed)
            for seed, layers, name in itertools.product(
                comparison.seeds, comparison.layers, comparison.models
            )
            for model in _models(comparison, text.vocab, layers, name)
        ]
    except ValueError as error:
        raise UserError(str(error)) from error


def _models(c: Comparison, vocab: int, layers: int, name: str) -> list[MosaicConfig | SequenceConfig]:
    kernels = [spell(kernel(k)) for k in c.kernels]
    if name == "mosaic":
        sizes = (vocab, layers, c.heads, c.width, c.slots)
        return [MosaicConfig(*sizes, k, dropout=c.dropout) for k in kernels]
    model = SequenceConfig(
        vocab,
        c.width,
        layers,
        name,
        c.heads,
        positions=c.positions if MIXERS[name].attends else "learned",
        max_length=c.context,
        dropout=c.dropout,
    )
    return [replace(model, kernel=k) for k in kernels] if MIXERS[name].attends else [model]


def _tokens(comparison: Comparison, stories: Stories) -> int:
    """``tokens``, or what ``minutes`` came to the first time."""
    if comparison.minutes is None:
        return comparison.tokens
    kept = comparison.runs / "minutes.json"
    if kept.exists() and (found := read_json(kept))["minutes"] == comparison.minutes:
        return int(found["tokens"])
    began = time.perf_counter()
    inputs, targets = stories.windows(comparison.context)
    evaluated = len(inputs) + comparison.curve * min(len(inputs), comparison.sample or len(inputs))
    a_step = evaluations = 0.0
    for config in plan(comparison, stories.config, 0):
        a_step += seconds_a_step(comparison, stories, config)
        start = time.perf_counter()
        loss(build(config), (inputs[:16], targets[:16]))
        evaluations += (time.perf_counter() - start) / min(16, len(inputs)) * evaluated
    # The rest goes to tables, figures and what else the machine is doing.
    left = 0.95 * 60 * comparison.minutes - evaluations - (time.perf_counter() - began)
    tokens = max(1, int(left / a_step)) * comparison.batch * comparison.context
    write_whole(kept, to_bytes({"minutes": comparison.minutes, "tokens": tokens}))
    return tokens


def seconds_a_step(
    comparison: Comparison, stories: Stories, config: RunConfig | None = None, steps: int = 8
) -> float:
    """The median over some steps of ``config``, or of the first run."""
    config = config or plan(comparison, stories.config, 0)[0]
    inputs, targets = stories.windows(comparison.context)
    clock = [0.0]
    train(
        build(config),
        Language(stories, comparison.context, (inputs[:1], targets[:1])),
        replace(config.train, steps=steps, evaluate_every=steps),
        config.seed,
        Storage(),
        device=comparison.execution.device,
        report=lambda now: clock.append(now.seconds),
    )
    return median(b - a for a, b in itertools.pairwise(clock))


def results(model: nn.Module, windows: Windows, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that a report says of a trained model: losses, what the kernel does, one attention map."""
    total, counted = loss_by_position(model, windows)
    value = float(total.sum() / counted.sum())
    # The last window is padded.
    whole = windows[0][: max(1, len(windows[0]) - 1)]
    spread = torch.linspace(0, len(whole) - 1, min(USE_WINDOWS, len(whole))).long()
    sentence = whole[0][:MAP_TOKENS]
    found = {
        "loss": value,
        "perplexity": math.exp(value),
        "loss_by_position": (total / counted.clamp_min(1)).tolist(),
        **kernel_use(model, whole[spread]),
    }
    if layers := attention_map(model, sentence):
        words = [tokenizer.decode([i], skip_special_tokens=False) for i in sentence.tolist()]
        found["attention"] = {"words": words, "layers": layers}
    return found


HEADERS = ("kernel", "layers", "seed", "validation loss", "keys with weight", "tokens", "tokens/s", "run")


def show(runs: Sequence[Run]) -> None:
    # Before the first run ends they are in the folder of any that was begun.
    kept = [r.folder / name for name in ("results.json", "text.json") for r in runs]
    known = (read_json(path) for path in kept if path.exists())
    baselines: dict[str, float] = next((data["baselines"] for data in known if "baselines" in data), {})
    rows = [(name, "—", "—", f"{loss:.3f}", "—", "—", "—", "—") for name, loss in baselines.items()]
    for r in runs:
        got: dict[str, Any] = r.results() if r.finished else next(iter(r.metrics()[-1:]), {})
        rows.append(
            (
                r.config.name,
                str(r.config.model.layers),
                str(r.config.seed),
                f"{got['loss']:.3f}" if got else "—",
                f"{got['share_of_keys']:.1%}" if "share_of_keys" in got else "—",
                (f"{got['tokens']:,}" if got else "—") + ("" if r.finished else " (not finished)"),
                f"{r.speed:,.0f}" if r.speed else "—",
                r.folder.name,
            )
        )
    print()
    console.show_table(HEADERS, rows)


def measure(run: Run, model: Backbone, valid: Path | None = None) -> dict[str, Any]:
    """``results`` on the run's own validation text or another.

    Raises:
        UserError: a text that cannot be used, or that has changed.
    """
    text = read_json(run.folder / "text.json")
    if valid is None and text["valid"] is None:
        return dict(work(run).results(model))
    tokenizer = read_tokenizer(run.folder / "tokenizer.json")
    stream, _ = token_stream(open_text(valid or Path(text["valid"]), held_out=True), tokenizer, lead=True)
    return results(model, Stories(tokenizer, stream, stream, "").windows(run.config.task.context), tokenizer)


# ---- claims --------------------------------------------------------------------------------------

# The depths that the paper speaks of, of which *small* leaves the deepest untrained.
DEPTHS = {"tiny": (1,), "small": (1, 4, 8, 12), "paper": (1, 8, 12)}


def _place(scale: str, layers: int) -> Place:
    name = f"{layers} layer{'s' if layers > 1 else ''}"
    return Place(name, f"{SCALES[scale]}stories", (("model.layers", layers),))


def _claims(scale: str, layers: int) -> list[Claim]:
    place, where = _place(scale, layers), "Figure 2"
    lead = Within(place, LOSS, over(POLYNOMIALS, ("gaussian",)))
    rows: dict[str, tuple[str, Callable[[Results], Outcome]]] = {}
    if layers < 12:
        rows["compact-over-gaussian"] = (
            "Epanechnikov, biweight and triweight end below the Gaussian",
            lead,
        )
        rows["compact-over-nearest"] = (
            "Epanechnikov, biweight and triweight end below both top-k kernels",
            Within(place, LOSS, over(POLYNOMIALS, NEAREST)),
        )
    if 1 < layers < 12:
        rows["along"] = (
            "and they are ahead of the Gaussian and of top-k all along training",
            Within(place, ALONG, over(POLYNOMIALS, ("gaussian", *NEAREST))),
        )
        rows["nearest-competitive"] = (
            "top-k Gaussian is competitive: behind the Gaussian by no more than what counts as alike",
            Within(place, LOSS, over(("knn_gaussian",), ("gaussian",)), low=-ALIKE),
        )
        rows["nearest-unstable"] = (
            "but mildly unstable: its validation loss rises more between evaluations than the Gaussian's",
            Within(place, RISES, over(("gaussian",), ("knn_gaussian",))),
        )
    rows["unit-mass-over-normrelu"] = (
        "sparsemax and the entmax family, whose bandwidth adapts, beat normReLU, whose bandwidth is fixed",
        Within(place, LOSS, over(POLYNOMIALS, ("normrelu",))),
    )
    if layers > 1:
        rows["relumax-over-normrelu"] = (
            "ReLUmax beats normReLU",
            Within(place, LOSS, over(("relumax",), ("normrelu",))),
        )
        rows["relumax-slightly-behind"] = (
            "ReLUmax is slightly behind the kernels with an adaptive bandwidth",
            Within(place, LOSS, over(POLYNOMIALS, ("relumax",)), high=SLIGHTLY),
        )
    if layers == 12:
        rows["alike"] = (
            "all kernels but normReLU and uniform kNN end alike",
            Within(
                place,
                LOSS,
                over((*POLYNOMIALS, "relumax", "knn_gaussian"), ("gaussian",)),
                low=-ALIKE,
                high=ALIKE,
            ),
        )
        rows["worse"] = (
            "normReLU and uniform kNN end worse than the Gaussian, by more than what counts as alike",
            Within(place, LOSS, over(("gaussian",), ("normrelu", "knn_uniform")), low=ALIKE),
        )
        rows["gap-narrows"] = (
            "the lead of the rectified polynomials over the Gaussian is smaller than with 8 layers",
            Narrows(Within(_place(scale, 8), LOSS, lead.pairs), lead),
        )
        if scale == "paper":
            rows["reference"] = (
                "the Gaussian mosaic reaches the published 1.498–1.501 nats",
                Within(place, LOSS, alone("gaussian"), low=1.5 - ALIKE, high=1.5 + ALIKE),
            )
    return [
        Claim(f"figure2/{scale}/{layers}/{key}", where, scale, *row, "stories") for key, row in rows.items()
    ]


def claims(scale: str) -> list[Claim]:
    return [claim for layers in DEPTHS.get(scale, ()) for claim in _claims(scale, layers)]


def tables(scale: str) -> list[Table]:
    places = [_place(scale, layers) for layers in DEPTHS.get(scale, ())]
    columns = tuple((place.name, place, (LOSS,)) for place in places)
    return [Table("Validation loss in nats per token, by depth.", MOSAICS, columns)] if columns else []


# ---- the row -------------------------------------------------------------------------------------

SIZES = {
    "width": "of a token's vector (default: 128)",
    "heads": "of every layer; they divide the width (default: 4)",
    "slots": "learned pairs of each head of a mosaic (default: 448)",
    "vocab": "of the tokeniser that is trained (default: 2048)",
    "context": "tokens in a sequence (default: 256)",
    "batch": "sequences in a step (default: 8)",
    "accumulate": "parts that a step is cut into, to save memory (default: 1)",
}
RATES = {
    "lr": "peak learning rate (default: 0.01)",
    "norm-lr": "factor on it for the gains of LayerNorms (default: 30.0)",
    "scalar-lr": "the same for bandwidths and other scalars (default: 0.1)",
}


def compare_options(command: ArgumentParser) -> None:
    models = ("mosaic", *MIXERS)
    command.add_argument("task", choices=("stories",), help="what is learned")
    command.add_argument("--models", type=names_among(models), metavar="A,B", help=f"of {', '.join(models)}")
    command.add_argument("--kernels", type=kernel_names, metavar="A,B", help="default: eight of the table")
    command.add_argument("--layers", type=whole(1), nargs="+", metavar="L", help="default: 1")
    command.add_argument("--seeds", type=whole(0), nargs="+", metavar="S", help="default: 0")
    _training_options(command)


def train_options(command: ArgumentParser) -> None:
    command.add_argument("task", choices=("stories",), help="what is learned")
    command.add_argument(
        "--model", dest="models", choices=("mosaic", *MIXERS), nargs=1, help="default: mosaic"
    )
    command.add_argument(
        "--kernel",
        "--kernels",
        dest="kernels",
        type=one_kernel,
        metavar="A",
        default=("gaussian",),
        help="default: gaussian",
    )
    command.add_argument("--layers", type=whole(1), nargs=1, metavar="L", help="default: 1")
    command.add_argument("--seed", dest="seeds", type=whole(0), nargs=1, metavar="S", help="default: 0")
    _training_options(command)


def text_options(command: ArgumentParser, about: str = "stories of Figure 2 (tiny has its own)") -> None:
    command.add_argument("--data", type=path, metavar="PATH", help=about)
    command.add_argument("--valid", type=path, metavar="PATH", help="validation stories (default: last 6 %%)")
    command.add_argument(
        "--tokenizer", type=path, metavar="PATH", help="vocab.json and merges.txt in a folder"
    )


def _training_options(command: ArgumentParser) -> None:
    text_options(command, "stories (default: the built-in ones)")
    command.add_argument(
        "--runs", type=path, metavar="DIR", help="folder of run folders (default: runs/stories)"
    )
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=whole(1), help="training tokens of each run (default: 2200000)")
    amount.add_argument("--minutes", type=positive, help="about how long all take, once turned into tokens")
    for name, about in SIZES.items():
        command.add_argument(f"--{name}", type=whole(1), metavar="N", help=about)
    for name, about in RATES.items():
        command.add_argument(f"--{name}", type=positive, metavar="X", help=about)
    command.add_argument("--dropout", type=float, metavar="P", help="on memory weights, … (default: 0.0)")
    command.add_argument("--positions", help="of a transformer: learned, none, rotary (default), alibi, nape")
    command.add_argument("--precision", choices=("float32", "bf16"), help="default: float32")


def measure_options(command: ArgumentParser) -> None:
    command.add_argument("--valid", type=path, metavar="PATH", help="another text (default: the run's own)")


def settings(task: str, **given: Any) -> Comparison:
    """What the command line gives; ``task`` is always stories."""
    return Comparison(**given)


EXPERIMENT = Experiment(
    "Figure 2",
    "language modelling on stories",
    claims,
    tables,
    Trained(
        task=StoriesConfig,
        commands=(
            Command("train", "train one model on stories, or go on with it", train_options, settings),
            Command(
                "compare",
                "train every kernel × depth × seed on the same batches of stories",
                compare_options,
                settings,
            ),
        ),
        scales={scale: {"stories": several} for scale, several in FIGURE2.items()},
        sets=sets,
        work=work,
        show=show,
        options=text_options,
        measure=measure,
        measured_with=measure_options,
    ),
)
