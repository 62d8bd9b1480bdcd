"""What is checked at the door, and the values and devices that are let in."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_list import NAMES
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.testing import assert_close

import parzen
from parzen.backends import BACKENDS, cpu
from parzen.kernels import kernel
from parzen.nn import KernelAttention
from parzen.testing import witness

built = pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine was not built here")
BOTH = [pytest.param("cpu", marks=built), "reference"]
INF, NAN = math.inf, math.nan


def qkv(*shape, **options):
    return [torch.randn(*shape, **options) for _ in range(3)]


# ---- numbers without an end ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "many", [50, 2**31, sys.maxsize, 2**63, 2**64, 10**400], ids=lambda n: f"{n.bit_length()}bit"
)
def test_numbers_beyond_the_lengths_are_no_limit(many, backend):
    q, k, v = torch.randn(1, 2, 5, 4), *qkv(1, 2, 7, 4)[:2]

    def run(name="biweight", **options):
        return parzen.attention(q, k, v, kernel=name, backend=backend, **options)

    assert_close(run(window=(many, many)), run(), rtol=0, atol=0)
    assert_close(run(window=(1, many)), run(window=(1, -1)), rtol=0, atol=0)
    assert_close(run(window=(many, 0), is_causal=True), run(is_causal=True), rtol=0, atol=0)
    assert_close(run(kernel("knn_gaussian", k=many)), run("gaussian"))
    layer = KernelAttention(4, 1, window=(many, 0), bandwidth="ssmax")
    expected = KernelAttention(4, 1, window=(-1, 0), bandwidth="ssmax")
    expected.load_state_dict(layer.state_dict())
    assert_close(layer(q[0]), expected(q[0]))


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shapes_on_the_meta_device(name):
    q, k, v = (torch.empty(2, 3, n, 8, device="meta", requires_grad=True) for n in (5, 7, 7))
    out = parzen.attention(q, k, v, kernel=name, is_causal=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 5, 8), torch.float32, "meta")
    out.sum().backward()
    assert v.grad.shape == v.shape
    assert parzen.weights(q, name).shape == q.shape
    assert parzen.attention_weights(q, k, kernel=name).tau.shape == (2, 3, 5)
    layer = KernelAttention(8, 2, kernel=name, bandwidth="ssmax", positions="rotary", device="meta")
    assert layer(q[0]).shape == (3, 5, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(3, 3, dtype=torch.bool)}, "attn_mask is on meta and query on cpu"),
        ({"attn_mask": torch.ones(3, 3)}, "attn_mask is on meta"),
        ({"scale": torch.ones(2, 1)}, "scale is on meta"),
        ({"scale": torch.ones(2, 1), "kernel": "normrelu"}, "scale is on meta"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is on meta"),
        ({"kernel": kernel("entmax", alpha=torch.ones(2, device="meta"))}, "alpha is on meta"),
        ({"kernel": kernel("relumax", margin=torch.ones(2, device="meta"))}, "margin is on meta"),
    ],
)
def test_all_tensors_on_one_device(options, words):
    q = torch.randn(2, 3, 4)
    elsewhere = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(ValueError, match=words):
        parzen.attention(q, q, q, **{"kernel": "biweight"} | elsewhere)


def test_other_tensors_of_a_map_or_a_layer_on_its_device():
    with pytest.raises(ValueError, match="alpha is on meta and scores on cpu"):
        parzen.weights(torch.randn(3), kernel("entmax", alpha=torch.tensor(1.5, device="meta")))
    mask = torch.ones(3, 3, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="attn_mask is on meta and x on cpu"):
        KernelAttention(4, 2, bandwidth="ssmax")(torch.randn(1, 3, 4), attn_mask=mask)


# ---- block masks ---------------------------------------------------------------------------------


def test_a_block_mask_for_other_lengths_is_refused():
    q = torch.randn(1, 2, 40, 4)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 40, device="cpu")
    with pytest.raises(
        ValueError, match=r"block mask was made for lengths \(300, 40\), the call has \(40, 40\)"
    ):
        parzen.attention(q, q, q, block)


def test_the_blocks_of_a_block_mask_count():
    """Without a function, the blocks alone say which keys are allowed."""
    q, k, v = torch.randn(1, 2, 33, 4), *qkv(1, 2, 40, 4)[:2]
    number, index = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[1, 0, 0], [0, 2, 0], [0, 0, 0]]]])
    block = BlockMask.from_kv_blocks(
        number.int(), index.int(), BLOCK_SIZE=16, seq_lengths=(33, 40), compute_q_blocks=False
    )
    dense = torch.zeros(33, 40, dtype=torch.bool)
    dense[:16, 16:32] = dense[16:32, :16] = dense[16:32, 32:] = True
    got = parzen.attention(q, k, v, block, kernel="biweight")
    assert_close(got, parzen.attention(q, k, v, dense, kernel="biweight"))


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", ["gaussian", "biweight"])
def test_float8_is_computed_in_float32(name, dtype):
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 5, 4))
    mask = torch.zeros(5, 5).fill_diagonal_(-INF).to(torch.float8_e5m2)
    wide = parzen.attention(q.float(), k.float(), v.float(), mask.float(), kernel=name)
    assert torch.equal(parzen.attention(q, k, v, mask, kernel=name).float(), wide.to(dtype).float())
    assert torch.equal(parzen.weights(q, name).float(), parzen.weights(q.float(), name).to(dtype).float())
    with pytest.raises(TypeError, match="no common dtype, convert them"):
        parzen.attention(q, k.float(), v, kernel=name)


# ---- mistakes ------------------------------------------------------------------------------------


X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
NESTED = torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a tensor, got float"),
        ({"alibi_slopes": [0.5, 0.5]}, TypeError, "alibi_slopes must be a tensor, got list"),
        ({"alibi_slopes": torch.tensor([1, 2])}, TypeError, "must be floating-point, got torch.int64"),
        ({"scale": torch.tensor([[1.0], [0.0]])}, ValueError, "> 0 in float32, got values from 0.0 to 1.0"),
        ({"scale": torch.tensor(INF)}, ValueError, "finite and > 0"),
        ({"scale": torch.tensor(NAN)}, ValueError, "finite and > 0"),
        ({"scale": 10**400}, ValueError, "finite and > 0"),
        ({"scale": 1e300}, ValueError, "finite and > 0 in float32"),
        ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got 'no'"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa must be True or False, got 1"),
        ({"dropout_p": "x"}, TypeError, "dropout_p must be a number, got str"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a number, got bool"),
        ({"dropout_p": NAN}, ValueError, r"dropout_p must be in \[0, 1\]"),
        ({"window": 3}, ValueError, r"window must be \(left, right\), integers ≥ −1"),
        ({"window": (True, 1)}, ValueError, "integers ≥ −1"),
        ({"window": (0.5, 1)}, ValueError, "integers ≥ −1"),
        ({"backend": []}, ValueError, r"unknown backend \[\]; known: auto"),
        ({"key": X.to_sparse()}, TypeError, "key must be a dense tensor, got a torch.sparse_coo one"),
        ({"query": NESTED}, TypeError, "query must be a dense tensor, got a nested one"),
    ],
)  # fmt: skip
def test_mistakes_get_one_clear_line(options, error, words):
    for function in (parzen.attention, parzen.explain):
        with pytest.raises(error, match=words) as raised:
            function(**{"query": X, "key": X, "value": X, "kernel": "biweight"} | options)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scores": [1.0, 2.0]}, TypeError, "scores must be a tensor, got list"),
        ({"dim": 2}, ValueError, "dim must be an axis of scores, −2 … 1, got 2"),
        ({"dim": -3}, ValueError, "got -3"),
        ({"dim": "rows"}, ValueError, "got 'rows'"),
        ({"kernel": kernel("entmax", alpha=torch.full((4,), 1.5))}, ValueError, "alpha .* size 1 along dim"),
        ({"kernel": kernel("relumax", margin=torch.ones(3, 4))}, ValueError, "margin .* size 1 along dim"),
        ({"scale": torch.ones(4)}, ValueError, r"size 1 along dim, = \(3, 1\), got \(4,\)"),
        ({"scale": torch.ones(4), "kernel": "normrelu"}, ValueError, "scale must .* size 1 along dim"),
        ({"scale": torch.ones(3), "dim": 0}, ValueError, r"size 1 along dim, = \(1, 4\), got \(3,\)"),
        ({"scale": torch.ones(5, 3, 1)}, ValueError, "size 1 along dim"),
        ({"scale": torch.zeros(3, 1)}, ValueError, "> 0"),
    ],
)  # fmt: skip
def test_mistakes_with_a_weight_map(options, error, words):
    with pytest.raises(error, match=words):
        parzen.weights(**{"scores": torch.randn(3, 4)} | options)


def test_parameters_of_a_weight_map_broadcast():
    s = torch.randn(3, 4)
    for alpha in (torch.tensor(1.3), torch.full((1,), 1.3), torch.full((3, 1), 1.3)):
        assert_close(parzen.weights(s, kernel("entmax", alpha=alpha)), parzen.weights(s, "entmax?alpha=1.3"))
    scale = torch.rand(4) + 0.5
    got = parzen.weights(s, "normrelu", dim=0, scale=scale)
    assert_close(got[:, 2], parzen.weights(s[:, 2], "normrelu", scale=scale[2].item()))


def test_flags_of_the_weights():
    with pytest.raises(TypeError, match="sparse must be True or False, got 'yes'"):
        parzen.attention_weights(X, X, sparse="yes")


# ---- forward mode --------------------------------------------------------------------------------


def dual(f):
    def run(x):
        with torch.autograd.forward_ad.dual_level():
            return f(torch.autograd.forward_ad.make_dual(x, x))

    return run


FORWARD = {
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "dual": dual,
}


# torch compiles decompositions the first time.
compiles = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@compiles
@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_forward_mode_is_refused_in_words(backend, transform):
    differentiate = FORWARD[transform](lambda q: parzen.attention(q, X, X, backend=backend).sum())
    with pytest.raises(NotImplementedError, match="query has a tangent, and parzen has no forward-mode"):
        differentiate(X)


@compiles
def test_tangents_of_other_things_do_not_matter():
    expected = parzen.attention(X, X, X, kernel="biweight")
    got, _ = torch.func.jvp(lambda y: y + parzen.attention(X, X, X, kernel="biweight"), (X * 0,), (X,))
    assert_close(got, expected)
    with pytest.raises(NotImplementedError, match="alpha has a tangent"):
        torch.func.jvp(
            lambda a: parzen.attention(X, X, X, kernel=kernel("entmax", alpha=a)),
            (torch.tensor([1.3, 1.5]),),
            (torch.ones(2),),
        )


def gaussian_calls(n):
    """Calls with T = S = n, and their options: what torch's fused kernel takes, and what it does not."""

    def x(e=12, heads=1, **options):
        return torch.randn(1, heads, n, e, **options)

    strided = x().transpose(2, 3).contiguous().transpose(2, 3)
    row = torch.randn(1, 1, 1, n)
    yield "plain", (x(), x(), x()), {}
    yield "causal", (x(), x(), x()), {"is_causal": True}
    yield "wider values", (x(), x(), x(16)), {}
    yield "narrower values", (x(), x(), x(1)), {}
    yield "strided query", (strided, x(), x()), {}
    yield "strided key", (x(), strided, x()), {}
    yield "strided value", (x(), x(), strided), {}
    yield "expanded value", (x(), x(), x(1).expand(1, 1, n, 12)), {}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        same = {"dtype": dtype}
        yield f"{dtype}", (x(**same), x(**same), x(**same)), {}
        yield f"{dtype}, narrower values", (x(**same), x(**same), x(1, **same)), {}
        yield f"{dtype}, mask", (x(**same), x(**same), x(**same)), {"attn_mask": row > 0}
        yield f"{dtype}, bias", (x(**same), x(**same), x(**same)), {"attn_mask": row.to(dtype)}
    yield "grouped", (x(heads=2), x(), x()), {"enable_gqa": True}
    yield "grouped, mask", (x(heads=2), x(), x()), {"enable_gqa": True, "attn_mask": row > 0}
    yield "grouped, causal", (x(heads=2), x(), x()), {"enable_gqa": True, "is_causal": True}
    yield "mask", (x(), x(), x()), {"attn_mask": row > 0}
    yield "mask of queries", (x(), x(), x()), {"attn_mask": row.mT > 0}
    yield "bias", (x(), x(), x()), {"attn_mask": row}
    yield "scale per row", (x(), x(), x()), {"scale": torch.rand(1, n) + 0.1}
    yield "learnt bias", (x(), x(), x()), {"attn_mask": row.clone().requires_grad_()}
    yield "dropout", (x(), x(), x()), {"dropout_p": 0.1}


