"""The CPU engine against the float64 witness, and what it promises beyond the values."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import parzen
from parzen.backends import BACKENDS, cpu, engine, native, reference
from parzen.call import Call
from parzen.kernels import lower
from parzen.testing import check_kernel, witness

if cpu.info()["built"] is False:
    pytest.skip("the CPU engine was not built", allow_module_level=True)

ISAS = cpu.info()["isas"]
KERNELS = [
    "gaussian",
    "epanechnikov",
    "biweight",
    "triweight",
    "entmax?alpha=1.3",
    "entmax?alpha=1.001",
    "normrelu",
    "normrelu?radius=2",
    "relumax",
    "power?r=2&margin=1.5",
    "power?r=3&radius=1.6",
    "power?r=1.5&margin=2",
    "power?r=0&margin=1",
    "knn_uniform?k=3",
    "knn_gaussian?k=4",
    "uniform?radius=1.4",
    "gaussian_truncated?radius=1.4",
    "exp?margin=2",
]
SMOOTH = [
    "gaussian",
    "epanechnikov",
    "biweight",
    "triweight",
    "entmax?alpha=1.3",
    "entmax?alpha=1.001",
    "normrelu?radius=2",
    "relumax",
    "power?r=2&margin=1.5",
    "knn_gaussian?k=4",
]


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BACKENDS, "cpu", cpu)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch: pytest.MonkeyPatch) -> str:
    engine = native.choose(request.param)
    monkeypatch.setattr(native, "engine", lambda: engine)
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attention(*tensors: Tensor, kernel="epanechnikov", **options) -> Tensor:
    return parzen.attention(*tensors, kernel=kernel, backend="cpu", **options)


def inputs(*sizes: int, dtype=torch.float32, seed: int = 0, grad: bool = True) -> list[Tensor]:
    """q, k, v for sizes B, H, Hk, T, S, E, Ev."""
    b, h, hk, t, s, e, ev = sizes
    g = torch.Generator().manual_seed(seed)
    shapes = (b, h, t, e), (b, hk, s, e), (b, hk, s, ev)
    return [torch.randn(*n, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for n in shapes]


def run(f, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of Σ f·(fixed random numbers)."""
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    o = f(*tensors)
    g = torch.Generator().manual_seed(7)
    seed = torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype)
    return o.detach(), *torch.autograd.grad(o, tensors, seed)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_calls_agree_with_the_witness(kernel: str, dtype: torch.dtype):
    # At the boundary of a fractional power, and where scale and radius cancel, float32 shows its rounding.
    loose = {torch.float32: 3e-5} if "?r=" in kernel else {}
    assert check_kernel(kernel, "cpu", dtype, tolerance=loose.get(dtype)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instruction_set_on_small_calls(isa: str, kernel: str, dtype: torch.dtype):
    loose = {torch.float32: 3e-5} if "?r=" in kernel else {}
    assert check_kernel(kernel, "cpu", dtype, tolerance=loose.get(dtype)) > 20


# From a handful of keys a query to all of them, so that lists, dense tiles and mixtures occur; several
# tiles of queries and blocks of keys, none of them whole.
LONG = {
    "sparse": {"scale": 1.0},
    "causal": {"scale": 0.5, "is_causal": True},
    "dense": {"scale": 0.01},
    "window": {"scale": 0.3, "window": (90, 20)},
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("kernel", SMOOTH)
def test_long_calls_agree_with_the_witness(isa: str, kernel: str, case: str):
    qkv = inputs(1, 2, 1, 131, 419, 24, 40, dtype=torch.float64)
    options = {"enable_gqa": True, **LONG[case]}
    expected = run(lambda *x: witness(*x, kernel=kernel, **without_gqa(options)), *qkv)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
        got = run(lambda *x: attention(*x, kernel=kernel, **options), *(x.to(dtype) for x in qkv))
        for a, b in zip(got, expected, strict=True):
            assert_close(a.double(), b, atol=tolerance * max(1, float(b.abs().max())), rtol=0)


def without_gqa(options: dict) -> dict:
    return {k: v for k, v in options.items() if k != "enable_gqa"}


@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "relumax"])
def test_lists_beyond_the_budget_are_recomputed(kernel: str, monkeypatch: pytest.MonkeyPatch):
    qkv = inputs(2, 2, 2, 100, 200, 16, 16, dtype=torch.float64)
    expected = run(lambda *x: attention(*x, kernel=kernel, scale=1.0), *qkv)
    monkeypatch.setattr(cpu, "PER_ROW", 1)
    for a, b in zip(run(lambda *x: attention(*x, kernel=kernel, scale=1.0), *qkv), expected, strict=True):
        assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_screened_lists_beyond_the_budget(isa: str, monkeypatch: pytest.MonkeyPatch):
    # The best key of a margin is found again by its very bits.
    qkv = inputs(1, 1, 1, 60, 1700, 40, 8)
    expected = run(lambda *x: attention(*x, kernel="relumax", scale=0.3), *qkv)
    monkeypatch.setattr(cpu, "PER_ROW", 1)
    for a, b in zip(run(lambda *x: attention(*x, kernel="relumax", scale=0.3), *qkv), expected, strict=True):
        assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_float32_is_as_exact_as_dense_float32(isa: str):
    qkv = inputs(1, 2, 2, 150, 1500, 64, 64, dtype=torch.float64)
    single = [x.float() for x in qkv]
    for kernel in ("epanechnikov", "biweight", "triweight", "relumax"):
        exact = run(lambda *x: witness(*x, kernel=kernel), *(x.double() for x in single))  # noqa: B023
        mine = run(lambda *x: attention(*x, kernel=kernel), *single)  # noqa: B023
        dense = run(lambda *x: parzen.attention(*x, kernel=kernel, backend="reference"), *single)  # noqa: B023
        for a, b, c in zip(mine, dense, exact, strict=True):
            error, peer = (float((x.double() - c).abs().max()) for x in (a, b))
            assert error <= 3 * peer + 1e-6


