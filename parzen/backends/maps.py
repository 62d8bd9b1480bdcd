"""Weight maps by the CPU engine: rows of scores in, rows of weights out (``parzen/csrc/weights.cpp``).

    w_j = φ(t_j) / Σ_l φ(t_l)        ds_j = a_j (dw_j − μ) on the support, 0 elsewhere

One pass reads a row for its maximum and its candidates; the threshold is solved on the candidates. Nothing
but the weights is kept for backward: for the Gaussian profile a = w, under unit mass a = w^{(r−1)/r}; a power
within a margin or radius reads the scores once more, a = r·w/(s − θ).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parzen.backends import cpu, native, sharding
from parzen.backends.engine import unknown
from parzen.backends.reference import exponent_slope, weight_map
from parzen.kernels import EXP, MARGIN, THRESHOLD, UNIT_MASS, Form, Number, differentiated, eager, recording


def _call(
    function: str, x: Tensor, dout: Tensor | None, numbers: tuple[Any, ...], **rows: Tensor | None
) -> Tensor:
    """``rows``: what a RowMap has more, without gaps."""
    profile, rule, nearest, scale, level, r, least = numbers
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        library = native.loaded()
        args = native.WEIGHT_MAP.pack(
            rows=x.numel() // x.shape[-1], n=x.shape[-1], is_double=x.dtype == torch.float64,
            profile=profile, rule=rule, nearest=nearest, threads=torch.get_num_threads(),
            scale=scale, level=level, r=r, least=least, parallel_for=library.parallel_for,
            x=x, dout=dout, out=out,
        )  # fmt: skip
        if rows:
            place = ctypes.cast(ctypes.c_char_p(args), ctypes.c_void_p).value
            library.call(function, native.ROW_MAP.pack(map=place, **rows))
        else:
            library.call(function, args)
    return out


def _forward(s: Tensor, *numbers: Any) -> Tensor:
    return _call("weights", s, None, numbers)


def _backward(dw: Tensor, w: Tensor, *numbers: Any) -> Tensor:
    return _call("weights_backward", w, dw.contiguous(), numbers)


_library = torch.library.Library("parzen", "FRAGMENT")
_NUMBERS = "int profile, int rule, int nearest, float scale, float level, float r, float least"
_library.define(f"cpu_weights(Tensor s, {_NUMBERS}) -> Tensor")
_library.define(f"cpu_weights_backward(Tensor dw, Tensor w, {_NUMBERS}) -> Tensor")
_library.impl("cpu_weights", _forward, "CPU")
_library.impl("cpu_weights_backward", _backward, "CPU")
for _name in ("cpu_weights", "cpu_weights_backward"):
    torch.library.register_fake(f"parzen::{_name}", lambda x, *_: x.new_empty(x.shape), lib=_library)


def _dense_gradient(dw: Tensor, w: Tensor, numbers: tuple[Any, ...]) -> Tensor:
    """What ``cpu_weights_backward`` computes, in operations that have derivatives."""
    profile, _, _, scale, _, r, _ = numbers
    if profile != EXP and r == 0:
        return 0 * w * dw
    inside = ~(w <= 0)
    one = torch.where(inside, w, 1)
    a = torch.where(inside, one if profile == EXP else one ** (1 - 1 / r), 0)
    total = a.sum(-1, keepdim=True)
    mu = torch.where(inside, a * dw, 0).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
    return torch.where(inside, scale * a * (dw - mu), 0)


class _Map(torch.autograd.Function):
    """(s, numbers…) → w along the last axis."""

    @staticmethod
    def forward(s: Tensor, *numbers: Any) -> Tensor:
        return torch.ops.parzen.cpu_weights(s, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> Any:
        if dw is None:
            return (None,) * (1 + len(ctx.numbers))
        (w,) = ctx.saved_tensors
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            ds = _MapBackward.apply(dw, w, *ctx.numbers)
        else:
            ds = torch.ops.parzen.cpu_weights_backward(dw, w, *ctx.numbers)
        return ds, *(None,) * len(ctx.numbers)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], s: Tensor, *numbers: Any) -> Any:
        return _Map.apply(s.movedim(in_dims[0], 0), *numbers), 0


class _Eager(torch.autograd.Function):
    """The same at a third of the cost of a call, outside torch's transforms and compiler."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        w = torch.ops.parzen.cpu_weights(s, *numbers)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> Any:
        return _Map.backward(ctx, dw)[0], None


class _MapBackward(torch.autograd.Function):
    """The gradient of the scores, itself differentiable in dw and w: derivatives of any order."""

    @staticmethod
    def forward(dw: Tensor, w: Tensor, *numbers: Any) -> Tensor:
        return torch.ops.parzen.cpu_weights_backward(dw, w, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[2:]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        dw, w = ctx.saved_tensors
        pull = torch.func.vjp(lambda dw, w: _dense_gradient(dw, w, ctx.numbers), dw, w)[1]
        return *pull(g), *(None,) * len(ctx.numbers)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], dw: Tensor, w: Tensor, *numbers: Any) -> Any:
        dw, w = (
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip((dw, w), in_dims[:2], strict=True)
        )
        return _MapBackward.apply(dw, w, *numbers), 0


