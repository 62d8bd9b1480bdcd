"""The Triton engine under its interpreter, on CPU tensors, against the float64 witness; and compiled."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_list import NAMES
from torch import Tensor
from torch.testing import assert_close

import parzen
from parzen import testing
from parzen.backends import BACKENDS, Call, choose, triton
from parzen.cli import main
from parzen.kernels import lower
from parzen.lab.bench import gpu as bench
from parzen.testing import check_kernel, witness

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    # The interpreter computes in numpy, whose ∞ − ∞ and 0/0 warn; on a GPU they are values like any other.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

SOME = ["entmax?alpha=1.3", "power?r=2&margin=1", "knn_gaussian?k=3"]
# One of each rule and profile with tiles that round.
HALVES = ["gaussian", "biweight", "relumax", "knn_uniform"]
# One case of each kind of option.
FEW = {
    "plain",
    "one query",
    "no keys",
    "causal, more queries",
    "row with nothing",
    "bias with −∞",
    "window, unequal",
    "ALiBi",
    "scale per query",
}
# Tiles of 16, so that small inputs have many, and lists that overflow.
BASE = triton.Config(m=16, n=16, capacity=48, room=32, crowd=4)
FORMS = {
    "as they come": BASE,
    "lists only": replace(BASE, capacity=128, crowd=1000),
    "tiles only": replace(BASE, lists=False, crowd=-1),
    "lists after overflow": replace(BASE, capacity=16, room=16, crowd=1000),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def cut(monkeypatch: pytest.MonkeyPatch, config: triton.Config) -> None:
    monkeypatch.setattr(triton, "config", lambda *_: config)


def attention(*tensors: Tensor, kernel: str | parzen.Kernel = "biweight", **options) -> Tensor:
    return parzen.attention(*tensors, kernel=kernel, backend="triton", **options)


def inputs(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v for sizes B, H, Hk, T, S, E, Ev."""
    b, h, hk, t, s, e, ev = sizes
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*n, generator=g).to(dtype) for n in ((b, h, t, e), (b, hk, s, e), (b, hk, s, ev))]


def run(f, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of Σ f·(fixed random numbers)."""
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    o = f(*tensors)
    g = torch.Generator().manual_seed(7)
    # Exact in every dtype.
    seed = (torch.randint(-8, 9, o.shape, generator=g) / 4).to(o.dtype)
    return o.detach(), *torch.autograd.grad(o, tensors, seed, allow_unused=True, materialize_grads=True)


def agree(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_close(a.double(), b.double(), atol=tolerance * max(1, float(b.abs().max())), rtol=0)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", SOME)
def test_conforms(kernel: str, monkeypatch: pytest.MonkeyPatch):
    few = [case for case in testing.cases() if case.name in FEW]
    assert len(few) == len(FEW)
    monkeypatch.setattr(testing, "cases", lambda: iter(few))
    assert check_kernel(kernel, "triton", torch.float32, tolerance=3e-5 if "?r=" in kernel else None) == len(
        FEW
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(name, torch.float32) for name in NAMES]
    + list(itertools.product(HALVES, (torch.bfloat16, torch.float16))),
    ids=str,
)
def test_the_whole_table_conforms(kernel: str, dtype: torch.dtype):
    # In halves the tiles round weights before they multiply them, as torch's own kernels do.
    tolerance = 2e-2 if dtype != torch.float32 else 3e-5 if "?r=" in kernel else None
    assert check_kernel(kernel, "triton", dtype, tolerance=tolerance) > 20


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kernel", "scale"),
    [
        ("gaussian", 0.3),
        ("triweight", 0.05),
        ("relumax", 0.5),
        ("normrelu?radius=2", 0.3),
        ("knn_gaussian?k=5", 0.3),
    ],
)
def test_lists_and_tiles_agree_with_the_witness(kernel, scale, form, monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, FORMS[form])
    qkv = inputs(1, 1, 1, 18, 70, 12, 20)
    options = {"kernel": kernel, "scale": scale}
    got = run(lambda *x: attention(*x, **options), *qkv)
    agree(got, run(lambda *x: witness(*x, **options), *(x.double() for x in qkv)))


def test_the_forms_are_those_asked_for(monkeypatch: pytest.MonkeyPatch):
    """What the test above calls lists fills lists, in all three kernels, and what it calls tiles does not."""
    qkv = inputs(1, 1, 1, 17, 33, 8, 8)
    for form, filled in (("lists only", True), ("tiles only", False)):
        cut(monkeypatch, FORMS[form])
        lists = []

        def scratch(_, *shape, lists=lists):
            lists.append(torch.full(shape, -1))
            return lists[-1]

        monkeypatch.setattr(triton._Launch, "scratch", scratch)
        run(lambda *x: attention(*x, scale=0.05), *qkv)
        assert [bool((x != -1).any()) for x in lists] == [filled] * 3, form


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_halves_keep_all_but_the_last_rounding(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Lists keep float32 throughout: what is left is the rounding of the result.

    The interpreter rounds to bfloat16 toward 0, so by up to one place and not a half.
    """
    cut(monkeypatch, FORMS["lists only"])
    qkv = inputs(1, 1, 1, 20, 40, 16, 16, dtype=dtype)
    got = run(lambda *x: attention(*x, kernel=kernel, scale=0.5), *qkv)
    expected = run(lambda *x: witness(*x, kernel=kernel, scale=0.5), *(x.double() for x in qkv))
    agree(got, expected, testing.TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 else 1))


