"""Laws that hold for every kernel of the table, and identities between kernels and other people's code."""

import math

import entmax
import pytest
import torch
import torch.nn.functional as F
from kernel_list import COMPACT, NAMES, NEVER_EMPTY

import parzen
from parzen.kernels import KERNELS, UnitMass, WithinRadius
from parzen.testing import bisect_mass, witness_weights


def rows(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_weights_are_a_distribution_or_nothing(name, scale):
    w = parzen.weights(rows(200, 37), name, scale=scale)
    total = w.sum(-1)
    assert (w >= 0).all()
    full = torch.ones_like(total)
    expected = full if name in NEVER_EMPTY else torch.where(total == 0, 0, full)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", NEVER_EMPTY)
def test_a_constant_added_to_the_scores_changes_nothing(name):
    # Quarters and powers of two: the sums are exact, so are the ties.
    s = (rows(50, 23) * 4).round() / 4
    torch.testing.assert_close(parzen.weights(s + 1024, name), parzen.weights(s, name), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_a_permutation_of_the_keys_permutes_the_weights(name):
    s = (rows(50, 40) * 2).round() / 2  # ties among them
    order = torch.randperm(40)
    torch.testing.assert_close(
        parzen.weights(s[:, order], name), parzen.weights(s, name)[:, order], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_better_key_never_gets_less_weight(name):
    s = rows(100, 20).sort(-1).values
    w = parzen.weights(s, name, scale=0.7)
    assert (w.diff(dim=-1) >= -1e-15).all()


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_not_allowed_might_as_well_be_absent(name):
    s = rows(30, 12)
    hidden = torch.cat([s, torch.full((30, 5), -torch.inf, dtype=s.dtype)], -1)
    w = parzen.weights(hidden, name)
    torch.testing.assert_close(w[:, :12], parzen.weights(s, name), rtol=0, atol=1e-15)
    assert (w[:, 12:] == 0).all()


@pytest.mark.parametrize("name", COMPACT)
def test_far_keys_get_exactly_nothing(name):
    s = torch.cat([rows(30, 1), rows(30, 20) - 80], -1)
    if isinstance(parzen.kernel(name).rule, parzen.kernels.Nearest):
        name = f"{name.partition('?')[0]}?k=1"
    w = parzen.weights(s, name)
    assert (w[:, 1:] == 0).all()


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(parzen.kernel(n).rule, UnitMass)])
def test_unit_mass_by_bisection(name):
    s = rows(300, 57) * 3
    r = parzen.kernel(name).profile.r
    tau = bisect_mass(s / r, r)
    expected = (s / r - tau).clamp_min(0) ** r
    torch.testing.assert_close(parzen.weights(s, name), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sparsemax", lambda x: entmax.sparsemax(x, dim=-1)),
        ("entmax15", lambda x: entmax.entmax15(x, dim=-1)),
        ("entmax43", lambda x: entmax.entmax_bisect(x, alpha=4 / 3, dim=-1, n_iter=100)),
        ("entmax?alpha=1.2", lambda x: entmax.entmax_bisect(x, alpha=1.2, dim=-1, n_iter=100)),
    ],
)
def test_the_entmax_package_agrees(name, theirs):
    x = (rows(40, 33) * 2).requires_grad_()
    seed = rows(40, 33)
    ours, peer = parzen.weights(x, name), theirs(x)
    torch.testing.assert_close(ours, peer, rtol=0, atol=1e-9)
    (mine,) = torch.autograd.grad((ours * seed).sum(), x)
    (other,) = torch.autograd.grad((peer * seed).sum(), x)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-8)


def test_the_entmax_package_agrees_on_alpha_per_row():
    x = rows(6, 33)
    alpha = torch.linspace(1.1, 1.9, 6, dtype=torch.float64)[:, None].requires_grad_()
    seed = rows(6, 33)
    ours = parzen.weights(x, parzen.kernel("entmax", alpha=alpha))
    peer = entmax.entmax_bisect(x, alpha=alpha, dim=-1, n_iter=100)
    torch.testing.assert_close(ours, peer, rtol=0, atol=1e-9)
    (mine,) = torch.autograd.grad((ours * seed).sum(), alpha)
    (other,) = torch.autograd.grad((peer * seed).sum(), alpha)
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


def test_sparsemax_of_three_scores_by_hand():
    w = parzen.weights(torch.tensor([1.0, 0.5, -3.0], dtype=torch.float64), "sparsemax")
    torch.testing.assert_close(w, torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-9, 1.0001])
