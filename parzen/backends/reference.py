"""The definition: dense attention in plain torch, any dtype and device, O(T·S) memory.

    s = scale·q·kᵀ + bias        w = weight_map(s)        o = w·v

The threshold is solved once; its gradient comes from the one backward of ``_WeightMap``, which is
written in differentiable operations, so derivatives of any order hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parzen.backends import sharding
from parzen.call import Call
from parzen.kernels import (
    EXP,
    MARGIN,
    NEAREST,
    THRESHOLD,
    UNIT_MASS,
    UNIT_NORM,
    Form,
    Number,
    differentiated,
    readable,
    recording,
)

# Newton steps from the left: f·f' falls at least fourfold a step (f convex and decreasing), so 24 bring
# n = 10⁴ equal scores to 1e-7 and 60 exhaust float64. Loops stop as soon as every row has settled.
TRACED_STEPS = 24
MOST_STEPS = 60


def _power(y: Tensor, r: Number) -> Tensor:
    """yʳ for y ≥ 0."""
    if isinstance(r, Tensor):
        return torch.exp(r * torch.log(y))
    if r in (1, 2, 3):
        return y if r == 1 else y * y if r == 2 else y * y * y
    return y**r


def _rise(z: Tensor, sigma: Tensor, r: Number) -> tuple[Tensor, Tensor]:
    """y = [1 + (z−σ)/r]₊ and yʳ, exact as r → ∞ where yʳ → exp(z−σ)."""
    u = ((z - sigma) / r).clamp_min(-1)
    if isinstance(r, Tensor) or r not in (1, 2, 3):
        return 1 + u, torch.exp(r * torch.log1p(u))
    y = 1 + u
    return y, _power(y, r)


def _solve(z: Tensor, r: Number, steps: int, settle: bool) -> Tensor:
    """σ with Σ_j [1 + (z_j−σ)/r]₊ʳ = 1 for rows z ≤ 0 with maximum 0, from below.

    Newton on the r-norm of the row, which is convex, decreasing and almost linear in σ (for r < −1 concave
    and rising): with S = Σ yʳ, Q = Σ yʳ⁻¹ the step is r·S·(1 − S^{−1/r})/Q. For 0 < r < 1 it is neither,
    and σ lies in [0, r(1 − n^{−1/r})]: bisection. A row without entries, or with NaN, stays at 0.
    """
    narrow = (r > 0) & (r < 1) if isinstance(r, Tensor) else 0 < r < 1
    if not isinstance(narrow, Tensor):
        if narrow:
            return _bisect(z, r, settle)
    elif not settle or bool(narrow.any()):
        halved, r = _bisect(z, torch.where(narrow, r, 1), settle), torch.where(narrow, 1, r)
        return torch.where(narrow, halved, _newton(z, r, steps, settle))
    return _newton(z, r, steps, settle)


def _bisect(z: Tensor, r: Number, settle: bool) -> Tensor:
    if settle and z.numel():
        # Nothing counts below the threshold at σ = 0.
        most = int((z > -r).sum(-1).amax())
        z = torch.topk(z, max(1, most), dim=-1).values if most < z.shape[-1] // 2 else z
    finite = (z > -torch.inf).sum(-1, keepdim=True).clamp_min(1).to(z.dtype)
    low = torch.zeros_like(z[..., :1])
    high = -r * torch.expm1(-torch.log(finite) / r)
    for _ in range(26 if z.dtype == torch.float32 else 56):
        middle = (low + high) / 2
        heavy = _rise(z, middle, r)[1].sum(-1, keepdim=True) >= 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    return low


def _newton(z: Tensor, r: Number, steps: int, settle: bool) -> Tensor:
    sigma = torch.zeros_like(z[..., :1])
    eps = torch.finfo(z.dtype).eps
    for _ in range(steps):
        y, p = _rise(z, sigma, r)
        mass = p.sum(-1, keepdim=True)
        slope = torch.where(y > 0, p / y, 0).sum(-1, keepdim=True)
        step = -r * mass * torch.expm1(-torch.log(mass) / r) / slope
        step = torch.where(mass > 0, step, 0).clamp_min(0)
        sigma = sigma + step
        if settle and not bool((step > eps * (1 + sigma)).any()):
            break
    return sigma


_library = torch.library.Library("parzen", "FRAGMENT")
_library.define("unit_mass(Tensor z, Tensor r) -> Tensor")


def _unit_mass(z: Tensor, r: Tensor) -> Tensor:
    exponent = r.item() if r.ndim == 0 else r
    return _solve(z, exponent, MOST_STEPS, settle=True)


_library.impl("unit_mass", _unit_mass, "CompositeExplicitAutograd")
torch.library.register_fake("parzen::unit_mass", lambda z, r: torch.empty_like(z[..., :1]), lib=_library)


def _sigma(z: Tensor, r: Number) -> Tensor:
    if recording():
        if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                "torch.onnx.export(dynamo=False) has no expm1, which a unit mass needs: leave dynamo=True"
            )
        return _solve(z, r, TRACED_STEPS, settle=False)
    exponent = r if isinstance(r, Tensor) else torch.tensor(r, dtype=torch.float64, device="cpu")
    sharding.register()
    return torch.ops.parzen.unit_mass(z, exponent)


def _map(s: Tensor, r: Number, level: Number, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, κ and θ of rows ``s`` (−∞ = not allowed); κ = r/‖t‖_r gives φ'/Σφ = κ·w^{(r−1)/r}."""
    best = s.amax(-1, keepdim=True)
    nothing = best == -torch.inf
    best = torch.where(nothing, 0, best)
    z = s - best
    kappa = torch.ones_like(best)
    if form.rule == UNIT_MASS:
        sigma = _sigma(z, r)
        _, p = _rise(z, sigma, r)
        theta = best + sigma - r
    elif form.rule == UNIT_NORM:
        # Unit mass of the power r + 1, in its units.
        wide = r + 1
        sigma = _sigma(wide * z, wide) / wide
        rise = (1 + z - sigma).clamp_min(0)
        p = torch.where(rise > 0, _power(torch.where(rise > 0, rise, 1), r), 0)
        theta = best - 1 + sigma
        p = torch.where(best.isfinite(), p, torch.nan)
    else:
        theta = _theta(s, best, level, form)
        # From the best, where a margin is exact: best − b may round to best.
        above, floor = (z, -level) if form.rule == MARGIN else (s, theta)
        inside = (above >= floor if form.closed else above > floor) & (s > -torch.inf)
        if form.profile == EXP or form.closed:
            p = torch.where(inside, torch.exp(z) if form.profile == EXP else 1 + 0 * best, 0)
        else:
            reach = level if form.rule == MARGIN else best - theta
            rise = z + level if form.rule == MARGIN else s - theta
            # Relative to the best, so that no power overflows.
            p = torch.where(inside, _power(torch.where(inside, rise, reach) / reach, r), 0)
            kappa = r / (reach * p.sum(-1, keepdim=True) ** (1 / r))
        # A score of +∞ is inf − inf from the best, whatever the rule.
        p = torch.where(best.isfinite(), p, torch.nan)
    mass = p.sum(-1, keepdim=True)
    empty = mass == 0
    # A key that is not allowed has weight 0 in a row of NaN, too.
    w = torch.where(s == -torch.inf, 0, p / torch.where(empty, 1, mass))
    return w, torch.where(empty, 0, kappa), torch.where(nothing, torch.inf, theta)


