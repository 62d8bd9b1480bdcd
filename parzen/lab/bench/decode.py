"""``parzen bench decode``: one query to a long store of keys and values, against SDPA, behind a gate."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parzen
from parzen.kernels import Nearest
from parzen.lab.bench.timing import facts, prepare, save, take_turns
from parzen.lab.data.tales import tales
from parzen.lab.errors import UserError
from parzen.memory import KeyValueMemory
from parzen.models.mosaic import Mosaic, MosaicBlock, MosaicConfig

DECODE_KERNELS = ("epanechnikov", "biweight", "relumax", "knn_gaussian", "gaussian")
DECODE_LENGTHS = (4096, 16384, 65536, 131072, 1048576)
DECODE_DTYPES = (torch.float32, torch.bfloat16)
HEADS, SIZE, TURNS = 8, 64, 7


@dataclass(frozen=True)
class Step:
    """What one kernel did, decoding one token: 8 heads of 64. Seconds, and ratios to SDPA.

    Attributes:
        keys: stored, of each head.
        inputs: how keys are distributed.
        memory_ratio: bytes of the store to those of plain keys and values.
        scored: share of the keys that were read; the others were left out by their bounds.
        support: keys with weight.
    """

    keys: int
    dtype: str
    inputs: str
    kernel: str
    seconds: float
    sdpa_seconds: float
    ratio: float
    memory_ratio: float
    scored: float
    support: float


@dataclass(frozen=True)
class Stored:
    """Keys, values and a few queries, one for each turn, (1, H, n, E), and the scale."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float | Tensor = SIZE**-0.5


def _normal(n: int) -> Stored:
    g = torch.Generator().manual_seed(0)
    return Stored(*(torch.randn(1, HEADS, m, SIZE, generator=g) for m in (n, n, TURNS + 1)))


def _clustered(n: int) -> Stored:
    """256 clusters in random order; queries lie in clusters too."""
    plain, g = _normal(n), torch.Generator().manual_seed(1)
    centres = torch.randn(1, HEADS, 256, SIZE, generator=g)

    def near(x: Tensor) -> Tensor:
        return centres[:, :, torch.randint(256, (x.shape[2],), generator=g)].add_(x, alpha=0.3)

    return Stored(near(plain.keys), plain.values, near(plain.queries))


def _outliers(n: int) -> Stored:
    """One coordinate with a large mean, one with a large spread, as in the keys of language models."""
    plain = _normal(n)
    plain.keys[..., 5] += 20
    plain.keys[..., 11] *= 20
    return plain


@cache
def _trained() -> Mosaic:
    """A mosaic of one layer after a few seconds on the built-in stories, as bytes."""
    torch.manual_seed(0)
    width = HEADS * SIZE
    model = Mosaic(MosaicConfig(256, 1, HEADS, width, slots=64, kernel="biweight", dropout=0))
    text = _bytes(4 * 80 * 129).view(80, 4, 129)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for x in text:
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def _bytes(n: int) -> Tensor:
    """The first n bytes of the built-in stories, as tokens."""
    text = bytearray()
    for story in tales(0):
        text += story.encode() + b"\n"
        if len(text) >= n:
            break
    return torch.frombuffer(text[:n], dtype=torch.uint8).long()


def _mosaic(n: int) -> Stored:
    """What the contextual memory of a trained mosaic stores of a long text, and asks after it."""
    model = _trained()
    (block,) = model.blocks
    assert isinstance(block, MosaicBlock)
    mixer, queries = block.mixer, TURNS + 1
    with torch.no_grad():
        state, last = mixer.keys.initial_state(1), mixer.values.initial_state(1)
        keys, values = [], []
        for tokens in _bytes(n + queries).split(4096):
            x = block.mixer_norm(model.embedding(tokens[None]))
            k, state = mixer.keys.extend(x, state)
            # A value has seen the next position: there is one fewer.
            v, last = mixer.values.extend(x, last)
            keys.append(k)
            values.append(v)
        scale = mixer.bandwidth(x[:, -1:], torch.tensor([n]))
    k, v = torch.cat(keys, 2), torch.cat(values, 2)
    return Stored(k[:, :, :n].contiguous(), v[:, :, :n].contiguous(), k[:, :, n:].contiguous(), scale)


