"""Derivatives: against finite differences, of second order, and under torch.func's transforms."""

import pytest
import torch
import torch.nn.functional as F
from kernel_list import NAMES
from torch.autograd import gradcheck, gradgradcheck

import parzen

SMALL = [n.replace("knn_gaussian", "knn_gaussian?k=2") if n == "knn_gaussian" else n for n in NAMES]


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def unit(*shape):
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1).requires_grad_()


@pytest.mark.parametrize("name", SMALL)
def test_first_and_second_derivatives(name):
    q, k, v, bias = unit(2, 2, 4, 3), unit(2, 2, 5, 3), leaf(2, 2, 5, 2), leaf(4, 5)
    scale = torch.tensor([[1.3], [0.8]], dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias, scale):
        return parzen.attention(q, k, v, bias, kernel=name, scale=scale)

    assert gradcheck(f, (q, k, v, bias, scale))
    assert gradgradcheck(f, (q, k, v, bias, scale))


@pytest.mark.parametrize(
    ("family", "parameter", "values"),
    [("entmax", "alpha", [1.2, 1.7]), ("relumax", "margin", [0.5, 1.7])],
)
def test_a_parameter_per_head_has_its_gradient(family, parameter, values):
    q, k, v = leaf(2, 2, 4, 3), leaf(2, 2, 5, 3), leaf(2, 2, 5, 2)
    value = torch.tensor(values, dtype=torch.float64, requires_grad=True)

    def f(value, q, k, v):
        kernel = parzen.kernel(family, **{parameter: value})
        return parzen.attention(q, k, v, kernel=kernel, scale=2.0)

    assert gradcheck(f, (value, q, k, v))
    assert gradgradcheck(f, (value, q, k, v))
    per_head = [
        parzen.attention(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], scale=2.0,
                         kernel=parzen.kernel(family, **{parameter: x}))
        for i, x in enumerate(values)
    ]  # fmt: skip
    torch.testing.assert_close(f(value, q, k, v), torch.cat(per_head, 1))


@pytest.mark.parametrize("name", SMALL)
def test_weights_alone(name):
    x = leaf(3, 6)
    assert gradcheck(lambda x: parzen.weights(x, name, scale=0.9), (x,))
    assert gradgradcheck(lambda x: parzen.weights(x, name, scale=0.9), (x,))


@pytest.mark.parametrize("name", SMALL)
def test_function_transforms(name):
    q, k, v = unit(3, 2, 4, 3), unit(3, 2, 5, 3), leaf(3, 2, 5, 2)

    def loss(q, k, v):
        return parzen.attention(q, k, v, kernel=name, scale=1.0).sin().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(got, expected)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    torch.testing.assert_close(each, expected)
    shared = torch.func.vmap(loss, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared, torch.stack([loss(x, k[0], v[0]) for x in q]))
    jacobian = torch.func.jacrev(torch.func.grad(loss))(q, k, v)
    hessian = torch.autograd.functional.hessian(lambda q: loss(q, k, v), q)
    torch.testing.assert_close(jacobian, hessian)


@pytest.mark.parametrize("kernel", ["gaussian", "biweight"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_drops_the_same_weights_in_every_sample_or_others(kernel, randomness):
    x = torch.randn(1, 2, 16, 4).expand(5, -1, -1, -1)
    drop = torch.func.vmap(
        lambda y: parzen.attention(y, y, y, kernel=kernel, dropout_p=0.5), randomness=randomness
    )
    got = drop(x)
    assert (got[0] == got[1:]).all() == (randomness == "same")


def test_dropout_under_another_default_device():
    x = torch.randn(1, 2, 16, 4)
    with torch.device("meta"):
        assert parzen.attention(x, x, x, kernel="biweight", dropout_p=0.5).device.type == "cpu"


def test_vmap_over_a_parameter():
    s = torch.randn(4, 7, dtype=torch.float64)
    alphas = torch.tensor([1.1, 1.5, 1.9], dtype=torch.float64)
    got = torch.func.vmap(lambda a: parzen.weights(s, parzen.kernel("entmax", alpha=a.reshape(1, 1))))(alphas)
    expected = torch.stack([parzen.weights(s, parzen.kernel("entmax", alpha=float(a))) for a in alphas])
    torch.testing.assert_close(got, expected)


def test_vmap_over_scores_in_any_axis():
    s = torch.randn(4, 3, 7, dtype=torch.float64)
    got = torch.func.vmap(lambda x: parzen.weights(x, "biweight"), in_dims=1, out_dims=1)(s)
    torch.testing.assert_close(got, parzen.weights(s, "biweight"))


def test_the_step_profile_passes_no_gradient_to_queries_and_keys():
    q, k, v = leaf(1, 1, 5, 3), leaf(1, 1, 9, 3), leaf(1, 1, 9, 2)
    out = parzen.attention(q, k, v, kernel="knn_uniform?k=3")
    gq, gk, gv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (gq == 0).all()
    assert (gk == 0).all()
    assert (gv != 0).any()


def test_the_scale_of_a_fixed_radius_has_the_gradient_of_its_threshold():
    """normReLU's threshold moves with the scale; without that term finite differences disagree."""
    q, k, v = unit(1, 1, 6, 4), unit(1, 1, 9, 4), leaf(1, 1, 9, 2)
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    for name in ("normrelu", "normrelu?radius=1.3", "power?r=2&radius=1.6"):
        assert gradcheck(lambda s, name=name: parzen.attention(q, k, v, kernel=name, scale=s), (scale,))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
@pytest.mark.parametrize("name", ["gaussian", "biweight"])
def test_second_derivatives_of_some_inputs(name, wanted):
    inputs = {n: torch.randn(1, 2, 5, 4, requires_grad=n in wanted) for n in "qkv"}
    leaves = [inputs[n] for n in wanted]

    def second(backend):
        out = parzen.attention(*inputs.values(), kernel=name, backend=backend)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(second("auto"), second("reference"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("left", range(0, 128, 9))
def test_windows_that_begin_inside_a_block(left):
    """Dense tiles of a window, with a gradient of the bias that all heads share."""
    q, k, v = (torch.randn(1, 2, 256, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.zeros(256, 256, dtype=torch.float64, requires_grad=True)

    def grads(backend):
        out = parzen.attention(q, k, v, bias, window=(left, 0), backend=backend)
        return torch.autograd.grad(out.sin().sum(), (q, k, v, bias))

    torch.testing.assert_close(grads("auto"), grads("reference"), rtol=0, atol=1e-10)
