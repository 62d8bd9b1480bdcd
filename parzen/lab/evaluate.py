"""What a trained model achieves, and what its kernel does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.attention import attention_weights
from parzen.lab.tasks.stories import IGNORED
from parzen.models.mosaic import ContextualMemory


@torch.no_grad()
def loss(model: nn.Module, windows: tuple[Tensor, Tensor], batch: int = 64) -> float:
    """Nats per token over all targets of ``windows`` (inputs and targets, (N, T))."""
    model.eval()
    total = 0.0
    for inputs, targets in zip(*(x.split(batch) for x in windows), strict=True):
        logits = model(inputs).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
    return total / int((windows[1] != IGNORED).sum())


@torch.no_grad()
def share_of_keys(model: nn.Module, inputs: Tensor, batch: int = 16) -> float:
    """How many of the allowed keys get a weight > 0, over all contextual memories, heads and queries."""
    used = allowed = 0

    def count(memory: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal used, allowed
        assert isinstance(memory, ContextualMemory)
        query, key, scale = memory.read(*arguments)
        seen = attention_weights(query, key, is_causal=True, scale=scale, kernel=memory.kernel)
        used += int(seen.support.sum())
        # Query t of T has t keys.
        rows = query.shape[-2]
        allowed += seen.support[..., 0].numel() * rows * (rows + 1) // 2

    memories = [m for m in model.modules() if isinstance(m, ContextualMemory)]
    hooks = [memory.register_forward_pre_hook(count) for memory in memories]
    try:
        model.eval()
        for part in inputs.split(batch):
            model(part)
    finally:
        for hook in hooks:
            hook.remove()
    return used / allowed
