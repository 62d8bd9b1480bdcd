"""Tasks from a source to a target, at any length: what sort, reverse, copy and recall share.

A model reads ``BOS source SEP target`` and says after each token what comes next; it is judged from SEP on,
on the target and EOS. Sorting four tokens:

    tokens   BOS   7  31   0   7  SEP   0   7   7  31
    labels     ·   ·   ·   ·   ·   0    7   7  31 EOS

Samples are drawn when asked for: sample ``index`` of a split is the same whatever the batch, process or
platform, and growing indices never repeat a stream of random numbers. Neither do two splits: a training
sample equals a test sample by coincidence only, with probability 32⁻ᴸ for L tokens out of 32.

Source: Vasylenko et al., *Long-Context Generalization with Sparse Attention* (2506.16640), section 5.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.tasks.task import IGNORED

SPLITS = ("train", "validation", "test")

# One length, or the shortest and the longest of lengths drawn uniformly.
Length: TypeAlias = int | tuple[int, int]
Pair: TypeAlias = tuple[np.ndarray, np.ndarray]


class Batch(NamedTuple):
    """Tokens to read and what to say after each: int64.

    Attributes:
        tokens: (B, T), padded on the right.
        labels: (B, T), the token that follows, or ``IGNORED`` where nothing is asked.
        lengths: (B,), tokens before the padding.
    """

    tokens: Tensor
    labels: Tensor
    lengths: Tensor


class Samples(NamedTuple):
    """Sources (B, S) and targets (B, R) with their lengths (B,); what lies beyond a length has no meaning."""

    source: np.ndarray
    source_lengths: np.ndarray
    target: np.ndarray
    target_lengths: np.ndarray


# ---- random numbers ------------------------------------------------------------------------------


def random_words(seed: int, split: str, indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` words of 64 random bits of each sample, (B, count).

    Philox keyed by seed and split, with the index in the counter: numpy keeps this stream for ever, which
    it does not promise of its distributions.
    """
    if seed < 0:
        raise ValueError(f"expected a seed of 0 or more, got {seed}")
    if split not in SPLITS:
        raise ValueError(f"expected a split among {', '.join(SPLITS)}, got {split!r}")
    if len(indices) == 0 or min(indices) < 0:
        raise ValueError(f"expected one or more indices, each 0 or more, got {list(indices)}")
    key = np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split),)).generate_state(2, np.uint64)
    bits = np.random.Philox(key=key)
    # Setting the counter is ten times as fast as making a generator for each sample.
    state = bits.state
    words = np.empty((len(indices), count), np.uint64)
    for row, index in zip(words, indices, strict=True):
        state["state"]["counter"][1] = index
        bits.state = state
        row[:] = bits.random_raw(count)
    return words


