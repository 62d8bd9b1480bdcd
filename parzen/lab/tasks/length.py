"""Length generalisation: train on short sources of a task, test on longer and longer ones.

A model reads ``BOS source SEP target`` and is judged on the target and EOS (``parzen.lab.tasks.sequence``).
Training draws source lengths from a range, and new samples at every step; validation draws from the same
range; each test has one length.

Source: Vasylenko et al., *Long-Context Generalization with Sparse Attention* (2506.16640), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.lab.tasks.copy import Copy
from parzen.lab.tasks.mqmtar import MQMTAR
from parzen.lab.tasks.reverse import Reverse
from parzen.lab.tasks.sequence import Batch, Length, SequenceTask, exact_match, token_accuracy
from parzen.lab.tasks.sort import Sort
from parzen.lab.tasks.task import IGNORED, device_of
from parzen.models.generate import Recurrent, generate

# Tokens of a batch that is evaluated; a row that is longer stands alone.
TOKENS = 2**14


@dataclass(frozen=True)
class LengthConfig:
    """A task, the lengths that it is learned at, and those that it is tested at.

    Attributes:
        name: of ``TASKS``.
        shortest, longest: source lengths in training, both possible.
        lengths: source lengths of the tests, ascending.
        symbols: tokens that sources are made of; of MQMTAR, those of keys and values.
        keys, fewest_pairs, queries: of MQMTAR.
        validation: samples to choose a model by, with lengths as in training.
        test: samples at each test length up to 8 times the longest; a tenth of them up to 64 times, a
            hundredth beyond.
        data_seed: what validation and tests are drawn from; training draws from the seed of the run.
    """

    kind: ClassVar[str] = "length"

    name: str = "sort"
    shortest: int = 8
    longest: int = 16
    lengths: tuple[int, ...] = (16, 32, 64, 128)
    symbols: int = 32
    keys: int = 4096
    fewest_pairs: int = 2
    queries: int = 4
    validation: int = 1000
    test: int = 1000
    data_seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ValueError(f"unknown task {self.name!r}; known: {', '.join(TASKS)}")
        for field in ("validation", "test"):
            if getattr(self, field) < 1:
                raise ValueError(f"expected {field} of 1 or more, got {getattr(self, field)}")
        if self.shortest > self.longest:
            raise ValueError(
                f"expected lengths (shortest, longest), got ({self.shortest}, {self.longest}); swap them"
            )
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"expected test lengths in ascending order, got {self.lengths}")
        task = self.task()
        for length in (self.shortest, self.longest, *self.lengths):
            task.check(length)

    def task(self) -> SequenceTask:
        """What is learned."""
        return TASKS[self.name](self)

    def row(self, length: int) -> int:
        """Tokens of a sample whose source has this length, or this nominal length: the padded width too."""
        return self.task().batch(self.data_seed, "test", [0], length).tokens.shape[1]

    @property
    def sequence_length(self) -> int:
        return self.row(self.longest)

    def tests(self, length: int) -> int:
        """How many samples a test at this length has."""
        times = length / self.longest
        return -(-self.test // (1 if times <= 8 else 10 if times <= 64 else 100))

    def samples(self, split: str, count: int, length: Length) -> Iterator[Batch]:
        """The first ``count`` samples of a split, in batches of about ``TOKENS``."""
        task = self.task()
        size = max(1, TOKENS // self.row(length if isinstance(length, int) else length[1]))
        for start in range(0, count, size):
            yield task.batch(self.data_seed, split, np.arange(start, min(start + size, count)), length)


TASKS: dict[str, Callable[[LengthConfig], SequenceTask]] = {
    "sort": lambda c: Sort(c.symbols),
    "reverse": lambda c: Reverse(c.symbols),
    "copy": lambda c: Copy(c.symbols),
    "mqmtar": lambda c: MQMTAR(c.symbols, c.keys, fewest_pairs=c.fewest_pairs, queries=c.queries),
}


class Lengths:
    """The task as the training loop sees it: endless samples, scored on the validation split."""

    def __init__(self, config: LengthConfig) -> None:
        self.config, self.task = config, config.task()
        self.vocab = self.task.vocab
        self._range = (config.shortest, config.longest)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels (size, T) of one step: samples that no other step of this seed has."""
        indices = np.arange(step * size, (step + 1) * size)
        return self.task.batch(seed, "train", indices, self._range)[:2]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss, exact match and token accuracy on the validation samples."""
        return score(model, self.config.samples("validation", self.config.validation, self._range))


@torch.no_grad()
def score(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """How a model that gives logits (B, T, V) does, with the right target before it.

    Returns:
        ``loss``, nats per label; ``exact_match``, the share of samples that are right to the end;
        ``token_accuracy``, the mean over samples of the share of labels that are right.
    """
    model.eval()
    nats, labelled, exact, accuracy, count = 0.0, 0, 0.0, 0.0, 0
    for tokens, labels, _ in (to_device(batch, model) for batch in batches):
        logits = model(tokens)
        asked = labels != IGNORED
        nats += float(F.cross_entropy(logits[asked], labels[asked], reduction="sum"))
        labelled += int(asked.sum())
        exact += float(exact_match(logits, labels).sum())
        accuracy += float(token_accuracy(logits, labels).sum(dtype=torch.float64))
        count += len(tokens)
    return {"loss": nats / labelled, "exact_match": exact / count, "token_accuracy": accuracy / count}


def written(model: Recurrent, batch: Batch) -> tuple[Tensor, Tensor]:
    """What greedy generation writes after SEP, and what it should: (B, R + 1) each, EOS included.

    Args:
        model: in eval mode.
        batch: of samples whose sources are equally long.
    """
    tokens, labels, _ = batch
    first = answer_start(labels)
    due = labels[:, first:]
    return generate(model, tokens[:, : first + 1], due.shape[1], temperature=0), due


def answer_start(labels: Tensor) -> int:
    """The position of SEP, where the first label is, in all rows."""
    asked = labels != IGNORED
    first = asked.int().argmax(1)
    if not (first == first[0]).all() or not asked[:, first[0] :].all():
        raise ValueError("expected sources, and targets, of one length; got several")
    return int(first[0])


def to_device(batch: Batch, model: nn.Module) -> Batch:
    """The batch where the model is."""
    return Batch(*(x.to(device_of(model)) for x in batch))
