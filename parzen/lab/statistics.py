"""Means and differences over seeds, with Student t intervals.

A few seeds are all there is. The bootstrap of two or three values draws from a handful of resamples and is
much too narrow; Student's t is exact for normal errors at any number of seeds from 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and that error's degrees of freedom; 0 of them: one seed, no interval."""

    mean: float
    error: float = math.nan
    freedom: int = 0

    def half(self, level: float = 0.95) -> float:
        """Half the width of the interval that covers with probability ``level``; infinite for one seed."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + level) / 2)) * self.error if self.freedom else math.inf

    def show(self, digits: int = 3) -> str:
        """ "1.234 ± 0.056", or "1.234" if there is no interval."""
        spread = f" ± {self.half():.{digits}f}" if self.freedom else ""
        return f"{self.mean:.{digits}f}{spread}"

    def __sub__(self, other: Estimate) -> Estimate:
        """Of two independent estimates; the smaller number of degrees of freedom is the safe one."""
        error = math.hypot(self.error, other.error)
        return Estimate(self.mean - other.mean, error, min(self.freedom, other.freedom))


def mean(values: Sequence[float]) -> Estimate:
    """Of at least one value, a seed each."""
    n = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(float(np.mean(values)), error, n - 1)


def difference(scores: Mapping[str, Mapping[int, float]], a: str, b: str, pooled: bool = True) -> Estimate:
    """a − b over the seeds that both have, from ``scores[name][seed]``.

    All names see the same batches at a seed, so seeds are blocks and their effect cancels. ``pooled`` takes
    the error from all names that have these seeds: with k names and n seeds (k−1)(n−1) degrees of freedom in
    place of the n−1 of the paired test, on the assumption that the names scatter alike. Two names alone
    are the paired test.

    Raises:
        ValueError: no common seed.
    """
    seeds = sorted(scores[a].keys() & scores[b].keys())
    if not seeds:
        raise ValueError(f"{a} and {b} have no seed in common")
    names = [name for name in scores if pooled or name in (a, b)]
    variance, freedom = _scatter(scores, names, seeds)
    at = float(np.mean([scores[a][seed] - scores[b][seed] for seed in seeds]))
    return Estimate(at, math.sqrt(2 * variance / len(seeds)), freedom)


def among(scores: Mapping[str, Mapping[int, float]], name: str) -> Estimate:
    """The mean of ``name`` with an interval for comparing it with the other names: without what a seed does
    to all of them, and from the scatter of all.

    Source: Loftus and Masson, *Using confidence intervals in within-subject designs* (1994).
    """
    variance, freedom = _scatter(scores, list(scores), list(scores[name]))
    own = mean([*scores[name].values()])
    return Estimate(own.mean, math.sqrt(variance / len(scores[name])), freedom) if freedom else own


def _scatter(
    scores: Mapping[str, Mapping[int, float]], names: Sequence[str], seeds: Sequence[int]
) -> tuple[float, int]:
    """The variance that name and seed leave, over ``names`` with all ``seeds``, and its freedom."""
    table = np.array([[scores[n][s] for s in seeds] for n in names if scores[n].keys() >= set(seeds)])
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    if not freedom:
        return math.nan, 0
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    return float((left**2).sum()) / freedom, freedom
