"""What runs will cost: by one step of each model, or computed for a GPU that is not here."""

from __future__ import annotations

import gc
import resource
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import Execution, RunSet, build
from parzen.lab.run.train import Progress, Storage, train
from parzen.lab.tasks.task import Task

# What computed times assume: a share of the peak of an A100 in bfloat16, FLOP/s, and that a layer of a step
# takes so many seconds at least, which small models are bound by.
PEAK, SHARE, LEAST = 312e12, 0.3, 2e-3


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds of training, and bytes of memory; ``computed`` if no step was timed."""

    seconds: float
    memory: float
    computed: bool


def size_of(config: RunConfig) -> tuple[int, int]:
    """(parameters, training tokens)."""
    key = (type(config.model), config.model)
    if key not in _PARAMETERS:
        with torch.device("meta"):
            _PARAMETERS[key] = sum(p.numel() for p in build(config).parameters())
    return _PARAMETERS[key], config.train.steps * config.train.batch * config.task.sequence_length


_PARAMETERS: dict[Any, int] = {}


def cost_of(config: RunConfig, part: RunSet, execution: Execution, measured: bool) -> Cost:
    if not measured or part.missing:
        return computed(config)
    run = Run(part.root / config.digest(), config)
    return timed(config, part.work(run).task, execution)


def computed(config: RunConfig) -> Cost:
    """Six operations a parameter and token, twelve a layer, channel, key and query of causal attention (half
    of them allowed), on the GPU that ``PEAK``, ``SHARE`` and ``LEAST`` describe. Memory: weights, gradient
    and two moments in float32; of a micro-batch, 16 activations a layer and channel, and the logits twice.
    """
    parameters, tokens = size_of(config)
    training, model, T = config.train, config.model, config.task.sequence_length
    operations = tokens * (6 * parameters + 6 * model.layers * model.width * T)
    least = LEAST * model.layers * training.steps * training.accumulate
    half = 2 if training.precision == "bf16" else 4
    held = (
        T * training.batch // training.accumulate * (16 * half * model.layers * model.width + 8 * model.vocab)
    )
    return Cost(max(operations / (SHARE * PEAK), least), 16 * parameters + held, True)


class _Unscored:
    """The batches of a task; its evaluation costs nothing."""

    def __init__(self, task: Task) -> None:
        self.vocab, self.batch = task.vocab, task.batch

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nothing."""
        return {"loss": 0.0}


def timed(config: RunConfig, task: Task, execution: Execution) -> Cost:
    """Of a step after a first one, which pays for what is set up once."""
    clock: list[float] = []

    def tick(now: Progress) -> None:
        clock.append(now.seconds)

    gc.collect()
    cuda = torch.device(execution.device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = replace(config.train, steps=2, evaluate_every=2)
    train(
        build(config), _Unscored(task), training, config.seed, Storage(), device=execution.device, report=tick
    )
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if cuda or sys.platform == "darwin" else 1024
    return Cost((clock[1] - clock[0]) * config.train.steps, float(peak * unit), False)
