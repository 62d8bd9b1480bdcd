"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.lab.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """AdamW with warm-up and a cosine from ``lr`` to ``lr_end``.

    Attributes:
        steps: optimiser steps.
        lr, lr_end: peak and final learning rate.
        norm_lr: factor on the learning rate of LayerNorm gains. The last of them is the only scale of tied
            logits, and at a factor of 1 it holds a short run back.
        scalar_lr: the same of other tensors of one axis (bandwidths and gains per head); at rates that suit
            matrices for a short run they wander.
        warmup: share of the steps spent rising linearly to ``lr``.
        betas, weight_decay: AdamW's; decay acts on tensors of two or more axes.
        clip: largest gradient norm.
    """

    steps: int
    lr: float = 5e-3
    lr_end: float = 1e-4
    norm_lr: float = 1.0
    scalar_lr: float = 1.0
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0 … steps − 1."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        progress = (step - rising) / max(1, self.steps - rising)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Step:
    """One optimiser step: its number (from 1), loss before it, tokens in it, and how long it took."""

    number: int
    loss: float
    tokens: int
    seconds: float


def train(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], config: TrainConfig) -> Iterator[Step]:
    """Trains ``model``, yielding after each step, so that the caller can evaluate, report or stop.

    Raises:
        UserError: the loss is no longer finite.
    """
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [], "factor": 1.0},
        {"params": [], "factor": config.norm_lr, "weight_decay": 0.0},
        {"params": [], "factor": config.scalar_lr, "weight_decay": 0.0},
    ]
    for p in model.parameters():
        groups[0 if p.ndim >= 2 else 1 if id(p) in norms else 2]["params"].append(p)
    optimizer = torch.optim.AdamW(
        groups, config.lr, config.betas, weight_decay=config.weight_decay, fused=True
    )
    for number in range(config.steps):
        model.train()
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(number) * group["factor"]
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(f"the loss became {value} at step {number + 1}; try a smaller learning rate")
        yield Step(number + 1, value, targets.numel(), time.perf_counter() - start)
