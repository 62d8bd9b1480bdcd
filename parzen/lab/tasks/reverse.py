"""Reverse: the tokens from the last to the first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parzen.lab.tasks.sequence import Rearranged


@dataclass(frozen=True)
class Reverse(Rearranged):
    """The tokens from the last to the first.

    source  7 31  0  7
    target  7  0 31  7
    """

    name = "reverse"

    def solve(self, source: np.ndarray) -> np.ndarray:
        """The source, from its end."""
        return source[::-1]

    def origins(self, source: np.ndarray) -> np.ndarray:
        """The token as far from the other end."""
        return np.eye(len(source), dtype=bool)[::-1]

    def _targets(self, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        mirrored = lengths[:, None] - 1 - np.arange(source.shape[1])
        return np.take_along_axis(source, mirrored.clip(min=0), axis=1)