@pytest.mark.parametrize("kind", ["normal", "outliers", "ties", "not finite", "dense", "zero"])
@pytest.mark.parametrize(
    ("kernel", "keys"),
    [
        ("epanechnikov", 1700),
        ("relumax", 1700),
        ("biweight", 1700),
        ("knn_gaussian", 1700),
        ("exp?margin=2", 1700),
        ("gaussian_truncated", 1700),
        ("triweight", 6300),
        ("entmax?alpha=1.4", 6300),
    ],
)
def test_long_rows_are_screened_exactly(isa: str, kernel: str, keys: int, kind: str):
    """Processors with 8-bit products leave keys out by a bound: none of them may have weight."""
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 50, keys, 40, 8, seed=1))
    if kind == "ties" or kernel == "knn_gaussian":
        q, k = q.round(), k.round()
    if kind == "outliers":
        k[..., 3] *= 32
        q[..., :20] /= 1024
    elif kind == "not finite":
        q[0, 0, 3, 0] = torch.nan
        k[0, 0, keys - 30, 0] = torch.nan
    elif kind == "zero":
        q[0, 0, :10] = 0
        k[0, 0, :200] = 0
    options = {"kernel": kernel, "scale": 1 / 64 if kind == "dense" else 0.25, "window": (-1, 0)}
    got = run(lambda *x: attention(*x, **options), q, k, v)
    if kind == "not finite":
        bad = torch.arange(50) >= 20
        bad[3] = True
        assert got[0][0, 0, bad].isnan().all()
        assert got[0][0, 0, ~bad].isfinite().all()
        return
    for a, b in zip(
        got, run(lambda *x: witness(*x, **options), *(x.double() for x in (q, k, v))), strict=True
    ):
        assert_close(a.double(), b, atol=1e-4 * max(1, float(b.abs().max())), rtol=0)


@pytest.mark.parametrize("kernel", ["epanechnikov", "biweight", "triweight", "entmax?alpha=1.4"])
def test_gradients_of_flat_rows(isa: str, kernel: str):
    # Each of 20,000 weights is 5e-5, far fewer digits than its threshold has.
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 3, 20_000, 16, 2))
    k[:] = k[:, :, :1]
    dk = run(lambda *x: attention(*x, kernel=kernel), q, k, v)[2]
    exact = run(lambda *x: witness(*x, kernel=kernel), *(x.double() for x in (q, k, v)))[2]
    assert_close(dk.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("kernel", SMOOTH)
def test_large_scores(kernel: str, size: float):
    # Integers times a power of two: the shift is exact, so that the result may not change at all.
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (1, 1, 70, 4), generator=g).float() for _ in range(3))
    bias = torch.full((1, 1, 1, 70), size)
    options = {"kernel": kernel, "scale": 0.25}
    if "radius" in kernel:
        pytest.skip("a radius is not invariant under a shift")
    assert_close(attention(q, k, v, bias, **options), attention(q, k, v, **options), atol=1e-5, rtol=0)


