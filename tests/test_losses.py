"""Fenchel–Young losses: against cross-entropy, bisection in 100 digits, and finite differences."""

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import parzen
from parzen.losses import REDUCTIONS, FenchelYoungLoss, fenchel_young

UNIT = ["epanechnikov", "biweight", "triweight", "entmax?alpha=1.3", "entmax?alpha=1.05"]
ALL = ["gaussian", *UNIT]
ALPHA = {"gaussian": 1.0, "epanechnikov": 2.0, "biweight": 1.5, "triweight": 4 / 3}


def alpha_of(name):
    return ALPHA.get(name) or float(name.partition("=")[2])


def witness(z, y, alpha):
    """L(z; y) by its definition, the weights by bisection, in 100 digits."""
    with mpmath.workdps(100):
        z = [mpmath.mpf(x) for x in z.tolist()]
        if alpha == 1:
            total = mpmath.fsum(mpmath.exp(x) for x in z)
            return float(mpmath.log(total) - z[y])
        a = 1 / mpmath.mpf(1 / (alpha - 1))
        x = [s * a for s in z]
        low, high = max(x) - 1, max(x)
        for _ in range(320):
            middle = (low + high) / 2
            heavy = mpmath.fsum((s - middle) ** (1 / a) for s in x if s > middle) >= 1
            low, high = (middle, high) if heavy else (low, middle)
        p = [(s - low) ** (1 / a) if s > low else mpmath.mpf(0) for s in x]
        entropy = mpmath.fsum(w - w ** (1 + a) for w in p) / (a * (1 + a))
        return float(mpmath.fsum(w * s for w, s in zip(p, z, strict=True)) + entropy - z[y])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7,), (20, 7), (4, 7, 3), (2, 7, 3, 2)])
def test_the_gaussian_is_cross_entropy(shape, smoothing, weighted):
    torch.manual_seed(0)
    dim = 0 if len(shape) == 1 else 1
    z = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    y = torch.randint(7, (*shape[:dim], *shape[dim + 1 :]))
    if y.ndim:
        y[0] = -100
    q = torch.rand_like(z).softmax(dim).requires_grad_()
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        for target, inputs in ((y, (z,)), (q, (z, q))):
            got, expected = (f(z, target, **options) for f in (gaussian, F.cross_entropy))
            assert_close(got, expected, atol=1e-14, rtol=1e-13)
            for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (got, expected)), strict=True):
                assert_close(a, b, atol=1e-14, rtol=1e-13)
    assert fenchel_young(z.float(), y, "gaussian").dtype == torch.float32


def gaussian(z, target, **options):
    return fenchel_young(z, target, "gaussian", **options)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_values_keep_their_digits_where_the_loss_vanishes(name, dtype, close):
    """The best class ahead by all but a little of the margin at which the loss is 0, and random rows."""
    torch.manual_seed(0)
    z = torch.randn(12, 9, dtype=dtype)
    margin = min(1 / (alpha_of(name) - 1) if name != "gaussian" else 30, 30)
    for i, share in enumerate((0.5, 0.9, 0.99, 0.999)):
        z[i] = torch.cat((torch.zeros(1), -margin * share * torch.linspace(1, 1.3, 8)))
    y = torch.tensor([0, 0, 0, 0, *range(8)])
    loss = fenchel_young(z, y, name, reduction="none")
    expected = torch.tensor(
        [witness(row, int(k), alpha_of(name)) for row, k in zip(z, y, strict=True)], dtype=torch.float64
    )
    # The chance of the other classes is what a rounding of the scores weighs with.
    others = parzen.weights(z.double(), name).sort(-1).values[:, :-1].sum(-1)
    near = close * expected + 8 * torch.finfo(dtype).eps * others + torch.finfo(dtype).tiny
    assert bool(((loss - expected).abs() <= near).all())
    assert bool((loss >= 0).all())