def test_alpha_to_one_is_softmax(dtype, alpha):
    s = rows(50, 64, dtype=dtype)
    exact = witness_weights(s.double(), parzen.kernel("entmax", alpha=alpha)) if alpha > 1.00001 else None
    expected = torch.softmax(s.double(), -1) if exact is None else exact
    for value in (alpha, torch.full((50, 1), alpha, dtype=torch.float64)):
        w = parzen.weights(s, parzen.kernel("entmax", alpha=value))
        torch.testing.assert_close(
            w.double(), expected, rtol=0, atol=1e-7 if dtype == torch.float32 else 5e-9
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.9])
def test_alpha_in_half_precision_is_the_number_it_holds(alpha, dtype):
    s, value = rows(5, 12), torch.tensor(alpha, dtype=dtype, requires_grad=True)
    w = parzen.weights(s, parzen.kernel("entmax", alpha=value))
    torch.testing.assert_close(w, parzen.weights(s, f"entmax?alpha={value.item()}"), rtol=0, atol=1e-6)
    assert torch.autograd.grad(w.square().sum(), value)[0].dtype == dtype


def test_the_gradient_of_alpha_is_continuous_down_to_one():
    s, seed = rows(5, 12), rows(5, 12)

    def slope(alpha):
        a = torch.tensor([[alpha]], dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad((parzen.weights(s, parzen.kernel("entmax", alpha=a)) * seed).sum(), a)[0]

    # At α = 1: ½ p (log²p − Σ p log²p) from the expansion of α-entmax about the softmax, with its sign.
    p = torch.softmax(s, -1)
    z = torch.log(p)
    expected = (-0.5 * p * (z * z - (p * z * z).sum(-1, keepdim=True)) * seed).sum().reshape(1, 1)
    torch.testing.assert_close(slope(1.0), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(slope(1 + 1e-7), expected, rtol=1e-5, atol=1e-8)


def test_relumax_support_is_a_margin_from_the_best():
    """Eq. 22: a key has weight exactly when cos_j > m − b·h²."""
    for margin, scale in [(1.0, 1.0), (0.5, 4.0), (2.0, 7.389)]:
        cosines = torch.rand(200, 30, dtype=torch.float64) * 2 - 1
        w = parzen.weights(cosines, parzen.kernel("relumax", margin=margin), scale=scale)
        best = cosines.amax(-1, keepdim=True)
        assert torch.equal(w > 0, scale * cosines > scale * best - margin)


def test_relumax_is_epanechnikov_with_a_bandwidth_of_its_own():
    """[1 − ‖k−q‖²/H²]₊ with H² = 2(1 − m + b·h²)."""
    q, k = F.normalize(rows(1, 1, 20, 8), dim=-1), F.normalize(rows(1, 1, 30, 8), dim=-1)
    scale, margin = 3.0, 1.3
    cosines = q @ k.mT
    squared = 2 * (1 - cosines.amax(-1, keepdim=True) + margin / scale)
    expected = (1 - torch.cdist(q, k) ** 2 / squared).clamp_min(0)
    got = parzen.attention_weights(q, k, kernel=f"relumax?margin={margin}", scale=scale)
    torch.testing.assert_close(got.weights, expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-12)
    torch.testing.assert_close(got.bandwidth, squared.sqrt()[..., 0])


def test_normrelu_as_its_equation_has_it():
    """Eq. 12: w ∝ [cos/γ₂ + b₂]₊ with γ₂ = h²/2, b₂ = 1 − 2/h²."""
    cosines = torch.rand(100, 30, dtype=torch.float64) * 2 - 1
    for h in (0.7, 1.0, 1.6):
        value = (cosines / (h * h / 2) + 1 - 2 / h**2).clamp_min(0)
        total = value.sum(-1, keepdim=True)
        expected = torch.where(total > 0, value / total, 0)
        got = parzen.weights(cosines, "normrelu", scale=h**-2)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


KERNEL_FUNCTIONS = [
    *[(n, 2.0) for n in NAMES if isinstance(parzen.kernel(n).rule, UnitMass)],
    ("normrelu", 0.8),
    ("uniform", 0.8),
    ("power?r=2&radius=h", 0.8),
    ("relumax", 2.0),
    ("power?r=2&margin=1", 2.0),
]


@pytest.mark.parametrize(("name", "scale"), KERNEL_FUNCTIONS)
def test_weights_are_the_kernel_of_the_distance(name, scale):
    """Proposition 3.1 and its kin: w ∝ [1 − ‖u‖²/H²]₊ʳ at the reported H, which may exceed 2."""
    q, k = F.normalize(rows(2, 3, 11, 6), dim=-1), F.normalize(rows(2, 3, 40, 6), dim=-1)
    got = parzen.attention_weights(q, k, kernel=name, scale=scale)
    r = parzen.kernel(name).profile.r
    inside = 1 - torch.cdist(q, k) ** 2 / got.bandwidth[..., None] ** 2
    value = torch.where(inside > 0, inside, 0) ** r if r else (inside >= 0).double()
    total = value.sum(-1, keepdim=True)
    assert (total > 0).any()
    torch.testing.assert_close(got.weights, torch.where(total > 0, value / total, 0), rtol=0, atol=1e-9)
    assert torch.equal(got.support, (got.weights > 0).sum(-1))


def test_the_gaussian_is_the_limit_of_large_r():
    q, k = F.normalize(rows(1, 1, 5, 6), dim=-1), F.normalize(rows(1, 1, 9, 6), dim=-1)
    expected = torch.softmax(-(torch.cdist(q, k) ** 2) / 2 * 3.0, -1)
    torch.testing.assert_close(parzen.attention_weights(q, k, scale=3.0).weights, expected)
    big = parzen.attention_weights(q, k, kernel="power?r=1000000", scale=3.0).weights
    torch.testing.assert_close(big, expected, rtol=0, atol=1e-5)


def test_keys_of_any_length_by_two_extra_coordinates():
    """q' = [q, 1, 1−½‖q‖²], k' = [k, −½‖k‖², 1] turn the dot product into 1 − ½‖q−k‖²."""
    q, k = rows(1, 1, 20, 3), rows(1, 1, 50, 3)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q2 = torch.cat([q, one.expand(1, 1, 20, 1), 1 - (q * q).sum(-1, keepdim=True) / 2], -1)
    k2 = torch.cat([k, -(k * k).sum(-1, keepdim=True) / 2, one.expand(1, 1, 50, 1)], -1)
    h = 1.5
    distance = torch.cdist(q, k)
    for name, function in [
        ("normrelu", lambda u: (1 - u * u).clamp_min(0)),
        ("gaussian", lambda u: torch.exp(-u * u / 2)),
        ("uniform", lambda u: (u <= 1).double()),
    ]:
        value = function(distance / h)
        total = value.sum(-1, keepdim=True)
        got = parzen.attention_weights(q2, k2, kernel=name, scale=h**-2).weights
        torch.testing.assert_close(got, torch.where(total > 0, value / total, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ties_at_the_kth_score_are_all_kept(dtype):
    s = torch.tensor([3, 1, 2, 1, 1, 0], dtype=dtype)
    w = parzen.weights(s, "knn_uniform?k=3")
    torch.testing.assert_close(w, torch.tensor([1, 1, 1, 1, 1, 0], dtype=dtype) / 5)
    assert (parzen.weights(s, "knn_gaussian?k=3") > 0).tolist() == [True] * 5 + [False]
    assert (parzen.weights(s, "knn_uniform?k=2") > 0).sum() == 2
    assert torch.equal(parzen.weights(s, "knn_uniform?k=9"), torch.full((6,), 1 / 6, dtype=dtype))


def test_fewer_than_k_allowed_keys_are_all_kept():
    s = torch.tensor([1.0, -torch.inf, 3.0, -torch.inf])
    torch.testing.assert_close(parzen.weights(s, "knn_uniform?k=3"), torch.tensor([0.5, 0, 0.5, 0]))


def test_every_row_of_the_table_is_in_the_sweep():
    assert set(KERNELS) <= set(NAMES)
    covered = {(type(parzen.kernel(n).profile), type(parzen.kernel(n).rule)) for n in NAMES}
    assert len(covered) == 8  # every valid cell
    assert any(isinstance(parzen.kernel(n).rule, WithinRadius) for n in NAMES)


def test_the_bandwidth_of_softmax_attention():
    """The customary scale 1/√E is h = E^¼."""
    q, k = rows(1, 1, 4, 16), rows(1, 1, 6, 16)
    torch.testing.assert_close(
        parzen.attention_weights(q, k).weights, parzen.attention_weights(q, k, scale=(16**0.25) ** -2).weights
    )
    assert math.isinf(parzen.attention_weights(q, k).bandwidth.amin())
