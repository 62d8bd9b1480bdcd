"""What the engines share: the arguments of their operators, their derivatives and their transforms.

``register`` makes ``parzen::{name}_forward`` and ``parzen::{name}_backward`` of an engine:

    forward(*INPUTS, bool save) → (o, saved…)
    backward(do, *INPUTS, saved…, bool[5] needs) → (dq, dk, dv, dbias, dslopes, dscale, dlevel, dr)

with ``needs`` and the gradients after dv in the order of bias, slopes, scale_at, level_at and r_at: that of
bias in its shape, the others (B, H, T), empty where not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from parzen.backends import reference, sharding
from parzen.call import Call, packed
from parzen.kernels import UNIT_MASS, Form, Number, eager

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? scale_at, "
    "Tensor? level_at, Tensor? r_at, Tensor? seed, Tensor? first_q, Tensor? first_k, int profile, int rule, "
    "int nearest, SymInt diagonal, SymInt left, SymInt right, float scale, float level, float r, "
    "float dropout, SymInt longest_q, SymInt longest_k, bool lower_right"
)
# Of the inputs above, those that are tensors, where the seed is, and dropout among the numbers. Here the
# numbers are led by the engine's name.
TENSORS, _SEED, _DROPOUT = 12, 9, 10
_NUMBERS = 1 + 13
# Where what forward saved begins among the arguments of a backward.
_SAVED = 1 + TENSORS + _NUMBERS


def gradient_shapes(args: Sequence[Any], needs: Sequence[bool]) -> list[tuple[int, ...]]:
    """Of bias, slopes, scale_at, level_at and r_at: zero elements where not needed."""
    q, bias = args[0], args[4]
    rows = tuple(q.shape[:3])
    shapes = [tuple(bias.shape) if needs[0] else (0,)]
    return shapes + [rows if need else (0,) for need in needs[1:]]


def _fake_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The shapes of an engine's gradients."""
    q, k, v = args[:3]
    dtype = reference.compute_dtype(q.dtype)
    extra = [q.new_empty(shape, dtype=dtype) for shape in gradient_shapes(args, args[-1])]
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *extra)


_library = torch.library.Library("parzen", "FRAGMENT")
_functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {}


def register(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    saved: Callable[[Sequence[Any], bool], tuple[Tensor, ...]],
    names: Sequence[str],
    devices: Sequence[str],
) -> None:
    """Make operators of an engine's two functions.

    Args:
        name: the engine's.
        forward: called as ``parzen::{name}_forward``.
        backward: called as ``parzen::{name}_backward``.
        saved: (INPUTS, save) → empty tensors in the shapes of what forward saves.
        names: what each of them is.
        devices: torch's names of those that the functions work on.
    """
    lists = ", ".join(f"Tensor {x}" for x in names)
    grads = ", ".join(f"Tensor d{x}" for x in ("q", "k", "v", "bias", "slopes", "scale", "level", "r"))
    _library.define(f"{name}_forward({INPUTS}, bool save) -> (Tensor o, {lists})")
    _library.define(f"{name}_backward(Tensor do, {INPUTS}, {lists}, bool[] needs) -> ({grads})")
    sharding.ENGINES[name] = TENSORS
    for operator, function in ((f"{name}_forward", forward), (f"{name}_backward", backward)):
        _functions[operator] = function
        for device in devices:
            _library.impl(operator, function, device)

    def fake_forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, save = args
        return inputs[0].new_empty((*inputs[0].shape[:3], inputs[2].shape[3])), *saved(inputs, save)

    torch.library.register_fake(f"parzen::{name}_forward", fake_forward, lib=_library)
    torch.library.register_fake(f"parzen::{name}_backward", _fake_backward, lib=_library)


# ---- derivatives and transforms ------------------------------------------------------------------


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """The vmapped axis of x merged into its first one; a first axis of 1 still broadcasts."""
    if not isinstance(x, Tensor):
        return x
    if dim is None:
        if x.shape[0] == 1:
            return x
        return x.expand(size, *x.shape).flatten(0, 1)
    return x.movedim(dim, 0).flatten(0, 1)


