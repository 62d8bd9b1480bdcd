"""Copy: the tokens as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parzen.lab.tasks.sequence import Rearranged


@dataclass(frozen=True)
class Copy(Rearranged):
    """The tokens as they are.

    source  7 31  0  7
    target  7 31  0  7
    """

    name = "copy"

    def solve(self, source: np.ndarray) -> np.ndarray:
        """The source."""
        return source

    def origins(self, source: np.ndarray) -> np.ndarray:
        """The token at the same place."""
        return np.eye(len(source), dtype=bool)

    def _targets(self, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return source
