"""Losses whose gradient is weights − target: cross-entropy for every kernel with a unit mass (Fenchel–Young).

    p = weights(z)      L(z; y) = Σ_j p_j z_j + H(p) − z_y      H(p) = Σ_j (p_j − p_jᵅ) / (α(α − 1))

α = 1 + 1/r; at α = 1 H is Shannon's entropy, p softmax and L cross-entropy. For normmax H(p) = 1 − ‖p‖_α.
L ≥ 0, and 0 exactly where p_y is 1: a compact kernel is satisfied with a finite margin.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen import kernels
from parzen.attention import weights
from parzen.backends import output
from parzen.backends.output import best_sums
from parzen.backends.reference import compute_dtype
from parzen.call import autocasts, check_tensor, check_together, fits, forbid
from parzen.kernels import Kernel, Number, UnitNorm, lower, plain, readable

REDUCTIONS = ("mean", "sum", "none")


def excess(chosen: Kernel) -> Number:
    """α − 1 = 1/r of the entropy that goes with the kernel's weights; a tensor where α is one.

    Raises:
        ValueError: the kernel's weights are not the maximiser of a score with an entropy.
    """
    form = lower(chosen, 1.0)
    if form.rule == kernels.EVERYWHERE:
        return 0.0
    if form.rule not in (kernels.UNIT_MASS, kernels.UNIT_NORM):
        raise ValueError(
            f"{chosen} has no such loss: its weights do not maximise a score plus an entropy. Take gaussian, "
            "epanechnikov, biweight, triweight, entmax?alpha=… or normmax?alpha=…"
        )
    return 1 / form.r


# Below this the chance of the other classes is a series of its own.
_NEAR = 0.1


def _remainder(others: Tensor, a: Number) -> Tensor:
    """(1 − (1 − P)ᵃ)/a − P for P·max(1, a) ≤ 0.1, where it cancels: Σ_k Π_{i<k}(i − a)/k! · Pᵏ, k ≥ 2."""
    terms = 17 if others.dtype == torch.float64 else 9
    # By Horner: the k-th term is the one before it times P·(k − 1 − a)/k.
    total = torch.zeros_like(others)
    for k in range(terms, 2, -1):
        total = (1 + total) * others * ((k - 1 - a) / k)
    return (1 + total) * others * others * ((1 - a) / 2)


def best_loss(p: Tensor, at: Tensor, a: Number, norm: bool) -> Tensor:
    """L(z; m) of the best class m (its number is ``at``) from the weights alone, along the last axis.

    With P = Σ_{j≠m} p_j and d = (1 − p_mᵃ)/a, where no term is negative for a ≤ 1 and nothing cancels:

        (1 + a)·L = Σ_{j≠m} p_j^{1+a} + a·P·d + (d − P)

    For normmax (``norm``) it is 1 − (s_m − τ), where (s_m − τ)^{(1+a)/a} is the share of p_m^{1+a} in
    Σ p^{1+a}. The loss of any other class is L(z; y) = L(z; m) + (z_m − z_y).
    """
    return _from_sums(*best_sums(p, at, a, norm), a, norm)


def _from_sums(largest: Tensor, others: Tensor, powers: Tensor, a: Number, norm: bool) -> Tensor:
    if norm:
        return -torch.expm1(-torch.log1p(powers) * (a / (1 + a)))
    # Of the largest weight only where the others are not small: near 1 its logarithm has few digits.
    logs = torch.where(others < 0.5, torch.log1p(-others), torch.log(largest))
    if isinstance(a, Tensor):
        far = torch.where(a == 0, -logs, -torch.expm1(a * logs) / torch.where(a == 0, 1, a))
        near = others * a.clamp_min(1) <= _NEAR
    else:
        far = -torch.expm1(a * logs) / a if a else -logs
        near = others * max(1, a) <= _NEAR
    beyond = torch.where(near, _remainder(torch.where(near, others, 0), a), far - others)
    distance = others + beyond
    return ((powers + a * others * distance + beyond) / (1 + a)).clamp_min(0)


def _entropy_slope(p: Tensor, a: Number, norm: bool) -> Tensor:
    """dH/dα at fixed p: −Σ p ℓ (ℓ·F(aℓ)/(1+a) + E(aℓ)/(1+a)²) with ℓ = −log p, along the last axis.

    E(x) = (1 − e⁻ˣ)/x and F = −E', by their series where the terms cancel. For normmax, with S = Σ pᵅ:
    ‖p‖_α·(log S/α + Σ pᵅ ℓ/S)/α.
    """
    ell = -torch.log(torch.where(p > 0, p, 1))
    x = a * ell
    if norm:
        # Relative to the best class, whose power may underflow.
        best = p.amax(-1, keepdim=True)
        behind = torch.where(p > 0, ell + torch.log(best), 0)
        power = torch.where(p > 0, torch.exp(-(1 + a) * behind), 0)
        total = power.sum(-1, keepdim=True)
        mean = (power * behind).sum(-1, keepdim=True) / total
        root = torch.log(total) / (1 + a)
        return best * torch.exp(root) * (root + mean) / (1 + a)
    near = x.abs() < 0.5
    small, large = torch.where(near, x, 0), torch.where(near, 1, x)
    e_series, f_series = torch.zeros_like(x), torch.zeros_like(x)
    # Σ_k (−x)ᵏ/(k+1)! and Σ_k (k+1)(−x)ᵏ/(k+2)!, by Horner.
    for k in range(16, 0, -1):
        e_series = (1 + e_series) * (-small / (k + 1))
        f_series = (1 + f_series) * (-small * (k + 1) / (k * (k + 2)))
    e = torch.where(near, 1 + e_series, -torch.expm1(-large) / large)
    f = torch.where(near, (1 + f_series) / 2, (1 - (1 + large) * torch.exp(-large)) / (large * large))
    return -(p * ell * (ell * f / (1 + a) + e / (1 + a) ** 2)).sum(-1, keepdim=True)


class _Loss(torch.autograd.Function):
    """mass·L(z; m) + gap, with the gradients of mass·(Σ p z + H(p)) − linear.

    ``gap`` = Σ_c q_c (z_m − z_c) and ``linear`` = Σ_c q_c z_c for a target q of the mass Σ q: the value is
    made of terms that do not cancel, the gradients are mass·p for z and −q by way of ``linear``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor, p: Tensor, a: Number, at: Tensor, mass: Tensor, gap: Tensor, linear: Tensor, norm: bool
    ) -> Tensor:
        return mass * best_loss(p, at, a, norm) + gap

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, p, a, at, mass, _, _, ctx.norm = inputs
        ctx.a = None if isinstance(a, Tensor) else a
        ctx.save_for_backward(z, p, a if isinstance(a, Tensor) else None, at, mass)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, p, a, at, mass = ctx.saved_tensors
        a = ctx.a if a is None else a
        da = dmass = None
        if ctx.needs_input_grad[2]:
            da = (g * mass * _entropy_slope(p, a, ctx.norm)).sum_to_size(a.shape)
        if ctx.needs_input_grad[4]:
            # Σ p z + H(p) = L(z; m) + z_m, whose gradient is p.
            zero = torch.zeros_like(mass)
            least = _Loss.apply(z, p, a, at, torch.ones_like(mass), zero, zero, ctx.norm)
            dmass = g * (least + z.detach().gather(-1, at))
        return g * mass * p, None, da, None, dmass, None, -g, None


