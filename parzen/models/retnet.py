"""RetNet: linear attention whose past fades at a fixed rate in each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.models.scan import decayed_attention, decayed_attention_step
from parzen.nn import rotate

# Decays are mild (at most 1/32 a step), so long chunks are right, and fastest.
CHUNK = 64


class RetNet(nn.Module):
    """y = W_o(swish(W_g x) ⊙ norm(o)), norm a LayerNorm without parameters over each head of o, and

        o_t = Σ_{i≤t} γ_h^{t−i} ⟨R_t q_t, R_i k_i⟩ v_i / √K,    γ_h = 1 − 2^{−5−h}

    with R the rotation of ``parzen.nn.rotate``; values and gate are twice as wide as x. The published code
    also divides each row by positive numbers, which norm undoes.

    Args:
        width: D.
        heads: H, a divisor of D.

    Source: *Retentive Network* (arXiv 2307.08621), eqs. 5–8.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"heads must divide width, got {heads} heads for width {width}")
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, 2 * width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(2 * width, width, bias=False)

    def log_decay(self) -> Tensor:
        """Log γ of each head, (H, 1)."""
        weight = self.query.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        heads = torch.arange(self.heads, device=weight.device, dtype=wide)
        return torch.log1p(-torch.exp2(-5 - heads))[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        position = torch.arange(x.shape[1], device=x.device)
        q, k, v = self._read(x, position)
        o = decayed_attention(q, k, v, self.log_decay()[..., None], CHUNK)
        return self._write(x, o.transpose(1, 2))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """S (B, H, K, V), zero, and the position 0."""
        size = self.query.weight.shape[0] // self.heads
        state = self.query.weight.new_zeros(batch, self.heads, size, 2 * size)
        return state, torch.zeros(1, dtype=torch.long, device=state.device)

    def step(self, x_BD: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(y_t, state) from x_t and the state before it."""
        past, position = state
        q, k, v = (z.squeeze(2) for z in self._read(x_BD[:, None], position))
        o, past = decayed_attention_step(q, k, v, self.log_decay(), past)
        return self._write(x_BD, o), (past, position + 1)

    def _read(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return rotate(q, position), rotate(k * k.shape[-1] ** -0.5, position), v

    def _write(self, x: Tensor, o: Tensor) -> Tensor:
        o = F.layer_norm(o, o.shape[-1:]).flatten(-2)
        return self.output(F.silu(self.gate(x)) * o)
