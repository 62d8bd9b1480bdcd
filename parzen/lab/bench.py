"""Timings of attention, and of decoding from a long store, against torch's dense SDPA, behind a gate.

Nothing is timed before it was compared with float64.

Every figure is a ratio of medians in one process, the contenders taking turns; absolute times are shown
for the dense peer only. A table whose gate fails is not printed.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parzen
from parzen.backends import cpu
from parzen.call import Call
from parzen.kernels import Nearest, lower
from parzen.lab.errors import UserError
from parzen.lab.tasks.tales import tales
from parzen.memory import KeyValueMemory
from parzen.models.mosaic import Mosaic, MosaicBlock, MosaicConfig
from parzen.testing import witness

Result = TypeVar("Result")
Key = TypeVar("Key")

KERNELS = ("epanechnikov", "biweight", "triweight", "relumax", "knn_gaussian")
ENTMAX = {"epanechnikov": "sparsemax", "biweight": "entmax15"}
ENTMAX_LONGEST = 2048


@dataclass(frozen=True)
class Setting:
    """One line of inputs: N(0,1) tensors of (batch, heads, length, size), scores times ``scale``/√size."""

    batch: int
    heads: int
    length: int
    size: int = 64
    causal: bool = True
    scale: float = 1.0
    repeats: int = 5

    def __str__(self) -> str:
        shape = f"{self.batch}×{self.heads}×{self.length}×{self.size}"
        return f"{shape}{', causal' if self.causal else ''}, scale {self.scale:g}/√{self.size}"


@dataclass(frozen=True)
class Line:
    """What one kernel did in one setting. Times in seconds, memory in MiB, ratios to SDPA."""

    setting: str
    kernel: str
    forward: float
    backward: float
    forward_ratio: float
    backward_ratio: float
    both_ratio: float
    entmax_times: float | None
    support: float
    memory: float | None
    sdpa_memory: float | None


STANDARD = (
    Setting(32, 8, 64, repeats=21),
    Setting(1, 8, 512, repeats=21),
    Setting(1, 8, 2048, repeats=7),
    Setting(1, 8, 4096, repeats=7),
    Setting(1, 4, 16384, repeats=3),
    Setting(8, 8, 380, size=16, repeats=11),
    Setting(8, 4, 256, repeats=11),
)
# The densities: from nearly every key to a handful.
DENSITIES = tuple(Setting(1, 8, 2048, causal=False, scale=x) for x in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0))
DENSE_KERNELS = (*KERNELS, "normrelu?radius=2", "power?r=2&margin=4")


def _tensors(setting: Setting) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.heads, setting.length, setting.size)
    qkv = [torch.randn(shape, generator=g).requires_grad_() for _ in range(3)]
    return qkv, torch.randn(shape, generator=g)


def _factor(setting: Setting) -> float:
    return setting.scale * setting.size**-0.5


def _entmax(name: str, causal: bool, factor: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import entmax

    s = q @ k.mT * factor
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return getattr(entmax, name)(s, dim=-1) @ v


def _contenders(setting: Setting, kernels: Sequence[str]) -> dict[str, Callable[..., Tensor]]:
    factor = _factor(setting)
    options: dict[str, Any] = {"is_causal": setting.causal, "scale": factor}
    out: dict[str, Callable[..., Tensor]] = {"sdpa": partial(F.scaled_dot_product_attention, **options)}
    for kernel in kernels:
        out[kernel] = partial(parzen.attention, kernel=kernel, backend="cpu", **options)
    return out


def take_turns(contenders: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """What each contender gave, ``repeats`` times in turns, after one turn that does not count."""
    found: dict[Key, list[Result]] = {name: [] for name in contenders}
    for f in contenders.values():
        f()
    for _ in range(repeats):
        for name, f in contenders.items():
            found[name].append(f())
    return found


def _clock(f: Callable[..., Tensor], qkv: Sequence[Tensor], seed: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    o = f(*qkv)
    middle = time.perf_counter()
    torch.autograd.grad(o, qkv, seed)
    return middle - start, time.perf_counter() - middle


def _status(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def peak_memory(f: Callable[[], object]) -> float | None:
    """MiB that ``f`` adds to the resident memory at its peak; None where the system does not say."""
    try:
        # What the allocator keeps for later is not in use.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    f()
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before) / 1024


def gate(kernel: str, setting: Setting) -> None:
    """Raises AssertionError unless the engine agrees with float64 on rows of this very setting.

    One head, and for long inputs the last 64 queries, against the float64 witness: output and gradients.
    """
    qkv, seed = _tensors(setting)
    q, k, v = (x.detach()[:1, :1].clone().requires_grad_() for x in qkv)
    seed = seed[:1, :1]
    options: dict[str, Any] = {"kernel": kernel, "scale": _factor(setting)}
    if setting.length > 2048:
        q, seed = q.detach()[:, :, -64:].clone().requires_grad_(), seed[:, :, -64:]
        causal: dict[str, Any] = {"window": (-1, 0)} if setting.causal else {}
    else:
        causal = {"is_causal": setting.causal}
    got = parzen.attention(q, k, v, backend="cpu", **options, **causal)
    expected = witness(q, k, v, **options, **causal)
    pairs = [(got, expected)]
    pairs += zip(
        torch.autograd.grad(got, (q, k, v), seed),
        torch.autograd.grad(expected, (q, k, v), seed.double()),
        strict=True,
    )
    for name, (a, b) in zip(("output", "dq", "dk", "dv"), pairs, strict=True):
        a, b = a.detach().double(), b.detach()
        error, allowed = float((a - b).abs().max() / b.abs().max().clamp_min(1)), 2e-5
        if name != "output":
            # Where a key lies on the edge of a support, float32 may see it on the other side: the
            # gradient of that one row jumps. So gradients are held to their error as a whole.
            error, allowed = float((a - b).norm() / b.norm().clamp_min(1e-30)), 2e-3
        if not error < allowed:
            raise AssertionError(f"{kernel}, {setting}: {name} is off by {error:.1e}; nothing is timed")


def _support(kernel: str, setting: Setting, qkv: Sequence[Tensor]) -> float:
    with torch.no_grad():
        chosen, factor = parzen.kernel(kernel), _factor(setting)
        right = 0 if setting.causal else -1
        call = Call(qkv[0], qkv[1], qkv[2], factor, lower(chosen, factor), chosen, right=right)
        return float(cpu.support(call).double().mean())


def measure(setting: Setting, kernels: Sequence[str], entmax: bool = True) -> list[Line]:
    """The lines of one setting."""
    for kernel in kernels:
        # float32 at the k-th neighbour is not float64 at the k-th neighbour.
        if "knn" not in kernel:
            gate(kernel, setting)
    qkv, seed = _tensors(setting)
    contenders = _contenders(setting, kernels)
    if entmax and setting.length <= ENTMAX_LONGEST:
        try:
            import entmax as _  # noqa: F401
        except ImportError:
            entmax = False
    clocks = {name: partial(_clock, f, qkv, seed) for name, f in contenders.items()}
    times = take_turns(clocks, setting.repeats)
    middle = {
        name: (statistics.median(t[0] for t in each), statistics.median(t[1] for t in each))
        for name, each in times.items()
    }
    memory = {name: peak_memory(clock) for name, clock in clocks.items()}
    dense_f, dense_b = middle["sdpa"]
    lines = []
    for kernel in kernels:
        forward, backward = middle[kernel]
        slower = None
        if entmax and kernel in ENTMAX and setting.length <= ENTMAX_LONGEST and setting.scale == 1.0:
            peer = partial(_entmax, ENTMAX[kernel], setting.causal, _factor(setting))
            slower = sum(_clock(peer, qkv, seed)) / (forward + backward)
        lines.append(
            Line(
                str(setting), kernel, forward, backward, forward / dense_f, backward / dense_b,
                (forward + backward) / (dense_f + dense_b),
                slower, _support(kernel, setting, qkv), memory[kernel], memory["sdpa"],
            )
        )  # fmt: skip
    return lines


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    head = (
        "| inputs (B×H×n×E) | kernel | forward / SDPA | backward / SDPA | both / SDPA | "
        "entmax package / this | keys a query | added MiB (SDPA) |\n|---|---|--:|--:|--:|--:|--:|--:|"
    )
    rows = []
    for x in lines:
        peer = "" if x.entmax_times is None else f"{x.entmax_times:.0f}×"
        added = "" if x.memory is None else f"{x.memory:.0f} ({x.sdpa_memory:.0f})"
        ratios = f"{x.forward_ratio:.2f} | {x.backward_ratio:.2f} | {x.both_ratio:.2f}"
        rows.append(f"| {x.setting} | {x.kernel} | {ratios} | {peer} | {x.support:.1f} | {added} |")
    return "\n".join([head, *rows])


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **{f"engine_{key}": value for key, value in cpu.info().items()},
    }


def facts() -> str:
    """The same in a line."""
    return ", ".join(f"{key} {value}" for key, value in environment().items())


def prepare(threads: int | None) -> None:
    """Sets torch's threads, if given.

    Raises:
        ValueError: the CPU engine was not built, or more threads than processors.
    """
    if not cpu.info()["built"]:
        raise ValueError("the CPU engine was not built: there is nothing to time")
    cores = os.cpu_count() or 1
    if threads and threads > cores:
        raise ValueError(f"threads must be at most {cores}, the processors here, got {threads}")
    if threads:
        torch.set_num_threads(threads)


def save(folder: str | Path, name: str, text: str, lines: Sequence[Any]) -> None:
    """Writes name.md and, with the environment, a line of JSON for each of ``lines`` to name.jsonl."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    records = [json.dumps({**environment(), **asdict(x)}, ensure_ascii=False) for x in lines]
    (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")


def longest(length: int = 131072, kernel: str = "epanechnikov") -> str:
    """Forward and backward of one long causal head: seconds and added memory, in a sentence."""
    setting = Setting(1, 1, length)
    qkv, seed = _tensors(setting)
    f = _contenders(setting, [kernel])[kernel]
    start = time.perf_counter()
    memory = peak_memory(partial(_clock, f, qkv, seed))
    seconds = time.perf_counter() - start
    added = "unknown" if memory is None else f"{memory:.0f} MiB"
    return f"{kernel}, {setting}: forward and backward in {seconds:.1f} s, added memory {added}"


def bench_attention(
    *,
    lengths: Sequence[int] | None = None,
    kernels: Sequence[str] | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    long: bool = False,
    show: Callable[[str], object] = print,
) -> list[Line]:
    """Measure, show and save the table.

    Args:
        lengths: which of the standard ones; default all, and the densities.
        kernels: names; default those of each group.
        threads: of torch; default as it is set.
        out: a folder for ``attention.md`` and ``attention.jsonl``; None saves nothing.
        long: add one head of 131072 keys.
        show: receives the text.

    Raises:
        AssertionError: a kernel disagrees with float64.
        ValueError: the CPU engine was not built, another length, or more threads than processors.
    """
    prepare(threads)
    known = sorted({setting.length for setting in STANDARD})
    if lengths is not None and not set(lengths) <= set(known):
        raise ValueError(f"lengths must be among {', '.join(map(str, known))}, got {lengths}")
    lines: list[Line] = []
    chosen_settings = [s for s in STANDARD if lengths is None or s.length in lengths]
    for setting in (*chosen_settings, *(DENSITIES if lengths is None else ())):
        chosen = kernels or (DENSE_KERNELS if setting in DENSITIES else KERNELS)
        fresh = measure(setting, chosen)
        lines += fresh
        show(table(fresh))
    text = f"{table(lines)}\n\n{facts()}\n"
    if long:
        sentence = longest()
        show(sentence)
        text += f"\n{sentence}\n"
    if out is not None:
        save(out, "attention", text, lines)
    return lines


# ---- decoding ------------------------------------------------------------------------------------

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
    from parzen.lab.sweep import best_model
    from parzen.lab.tasks.stories import END, StoriesConfig, read_tokenizer

    run, model = best_model(folder)
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


# ---- attention on a GPU --------------------------------------------------------------------------

GPU_KERNELS = ("epanechnikov", "biweight", "triweight", "relumax")
GPU_LENGTHS = (1024, 4096, 16384, 65536)
# Scores of N(0,1) inputs times these and 1/√size.
GPU_INPUTS = {"N(0,1)": 1.0, "peaked": 4.0}
GPU_SECONDS = 200.0
_BLOCK = 64


@dataclass(frozen=True)
class GpuLine:
    """What one contender did, causal, in bfloat16. Seconds, MiB, ratios to SDPA, keys a query.

    Attributes:
        live: share of the visible tiles of 64 queries × 64 keys that hold a key with weight.
    """

    inputs: str
    length: int
    size: int
    kernel: str
    contender: str
    forward: float
    both: float
    forward_ratio: float
    both_ratio: float
    memory: float | None
    support: float
    live: float


def _gpu_clock(f: Callable[..., Tensor], qkv: Sequence[Tensor], seed: Tensor) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward, when the device is done with them."""
    wait = torch.cuda.synchronize if seed.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    o = f(*qkv)
    wait()
    middle = time.perf_counter()
    torch.autograd.grad(o, qkv, seed)
    wait()
    return middle - start, time.perf_counter() - start


def _gpu_memory(f: Callable[[], object], device: str) -> float | None:
    """MiB that ``f`` adds at its peak; None under the interpreter."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _density(kernel: str, factor: float, q: Tensor, k: Tensor) -> tuple[float, float]:
    """Keys a query, and the share of live tiles, of eight tiles of queries of the first head."""
    n = q.shape[2]
    keys, live = [], []
    for start in range(0, n, max(_BLOCK, n // 8 // _BLOCK * _BLOCK)):
        stop = min(start + _BLOCK, n)
        # The last query stands at the last key.
        rows, seen = q.detach()[:1, :1, start:stop].float(), k.detach()[:1, :1, :stop].float()
        w = (
            parzen.attention_weights(rows, seen, kernel=kernel, scale=factor, window=(-1, 0)).weights[0, 0]
            > 0
        )
        keys.append(w.sum(-1).double().mean())
        live.append(torch.stack([tile.any() for tile in w.split(_BLOCK, 1)]).double().mean())
    return float(torch.stack(keys).mean()), float(torch.stack(live).mean())


def gpu_gate(kernel: str, factor: float, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises AssertionError unless the last 64 queries of one head agree with float64, gradients too."""
    q, k, v = (x.detach()[:1, :1].clone().requires_grad_() for x in (q[:, :, -_BLOCK:], k, v))
    options: dict[str, Any] = {"kernel": kernel, "scale": factor, "window": (-1, 0)}
    got = parzen.attention(q, k, v, backend="triton", **options)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    expected = witness(wide[0], wide[1], wide[2], **options)
    seed = torch.randint(-8, 9, got.shape, generator=torch.Generator().manual_seed(1)) / 4
    grads = torch.autograd.grad(got, (q, k, v), seed.to(got))
    pairs = [(got, expected), *zip(grads, torch.autograd.grad(expected, wide, seed.double()), strict=True)]
    for name, (a, b) in zip(("output", "dq", "dk", "dv"), pairs, strict=True):
        a, b = a.detach().cpu().double(), b.detach()
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        # Tiles round weights to bfloat16, with 8 bits, before they multiply them.
        if not error < 2e-2:
            raise AssertionError(
                f"{kernel}, {k.shape[2]} keys: {name} is off by {error:.1e}; nothing is timed"
            )


def _adasplash(n: int, size: int) -> dict[str, Callable[..., Tensor]]:
    """AdaSplash, where it is installed and serves the case: causal 1.5-entmax, scores times 1/√size."""
    if find_spec("adasplash") is None:
        return {}
    adasplash = import_module("adasplash")
    found: dict[str, Callable[..., Tensor]] = {
        "adasplash v1": partial(adasplash.adasplash_v1, alpha=1.5, is_causal=True)
    }
    if n & (n - 1) == 0 and size in (16, 32, 64, 128, 256):
        found["adasplash v2"] = adasplash.adasplash_v2
    return found


def _peers(
    qkv: Sequence[Tensor], sharp: float, ours: Callable[..., Tensor], show: Callable[[str], object]
) -> dict[tuple[str, str], Callable[..., Tensor]]:
    """AdaSplash, if it runs and agrees with ``ours``; ``show`` hears why not."""
    q, k, v = qkv
    n, size = q.shape[2:]
    found: dict[tuple[str, str], Callable[..., Tensor]] = {}
    for name, f in _adasplash(n, size).items():
        # It takes no scale: that goes into the queries.
        def call(q: Tensor, k: Tensor, v: Tensor, f: Callable[..., Tensor] = f) -> Tensor:
            return f(q * sharp, k, v)

        try:
            o = call(q, k, v)
            torch.autograd.grad(o, qkv, torch.ones_like(o))
        # Another project's program may raise anything; all of it is shown, and our table is not lost to it.
        except Exception as error:
            show(f"{name} does not serve {n} × {size}: {error!r}")
            continue
        expected = ours(q, k, v).detach()
        off = float((o.detach() - expected).norm() / expected.norm())
        # Both are rounded to bfloat16, and its threshold may be found by few steps.
        if off < 5e-2:
            found["biweight", name] = call
        else:
            show(f"{name}, {n} × {size}, is off by {off:.1e}: not timed")
    return found


def measure_gpu(
    inputs: str,
    n: int,
    size: int,
    heads: int,
    kernels: Sequence[str],
    device: str,
    repeats: int,
    show: Callable[[str], object],
) -> list[GpuLine]:
    """The lines of one length, width and kind of inputs."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, size, generator=g).to(device, torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    seed = torch.randn(1, heads, n, size, generator=g).to(device, torch.bfloat16)
    sharp = GPU_INPUTS[inputs]
    factor = sharp * size**-0.5
    for kernel in kernels:
        gpu_gate(kernel, factor, q, k, v)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=factor)

    contenders: dict[tuple[str, str], Callable[..., Tensor]] = {("gaussian", "sdpa"): dense}
    for kernel in kernels:
        contenders[kernel, "parzen"] = partial(
            parzen.attention, kernel=kernel, scale=factor, is_causal=True, backend="triton"
        )
    if "biweight" in kernels:
        contenders |= _peers((q, k, v), sharp, contenders["biweight", "parzen"], show)
    clocks = {key: partial(_gpu_clock, f, (q, k, v), seed) for key, f in contenders.items()}
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    with torch.nn.attention.sdpa_kernel(flash):
        times = take_turns(clocks, repeats)
        memory = {key: _gpu_memory(clock, device) for key, clock in clocks.items()}
    middle = {key: [statistics.median(x) for x in zip(*each, strict=True)] for key, each in times.items()}
    density = {kernel: _density(kernel, factor, q, k) for kernel in kernels} | {
        "gaussian": ((n + 1) / 2, 1.0)
    }
    forward, both = middle["gaussian", "sdpa"]
    return [
        GpuLine(
            inputs, n, size, kernel, name, f, b, f / forward, b / both, memory[kernel, name], *density[kernel]
        )
        for (kernel, name), (f, b) in middle.items()
    ]


def gpu_table(lines: Sequence[GpuLine]) -> str:
    """The lines as a Markdown table."""
    head = (
        "| inputs | n | size | kernel | by | forward ms | both ms | forward / SDPA | both / SDPA | MiB | "
        "keys a query | live tiles |\n|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    rows = [
        f"| {x.inputs} | {x.length} | {x.size} | {x.kernel} | {x.contender} | {1e3 * x.forward:.2f} | "
        f"{1e3 * x.both:.2f} | {x.forward_ratio:.2f} | {x.both_ratio:.2f} | "
        f"{'' if x.memory is None else f'{x.memory:.0f}'} | {x.support:.1f} | {100 * x.live:.0f} % |"
        for x in lines
    ]
    return "\n".join([head, *rows])


def bench_gpu(
    *,
    lengths: Sequence[int] | None = None,
    kernels: Sequence[str] | None = None,
    out: str | Path | None = None,
    show: Callable[[str], object] = print,
) -> list[GpuLine] | None:
    """The Triton engine against flash attention and AdaSplash: causal, 16 heads of 64 and 128, bfloat16.

    Under ``TRITON_INTERPRET=1`` a toy of the same, whose times mean nothing. No table is begun after
    ``GPU_SECONDS``; those left out are named.

    Args:
        lengths: default 1024 to 65536.
        kernels: names; default epanechnikov, biweight, triweight and relumax.
        out: a folder for ``attention.md`` and ``attention.jsonl``; None saves nothing.
        show: receives the text.

    Returns:
        The lines, or None without a GPU to time.

    Raises:
        AssertionError: a kernel disagrees with float64.
    """
    toy = os.environ.get("TRITON_INTERPRET") == "1"
    if not toy and not torch.cuda.is_available():
        return None
    device, heads, sizes, repeats = ("cpu", 1, (16,), 1) if toy else ("cuda", 16, (64, 128), 5)
    start = time.perf_counter()
    lines: list[GpuLine] = []
    left_out = []
    for n, size, inputs in itertools.product(lengths or ((48,) if toy else GPU_LENGTHS), sizes, GPU_INPUTS):
        if time.perf_counter() - start > GPU_SECONDS and not toy:
            left_out.append(f"{n}×{size}, {inputs}")
            continue
        fresh = measure_gpu(inputs, n, size, heads, kernels or GPU_KERNELS, device, repeats, show)
        lines += fresh
        show(gpu_table(fresh))
    what = "interpreted on a CPU: a toy" if toy else torch.cuda.get_device_name()
    text = f"{gpu_table(lines)}\n\n{what}, torch {torch.__version__}\n"
    if left_out:
        text += f"\nOut of time: {'; '.join(left_out)}\n"
        show(f"out of time: {'; '.join(left_out)}")
    if out is not None:
        save(out, "attention", text, lines)
    return lines
