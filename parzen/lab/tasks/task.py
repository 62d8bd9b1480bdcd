"""What the training loop needs to know of a task, and what all tasks share."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

# A target that does not count; what torch's cross_entropy ignores by itself.
IGNORED = -100


class TaskConfig(Protocol):
    """The frozen description of a task: a dataclass, as a run's config holds it.

    Attributes:
        kind: the name that JSON carries, and of the experiment in ``EXPERIMENTS`` that owns it.
    """

    kind: ClassVar[str]

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence of training, the mean where lengths differ."""


class Task(Protocol):
    """What the loop needs to know of a task."""

    vocab: int

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (size, T) of one step, a function of its arguments alone; ``IGNORED`` targets
        do not count."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on held-out data; "loss" (nats a target, lower is better) chooses the best weights."""


def device_of(model: nn.Module) -> torch.device:
    """Where ``model`` is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
