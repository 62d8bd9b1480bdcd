"""α of any positive value, and normmax: what the reference alone serves."""

import mpmath
import pytest
import torch
from kernel_list import BEYOND
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import parzen
from parzen.backends import cpu
from parzen.kernels import Form, UnitNorm, kernel
from parzen.losses import fenchel_young, linear_fenchel_young
from parzen.testing import check_kernel, witness_weights

INF = torch.inf


def alpha_of(name):
    return float(name.partition("=")[2] or 2)


def exact(s, name):
    """Weights and threshold by their definition and bisection, in 60 digits."""
    alpha, norm = mpmath.mpf(alpha_of(name)), isinstance(kernel(name).rule, UnitNorm)
    r = 1 / (alpha - 1)
    s = [mpmath.mpf(x) for x in s.tolist()]

    def rise(tau):
        if norm:
            return [max(x - tau, 0) for x in s]
        return [(x - tau) / r if (x - tau) / r > 0 else mpmath.mpf(0) for x in s]

    # Of the distance from the best score to the threshold; below 0 for α < 1.
    unit = 1 if norm else r
    power = r + 1 if norm else r
    heavy, light = mpmath.mpf(1), mpmath.mpf(len(s)) ** (-1 / power)
    for _ in range(220):
        middle = (heavy + light) / 2
        mass = mpmath.fsum(y**power if y > 0 else 0 for y in rise(max(s) - unit * middle))
        heavy, light = (middle, light) if mass >= 1 else (heavy, middle)
    tau = max(s) - unit * heavy
    values = [y**r if y > 0 else mpmath.mpf(0) for y in rise(tau)]
    total = mpmath.fsum(values)
    return [v / total for v in values], tau