# A score and the next one below it.
HIGH, NEXT = 1e4, 1e4 - 2**-10
EDGES = [
    # A margin smaller than what a score can tell apart, on either side of it.
    ([HIGH, 9900.0], "relumax?margin=1e-4", [1, 0]),
    ([1e8, 9.9e7], "relumax", [1, 0]),
    ([-1e8, -1.01e8], "power?r=3&margin=1", [1, 0]),
    ([HIGH, NEXT], "relumax?margin=1.4e-3", [1 / (2 - 2**-10 / 1.4e-3), 1 - 1 / (2 - 2**-10 / 1.4e-3)]),
    ([HIGH, NEXT], "power?r=0&margin=6e-4", [1, 0]),
    ([HIGH, NEXT], "exp?margin=6e-4", [1, 0]),
    ([HIGH, NEXT], "power?r=0&margin=0.0009765625", [1 / 2, 1 / 2]),
    ([0.0, -(2.0**-127)], f"relumax?margin={2.0**-126}", [2 / 3, 1 / 3]),
    ([1e38, -1e38], "relumax?margin=3e38", [3 / 4, 1 / 4]),
    # A key exactly at the boundary, where the reciprocal of the margin is rounded down or up.
    *(([0.0, -n], f"relumax?margin={n}", [1, 0]) for n in (3, 5, 7, 41, 47, 55, 61, 97)),
    (
        [7.0, 0.0, -47.0],
        "power?r=1.5&margin=54",
        [1 / (1 + (47 / 54) ** 1.5), 1 - 1 / (1 + (47 / 54) ** 1.5), 0],
    ),
    # 1.5² makes the threshold −1/8: close to 1, far from 3e7.
    (
        [3e7, 1.0],
        "power?r=0.5&radius=1.5",
        [1 / (1 + (1.125 / 3e7) ** 0.5), 1 - 1 / (1 + (1.125 / 3e7) ** 0.5)],
    ),
    ([1e7], "power?r=1.5&radius=1.5", [1]),
    ([1e30, 5e29, -1e30], "power?r=2&radius=1.5", [4 / 5, 1 / 5, 0]),
    # As r grows, softmax under unit mass and the best alone within a margin.
    ([1.0, 0.0], "power?r=1e18", [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]),
    ([1e30, -1e30], "power?r=1e18", [1, 0]),
    ([1.0, 1.0, 0.0], "power?r=1e18&margin=2", [1 / 2, 1 / 2, 0]),
    ([torch.inf, 0.0], "power?r=0&margin=1", [torch.nan, torch.nan]),
    ([torch.inf, 0.0], "power?r=0&k=2", [torch.nan, torch.nan]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("scores", "kernel", "weights"), EDGES)
def test_a_threshold_falls_where_it_should(isa: str, scores, kernel: str, weights, dtype: torch.dtype):
    """Within rounding of a score, at extreme sizes and exponents; what has no weight has no gradient."""
    s = torch.tensor(scores, dtype=dtype)
    n = len(s)
    eye, q, expected = torch.eye(n, dtype=dtype), torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor(weights)
    w, _, ds, _ = run(
        lambda *x: attention(*x, kernel=kernel, scale=1.0), q, s.view(1, 1, n, 1), eye[None, None]
    )
    assert_close(w.flatten().double(), expected.double(), atol=1e-6, rtol=0, equal_nan=True)
    assert not ds.flatten()[expected == 0].any()


@pytest.mark.parametrize("limit", [2**40, 2**63 - 1])
def test_a_window_may_have_no_end(isa: str, limit: int):
    q, k, v = inputs(1, 1, 1, 60, 70, 8, 8, grad=False)
    chosen = parzen.kernel("epanechnikov")

    def windowed(diagonal, left, right):
        options = {"diagonal": diagonal, "left": left, "right": right}
        return cpu.run(Call(q, k, v, 1.0, lower(chosen, 1.0), chosen, **options))

    for diagonal in (-5, 0, 10):
        for left, right in ((limit, limit), (limit, 3), (3, limit)):
            expected = windowed(diagonal, *(-1 if n == limit else n for n in (left, right)))
            assert torch.equal(windowed(diagonal, left, right), expected)


@pytest.mark.parametrize("kernel", ["epanechnikov", "biweight", "relumax", "knn_uniform?k=8", "exp?margin=2"])
def test_screening_with_the_worst_rounding(isa: str, kernel: str):
    """Of eight best keys three lose in every coordinate what 8 bits can lose, and five gain it."""
    k = torch.zeros(1, 1, 1700, 40)
    k[..., 0] = 127
    gain = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1])
    k[:, :, 0:800:100, 1:] = (10.49 + 0.02 * gain)[:, None]
    q, v = torch.ones(1, 1, 8, 40), inputs(1, 1, 1, 1, 1700, 4, 8, grad=False)[2]
    options = {"kernel": kernel, "scale": 0.05}
    expected = witness(*(x.double() for x in (q, k, v)), **options)
    assert_close(attention(q, k, v, **options).double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [2.0**n for n in (-100, -70, -42, 42, 100)])