@pytest.mark.parametrize("name", UNIT)
def test_zero_exactly_where_the_chance_is_one(name):
    torch.manual_seed(0)
    z = torch.randn(300, 8) * torch.logspace(-1, 3, 300)[:, None]
    for y in range(8):
        # A chance may be 1 to rounding only, beside others of 1e-30, and the loss 1e-31.
        p = parzen.weights(z, name)
        loss = fenchel_young(z, torch.full((300,), y), name, reduction="none")
        assert bool((loss >= 0).all())
        assert torch.equal(loss == 0, (p > 0).sum(-1) * p[:, y] == 1)
    # A smoothed or soft target's least is the entropy of the target.
    q = parzen.weights(torch.randn(5, 8, dtype=torch.float64), name)
    a = alpha_of(name) - 1
    entropy = ((q - q ** (1 + a)) / (a * (1 + a))).sum(-1)
    z = torch.where(q > 0, q**a / a, -100 / a)
    assert_close(fenchel_young(z, q, name, reduction="none"), entropy, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_derivatives_of_any_order(name):
    torch.manual_seed(0)
    z = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (3, 2))
    weight = torch.rand(5, dtype=torch.float64)
    for options in ({}, {"label_smoothing": 0.1, "weight": weight}):
        assert torch.autograd.gradcheck(lambda z, o=options: fenchel_young(z, y, name, **o), z)
        assert torch.autograd.gradgradcheck(lambda z, o=options: fenchel_young(z, y, name, **o), z)


@pytest.mark.parametrize("shape", [(), (3, 1, 1), (1, 2)])
def test_alpha_as_a_tensor(shape):
    torch.manual_seed(0)
    z = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (3, 2))
    q = torch.rand(3, 5, 2, dtype=torch.float64).softmax(1).requires_grad_()
    alpha = (1.05 + 0.9 * torch.rand(shape, dtype=torch.float64)).requires_grad_()

    def loss(z, alpha, target=y):
        return fenchel_young(z, target, parzen.kernel("entmax", alpha=alpha), label_smoothing=0.1)

    if not shape:
        assert_close(loss(z, alpha), fenchel_young(z, y, f"entmax?alpha={alpha.item()}", label_smoothing=0.1))
    assert torch.autograd.gradcheck(loss, (z, alpha))
    assert torch.autograd.gradgradcheck(loss, (z, alpha))
    assert torch.autograd.gradcheck(loss, (z, alpha, q))
    assert torch.autograd.gradgradcheck(loss, (z, alpha, q))


@pytest.mark.parametrize("a", [1.0, 0.5, 0.05, 1e-4, 1e-9])
def test_the_slope_in_alpha_keeps_its_digits(a):
    p = torch.tensor([0.6, 0.3999, 1e-4, 1e-30, 0], dtype=torch.float64)
    with mpmath.workdps(60):

        def entropy(x):
            return mpmath.fsum(mpmath.mpf(w) - mpmath.mpf(w) ** (1 + x) for w in p.tolist()) / (x * (1 + x))

        expected = float(mpmath.diff(entropy, mpmath.mpf(a), h=mpmath.mpf(10) ** -20))
    for dtype, close in ((torch.float64, 1e-13), (torch.float32, 3e-6)):
        got = parzen.losses._entropy_slope(p.to(dtype), torch.tensor(a, dtype=dtype), False)
        assert_close(got.double(), torch.tensor([expected], dtype=torch.float64), atol=0, rtol=close)


