"""What a trained model achieves, and what its kernel does."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.attention import attention_weights
from parzen.lab.train import IGNORED, device_of
from parzen.models.mosaic import ContextualMemory

Windows = tuple[Tensor, Tensor]


@torch.no_grad()
def loss_by_position(model: nn.Module, windows: Windows, batch: int = 64) -> tuple[Tensor, Tensor]:
    """(sum of nats, number of targets) at each position of the windows, (T,) in float64."""
    model.eval()
    length = windows[0].shape[1]
    total, counted = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for inputs, targets in zip(*(x.split(batch) for x in windows), strict=True):
        logits = model(inputs.to(device_of(model))).transpose(1, 2)
        nats = F.cross_entropy(logits, targets.to(logits.device), ignore_index=IGNORED, reduction="none")
        total += nats.sum(0, dtype=torch.float64).cpu()
        counted += (targets != IGNORED).sum(0)
    return total, counted


def loss(model: nn.Module, windows: Windows, batch: int = 64) -> float:
    """Nats per token over all targets of ``windows`` (inputs and targets, (N, T))."""
    total, counted = loss_by_position(model, windows, batch)
    return float(total.sum() / counted.sum())


@torch.no_grad()
def kernel_use(model: nn.Module, inputs: Tensor, batch: int = 16) -> dict[str, Any]:
    """What the kernels of the contextual memories do on ``inputs`` (N, T); empty if there are none.

    Returns:
        ``share_of_keys``: how many of the allowed keys get a weight > 0, over all of them;
        ``support_by_position``: the mean number of keys with weight at query 1, 2, …, T − 1;
        ``support``, ``bandwidth``, ``entropy``: means over the queries of each head of each layer, [L][H]:
        keys with weight, effective bandwidth H of Proposition 3.1 (None where some query sees every key
        whatever its distance), entropy of the weights in nats.
    """
    memories = [m for m in model.modules() if isinstance(m, ContextualMemory)]
    seen: dict[ContextualMemory, list[Tensor]] = {m: [] for m in memories}

    def look(memory: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(memory, ContextualMemory)
        query, key, scale = memory.read(*arguments)
        got = attention_weights(query, key, is_causal=True, scale=scale, kernel=memory.kernel)
        entropy = torch.special.entr(got.weights).sum(-1)
        # Sums over the sequences: (H, T).
        sums = (got.support.sum(0), got.bandwidth.sum(0), entropy.sum(0))
        seen[memory].append(torch.stack([x.double().cpu() for x in sums]))

    _run_with(model, memories, look, inputs, batch)
    if not memories:
        return {}
    layers = [torch.stack(parts).sum(0) for parts in seen.values()]
    mean = torch.stack(layers) / len(inputs)  # (L, 3, H, T)
    rows = mean.shape[-1]
    by_head = mean.mean(-1)
    return {
        "share_of_keys": float(mean[:, 0].mean((0, 1)).sum() / (rows * (rows + 1) / 2)),
        "support_by_position": mean[:, 0].mean((0, 1)).tolist(),
        "support": by_head[:, 0].tolist(),
        "bandwidth": [[h if math.isfinite(h) else None for h in row] for row in by_head[:, 1].tolist()],
        "entropy": by_head[:, 2].tolist(),
    }


@torch.no_grad()
def attention_map(model: nn.Module, tokens: Tensor) -> list[list[list[list[float]]]]:
    """The weights on one sequence ``tokens`` (T,), [L][H][T][T]: a row for each query, the first of zeros."""
    memories = [m for m in model.modules() if isinstance(m, ContextualMemory)]
    maps = []

    def look(memory: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(memory, ContextualMemory)
        query, key, scale = memory.read(*arguments)
        w = attention_weights(query, key, is_causal=True, scale=scale, kernel=memory.kernel).weights[0]
        maps.append(F.pad(w, (0, 1, 1, 0)).double().round(decimals=4).tolist())

    _run_with(model, memories, look, tokens[None], 1)
    return maps


def _run_with(model: nn.Module, memories: list[Any], look: Any, inputs: Tensor, batch: int) -> None:
    hooks = [memory.register_forward_pre_hook(look) for memory in memories]
    try:
        model.eval()
        for part in inputs.split(batch):
            model(part.to(device_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
