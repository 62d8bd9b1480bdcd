"""``parzen demo``: the same small Memory Mosaic with several kernels, on the same batches of stories."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from parzen.attention import info
from parzen.lab import console, evaluate, figures
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.language import Language
from parzen.lab.tasks.ngrams import Bigram
from parzen.lab.tasks.stories import Stories, load_stories
from parzen.lab.train import Keeper, Progress, TrainConfig, train
from parzen.models.mosaic import Mosaic, MosaicConfig

KERNELS = ("gaussian", "epanechnikov", "biweight", "relumax")


@dataclass(frozen=True)
class DemoConfig:
    """What ``parzen demo`` runs; every kernel gets the same number of steps.

    Attributes:
        data, valid: story files, or None (see ``load_stories``).
        to: the folder for results.md, results.json and loss.png.
        kernels: as ``parzen.kernel`` spells them.
        minutes: about how long all kernels take together; turned into steps by timing each kernel.
        steps: that number itself; ``minutes`` is then ignored.
        curve: how often the validation loss is taken; the last time on all windows, before on ``sample``
            of them. The share of keys is counted on these, too.
    """

    data: Path | None = None
    valid: Path | None = None
    to: Path = Path("runs/demo")
    kernels: Sequence[str] = KERNELS
    minutes: float = 4.0
    steps: int | None = None
    seed: int = 0
    vocab: int = 2048
    context: int = 128
    batch: int = 4
    lr: float = 1e-2
    norm_lr: float = 30.0
    scalar_lr: float = 0.1
    layers: int = 2
    heads: int = 4
    width: int = 128
    slots: int = 448
    curve: int = 8
    sample: int = 64


@dataclass
class Result:
    """One kernel's row; ``curve`` holds (tokens seen, validation loss)."""

    kernel: str
    loss: float | None = None
    share: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Training tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def run(config: DemoConfig) -> int:
    """Trains, prints and saves; returns the exit status, 130 after Ctrl-C.

    Raises:
        UserError: files that cannot be read or written, or a loss that is no number (what was done before
            is saved).
    """
    began = time.monotonic()
    # Better to learn now than in four minutes that nothing can be written.
    write_whole(config.to / "config.json", _json(asdict(config)))
    stories = load_stories(
        config.data,
        config.valid,
        vocab=config.vocab,
        context=config.context,
        seed=config.seed,
        say=print,
    )
    unigram, bigram = Bigram(stories.train, stories.vocab).losses(stories.valid)
    results: list[Result] = []
    status, failure = 0, None
    try:
        _choose_threads(config, stories)
        steps = config.steps or _steps(config, stories, 60 * config.minutes - (time.monotonic() - began))
        print(
            f"{len(config.kernels)} kernels, each {steps} steps of {config.batch} × {config.context} tokens; "
            f"bigram {bigram:.3f}"
        )
        with console.progress(len(config.kernels), steps) as progress:
            for name in config.kernels:
                results.append(Result(name))
                _train(config, stories, steps, results[-1], progress)
    except KeyboardInterrupt:
        status = 130
        print("interrupted; this is what was done so far")
    except UserError as error:
        failure = UserError(f"{results[-1].kernel}: {error}")
    _report(config, stories, results, {"unigram": unigram, "bigram": bigram}, time.monotonic() - began)
    if failure:
        raise failure
    return status


def _model(config: DemoConfig, vocab: int, kernel: str) -> Mosaic:
    torch.manual_seed(config.seed)
    return Mosaic(
        MosaicConfig(vocab, config.layers, config.heads, config.width, config.slots, kernel, dropout=0.0)
    )


def _train_config(config: DemoConfig, steps: int) -> TrainConfig:
    return TrainConfig(
        steps,
        config.batch,
        lr=config.lr,
        norm_lr=config.norm_lr,
        scalar_lr=config.scalar_lr,
        evaluate_every=max(1, round(steps / config.curve)),
    )


def _seconds_a_step(config: DemoConfig, stories: Stories, kernel: str, steps: int) -> float:
    inputs, targets = stories.windows(config.context)
    task = Language(stories, config.context, (inputs[:1], targets[:1]))
    clock = [0.0]
    train(
        _model(config, stories.vocab, kernel),
        task,
        _train_config(config, steps),
        config.seed,
        Keeper(),
        report=lambda progress: clock.append(progress.seconds),
    )
    return median(b - a for a, b in itertools.pairwise(clock))