def test_results_do_not_depend_on_the_number_of_programs(monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, BASE)
    qkv = inputs(1, 2, 2, 18, 20, 8, 8)
    results = []
    for programs in (1, 3):
        monkeypatch.setattr(triton._Launch, "grid", lambda self, work, n=programs: min(n, work))
        results.append(run(lambda *x: attention(*x, scale=0.3, is_causal=True), *qkv))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_close(a, b, rtol=0, atol=0)


def test_inputs_of_any_strides():
    x = torch.randn(2, 3, 21, 3, 10)
    q, k, v = (x[..., n, ::2] if n == 2 else x[:, :, :, n, :5] for n in range(3))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(21, 2, 3).permute(1, 2, 0)[:, :, None]
    got = run(lambda *y: attention(*y, scale=1.0), q, k, v, bias)
    agree(
        got, run(lambda *y: witness(*y, kernel="biweight", scale=1.0), *(y.double() for y in (q, k, v, bias)))
    )


@pytest.mark.parametrize("slopes", [[0.1, 0.2], [[0.1, 0.2], [0.3, 0.0], [0.05, 0.4], [1.0, 0.5]]])
def test_packed_sequences(slopes):
    lengths_q, lengths_k = [5, 0, 18, 2], [7, 3, 19, 1]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)]) for n in (lengths_q, lengths_k))
    q, k, v = (x[0].transpose(0, 1) for x in inputs(1, 2, 1, 25, 30, 8, 12))
    options = {"kernel": "relumax", "is_causal": True, "enable_gqa": True}

    def attend(backend):
        def f(q, k, v, slopes):
            return parzen.attention_varlen(
                q, k, v, cu_q, cu_k, 18, 19, alibi_slopes=slopes, backend=backend, **options
            )

        return f

    tensors = (q, k, v, torch.tensor(slopes))
    agree(run(attend("triton"), *tensors), run(attend("reference"), *tensors))


# ---- gradients of the numbers --------------------------------------------------------------------


def double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


@pytest.mark.parametrize("form", ["lists only", "tiles only"])
def test_alpha_scale_and_slopes_have_gradients(form: str, monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, FORMS[form])
    qkv = inputs(1, 2, 2, 18, 20, 6, 5)
    alpha, scale, slopes = torch.tensor([1.3, 1.7]), torch.tensor([[0.6], [0.2]]), torch.tensor([0.02, 0.1])

    def attend(backend):
        def f(q, k, v, alpha, scale, slopes):
            kernel = parzen.kernel("entmax", alpha=alpha)
            return parzen.attention(
                q, k, v, kernel=kernel, scale=scale, alibi_slopes=slopes, is_causal=True, backend=backend
            )

        return f

    tensors = (*qkv, alpha, scale, slopes)
    agree(run(attend("triton"), *tensors), run(attend("reference"), *(x.double() for x in tensors)), 2e-5)


@pytest.mark.parametrize("form", ["lists only", "tiles only"])
@pytest.mark.parametrize("ties", [False, True])
def test_a_margin_has_its_gradient_and_the_best_keys_carry_it(form, ties, monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, FORMS[form])
    q, k, v = inputs(1, 2, 2, 18, 20, 6, 5)
    if ties:
        q, k = q.round(), k.round()
    margin, bias = torch.tensor([0.7, 3.3]), torch.zeros(1, 2, 1, 20)

    def attend(backend):
        def f(q, k, v, margin, bias):
            kernel = parzen.kernel("relumax", margin=margin)
            return parzen.attention(q, k, v, bias, kernel=kernel, scale=0.5, backend=backend)

        return f

    tensors = (q, k, v, margin, bias)
    agree(run(attend("triton"), *tensors), run(attend("reference"), *(x.double() for x in tensors)), 2e-5)