@pytest.mark.parametrize("name", [*BEYOND, "entmax?alpha=0.01", "entmax?alpha=4", "normmax?alpha=1000"])
def test_weights_against_bisection_in_60_digits(name):
    torch.manual_seed(0)
    s = torch.randn(5, 9, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1, 3, 20])[:, None]
    with mpmath.workdps(60):
        expected = torch.tensor([[float(w) for w in exact(row, name)[0]] for row in s], dtype=torch.float64)
    assert_close(parzen.weights(s, name), expected, atol=1e-14, rtol=1e-11)
    assert_close(parzen.weights(s.float(), name).double(), expected, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize("name", BEYOND)
def test_weights_and_gradients_against_the_witness(name):
    torch.manual_seed(0)
    s = torch.randn(40, 150, dtype=torch.float64) * torch.logspace(-1, 1, 40)[:, None]
    s[3, ::2], s[4], s[5] = -INF, 1.0, -INF
    a, b = (s.clone().requires_grad_() for _ in range(2))
    w, expected = parzen.weights(a, name), witness_weights(b, kernel(name))
    assert_close(w, expected, atol=1e-13, rtol=1e-11)
    dw = torch.randn_like(w)
    da, db = (torch.autograd.grad(x, y, dw)[0] for x, y in ((w, a), (expected, b)))
    assert_close(da, db, atol=1e-11, rtol=1e-9)
    assert_close(w.sum(-1), torch.where(torch.arange(40) == 5, 0.0, 1.0).double())


def test_alpha_as_a_tensor_crosses_1_and_2():
    torch.manual_seed(0)
    s = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    families = {"entmax": [0.2, 0.8, 1.3, 2.0, 2.5, 4.0], "normmax": [1.1, 1.5, 2, 3, 4, 1.01]}
    for family, values in families.items():
        alpha = torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()

        def f(s, alpha, family=family):
            return parzen.weights(s, kernel(family, alpha=alpha))

        each = [parzen.weights(row, f"{family}?alpha={x}") for row, x in zip(s, values, strict=True)]
        assert_close(f(s, alpha), torch.stack(each))
        assert gradcheck(f, (s, alpha))
        assert gradgradcheck(f, (s, alpha))


@pytest.mark.parametrize("name", BEYOND)
def test_attention_conforms(name):
    assert check_kernel(name) == check_kernel(name, "reference")
    for backend in ("sdpa", "cpu", "triton"):
        with pytest.raises(ValueError, match=f"'{backend}' serves no case"):
            check_kernel(name, backend)


@pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine is not built")
def test_explain_says_why_not():
    q = torch.randn(1, 2, 5, 4)
    for given, words in [
        ("entmax?alpha=0.9", "α outside [1, 2]"),
        ("entmax?alpha=2.5", "α outside [1, 2]"),
        (kernel("entmax", alpha=torch.tensor([1.5, 2.5])), "α outside [1, 2]"),
        ("normmax", "normmax goes through the reference"),
    ]:
        reasons = parzen.explain(q, q, q, kernel=given)
        assert reasons.backend == "reference"
        assert words in reasons.reasons["cpu"]
    inside = kernel("entmax", alpha=torch.tensor([1.0, 2.0]))
    assert parzen.explain(q, q, q, kernel=inside).backend == "cpu"
    # A tensor that cannot be looked at.
    got = torch.func.vmap(lambda a: parzen.attention(q, q, q, kernel=kernel("entmax", alpha=a)))(
        torch.tensor([[1.5], [2.5], [0.5]])
    )
    assert_close(got[0], parzen.attention(q, q, q, kernel="biweight"))
    assert got[1:].isnan().all()


@pytest.mark.parametrize("name", BEYOND)
def test_the_threshold_that_attention_weights_gives(name):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, n, 4, dtype=torch.float64), dim=-1) for n in (3, 6))
    row = parzen.attention_weights(q, k, kernel=name, scale=2.0)
    chosen = kernel(name)
    t = chosen.gain * 2.0 * (q @ k.mT) - row.tau[..., None]
    value = t.clamp_min(0) ** chosen.profile.r
    assert_close(value / value.sum(-1, keepdim=True), row.weights)
    assert row.bandwidth.isinf().all() == (alpha_of(name) < 1) == (not chosen.compact)
    if isinstance(chosen.rule, UnitNorm):
        return
    by_tensor = parzen.attention_weights(
        q, k, kernel=kernel("entmax", alpha=torch.full((2,), alpha_of(name), dtype=torch.float64)), scale=2.0
    )
    assert_close(by_tensor.bandwidth, row.bandwidth)
    assert_close(by_tensor.tau, row.tau)


@pytest.mark.parametrize("name", BEYOND)
def test_a_memory_serves_them_by_the_reference(name, tmp_path):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4) for n in (3, 1500, 1500))
    chosen = kernel(name.partition("?")[0], alpha=torch.tensor([alpha_of(name), 1.7]))
    for given in (name, chosen):
        memory = parzen.KeyValueMemory(given, 2, 4)
        memory.append(k, v)
        assert_close(memory.attend(q), parzen.attention(q, k, v, kernel=given))
        with pytest.raises(ValueError, match="goes through the reference"):
            memory.reads(q)
    memory.save(tmp_path / "pairs")
    again = parzen.KeyValueMemory.load(tmp_path / "pairs")
    assert_close(again.attend(q), memory.attend(q))


# ---- losses --------------------------------------------------------------------------------------


def exact_loss(z, y, name):
    with mpmath.workdps(60):
        p, _ = exact(z, name)
        alpha = mpmath.mpf(alpha_of(name))
        total = mpmath.fsum(w**alpha for w in p if w > 0)
        if isinstance(kernel(name).rule, UnitNorm):
            entropy = 1 - total ** (1 / alpha)
        else:
            entropy = (1 - total) / (alpha * (alpha - 1))
        product = mpmath.fsum(w * mpmath.mpf(s) for w, s in zip(p, z.tolist(), strict=True))
        return float(product + entropy - mpmath.mpf(z[y].item()))


