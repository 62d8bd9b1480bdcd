"""parzen.integrations.entmax: the entmax package's interface, values and gradients."""

import inspect

import entmax as theirs
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from parzen.integrations import entmax as ours

INF = torch.inf
FUNCTIONS = ["sparsemax", "entmax15", "sparsemax_bisect", "entmax_bisect", "normmax_bisect", "budget_bisect"]
LOSSES = ["sparsemax", "entmax15", "sparsemax_bisect", "entmax_bisect", "normmax_bisect"]
MODULES = ["Sparsemax", "Entmax15", "SparsemaxBisect", "EntmaxBisect", "NormmaxBisect", "BudgetBisect"]
LOSS_MODULES = [
    f"{name}Loss" for name in ("Sparsemax", "Entmax15", "SparsemaxBisect", "EntmaxBisect", "NormmaxBisect")
]


def test_every_public_name_is_here_with_its_arguments():
    names = [n for n, x in vars(theirs).items() if callable(x) and not n.startswith("_")]
    assert len(names) >= 20
    for name in names:
        mine, other = (inspect.signature(getattr(m, name)).parameters.values() for m in (ours, theirs))
        for a, b in zip(mine, other, strict=False):
            assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind), name
        assert len(mine) >= len(other), name
    for name in (*FUNCTIONS, *(f"{n}_loss" for n in LOSSES), *MODULES, *LOSS_MODULES):
        assert callable(getattr(ours, name))


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_modules_give_what_theirs_give(name, dim):
    torch.manual_seed(0)
    X = 2 * torch.randn(4, 6, 5, dtype=torch.float64)
    module = "".join(part.capitalize() for part in name.split("_"))
    for f in (getattr(ours, name), getattr(ours, module)(dim=dim)):
        a, b = (X.clone().requires_grad_() for _ in range(2))
        got = f(a) if isinstance(f, torch.nn.Module) else f(a, dim=dim)
        expected = getattr(theirs, name)(b, dim=dim)
        assert_close(got, expected, atol=1e-9, rtol=1e-9)
        dp = torch.randn_like(X)
        da, db = (torch.autograd.grad(p, x, dp)[0] for p, x in ((got, a), (expected, b)))
        assert_close(da, db, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("alpha", [0.5, 1.3, 2, 2.5, torch.tensor([[0.4], [1.5], [2], [3.0]])])
def test_entmax_bisect_of_any_alpha(alpha):
    torch.manual_seed(0)
    X = torch.randn(4, 6, dtype=torch.float64)
    alpha = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
    a, b = (X.clone().requires_grad_() for _ in range(2))
    got, expected = ours.entmax_bisect(a, alpha), theirs.entmax_bisect(b, alpha)
    assert_close(got, expected, atol=1e-9, rtol=1e-9)
    da, db = (torch.autograd.grad(p.square().sum(), x)[0] for p, x in ((got, a), (expected, b)))
    assert_close(da, db, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("reduction", ["none", "sum", "elementwise_mean"])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("name", LOSS_MODULES)
def test_losses_are_theirs(name, ignored, reduction):
    torch.manual_seed(0)
    X, y = torch.randn(20, 5, dtype=torch.float64), torch.randint(5, (20,))
    a, b = (X.clone().requires_grad_() for _ in range(2))
    options = {"reduction": reduction, "ignore_index": ignored}
    got, expected = (getattr(m, name)(**options)(x, y) for m, x in ((ours, a), (theirs, b)))
    assert_close(got, expected, atol=1e-10, rtol=1e-10)
    da, db = (torch.autograd.grad(loss.sum(), x)[0] for loss, x in ((got, a), (expected, b)))
    assert_close(da, db, atol=1e-9, rtol=1e-9)


def test_values_by_hand():
    cosines = torch.tensor([0.9, 0.7, 0.2, -0.5])
    assert_close(ours.sparsemax(cosines), torch.tensor([0.6, 0.4, 0.0, 0.0]))
    # y₁² + y₂² = 1 and y₁ − y₂ = 0.2.
    assert_close(ours.normmax_bisect(torch.tensor([0.2, 0.0])), torch.tensor([4 / 7, 3 / 7]))
    X = torch.tensor([1.2, 0.4, 0.1, -0.3])
    held = [0, 0, 0, 0], [0.9, 0.1, 0, 0], [1, 0.65, 0.35, 0], [1, 1, 0.7, 0.3], [1, 1, 1, 1]
    for budget, expected in enumerate(held):
        assert_close(ours.budget_bisect(X, budget), torch.tensor(expected).float())


def test_support_sizes():
    X = torch.tensor([[0.9, 0.7, 0.2, -0.5], [5.0, 0.0, 0.0, 0.0]])
    y = torch.tensor([0, 1])
    for f, loss, Module, Loss, sizes in (
        (ours.sparsemax, ours.sparsemax_loss, ours.Sparsemax, ours.SparsemaxLoss, [2, 1]),
        (ours.entmax15, ours.entmax15_loss, ours.Entmax15, ours.Entmax15Loss, [4, 1]),
    ):
        p, size = f(X, return_support_size=True)
        assert_close(p, f(X))
        assert size.tolist() == [[n] for n in sizes]
        p, size = f(X.T, dim=0, k=3, return_support_size=True)
        assert size.tolist() == [sizes]
        assert Module(return_support_size=True)(X)[1].tolist() == [[n] for n in sizes]
        value, size = loss(X, y, return_support_size=True)
        assert_close(value, loss(X, y, k=2))
        assert size.tolist() == [[n] for n in sizes]
        mean, size = Loss(return_support_size=True)(X, y)
        assert_close(mean, value.mean())


def test_what_is_better_here():
    X = torch.full((2, 4), -INF)
    X[1, 0] = 1.0
    for name in FUNCTIONS[:-1]:
        assert getattr(ours, name)(X).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert ours.budget_bisect(X, 1).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    Z = torch.randn(3, 5, dtype=torch.float64)
    assert_close(ours.entmax_bisect(Z, alpha=1), Z.softmax(-1))
    # The limit of normmax at 1 and below: the best entry, or its equals.
    tied = torch.tensor([[1.0, 1.0, 0.5], [0.3, 0.9, 0.2]])
    for alpha in (1, 0.5, torch.tensor([[1.0], [0.2]])):
        assert_close(ours.normmax_bisect(tied, alpha), torch.tensor([[0.5, 0.5, 0], [0, 1, 0]]))
    alpha = torch.nn.Parameter(torch.tensor(1.4))
    for Module in (ours.EntmaxBisect, ours.NormmaxBisect, ours.EntmaxBisectLoss, ours.NormmaxBisectLoss):
        module = Module(alpha)
        assert list(module.parameters()) == [alpha]
        out = module(Z.float(), torch.tensor([0, 1, 2])) if "Loss" in Module.__name__ else module(Z.float())
        assert torch.autograd.grad(out.square().sum(), alpha)[0].abs() > 0
    y = torch.tensor([0, -100, 2])
    assert ours.Entmax15Loss(reduction="none")(Z, y)[1] == 0


def test_a_budget_and_its_derivatives():
    torch.manual_seed(0)
    X = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    budget = torch.tensor([[0.5], [2.4], [3.3], [6.1]], dtype=torch.float64, requires_grad=True)
    p = ours.budget_bisect(X, budget)
    assert_close(p.sum(-1, keepdim=True), budget)
    # p = clamp(X − τ, 0, 1) for one τ a row.
    inside = (p > 0) & (p < 1)
    tau = torch.where(inside, X - p, torch.nan).nanmean(-1, keepdim=True)
    assert_close((X - tau).clamp(0, 1), p)
    assert gradcheck(ours.budget_bisect, (X, budget))
    assert gradgradcheck(ours.budget_bisect, (X, budget))
    assert_close(ours.budget_bisect(X.T, budget.T, dim=0), p.T)
    hidden = torch.cat((X, torch.full((4, 2), -INF, dtype=X.dtype)), 1)
    assert_close(ours.budget_bisect(hidden, budget)[:, :7], p)
    assert ours.budget_bisect(torch.tensor([[1.0, torch.nan], [INF, 0]]), 1).isnan().all()
    for wrong in (-1, 8, torch.tensor(7.5)):
        with pytest.raises(ValueError, match=r"budget must be in \[0, 7\]"):
            ours.budget_bisect(X, wrong)
    with pytest.raises(ValueError, match="reduction must be one of"):
        ours.SparsemaxLoss(reduction="average")
