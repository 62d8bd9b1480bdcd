"""Memory Mosaics: language models made of associative memories that any kernel can read.

Every memory stores pairs (k_i, v_i) and answers a query k by kernel regression,

    y = Σ_i w(k, k_i) v_i,      w from the kernel on the scores β²·cos(k, k_i),

so the bandwidth is h = 1/β. A *contextual* memory stores the pairs of the sequence itself; a
*persistent* memory stores learned pairs and takes the place of the MLP.

Source: *Memory Mosaics* (arXiv 2405.06394), sections 5–6; the kernels: *Sparse Attention as Compact
Kernel Regression* (arXiv 2601.22766). The factor 1 − e^{−λ} of the published leaky average is left out,
since normalising the key cancels it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.attention import attention
from parzen.kernels import Kernel, kernel
from parzen.models.backbone import Backbone, Block
from parzen.models.scan import leaky_sum

# The per-head scalars are stored divided by this, which multiplies their learning rate under Adam.
FASTER = 10.0


@dataclass(frozen=True)
class MosaicConfig:
    """The published 12-layer model; ``vocab`` is GPT-2's, rounded up.

    Attributes:
        vocab, layers, heads, width: sizes; ``heads`` divides ``width``.
        slots: learned pairs per head of each persistent memory (published: 3.5·width).
        kernel: how contextual memories weigh what they stored, as ``parzen.kernel`` spells it.
        persistent_kernel: the same for persistent memories.
        dropout: in [0, 1), on memory weights and on what each memory adds to the residual.
    """

    vocab: int = 50304
    layers: int = 12
    heads: int = 12
    width: int = 768
    slots: int = 2688
    kernel: str = "gaussian"
    persistent_kernel: str = "gaussian"
    dropout: float = 0.05

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "heads", "width", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got {self.heads} heads for width {self.width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        kernel(self.kernel)
        kernel(self.persistent_kernel)


class KeyExtractor(nn.Module):
    """Unit keys that summarise the recent past, and the bandwidth that goes with them.

        k_t = k̄_t / ‖k̄_t‖,    k̄_t = Σ_{i≤t} e^{−λ_h(t−i)} W x_i,    scale = β_h² = 1/h²

    with λ_h = 10·|leak_h| and β_h = exp(min(10·sharpness_h, 5)).
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project = _linear(config.width)
        self.leak = nn.Parameter(torch.linspace(0.5, 5, config.heads) / FASTER)
        self.sharpness = nn.Parameter(torch.full((config.heads,), 1 / FASTER))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → unit keys (B, H, T, E)."""
        k = leaky_sum(_split(self.project(x), self.heads), FASTER * self.leak.abs())
        return F.normalize(k, dim=-1)

    def scale(self) -> Tensor:
        """β² as (H, 1), to broadcast over (B, H, T)."""
        return torch.exp(2 * (FASTER * self.sharpness).clamp(max=5))[:, None]


class ValueExtractor(nn.Module):
    """What to predict at each position but the last: a mix of this position and the next one.

    v_t = e^{10·gain_h} · unit(c_h u_t + (1−c_h) u_{t+1}),    u = W x
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project = _linear(config.width)
        self.mix = nn.Parameter(torch.rand(config.heads))
        self.gain = _gain(config.heads)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → values of positions 0 … T−2, (B, H, T−1, E)."""
        u = _split(self.project(x), self.heads)
        c = self.mix[:, None, None]
        return F.normalize(c * u[:, :, :-1] + (1 - c) * u[:, :, 1:], dim=-1) * _factor(self.gain)


class ContextualMemory(nn.Module):
    """Recalls what followed similar moments of this sequence: y_t = Σ_{i<t} w(k_t, k_i) v_i.

    Strictly causal, since v_i has seen x_{i+1}; y_0 = 0. Queries are the keys themselves.
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.kernel: Kernel = kernel(config.kernel)
        self.keys = KeyExtractor(config)
        self.values = ValueExtractor(config)
        self.output = _output(config)
        self.dropout = nn.Dropout(config.dropout)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries at 1 … T−1, the keys at 0 … T−2, and the scale: what the weights depend on."""
        k = self.keys(x)
        return k[:, :, 1:], k[:, :, :-1], self.keys.scale()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        query, key, scale = self.read(x)
        p = self.dropout.p if self.training else 0.0
        y = attention(
            query, key, self.values(x), dropout_p=p, is_causal=True, scale=scale, kernel=self.kernel
        )
        # Nothing is stored yet at the first position.
        y = F.pad(y, (0, 0, 1, 0))
        return self.dropout(self.output(_merge(y)))


class PersistentMemory(nn.Module):
    """Recalls learned pairs: y_t = e^{10·gain_h} Σ_j w(k_t, P_j) R_j over the slots j."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.kernel: Kernel = kernel(config.persistent_kernel)
        self.keys = KeyExtractor(config)
        head_size = config.width // config.heads
        shape = (config.heads, config.slots, head_size)
        self.stored_keys = nn.Parameter(torch.randn(shape) / math.sqrt(head_size))
        self.stored_values = nn.Parameter(torch.randn(shape) / math.sqrt(head_size))
        self.gain = _gain(config.heads)
        self.output = _output(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        batch = len(x)
        # The pairs are the same for every sequence, so the batch is one long row of queries.
        query = self.keys(x).transpose(0, 1).flatten(1, 2)[None]
        p = self.dropout.p if self.training else 0.0
        y = attention(
            query,
            self.stored_keys[None],
            self.stored_values[None],
            dropout_p=p,
            scale=self.keys.scale(),
            kernel=self.kernel,
        )
        y = (y[0] * _factor(self.gain)[0]).unflatten(1, (batch, -1)).transpose(0, 1)
        return self.dropout(self.output(_merge(y)))


class Mosaic(Backbone):
    """A Memory Mosaic: tokens (B, T) → logits (B, T, V). No positions, no maximal length."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(
            config.vocab,
            config.width,
            config.layers,
            lambda: Block(config.width, ContextualMemory(config), PersistentMemory(config)),
            logit_scale=1 / math.sqrt(config.width),
        )
        self.config = config


def _linear(width: int, std_factor: float = 1.0) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    nn.init.normal_(layer.weight, std=std_factor / math.sqrt(width))
    return layer


def _output(config: MosaicConfig) -> nn.Linear:
    return _linear(config.width, 1 / math.sqrt(config.layers))


def _gain(heads: int) -> nn.Parameter:
    return nn.Parameter(torch.full((heads,), -0.5 / FASTER))


def _factor(gain: Tensor) -> Tensor:
    return torch.exp(FASTER * gain)[None, :, None, None]


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) → (B, H, T, E)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(y: Tensor) -> Tensor:
    """(B, H, T, E) → (B, T, D)."""
    return y.transpose(1, 2).flatten(2)
