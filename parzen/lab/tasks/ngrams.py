"""Unigram and interpolated bigram predictors: what a model must beat to have learned anything."""

from __future__ import annotations

import numpy as np


class Bigram:
    """Counts of a token stream, read as probabilities of the next token.

        p₁(v) = (c(v) + 1) / (N + V)
        p₂(v | u) = w_b · c(u, v)/c(u) + (1 − w_b) · p₁(v)

    with one weight w_b for each bucket of contexts b = ⌊log₂(c(u) + 1)⌋. The weights are those that
    maximise the likelihood of the last tenth of the *training* stream under counts of the rest
    (expectation maximisation); the counts are then taken over the whole stream.

    Source: Jelinek and Mercer, *Interpolated estimation of Markov source parameters* (1980).
    """

    def __init__(self, stream: np.ndarray, vocab: int) -> None:
        self.vocab = vocab
        self.weights = np.full(64, 0.5)
        stream = stream.astype(np.int64)
        cut = len(stream) - len(stream) // 10
        self._count(stream[:cut])
        self._fit(stream[cut:])
        self._count(stream)

    def _count(self, stream: np.ndarray) -> None:
        self.single = np.bincount(stream, minlength=self.vocab)
        self.context = np.bincount(stream[:-1], minlength=self.vocab)
        self.codes, self.pairs = np.unique(stream[:-1] * self.vocab + stream[1:], return_counts=True)

    def _fit(self, stream: np.ndarray) -> None:
        u, v = stream[:-1], stream[1:]
        bucket, seen, unseen = self._bucket(u), self._relative(u, v), self._unigram(v)
        total = np.bincount(bucket, minlength=64)
        for _ in range(30):
            w = self.weights[bucket]
            share = w * seen / (w * seen + (1 - w) * unseen)
            expected = np.bincount(bucket, share, minlength=64)
            # One imagined pair of observations keeps an unseen bucket at one half.
            self.weights = (expected + 0.5) / (total + 1)

    def _bucket(self, u: np.ndarray) -> np.ndarray:
        return np.log2(self.context[u] + 1).astype(np.int64)

    def _unigram(self, v: np.ndarray) -> np.ndarray:
        return (self.single[v] + 1) / (self.single.sum() + self.vocab)

    def _relative(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        code = u * self.vocab + v
        at = np.searchsorted(self.codes, code).clip(max=len(self.codes) - 1)
        count = np.where(self.codes[at] == code, self.pairs[at], 0)
        return count / np.maximum(self.context[u], 1)

    def probabilities(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """p₂(v | u), elementwise."""
        w = self.weights[self._bucket(u)] * (self.context[u] > 0)
        return w * self._relative(u, v) + (1 - w) * self._unigram(v)

    def losses(self, stream: np.ndarray) -> tuple[float, float]:
        """Nats per token of the unigram and of the bigram on a stream whose first token is given."""
        stream = stream.astype(np.int64)
        u, v = stream[:-1], stream[1:]
        return float(-np.log(self._unigram(v)).mean()), float(-np.log(self.probabilities(u, v)).mean())