@built
@pytest.mark.parametrize("gradient", [False, True])
def test_sdpa_serves_the_gaussian_where_its_kernel_is_fused(gradient):
    flash, seen = 1, set()
    for name, qkv, options in gaussian_calls(6):
        q, k, v = (x.requires_grad_(gradient) if x.is_leaf else x for x in qkv)
        given = [options.get("attn_mask"), options.get("dropout_p", 0.0), options.get("is_causal", False)]
        fused = torch._fused_sdp_choice(q, k, v, *given, enable_gqa="enable_gqa" in options) == flash
        assert parzen.explain(q, k, v, **options).backend == ("sdpa" if fused else "cpu"), name
        seen.add(fused)
    assert seen == {True, False}


MEMORY = """
import resource, torch, parzen
from test_attention import gaussian_calls
n, peak = 6000, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
for size in (64, n):
    before = peak()
    for name, qkv, options in gaussian_calls(size):
        q, k, v = (x.requires_grad_() if x.is_leaf else x for x in qkv)
        parzen.attention(q, k, v, **options).sum().backward()
        # One array of T×S float32 has 137 MiB.
        assert peak() - before < 110, (name, size, peak() - before)
"""


GROUPED = """
import resource, torch, parzen
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
n = 20000
k, v = torch.randn(1, 1, n, 64), torch.randn(1, 1, n, 64)
q = torch.randn(1, 32, 1, 64)
parzen.attention(q, k[:, :, :64], v[:, :, :64], enable_gqa=True)
before = peak()
parzen.attention(q, k, v, enable_gqa=True)
# The keys and the values for each query head have 312 MiB.
assert peak() - before < 40, peak() - before
"""


@built
@pytest.mark.parametrize("gradient", [False, True])
def test_grouped_gaussian_with_masks_against_the_witness(gradient):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    q.requires_grad_(gradient)
    per_head = torch.rand(2, 6, 5, 9) > 0.3
    for mask in (None, per_head, per_head[:, :1], torch.randn(6, 5, 9)):
        got = parzen.attention(q, k, v, mask, enable_gqa=True)
        assert_close(got.double(), witness(q, k, v, mask, kernel="gaussian"), rtol=1e-5, atol=1e-5)


@built
def test_grouped_heads_share_their_keys():
    run = subprocess.run([sys.executable, "-c", GROUPED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@built
def test_the_gaussian_takes_no_quadratic_memory():
    here = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", MEMORY], cwd=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