def _opened(folder: Path) -> tuple[Mosaic, Callable[[str], list[int]]]:
    """The best weights of a run, and what makes tokens of a story."""
    # The other benchmarks get by without what a run needs.
    from parzen.lab.data.text import END
    from parzen.lab.data.tokens import read_tokenizer
    from parzen.lab.experiments import open_run
    from parzen.lab.run.sweep import best_model
    from parzen.lab.tasks.stories import StoriesConfig

    run = open_run(folder)
    model = best_model(run)
    if not isinstance(run.config.task, StoriesConfig) or not isinstance(model, Mosaic):
        raise UserError(f"{folder} is no mosaic that was trained on stories")
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    return model, lambda story: tokenizer.encode(story + END).ids


@lru_cache(maxsize=1)
def _read_by(folder: Path, n: int) -> list[Stored]:
    """What each layer of a trained run stores of n tokens of the built-in stories, and asks after them."""
    model, encode = _opened(folder)
    tokens: list[int] = []
    for story in tales(0):
        tokens += encode(story)
        if len(tokens) > n + TURNS:
            break
    mixers = [cast(MosaicBlock, block).mixer for block in model.blocks]
    scales: dict[nn.Module, Tensor] = {}
    for mixer in mixers:
        mixer.bandwidth.register_forward_hook(lambda module, _, scale: scales.update({module: scale}))
    state, queries = model.initial_state(1), []
    # A value waits for the position after it, whose key is the first query.
    text = torch.tensor([tokens[: n + TURNS + 1]])
    for part in (*text[:, :n].split(4096, 1), *text[:, n:].split(1, 1)):
        _, state = model.prefill(part, state)
        queries.append([stored.key for stored, _ in state])
    return [
        Stored(
            stored.pairs.keys[:, :, :n].clone(),
            stored.pairs.values[:, :, :n].clone(),
            torch.cat([each[layer] for each in queries[-TURNS - 1 :]], 2),
            scales[mixers[layer].bandwidth],
        )
        for layer, (stored, _) in enumerate(state)
    ]


def _layers(folder: Path) -> dict[str, Callable[[int], Stored]]:
    def layer(i: int, n: int) -> Stored:
        return _read_by(folder, n)[i]

    return {f"layer {i + 1}": partial(layer, i) for i in range(len(_opened(folder)[0].blocks))}


INPUTS: dict[str, Callable[[int], Stored]] = {
    "N(0,1)": _normal,
    "clustered": _clustered,
    "outlier coordinates": _outliers,
    "trained mosaic": _mosaic,
}


def decode_gate(memory: KeyValueMemory, stored: Stored, what: str) -> None:
    """Raises AssertionError unless one step agrees with the dense definition in float64, head by head."""
    query = stored.queries[:, :, -1:]
    got = memory.attend(query.float())
    heads = memory.heads
    scales = torch.as_tensor(stored.scale, dtype=torch.float64).expand(1, heads, 1)
    for h in range(heads):
        q, k, v = (x[:, h : h + 1].double() for x in (query, stored.keys, stored.values))
        scale = scales[:, h : h + 1]
        rule = memory.kernel.rule
        if isinstance(rule, Nearest) and rule.k < len(memory):
            # Float32 at the k-th neighbour is float64 at the k-th neighbour only where the next is apart. In
            # repetitive text it may be nowhere.
            best = (q @ k.mT).flatten().topk(rule.k + 1).values
            if best[-2] - best[-1] < 1e-5 * best.abs().max():
                continue
        expected = parzen.attention(q, k, v, kernel=memory.kernel, scale=scale, backend="reference")
        error = float((got[:, h : h + 1] - expected).abs().max() / expected.abs().max().clamp_min(1))
        if not error < 2e-5:
            raise AssertionError(f"{what}: off by {error:.1e} in head {h}; nothing is timed")


def _seconds(f: Callable[[Tensor], Tensor], queries: Sequence[Tensor]) -> Callable[[], float]:
    """A clock of ``f`` for one query after the other."""
    turn = itertools.cycle(queries)

    def once() -> float:
        q = next(turn)
        start = time.perf_counter()
        f(q)
        return time.perf_counter() - start

    return once