def _theta(s: Tensor, best: Tensor, level: Number, form: Form) -> Tensor:
    if form.rule == MARGIN:
        return best - level
    if form.rule == THRESHOLD:
        # A huge radius may overflow: the ends of the range would be NaN.
        return (level + torch.zeros_like(best)).clamp_min(torch.finfo(best.dtype).min)
    if form.rule == NEAREST:
        if recording():
            # topk would fix on which side of k the length is.
            first = torch.arange(s.shape[-1], device=s.device) < form.k
            order = s.sort(dim=-1, descending=True).values
            kth = torch.where(first, order, torch.inf).amin(-1, keepdim=True)
        else:
            kth = torch.topk(s, torch.sym_min(form.k, s.shape[-1]), dim=-1).values[..., -1:]
        few = (s > -torch.inf).sum(-1, keepdim=True) < form.k
        return torch.where(few, -torch.inf, kth)
    return torch.full_like(best, -torch.inf)


def _curvature(log_y: Tensor) -> Tensor:
    """log y − 1 + 1/y, by its series in u = y − 1 where the terms cancel."""
    u = torch.expm1(log_y)
    series = torch.zeros_like(u)
    for n in range(10, 1, -1):
        series = (-1) ** n * (n - 1) / n + u * series
    return torch.where(u.abs() < 0.1, u * u * series, log_y - u / (1 + u))


