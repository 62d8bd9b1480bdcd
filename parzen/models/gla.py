"""GLA: linear attention whose past fades at a rate that each key channel learns from the input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parzen.models.scan import decayed_attention, decayed_attention_step


class GLA(nn.Module):
    """y = W_o(swish(W_g x) ⊙ norm(o)), norm a LayerNorm without parameters over each head of o, and

        o_t = S_tᵀ q_t / √K,    S_t = diag(α_t) S_{t−1} + k_t v_tᵀ,    α_t = sigmoid(W₂W₁x_t + b)^{1/16}

    Keys and queries are half as wide as x; W₂W₁ has rank 16.

    Args:
        width: D.
        heads: H, a divisor of D/2.
        rank: of the map that gives the decays.

    Source: *Gated Linear Attention Transformers with Hardware-Efficient Training* (arXiv 2312.06635).
    """

    def __init__(self, width: int, *, heads: int = 1, rank: int = 16) -> None:
        super().__init__()
        if heads < 1 or width % (2 * heads):
            raise ValueError(f"heads must divide width/2, got {heads} heads for width {width}")
        self.heads = heads
        self.query = nn.Linear(width, width // 2, bias=False)
        self.key = nn.Linear(width, width // 2, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.decay = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width // 2))
        self.gate = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q, k, v, g = (z.transpose(1, 2) for z in self._read(x))
        o = decayed_attention(q, k, v, g)
        return self._write(x, o.transpose(1, 2))

    def initial_state(self, batch: int) -> Tensor:
        """S before the first step: (B, H, K, V), zero."""
        keys, values = (z.weight.shape[0] // self.heads for z in (self.key, self.value))
        return self.key.weight.new_zeros(batch, self.heads, keys, values)

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y_t, S_t) from x_t and S_{t−1}."""
        o, state = decayed_attention_step(*self._read(x_BD), state)
        return self._write(x_BD, o), state

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and log α, (…, H, E) each."""
        q, k, v, g = (
            z.unflatten(-1, (self.heads, -1))
            for z in (self.query(x), self.key(x), self.value(x), F.logsigmoid(self.decay(x)) / 16)
        )
        return q * q.shape[-1] ** -0.5, k, v, g

    def _write(self, x: Tensor, o: Tensor) -> Tensor:
        o = F.layer_norm(o, o.shape[-1:]).flatten(-2)
        return self.output(F.silu(self.gate(x)) * o)
