"""Means and differences over seeds, with Student t intervals.

A few seeds are all there is. The bootstrap of two or three values draws from a handful of resamples and is
much too narrow; Student's t is exact for normal errors at any number of seeds from 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and that error's degrees of freedom; 0 of them: one seed, no interval."""

    mean: float
    error: float = math.nan
    freedom: int = 0

    def half(self, level: float = 0.95) -> float:
        """Half the width of the interval that covers with probability ``level``; infinite for one seed."""
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
    names = [name for name in scores if name in (a, b) or (pooled and scores[name].keys() >= set(seeds))]
    table = np.array([[scores[name][seed] for seed in seeds] for name in names])
    rows = table.mean(1)
    at = float(rows[names.index(a)] - rows[names.index(b)])
    freedom = (len(names) - 1) * (len(seeds) - 1)
    if not freedom:
        return Estimate(at)
    left = table - rows[:, None] - table.mean(0) + table.mean()
    return Estimate(at, math.sqrt(2 * float((left**2).sum()) / freedom / len(seeds)), freedom)
