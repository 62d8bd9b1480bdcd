"""Writing on from a prompt, one token at a time."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from parzen.models.backbone import Block
from parzen.models.sequence import SequenceModel
from parzen.models.transformer import CausalAttention


class Recurrent(Protocol):
    """A language model that can read on from a state."""

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """The logits (B, V) that follow ``tokens`` (B, T), and the state after them."""

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The logits (B, V) that follow one more token of each sequence, (B,), and the state after it."""


class TransformerReader:
    """A Transformer that reads on; its state is what the attention of each block has seen.

    The logits are those of the whole sequence, up to rounding.

    Args:
        model: a ``SequenceModel`` with the mixer "transformer", in eval mode.

    Raises:
        ValueError: another mixer.
    """

    def __init__(self, model: SequenceModel) -> None:
        if model.config.mixer != "transformer":
            raise ValueError(f"expected a model with the mixer 'transformer', got {model.config.mixer!r}")
        self.model = model

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """The logits (B, V) that follow ``tokens`` (B, T), and the state after them."""
        model = self.model
        blocks = cast(list[Block], list(model.blocks))
        mixers = [cast(CausalAttention, block.mixer) for block in blocks]
        state = [mixer.initial_state(len(tokens)) for mixer in mixers] if state is None else state
        x = model.embedding(tokens)
        if model.positions is not None:
            start = state[0].shape[1]
            x = x + model.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        after = []
        for block, mixer, before in zip(blocks, mixers, state, strict=True):
            y, seen = mixer.extend(block.mixer_norm(x), before)
            x = x + y
            x = x + block.memory(block.memory_norm(x))
            after.append(seen)
        return model.head(x[:, -1]), after

    def step(self, tokens: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The logits (B, V) that follow one more token of each sequence, (B,), and the state after it."""
        return self.prefill(tokens[:, None], state)


@torch.no_grad()
def generate(
    model: Recurrent,
    prompt: Tensor,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, max_tokens): what ``model`` writes after ``prompt``, drawn from softmax(logits/temperature).

    Args:
        model: in eval mode, or dropout acts.
        prompt: (B, T), T ≥ 1.
        max_tokens: ≥ 0.
        temperature: ≥ 0; 0 takes the most likely token.
        top_k: draw among the k ≥ 1 most likely tokens only (ties at the k-th: all kept).
        generator: of the randomness; the same seed gives the same tokens.

    Raises:
        ValueError: an argument outside its range.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must be (B, T) with T ≥ 1, got {tuple(prompt.shape)}")
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    written = prompt.new_empty(len(prompt), max_tokens)
    state = None
    for i in range(max_tokens):
        logits, state = model.prefill(prompt) if i == 0 else model.step(written[:, i - 1], state)
        written[:, i] = _draw(logits, temperature, top_k, generator)
    return written


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits, (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # From the best logit down: dividing cannot overflow, however low the temperature.
    z = (logits - logits.amax(-1, keepdim=True)).to(torch.promote_types(logits.dtype, torch.float32))
    p = torch.softmax(z / temperature, -1)
    return torch.multinomial(p, 1, generator=generator)[:, 0]
