"""``parzen bench call``: what a call with next to nothing to compute costs, and ``import parzen``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import parzen
from parzen.lab.bench.timing import facts, prepare, save, take_turns

QUERY, KEYS = (1, 8, 1, 64), (1, 8, 64, 64)
# A turn, without and with gradients, is so short that many fall between those of other programs.
CALLS, TURNS, IMPORTS = (30, 8), 201, 11
IMPORT = """
import time, torch
start = time.process_time()
import parzen
print(time.process_time() - start)
"""


@dataclass(frozen=True)
class Small:
    """What a call of one kernel took, without a gradient, and with the gradients of its three tensors.

    Seconds, the least of all turns: what else the machine does can only add. Ratios are to SDPA.
    """

    kernel: str
    seconds: float
    gradient_seconds: float
    ratio: float
    gradient_ratio: float
    import_seconds: float


def import_seconds() -> float:
    """Processor time of ``import parzen`` in an interpreter that has imported torch: the least of 11."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(IMPORTS)]
    return min(float(run.stdout) for run in runs)


def _each(calls: int, f: Callable[[], object]) -> float:
    """Seconds of a call of ``f``, among so many."""
    start = time.perf_counter()
    for _ in range(calls):
        f()
    return (time.perf_counter() - start) / calls


def _with_gradient(f: Callable[..., Tensor], inputs: Sequence[Tensor], seed: Tensor) -> None:
    torch.autograd.grad(f(*inputs), inputs, seed)


def measure(kernels: Sequence[str]) -> list[Small]:
    """SDPA, then each kernel, by the backend that ``attention`` chooses.

    Raises:
        AssertionError: a kernel disagrees with the reference in float64.
    """
    g = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=g) for shape in (QUERY, KEYS, KEYS)]
    learnt, seed = [x.clone().requires_grad_() for x in plain], torch.randn(QUERY, generator=g)
    contenders: dict[str, Callable[..., Tensor]] = {"sdpa": F.scaled_dot_product_attention}
    for kernel in kernels:
        contenders[kernel] = partial(parzen.attention, kernel=kernel)
        got = contenders[kernel](*plain).double()
        q, k, v = (x.double() for x in plain)
        expected = parzen.attention(q, k, v, kernel=kernel, backend="reference")
        if not torch.allclose(got, expected, rtol=0, atol=1e-5):
            raise AssertionError(f"{kernel} is off by {(got - expected).abs().max():.1e}; nothing is timed")
    clocks = {(name, False): partial(_each, CALLS[0], partial(f, *plain)) for name, f in contenders.items()}
    for name, f in contenders.items():
        clocks[name, True] = partial(_each, CALLS[1], partial(_with_gradient, f, learnt, seed))
    least = {key: min(times) for key, times in take_turns(clocks, TURNS).items()}
    imported = import_seconds()
    return [
        Small(
            name, least[name, False], least[name, True], least[name, False] / least["sdpa", False],
            least[name, True] / least["sdpa", True], imported,
        )
        for name in contenders
    ]  # fmt: skip


def table(lines: Sequence[Small]) -> str:
    """The lines as a Markdown table, and the import in a sentence."""
    rows = [
        f"| {x.kernel} | {1e6 * x.seconds:.0f} | {x.ratio:.2f} "
        f"| {1e6 * x.gradient_seconds:.0f} | {x.gradient_ratio:.2f} |"
        for x in lines
    ]
    head = "| kernel | forward, µs | / SDPA | with gradients, µs | / SDPA |\n|---|--:|--:|--:|--:|"
    imported = f"`import parzen` adds {lines[0].import_seconds:.3f} s to `import torch`."
    return "\n".join([head, *rows, "", imported])


def bench_call(
    *,
    kernels: Sequence[str] | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    show: Callable[[str], object] = print,
) -> list[Small]:
    """One query for each of 8 heads of 64 to 64 keys: all is the cost of the call itself.

    Args:
        kernels: names; default the whole table.
        threads: of torch; default as it is set.
        out: a folder for ``call.md`` and ``call.jsonl``; None saves nothing.
        show: receives the text.

    Raises:
        AssertionError: a kernel disagrees with the reference in float64.
        ValueError: the CPU engine was not built, or more threads than processors.
    """
    prepare(threads)
    lines = measure(kernels or tuple(parzen.KERNELS))
    show(table(lines))
    if out is not None:
        save(out, "call", f"{table(lines)}\n\n{facts()}\n", lines)
    return lines
