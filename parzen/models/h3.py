"""H3: two state spaces that shift and remember, multiplied like queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from parzen.models.s4 import DiagonalSSM
from parzen.models.scan import causal_convolution


class H3(nn.Module):
    """y = W_o(q ⊙ diagonal(shift(k) ⊙ v)),    (q, k, v) = W x + b.

    The shift state space keeps the last N keys, so it is a learned filter of N taps in each channel; the
    diagonal one is that of S4D, with the bilinear discretisation. Of the published parametrisation two
    redundancies are left out: the shift's input map is e₁, and its skip is part of the first tap.

    Args:
        width: D.
        state: N of both state spaces.
        ssm: further arguments of ``DiagonalSSM``.

    Source: *Hungry Hungry Hippos* (arXiv 2212.14052), algorithm 1 with heads of size 1.
    """

    def __init__(self, width: int, *, state: int = 64, **ssm: Any) -> None:
        super().__init__()
        self.input = nn.Linear(width, 3 * width)
        taps = (2 * torch.rand(width, state) - 1) / math.sqrt(state)
        taps[:, 0] += torch.randn(width)
        self.shift = nn.Parameter(taps)
        self.ssm = DiagonalSSM(width, state, **{"bilinear": True, **ssm})
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q, k, v = self.input(x).chunk(3, -1)
        kv = causal_convolution(k, self.shift) * v
        return self.output(q * causal_convolution(kv, self.ssm.taps(x.shape[1])))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """The last keys, newest first (B, D, N), and the diagonal state; all zero."""
        return self.shift.new_zeros(batch, *self.shift.shape), self.ssm.initial_state(batch)

    def step(self, x_BD: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(y_t, state) from x_t and the state before it."""
        keys, h = state
        q, k, v = self.input(x_BD).chunk(3, -1)
        keys = torch.cat((k[..., None], keys[..., :-1]), -1)
        y, h = self.ssm.step((keys * self.shift).sum(-1) * v, h)
        return self.output(q * y), (keys, h)