def _whole(x: Any, batch: int) -> Any:
    """A first axis of 1 made ``batch`` long: two vmapped inputs may differ along it."""
    return x.expand(batch, *x.shape[1:]) if isinstance(x, Tensor) else x


def _fold_inputs(size: int, dims: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    q, dim = args[0], dims[0]
    batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]
    folded = []
    for n, (x, d) in enumerate(zip(args, dims, strict=True)):
        if isinstance(x, Tensor) and n < _SEED and d is not None and batch != 1:
            x = x.movedim(d, 0)
            x, d = x.expand(size, batch, *x.shape[2:]), 0
        elif isinstance(x, Tensor) and n < 3 and d is None:
            x, d = x.expand(size, *x.shape), 0
        folded.append(x if _SEED <= n < TENSORS else _fold(x, d, size))
    return folded


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // size))


def _refuse_packed(args: Sequence[Any]) -> None:
    if args[_SEED + 1] is not None:
        raise RuntimeError("packed sequences have no vmap rule: pack the samples instead")


def plain(tensors: Sequence[Any]) -> bool:
    """Whether all that torch would do with an operator on these tensors is to call its function.

    torch needs longer to hand over an operator's arguments than an engine to serve a small call.
    """
    given = [x for x in tensors if x is not None]
    if not eager(*given) or torch.autograd._profiler_enabled():
        return False
    for x in given:
        if x.is_neg():
            return False
    return True


def learns(args: Sequence[Any]) -> bool:
    """Whether one of the tensors wants a gradient."""
    if torch.is_grad_enabled():
        for x in args[:TENSORS]:
            if x is not None and x.requires_grad:
                return True
    return False