@pytest.mark.parametrize(
    ("kernel", "keys"), [("relumax?margin={}", 1700), ("power?r=0&k=9", 1700), ("power?r=0&margin={}", 1700)]
)
def test_screening_knows_no_size(isa: str, kernel: str, keys: int, size: float):
    q, k, v = inputs(1, 1, 1, 20, keys, 40, 8, grad=False)

    def f(size, *x):
        return attention(*x, kernel=kernel.format(4 * size), scale=1.0)

    expected = f(1, q, k, v)
    for x, y in ((size * q, k), (q, size * k)):
        assert_close(f(size, x, y, v), expected, rtol=0, atol=1e-5)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", SMOOTH)
def test_a_row_with_nothing_changes_no_other_row(kernel: str):
    qkv = inputs(1, 2, 2, 60, 130, 16, 16)
    mask = torch.ones(60, 130, dtype=torch.bool)
    everything = run(lambda *x: attention(*x, mask, kernel=kernel), *qkv)
    mask[17] = False
    o, dq, _, _ = run(lambda *x: attention(*x, mask, kernel=kernel), *qkv)
    assert not o[:, :, 17].any()
    assert not dq[:, :, 17].any()
    others = torch.arange(60) != 17
    assert torch.equal(o[:, :, others], everything[0][:, :, others])


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("kernel", SMOOTH)
def test_nan_stays_in_its_rows(kernel: str, scale: float):
    q, k, v = inputs(1, 1, 1, 100, 100, 16, 16)
    clean = run(lambda *x: attention(*x, is_causal=True, kernel=kernel, scale=scale), q, k, v)[0]
    q, k, v = (x.detach().clone() for x in (q, k, v))
    q[0, 0, 5] = torch.nan
    k[0, 0, 80] = torch.nan
    o, dq, _, _ = run(lambda *x: attention(*x, is_causal=True, kernel=kernel, scale=scale), q, k, v)
    bad = (torch.arange(100) >= 80) | (torch.arange(100) == 5)
    assert o[0, 0, bad].isnan().all()
    assert dq[0, 0, bad].isnan().all()
    assert torch.equal(o[0, 0, ~bad], clean[0, 0, ~bad])
    assert dq[0, 0, ~bad].isfinite().all()


def test_a_query_of_nan_leaves_screened_rows_alone(isa: str):
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 60, 1700, 40, 16))
    clean = run(lambda *x: attention(*x, kernel="relumax", scale=0.3), q, k, v)
    q[0, 0, 5], q[0, 0, 7] = torch.nan, torch.inf
    spoilt = run(lambda *x: attention(*x, kernel="relumax", scale=0.3), q, k, v)
    others = (torch.arange(60) != 5) & (torch.arange(60) != 7)
    for a, b in zip(spoilt[:2], clean[:2], strict=True):
        assert a[0, 0, ~others].isnan().all()
        assert torch.equal(a[0, 0, others], b[0, 0, others])


def test_unseen_garbage_is_not_seen():
    for scale in (1.0, 0.01):
        qkv = inputs(1, 1, 1, 90, 90, 16, 16)
        q, k, v = (x.detach().clone() for x in qkv)
        k[:, :, 70:] = torch.nan
        v[:, :, 70:] = torch.inf
        q[:, :, 80:] = torch.nan
        mask = torch.ones(90, 90, dtype=torch.bool)
        mask[:, 70:] = False
        mask[80:] = False
        for kernel in ("epanechnikov", "relumax", "normrelu?radius=2"):
            got = run(lambda *x: attention(*x, mask, kernel=kernel, scale=scale), q, k, v)  # noqa: B023
            assert all(x.isfinite().all() for x in got)


def test_additive_masks_of_any_kind():
    qkv = inputs(2, 2, 2, 40, 50, 8, 8)
    mask = torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = run(lambda *x: attention(*x, mask), *qkv)
    for dtype in (torch.float32, torch.bfloat16):
        for low in (-torch.inf, torch.finfo(dtype).min):
            bias = torch.where(mask, 0.0, low).to(dtype)
            for a, b in zip(run(lambda *x: attention(*x, bias), *qkv), expected, strict=True):  # noqa: B023
                assert torch.equal(a, b)