def below(words: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Uniform integers in 0 … bound − 1 (off by less than bound/2³²), int64, from words of 64 random bits."""
    return ((words >> np.uint64(32)) * np.asarray(bound, np.uint64) >> np.uint64(32)).astype(np.int64)


# ---- the interface -------------------------------------------------------------------------------


class SequenceTask(ABC):
    """A source, a target, and how to score a model that continues the one with the other.

    Tokens 0 … ``symbols`` − 1 are the task's own; PAD, BOS, EOS and SEP follow.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def symbols(self) -> int:
        """How many tokens sources and targets are made of."""

    @property
    def pad(self) -> int:
        """Fills the end of a row."""
        return self.symbols

    @property
    def bos(self) -> int:
        """Begins a row."""
        return self.symbols + 1

    @property
    def eos(self) -> int:
        """Ends the target."""
        return self.symbols + 2

    @property
    def sep(self) -> int:
        """Stands between source and target."""
        return self.symbols + 3

    @property
    def vocab(self) -> int:
        """How many different tokens there are, the special ones included."""
        return self.symbols + 4

    @abstractmethod
    def solve(self, source: np.ndarray) -> np.ndarray:
        """The target of one source, found from the source alone."""

    @abstractmethod
    def origins(self, source: np.ndarray) -> np.ndarray:
        """Which tokens of one source each token of its target can be read off: bool, (R, S).

        A row without any is a token that says nothing about the source, such as a separator.
        """

    @abstractmethod
    def check(self, length: int) -> None:
        """Raises ValueError where no source of this length exists."""

    @abstractmethod
    def _words(self, length: int) -> int:
        """How many random words a sample of this length needs."""

    @abstractmethod
    def _draw(self, words: np.ndarray, lengths: np.ndarray, seed: int, split: str) -> Samples:
        """Samples of these lengths; a row depends on no other row."""

    def _samples(self, seed: int, split: str, indices: Sequence[int] | np.ndarray, length: Length) -> Samples:
        low, high = length if isinstance(length, tuple) else (length, length)
        if low > high:
            raise ValueError(f"expected lengths (shortest, longest), got ({low}, {high}); swap them")
        self.check(low)
        self.check(high)
        words = random_words(seed, split, indices, 1 + self._words(high))
        return self._draw(words[:, 1:], low + below(words[:, 0], high - low + 1), seed, split)

    def sample(self, seed: int, split: str, index: int, length: Length) -> Pair:
        """Source and target of one sample, int64.

        Raises:
            ValueError: an unknown split, a negative seed or index, a length that the task cannot have.
        """
        source, source_lengths, target, target_lengths = self._samples(seed, split, [index], length)
        return source[0, : source_lengths[0]], target[0, : target_lengths[0]]

    def batch(
        self, seed: int, split: str, indices: Sequence[int] | np.ndarray, length: Length, device: str = "cpu"
    ) -> Batch:
        """Samples ``indices`` of a split as tensors; lengths are drawn per sample if a range is given.

        Raises:
            ValueError: as ``sample``.
        """
        return self._assemble(self._samples(seed, split, indices, length), device)

    def batches(
        self, seed: int, split: str, size: int, length: Length, *, start: int = 0, epoch: int | None = None
    ) -> Iterator[Batch]:
        """Endless batches of samples ``start``, ``start`` + 1, …; from 0 again after ``epoch``, if given.

        Raises:
            ValueError: as ``sample``; a size or an epoch below 1.
        """
        if size < 1 or (epoch is not None and epoch < 1):
            raise ValueError(f"expected a batch size and an epoch of 1 or more, got {size} and {epoch}")
        for first in itertools.count(start, size):
            indices = np.arange(first, first + size)
            yield self.batch(seed, split, indices if epoch is None else indices % epoch, length)

    def batch_of(self, pairs: Iterable[Pair], device: str = "cpu") -> Batch:
        """Given sources and targets, such as those read from files, as tensors.

        Raises:
            ValueError: no pairs, or tokens that are not the task's.
        """
        rows = [*zip(*pairs, strict=True)]
        if not rows:
            raise ValueError("expected one or more pairs of source and target, got none")
        found = []
        for side in rows:
            lengths = np.asarray([len(row) for row in side])
            padded = np.zeros((len(side), lengths.max()), np.int64)
            padded[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(side)
            if padded.size and not 0 <= padded.min() <= padded.max() < self.symbols:
                raise ValueError(
                    f"expected tokens in 0 … {self.symbols - 1} for {self.name}, got {padded.min()} … "
                    f"{padded.max()}; give the task the parameters that the data was made with"
                )
            found += [padded, lengths]
        return self._assemble(Samples(*found), device)

    def _assemble(self, samples: Samples, device: str) -> Batch:
        """``BOS source SEP target``, and labels from SEP on: the target, then EOS."""
        source, source_lengths, target, target_lengths = samples
        lengths = source_lengths + target_lengths + 2
        tokens = np.full((len(lengths), lengths.max()), self.pad, np.int64)
        labels = np.full_like(tokens, IGNORED)
        every = np.arange(len(lengths))
        tokens[:, 0] = self.bos
        tokens[every, source_lengths + 1] = self.sep
        labels[every, lengths - 1] = self.eos
        row, column = np.nonzero(np.arange(source.shape[1]) < source_lengths[:, None])
        tokens[row, column + 1] = source[row, column]
        row, column = np.nonzero(np.arange(target.shape[1]) < target_lengths[:, None])
        at = column + source_lengths[row] + 1
        tokens[row, at + 1] = labels[row, at] = target[row, column]
        return Batch(*(torch.from_numpy(x).to(device) for x in (tokens, labels, lengths)))


# ---- targets that hold the source's tokens -------------------------------------------------------


@dataclass(frozen=True)
class Rearranged(SequenceTask):
    """Sources of uniform tokens in 0 … ``symbols`` − 1."""

    symbols: int = 32

    def __post_init__(self) -> None:
        if self.symbols < 2:
            raise ValueError(f"expected 2 or more symbols, got {self.symbols}")

    def check(self, length: int) -> None:
        """Any length of 1 or more."""
        if length < 1:
            raise ValueError(f"expected a length of 1 or more for {self.name}, got {length}")

    def _words(self, length: int) -> int:
        return length

    def _draw(self, words: np.ndarray, lengths: np.ndarray, seed: int, split: str) -> Samples:
        source = below(words, self.symbols)
        return Samples(source, lengths, self._targets(source, lengths), lengths)

    @abstractmethod
    def _targets(self, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """All targets at once."""


# ---- scores --------------------------------------------------------------------------------------


def exact_match(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether each row is right at every label, EOS included: bool, (B,).

    On a teacher-forced pass this is the verdict on greedy generation too: up to its first mistake, generation
    reads what teacher forcing reads.

    Args:
        logits: (B, T, V).
        labels: (B, T), ``IGNORED`` where nothing is asked.
    """
    return (_right(logits, labels) | (labels == IGNORED)).all(1)


def token_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right labels in each row, EOS included: float32, (B,).

    Args:
        logits: (B, T, V).
        labels: (B, T), ``IGNORED`` where nothing is asked.
    """
    return _right(logits, labels).sum(1) / (labels != IGNORED).sum(1)


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            "expected logits (B, T, V) and labels (B, T), got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if not (labels != IGNORED).any(1).all():
        raise ValueError("expected a label or more in every row, got a row with none; drop such rows")
    return logits.argmax(-1) == labels


# ---- files ---------------------------------------------------------------------------------------


def write_pairs(folder: Path, split: str, index: int, length: int, pairs: Iterable[Pair]) -> Path:
    """Writes ``<split>_<index>_<length>.src`` and ``.trg``: a sample a line, tokens apart by a space.

    Returns the path of the sources.

    Raises:
        UserError: the folder or the files cannot be written.
    """
    lines = [[" ".join(map(str, side)) + "\n" for side in pair] for pair in pairs]
    path = folder / f"{split}_{index}_{length}.src"
    write_whole(path, "".join(source for source, _ in lines).encode())
    write_whole(path.with_suffix(".trg"), "".join(target for _, target in lines).encode())
    return path


def read_pairs(path: Path, symbols: int | None = None) -> Iterator[Pair]:
    """Sources and targets of ``path`` (``.src``) and of its neighbour (``.trg``), as they are read.

    Args:
        path: the file with the sources.
        symbols: tokens must lie below this, if given.

    Raises:
        UserError: a file that is missing, empty, or not made of lines of tokens; not as many lines in both.
    """
    if path.suffix != ".src":
        raise UserError(
            f"expected a file of sources, *.src, got {path.name}; its targets are found beside it"
        )
    sides = (_read_tokens(path, symbols), _read_tokens(path.with_suffix(".trg"), symbols))
    number = 0
    for number, (source, target) in enumerate(itertools.zip_longest(*sides), start=1):
        if source is None or target is None:
            shorter = path if source is None else path.with_suffix(".trg")
            raise UserError(
                f"{shorter} ends before line {number}, its neighbour does not; sources and targets must match"
            )
        yield source, target
    if number == 0:
        raise UserError(f"{path} is empty; expected a sample a line")


def _read_tokens(path: Path, symbols: int | None) -> Iterator[np.ndarray]:
    try:
        with open(path, encoding="ascii") as lines:
            for number, line in enumerate(lines, start=1):
                words = line.split()
                if not words or not all(word.isdecimal() and len(word) < 19 for word in words):
                    raise UserError(f"{path}, line {number}: expected tokens 0 or more, apart by spaces")
                tokens = [int(word) for word in words]
                if symbols is not None and max(tokens) >= symbols:
                    raise UserError(
                        f"{path}, line {number}: expected tokens below {symbols}, got {max(tokens)}; "
                        "give the task the parameters that the file was made with"
                    )
                yield np.asarray(tokens, np.int64)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: expected tokens, apart by spaces") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path") from error