def test_the_scale_of_a_radius_moves_its_threshold():
    qkv = inputs(1, 1, 1, 9, 12, 4, 4)
    scale = torch.tensor([[0.4]])

    def attend(backend):
        return lambda q, k, v, scale: parzen.attention(
            q, k, v, kernel="normrelu", scale=scale, backend=backend
        )

    agree(run(attend("triton"), *qkv, scale), run(attend("reference"), *(x.double() for x in (*qkv, scale))))


# ---- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lists only", "tiles only"])
@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
def test_what_is_not_finite_stays_in_its_rows(kernel: str, form: str, monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, FORMS[form])
    q, k, v = (x.round() for x in inputs(1, 1, 1, 20, 24, 4, 4))
    options = {"kernel": kernel, "scale": 0.5, "is_causal": True}
    clean = run(lambda *x: attention(*x, **options), q, k, v)
    q[0, 0, 3, 0] = torch.nan
    k[0, 0, 10, 0] = torch.nan
    o, dq, dk, dv = run(lambda *x: attention(*x, **options), q, k, v)
    # From query 10 on the bad key is seen; the others do not notice.
    bad = torch.arange(20) >= 10
    bad[3] = True
    assert o[0, 0, bad].isnan().all()
    assert_close(o[0, 0, ~bad], clean[0][0, 0, ~bad], rtol=0, atol=0)
    assert dq[0, 0, bad].isnan().any(-1).all()
    assert_close(dq[0, 0, ~bad], clean[1][0, 0, ~bad], rtol=0, atol=1e-6)
    assert dk[0, 0, 20:].isfinite().all()
    assert dv[0, 0, 20:].isfinite().all()


@pytest.mark.parametrize("form", ["lists only", "tiles only"])
def test_a_value_without_weight_is_not_read(form: str, monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, FORMS[form])
    q, k, v = inputs(1, 1, 1, 20, 24, 4, 4)
    w = parzen.attention_weights(q, k, kernel="epanechnikov", scale=1.0).weights[0, 0]
    far = int((w > 0).sum(0).argmin())
    v[0, 0, far] = torch.inf
    o = attention(q, k, v, kernel="epanechnikov", scale=1.0)[0, 0]
    assert_close(o.isinf().all(-1), w[:, far] > 0)
    assert o[w[:, far] == 0].isfinite().all()


def test_extreme_scores():
    # Integers times a power of two: the shift is exact, so that the result may not change.
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (1, 1, 20, 4), generator=g).float() for _ in range(3))
    for kernel in ("epanechnikov", "entmax?alpha=1.3", "relumax", "knn_gaussian?k=4"):
        plain = attention(q, k, v, kernel=kernel, scale=0.25)
        for size in (1e4, -1e4):
            shifted = attention(q, k, v, torch.full((1, 20), size), kernel=kernel, scale=0.25)
            assert_close(shifted, plain, atol=1e-5, rtol=0)


# ---- as an operator ------------------------------------------------------------------------------


def test_transforms_and_second_derivatives(monkeypatch: pytest.MonkeyPatch):
    cut(monkeypatch, replace(BASE, lists=True))
    q, k, v = (torch.stack([x, x + 1]) for x in inputs(1, 1, 1, 5, 7, 4, 3))

    def loss(backend):
        def f(q, k, v):
            return parzen.attention(q, k, v, kernel="biweight", scale=1.0, backend=backend).sin().sum()

        return f

    for transform in (
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2)))(q, k, v),
        lambda f: torch.func.vmap(f, in_dims=(0, None, None))(q, k[0], v[0]),
        lambda f: torch.func.jacrev(torch.func.grad(f))(q[0], k[0], v[0]),
    ):
        assert_close(transform(loss("triton")), transform(loss("reference")), atol=2e-5, rtol=1e-4)


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    for t in (5, 9):
        qkv = inputs(1, 1, 1, t, t, 4, 4)
        agree(run(compiled, *qkv), run(lambda *x: attention(*x, is_causal=True), *qkv), 1e-6)