# ---- layout --------------------------------------------------------------------------------------


def test_strides_do_not_matter():
    q, k, v = inputs(2, 3, 3, 33, 47, 16, 16)
    mask = torch.rand(2, 3, 47, 33, generator=torch.Generator().manual_seed(0)) < 0.7
    expected = attention(q, k, v, mask.mT.contiguous())
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention(*strided, mask.mT), expected)
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(attention(*columns, mask.mT), expected)


@pytest.mark.parametrize("shape", [(1, 1, 4), (7, 0, 4), (0, 7, 4), (5, 5, 0), (1, 1000, 3)])
def test_lengths_from_zero(shape: tuple[int, int, int]):
    t, s, e = shape
    q, k, v = inputs(2, 2, 2, t, s, e, 5)
    o, *grads = run(lambda *x: attention(*x), q, k, v)
    assert o.shape == (2, 2, t, 5)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    if s == 0:
        assert not o.any()


def test_broadcast_masks_stay_small():
    q, k, v = inputs(1, 1, 1, 2, 3, 4, 4, grad=False)
    mask = torch.tensor([[True, False, True]]).expand(2, 3)
    assert_close(attention(q, k, v, mask), witness(q, k, v, mask, kernel="epanechnikov").float())


# ---- determinism, threads, processes -------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.6, 0.02])
@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "relumax", "knn_gaussian", "gaussian"])
def test_bits_do_not_depend_on_threads(isa: str, kernel: str, scale: float, threads):
    # One key head: one thread takes it whole, two and three share its tiles and its keys.
    qkv = inputs(1, 2, 1, 500, 700, 16, 16)
    results = []
    for n in (1, 2, 3, 2):
        threads(n)
        results.append(
            run(lambda *x: attention(*x, kernel=kernel, scale=scale, enable_gqa=True, is_causal=True), *qkv)
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["epanechnikov", "relumax"])
def test_bits_of_screened_rows_do_not_depend_on_threads(isa: str, kernel: str, threads):
    qkv = inputs(1, 1, 1, 200, 1700, 40, 8)
    results = []
    for n in (1, 2):
        threads(n)
        results.append(run(lambda *x: attention(*x, kernel=kernel, scale=0.3), *qkv))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "relumax", "knn_gaussian"])
def test_a_few_queries_see_what_many_do(isa: str, kernel: str):
    """Up to four queries take the keys as they lie, without packing them."""
    q, k, v = inputs(2, 4, 2, 9, 300, 24, 8, dtype=torch.float64)
    options = {"kernel": kernel, "enable_gqa": True}
    with torch.no_grad():
        many = attention(q, k, v, **options)
        for n in range(1, 5):
            assert_close(attention(q[:, :, :n], k, v, **options), many[:, :, :n], atol=1e-12, rtol=0)


def test_threads_may_call_at_once():
    qkv = [x.detach() for x in inputs(2, 4, 4, 200, 200, 16, 16)]
    expected = run(lambda *x: attention(*x, kernel="biweight"), *qkv)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(run, lambda *x: attention(*x, kernel="biweight"), *qkv) for _ in range(12)]
        for call in calls:
            for a, b in zip(call.result(), expected, strict=True):
                assert torch.equal(a, b)


FORK = """
import os, signal, torch, parzen

torch.set_num_threads(2)
q, k, v = (torch.randn(2, 4, 400, 24).requires_grad_() for _ in range(3))
mask, scores = torch.zeros(400, 400), torch.randn(400, 1000)
memory = parzen.KeyValueMemory("biweight", 4, 24)

def work():
    o = parzen.attention(q, k, v, mask, kernel="biweight")
    w = parzen.weights(scores, "entmax?alpha=1.3")
    store = memory.copy()
    for _ in range(3):
        store.append(k.detach(), v.detach())
    return o, *torch.autograd.grad(o.sum(), (q, k, v)), w, store.attend(q.detach()[:, :, :2])

expected = work()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that waits for a thread
    os._exit(0 if all(map(torch.equal, work(), expected)) else 1)
status = os.waitpid(child, 0)[1]
assert status == 0, status
assert torch.get_num_threads() == 2
"""


