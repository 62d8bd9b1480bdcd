"""Weight maps by the CPU engine, against the float64 reference and against bisection."""

import pytest
import torch
from torch.testing import assert_close

import parzen
from parzen.backends import cpu, maps, reference
from parzen.kernels import kernel, lower

KERNELS = [
    "gaussian", "epanechnikov", "biweight", "triweight", "entmax?alpha=1.7", "entmax?alpha=1.1",
    "knn_uniform?k=5", "knn_gaussian?k=5", "uniform", "gaussian_truncated", "exp?margin=1", "relumax",
    "normrelu", "power?r=2&margin=1", "power?r=2&radius=h", "power?r=1.5&radius=1.5",
]  # fmt: skip
INF, NAN = torch.inf, torch.nan

pytestmark = pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine is not built")


def witness(s, name, scale=1.0):
    """The reference in float64, with the scores' own least number read as −∞."""
    wide = s.double().masked_fill(s.detach() <= torch.finfo(s.dtype).min, -INF)
    return reference.weight_map(wide * scale, lower(kernel(name), scale))[0]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 64, 129, 1000, 5003])
def test_forward_and_backward_against_the_float64_reference(name, dtype, n):
    torch.manual_seed(n)
    s = (torch.randn(19, n, dtype=dtype) * torch.logspace(-1, 1, 19, dtype=dtype)[:, None]).requires_grad_()
    with torch.no_grad():
        s[3, :] = s[3, 0]
        s[4, ::2] = -INF
        s[5, 0] = torch.finfo(dtype).min
        s[6] = (s[6] * 2).round() / 2  # ties at the best
    assert maps.why_not(s, lower(kernel(name), 1.3)) is None
    w = parzen.weights(s, name, scale=1.3)
    exact = s.detach().double().clone().requires_grad_()
    with torch.no_grad():
        exact[5, 0] = -INF
    expected = reference.weight_map(exact * 1.3, lower(kernel(name), 1.3))[0]
    dw = torch.randn_like(w)
    (got,) = torch.autograd.grad(w, s, dw)
    (wanted,) = torch.autograd.grad(expected, exact, dw.double())
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    assert_close(w.double(), expected, atol=tolerance, rtol=10 * tolerance)
    assert_close(got.double(), wanted, atol=5 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_unit_mass_against_bisection(alpha):
    torch.manual_seed(0)
    s = torch.randn(5, 300, dtype=torch.float64) * 3
    x, power = s * (alpha - 1), 1 / (alpha - 1)
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        heavy = ((x - middle).clamp_min(0) ** power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    expected = (x - low).clamp_min(0) ** power
    assert_close(parzen.weights(s, f"entmax?alpha={alpha}"), expected, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_are_not_numbers(name):
    s = torch.tensor([[-INF] * 3, [INF, 1.0, -INF], [1.0, NAN, -INF], [torch.finfo(torch.float32).min] * 3])
    w = parzen.weights(s, name)
    expected = torch.tensor([[0.0] * 3, [NAN, NAN, 0.0], [NAN, NAN, 0.0], [0.0] * 3])
    assert_close(w, expected, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["epanechnikov", "biweight", "gaussian", "entmax?alpha=1.3"])
def test_axes_strides_and_narrow_types(name):
    torch.manual_seed(0)
    s = torch.randn(6, 40, 5)[:, ::2].transpose(0, 2)
    for dim in range(3):
        got = parzen.weights(s, name, dim=dim)
        assert_close(got.movedim(dim, -1).double(), witness(s.movedim(dim, -1), name), atol=1e-6, rtol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        x = s.to(dtype)
        assert torch.equal(parzen.weights(x, name), parzen.weights(x.float(), name).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 64, 129, 1000])
@pytest.mark.parametrize("shape", [(), (11, 1)])
def test_parameters_of_each_row(n, dtype, shape):
    torch.manual_seed(n)
    s = 2 * torch.randn(2, 11, n, dtype=dtype)
    s[0, 3, ::2] = -INF
    alpha = 1 + torch.rand(shape, dtype=dtype)
    if shape:
        alpha[:3, 0] = torch.tensor([1.0, 2.0, 1.5])
    margin, scale = torch.rand(shape, dtype=dtype) + 0.2, torch.rand(shape, dtype=dtype) + 0.5
    for make in (
        lambda alpha, margin: kernel("entmax", alpha=alpha),
        lambda alpha, margin: kernel("relumax", margin=margin),
        lambda alpha, margin: parzen.Kernel(parzen.kernels.Power(2.5), parzen.kernels.WithinMargin(margin)),
        lambda alpha, margin: parzen.Kernel(parzen.kernels.Exp(), parzen.kernels.WithinMargin(margin)),
        lambda alpha, margin: kernel("normrelu"),
        lambda alpha, margin: kernel("biweight"),
    ):
        narrow = [x.clone().requires_grad_() for x in (s, alpha, margin, scale)]
        wide = [x.double().clone().requires_grad_() for x in (s, alpha, margin, scale)]
        x, a, b, h = narrow
        chosen = make(a, b)
        assert maps.why_not(x, lower(chosen, h)) is None
        w = parzen.weights(x, chosen, scale=h)
        form = lower(make(wide[1], wide[2]), wide[3])
        hidden = wide[0] == -INF
        expected, _ = reference.weight_map(
            torch.where(hidden, -INF, wide[0].masked_fill(hidden, 0) * wide[3]), form
        )
        # α = 1 is the next number above it, of the dtype.
        close = 5e-6 if dtype == torch.float32 else 1e-12
        assert_close(w.double(), expected, atol=close, rtol=10 * close)
        dw = torch.randn_like(w)
        got = torch.autograd.grad(w, narrow, dw, materialize_grads=True, allow_unused=True)
        wanted = torch.autograd.grad(expected, wide, dw.double(), materialize_grads=True, allow_unused=True)
        for g, e in zip(got, wanted, strict=True):
            assert_close(g.double(), e, atol=20 * close * max(1, e.abs().max()), rtol=20 * close)


def test_derivatives_of_any_order_by_rows():
    torch.manual_seed(1)
    s = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    a, b, h = (x + torch.rand(3, 1, dtype=torch.float64) for x in (1, 0.5, 0.5))
    for x in (a, b, h):
        x.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda s, a: parzen.weights(s, kernel("entmax", alpha=a)), (s, a))
        assert check(lambda s, b: parzen.weights(s, kernel("relumax", margin=b)), (s, b))
        assert check(lambda s, h: parzen.weights(s, "power?r=2&radius=h", scale=h), (s, h))
        assert check(lambda s: parzen.weights(s, "power?r=0.5&margin=1"), (s,))


@pytest.mark.parametrize("name", ["epanechnikov", "biweight", "triweight", "gaussian", "entmax?alpha=1.3"])
def test_derivatives_of_any_order(name):
    torch.manual_seed(1)
    s = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: parzen.weights(s, name), s)
    assert torch.autograd.gradgradcheck(lambda s: parzen.weights(s, name), s)


# Of torch itself, on inductor's first import.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_transforms_and_compile():
    torch.manual_seed(0)
    s = torch.randn(4, 5, 9, dtype=torch.float64)
    for name in ("biweight", "epanechnikov", "relumax"):
        f = lambda s, name=name: parzen.weights(s, name)  # noqa: E731
        assert_close(torch.vmap(f, in_dims=1, out_dims=1)(s), f(s))
        jacobian = torch.func.jacrev(f)(s[0])
        assert_close(jacobian, torch.autograd.functional.jacobian(f, s[0]))
        x, y = s.clone().requires_grad_(), s.clone().requires_grad_()
        compiled = torch.compile(f, fullgraph=True)(x)
        assert_close(compiled, f(y))
        (compiled**2).sum().backward()
        (f(y) ** 2).sum().backward()
        assert_close(x.grad, y.grad)


def test_the_operator_keeps_its_promises():
    numbers = (1, 1, 0, 1.0, 0.0, 2.0, -3.4e38)
    s = torch.randn(3, 4, 8).transpose(0, 1)
    torch.library.opcheck(
        torch.ops.parzen.cpu_weights, (s, *numbers), test_utils=("test_schema", "test_faketensor")
    )
    w = torch.ops.parzen.cpu_weights(s, *numbers)
    torch.library.opcheck(
        torch.ops.parzen.cpu_weights_backward, (s, w, *numbers), test_utils=("test_schema", "test_faketensor")
    )
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.parzen.cpu_weights(mode.from_tensor(s), *numbers)
    assert w.stride() == fake.stride()


def test_rows_do_not_depend_on_threads_or_neighbours():
    s = torch.randn(64, 777)
    before, threads = parzen.weights(s, "biweight"), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(parzen.weights(s, "biweight"), before)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parzen.weights(s[13], "biweight"), before[13])
