"""S4D: a bank of linear oscillators, one for each channel, read as a convolution or a recurrence."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.models.scan import causal_convolution


class DiagonalSSM(nn.Module):
    """D independent state spaces with a diagonal matrix of N/2 conjugate pairs each.

        x'(t) = A x(t) + u(t),    y(t) = 2·Re⟨C, x(t)⟩ + skip·u(t),    A = −e^{log_damping} + i·frequency

    In steps of Δ = e^{log_step} this is h_t = Ā h_{t−1} + u_t, y_t = 2·Re⟨C̄, h_t⟩ + skip·u_t, with

        zero-order hold:  Ā = e^{ΔA},                     C̄ = C (e^{ΔA} − 1)/A
        bilinear:         Ā = (1 + ΔA/2)/(1 − ΔA/2),      C̄ = C Δ/(1 − ΔA/2)

    and the same as a convolution with the taps K_j = 2·Re⟨C̄, Ā^j⟩, skip added to K_0. The input map B is
    1: a learned one would only multiply C. Starts at A_n = −½ + iπn (S4D-Lin), log Δ uniform, C and skip
    normal.

    Args:
        width: D.
        state: N, even.
        step: the interval that Δ is drawn from, log-uniformly.
        bilinear: which discretisation.

    Source: *On the Parameterization and Initialization of Diagonal State Space Models* (arXiv 2206.11893).
    """

    optim: ClassVar[dict[str, dict[str, float]]] = {
        name: {"lr": 1e-3, "weight_decay": 0.0} for name in ("log_step", "log_damping", "frequency")
    }

    def __init__(
        self,
        width: int,
        state: int = 64,
        *,
        step: tuple[float, float] = (1e-3, 1e-1),
        bilinear: bool = False,
    ) -> None:
        super().__init__()
        if state < 2 or state % 2:
            raise ValueError(f"state must be even and ≥ 2 (conjugate pairs), got {state}")
        if not 0 < step[0] <= step[1]:
            raise ValueError(f"step must be an interval (low, high) above 0, got {step}")
        low, high = (math.log(end) for end in step)
        pairs = state // 2
        self.bilinear = bilinear
        self.log_step = nn.Parameter(low + (high - low) * torch.rand(width))
        self.log_damping = nn.Parameter(torch.full((width, pairs), math.log(0.5)))
        self.frequency = nn.Parameter(
            math.pi * torch.arange(pairs, dtype=torch.get_default_dtype()).repeat(width, 1)
        )
        self.read = nn.Parameter(torch.randn(width, pairs, 2) / math.sqrt(2))
        self.skip = nn.Parameter(torch.randn(width))

    def discrete(self) -> tuple[Tensor, Tensor]:
        """log Ā and C̄, complex, (D, N/2) each."""
        a = torch.complex(-self.log_damping.exp(), self.frequency)
        step = self.log_step.exp()[:, None]
        c = torch.view_as_complex(self.read)
        if self.bilinear:
            half = step * a / 2
            return torch.log((1 + half) / (1 - half)), c * step / (1 - half)
        return step * a, c * torch.expm1(step * a) / a

    def taps(self, length: int) -> Tensor:
        """K_0 … K_{length−1}: (D, length).

        Powers Ā^{aP + b} are made as Ā^{aP}·Ā^b with P ≈ √length: one product of two small matrices for
        each channel, instead of N·length exponentials.
        """
        log_a, c = self.discrete()
        block = math.isqrt(length - 1) + 1
        j = torch.arange(block, device=log_a.device, dtype=self.log_step.dtype)
        low = torch.exp(log_a[..., None] * j)
        high = 2 * c[..., None] * torch.exp(log_a[..., None] * (block * j[: -(-length // block)]))
        with torch.autocast(low.device.type, enabled=False):
            k = torch.cat((high.real, -high.imag), 1).mT @ torch.cat((low.real, low.imag), 1)
        k = k.flatten(1)[:, :length]
        return torch.cat((k[:, :1] + self.skip[:, None], k[:, 1:]), 1)

    def initial_state(self, batch: int) -> Tensor:
        """h before the first step: (B, D, N/2), complex zeros."""
        return torch.view_as_complex(self.read.new_zeros(batch, *self.read.shape))

    def step(self, u_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y_t, h_t) from u_t and h_{t−1}."""
        log_a, c = self.discrete()
        state = torch.exp(log_a) * state + u_BD[..., None]
        return 2 * (c * state).real.sum(-1) + self.skip * u_BD, state


class S4D(nn.Module):
    """y = GLU(W·GELU(SSM(x))), the diagonal state space of each channel followed by a mix of channels.

    Args:
        width: D.
        state: N of each channel.
        ssm: further arguments of ``DiagonalSSM``.

    Source: arXiv 2206.11893 and its published minimal code.
    """

    def __init__(self, width: int, *, state: int = 64, **ssm: Any) -> None:
        super().__init__()
        self.ssm = DiagonalSSM(width, state, **ssm)
        self.output = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        return self._mix(causal_convolution(x, self.ssm.taps(x.shape[1])))

    def initial_state(self, batch: int) -> Tensor:
        """The state before the first step."""
        return self.ssm.initial_state(batch)

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y_t, state) from x_t and the state before it."""
        y, state = self.ssm.step(x_BD, state)
        return self._mix(y), state

    def _mix(self, y: Tensor) -> Tensor:
        return F.glu(self.output(F.gelu(y)), -1)
