"""Head widths of every size: values, nothing outside a row touched, strides, torch.compile by inductor."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import parzen
from parzen.backends import cpu, native
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.testing import witness

WIDTHS = [(1, 1), (7, 3), (16, 40), (24, 72), (40, 16), (72, 24), (80, 128), (128, 1), (300, 80)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ISAS = cpu.info()["isas"]
needs_engine = pytest.mark.skipif(not ISAS, reason="the CPU engine was not built")


def alone(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows between elements of NaN."""
    around = torch.full((*shape[:-1], shape[-1] + 40), torch.nan, dtype=dtype)
    around[..., 20:-20] = torch.randn(shape)
    return around[..., 20:-20]


@needs_engine
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["biweight", "gaussian", "entmax?alpha=1.5", "relumax", "knn_gaussian?k=4"])
def test_rows_of_every_width_against_float64(isa, name, monkeypatch):
    """Few keys and many, few queries and many: lists, products, and single rows."""
    found = native.choose(isa)
    monkeypatch.setattr(native, "engine", lambda: found)
    torch.manual_seed(0)
    for width, value_width in WIDTHS:
        for dtype, near in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
            for queries, keys in ((3, 9), (53, 70)):
                shapes = ((1, 4, queries, width), (1, 2, keys, width), (1, 2, keys, value_width))
                q, k, v = (alone(*shape, dtype=dtype) for shape in shapes)
                options = {"kernel": name, "enable_gqa": True, "scale": 1.5 / width**0.5, "backend": "cpu"}
                with torch.no_grad():
                    quick = parzen.attention(q, k, v, **options)
                exact = [x.double().requires_grad_() for x in (q, k, v)]
                given = [x.requires_grad_() for x in (q, k, v)]
                out = parzen.attention(*given, **options)
                expected = witness(*exact, kernel=name, scale=options["scale"])
                go = alone(*out.shape, dtype=dtype)
                grads = torch.autograd.grad(out, given, go)
                exact_grads = torch.autograd.grad(expected, exact, go.double())
                for a, b in zip((quick, out, *grads), (expected, expected, *exact_grads), strict=True):
                    size = float(b.detach().abs().max())
                    assert_close(a.double(), b, atol=near * max(1, size), rtol=0)
                assert all(x.is_contiguous() for x in (quick, out, *grads))


@needs_engine
@pytest.mark.parametrize("width", [33, 50, 72])
def test_screened_keys_of_every_width(width):
    """So many keys that 8-bit codes choose among them."""
    torch.manual_seed(1)
    shapes = ((1, 1, 50, width), (1, 1, 6500, width), (1, 1, 6500, 3))
    given = [alone(*shape, dtype=torch.float32) for shape in shapes]
    expected = witness(*(x.double() for x in given), kernel="biweight", scale=1.0)
    out = parzen.attention(*given, kernel="biweight", scale=1.0, backend="cpu")
    assert_close(out.double(), expected, atol=1e-4, rtol=0)


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    b, h, t, e = shape
    return {
        "contiguous": torch.randn(shape, dtype=dtype),
        "heads inside": torch.randn(b, t, h, e, dtype=dtype).transpose(1, 2),
        "columns of more": torch.randn(b, h, t, e + 5, dtype=dtype)[..., 2 : e + 2],
        "columns apart": torch.randn(b, h, e, t, dtype=dtype).mT,
        "one for all": torch.randn(b, 1, 1, e, dtype=dtype).expand(shape),
    }


@needs_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "value_width"), WIDTHS)
def test_operators_lie_as_their_fakes_say(width, value_width, dtype):
    """Shapes, strides and dtypes, of both operators; and torch's own check."""
    keys, values = layouts((2, 2, 9, width), dtype), layouts((2, 2, 9, value_width), dtype)
    for name, k in keys.items():
        v = values[name]
        q = k + k.new_zeros(2, 2, 9, width)
        tensors = (k if name == "heads inside" else q, k, v, *[None] * 9)
        numbers = (1, 1, 0, 0, -1, 0, 0.5, 0.0, 2.0, 0.0, 0, 0, False)
        forward, backward = torch.ops.parzen.cpu_forward.default, torch.ops.parzen.cpu_backward.default
        saved = forward(*tensors, *numbers, True)
        args = (torch.randn_like(saved[0]), *tensors, *numbers, *saved[1:], [False] * 5)
        for operator, given in ((forward, (*tensors, *numbers, True)), (backward, args)):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
            for real, said in zip(operator(*given), fake, strict=True):
                assert (real.shape, real.stride(), real.dtype) == (said.shape, said.stride(), said.dtype), (
                    name
                )
            torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("width", [5, 24, 64])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=len)