def _anchored(form: Form) -> bool:
    """Whether it is a power within a margin or radius, whose gradient needs the scores."""
    return form.rule in (MARGIN, THRESHOLD) and not form.closed


def _parameters(form: Form) -> list[Tensor]:
    return [x for x in (form.r, form.level) if isinstance(x, Tensor)]


class _Rowwise(torch.autograd.Function):
    """(s, r, level) → w where the gradient needs the scores or r or level is a tensor: plain tensors only."""

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, r: Number, level: Number, form: Form, scale: float, least: float
    ) -> Tensor:
        at = [
            x.detach().to(s.dtype).expand(*s.shape[:-1], 1).contiguous() if isinstance(x, Tensor) else None
            for x in (r, level)
        ]
        # The C code looks at the exponent for a faster way: NaN has none.
        numbers = (
            form.profile, form.rule, form.k, scale, 0.0 if isinstance(level, Tensor) else float(level),
            torch.nan if isinstance(r, Tensor) else float(r), least,
        )  # fmt: skip
        w = _call("weight_rows", s, None, numbers, r_at=at[0], level_at=at[1])
        ctx.form, ctx.numbers = form, numbers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, w, *(x if isinstance(x, Tensor) else None for x in (r, level)), *at)
        return w

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> Any:
        s, w, r, level, *at = ctx.saved_tensors
        if dw is None:
            return (None,) * 6
        *_, scale, _, _, least = ctx.numbers
        if torch.is_grad_enabled():
            # Once more by the reference, which has derivatives of any order.
            form = replace(ctx.form, r=ctx.form.r if r is None else r)
            form = replace(form, level=form.level if level is None else level)
            wanted = [x for x, need in zip((s, r, level), ctx.needs_input_grad, strict=False) if need]
            dense, _ = weight_map(torch.where(s <= least, -torch.inf, s) * scale, form)
            found = iter(torch.autograd.grad(dense, wanted, dw, create_graph=True, allow_unused=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None, None
        anchored = _anchored(ctx.form)
        score = s.contiguous() if anchored else None
        push = torch.empty_like(w[..., :1]) if anchored and ctx.needs_input_grad[2] else None
        more = {"r_at": at[0], "level_at": at[1], "score": score, "push": push}
        ds = _call("weight_rows_backward", w, dw.contiguous(), ctx.numbers, **more)
        dr = dlevel = None
        if r is not None and ctx.needs_input_grad[1] and ctx.form.rule == UNIT_MASS:
            dr = exponent_slope(dw, w, r).sum_to_size(r.shape).to(r.dtype)
        if push is not None:
            dlevel = push.sum_to_size(level.shape).to(level.dtype)
        return ds, dr, dlevel, None, None, None


def why_not(s: Tensor, form: Form) -> str | None:
    """None if ``run`` can serve rows ``s``, else a sentence that says why not."""
    if s.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {s.device}"
    if recording():
        return "an exported graph must consist of plain operators"
    parameters = _parameters(form)
    if (parameters or _anchored(form)) and not eager(s, *parameters):
        return (
            "compiled or mapped, tensor parameters and powers within a margin or radius go by the reference"
        )
    if isinstance(form.level, float) and abs(form.level) > 1e8:
        return "so wide a margin or radius overflows once it is scaled"
    if s.shape[-1] >= 2**31:
        return "the CPU engine numbers entries in 32 bits"
    if not cpu._built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return unknown(form, "the CPU engine", cpu.PROFILES, cpu.RULES)


def run(s: Tensor, form: Form, scale: float, least: float) -> Tensor:
    """Weights of the rows ``scale``·s, where scores ≤ ``least`` are not allowed.

    Args:
        s: float32 or float64, rows along the last axis.
        form: the kernel; its numbers are floats, or tensors that broadcast to the rows, of size 1 at the end.
        scale: > 0.
        least: −∞, or the most negative number of the dtype that the scores came in.
    """
    if _anchored(form) or _parameters(form):
        static = replace(form, r=form.r if isinstance(form.r, float) else 1.0)
        static = replace(static, level=form.level if isinstance(form.level, float) else 0.0)
        return _Rowwise.apply(s, form.r, form.level, static, float(scale), least)
    numbers = (form.profile, form.rule, form.k, float(scale), float(form.level), float(form.r), least)
    sharding.register()
    if not differentiated(s):
        return torch.ops.parzen.cpu_weights(s, *numbers)
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return _Map.apply(s, *numbers)
    return _Eager.apply(s, numbers)