def test_why_not():
    q = torch.randn(1, 1, 3, 4)

    def reason(q, v=None, **options):
        options = {"kernel": "biweight"} | options
        return parzen.explain(q, q, q if v is None else v, **options).reasons["triton"]

    assert reason(q) == "could, after cpu" or reason(q) == "serves this call"
    assert "computes in float32" in reason(q.double())
    assert "heads of 1 to 256, these have 4 and 300" in reason(q, torch.randn(1, 1, 3, 300))
    assert "no dropout" in reason(q, dropout_p=0.1)


def test_why_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q = torch.randn(1, 1, 3, 4)
    reasons = parzen.explain(q, q, q, kernel="biweight").reasons
    assert reasons["triton"] == "the Triton engine works on CUDA tensors, these are on cpu"
    with pytest.raises(ValueError, match="'triton' cannot serve this call: the Triton engine works on CUDA"):
        attention(q, q, q)


def test_serves_compact_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    # All that the choice looks at, where torch has no CUDA.
    q: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=torch.Size((1, 1, 3, 4))
    )
    for name in NAMES:
        kernel = parzen.kernel(name)
        call = Call(q, q, q, 1.0, lower(kernel, 1.0), kernel)
        assert choose(call)[0] == ("triton" if kernel.compact else "sdpa"), name


def test_the_canary_is_rejected(monkeypatch: pytest.MonkeyPatch):
    few = [case for case in testing.cases() if case.name == "plain"]
    monkeypatch.setattr(testing, "cases", lambda: iter(few))
    for factor in (1.0, 1.01):
        monkeypatch.setitem(BACKENDS, "triton", _Off(factor))
        if factor == 1:
            assert check_kernel("biweight", "triton", torch.float32) == 1
            continue
        with pytest.raises(AssertionError, match="output"):
            check_kernel("biweight", "triton", torch.float32)


class _Off:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    why_not = staticmethod(triton.why_not)

    def run(self, call):
        return triton.run(call) * self.factor


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["biweight", "epanechnikov", "relumax", "knn_gaussian"])
def test_compiles_for_a_gpu_that_is_not_there(kernel: str, monkeypatch: pytest.MonkeyPatch):
    """One architecture: cubins, without register spills."""
    monkeypatch.delenv("TRITON_INTERPRET")
    command = [sys.executable, "-m", "parzen.backends.triton.build", "--arch", "90", "--width", "64"]
    command += ["--kernels", kernel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 spills") == 3, done.stdout


def test_spills_are_seen(monkeypatch: pytest.MonkeyPatch):
    """One warp has too few registers for such a tile; the interpreter must be off for it, hence a process."""
    monkeypatch.delenv("TRITON_INTERPRET")
    code = (
        "import sys; from parzen.backends.triton import build, Config; "
        "build.config = lambda *_: Config(m=32, n=32, warps=1); "
        "sys.exit(build.main('--arch 80 --width 64 --kernels uniform'.split()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert " 0 spills" not in done.stdout.splitlines()[0]


# ---- timed ---------------------------------------------------------------------------------------


def test_the_benchmark_runs_as_a_toy(tmp_path):
    lines = bench.bench_gpu(kernels=["relumax"], lengths=[20], out=tmp_path, show=lambda _: None)
    assert [(x.inputs, x.contender) for x in lines] == [
        (inputs, by) for inputs in ("N(0,1)", "peaked") for by in ("sdpa", "parzen")
    ]
    assert 1 <= lines[3].support < lines[1].support < lines[0].support
    assert "a toy" in (tmp_path / "attention.md").read_text()


def test_a_peer_is_timed_where_it_runs_and_agrees(monkeypatch: pytest.MonkeyPatch):
    def fails(q, k, v):
        raise AssertionError("needs CUDA")

    def right(q, k, v, factor=1.0):
        return factor * parzen.attention(q, k, v, kernel="biweight", is_causal=True, backend="reference")

    peers = {"one": right, "two": lambda *x: right(*x, factor=1.2), "three": fails}
    monkeypatch.setattr(bench, "_adasplash", lambda n, size: peers)
    said = []
    lines = bench.bench_gpu(kernels=["biweight"], lengths=[20], show=said.append)
    assert [line.contender for line in lines] == 2 * ["sdpa", "parzen", "one"]
    assert sum("two, 20 × 16, is off by 2.0e-01: not timed" in line for line in said) == 2
    assert sum("three does not serve 20 × 16: AssertionError('needs CUDA')" in line for line in said) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_the_benchmark_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["bench", "attention", "--device", "cuda"]) == 3
    assert capsys.readouterr().err == "no GPU to time: torch sees no CUDA device\n"
