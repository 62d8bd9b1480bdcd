"""``parzen bench attention --device cuda``: the Triton engine against flash attention, behind a gate."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import parzen
from parzen.lab.bench.timing import save, take_turns
from parzen.testing import witness

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