def test_an_output_may_be_changed_in_place(width, lead):
    q, k, v = (torch.randn(*lead, 6, width, requires_grad=True) for _ in range(3))
    out = parzen.attention(q, k, v, kernel="biweight")
    expected = torch.autograd.grad((out + 1).square().sum(), q)[0]
    changed = parzen.attention(q, k, v, kernel="biweight").add_(1)
    assert_close(torch.autograd.grad(changed.square().sum(), q)[0], expected)


# ---- inductor ------------------------------------------------------------------------------------

# Of torch itself, on inductor's first import.
compiles = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def check_compiled(f, make, lengths, dtype=torch.float32):
    """Values and gradients of ``torch.compile(f)`` are those of f; at most one graph more for all lengths."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(f, fullgraph=True)
    for n in lengths:
        inputs = make(n)
        wanted = [x for x in inputs if x.is_floating_point()]
        out, expected = compiled(*inputs), f(*inputs)
        assert out.stride() == expected.stride()
        near = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
        assert_close(out, expected, **near)
        got = torch.autograd.grad(out.sin().sum(), wanted)
        assert_close(got, torch.autograd.grad(expected.sin().sum(), wanted), **near)
    assert counters["stats"]["unique_graphs"] <= 2


def dense(width, value_width, dtype, n):
    widths = (width, width, value_width)
    return [torch.randn(1, 2, n, w, dtype=dtype, requires_grad=True) for w in widths]


@compiles
def test_inductor_takes_a_width():
    """Without further operations, which inductor would have to compile first."""
    f = partial(parzen.attention, is_causal=True, kernel="biweight")
    check_compiled(f, lambda n: dense(24, 7, torch.float32, n), (5, 9, 20))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "value_width"), [*WIDTHS, (24, 24), (72, 72)])
def test_inductor_takes_every_width_and_dtype(width, value_width, dtype):
    def f(q, k, v):
        return parzen.attention(q * 1, k, v, is_causal=True, kernel="biweight") * 2

    check_compiled(f, lambda n: dense(width, value_width, dtype, n), (5, 9, 20, 33), dtype)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 24, 72])
def test_inductor_takes_packed_sequences(width, dtype):
    def make(n):
        tensors = [torch.randn(2 * n, 2, width, dtype=dtype, requires_grad=True) for _ in range(3)]
        return (*tensors, torch.tensor([0, n // 2, 2 * n]))

    def f(q, k, v, starts):
        longest = q.shape[0]
        return parzen.attention_varlen(q, k, v, starts, starts, longest, longest, kernel="biweight") * 2

    check_compiled(f, make, (5, 9, 20, 33), dtype)


@compiles
@pytest.mark.slow
def test_inductor_takes_a_mosaic():
    torch.manual_seed(0)
    sizes = {"vocab": 30, "layers": 2, "heads": 2, "width": 48, "slots": 9, "dropout": 0.0}
    model = Mosaic(MosaicConfig(kernel="biweight", **sizes))
    tokens = torch.randint(30, (2, 12))
    names, wanted = zip(*model.named_parameters(), strict=True)
    compiled = torch.compile(model, fullgraph=True)
    for n in (12, 9, 7):
        out, expected = compiled(tokens[:, :n]), model(tokens[:, :n])
        assert_close(out, expected)
        options = {"allow_unused": True}
        got = torch.autograd.grad(out.sin().sum(), wanted, **options)
        for name, a, b in zip(
            names, got, torch.autograd.grad(expected.sin().sum(), wanted, **options), strict=True
        ):
            assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
