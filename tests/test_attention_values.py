"""Keys, queries and values that are not finite: 0·∞ is 0, and what is bad stays where it is seen."""

import math

import pytest
import torch
from kernel_list import NAMES, NEVER_EMPTY
from torch.testing import assert_close

import parzen
from parzen.backends import cpu

built = pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine was not built here")
BOTH = [pytest.param("cpu", marks=built), "reference"]
INF, NAN = math.inf, math.nan


class Wrapped(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *x):
        return self.f(*x)


G = torch.Generator().manual_seed(0)
ARGUMENTS = tuple(torch.randn(1, 2, *x, generator=G) for x in ((5, 4), (7, 4), (7, 3)))
WAYS = {
    "plain": lambda f: f,
    "vmap": lambda f: lambda *x: torch.func.vmap(f)(*(y[None] for y in x))[0],
    "compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "trace": lambda f: torch.jit.trace(Wrapped(f), ARGUMENTS, check_trace=False),
    "export": lambda f: torch.export.export(Wrapped(f), ARGUMENTS).module(),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gaussian", "biweight", "knn_gaussian?k=3"])
def test_a_value_reaches_those_that_weigh_it_only(name, way):
    """∞ is the limit of large numbers, ∞ − ∞ and NaN are NaN, and 0·∞ is 0."""
    torch._dynamo.reset()
    q, k, v = (x.clone() for x in ARGUMENTS)
    w = parzen.attention_weights(q, k, kernel=name, window=(3, 3)).weights
    expected = parzen.attention(q, k, v, kernel=name, window=(3, 3), backend="reference")
    for key, column, value in ((0, 0, INF), (1, 1, -INF), (4, 0, NAN), (5, 1, INF)):
        v[:, :, key, column] = value
        seen = w[..., key] > 0
        expected[..., column] = torch.where(seen, expected[..., column] + value, expected[..., column])
    assert {False, True} == set(expected.isnan().flatten().tolist())
    attend = WAYS[way](
        lambda q, k, v: parzen.attention(q, k, v, kernel=name, window=(3, 3), backend="reference")
    )
    assert_close(attend(q, k, v), expected, equal_nan=True)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", ["biweight", "relumax", "knn_gaussian?k=3"])
def test_gradients_of_an_infinite_value(name, backend):
    q, k, v = (x.double().requires_grad_() for x in ARGUMENTS)
    w = parzen.attention_weights(q, k, kernel=name, scale=2.0).weights
    spoilt = v.detach().clone()
    spoilt[:, :, 0, 0] = INF
    spoilt.requires_grad_()
    clear = ~(w[..., 0] > 0)
    got, expected = (
        torch.autograd.grad(parzen.attention(q, k, x, kernel=name, scale=2.0, backend=backend).sum(), (q, x))
        for x in (spoilt, v)
    )
    assert_close(got[1], expected[1])
    assert_close(got[0][clear], expected[0][clear])
    assert not got[0][~clear].isfinite().any(-1).any()


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", NEVER_EMPTY)
def test_a_key_at_minus_infinity_is_not_there(name, backend):
    q, k, v = torch.rand(1, 1, 4, 2) + 0.1, torch.randn(1, 1, 6, 2), torch.randn(1, 1, 6, 3)
    far = k.clone()
    far[:, :, 2, 0] = -INF
    there = torch.arange(6) != 2
    leaves = [x.requires_grad_() for x in (q, far, v)]
    got = parzen.attention(*leaves, kernel=name, backend=backend)
    assert_close(got, parzen.attention(q, k, v, there, kernel=name, backend="reference"))
    grads = torch.autograd.grad(got.sin().sum(), leaves)
    expected = parzen.attention(q, k[:, :, there], v[:, :, there], kernel=name, backend="reference")
    expected = torch.autograd.grad(expected.sin().sum(), (q, v))
    assert_close(grads[0], expected[0])
    assert_close(grads[2], expected[1])
    assert (grads[1][:, :, 2] == 0).all()


def test_an_unreadable_query_that_sees_nothing_spoils_no_key():
    q, k, v = (x.clone().requires_grad_() for x in ARGUMENTS)
    with torch.no_grad():
        q[:, :, 1] = NAN
    seen = (torch.arange(5) != 1)[:, None]
    out = parzen.attention(q, k, v, seen, kernel="biweight", backend="reference")
    assert (out[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_score_is_nan_and_a_masked_one_beside_it_is_not(name):
    w = parzen.weights(torch.tensor([[INF, 1.0, -INF], [1.0, NAN, -INF]]), name)
    assert w[:, :2].isnan().all()
    assert (w[:, 2] == 0).all()
