"""Memory Mosaics: language models made of associative memories that any kernel can read.

Every memory stores pairs (k_i, v_i) and answers a query k by kernel regression,

    y = Σ_i w(k, k_i) v_i,      w from the kernel on the scores β²·cos(k, k_i),

so the bandwidth is h = 1/β. A *contextual* memory stores the pairs of the sequence itself; a
*persistent* memory stores learned pairs and takes the place of the MLP.

Every part has two forms that agree: ``forward`` reads a whole sequence; ``extend`` reads the next n ≥ 1
positions of one, given the state that the positions before left behind.

Source: *Memory Mosaics* (arXiv 2405.06394), sections 5–6, and its published code; the options: *Memory
Mosaics at scale* (arXiv 2507.03285); the kernels: *Sparse Attention as Compact Kernel Regression* (arXiv
2601.22766). The factor 1 − e^{−λ} of the published leaky average is left out, since normalising the key
cancels it.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.attention import attention
from parzen.backends import recall
from parzen.kernels import Kernel, Number, kernel, lower
from parzen.memory import KeyValueMemory
from parzen.models.backbone import Backbone, Block
from parzen.models.scan import gated_sum, leaky_sum
from parzen.nn import BANDWIDTHS, Bandwidth

# The per-head scalars are stored divided by this, which multiplies their learning rate under Adam.
FASTER = 10.0

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class MosaicConfig:
    """The published 12-layer model; ``vocab`` is GPT-2's, rounded up.

    Attributes:
        vocab, layers, heads, width: sizes; ``heads`` divides ``width``.
        slots: learned pairs per head of each persistent memory (published: 3.5·width).
        kernel: how contextual memories weigh what they stored, as ``parzen.kernel`` spells it.
        persistent_kernel: the same for persistent memories.
        dropout: in [0, 1), on memory weights and on what each memory adds to the residual.
        bandwidth: of contextual memories: "published" (``Sharpness``), or a name of
            ``parzen.nn.BANDWIDTHS``, where n counts the pairs stored: "power_law" is β = β₁n^a + β₀.
        gated_keys: whether keys fade and enter as the input says (``GatedKeys``), in both memories.
    """

    vocab: int = 50304
    layers: int = 12
    heads: int = 12
    width: int = 768
    slots: int = 2688
    kernel: str = "gaussian"
    persistent_kernel: str = "gaussian"
    dropout: float = 0.05
    bandwidth: str = "published"
    gated_keys: bool = False

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
        known = ("published", *BANDWIDTHS)
        if self.bandwidth not in known:
            raise ValueError(f"unknown bandwidth {self.bandwidth!r}; known: {', '.join(known)}")


# ---- what scores are made of ---------------------------------------------------------------------


class Sharpness(Bandwidth):
    """scale = β_h² with β_h = exp(min(10·sharpness_h, 5)), learned, whatever n."""

    def _build(self, width: int, factory: dict[str, Any]) -> None:
        self.sharpness = nn.Parameter(torch.empty(self.heads, **factory))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the initial scale."""
        super().reset_parameters()
        self.sharpness.fill_(math.log(self.start) / 2 / FASTER)

    def base(self) -> Tensor:
        """β², (H, 1)."""
        return torch.exp(2 * (FASTER * self.sharpness).clamp(max=5))[:, None]


