"""The training loop: one function, read from top to bottom."""

from __future__ import annotations

import atexit
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parzen.lab.errors import UserError
from parzen.lab.run import stop
from parzen.lab.tasks.task import IGNORED, Task

TIMES = "times.jsonl"
STAMP = "%Y-%m-%dT%H:%M:%SZ"
PRECISIONS = {"float32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """AdamW with warm-up and a cosine from ``lr`` to ``lr_end``.

    Attributes:
        steps: optimiser steps.
        batch: sequences in a step, over all processes.
        accumulate: fresh micro-batches that a step's batch is cut into; the gradient is that of the whole.
        lr, lr_end: peak and final learning rate.
        norm_lr: factor on the learning rate of LayerNorm gains. The last of them is the only scale of tied
            logits, and at a factor of 1 it holds a short run back.
        scalar_lr: the same of other tensors of one axis (bandwidths and gains per head); at rates that suit
            matrices for a short run they wander.
        warmup: share of the steps spent rising linearly to ``lr``.
        betas, weight_decay: AdamW's; decay acts on tensors of two or more axes.
        clip: largest gradient norm.
        evaluate_every: steps between two evaluations; the last step is always followed by one.
        precision: float32, or bf16 under autocast.
    """

    steps: int
    batch: int = 32
    accumulate: int = 1
    lr: float = 5e-3
    lr_end: float = 1e-4
    norm_lr: float = 1.0
    scalar_lr: float = 1.0
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 1000
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate must divide batch, got {self.accumulate} for {self.batch}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0 … steps − 1."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        progress = (step - rising) / max(1, self.steps - rising)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * progress)) / 2


class Storage:
    """Where a run keeps its logs and checkpoints; this one keeps nothing (see ``Run``)."""

    def log(self, record: Mapping[str, Any], file: str = "metrics.jsonl") -> None:
        """One line of a log."""

    def save(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """A checkpoint called ``name``."""

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``save`` was given, or None."""
        return None

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Cuts the logs back to where they were when ``state`` was saved."""


@dataclass(frozen=True)
class Progress:
    """What is known after a step.

    Attributes:
        step: its number, from 1.
        loss: on its batch, before it.
        tokens, seconds: trained on and passed in this process, evaluations apart.
        valid: the validation loss, where an evaluation followed this very step.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    valid: float | None


def optimizer_of(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; each group carries its peak learning rate as ``peak``.

    A module may speak for its own parameters in a class attribute ``optim``, {name: {"lr": the highest,
    "weight_decay": …}}: those that set the time scales of a state space train slowly and do not decay.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            wish = getattr(module, "optim", {}).get(name, {})
            factor = (
                1.0
                if p.ndim >= 2
                else config.norm_lr
                if isinstance(module, nn.LayerNorm)
                else config.scalar_lr
            )
            decay = wish.get("weight_decay", config.weight_decay if p.ndim >= 2 else 0.0)
            groups.setdefault((min(config.lr * factor, wish.get("lr", math.inf)), decay), []).append(p)
    listed = [{"params": ps, "peak": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()]
    return torch.optim.AdamW(listed, config.lr, config.betas, fused=True)


@stop.held()
def train(
    model: nn.Module,
    task: Task,
    config: TrainConfig,
    seed: int,
    storage: Storage,
    *,
    device: str = "cpu",
    report: Callable[[Progress], None] = lambda progress: None,
    save_seconds: float = 60.0,
    compiled: bool = False,
) -> dict[str, float]:
    """Trains ``model`` in place, from the storage's last checkpoint if it has one; the last evaluation.

    Batches and dropout are functions of (seed, step), so that a run that was killed and goes on repeats the
    same numbers. Under torchrun each process takes its share of every batch, and the first one keeps.

    Raises:
        Terminated: SIGTERM came (where the command line listens for it). The step was ended and saved.
        UserError: the loss is no longer finite, or a checkpoint cannot be read or written. The last
            checkpoint stays as it is.
    """
    rank, world = _join(device)
    model.to(device)
    optimizer = optimizer_of(model, config)
    first, best, seen = 0, math.inf, 0
    metrics: dict[str, float] = {}
    saved = storage.load("last")
    if saved is not None:
        _restore(model, optimizer, saved[0])
        first, best, seen, metrics = (saved[1][key] for key in ("step", "best", "tokens", "metrics"))
    if rank == 0:
        storage.rewind(saved[1] if saved else {})
        storage.log(
            {"step": first, "begun": time.strftime(STAMP, time.gmtime()), "on": platform.node()}, TIMES
        )
    net: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    net = DistributedDataParallel(net) if world > 1 else net
    share = config.batch // (world * config.accumulate)
    if share * world * config.accumulate != config.batch:
        raise UserError(
            f"a batch of {config.batch} cannot be cut into {world} × {config.accumulate} equal parts"
        )
    half = PRECISIONS[config.precision]
    tokens, seconds, last_saved = 0, 0.0, time.monotonic()

    for step in range(first, config.steps):
        began = time.perf_counter()
        net.train()
        # Dropout, too, depends on (seed, step) only.
        torch.manual_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * config.lr_at(step) / config.lr
        inputs, targets = task.batch(seed, step, config.batch)
        counted = int((targets != IGNORED).sum())
        loss = torch.zeros((), device=device)
        for part in range(config.accumulate):
            start = (part * world + rank) * share
            x, y = (t[start : start + share].to(device) for t in (inputs, targets))
            last = part == config.accumulate - 1
            waiting = (
                net.no_sync() if isinstance(net, DistributedDataParallel) and not last else nullcontext()
            )
            with waiting:
                with torch.autocast(torch.device(device).type, half) if half else nullcontext():
                    logits = net(x).flatten(0, 1)
                    total = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
                # DDP averages over processes: their number is put back.
                (total * (world / counted)).backward()
            loss += total.detach() / counted
        ending = stop.asked()
        if world > 1:
            # All must end at the same step: one that went on would wait for the others.
            both = torch.stack([loss, loss.new_tensor(float(ending))])
            dist.all_reduce(both)
            loss, ending = both[0], bool(both[1])
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(f"the loss became {value} at step {step + 1}; try a smaller learning rate")
        nn.utils.clip_grad_norm_(net.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        tokens += targets.numel()
        seen += targets.numel()
        seconds += time.perf_counter() - began

        done, valid = step + 1, None
        if done % config.evaluate_every == 0 or done == config.steps:
            if rank == 0:
                metrics = task.evaluate(model.eval())
                valid = metrics["loss"]
                storage.log({"step": done, "tokens": seen, "train_loss": value, **metrics})
                storage.log({"step": done, "tokens_per_second": tokens / seconds}, TIMES)
                if valid < best:
                    best = valid
                    storage.save("best", _weights(model), {"step": done, "metrics": metrics})
            if world > 1:
                dist.barrier()
        due = ending or done == config.steps or time.monotonic() - last_saved > save_seconds
        if rank == 0 and due:
            state = {"step": done, "best": best, "tokens": seen, "metrics": metrics}
            storage.save("last", _weights(model) | _moments(optimizer), state)
            last_saved = time.monotonic()
        report(Progress(done, value, tokens, seconds, valid))
        if ending:
            break
    return metrics


def _join(device: str) -> tuple[int, int]:
    """(rank, number of processes): torchrun says so in the environment."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        # Once for all runs: a second group would find what the first one left in torchrun's store.
        dist.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return int(os.environ.get("RANK", "0")), world


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": t for name, t in model.state_dict().items()}


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{i}.{name}": t for i, values in state.items() for name, t in values.items()}


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Puts the weights of a checkpoint into ``model``."""
    weights = {k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")}
    model.load_state_dict(weights)


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    load_weights(model, tensors)
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            moments.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
