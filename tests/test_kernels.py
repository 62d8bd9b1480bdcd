"""The table: spelling, aliases, domains, and the values that the mathematics gives by hand."""

import math

import numpy as np
import pytest
import torch
from kernel_list import BEYOND, NAMES

import parzen
from parzen.kernels import (
    KERNELS,
    Everywhere,
    Exp,
    Kernel,
    Nearest,
    Power,
    UnitMass,
    UnitNorm,
    WithinMargin,
    WithinRadius,
    kernel,
)


@pytest.mark.parametrize("name", [*NAMES, *BEYOND])
def test_spelling_reads_back(name):
    k = kernel(name)
    assert kernel(str(k)) == k
    assert hash(kernel(str(k))) == hash(k)


def test_one_spelling_for_text_and_arguments():
    assert kernel("relumax", margin=2.0) == kernel("relumax?margin=2") == Kernel(Power(1), WithinMargin(2.0))
    assert kernel("knn_gaussian?k=32") == kernel("topk_softmax", k=32) == Kernel(Exp(), Nearest(32))
    assert kernel("entmax", alpha=1.5) == kernel("biweight") == kernel("entmax15")
    assert str(kernel("relumax", margin=2.0)) == "relumax?margin=2"
    assert str(kernel("entmax", alpha=1.3)) == "entmax?alpha=1.3"
    assert str(Kernel(Power(2), WithinMargin(1.0))) == "power?r=2&margin=1"
    assert kernel("  Biweight ") == kernel("biweight")
    assert kernel("normrelu?radius=h") == kernel("normrelu", radius="h") == kernel("normrelu")


def test_a_name_of_the_statisticians_with_a_radius_has_their_fixed_bandwidth():
    """∝ [1 − u²/δ²]₊ʳ at the distance u, whatever the other keys; alone, the name has the unit mass."""
    cos = torch.tensor([0.9, 0.7, 0.2, -0.5], dtype=torch.float64)
    u2 = 2 - 2 * cos
    for name, r in (("epanechnikov", 1), ("biweight", 2), ("triweight", 3)):
        for radius in (0.5, 1.0):
            expected = (1 - u2 / radius**2).clamp_min(0) ** r
            got = parzen.weights(cos, f"{name}?radius={radius}", scale=7.0)
            torch.testing.assert_close(got, expected / expected.sum())
    assert kernel("epanechnikov?radius=h") == kernel("normrelu")
    assert kernel("gaussian?radius=0.8") == kernel("gaussian_truncated?radius=0.8")
    assert kernel("epanechnikov") != kernel("normrelu")
    assert kernel("epanechnikov") == kernel("sparsemax")