def test_a_forked_child_works_on_one_thread():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_instruction_set_is_one_clear_error():
    code = "from parzen.backends import cpu; cpu.info()"
    environment = {**os.environ, "PARZEN_CPU_ISA": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: PARZEN_CPU_ISA='sse9'")
    assert all(name in last for name in ISAS)


@pytest.mark.parametrize("table", native.STRUCTS, ids=lambda table: table.name)
def test_a_library_with_other_fields_is_refused_by_the_name_of_one(table, monkeypatch: pytest.MonkeyPatch):
    """Renamed, moved, missing or unknown: the error names the field, and the build at hand passes."""
    fields = list(table.fields.items())
    (first, kind), (second, other), *rest = fields
    renamed = [("elsewhere", kind), (second, other), *rest]
    swapped = [(second, other), (first, kind), *rest]
    wider = [(first, "view"), (second, other), *rest]
    wrong = {
        first: (renamed, swapped, wider),
        fields[-1][0]: (fields[:-1],),
        "more": ([*fields, ("more", "int")],),
    }
    assert native.choose(None) is not None
    for name, tables in wrong.items():
        for rows in tables:
            changed = native.Struct(table.name, *((kind, field) for field, kind in rows))
            reported = "elsewhere" if rows is renamed else second if rows is swapped else name
            monkeypatch.setattr(native, "STRUCTS", (changed,))
            with pytest.raises(
                ImportError, match=rf"\({table.name}\.{reported} .*\): build it again$"
            ) as error:
                native.choose(None)
            assert "\n" not in str(error.value)


def test_a_library_whose_fields_mean_something_else_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "CONTRACT", native.CONTRACT + 1)
    with pytest.raises(ImportError, match=r"\(contract \d+, here \d+\): build it again$"):
        native.choose(None)


def test_a_field_that_a_struct_has_not_is_an_error():
    with pytest.raises(TypeError, match=r"Chunk\(\) got an unexpected keyword argument 'kyes'"):
        native.CHUNK.pack(kyes=1)


# ---- gradients and transforms --------------------------------------------------------------------


