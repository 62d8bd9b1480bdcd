"""The Transformer's mixer: causal attention with any kernel, position by position if asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parzen.nn import KernelAttention


class CausalAttention(KernelAttention):
    """``parzen.nn.KernelAttention`` that sees no key ahead, in parallel or some positions at a time.

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

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next positions, (B, n, D) → (B, n, D), and what was seen up to them."""
        seen = torch.cat((state, x), 1)
        return self(x, seen), seen

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y_t, what was seen up to t) from x_t and what was seen before it."""
        y, seen = self.extend(x_BD[:, None], state)
        return y[:, 0], seen