def _total(grad: Tensor, like: Tensor) -> Tensor:
    return grad.sum_to_size(like.shape)


def exponent_slope(dw: Tensor, w: Tensor, r: Number, mu: Tensor | None = None) -> Tensor:
    """The gradient of r under unit mass, row by row: Σ_j w_j (log y_j − 1 + 1/y_j)(dw_j − μ), y = w^{1/r}."""
    inside = w > 0
    log = torch.log(torch.where(inside, w, 1))
    if mu is None:
        a = torch.where(inside, torch.exp((1 - 1 / r) * log), 0)
        total = a.sum(-1, keepdim=True)
        mu = (a * dw).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
    return torch.where(inside, w * _curvature(log / r) * (dw - mu), 0).sum(-1, keepdim=True)


class _WeightMap(torch.autograd.Function):
    """(s, r, level) → (w, κ, θ). One backward for all kernels, with a = φ'(t)/Σφ:

        ds_j = a_j (dw_j − μ)        μ = Σ a dw / Σ a  (unit mass),  Σ w dw  (other rules)

    Under a unit norm the threshold moves too: ds_j − w_j Σ ds.

    ``r`` and ``level`` are floats, or tensors with a last axis of 1; ``form`` says the rest. θ has no
    gradient of its own.
    """

    @staticmethod
    def forward(s: Tensor, r: Number, level: Number, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        return _map(s, r, level, form)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        s, r, level, form = inputs
        w, kappa, theta = output
        ctx.mark_non_differentiable(theta)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.r = form, r
        tensors = [x if isinstance(x, Tensor) else None for x in (r, level)]
        ctx.save_for_backward(s if form.rule == MARGIN else None, *tensors, w, kappa)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None, dkappa: Tensor | None, _: Tensor | None) -> Any:
        s, r, level, w, kappa = ctx.saved_tensors
        form: Form = ctx.form
        dw = torch.zeros_like(w) if dw is None else dw
        if form.profile == EXP:
            ds = torch.where(w > 0, w * (dw - (w * dw).sum(-1, keepdim=True)), 0)
            return _nan_rows(ds, w), None, None, None
        if form.closed:
            return torch.zeros_like(w), None, None, None
        exponent = ctx.r if r is None else r
        inside = w > 0
        one = torch.where(inside, w, 1)
        if form.rule == UNIT_NORM:
            log_y = _log_rise(w, exponent)
            a = torch.where(inside, exponent * one * torch.exp(-log_y), 0)
        else:
            a = torch.where(inside, kappa * one ** (1 - 1 / exponent), 0)
        weight = a if form.rule == UNIT_MASS else w
        total = weight.sum(-1, keepdim=True)
        mu = (weight * dw).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
        centred = dw - mu
        if form.rule not in (UNIT_MASS, UNIT_NORM) and dkappa is not None:
            centred = centred - dkappa * kappa / exponent
        ds = torch.where(inside, a * centred, 0)
        dr = dlevel = None
        if form.rule == UNIT_NORM:
            ds = ds - w * ds.sum(-1, keepdim=True)
            if ctx.needs_input_grad[1]:
                dr = _total(_norm_slope(w, log_y, exponent, centred), r)
        if form.rule == UNIT_MASS and ctx.needs_input_grad[1]:
            dr = _total(exponent_slope(dw, w, exponent, mu), r)
        if form.rule in (THRESHOLD, MARGIN):
            push = ds.sum(-1, keepdim=True)
            if ctx.needs_input_grad[2]:
                dlevel = _total(push if form.rule == MARGIN else -push, level)
            if form.rule == MARGIN:
                first = (s == s.amax(-1, keepdim=True)) & inside
                ds = ds - torch.where(first, push / first.sum(-1, keepdim=True).clamp_min(1), 0)
        return _nan_rows(ds, w), dr, dlevel, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], s: Tensor, r: Number, level: Number, form: Form
    ) -> Any:
        rank = s.ndim - (in_dims[0] is not None)

        def lead(x: Any, dim: int | None) -> Any:
            if dim is None:
                return x
            x = x.movedim(dim, 0)
            return x.reshape(x.shape[0], *[1] * (rank + 1 - x.ndim), *x.shape[1:])

        if in_dims[0] is None:
            s = s.expand(info.batch_size, *s.shape)
        else:
            s = lead(s, in_dims[0])
        r, level = lead(r, in_dims[1]), lead(level, in_dims[2])
        return _WeightMap.apply(s, r, level, form), (0, 0, 0)