def parameters(kernel: str) -> tuple:
    """A call with every differentiable argument, and its tensors in float64."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (x.detach() for x in inputs(2, 2, 1, 5, 7, 3, 2, dtype=torch.float64))
    bias = torch.randn(1, 2, 5, 7, generator=g, dtype=torch.float64)
    slopes = torch.rand(2, generator=g, dtype=torch.float64)
    scale = torch.rand(2, 1, generator=g, dtype=torch.float64) + 0.5
    extra = torch.rand(2, generator=g, dtype=torch.float64)

    def call(q, k, v, bias, slopes, scale, extra):
        chosen = kernel
        if kernel == "entmax":
            chosen = parzen.kernel("entmax", alpha=1.3 + 0.4 * extra)
        if kernel == "relumax":
            chosen = parzen.kernel("relumax", margin=0.5 + extra)
        return attention(
            q, k, v, bias, kernel=chosen, scale=scale, alibi_slopes=slopes, enable_gqa=True, window=(5, 3)
        )

    return call, [x.requires_grad_() for x in (q, k, v, bias, slopes, scale, extra)]


DIFFERENTIABLE = ["gaussian", "epanechnikov", "biweight", "entmax", "normrelu?radius=2", "relumax", "exp?k=4"]


@pytest.mark.parametrize("kernel", DIFFERENTIABLE)
def test_first_derivatives(kernel: str):
    call, tensors = parameters(kernel)
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("kernel", DIFFERENTIABLE)
def test_second_derivatives(kernel: str):
    call, tensors = parameters(kernel)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_gradients_near_softmax():
    """dα at α − 1 = 1e-4, where float64 differences of the formula lose their digits."""
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 4, 6, 3, 2, dtype=torch.float64))
    for alpha in (1.0001, 1.01, 1.5, 1.9):
        a = torch.tensor([alpha], dtype=torch.float64, requires_grad=True)
        f = lambda a: attention(q, k, v, kernel=parzen.kernel("entmax", alpha=a))  # noqa: E731
        (got,) = torch.autograd.grad(f(a).sum(), a)
        step = 1e-6
        expected = (f(a.detach() + step).sum() - f(a.detach() - step).sum()) / (2 * step)
        assert_close(got[0], expected, atol=1e-6, rtol=1e-5)


def test_ties_share_the_gradient_of_the_best():
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64).reshape(1, 1, 3, 1).requires_grad_()
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).reshape(1, 1, 3, 1)
    o = attention(q, k, v, scale=1.0, kernel="relumax")
    # w = (1, 1, ½)/2.5, a = 1/2.5, μ = o = 2.
    assert_close(o.item(), 2.0)
    (dk,) = torch.autograd.grad(o, k)
    ds = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64) / 2.5
    ds[:2] -= ds.sum() / 2
    assert_close(dk.flatten(), ds)


@pytest.mark.parametrize("kernel", ["epanechnikov", "relumax"])
def test_functional_transforms(kernel: str):
    call, tensors = parameters(kernel)
    tensors = [x.detach() for x in tensors]
    q = tensors[0]

    def loss(q, *rest):
        return call(q, *rest).square().sum()

    # Only relumax uses the last one, its margin.
    count = 7 if kernel == "relumax" else 6
    grads = torch.func.grad(loss, argnums=tuple(range(count)))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves[:count])
    for a, b in zip(grads, expected, strict=True):
        assert_close(a, b)

    many = torch.stack([q, 2 * q, -q])
    batched = torch.func.vmap(lambda x: call(x, *tensors[1:]))(many)
    assert_close(batched, torch.stack([call(x, *tensors[1:]) for x in many]))
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 3, 4)), (0,) + (None,) * 6)(
        many, *tensors[1:]
    )
    single = [torch.func.grad(loss, argnums=(0, 1, 3, 4))(x, *tensors[1:]) for x in many]
    for n, got in enumerate(per_sample):
        assert_close(got, torch.stack([s[n] for s in single]))

    jacobian = torch.func.jacrev(lambda x: call(x, *tensors[1:]))(q)
    assert_close(jacobian, torch.autograd.functional.jacobian(lambda x: call(x, *tensors[1:]), q))


def test_compiles_once_for_all_lengths():
    torch._dynamo.reset()

    def f(q, k, v):
        return attention(q, k, v, is_causal=True, kernel="biweight")

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (33, 70, 150, 600):
            qkv = inputs(2, 2, 2, n, n + 5, 16, 16, seed=n)
            for a, b in zip(run(compiled, *qkv), run(f, *qkv), strict=True):
                assert_close(a, b)


def test_library_ops_are_sound():
    tensors = (*inputs(1, 2, 2, 10, 12, 16, 16, grad=False), *[None] * 9)
    numbers = (1, 1, 0, 2, -1, -1, 0.5, 0.0, 2.0, 0.0, 0, 0, False)
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.parzen.cpu_forward.default
    torch.library.opcheck(op, (*tensors, *numbers, False), test_utils=checks)


# ---- packed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "relumax", "normrelu?radius=2"])
def test_packed_sequences_equal_single_ones(kernel: str, lower_right: bool, threads):
    lengths = [(3, 5), (60, 90), (0, 4), (1, 1), (70, 0), (130, 40)]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True))
    g = torch.Generator().manual_seed(0)
    q, k, v, scale = (
        torch.randn(n, h, e, generator=g, dtype=torch.float64)
        for n, h, e in ((int(cu_q[-1]), 4, 8), (int(cu_k[-1]), 2, 8), (int(cu_k[-1]), 2, 6), (4, 1, 1))
    )
    scale = scale[..., 0].exp()
    chosen = parzen.kernel(kernel)

    def call(q, k, v, scale, diagonal=0):
        return Call(q, k, v, scale, lower(chosen, scale), chosen, diagonal=diagonal, left=50, right=2)

    def packed(q, k, v, scale):
        four = (x.transpose(0, 1)[None] for x in (q, k, v))
        return cpu.run_varlen(call(*four, scale), cu_q, cu_k, 200, 95, lower_right)

    def single(q, k, v, scale):
        parts = []
        for n, (t, s) in enumerate(lengths):
            x, y, z = (
                a[cu[n] : cu[n + 1]].transpose(0, 1)[None] for a, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
            )
            parts.append(reference.run(call(x, y, z, scale, s - t if lower_right else 0)))
        return torch.cat(parts, 2)

    for n in (1, 2):
        threads(n)
        for a, b in zip(run(packed, q, k, v, scale), run(single, q, k, v, scale), strict=True):
            assert_close(a, b, atol=1e-10, rtol=1e-9)


def test_packed_sequences_differentiate_twice():
    cu = torch.tensor([0, 3, 7])
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 1, 7, 2, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    chosen = parzen.kernel("biweight")

    def f(q, k, v):
        return cpu.run_varlen(Call(q, k, v, 0.5, lower(chosen, 0.5), chosen, right=0), cu, cu, 4, 4)

    assert torch.autograd.gradcheck(f, qkv, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, qkv, fast_mode=True)


def test_packed_offsets_are_checked():
    q, k, v = inputs(1, 1, 1, 6, 6, 2, 2, grad=False)
    call = Call(q, k, v, 1.0, lower(parzen.kernel("biweight"), 1.0), parzen.kernel("biweight"))
    good = torch.tensor([0, 2, 6])
    for cu, most in ((torch.tensor([0, 2, 5]), 6), (torch.tensor([0, 7, 6]), 6), (good, 3)):
        with pytest.raises(ValueError, match="cu_seq_q must ascend"):
            cpu.run_varlen(call, cu, good, most, 6)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("kernel", ["epanechnikov", "triweight", "relumax", "gaussian"])
def test_dropout_backward_repeats_the_mask(kernel: str, scale: float):
    # One dense and one sparse scale. The output is linear in v and smooth in q under a fixed seed.
    qkv = inputs(1, 2, 2, 60, 80, 4, 3, dtype=torch.float64)

    def f(*x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*x, kernel=kernel, scale=scale, dropout_p=0.4)

    assert torch.equal(f(*qkv), f(*qkv))
    _, *grads = run(f, *qkv)
    g = torch.Generator().manual_seed(7)
    seed = torch.randn(1, 2, 60, 3, generator=g, dtype=torch.float64)
    for n in range(3):
        direction = torch.randn(qkv[n].shape, generator=g, dtype=torch.float64)
        moved = [
            [x + (sign * 1e-6 * direction if i == n else 0) for i, x in enumerate(qkv)] for sign in (1, -1)
        ]
        slope = sum(s * (f(*x) * seed).sum() for s, x in zip((1, -1), moved, strict=True)) / 2e-6
        assert_close((grads[n] * direction).sum(), slope.detach(), rtol=1e-5, atol=1e-6)


def test_dropout_keeps_the_expectation():
    q, k, v = inputs(1, 1, 1, 4, 50, 8, 8, grad=False)
    expected = attention(q, k, v, kernel="triweight")
    torch.manual_seed(0)
    draws = torch.stack([attention(q, k, v, kernel="triweight", dropout_p=0.3) for _ in range(3000)])
    spread = draws.std(0) / 3000**0.5
    assert ((draws.mean(0) - expected).abs() < 5 * spread + 1e-6).all()
    ones = attention(q, k, torch.ones_like(v), kernel="gaussian", scale=1e-6, dropout_p=0.3)
    assert_close(ones * 50 * 0.7, (ones * 50 * 0.7).round(), atol=1e-3, rtol=0)
    assert not attention(q, k, v, dropout_p=1.0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["knn_uniform?k=3", "knn_gaussian?k=3", "relumax"])
@pytest.mark.parametrize("size", [40, 96])
def test_different_keys_with_equal_products_tie_at_any_scale(kernel, dtype, size):
    """The scale comes after the product: all keys that tie stay, and share the gradient."""
    g = torch.Generator().manual_seed(size)
    q, k = (torch.randint(0, 2, (1, 1, n, size), generator=g).to(dtype) * 2 - 1 for n in (9, 300))
    v = torch.randn(1, 1, 300, 3, generator=g).to(dtype)
    for scale in (None, 0.3, torch.tensor([[0.1]], dtype=dtype)):
        found = []
        for backend in ("cpu", "reference"):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = parzen.attention(*inputs, kernel=kernel, scale=scale, backend=backend)
            out.sum().backward()
            # Uniform weights pass no gradient to queries and keys.
            found.append([out, *(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)])
        for got, expected in zip(*found, strict=True):
            assert_close(got, expected)


def test_the_scale_is_not_lost_in_a_product_that_it_brings_back():
    k = torch.tensor([[1e-38], [2e-38]])
    out = parzen.attention(
        torch.tensor([[1e30]]), k, torch.eye(2), scale=1e9, kernel="biweight", backend="cpu"
    )
    assert_close(out, torch.tensor([[0.0, 1.0]]))


def test_negated_views_and_subclasses_go_through_torch() -> None:
    """The engine reads memory: a pending minus sign, or a subclass, is for torch's dispatcher."""
    torch.manual_seed(0)
    k = torch.randn(2, 2, 5, 16, dtype=torch.complex64).conj().imag
    q, v = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 5, 16)
    assert k.is_neg()
    assert engine.plain((q, v, None))
    assert not engine.plain((q, k))
    expected = parzen.attention(q, k.resolve_neg(), v, kernel="biweight", backend="cpu")
    assert_close(parzen.attention(q, k, v, kernel="biweight", backend="cpu"), expected, rtol=0, atol=0)

    class Counted(torch.Tensor):
        calls: ClassVar[list[str]] = []

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    parzen.attention(q.as_subclass(Counted), k.resolve_neg(), v, kernel="biweight", backend="cpu")
    assert any("cpu_forward" in call for call in Counted.calls)
    with torch.profiler.profile() as profile:
        parzen.attention(q, k.resolve_neg(), v, kernel="biweight", backend="cpu")
    assert any("cpu_forward" in event.key for event in profile.key_averages())
