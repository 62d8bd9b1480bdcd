"""``parzen bench weights``: weight maps against ``torch.softmax`` and the entmax package, behind a gate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import parzen
from parzen.backends import reference
from parzen.kernels import lower
from parzen.lab.bench.timing import facts, prepare, save, take_turns

SHAPES = ((64, 1000), (512, 512), (4096, 64), (256, 32000))
KERNELS = (
    "gaussian", "triweight", "biweight", "epanechnikov", "entmax?alpha=1.3", "relumax", "knn_gaussian",
)  # fmt: skip
# Of the entmax package, by our names.
THEIRS = {"epanechnikov": "sparsemax", "biweight": "entmax15", "entmax?alpha=1.3": "entmax_bisect"}
# Turns of a small shape and of one beyond so many scores; of the entmax package at each.
TURNS, OTHERS, LARGE = (61, 11), (21, 3), 2**20


@dataclass(frozen=True)
class Line:
    """What one map took on rows × n scores. Seconds, the least of all turns; ratios are to torch.softmax.

    Attributes:
        support: weights above 0 in a row, on average.
        entmax_ratio: of the entmax package's time to this one's, None where it has no such map.
    """

    rows: int
    n: int
    inputs: str
    kernel: str
    support: float
    seconds: float
    ratio: float
    gradient_seconds: float
    gradient_ratio: float
    entmax_ratio: float | None
    entmax_gradient_ratio: float | None


def _normal(rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0))


def _flat(rows: int, n: int) -> Tensor:
    """All have weight, whatever the kernel but the nearest."""
    return _normal(rows, n) / (8 * n)


def _narrow(rows: int, n: int) -> Tensor:
    return 0.1 * _normal(rows, n)


def _trained(rows: int, n: int) -> Tensor:
    """Scores of new examples after 60 steps of a linear classifier; classes follow Zipf's law."""
    g = torch.Generator().manual_seed(0)
    chance = 1 / torch.arange(1.0, n + 1)
    places = torch.randn(n, 64, generator=g)
    weight = torch.zeros(n, 64, requires_grad=True)
    optimiser = torch.optim.Adam([weight], 0.03)

    def examples(count: int) -> tuple[Tensor, Tensor]:
        y = torch.multinomial(chance, count, replacement=True, generator=g)
        return places[y] + torch.randn(count, 64, generator=g), y

    for _ in range(60):
        x, y = examples(256)
        optimiser.zero_grad()
        F.cross_entropy(F.linear(x, weight), y).backward()
        optimiser.step()
    return F.linear(examples(rows)[0], weight).detach()


INPUTS: dict[str, Callable[[int, int], Tensor]] = {
    "N(0,1)": _normal,
    "trained": _trained,
    "0.1·N(0,1)": _narrow,
    "flat": _flat,
}


def _seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _with_gradient(f: Callable[[Tensor], Tensor], scores: Tensor, seed: Tensor) -> None:
    torch.autograd.grad(f(scores), scores, seed)


def _theirs(kernel: str) -> Callable[[Tensor], Tensor] | None:
    if kernel not in THEIRS or find_spec("entmax") is None:
        return None
    f = getattr(import_module("entmax"), THEIRS[kernel])
    return partial(f, alpha=1.3) if kernel.startswith("entmax") else f


def _dense(kernel: str, scores: Tensor) -> Tensor:
    return reference.weight_map(scores, lower(parzen.kernel(kernel), 1.0))[0]


def gate(scores: Tensor, kernel: str, seed: Tensor) -> Tensor:
    """The weights, after they and their gradient agreed with the reference in float64.

    Raises:
        AssertionError: they do not.
    """
    results = []
    for x, f in (
        (scores, partial(parzen.weights, kernel=kernel)),
        (scores.double(), partial(_dense, kernel)),
    ):
        x = x.clone().requires_grad_()
        w = f(x)
        (slope,) = torch.autograd.grad(w, x, seed.to(x.dtype))
        results.append((w.detach(), slope))
    for what, got, expected in zip(("weights", "gradient"), *results, strict=True):
        error = (got - expected).abs().max()
        if not error < 1e-5:
            raise AssertionError(f"{what} of {kernel} are off by {error:.1e}; nothing is timed")
    return results[0][0]


def measure(scores: Tensor, inputs: str, kernels: Sequence[str]) -> list[Line]:
    """The lines of one matrix of scores."""
    seed = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    learnt = scores.clone().requires_grad_()
    maps: dict[str, Callable[[Tensor], Tensor]] = {"softmax": partial(torch.softmax, dim=-1)}
    supports, slow = {}, {}
    for kernel in kernels:
        supports[kernel] = float((gate(scores, kernel, seed) > 0).sum(-1).double().mean())
        maps[kernel] = partial(parzen.weights, kernel=kernel)
        if theirs := _theirs(kernel):
            slow[kernel] = theirs

    def least(maps: dict[str, Callable[[Tensor], Tensor]], turns: int) -> dict[tuple[str, bool], float]:
        clocks = {(name, False): partial(_seconds, partial(f, scores)) for name, f in maps.items()}
        for name, f in maps.items():
            clocks[name, True] = partial(_seconds, partial(_with_gradient, f, learnt, seed))
        return {key: min(times) for key, times in take_turns(clocks, turns).items()}

    large = scores.numel() > LARGE
    times, others = least(maps, TURNS[large]), least(slow, OTHERS[large])
    lines = []
    for kernel in kernels:
        plain, both = times[kernel, False], times[kernel, True]
        lines.append(
            Line(
                scores.shape[0], scores.shape[1], inputs, kernel, supports[kernel],
                plain, plain / times["softmax", False], both, both / times["softmax", True],
                others[kernel, False] / plain if kernel in slow else None,
                others[kernel, True] / both if kernel in slow else None,
            )
        )  # fmt: skip
    return lines


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""

    def times(x: float | None) -> str:
        return "" if x is None else f"{x:.1f}"

    head = (
        "| rows × n | inputs | kernel | weights a row | forward, µs | / softmax | both, µs | / softmax "
        "| entmax / this, forward | both |\n|---|---|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    rows = [
        f"| {x.rows} × {x.n} | {x.inputs} | {x.kernel} | {x.support:.1f} "
        f"| {1e6 * x.seconds:.0f} | {x.ratio:.2f} | {1e6 * x.gradient_seconds:.0f} | {x.gradient_ratio:.2f} "
        f"| {times(x.entmax_ratio)} | {times(x.entmax_gradient_ratio)} |"
        for x in lines
    ]
    return "\n".join([head, *rows])


def bench_weights(
    *,
    kernels: Sequence[str] | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    show: Callable[[str], object] = print,
) -> list[Line]:
    """``parzen.weights`` in float32 on four shapes: normal scores, those of a trained classifier, flat ones.

    Beside them the entmax package, where it is installed and has the map.

    Args:
        kernels: names; default seven that differ.
        threads: of torch; default as it is set.
        out: a folder for ``weights.md`` and ``weights.jsonl``; None saves nothing.
        show: receives the text.

    Raises:
        AssertionError: a kernel disagrees with float64.
        ValueError: the CPU engine was not built, or more threads than processors.
    """
    prepare(threads)
    lines: list[Line] = []
    for shape in SHAPES:
        for inputs, make in INPUTS.items():
            fresh = measure(make(*shape), inputs, kernels or KERNELS)
            lines += fresh
            show(table(fresh))
    if out is not None:
        save(out, "weights", f"{table(lines)}\n\n{facts()}\n", lines)
    return lines
