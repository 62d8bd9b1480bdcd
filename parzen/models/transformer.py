"""The Transformer's mixer: causal attention with any kernel, position by position if asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parzen.nn import KernelAttention


class CausalAttention(KernelAttention):
    """``parzen.nn.KernelAttention`` that sees no key ahead, in parallel or one position at a time.

    Args:
        width: D.
        heads: H.
        options: the other arguments of ``KernelAttention`` but ``causal``.
    """

    def __init__(self, width: int, *, heads: int, **options: Any) -> None:
        super().__init__(width, heads, causal=True, **options)

    def initial_state(self, batch: int) -> Tensor:
        """All that was seen, (B, t, D): nothing yet."""
        return self.query.weight.new_zeros(batch, 0, self.width)

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y_t, what was seen up to t) from x_t and what was seen before it."""
        seen = torch.cat((state, x_BD[:, None]), 1)
        return self(seen[:, -1:], seen)[:, 0], seen