def _check_options(reduction: str, label_smoothing: float, ignore_index: int) -> tuple[float, int]:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    label_smoothing, ignore_index = plain(label_smoothing), plain(ignore_index)
    kernels.check("label_smoothing", label_smoothing, 0, 1, "in [0, 1]", tensors=False)
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}")
    return float(label_smoothing), ignore_index


def _check_classes(target: Tensor, valid: Tensor, classes: int) -> None:
    if readable(target) and target.numel():
        chosen = target[valid]
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < classes:
            raise ValueError(
                f"target must hold classes 0 … {classes - 1} or ignore_index, got values from "
                f"{int(chosen.min())} to {int(chosen.max())}"
            )


def _reduce(loss: Tensor, total: Tensor | int, reduction: str, dtype: torch.dtype) -> Tensor:
    if reduction == "none":
        return loss.to(dtype)
    return (loss.sum() if reduction == "sum" else loss.sum() / total).to(dtype)


def fenchel_young(
    scores: Tensor,
    target: Tensor,
    kernel: str | Kernel = "biweight",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The Fenchel–Young loss L(z; y) = Σ_j p_j z_j + H_α(p) − z_y with p = weights(z), ∇_z L = p − e_y.

    A drop-in for ``torch.nn.functional.cross_entropy``, which it equals for the Gaussian. L ≥ 0, and 0
    exactly where p_y = 1: with a compact kernel at a finite margin, z_y − z_j ≥ 1/(α − 1) for all others.

    Args:
        scores: (C), (N, C) or (N, C, d₁, …), floating. −∞ is a class that is not possible.
        target: class numbers, () or (N) or (N, d₁, …); or class probabilities q of the shape of ``scores``:
            the loss is then Σ_c q_c L(z; c) = L(z; q) + H_α(q), as cross-entropy is, with the gradient p − q.
        kernel: a name or a ``Kernel`` with unit mass (epanechnikov, biweight, triweight, entmax), normmax, or
            the Gaussian. α as a tensor, with a gradient: one number for each slice along the classes, of
            size 1 there, or a single number.
        weight: (C), a factor for each class.
        ignore_index: a class number that counts for nothing; with class numbers only.
        reduction: "mean" (over the weights of the classes that count, with class numbers), "sum" or "none".
        label_smoothing: ε in [0, 1]: the target becomes (1 − ε)·target + ε/C.

    Returns:
        A number, or (N, d₁, …) with ``reduction="none"``, of the dtype of ``scores`` (float32 at least under
        autocast). Narrow types are computed in float32. Derivatives of any order.

    Raises:
        ValueError, TypeError: shapes, classes, options that do not fit, or a kernel without such a loss.

    Source: Blondel, Martins, Niculae, *Learning with Fenchel–Young Losses* (arXiv 1901.02324); Peters,
    Niculae, Martins, *Sparse Sequence-to-Sequence Models* (arXiv 1905.05702).

    Example:
        >>> from parzen.losses import fenchel_young
        >>> scores = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> fenchel_young(scores, torch.tensor([0, 0]), "epanechnikov", reduction="none")  # far ahead: 0
        tensor([0.0000, 0.3333])
    """
    check_tensor("scores", scores)
    label_smoothing, ignore_index = _check_options(reduction, label_smoothing, ignore_index)
    if scores.ndim == 0:
        raise ValueError("scores must be (C), (N, C) or (N, C, d₁, …), got a single number")
    dim = 0 if scores.ndim == 1 else 1
    classes, rows = scores.shape[dim], (*scores.shape[:dim], *scores.shape[dim + 1 :])
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    numbers = not target.is_floating_point()
    if numbers and (target.dtype == torch.bool or target.is_complex()):
        raise TypeError(f"target must hold class numbers or probabilities, got {target.dtype}")
    wanted = rows if numbers else tuple(scores.shape)
    if tuple(target.shape) != wanted:
        kind = "class numbers" if numbers else "class probabilities"
        raise ValueError(f"target of {kind} must have shape {wanted}, got {tuple(target.shape)}")
    if not numbers and ignore_index >= 0:
        raise ValueError("ignore_index goes with class numbers, target holds class probabilities")
    if weight is not None:
        check_tensor("weight", weight)
        if tuple(weight.shape) != (classes,):
            raise ValueError(f"weight must have shape ({classes},), got {tuple(weight.shape)}")

    chosen = kernels.kernel(kernel)
    if chosen.learned is not None:
        name, alpha = chosen.learned
        fits(
            alpha,
            (*scores.shape[:dim], 1, *scores.shape[dim + 1 :]),
            name,
            "scores, with size 1 for classes,",
        )
        if alpha.ndim:
            chosen = chosen.at(alpha[(None,) * (scores.ndim - alpha.ndim)].movedim(dim, -1))
    a = excess(chosen)
    check_together(scores=scores, target=target, weight=weight, alpha=a)

    autocast = autocasts(scores.device.type)
    wide = compute_dtype(scores.dtype)
    out = wide if autocast else scores.dtype
    z = forbid(scores).to(wide).movedim(dim, -1)
    a = a.to(wide) if isinstance(a, Tensor) else a
    p = weights(z, chosen)
    top, at = z.detach().max(-1, keepdim=True)
    weight = None if weight is None else weight.detach().to(wide)

    def spread(q: Tensor | float) -> tuple[Tensor, Tensor]:
        """Σ q (z_m − z) and Σ q z, where a class of probability 0 counts for nothing."""
        nothing = (z == -torch.inf) & (torch.as_tensor(q, device=z.device) == 0)
        gap = torch.where(nothing, 0, q * (top - z.detach())).sum(-1, keepdim=True)
        return gap, (q * torch.where(nothing, 0, z)).sum(-1, keepdim=True)

    if numbers:
        valid = target != ignore_index
        _check_classes(target, valid, classes)
        y = torch.where(valid, target, 0).long()
        factor = torch.ones_like(y, dtype=wide) if weight is None else weight[y]
        factor = torch.where(valid, factor, 0)[..., None]
        mass, own = factor * (1 - label_smoothing), z.gather(-1, y[..., None])
        gap, linear = mass * (top - own.detach()), mass * own
        if label_smoothing:
            part = label_smoothing / classes
            more, further = spread(part if weight is None else weight * part)
            mass = mass + (label_smoothing if weight is None else weight.sum() * part)
            gap, linear = gap + more, linear + further
        counted = valid[..., None]
        mass, gap, linear = (torch.where(counted, x, 0) for x in (mass, gap, linear))
        total: Tensor | int = factor.sum()
    else:
        q = target.to(wide).movedim(dim, -1)
        if label_smoothing:
            q = q * (1 - label_smoothing) + label_smoothing / classes
        q = q if weight is None else q * weight
        mass = q.sum(-1, keepdim=True)
        gap, linear = spread(q)
        gap = gap.detach()
        total = mass.numel()
    loss = _Loss.apply(z, p, a, at, mass, gap, linear, isinstance(chosen.rule, UnitNorm))
    if numbers:
        loss = torch.where(counted, loss, 0)
    return _reduce(loss.squeeze(-1), total, reduction, out)


class _Given(torch.autograd.Function):
    """``value`` with the gradients of mass·carrier − linear."""

    @staticmethod
    def forward(value: Tensor, carrier: Tensor, mass: Tensor, linear: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (mass,) = ctx.saved_tensors
        return None, g * mass, None, -g


def linear_fenchel_young(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    kernel: str | Kernel = "biweight",
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``fenchel_young(F.linear(hidden, weight, bias), target)`` without the rows × classes matrix.

    p = weights(W h + b) is attention of h over the rows of W, and ∇_h L = Σ_j p_j W_j − W_y. With a compact
    kernel on a CPU only the classes that have weight are kept, and time follows their number; elsewhere (the
    Gaussian, flat rows, other devices) rows are computed some at a time, and again in backward.

    Args:
        hidden: (…, D), floating.
        weight: (V, D), the rows of the output layer. Gradients for it, ``hidden`` and ``bias``.
        target: (…), class numbers.
        bias: (V,).
        kernel: as for ``fenchel_young``, but α is a number.
        class_weight: (V,), a factor for each class: the ``weight`` of ``fenchel_young``.
        ignore_index, reduction, label_smoothing: as for ``fenchel_young``.

    Returns:
        A number, or (…) with ``reduction="none"``; float32 under autocast, which sets the dtype of hidden and
        weight as for ``F.linear``. A second derivative makes the matrix.

    Raises:
        ValueError, TypeError: shapes, classes or options that do not fit, a kernel without such a loss, or
            with α as a tensor.

    Example:
        >>> from parzen.losses import linear_fenchel_young
        >>> hidden, weight = torch.randn(4, 8), torch.randn(50, 8, requires_grad=True)
        >>> linear_fenchel_young(hidden, weight, torch.tensor([1, 2, 3, 4])).backward()
    """
    label_smoothing, ignore_index = _check_options(reduction, label_smoothing, ignore_index)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias), ("class_weight", class_weight)):
        if x is not None:
            check_tensor(name, x)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(
            "target must be a tensor of class numbers: for class probabilities call "
            "fenchel_young(F.linear(hidden, weight, bias), target)"
        )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (…, D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    classes, width = weight.shape
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target must have shape {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}")
    for name, x in (("bias", bias), ("class_weight", class_weight)):
        if x is not None and tuple(x.shape) != (classes,):
            raise ValueError(f"{name} must have shape ({classes},), got {tuple(x.shape)}")
    chosen = kernels.kernel(kernel)
    if chosen.learned is not None:
        raise ValueError(
            f"{chosen}: α must be a number here; for a tensor call "
            "fenchel_young(F.linear(hidden, weight, bias), target, kernel)"
        )
    a = excess(chosen)
    check_together(hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight)
    if torch._C._are_functorch_transforms_active() or kernels.recording():
        flat = F.linear(hidden, weight, bias).reshape(-1, classes)
        loss = fenchel_young(
            flat, target.flatten(), chosen, weight=class_weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip
        return loss.view(target.shape) if reduction == "none" else loss

    device = hidden.device.type
    autocast = autocasts(device)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    wide = compute_dtype(dtype)
    out = wide if autocast else dtype
    h, w = hidden.to(dtype).reshape(-1, width), weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        carrier, sums, top, at = output.run(h, w, b, lower(chosen, 1.0))

        y = target.flatten()
        valid = y != ignore_index
        _check_classes(y, valid, classes)
        y = torch.where(valid, y, 0).long()
        class_weight = None if class_weight is None else class_weight.detach().to(wide)
        factor = torch.ones_like(y, dtype=wide) if class_weight is None else class_weight[y]
        factor = torch.where(valid, factor, 0)[:, None]
        own = (h.to(wide) * F.embedding(y, w).to(wide)).sum(-1, keepdim=True)
        if b is not None:
            own = own + b.to(wide)[y, None]
        mass = factor * (1 - label_smoothing)
        # Another order of summing may place the best class above itself.
        behind = torch.where(at == y[:, None], 0, (top - own.detach()).clamp_min(0))
        gap, linear = mass * behind, mass * own
        if label_smoothing:
            share = torch.full_like(w[:, 0], label_smoothing / classes, dtype=wide)
            share = share if class_weight is None else share * class_weight
            mean = (h.to(wide) @ (share @ w.to(wide)))[:, None]
            if b is not None:
                mean = mean + share @ b.to(wide)
            mass = mass + share.sum()
            gap, linear = gap + (share.sum() * top - mean.detach()).clamp_min(0), linear + mean
        mass, gap, linear = (torch.where(valid[:, None], x, 0) for x in (mass, gap, linear))
        least = _from_sums(sums[0], sums[1], sums[2], a, isinstance(chosen.rule, UnitNorm))
        loss = _Given.apply(mass * least + gap, carrier, mass, linear)
        loss = torch.where(valid[:, None], loss, 0)
    return _reduce(loss.view(target.shape), factor.sum(), reduction, out)


class FenchelYoungLoss(nn.Module):
    """``fenchel_young`` as a module, with the arguments of ``torch.nn.CrossEntropyLoss`` and the kernel.

    Example:
        >>> from parzen.losses import FenchelYoungLoss
        >>> FenchelYoungLoss("biweight")(torch.zeros(1, 4), torch.tensor([2]))
        tensor(0.6667)
    """

    weight: Tensor | None
    kernel_parameter: Tensor | None

    def __init__(
        self,
        kernel: str | Kernel = "biweight",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self._kernel = kernels.kernel(kernel)
        excess(self._kernel)
        kernels.hold(self, self._kernel)
        self.label_smoothing, self.ignore_index = _check_options(reduction, label_smoothing, ignore_index)
        self.reduction = reduction
        self.register_buffer("weight", weight)

    @property
    def kernel(self) -> Kernel:
        """The kernel in use."""
        return self._kernel if self.kernel_parameter is None else self._kernel.at(self.kernel_parameter)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        """The loss of ``scores`` (N, C, …) for ``target``: see ``fenchel_young``."""
        return fenchel_young(
            scores,
            target,
            self.kernel,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """The kernel and the reduction."""
        return f"{self.kernel}, reduction={self.reduction!r}"