class KeyExtractor(nn.Module):
    """Unit keys that summarise the recent past: k_t = k̄_t/‖k̄_t‖, where k̄ sums up W x_i over i ≤ t.

    A subclass says how the sum fades. Its state is what continues the sum.
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project = _linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → unit keys (B, H, T, E)."""
        return F.normalize(self.average(x)[0], dim=-1).to(x.dtype)

    def extend(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The keys of the next positions, and the state after them."""
        # What came before is one more term in front.
        k, *rest = self.average(x, state)
        keys = F.normalize(k[:, :, 1:], dim=-1).to(x.dtype)
        return keys, tuple(z[:, :, -1:].clone() for z in (k, *rest))

    def initial_state(self, batch: int) -> State:
        """Before the first position: k̄ = 0, (B, H, 1, E), in float32 at least; a subclass may add to it."""
        k = _zeros(self.project, batch, self.heads, 1)
        return (k.to(torch.promote_types(k.dtype, torch.float32)),)

    def average(self, x: Tensor, before: State = ()) -> State:
        """k̄ (B, H, T, E) up to a positive factor, and what else continues it; ``before`` is put in front."""
        raise NotImplementedError


class LeakyKeys(KeyExtractor):
    """``k̄_t = Σ_{i≤t} e^{−λ_h(t−i)} W x_i with λ_h = 10·|leak_h|``."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(config)
        self.leak = nn.Parameter(torch.linspace(0.5, 5, config.heads) / FASTER)

    def average(self, x: Tensor, before: State = ()) -> State:
        """k̄."""
        k = torch.cat((*before, _split(self.project(x), self.heads)), 2)
        return (leaky_sum(k, FASTER * self.leak.abs()),)


class GatedKeys(KeyExtractor):
    """k̄_t = e^{W_g x_t} W x_t + e^{−|W_λ x_t|} k̄_{t−1}, gate and fading being one number for each head.

    Source: *Memory Mosaics at scale* (arXiv 2507.03285).
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(config)
        self.gate = _linear(config.width, config.heads)
        self.fade = _linear(config.width, config.heads)

    def initial_state(self, batch: int) -> State:
        """k̄ = 0, and its scale m, (B, H, 1)."""
        (k,) = super().initial_state(batch)
        # So low that it decides nothing, yet finite.
        return k, torch.full_like(k[..., 0], torch.finfo(k.dtype).min)

    def average(self, x: Tensor, before: State = ()) -> State:
        """k̄ e^{−m} and m."""
        k, gate, decay = _split(self.project(x), self.heads), self.gate(x).mT, self.fade(x).abs().mT
        if before:
            k, gate = torch.cat((before[0], k), 2), torch.cat((before[1], gate), 2)
            decay = F.pad(decay, (1, 0))
        return gated_sum(k, gate, decay)


class ValueExtractor(nn.Module):
    """What to predict at each position but the last: a mix of this position and the next one.

    v_t = e^{10·gain_h} · unit(c_h u_t + (1−c_h) u_{t+1}),    u = W x
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project = _linear(config.width, config.width)
        self.mix = nn.Parameter(torch.rand(config.heads))
        self.gain = _gain(config.heads)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → values of positions 0 … T−2, (B, H, T−1, E)."""
        return self._mixed(_split(self.project(x), self.heads))

    def extend(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The values that have seen their next position only now, and the last u: (B, H, 0 or 1, E)."""
        u = torch.cat((state, _split(self.project(x), self.heads)), 2)
        return self._mixed(u), u[:, :, -1:].clone()

    def initial_state(self, batch: int) -> Tensor:
        """No u yet: (B, H, 0, E)."""
        return _zeros(self.project, batch, self.heads, 0)

    def _mixed(self, u: Tensor) -> Tensor:
        c = self.mix[:, None, None]
        return F.normalize(c * u[:, :, :-1] + (1 - c) * u[:, :, 1:], dim=-1) * _factor(self.gain)


# ---- memories ------------------------------------------------------------------------------------


class Pairs:
    """Stored keys and values, (B, H, n, E) each, in a buffer that doubles when it is full.

    So storing a pair takes constant time on average. A buffer is written in place: whoever goes on from one
    state in two ways must copy it first. A ``KeyValueMemory`` with gradients, for kernels that read it all.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._count = keys.shape[2]
        self._buffer = torch.stack((keys, values))

    def __len__(self) -> int:
        """How many pairs each head stores."""
        return self._count

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store (B, H, n, E) more of each."""
        start, self._count = self._count, self._count + key.shape[2]
        room = self._buffer.shape[3]
        if self._count > room:
            more = max(room, self._count - room, 16)
            self._buffer = F.pad(self._buffer, (0, 0, 0, more))
        self._buffer[0, :, :, start : self._count] = key
        self._buffer[1, :, :, start : self._count] = value

    def reorder(self, index: Tensor) -> None:
        """Sequence i goes on from what sequence ``index[i]`` has stored; a copy."""
        self._buffer = self._buffer[:, index]

    @property
    def keys(self) -> Tensor:
        """The stored keys."""
        return self._buffer[0, :, :, : self._count]

    @property
    def values(self) -> Tensor:
        """The stored values."""
        return self._buffer[1, :, :, : self._count]


@dataclass(frozen=True)
class Stored:
    """What a contextual memory knows: the pairs, and the last position, whose value is yet to come.

    Attributes:
        keys: what continues the key extractor.
        key: k of the last position, (B, H, 1, E), or (B, H, 0, E) at the start.
        value: u of the last position, likewise.
        pairs: those of all positions before it.
        count: how many those are: more, and this state is used up.
    """

    keys: State
    key: Tensor
    value: Tensor
    pairs: Pairs | KeyValueMemory
    count: int

    def select(self, rows: Tensor) -> Stored:
        """A copy of what is known of these sequences, ``rows`` (n,) saying which."""
        keys, pairs = tuple(k[rows] for k in self.keys), copy(self.pairs)
        pairs.reorder(rows)
        return Stored(keys, self.key[rows], self.value[rows], pairs, self.count)


BlockState = tuple[Stored, State]


class ContextualMemory(nn.Module):
    """Recalls what followed similar moments of this sequence: y_t = Σ_{i<t} w(k_t, k_i) v_i.

    Strictly causal, since v_i has seen x_{i+1}; y_0 = 0. Queries are the keys themselves.
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.kernel: Kernel = kernel(config.kernel)
        self.keys = _keys(config)
        self.bandwidth = _bandwidth(config, config.bandwidth)
        self.values = ValueExtractor(config)
        self.output = _output(config)
        self.dropout = nn.Dropout(config.dropout)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Number]:
        """The queries at 1 … T−1, the keys at 0 … T−2, and the scale: what the weights depend on."""
        k = self.keys(x)
        return k[:, :, 1:], k[:, :, :-1], self._scale(x[:, 1:], k.shape[2] - 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        query, key, scale = self.read(x)
        # Nothing is stored yet at the first position.
        return self._write(F.pad(self._recall(query, key, self.values(x), scale), (0, 0, 1, 0)))

    def initial_state(self, batch: int) -> Stored:
        """Nothing stored."""
        empty = self.values.initial_state(batch)
        return Stored(self.keys.initial_state(batch), empty, empty, Pairs(empty, empty), 0)

    def extend(self, x: Tensor, state: Stored) -> tuple[Tensor, Stored]:
        """The next positions, (B, n, D) → (B, n, D), and the state after them; the old one is used up.

        Raises:
            ValueError: a state that was used up before.
        """
        if len(state.pairs) != state.count:
            raise ValueError("this state was read on from before; to go on in two ways, deepcopy it first")
        query, keys = self.keys.extend(x, state.keys)
        key = torch.cat((state.key, query), 2)
        value, last = self.values.extend(x, state.value)
        pairs = self._store(state.pairs, query)
        pairs.append(key[:, :, :-1], value)
        # The first position of all has no pair to recall.
        blank = 1 - state.key.shape[2]
        query, scale = query[:, :, blank:], self._scale(x[:, blank:], len(pairs))
        if isinstance(pairs, Pairs):
            y = self._recall(query, pairs.keys, pairs.values, scale)
        else:
            y = pairs.attend(query, is_causal=True, scale=scale)
        y = F.pad(y, (0, 0, blank, 0))
        return self._write(y), Stored(keys, key[:, :, -1:].clone(), last, pairs, len(pairs))

    def _store(self, pairs: Pairs | KeyValueMemory, key: Tensor) -> Pairs | KeyValueMemory:
        """The same pairs in what serves now: a memory where it reads fewer of them and needs no gradients."""
        random = self.training and self.dropout.p > 0
        memory = self.kernel.compact and not random and not torch.is_grad_enabled()
        memory = memory and recall.why_not(key, lower(self.kernel, 1.0)) is None
        if memory == isinstance(pairs, KeyValueMemory):
            return pairs
        k, v = pairs.keys, pairs.values
        if not memory:
            return Pairs(k, v)
        new = KeyValueMemory(self.kernel, k.shape[1], k.shape[3], dtype=k.dtype)
        new.append(k, v)
        return new

    def _scale(self, x: Tensor, pairs: int) -> Number:
        """1/h² of the queries at x, the last of which sees so many pairs and each one fewer before it."""
        return self.bandwidth(x, torch.arange(pairs - x.shape[1] + 1, pairs + 1, device=x.device))

    def _recall(self, query: Tensor, key: Tensor, value: Tensor, scale: Number) -> Tensor:
        """Σ w v, where the last query sees every pair and each one fewer before it."""
        p = self.dropout.p if self.training else 0.0
        return attention(query, key, value, dropout_p=p, scale=scale, kernel=self.kernel, window=(-1, 0))

    def _write(self, y: Tensor) -> Tensor:
        return self.dropout(self.output(_merge(y)))


class PersistentMemory(nn.Module):
    """Recalls learned pairs: y_t = e^{10·gain_h} Σ_j w(k_t, P_j) R_j over the slots j."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.kernel: Kernel = kernel(config.persistent_kernel)
        self.keys = _keys(config)
        self.bandwidth = _bandwidth(config, "published")
        head_size = config.width // config.heads
        shape = (config.heads, config.slots, head_size)
        self.stored_keys = nn.Parameter(torch.randn(shape) / math.sqrt(head_size))
        self.stored_values = nn.Parameter(torch.randn(shape) / math.sqrt(head_size))
        self.gain = _gain(config.heads)
        self.output = _output(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        return self._recall(x, self.keys(x))

    def initial_state(self, batch: int) -> State:
        """That of the key extractor."""
        return self.keys.initial_state(batch)

    def extend(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The next positions, (B, n, D) → (B, n, D), and the state after them."""
        query, state = self.keys.extend(x, state)
        return self._recall(x, query), state

    def _recall(self, x: Tensor, query: Tensor) -> Tensor:
        batch = len(x)
        # The pairs are the same for every sequence, so the batch is one long row of queries.
        query = query.transpose(0, 1).flatten(1, 2)[None]
        p = self.dropout.p if self.training else 0.0
        y = attention(
            query,
            self.stored_keys[None],
            self.stored_values[None],
            dropout_p=p,
            scale=self.bandwidth.base(),
            kernel=self.kernel,
        )
        y = (y[0] * _factor(self.gain)[0]).unflatten(1, (batch, -1)).transpose(0, 1)
        return self.dropout(self.output(_merge(y)))


# ---- the model -----------------------------------------------------------------------------------


class MosaicBlock(Block):
    """x + contextual(LN(x)), then x + persistent(LN(x))."""

    mixer: ContextualMemory
    memory: PersistentMemory

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(config.width, ContextualMemory(config), PersistentMemory(config))

    def initial_state(self, batch: int) -> BlockState:
        """Those of the two memories."""
        return self.mixer.initial_state(batch), self.memory.initial_state(batch)

    def extend(self, x: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """The next positions, (B, n, D) → (B, n, D), and the state after them."""
        y, contextual = self.mixer.extend(self.mixer_norm(x), state[0])
        x = x + y
        y, persistent = self.memory.extend(self.memory_norm(x), state[1])
        return x + y, (contextual, persistent)


class Mosaic(Backbone):
    """A Memory Mosaic: tokens (B, T) → logits (B, T, V). No positions, no maximal length.

    ``prefill`` and ``step`` give the same logits in the order of reading, at a cost per token that grows
    with the number of stored pairs only. Where a kernel is discontinuous (the k nearest keys, and two
    scores next to the k-th that differ by rounding alone) the two forms may choose differently.
    """

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(
            config.vocab,
            config.width,
            config.layers,
            lambda: MosaicBlock(config),
            logit_scale=1 / math.sqrt(config.width),
        )
        self.config = config

    def initial_state(self, batch: int) -> list[BlockState]:
        """That of so many sequences of which nothing has been read."""
        return [block.initial_state(batch) for block in self._mosaic_blocks()]

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, state: list[BlockState] | None = None
    ) -> tuple[Tensor, list[BlockState]]:
        """The logits (B, V) that follow ``tokens``, and the state after them.

        Args:
            tokens: (B, T), T ≥ 1.
            state: what was read before, used up by this call; default nothing.
        """
        x, after = self.extend(tokens, self.initial_state(len(tokens)) if state is None else state)
        return self.head(x[:, -1]), after

    def extend(self, tokens: Tensor, state: list[BlockState]) -> tuple[Tensor, list[BlockState]]:
        """What the head reads at the next positions, (B, n) → (B, n, D), and the state after them."""
        x = self.embedding(tokens)
        after = []
        for block, before in zip(self._mosaic_blocks(), state, strict=True):
            x, now = block.extend(x, before)
            after.append(now)
        return x, after

    def step(self, tokens: Tensor, state: list[BlockState]) -> tuple[Tensor, list[BlockState]]:
        """The logits (B, V) that follow one more token of each sequence, (B,), and the state after it."""
        return self.prefill(tokens[:, None], state)

    def _mosaic_blocks(self) -> list[MosaicBlock]:
        return cast(list[MosaicBlock], list(self.blocks))


def _linear(width: int, out: int, std_factor: float = 1.0) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=std_factor / math.sqrt(width))
    return layer


def _output(config: MosaicConfig) -> nn.Linear:
    return _linear(config.width, config.width, 1 / math.sqrt(config.layers))


def _keys(config: MosaicConfig) -> KeyExtractor:
    return GatedKeys(config) if config.gated_keys else LeakyKeys(config)


def _bandwidth(config: MosaicConfig, name: str) -> Bandwidth:
    rule = Sharpness if name == "published" else BANDWIDTHS[name]
    return rule(config.width, [True] * config.heads, config.width // config.heads, math.exp(2))


def _gain(heads: int) -> nn.Parameter:
    return nn.Parameter(torch.full((heads,), -0.5 / FASTER))


def _factor(gain: Tensor) -> Tensor:
    return torch.exp(FASTER * gain)[None, :, None, None]


def _zeros(project: nn.Linear, batch: int, heads: int, length: int) -> Tensor:
    """Zeros (B, H, length, E)."""
    return project.weight.new_zeros(batch, heads, length, project.out_features // heads)


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) → (B, H, T, E)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(y: Tensor) -> Tensor:
    """(B, H, T, E) → (B, T, D)."""
    return y.transpose(1, 2).flatten(2)