def measure_decode(
    n: int, dtype: torch.dtype, inputs: str, made: Stored, kernels: Sequence[str]
) -> list[Step]:
    """The lines of one store of n pairs."""
    k, v, q = (x.to(dtype) for x in (made.keys, made.values, made.queries))
    stored = Stored(k, v, q, made.scale)
    plain = stored.keys.nbytes + stored.values.nbytes
    heads, size = k.shape[1], k.shape[3]
    first = KeyValueMemory(kernels[0], heads, size, scale=stored.scale, dtype=dtype)
    first.append(stored.keys, stored.values)
    # The same pairs for every kernel: copies share full chunks.
    memories = {name: first.copy() for name in kernels}
    for name, memory in memories.items():
        memory.kernel = parzen.kernel(name)
        decode_gate(memory, stored, f"{name}, {n} keys, {inputs}, {dtype}")
    scale = stored.scale

    def dense(q: Tensor) -> Tensor:
        if isinstance(scale, Tensor):
            q = (q * scale.unsqueeze(-1)).to(dtype)
        factor = 1.0 if isinstance(scale, Tensor) else scale
        return F.scaled_dot_product_attention(q, stored.keys, stored.values, scale=factor)

    queries = list(stored.queries.split(1, 2))
    clocks = {}
    for name, memory in memories.items():
        # Before each of them, or a store would be in the cache because another kernel just read it.
        clocks[f"SDPA before {name}"] = _seconds(dense, queries)
        clocks[name] = _seconds(memory.attend, queries)
    with torch.no_grad():
        times = take_turns(clocks, TURNS)
    sdpa = statistics.median(t for name, each in times.items() if name not in memories for t in each)
    lines = []
    for name, memory in memories.items():
        reads = [memory.reads(q) for q in queries]
        scored, support = (
            float(torch.cat(x).double().mean())
            for x in ([r.scored for r in reads], [r.support for r in reads])
        )
        seconds = statistics.median(times[name])
        lines.append(
            Step(
                n, str(dtype).removeprefix("torch."), inputs, name, seconds, sdpa, seconds / sdpa,
                memory.nbytes / plain, scored / n, support,
            )
        )  # fmt: skip
    return lines


def decode_table(lines: Sequence[Step]) -> str:
    """The lines as a Markdown table."""
    head = (
        "| keys | stored as | inputs | kernel | ms (SDPA) | time / SDPA | bytes / plain | keys read | "
        "keys a query |\n|--:|---|---|---|--:|--:|--:|--:|--:|"
    )
    rows = [
        f"| {x.keys} | {x.dtype} | {x.inputs} | {x.kernel} "
        f"| {1e3 * x.seconds:.2f} ({1e3 * x.sdpa_seconds:.2f}) | "
        f"{x.ratio:.2f} | {x.memory_ratio:.2f} | {100 * x.scored:.2f} % | {x.support:.1f} |"
        for x in lines
    ]
    return "\n".join([head, *rows])


def bench_decode(
    *,
    lengths: Sequence[int] | None = None,
    kernels: Sequence[str] | None = None,
    threads: int | None = None,
    folder: Path | None = None,
    out: str | Path | None = None,
    show: Callable[[str], object] = print,
) -> list[Step]:
    """One query for each of 8 heads of 64 to a ``KeyValueMemory``, against SDPA over the same pairs.

    Args:
        lengths: how many keys are stored; default 4096 to 1048576, the last with N(0,1) inputs in float32, or
            4096 and 16384 of a run.
        kernels: names; default epanechnikov, biweight, relumax, knn_gaussian and gaussian.
        threads: of torch; default as it is set.
        folder: a trained run; its heads and keys, layer by layer, in place of made ones.
        out: a folder for ``decode.md`` and ``decode.jsonl``; None saves nothing.
        show: receives the text.

    Raises:
        AssertionError: a kernel disagrees with float64.
        ValueError: the CPU engine was not built, a length below 1, or more threads than processors.
        UserError: no such run, or another model or task.
    """
    prepare(threads)
    if lengths is not None and min(lengths) < 1:
        raise ValueError(f"lengths must be at least 1, got {list(lengths)}")
    lines: list[Step] = []
    sources = INPUTS if folder is None else _layers(folder)
    for n in lengths or (DECODE_LENGTHS if folder is None else DECODE_LENGTHS[:2]):
        for dtype in DECODE_DTYPES:
            for inputs, make in sources.items():
                if (
                    lengths is None
                    and n == DECODE_LENGTHS[-1]
                    and (dtype, inputs) != (torch.float32, "N(0,1)")
                ):
                    continue
                fresh = measure_decode(n, dtype, inputs, make(n), kernels or DECODE_KERNELS)
                lines += fresh
                show(decode_table(fresh))
    if out is not None:
        save(out, "decode", f"{decode_table(lines)}\n\n{facts()}\n", lines)
    return lines