def test_classes_that_are_not_possible():
    z = torch.tensor([[1.0, -torch.inf, 0.5], [0.0, torch.finfo(torch.float32).min, 2.0]], requires_grad=True)
    for name in ALL:
        loss = fenchel_young(z, torch.tensor([0, 2]), name, reduction="none")
        assert_close(loss, fenchel_young(z[:, ::2], torch.tensor([0, 1]), name, reduction="none"))
        (dz,) = torch.autograd.grad(loss.sum(), z)
        assert bool(dz.isfinite().all())
        assert bool((dz[:, 1] == 0).all())
        soft = fenchel_young(z, torch.tensor([[0.5, 0, 0.5]] * 2), name, reduction="none")
        assert bool(soft.isfinite().all())
        assert fenchel_young(z, torch.tensor([1, 0]), name, reduction="none")[0] == torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_autocast(dtype):
    torch.manual_seed(0)
    z, y = torch.randn(6, 9).to(dtype), torch.randint(9, (6,))
    for name in ALL:
        exact = fenchel_young(z.float(), y, name)
        assert torch.equal(fenchel_young(z, y, name), exact.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fenchel_young(z, y, name), exact)


# Of torch itself, on inductor's first import.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_transforms_and_compile():
    torch.manual_seed(0)
    z, y = torch.randn(4, 6, 9, dtype=torch.float64), torch.randint(9, (4, 6))
    for name in ("biweight", "epanechnikov"):

        def loss(z, y, name=name):
            return fenchel_young(z, y, name)

        each = torch.stack([loss(*pair) for pair in zip(z, y, strict=True)])
        assert_close(torch.vmap(loss)(z, y), each)
        twice = torch.func.jacrev(torch.func.jacrev(loss))(z[0], y[0])
        assert_close(twice, torch.autograd.functional.hessian(lambda z, f=loss: f(z, y[0]), z[0]))
        wide = z.flatten(0, 1).requires_grad_()
        target = y.flatten()
        compiled = torch.compile(loss, fullgraph=True)(wide, target)
        assert_close(compiled, loss(wide, target))
        assert_close(*(torch.autograd.grad(x, wide)[0] for x in (compiled, loss(wide, target))))


def test_the_module_is_the_function():
    torch.manual_seed(0)
    z, y, weight = torch.randn(6, 9), torch.randint(9, (6,)), torch.rand(9)
    module = FenchelYoungLoss(
        "triweight", weight=weight, ignore_index=3, reduction="sum", label_smoothing=0.2
    )
    expected = fenchel_young(
        z, y, "triweight", weight=weight, ignore_index=3, reduction="sum", label_smoothing=0.2
    )
    assert torch.equal(module(z, y), expected)
    assert "triweight" in repr(module)
    assert set(module.state_dict()) == {"weight"}
    alpha = torch.nn.Parameter(torch.tensor(1.4))
    module = FenchelYoungLoss(parzen.kernel("entmax", alpha=alpha)).double()
    assert list(module.parameters()) == [alpha]
    assert_close(module(z.double(), y), fenchel_young(z.double(), y, f"entmax?alpha={alpha.item()}"))


def test_what_is_refused():
    z, y = torch.randn(6, 9), torch.randint(9, (6,))
    for name in parzen.KERNELS:
        if parzen.kernel(name) not in [parzen.kernel(n) for n in ("entmax", *ALL)]:
            with pytest.raises(ValueError, match="has no such loss"):
                fenchel_young(z, y, name)
    for error, message, call in [
        (ValueError, "reduction must be one of", lambda: fenchel_young(z, y, reduction="elementwise_mean")),
        (ValueError, "label_smoothing must be", lambda: fenchel_young(z, y, label_smoothing=1.5)),
        (ValueError, r"must have shape \(6,\)", lambda: fenchel_young(z, y[:5])),
        (ValueError, "classes 0 … 8", lambda: fenchel_young(z, y + 9)),
        (ValueError, "weight must have shape", lambda: fenchel_young(z, y, weight=torch.ones(8))),
        (ValueError, "ignore_index goes with", lambda: fenchel_young(z, z.softmax(-1), ignore_index=1)),
        (TypeError, "ignore_index must be", lambda: fenchel_young(z, y, ignore_index=1.5)),
        (TypeError, "target must hold", lambda: fenchel_young(z, y > 3)),
        (TypeError, "scores must be floating", lambda: fenchel_young(y, y)),
    ]:
        with pytest.raises(error, match=message):
            call()