def test_aliases_are_unique_and_resolve():
    names = [n for key, row in KERNELS.items() for n in (key, *row.aliases)]
    assert len(names) == len(set(names))
    assert {"softmax", "sparsemax", "entmax15", "entmax43", "topk_uniform", "topk_softmax"} <= set(names)
    for key, row in KERNELS.items():
        assert all(kernel(alias) == row.kernel for alias in row.aliases), key


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: kernel("sparsmax"), ValueError, "known: gaussian, softmax, epanechnikov"),
        (lambda: kernel("biwieght"), ValueError, "'biwieght'; did you mean 'biweight'\\?"),
        (lambda: kernel("biweight", alpha=1.2), ValueError, "takes radius"),
        (lambda: kernel("entmax15", alpha=1.2), ValueError, "takes no parameter"),
        (lambda: kernel("sparsemax?radius=1"), ValueError, "'sparsemax' takes no parameter, got 'radius'"),
        (lambda: kernel("relumax", alpha=1.2), ValueError, "takes margin"),
        (lambda: kernel("relumax?margin=0"), ValueError, "> 0"),
        (lambda: kernel("relumax", margin=math.inf), ValueError, "finite"),
        (lambda: kernel("relumax", margin=math.nan), ValueError, "> 0"),
        (lambda: kernel("relumax?margin=two"), ValueError, "must be a number"),
        (lambda: kernel("relumax?margin"), ValueError, "parameter=value"),
        (lambda: kernel("relumax?margin=1&margin=2"), ValueError, "twice"),
        (lambda: kernel("relumax?margin=1", margin=2.0), ValueError, "twice"),
        (lambda: kernel("relumax", margin="1"), TypeError, "number or a tensor"),
        (lambda: kernel("entmax", alpha=0), ValueError, "alpha must be > 0"),
        (lambda: kernel("entmax", alpha=math.inf), ValueError, "alpha must be > 0"),
        (lambda: kernel("entmax", alpha=torch.tensor([1.5, -2.1])), ValueError, "alpha must be > 0"),
        (lambda: kernel("normmax", alpha=1), ValueError, "> 1 for normmax"),
        (lambda: kernel("normmax", alpha=torch.tensor([2, 0.9])), ValueError, "> 1 for normmax"),
        (lambda: kernel("normmax", margin=1.0), ValueError, "'normmax' takes alpha, got 'margin'"),
        (lambda: kernel("entmax", alpha=torch.tensor([1, 2])), TypeError, "floating-point"),
        (lambda: kernel("relumax", margin=torch.tensor([1.0, -1.0])), ValueError, "> 0"),
        (lambda: kernel("relumax", margin=torch.tensor([1.0, 0.0])), ValueError, "from 0.0 to 1.0"),
        (lambda: kernel("relumax", margin=torch.tensor(math.inf)), ValueError, "finite"),
        (lambda: kernel("relumax?margin=1e300"), ValueError, "finite in float32"),
        (lambda: kernel("relumax?margin=1e-300"), ValueError, "> 0, finite in float32"),
        (lambda: kernel("power?r=1e20"), ValueError, "≤ 2⁶⁰"),
        (lambda: kernel("normrelu?radius=1e20"), ValueError, "≤ 2⁶⁰"),
        (lambda: kernel("normrelu", radius="wide"), TypeError, "radius must be a number, got str"),
        (lambda: kernel("knn_gaussian", k=0), ValueError, "≥ 1"),
        (lambda: kernel("knn_gaussian?k=1.5"), TypeError, "integer"),
        (lambda: kernel("normrelu?radius=-1"), ValueError, "> 0"),
        (lambda: kernel("power?r=2&margin=1&k=3"), ValueError, "at most one"),
        (lambda: kernel("exp?r=2"), ValueError, "takes radius, margin, k"),
        (lambda: kernel(3), TypeError, "name or a Kernel"),
        (lambda: kernel(kernel("relumax"), margin=2.0), TypeError, "already has"),
        (lambda: Kernel(Exp(), UnitMass()), ValueError, "UnitMass goes with Power"),
        (lambda: Kernel(Exp(), UnitNorm()), ValueError, "UnitNorm goes with Power"),
        (lambda: Kernel(Power(0), UnitMass()), ValueError, "r > 0"),
        (lambda: Kernel(Power(torch.tensor([0.5])), UnitMass()), ValueError, "give alpha instead"),
        (lambda: Kernel(Power(torch.tensor([2.0])), UnitNorm()), ValueError, "needs the UnitMass"),
        (lambda: Kernel(Power(-2), WithinMargin()), ValueError, "needs the UnitMass rule"),
        (lambda: Kernel(Power(-2), UnitNorm()), ValueError, "needs the UnitMass rule"),
        (lambda: Kernel(Power(1), Everywhere()), ValueError, "Exp only"),
        (lambda: Kernel(Power(1), Nearest(3)), ValueError, "Nearest goes with"),
        (lambda: Kernel(Power(torch.tensor([1.0])), WithinMargin()), ValueError, "needs the UnitMass"),
        (lambda: Kernel(Power(1), "margin"), TypeError, "support rule"),
        (lambda: Power(-1), ValueError, "≥ 0"),
        (lambda: WithinRadius(True), TypeError, "number"),
    ],
)
def test_errors_say_the_domain(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("name", ["relumax?margin=3e38", "power?r=3&margin=1e38", "normrelu?radius=1e18"])
def test_a_neighbourhood_of_everything_weighs_all_alike(name):
    for scale in (1.0, 1e10):
        w = parzen.weights(torch.tensor([1.0, 0.5, -1.0]), name, scale=scale)
        torch.testing.assert_close(w, torch.full((3,), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_exponent_is_softmax(dtype):
    s = torch.randn(5, 9, dtype=dtype)
    torch.testing.assert_close(parzen.weights(s, "power?r=1e18"), s.softmax(-1))


COSINES = [0.9, 0.7, 0.2, -0.5]
E2 = math.exp(2)
# Weights by scale = 1/h², to six digits.
VALUES = [
    ("gaussian", 1, [0.390333, 0.319578, 0.193834, 0.096255]),
    ("gaussian", 2, [0.505631, 0.338935, 0.124687, 0.030747]),
    ("gaussian", E2, [0.810478, 0.184900, 0.004596, 0.000026]),
    ("epanechnikov", 1, [0.6, 0.4, 0, 0]),
    ("epanechnikov", 2, [0.7, 0.3, 0, 0]),
    ("epanechnikov", E2, [1, 0, 0, 0]),
    ("biweight", 1, [0.501619, 0.369969, 0.128344, 0.000068]),
    ("biweight", 2, [0.634660, 0.355998, 0.009342, 0]),
    ("biweight", E2, [0.945496, 0.054504, 0, 0]),
    ("triweight", 1, [0.461808, 0.352326, 0.157133, 0.028733]),
    ("triweight", 2, [0.593947, 0.353773, 0.052280, 0]),
    ("triweight", E2, [0.895363, 0.104637, 0, 0]),
    ("relumax", 1, [0.476190, 0.380952, 0.142857, 0]),
    ("relumax", 2, [0.625, 0.375, 0, 0]),
    ("relumax", E2, [1, 0, 0, 0]),
    ("normrelu", 1, [0.666667, 0.333333, 0, 0]),
    ("normrelu", 2, [1, 0, 0, 0]),
    ("normrelu", E2, [0, 0, 0, 0]),
    ("knn_gaussian?k=2", 1, [0.549834, 0.450166, 0, 0]),
    ("knn_gaussian?k=2", 2, [0.598688, 0.401312, 0, 0]),
    ("knn_gaussian?k=2", E2, [0.814242, 0.185758, 0, 0]),
]


@pytest.mark.parametrize(("name", "scale", "expected"), VALUES)
def test_values(name, scale, expected):
    w = parzen.weights(torch.tensor(COSINES, dtype=torch.float64), name, scale=scale)
    torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(
    ("name", "scale", "tau", "bandwidth"),
    [
        ("epanechnikov", 1, 0.3, 1.183216),
        ("epanechnikov", 2, 1.1, 0.948683),
        ("epanechnikov", E2, None, 0.686054),
        ("biweight", 1, -0.258251, 1.741552),
        ("biweight", 2, None, 1.339146),
        ("biweight", E2, None, 0.852280),
        ("triweight", 1, -0.472954, 2.199483),
        ("triweight", 2, None, 1.649776),
        ("triweight", E2, None, 0.991282),
    ],
)
def test_thresholds_and_bandwidths(name, scale, tau, bandwidth):
    # Unit vectors in the plane at the given cosines from the query.
    key = torch.tensor([[c, math.sqrt(1 - c * c)] for c in COSINES], dtype=torch.float64)
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    row = parzen.attention_weights(query, key, kernel=name, scale=float(scale))
    assert row.bandwidth.item() == pytest.approx(bandwidth, abs=5.1e-7)
    if tau is not None:
        assert row.tau.item() == pytest.approx(tau, abs=5.1e-7)


def call(k, **options):
    q = torch.linspace(-1, 1, 2 * 5 * 4, dtype=torch.float64).sin().reshape(1, 2, 5, 4)
    return parzen.attention(3 * q, q, q.cos(), kernel=k, **options)


@pytest.mark.parametrize(("name", "parameter", "new"), [("entmax", "alpha", 1.8), ("relumax", "margin", 0.3)])
def test_a_tensor_parameter_is_read_at_each_use(name, parameter, new):
    value = torch.nn.Parameter(torch.tensor([1.3, 1.3], dtype=torch.float64))
    k = kernel(name, **{parameter: value})
    assert k.learned == (parameter, value)
    before = str(k), hash(k)
    for _ in range(2):
        call(k).square().sum().backward()
    old = call(k).detach()
    torch.testing.assert_close(old, call(kernel(name, **{parameter: 1.3})))
    with torch.no_grad():
        value.fill_(new)
    torch.testing.assert_close(call(k), call(kernel(name, **{parameter: new})))
    assert (str(k), hash(k)) == before
    assert (call(k) - old).abs().max() > 1e-3


def test_the_gradient_of_alpha_is_that_of_the_weights():
    alpha = torch.tensor([1.3, 1.7], dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(call(kernel("entmax", alpha=alpha)).sin().sum(), alpha)
    for h, a in enumerate((1.3, 1.7)):
        up, down = (call(kernel("entmax", alpha=a + d))[:, h].sin().sum() for d in (1e-5, -1e-5))
        assert got[h].item() == pytest.approx(((up - down) / 2e-5).item(), rel=1e-6)


def test_scalars_of_numpy_are_numbers():
    for name, value in [
        ("entmax?alpha", np.float64(1.3)), ("entmax?alpha", np.float32(1.25)),
        ("relumax?margin", np.float32(2)),
        ("normrelu?radius", np.float16(0.5)), ("knn_gaussian?k", np.int64(3)), ("power?r", np.int32(2)),
    ]:  # fmt: skip
        base, _, parameter = name.partition("?")
        got, expected = kernel(base, **{parameter: value}), kernel(base, **{parameter: value.item()})
        assert got == expected
        assert str(got) == str(expected)
        torch.testing.assert_close(call(got), call(expected), rtol=0, atol=0)
    assert Nearest(np.int64(3)) == Nearest(3)
    assert type(Nearest(np.int64(3)).k) is int
    options = {"scale": np.float32(0.5), "window": (np.int64(2), np.int32(0)), "is_causal": np.bool_(True)}
    plain = {"scale": 0.5, "window": (2, 0), "is_causal": True}
    for name in NAMES:
        torch.testing.assert_close(call(name, **options), call(name, **plain), rtol=0, atol=0)
    s = torch.linspace(-1, 1, 6).reshape(2, 3)
    got = parzen.weights(s, "biweight", dim=np.int64(0), scale=np.float32(2))
    torch.testing.assert_close(got, parzen.weights(s, "biweight", dim=0, scale=2.0), rtol=0, atol=0)
    for wrong in (np.bool_(True), np.float64(1.5)):
        with pytest.raises(TypeError, match="integer"):
            Nearest(wrong)
    with pytest.raises(TypeError, match="True or False"):
        call("gaussian", is_causal=np.int64(1))


def test_a_sparse_mask_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="attn_mask must be a dense tensor"):
        call("biweight", attn_mask=torch.ones(5, 5).to_sparse())
