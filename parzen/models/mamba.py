"""Mamba: a diagonal state space whose step, input and output maps are read from the input."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.models.scan import selective_scan


class Mamba(nn.Module):
    """y = W_o(swish(z) ⊙ (scan(u) + skip·u)),    (x', z) = W_i x,    u = swish(conv(x')), with

        h_t = e^{Δ_t A} ⊙ h_{t−1} + (Δ_t u_t) B_tᵀ,    scan(u)_t = h_t C_t

    in E·D channels of N numbers, where (r, B, C) = W_r u, Δ = softplus(W_Δ r + b) and A = −e^{log_a}; conv
    is causal, with a filter for each channel. Starts at A_n = −n, skip = 1 and softplus(b) log-uniform in
    [1e-3, 1e-1].

    Args:
        width: D.
        state: N.
        taps: of conv.
        expand: E.
        rank: the size of r. Default D/16, rounded up.

    Source: *Mamba* (arXiv 2312.00752), section 3, and its published code.
    """

    optim: ClassVar[dict[str, dict[str, float]]] = {name: {"weight_decay": 0.0} for name in ("log_a", "skip")}

    def __init__(
        self, width: int, *, state: int = 16, taps: int = 4, expand: int = 2, rank: int | None = None
    ) -> None:
        super().__init__()
        inner = expand * width
        rank = -(-width // 16) if rank is None else rank
        self.state, self.rank = state, rank
        self.input = nn.Linear(width, 2 * inner, bias=False)
        bound = 1 / math.sqrt(taps)
        self.conv_weight = nn.Parameter(bound * (2 * torch.rand(inner, taps) - 1))
        self.conv_bias = nn.Parameter(bound * (2 * torch.rand(inner) - 1))
        self.select = nn.Linear(inner, rank + 2 * state, bias=False)
        # Not an nn.Linear, so that a model which draws those anew leaves the steps alone.
        self.step_weight = nn.Parameter((2 * torch.rand(inner, rank) - 1) / math.sqrt(rank))
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.exp(low + (high - low) * torch.rand(inner))
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.output = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        u, z = self.input(x).chunk(2, -1)
        u = F.pad(u.mT, (self.conv_weight.shape[1] - 1, 0))
        u = F.conv1d(u, self.conv_weight[:, None], self.conv_bias, groups=len(self.conv_weight)).mT
        u = F.silu(u)
        step, B, C = self._select(u)
        y = selective_scan(u, step, -self.log_a.exp(), B, C)
        return self._write(u, y, z)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """What conv still sees (B, taps − 1, E·D), and h (B, E·D, N); both zero."""
        inner, taps = self.conv_weight.shape
        new = self.conv_weight.new_zeros
        return new(batch, taps - 1, inner), new(batch, inner, self.state)

    def step(self, x_BD: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(y_t, state) from x_t and the state before it."""
        seen, h = state
        u, z = self.input(x_BD).chunk(2, -1)
        seen = torch.cat((seen, u[:, None]), 1)
        u = F.silu((seen * self.conv_weight.mT).sum(1) + self.conv_bias)
        step, B, C = self._select(u)
        h = torch.exp(step[..., None] * -self.log_a.exp()) * h + (step * u)[..., None] * B[:, None]
        y = (h @ C[..., None]).squeeze(-1)
        return self._write(u, y, z), (seen[:, 1:], h)

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, B, C = self.select(u).split((self.rank, self.state, self.state), -1)
        return F.softplus(F.linear(r, self.step_weight, self.step_bias)), B, C

    def _write(self, u: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.output(F.silu(z) * (y + self.skip * u))
