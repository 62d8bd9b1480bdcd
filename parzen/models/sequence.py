"""Sequence models that differ in their mixer alone: a Transformer, S4D, H3, RetNet, GLA or Mamba."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from parzen.kernels import kernel
from parzen.models.backbone import Backbone, Block
from parzen.models.gla import GLA
from parzen.models.h3 import H3
from parzen.models.mamba import Mamba
from parzen.models.retnet import RetNet
from parzen.models.s4 import S4D
from parzen.models.transformer import CausalAttention
from parzen.nn import BANDWIDTHS, POSITIONS

STD = 0.02


@dataclass(frozen=True)
class SequenceConfig:
    """A model of the in-context learning benchmark.

    Attributes:
        vocab, width, layers: sizes.
        mixer: a name of ``MIXERS``.
        heads: of the transformer, RetNet and GLA.
        kernel: of the transformer, as ``parzen.kernel`` spells it.
        positions: of the transformer: "learned", added to the embeddings, or a name of
            ``parzen.nn.POSITIONS``. The others need none.
        bandwidth: of the transformer: a name of ``parzen.nn.BANDWIDTHS``.
        max_length: how many positions are learned; no limit otherwise.
        dropout: in [0, 1), on the embeddings and on attention weights.
    """

    vocab: int
    width: int = 128
    layers: int = 2
    mixer: str = "transformer"
    heads: int = 1
    kernel: str = "gaussian"
    positions: str = "learned"
    bandwidth: str = "fixed"
    max_length: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mixer not in MIXERS:
            raise ValueError(f"unknown mixer {self.mixer!r}; known: {', '.join(MIXERS)}")
        if self.positions != "learned" and self.positions not in POSITIONS:
            raise ValueError(f"unknown positions {self.positions!r}; known: learned, {', '.join(POSITIONS)}")
        if self.bandwidth not in BANDWIDTHS:
            raise ValueError(f"unknown bandwidth {self.bandwidth!r}; known: {', '.join(BANDWIDTHS)}")
        kernel(self.kernel)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def learned_positions(self) -> bool:
        """Whether positions are added to the embeddings."""
        return MIXERS[self.mixer].attends and self.positions == "learned"


def _attention(config: SequenceConfig) -> nn.Module:
    positions = "none" if config.positions == "learned" else config.positions
    return CausalAttention(
        config.width,
        heads=config.heads,
        kernel=config.kernel,
        positions=positions,
        bandwidth=config.bandwidth,
        dropout=config.dropout,
        bias=True,
    )


@dataclass(frozen=True)
class Mixer:
    """A row of the table of mixers.

    Attributes:
        make: one layer's.
        heads: whether it has any.
        attends: whether it has a kernel, positions and a bandwidth.
    """

    make: Callable[[SequenceConfig], nn.Module]
    heads: bool = False
    attends: bool = False


MIXERS = {
    "transformer": Mixer(_attention, heads=True, attends=True),
    "s4": Mixer(lambda c: S4D(c.width)),
    "h3": Mixer(lambda c: H3(c.width)),
    "retnet": Mixer(lambda c: RetNet(c.width, heads=c.heads), heads=True),
    "gla": Mixer(lambda c: GLA(c.width, heads=c.heads), heads=True),
    "mamba": Mixer(lambda c: Mamba(c.width)),
}


class MLP(nn.Module):
    """W_o·GELU(W_i x + b_i) + b_o, 4·D wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        return self.output(F.gelu(self.input(x)))


class MixerBlock(nn.Module):
    """x + mixer(LN(x)): a block without an MLP."""

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(width, bias=False)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        return x + self.mixer(self.mixer_norm(x))


def _block(config: SequenceConfig) -> nn.Module:
    mixer = MIXERS[config.mixer].make(config)
    # Mamba's mixer is wide enough to be its own MLP.
    return (
        MixerBlock(config.width, mixer)
        if config.mixer == "mamba"
        else Block(config.width, mixer, MLP(config.width))
    )


class SequenceModel(Backbone):
    """tokens (B, T) → logits (B, T, V).

    Weights start normal with std 0.02, those of output projections 0.02/√(2L), biases at zero.
    """

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__(config.vocab, config.width, config.layers, lambda: _block(config))
        self.config = config
        self.positions = nn.Embedding(config.max_length, config.width) if config.learned_positions else None
        self.dropout = nn.Dropout(config.dropout)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                last = name.endswith(".output")
                nn.init.normal_(module.weight, std=STD / math.sqrt(2 * config.layers) if last else STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, T, V)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            length = tokens.shape[1]
            if length > self.config.max_length:
                raise ValueError(
                    f"{self.config.max_length} positions were learned, got {length} tokens; "
                    "raise max_length, or choose other positions"
                )
            x = x + self.positions.weight[:length]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)