def _choose_threads(config: DemoConfig, stories: Stories) -> None:
    """All cores that this process may use, or one if others keep them busy.

    Threads that wait for a core taken by another program can make a step many times slower.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = {}
    for threads in {1, cores}:
        torch.set_num_threads(threads)
        times[threads] = _seconds_a_step(config, stories, config.kernels[0], 5)
    torch.set_num_threads(min(times, key=times.__getitem__))


def _steps(config: DemoConfig, stories: Stories, seconds: float) -> int:
    """How many steps each kernel can take if all of them are to end in ``seconds``."""
    inputs, targets = stories.windows(config.context)
    part = inputs[:32], targets[:32]
    windows = len(inputs) + (config.curve + 2) * config.sample
    a_step = evaluations = 0.0
    began = time.monotonic()
    for name in config.kernels:
        a_step += _seconds_a_step(config, stories, name, 8)
        start = time.perf_counter()
        evaluate.loss(_model(config, stories.vocab, name), part)
        evaluations += (time.perf_counter() - start) / len(part[0]) * windows
    spent = time.monotonic() - began
    # The rest goes to the figure and to what else the machine is doing.
    return max(1, int((0.95 * seconds - spent - evaluations) / a_step))


def _train(
    config: DemoConfig, stories: Stories, steps: int, result: Result, progress: console.Progress
) -> None:
    """Fills ``result`` in as it goes, so that an interruption leaves what was done."""
    progress.part(result.kernel)
    inputs, targets = stories.windows(config.context)
    spread = torch.linspace(0, len(inputs) - 1, min(config.sample, len(inputs))).long()
    task = Language(stories, config.context, (inputs[spread], targets[spread]))
    model = _model(config, stories.vocab, result.kernel)

    def report(now: Progress) -> None:
        result.tokens, result.seconds = now.tokens, now.seconds
        if now.valid is not None:
            result.loss = now.valid
            result.curve.append((now.tokens, now.valid))
        valid = "" if result.loss is None else f", valid {result.loss:.3f}"
        status = f"train {now.loss:.3f}{valid}, {result.speed:,.0f} tokens/s"
        progress.step(status)
        if now.valid is not None and now.step < steps:
            progress.mark(status)

    train(model, task, _train_config(config, steps), config.seed, Keeper(), report=report)
    result.loss = evaluate.loss(model, (inputs, targets))
    result.curve[-1] = (result.tokens, result.loss)
    # The last window is padded.
    result.share = evaluate.kernel_use(model, inputs[spread[: max(1, len(spread) - 1)]])["share_of_keys"]
    progress.mark(f"valid {result.loss:.3f}, {result.share:.1%} of keys used, {result.speed:,.0f} tokens/s")


HEADERS = ("kernel", "validation loss", "keys with weight", "tokens/s")


def _report(
    config: DemoConfig,
    stories: Stories,
    results: list[Result],
    baselines: dict[str, float],
    seconds: float,
) -> None:
    rows = [(name, f"{loss:.3f}", "—", "—") for name, loss in baselines.items()]
    most = max((result.tokens for result in results), default=0)
    for result in results:
        if result.loss is None:
            continue
        name = result.kernel if result.tokens == most else f"{result.kernel} ({result.tokens:,} tokens)"
        share = "—" if result.share is None else f"{result.share:.1%}"
        rows.append((name, f"{result.loss:.3f}", share, f"{result.speed:,.0f}"))
    print()
    console.show_table(HEADERS, rows)
    text = (
        f"# parzen demo\n\n{console.markdown_table(HEADERS, rows)}\n"
        f"Losses in nats per token, on all validation tokens. {config.layers} layers, width {config.width}, "
        f"{config.heads} heads, {config.slots} slots, vocabulary {stories.vocab:,}, context "
        f"{config.context}; {most:,} training tokens a kernel, the same batches for all; text: "
        f"{stories.source}; {console.duration(seconds)} in all on {torch.get_num_threads()} cores.\n\n"
        "![validation loss](loss.png)\n"
    )
    record: dict[str, Any] = {
        "config": asdict(config),
        "environment": info(),
        "source": stories.source,
        "train_tokens": len(stories.train),
        "valid_tokens": len(stories.valid) - 1,
        "seconds": seconds,
        "baselines": baselines,
        "kernels": [{**asdict(result), "tokens_per_second": result.speed} for result in results],
    }
    write_whole(config.to / "results.json", _json(record))
    write_whole(config.to / "results.md", text.encode())
    curves = {result.kernel: result.curve for result in results}
    write_whole(config.to / "loss.png", figures.loss_curves(curves, baselines["bigram"]))
    print(f"\nsaved in {config.to}: results.md, results.json, loss.png")


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, default=str) + "\n").encode()