def _log_rise(w: Tensor, r: Number) -> Tensor:
    """log(s − τ) of weights under a unit norm, where (s − τ)ʳ = w/‖w‖_α with α = 1 + 1/r; 0 where w is 0."""
    log = torch.log(torch.where(w > 0, w, 1))
    best = w.detach().amax(-1, keepdim=True)
    best = torch.log(torch.where(best > 0, best, 1))
    alpha = 1 + 1 / r
    power = torch.where(w > 0, torch.exp(alpha * (log - best)), 0).sum(-1, keepdim=True)
    power = torch.where(power > 0, power, 1)
    return torch.where(w > 0, (log - best - torch.log(power) / alpha) / r, 0)


def _norm_slope(w: Tensor, log_y: Tensor, r: Number, dw: Tensor) -> Tensor:
    """The gradient of r under a unit norm: with y = s − τ, d log w_j = g_j − Σ w g, where

    g = log y − τ'·r/y and τ' = Σ w y log y / (r + 1).
    """
    y = torch.exp(log_y)
    moves = (w * y * log_y).sum(-1, keepdim=True) / (r + 1)
    g = torch.where(w > 0, log_y - moves * r / y, 0)
    return (w * dw * (g - (w * g).sum(-1, keepdim=True))).sum(-1, keepdim=True)


def _nan_rows(ds: Tensor, w: Tensor) -> Tensor:
    """A row of NaN weights has NaN gradients, not the zeros of an empty support."""
    return torch.where(w.isnan(), torch.nan, ds)