def _operator(name: str, tensors: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """An engine's operator, or the function behind it."""
    if plain(tensors):
        return _functions[name]
    sharding.register()
    return getattr(torch.ops.parzen, name)


def run_forward(*args: Any) -> tuple[Tensor, ...]:
    """The engine's forward operator on these arguments."""
    tensors = args[:TENSORS]
    return _operator(f"{args[TENSORS]}_forward", tensors)(*tensors, *args[TENSORS + 1 :])


class _Attention(torch.autograd.Function):
    """(INPUTS, with the engine's name after the tensors) → (o, what backward needs)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return run_forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.numbers = inputs[TENSORS:]
        ctx.save_for_backward(*inputs[:TENSORS], *output[1:])

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> Any:
        nothing = (None,) * (TENSORS + len(ctx.numbers))
        if do is None:
            return nothing
        tensors = ctx.saved_tensors
        needs = [bool(n) for n in ctx.needs_input_grad[4:9]]
        args = (do, *tensors[:TENSORS], *ctx.numbers, *tensors[TENSORS:], needs)
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            grads = _Backward.apply(*args)
        else:
            grads = _gradients(*args)
        dq, dk, dv, *rest = grads
        extra = [g if need else None for g, need in zip(rest, needs, strict=True)]
        return dq, dk, dv, None, *extra, *nothing[9:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        _refuse_packed(args)
        out = _Attention.apply(*_fold_inputs(info.batch_size, in_dims, args))
        return tuple(_unfold(x, info.batch_size) for x in out), (0,) * len(out)


# autograd looks at the signature in each call, which is found at once where it is written down.
_Attention.forward.__signature__ = signature(_Attention.forward)  # type: ignore[attr-defined]


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    """The engine's gradients, each reduced to the shape of its input."""
    tensors, needs, first_q = args[5:10], args[-1], args[2 + _SEED]
    name = args[1 + TENSORS]
    given = args[: 1 + TENSORS]
    dq, dk, dv, *rest = _operator(f"{name}_backward", given)(*given, *args[2 + TENSORS :])
    reduced = []
    for n, (grad, x, need) in enumerate(zip(rest, tensors, needs, strict=True)):
        if need and n == 1 and first_q is not None and x.shape[0] > 1:
            # Each sequence's rows, one after the other.
            sums = {"offsets": first_q, "axis": 0, "initial": 0, "unsafe": True}
            grad = torch.segment_reduce(grad[0].mT.contiguous(), "sum", **sums)
        elif need and n == 1:
            grad = grad.sum(-1)
        reduced.append(grad.sum_to_size(x.shape).to(x.dtype) if need else grad)
    return dq, dk, dv, *reduced


class _Backward(torch.autograd.Function):
    """The gradients, differentiable through the dense reference, to any order."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _gradients(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers, ctx.count = inputs[1 + TENSORS : _SAVED], len(inputs)
        ctx.needs = inputs[-1]
        ctx.save_for_backward(*inputs[: 1 + TENSORS])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        do, *tensors = ctx.saved_tensors
        if ctx.numbers[_DROPOUT] > 0:
            raise RuntimeError("there is no second derivative with dropout_p > 0; use dropout_p = 0")
        # q, k, v, and those of bias, slopes, scale, level and r that have a gradient.
        chosen = [0, 1, 2] + [4 + n for n, need in enumerate(ctx.needs) if need]

        def first(do: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            def value(*inputs: Tensor) -> Tensor:
                given = list(tensors)
                for n, x in zip(chosen, inputs, strict=True):
                    given[n] = x
                return dense(given, ctx.numbers)

            return torch.func.vjp(value, *inputs)[1](do)

        seeds = tuple(grads[n if n < 3 else n - 1] for n in chosen)
        pull = torch.func.vjp(first, do, *(tensors[n] for n in chosen))[1]
        ddo, *second = pull(seeds)
        out: list[Tensor | None] = [None] * ctx.count
        out[0] = ddo
        for n, g in zip(chosen, second, strict=True):
            out[1 + n] = g
        return tuple(out)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        _refuse_packed(args[1:])
        size, saved = info.batch_size, args[_SAVED:-1]
        needs = args[-1]
        if in_dims[_SAVED] is None:
            # Only do differs between the samples.
            samples = [_Backward.apply(x, *args[1:]) for x in args[0].movedim(in_dims[0], 0)]
            return tuple(torch.stack(g) for g in zip(*samples, strict=True)), (0,) * 8
        do = args[0].expand(size, *args[0].shape) if in_dims[0] is None else args[0].movedim(in_dims[0], 0)
        inputs = _fold_inputs(size, in_dims[1:_SAVED], args[1:_SAVED])
        lists = [x.movedim(d, 0).flatten(0, 1) for x, d in zip(saved, in_dims[_SAVED:-1], strict=True)]
        # Gradients of inputs that the samples share, or that broadcast, are wanted for each sample.
        batch = inputs[0].shape[0]
        for n, need in enumerate(needs):
            if need and inputs[4 + n].shape[0] == 1:
                inputs[4 + n] = _whole(inputs[4 + n], batch)
        grads = _Backward.apply(do.flatten(0, 1), *inputs, *lists, needs)
        out = []
        for n, g in enumerate(grads):
            if n >= 3 and not needs[n - 3]:
                out.append(g.expand(size, *g.shape))
                continue
            g = _unfold(g, size)
            x, d = args[1 + n if n < 3 else 2 + n], in_dims[1 + n if n < 3 else 2 + n]
            shape = x.shape if d is None else x.movedim(d, 0).shape[1:]
            out.append(g.sum(1, keepdim=True) if shape[0] == 1 and g.shape[1] != 1 else g)
        return tuple(out), (0,) * len(out)


def unknown(form: Form, name: str, profiles: Sequence[int], rules: Sequence[int]) -> str | None:
    """None if the engine ``name``, of these profiles and rules, serves ``form``, else why not."""
    if form.beyond is not None or (form.profile in profiles and form.rule in rules):
        return form.beyond
    return f"{name} does not know profile {form.profile} with rule {form.rule}"


def three(x: Number) -> Tensor | None:
    """A tensor parameter, broadcastable to (B, H, T), with exactly three axes."""
    if not isinstance(x, Tensor):
        return None
    return x[(None,) * (3 - x.ndim)]


def _served(form: Form) -> Number:
    """The exponents, NaN where α as a tensor that could not be looked at is outside [1, 2]."""
    if not isinstance(form.r, Tensor) or form.rule != UNIT_MASS:
        return form.r
    return torch.where(form.r >= 1, form.r, torch.nan)


def number(x: Number) -> float:
    """A float; 0 for a parameter that comes as a tensor."""
    return 0.0 if isinstance(x, Tensor) else x


def dense(tensors: Sequence[Any], numbers: tuple[Any, ...]) -> Tensor:
    """What these arguments of an engine stand for, by the dense reference."""
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, _, first_q, first_k = tensors
    _, profile, rule, nearest, diagonal, left, right, scale, level, r, _, _, _, lower_right = numbers

    def one(rows: slice, columns: slice, diagonal: int, slopes: Tensor | None) -> Tensor:
        def cut(x: Any, other: float) -> Any:
            return other if x is None else x if x.shape[-1] == 1 else x[..., rows]

        form = Form(profile, rule, cut(r_at, r), cut(level_at, level), nearest)
        call = Call(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], cut(scale_at, scale), form,
            None, mask, bias, slopes, diagonal, left, right,  # type: ignore[arg-type]
        )  # fmt: skip
        return reference.run(call)

    if first_q is None:
        return one(slice(None), slice(None), diagonal, slopes)
    parts = []
    starts = zip(first_q.tolist(), first_q[1:].tolist(), first_k.tolist(), first_k[1:].tolist(), strict=False)
    for n, (q0, q1, k0, k1) in enumerate(starts):
        corner = (k1 - k0) - (q1 - q0) if lower_right else 0
        own = slopes if slopes is None or slopes.shape[0] == 1 else slopes[n : n + 1]
        parts.append(one(slice(q0, q1), slice(k0, k1), diagonal + corner, own))
    return torch.cat(parts, 2)


def arguments(
    name: str,
    call: Call,
    first: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int, int, bool] = (0, 0, False),
) -> tuple[Any, ...]:
    """INPUTS for a call, the engine's name after the tensors."""
    form = call.form
    # An engine reads it on the host, whatever device is the default.
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu") if call.dropout > 0 else None
    return (
        call.q, call.k, call.v, call.mask, call.bias, call.slopes,
        three(call.scale), three(form.level), three(_served(form)), seed, *first,
        name, form.profile, form.rule, form.k, call.diagonal, call.left, call.right,
        number(call.scale), number(form.level), number(form.r), call.dropout, *longest,
    )  # fmt: skip


def apply(args: tuple[Any, ...]) -> Tensor:
    """The output for these arguments, with gradients where they are wanted."""
    if learns(args) or torch._C._are_functorch_transforms_active():
        return _Attention.apply(*args)[0]
    return run_forward(*args, False)[0]


def run_varlen(
    name: str,
    call: Call,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    lower_right: bool = False,
) -> Tensor:
    """Attention of packed sequences, each to its own keys: (1, H, total_q, Ev), with gradients.

    Args:
        name: the engine's.
        call: q (1, H, total_q, E), k and v (1, Hk, total_k, …), no mask and no bias; positions for the
            window, causality and ALiBi count from each sequence's first row.
        cu_seq_q: (sequences + 1,) integers, where each sequence's queries begin, then total_q.
        cu_seq_k: the same for the keys.
        max_q: at least the longest number of queries.
        max_k: at least the longest number of keys.
        lower_right: align each sequence's last query with its last key, instead of first with first.

    Raises:
        ValueError: offsets that do not ascend from 0 to the totals, or lengths beyond max_q or max_k.
    """
    if call.mask is not None or call.bias is not None:
        raise ValueError("packed sequences take no mask: use is_causal or window")
    offsets = packed(call, cu_seq_q, cu_seq_k, max_q, max_k)
    return apply(arguments(name, call, offsets, (max_q, max_k, lower_right)))
