"""What the kernels of a trained model do: which keys they see, how far, and who looks at whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.attention import AttentionWeights, attention_weights
from parzen.lab.tasks.length import answer_start
from parzen.lab.tasks.sequence import Batch, SequenceTask
from parzen.lab.tasks.task import device_of
from parzen.models.backbone import Backbone
from parzen.models.mosaic import ContextualMemory
from parzen.models.transformer import CausalAttention

# Weights that are held at once.
WEIGHTS = 2**23


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


@torch.no_grad()
def attention_use(model: Backbone, task: SequenceTask, batch: Batch) -> dict[str, Any]:
    """What attention does where the target and EOS are said; empty if the model has none.

    Args:
        model: a Transformer or a mosaic.
        task: what ``batch`` was drawn from.
        batch: samples whose sources are equally long.

    Returns:
        Means of each head of each layer, [L][H]: ``support``, keys with weight; ``bandwidth``, effective
        bandwidth H of Proposition 3.1 (None where some query sees every key whatever its distance, and where
        keys are no unit vectors); ``right_weight``, the weight on the keys that hold what is to be said,
        over the queries that have such keys. They are the tokens of ``Task.origins``; in a mosaic, whose
        value at i has seen i + 1, the positions before those.
    """
    first, length = answer_start(batch.labels), batch.tokens.shape[1]
    sources = batch.tokens[:, 1:first].cpu().numpy()
    # The last row says EOS, which comes from nowhere.
    origins = np.stack([np.pad(task.origins(source), ((0, 1), (0, 0))) for source in sources])
    right = torch.from_numpy(origins).to(batch.tokens.device)
    means = []

    def look(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, ContextualMemory | CausalAttention)
        (x,) = arguments
        weights = _weights(layer, x)
        step = max(1, WEIGHTS // (len(x) * layer.bandwidth.heads * length))
        # Source token s stands at s + 1.
        begin = int(isinstance(layer, CausalAttention))
        total = torch.zeros(3, layer.bandwidth.heads, dtype=torch.float64, device=x.device)
        for start in range(first, length, step):
            stop = min(start + step, length)
            got = weights(start, stop)
            rows = right[:, None, start - first : stop - first]
            radius = torch.full_like(got.bandwidth, math.inf) if begin else got.bandwidth
            weight = (got.weights[..., begin : begin + rows.shape[-1]] * rows).sum(-1)
            total += torch.stack([part.double().sum((0, 2)) for part in (got.support, radius, weight)])
        asked = right.any(2).sum()
        means.append((total / total.new_tensor([[right[..., 0].numel()]] * 2 + [[asked]])).tolist())

    layers = [m for m in model.modules() if isinstance(m, ContextualMemory | CausalAttention)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        model.eval()(batch.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    names = ("support", "bandwidth", "right_weight")
    return {
        name: [[x if math.isfinite(x) else None for x in layer[i]] for layer in means]
        for i, name in enumerate(names if means else ())
    }


def _weights(layer: ContextualMemory | CausalAttention, x: Tensor) -> Callable[[int, int], AttentionWeights]:
    """The weights of the queries at positions start … stop − 1 on all keys that they may see."""
    if isinstance(layer, CausalAttention):
        # The last query stands at the last key.
        return lambda start, stop: layer.weights(x[:, start:stop], x[:, :stop])
    query, key, scale = layer.read(x)

    def at(start: int, stop: int) -> AttentionWeights:
        # Position t, from 1 on, sees the keys before it.
        rows = slice(start - 1, stop - 1)
        own = scale[..., rows] if isinstance(scale, Tensor) and scale.shape[-1] > 1 else scale
        return attention_weights(
            query[:, :, rows], key[:, :, : stop - 1], scale=own, kernel=layer.kernel, window=(-1, 0)
        )

    return at
