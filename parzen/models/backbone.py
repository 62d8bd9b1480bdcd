"""What every language model here shares: embedding, pre-norm residual blocks, tied head."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """x + mixer(LN(x)), then x + memory(LN(x)).

    ``mixer`` looks along the sequence; ``memory`` acts on each position (a persistent memory, an MLP).
    Both map (B, T, D) to (B, T, D).
    """

    def __init__(self, width: int, mixer: nn.Module, memory: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(width, bias=False)
        self.mixer = mixer
        self.memory_norm = nn.LayerNorm(width, bias=False)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.memory(self.memory_norm(x))


class Backbone(nn.Module):
    """tokens (B, T) → logits (B, T, V): embedding, blocks, LayerNorm, tied head times ``logit_scale``."""

    def __init__(
        self, vocab: int, width: int, layers: int, block: Callable[[], nn.Module], *, logit_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(width))
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.logit_scale = logit_scale

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, T, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        """(…, D) → logits (…, V)."""
        # Scaling the narrow side is cheaper than scaling the logits.
        return F.linear(self.norm(x) * self.logit_scale, self.embedding.weight)