@pytest.mark.parametrize("name", [*BEYOND, "entmax?alpha=4", "normmax?alpha=1000"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_losses_keep_their_digits(name, dtype, close):
    torch.manual_seed(0)
    z = torch.randn(12, 9, dtype=dtype)
    alpha = alpha_of(name)
    margin = 1.0 if name.startswith("normmax") else 1 / abs(alpha - 1)
    for i, share in enumerate((0.5, 0.9, 0.99, 0.999)):
        z[i] = torch.cat((torch.zeros(1), -margin * share * torch.linspace(1, 1.3, 8)))
    y = torch.tensor([0, 0, 0, 0, *range(8)])
    loss = fenchel_young(z, y, name, reduction="none")
    expected = torch.tensor([exact_loss(*pair, name) for pair in zip(z, y, strict=True)], dtype=torch.float64)
    others = parzen.weights(z.double(), name).sort(-1).values[:, :-1].sum(-1)
    # For r < 1 a rounding of the scores moves a weight at the boundary by eps^r.
    moves = torch.finfo(dtype).eps ** min(1, abs(kernel(name).profile.r))
    near = close * expected + 8 * moves * others + torch.finfo(dtype).tiny
    assert bool(((loss - expected).abs() <= near).all()), ((loss - expected).abs() / near).max()
    assert bool((loss >= 0).all())


@pytest.mark.parametrize("name", BEYOND)
def test_losses_have_derivatives_of_any_order(name):
    torch.manual_seed(0)
    z, y = torch.randn(2, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3])
    q = torch.rand(2, 4, dtype=torch.float64).softmax(1).requires_grad_()
    alpha = torch.tensor([[1.2], [2.4]], dtype=torch.float64, requires_grad=True)
    family = name.partition("?")[0]
    (slope,) = torch.autograd.grad(fenchel_young(z, y, name, reduction="sum"), z)
    assert_close(slope, parzen.weights(z, name) - torch.nn.functional.one_hot(y, 4))
    for check in (gradcheck, gradgradcheck):
        assert check(lambda z: fenchel_young(z, y, name, label_smoothing=0.1), (z,))
        assert check(lambda z, q: fenchel_young(z, q, name), (z, q))
        assert check(lambda z, a: fenchel_young(z, y, kernel(family, alpha=a)), (z, alpha))


@pytest.mark.parametrize("name", BEYOND)
def test_the_loss_of_an_output_layer(name):
    torch.manual_seed(0)
    shapes = (200, 6), (1500, 6), (1500,)
    h, w, b = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in shapes)
    y = torch.randint(1500, (200,))
    losses = (
        linear_fenchel_young(h, w, y, b, name),
        fenchel_young(torch.nn.functional.linear(h, w, b), y, name),
    )
    assert_close(*losses)
    assert_close(*(torch.autograd.grad(loss, (h, w, b)) for loss in losses))


@pytest.mark.parametrize("a", [3.0, 0.7, 1e-3, -0.3, -0.9])
@pytest.mark.parametrize("norm", [False, True])
def test_the_slope_of_the_entropy(a, norm):
    p = torch.tensor([0.6, 0.3999, 1e-4, 1e-30, 0], dtype=torch.float64)
    if norm and a < 0:
        return
    with mpmath.workdps(60):

        def entropy(x):
            total = mpmath.fsum(mpmath.mpf(w) ** (1 + x) for w in p.tolist() if w)
            return 1 - total ** (1 / (1 + x)) if norm else (mpmath.fsum(p.tolist()) - total) / (x * (1 + x))

        expected = float(mpmath.diff(entropy, mpmath.mpf(a), h=mpmath.mpf(10) ** -20))
    got = parzen.losses._entropy_slope(p, torch.tensor(a, dtype=torch.float64), norm)
    assert_close(got, torch.tensor([expected], dtype=torch.float64), atol=0, rtol=1e-12)


def test_the_form_says_where_the_engines_end():
    assert Form(1, 1, 1.0).beyond is None
    assert "outside" in Form(1, 1, 0.999).beyond
    assert "outside" in Form(1, 1, -1.5).beyond
    assert "outside" in Form(1, 1, torch.tensor([2.0, 0.5])).beyond
