"""``parzen bench attention``: the CPU engine against torch's dense SDPA, behind a gate.

Nothing is timed before it was compared with float64.

Every figure is a ratio of medians in one process, the contenders taking turns; absolute times are shown
for the dense peer only. A table whose gate fails is not printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import parzen
from parzen.backends import cpu
from parzen.call import Call
from parzen.kernels import lower
from parzen.lab.bench.timing import facts, peak_memory, prepare, save, take_turns
from parzen.testing import witness

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


def _clock(f: Callable[..., Tensor], qkv: Sequence[Tensor], seed: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    o = f(*qkv)
    middle = time.perf_counter()
    torch.autograd.grad(o, qkv, seed)
    return middle - start, time.perf_counter() - middle


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