def weight_map(s: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Weights of the rows of ``s`` (last axis; −∞ = not allowed) and their thresholds θ.

    ``form.r`` and ``form.level`` broadcast to ``s`` with its last axis reduced to 1.
    """
    if s.shape[-1] == 0:
        return s, s.new_full((*s.shape[:-1], 1), torch.inf)
    r, level = (x.to(s.dtype) if isinstance(x, Tensor) else x for x in (form.r, form.level))
    static = replace(form, r=1.0 if isinstance(r, Tensor) else r, level=0.0)
    # An exported graph is in plain operators: no autograd.Function in it.
    plain = recording() or not differentiated(s, r, level)
    apply = _WeightMap.forward if plain else _WeightMap.apply
    w, _, theta = apply(s, r, level, static)
    return w, theta


# ---- dense attention -----------------------------------------------------------------------------


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def along_keys(x: Number) -> Number:
    """(B, H, T)-broadcastable as (B, H, T, 1)-broadcastable."""
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """(B, Hk, …) repeated to (B, H, …) for grouped queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class _Cleared(torch.autograd.Function):
    """x with 0 for all that is not finite; the gradient passes as it is."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(torch.isfinite(x), x, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor) -> Any:
        return _Cleared.apply(x), in_dims[0]


def _cleared(x: Tensor) -> Tensor:
    return (_Cleared.forward if recording() else _Cleared.apply)(x)


def _finite(x: Tensor) -> bool:
    """Whether x is known to be finite everywhere, where looking is free."""
    return readable(x) and bool(torch.isfinite(x).all())


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ. In backward 0·∞ and 0·NaN are 0: a bad key leaves alone the rows that give it no weight."""
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    learns = learns or torch._C._are_functorch_transforms_active()
    if recording() or not learns or (_finite(q) and _finite(k)):
        # Not mT, which torch.onnx.export(dynamo=False) does not know.
        return q @ k.transpose(-1, -2)
    bad = q.detach() @ k.detach().mT
    return _cleared(q) @ _cleared(k).mT + torch.where(torch.isfinite(bad), 0, bad)


def _averages(w: Tensor, v: Tensor) -> Tensor:
    """w·v, where a weight of 0 takes nothing of a value of ±∞ or NaN."""
    if _finite(v):
        return w @ v
    # NaN counts as both infinities, whose sum it is.
    nan, size = torch.isnan(v), v.shape[-1]
    infinite = torch.cat(((v == torch.inf) | nan, (v == -torch.inf) | nan), -1)
    up, down = ((w > 0).to(w.dtype) @ infinite.to(w.dtype) > 0).split(size, -1)
    bad = torch.where(up, torch.inf, 0.0) - torch.where(down, torch.inf, 0.0)
    return w @ _cleared(v) + bad.to(w.dtype) * w.sum(-1, keepdim=True)


def scores(call: Call) -> Tensor:
    """s (B, H, T, S), −∞ where a key is not allowed; float32, or float64 for float64 inputs."""
    dtype = compute_dtype(call.q.dtype)
    q = call.q.to(dtype)
    k = per_query_head(call.k.to(dtype), q.shape[1])
    scale = along_keys(call.scale)
    s = _products(q, k) * (scale.to(dtype) if isinstance(scale, Tensor) else scale)
    allowed = call.mask
    if call.bias is not None:
        s = s + call.bias.to(dtype)
        seen = call.bias != -torch.inf
        allowed = seen if allowed is None else allowed & seen
    if call.slopes is not None or call.left >= 0 or call.right >= 0:
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + call.diagonal
        ahead = sharding.whole(torch.arange(k.shape[2], device=q.device)[None, :] - rows, q)
        if call.slopes is not None:
            s = s - call.slopes.to(dtype)[:, :, None, None] * ahead.abs()
        for near in (
            ahead >= -call.left if call.left >= 0 else None,
            ahead <= call.right if call.right >= 0 else None,
        ):
            if near is not None:
                allowed = near if allowed is None else allowed & near
    return s if allowed is None else torch.where(allowed, s, -torch.inf)


def weights(call: Call) -> tuple[Tensor, Tensor]:
    """Dense weights w (B, H, T, S) and thresholds θ (B, H, T, 1)."""
    form = replace(call.form, r=along_keys(call.form.r), level=along_keys(call.form.level))
    return weight_map(scores(call), form)


def why_not(call: Call) -> str | None:
    """None: the definition serves every call."""
    return None


def run(call: Call) -> Tensor:
    """o = w·v (B, H, T, Ev), in the dtype of v."""
    w, _ = weights(call)
    v = per_query_head(call.v.to(w.dtype), w.shape[1])
    if call.dropout > 0:
        w = F.dropout(w, call.dropout)
    return _averages(w, v).to(call.v.dtype)
