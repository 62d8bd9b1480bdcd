"""The names, arguments and layouts of the ``entmax`` package, on parzen's weight maps and losses.

    from parzen.integrations.entmax import entmax15, Entmax15Loss       # was: from entmax import …

All of its functions, modules and losses. Three of its arguments steer algorithms that are not used here; they
are taken and change nothing: ``k`` (how many entries to sort first), ``n_iter`` (steps of bisection) and
``ensure_sum_one`` (weights always sum to 1).

What is different: a row with nothing allowed (all −∞) is 0, not NaN; α = 1 is softmax, not NaN; α has a
gradient in the losses and in normmax too, and may be an ``nn.Parameter`` of a module; a loss function returns
a pair only with ``return_support_size``; targets of −100 are passed over, as by ``torch``; half precision is
computed in float32; derivatives of any order.

Source of the interface: https://github.com/deep-spin/entmax
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parzen import kernels
from parzen.attention import weights
from parzen.backends import reference
from parzen.kernels import Kernel, Number, kernel, plain, readable
from parzen.losses import fenchel_young

# ---- weight maps ---------------------------------------------------------------------------------


def _number(alpha: Any, least: float = 0.0) -> Any:
    """α as a float where that loses nothing, at ``least``."""
    if not isinstance(alpha, Tensor):
        return max(plain(alpha), least)
    alpha = alpha if alpha.is_floating_point() else alpha.to(torch.get_default_dtype())
    alpha = alpha.clamp_min(least) if least else alpha
    return alpha.item() if alpha.numel() == 1 and readable(alpha) and not alpha.requires_grad else alpha


def _entmax(alpha: Any) -> Kernel:
    return kernel("entmax", alpha=_number(alpha))


def _normmax(alpha: Any) -> Kernel:
    # At α ≤ 1 a vertex has the least norm: the best entry alone, or its equals.
    dtype = alpha.dtype if isinstance(alpha, Tensor) and alpha.is_floating_point() else torch.float64
    return kernel("normmax", alpha=_number(alpha, 1 + torch.finfo(dtype).eps))


def _mapped(X: Tensor, chosen: str | Kernel, dim: int, return_support_size: bool = False) -> Any:
    p = weights(X, chosen, dim)
    return (p, (p > 0).sum(dim, keepdim=True)) if return_support_size else p


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False) -> Any:
    """The nearest distribution to X along ``dim``: argmin_p ‖p − X‖, p ≥ 0, Σ p = 1.

    With ``return_support_size`` a pair: the weights, and how many of them are not 0 (size 1 along ``dim``).
    """
    return _mapped(X, "epanechnikov", dim, return_support_size)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False) -> Any:
    """1.5-entmax: argmax_p p·X + H_1.5(p), p ≥ 0, Σ p = 1. ``return_support_size`` as for ``sparsemax``."""
    return _mapped(X, "biweight", dim, return_support_size)


def sparsemax_bisect(
    X: Tensor, dim: int = -1, n_iter: int | None = 50, ensure_sum_one: bool = True
) -> Tensor:
    """As ``sparsemax``."""
    return weights(X, "epanechnikov", dim)


def entmax_bisect(
    X: Tensor, alpha: Number = 1.5, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True
) -> Tensor:
    """α-entmax: argmax_p p·X + H_α(p), p ≥ 0, Σ p = 1; α > 0, with a gradient.

    ``alpha`` is a number, or a tensor that broadcasts to X with size 1 along ``dim``.
    """
    return weights(X, _entmax(alpha), dim)


def normmax_bisect(X: Tensor, alpha: Number = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """argmax_p p·X − ‖p‖_α, p ≥ 0, Σ p = 1; ``alpha`` as for ``entmax_bisect``.

    At α ≤ 1 that is the best entry alone.
    """
    return weights(X, _normmax(alpha), dim)


def budget_bisect(X: Tensor, budget: Number = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """The nearest point to X with 0 ≤ p ≤ 1 and Σ p = ``budget`` along ``dim``: p = clamp(X − τ, 0, 1).

    τ is found exactly: Σ p is linear between the points X_j and X_j − 1. Entries of −∞ get 0.

    Args:
        budget: a number in [0, n], or a tensor of them that broadcasts to X with size 1 along ``dim``; it
            has a gradient, too.

    Raises:
        ValueError: a budget that n entries cannot hold.
    """
    n = X.shape[dim]
    budget = plain(budget)
    kernels.check("budget", budget.double() if isinstance(budget, Tensor) else budget, 0, n, f"in [0, {n}]")
    x = X.to(reference.compute_dtype(X.dtype)).movedim(dim, -1)
    wanted = torch.as_tensor(budget, dtype=x.dtype, device=x.device)
    wanted = wanted.expand(*X.shape[:dim], 1, *X.shape[dim:][1:]).movedim(dim, -1)
    with torch.no_grad():
        # Entries of −∞ wait below all others.
        allowed = x > -torch.inf
        low = torch.where(allowed, x, torch.inf).amin(-1, keepdim=True)
        spots = torch.where(allowed, x, torch.where(low < torch.inf, low, 0) - 2)
        ends, order = torch.cat((spots, spots - 1), -1).sort(-1, descending=True)
        count = torch.where(order < n, 1, -1).cumsum(-1)
        mass = (count[..., :-1] * (ends[..., :-1] - ends[..., 1:])).cumsum(-1)
        at = (mass <= wanted).sum(-1, keepdim=True)
        held = torch.cat((torch.zeros_like(wanted), mass), -1).gather(-1, at)
        slope = count.gather(-1, at)
        tau = ends.gather(-1, at) - torch.where(slope > 0, (wanted - held) / slope.clamp_min(1), 0)
        full = (x - tau >= 1) & allowed
        part = (x > tau) & ~full & allowed
    # The same τ, of what it depends on.
    size = part.sum(-1, keepdim=True).clamp_min(1)
    tau = (torch.where(part, x, 0).sum(-1, keepdim=True) + full.sum(-1, keepdim=True) - wanted) / size
    p = torch.where(part, torch.where(part, x, 0) - tau, full.to(x.dtype))
    best = x.amax(-1, keepdim=True)
    p = torch.where(best.isnan() | (best == torch.inf), torch.nan, p)
    return p.movedim(-1, dim).to(X.dtype)


# ---- modules -------------------------------------------------------------------------------------


class Sparsemax(nn.Module):
    """``sparsemax`` as a module."""

    def __init__(self, dim: int = -1, k: int | None = None, return_support_size: bool = False) -> None:
        super().__init__()
        self.dim, self.k, self.return_support_size = dim, k, return_support_size

    def forward(self, X: Tensor) -> Any:
        """The weights, or with ``return_support_size`` a pair."""
        return sparsemax(X, self.dim, self.k, self.return_support_size)


class Entmax15(Sparsemax):
    """``entmax15`` as a module."""

    def forward(self, X: Tensor) -> Any:
        """The weights, or with ``return_support_size`` a pair."""
        return entmax15(X, self.dim, self.k, self.return_support_size)


class SparsemaxBisect(nn.Module):
    """``sparsemax_bisect`` as a module."""

    def __init__(self, dim: int = -1, n_iter: int | None = None) -> None:
        super().__init__()
        self.dim, self.n_iter = dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        """The weights."""
        return sparsemax_bisect(X, self.dim, self.n_iter)


class EntmaxBisect(nn.Module):
    """``entmax_bisect`` as a module; α may be a parameter."""

    def __init__(self, alpha: Number = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        """The weights."""
        return entmax_bisect(X, self.alpha, self.dim, self.n_iter)


class NormmaxBisect(nn.Module):
    """``normmax_bisect`` as a module; α may be a parameter."""

    def __init__(self, alpha: Number = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        """The weights."""
        return normmax_bisect(X, self.alpha, self.dim, self.n_iter)


class BudgetBisect(nn.Module):
    """``budget_bisect`` as a module; the budget may be a parameter."""

    def __init__(self, budget: Number = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__()
        self.budget, self.dim, self.n_iter = budget, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        """The weights, of sum ``budget``."""
        return budget_bisect(X, self.budget, self.dim, self.n_iter)


# ---- losses --------------------------------------------------------------------------------------

_REDUCTIONS = {"elementwise_mean": "mean", "mean": "mean", "sum": "sum", "none": "none"}


def _loss(X: Tensor, target: Tensor, chosen: str | Kernel, support: bool = False, **options: Any) -> Any:
    loss = fenchel_young(X, target, chosen, **{"reduction": "none"} | options)
    return (loss, _mapped(X.detach(), chosen, 1, True)[1]) if support else loss


def sparsemax_loss(X: Tensor, target: Tensor, k: int | None = None, return_support_size: bool = False) -> Any:
    """The sparsemax loss of each row of X (N, C) for its class: (N).

    With ``return_support_size`` a pair: the losses, and how many classes have weight (N, 1).
    """
    return _loss(X, target, "epanechnikov", return_support_size)


def entmax15_loss(X: Tensor, target: Tensor, k: int | None = None, return_support_size: bool = False) -> Any:
    """The 1.5-entmax loss of each row, as ``sparsemax_loss``."""
    return _loss(X, target, "biweight", return_support_size)


def sparsemax_bisect_loss(X: Tensor, target: Tensor, n_iter: int = 50) -> Tensor:
    """As ``sparsemax_loss``."""
    return sparsemax_loss(X, target)


def entmax_bisect_loss(X: Tensor, target: Tensor, alpha: Number = 1.5, n_iter: int = 50) -> Tensor:
    """The α-entmax loss of each row; ``alpha`` a number or (N, 1), with a gradient."""
    return _loss(X, target, _entmax(alpha))


def normmax_bisect_loss(X: Tensor, target: Tensor, alpha: Number = 2, n_iter: int = 50) -> Tensor:
    """The loss max_p p·X − ‖p‖_α + 1 − X_y of each row; ``alpha`` a number or (N, 1), with a gradient."""
    return _loss(X, target, _normmax(alpha))


class _Loss(nn.Module):
    """``ignore_index``: a class that counts for nothing. ``reduction``: "elementwise_mean", "sum", "none"."""

    def __init__(self, ignore_index: Any, reduction: str, return_support_size: bool = False) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        self.ignore_index, self.reduction = int(ignore_index), reduction
        self.return_support_size = return_support_size

    def _kernel(self) -> str | Kernel:
        raise NotImplementedError

    def forward(self, X: Tensor, target: Tensor) -> Any:
        """The loss of X (N, C) for classes (N); with ``return_support_size`` a pair."""
        return _loss(
            X, target, self._kernel(), self.return_support_size,
            ignore_index=self.ignore_index, reduction=_REDUCTIONS[self.reduction],
        )  # fmt: skip


class SparsemaxLoss(_Loss):
    """``sparsemax_loss`` as a module."""

    def __init__(
        self,
        k: int | None = None,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
        return_support_size: bool = False,
    ) -> None:
        super().__init__(ignore_index, reduction, return_support_size)
        self.k = k

    def _kernel(self) -> str:
        return "epanechnikov"


class Entmax15Loss(_Loss):
    """``entmax15_loss`` as a module."""

    def __init__(
        self,
        k: int | None = 100,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
        return_support_size: bool = False,
    ) -> None:
        super().__init__(ignore_index, reduction, return_support_size)
        self.k = k

    def _kernel(self) -> str:
        return "biweight"


class SparsemaxBisectLoss(_Loss):
    """``sparsemax_bisect_loss`` as a module."""

    def __init__(
        self, n_iter: int = 50, ignore_index: int = -100, reduction: str = "elementwise_mean"
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.n_iter = n_iter

    def _kernel(self) -> str:
        return "epanechnikov"


class EntmaxBisectLoss(_Loss):
    """``entmax_bisect_loss`` as a module; α may be a parameter."""

    def __init__(
        self,
        alpha: Number = 1.5,
        n_iter: int = 50,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.alpha, self.n_iter = alpha, n_iter

    def _kernel(self) -> Kernel:
        return _entmax(self.alpha)


class NormmaxBisectLoss(_Loss):
    """``normmax_bisect_loss`` as a module; α may be a parameter."""

    def __init__(
        self,
        alpha: Number = 2,
        n_iter: int = 50,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__(ignore_index, reduction)
        self.alpha, self.n_iter = alpha, n_iter

    def _kernel(self) -> Kernel:
        return _normmax(self.alpha)


# ---- thresholds ----------------------------------------------------------------------------------


def _threshold(X: Tensor, name: str, dim: int) -> tuple[Tensor, Tensor]:
    """τ and the support size of p = [X − τ]₊ʳ, Σ p = 1, with size 1 along ``dim``."""
    form = kernels.lower(kernel(name), 1.0)
    w, theta = reference.weight_map(X.detach().movedim(dim, -1) * form.r, form)
    tau, support = theta / form.r, (w > 0).sum(-1, keepdim=True)
    return tau.movedim(-1, dim), support.movedim(-1, dim)


def _sparsemax_threshold_and_support(X: Tensor, dim: int = -1, k: int | None = None) -> tuple[Tensor, Tensor]:
    return _threshold(X, "epanechnikov", dim)


def _entmax_threshold_and_support(X: Tensor, dim: int = -1, k: int | None = None) -> tuple[Tensor, Tensor]:
    """Of X that is already divided by 2."""
    return _threshold(X, "biweight", dim)
