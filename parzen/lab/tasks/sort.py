"""Sort: the tokens in ascending order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parzen.lab.tasks.sequence import Rearranged


@dataclass(frozen=True)
class Sort(Rearranged):
    """The tokens in ascending order.

    source  7 31  0  7
    target  0  7  7 31
    """

    name = "sort"

    def solve(self, source: np.ndarray) -> np.ndarray:
        """The source, sorted."""
        return np.sort(source)

    def origins(self, source: np.ndarray) -> np.ndarray:
        """All tokens that equal it."""
        return np.sort(source)[:, None] == source

    def _targets(self, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        inside = np.arange(source.shape[1]) < lengths[:, None]
        return np.sort(np.where(inside, source, self.symbols), axis=1)
