"""``parzen train`` and ``parzen compare``: runs on stories that see the same batches, one after the other."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from parzen.kernels import kernel, spell
from parzen.lab import console
from parzen.lab.data.text import END, open_text
from parzen.lab.data.tokens import read_tokenizer, token_stream
from parzen.lab.errors import UserError
from parzen.lab.experiments.kernel_use import attention_map, kernel_use
from parzen.lab.files import write_whole
from parzen.lab.run.config import EIGHT, RunConfig
from parzen.lab.run.folder import Run, read_json, to_bytes
from parzen.lab.run.sweep import HERE, How, Part, Work, best_model, build, sweep
from parzen.lab.run.train import Keeper, TrainConfig, train
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
from parzen.models.generate import generate
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import MIXERS, SequenceConfig

# How many validation windows show what the kernel does, and how many words the attention map has.
USE_WINDOWS, MAP_TOKENS = 32, 24


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
        how: runs are carried out.
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
    how: How = HERE


# What Figure 2 is made of. *paper* is 80,000 steps, 2,000 of them rising.
FIGURE2: dict[str, tuple[Comparison, ...]] = {
    "tiny": (
        Comparison(
            seeds=(0, 1), tokens=10_000, width=32, heads=2, slots=32, vocab=512, context=64, most=300_000
        ),
    ),
    "small": (Comparison(layers=(1, 4), seeds=(0, 1)), Comparison(layers=(8,))),
    "paper": (
        Comparison(
            layers=(1, 8, 12), seeds=(0, 1, 2), tokens=80_000 * 512 * 512, width=768, heads=12, slots=2688,
            vocab=50_304, context=512, dropout=0.05, batch=512, accumulate=16, lr=5e-3, norm_lr=1.0,
            scalar_lr=1.0, warmup=0.025, precision="bf16", curve=80,
        ),
    ),
}  # fmt: skip


def run(comparison: Comparison) -> int:
    """Trains what is not finished yet, prints the table; the exit status: 1 if a run failed.

    Raises:
        UserError: files that cannot be used, or nothing can be written.
    """
    return train_all(comparison, load(comparison))[1]


def load(comparison: Comparison) -> Stories:
    """The text that all runs learn."""
    return load_stories(
        comparison.data,
        comparison.valid,
        vocab=comparison.vocab,
        tokenizer=comparison.tokenizer,
        context=comparison.context,
        most=comparison.most,
        say=print,
    )


def train_all(comparison: Comparison, stories: Stories) -> tuple[list[Run], int]:
    """``run`` on this text: the runs and the exit status."""
    tokens = _tokens(comparison, stories)
    print(f"{tokens:,} training tokens a run")
    runs, status = sweep([part(comparison, stories, tokens)], comparison.how)
    _show(runs, stories.baselines)
    return runs, status


def part(comparison: Comparison, stories: Stories, tokens: int) -> Part:
    """The runs on this text.

    Raises:
        UserError: settings that nothing can be made of.
    """
    needed = _work(stories, comparison.context, comparison.sample)
    paths = {"data": comparison.data, "valid": comparison.valid}
    return Part(
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
                }
            ),
        },
    )


def work(run: Run) -> Work:
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


def _work(stories: Stories, context: int, sample: int | None) -> Work:
    windows = stories.windows(context)
    return Work(
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
        Keeper(),
        device=comparison.how.device,
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


HEADERS = ("kernel", "layers", "seed", "validation loss", "keys with weight", "tokens", "tokens/s")


def _show(runs: Sequence[Run], baselines: dict[str, float]) -> None:
    rows = [(name, "—", "—", f"{loss:.3f}", "—", "—", "—") for name, loss in baselines.items()]
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
            )
        )
    print()
    console.show_table(HEADERS, rows)


# ---- one run, afterwards -------------------------------------------------------------------------


def again(run: Run, model: Backbone, valid: Path | None) -> dict[str, Any]:
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


def generate_from(
    folder: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int
) -> int:
    """Prints ``prompt`` and what the run's best weights write after it."""
    run, model = best_model(folder)
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
