"""The door: one call of attention, its checks and defaults, and the offsets of packed sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from parzen import kernels
from parzen.kernels import LARGEST, LEAST, UNLIMITED, Form, Kernel, Number, lower, plain


# Not frozen, which would cost a small call a tenth; nothing writes to it.
@dataclass(slots=True, eq=False)
class Call:
    """One attention call after validation: four-dimensional, defaults resolved, numbers only.

    ``scores[b,h,i,j] = scale[b,h,i] · q[b,h,i]·k[b,h//g,j] + bias − slope[b,h]·|i + diagonal − j|`` with
    g = H // Hk, and key j allowed for query i when ``mask`` is True there and
    ``−left ≤ j − (i + diagonal) ≤ right`` (a negative ``left`` or ``right`` is no limit; causal is
    ``right = 0``).
    """

    q: Tensor  # (B, H, T, E)
    k: Tensor  # (B, Hk, S, E)
    v: Tensor  # (B, Hk, S, Ev)
    scale: Number  # float, or broadcastable to (B, H, T)
    form: Form
    kernel: Kernel
    mask: Tensor | None = None  # bool, four-dimensional, broadcastable to (B, H, T, S)
    bias: Tensor | None = None  # floating, likewise, added to the scaled scores
    slopes: Tensor | None = None  # (1 or B, H); B is the number of sequences where they are packed
    diagonal: int = 0
    left: int = -1
    right: int = -1
    dropout: float = 0.0


def check_scale(scale: Number, tensors: bool = True) -> None:
    """Raise unless ``scale`` is a finite number > 0, or a tensor of such."""
    kernels.check("scale = 1/h²", scale, LEAST, LARGEST, "finite and > 0 in float32", tensors)


_FLAGS = (bool, np.bool_, torch.SymBool)


def autocasts(device: str) -> bool:
    """Whether autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_flags(**flags: object) -> None:
    """Raise unless every flag is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, _FLAGS):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_window(window: Any) -> tuple[int, int]:
    """(left, right), with −1 for no limit; so is a limit beyond every length."""
    pair = [plain(n) for n in window] if isinstance(window, tuple | list) else []
    whole = all(isinstance(n, int | torch.SymInt) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not whole or not all(n >= -1 for n in pair):
        raise ValueError(f"window must be (left, right), integers ≥ −1 (−1 is no limit), got {window!r}")
    left, right = (-1 if n >= UNLIMITED else n for n in pair)
    return left, right


def check_tensor(name: str, x: object) -> None:
    """Raise unless ``x`` is a dense floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got a {'nested' if x.is_nested else x.layout} one; for "
            "sequences of several lengths see attention_varlen"
        )
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {x.dtype}")


def check_together(**tensors: object) -> None:
    """Raise unless all tensors are on the device of the first, without tangents of forward mode."""
    first, device = "", None
    forward_mode = forward_ad._current_level >= 0
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            continue
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(f"{name} is on {x.device} and {first} on {device}: move one of them")
        # Of nested transforms only the innermost shows: a wrapped tensor may carry a tangent further in.
        if forward_mode and (
            torch._C._functorch.is_functorch_wrapped_tensor(x)
            or forward_ad.unpack_dual(x).tangent is not None
        ):
            raise NotImplementedError(
                f"{name} has a tangent, and parzen has no forward-mode derivatives: use torch.func.jacrev, "
                "vjp or torch.autograd.functional.jvp, which take reverse mode"
            )


def _four(x: Tensor, lead: tuple[int, ...], tail: int, name: str) -> Tensor:
    """x, broadcastable to (*lead, …tail axes), with its leading axes made one; broadcasts stay views."""
    if x.ndim <= tail or len(lead) == 1:
        return x[(None,) * (1 + tail - x.ndim)] if x.ndim <= tail else x
    head = x.shape[:-tail] if tail else x.shape
    if all(n == 1 for n in head):
        return x.reshape(1, *x.shape[len(head) :])
    try:
        return x.expand(*lead, *x.shape[len(head) :]).reshape(-1, *x.shape[len(head) :])
    except RuntimeError as error:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to leading axes {lead}"
        ) from error


def fits(x: Any, shape: tuple[int, ...], name: str, axes: str) -> None:
    """Raise if the tensor ``x`` does not broadcast to ``shape``."""
    if isinstance(x, Tensor):
        sizes = zip(reversed(x.shape), reversed(shape), strict=False)
        if x.ndim > len(shape) or not all(n == 1 or n == m for n, m in sizes):
            raise ValueError(f"{name} must broadcast to {axes} = {shape}, got {tuple(x.shape)}")


def slopes_of(slopes: Tensor, query: Tensor, batch: int, heads: int) -> Tensor:
    """ALiBi slopes as (1 or B, H)."""
    check_tensor("alibi_slopes", slopes)
    check_together(query=query, alibi_slopes=slopes)
    fits(slopes, (batch, heads), "alibi_slopes", "(B, H)")
    slopes = slopes.expand(heads)[None] if slopes.ndim < 2 else slopes
    return slopes.expand(-1, heads)


class _Layout(NamedTuple):
    """What the shapes of a call say."""

    batch: tuple[int, ...]
    heads: int
    key_heads: int
    lead: tuple[int, ...]  # the (…, H) axes of the result
    four: bool  # whether query, key and value are (B, H, T, E), (B, Hk, S, E) and (B, Hk, S, Ev) already


def _layout(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> _Layout:
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 2:
            raise ValueError(f"{name} must be (…, H, length, size), got shape {tuple(shape)}")
    if query[-1] != key[-1]:
        raise ValueError(f"query and key sizes differ: {query[-1]} and {key[-1]}")
    if key[-2] != value[-2]:
        raise ValueError(f"key and value lengths differ: {key[-2]} and {value[-2]}")
    batches = query[:-3], key[:-3], value[:-3]
    batch: tuple[int, ...] = batches[0]
    # torch.broadcast_shapes costs more than a small call takes.
    if not batch == batches[1] == batches[2]:
        try:
            batch = torch.broadcast_shapes(*batches)
        except RuntimeError as error:
            raise ValueError(f"leading axes do not broadcast: {[tuple(b) for b in batches]}") from error
    heads, key_heads, value_heads = (x[-3] if len(x) > 2 else 1 for x in (query, key, value))
    if key_heads != value_heads:
        raise ValueError(f"key has {key_heads} heads but value {value_heads}")
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
        if heads == 1 and not enable_gqa:
            heads = key_heads
        elif key_heads != 1 or enable_gqa:
            hint = "must be a multiple" if enable_gqa else "must agree, or pass enable_gqa=True"
            raise ValueError(f"query has {heads} heads and key {key_heads}: they {hint}")
    lead = (*batch, heads) if max(len(query), len(key), len(value)) > 2 else ()
    four = len(batch) == 1 and (*batch, heads) == query[:-2] and (*batch, key_heads) == key[:-2] == value[:-2]
    return _Layout(tuple(batch), heads, key_heads, lead, four)


def _lowered(kernel: str | Kernel, scale: Number) -> tuple[Kernel, Form]:
    check_scale(scale)
    chosen = kernels.kernel(kernel)
    return chosen, lower(chosen, scale)


# Programs repeat calls of few shapes, kernels and scales: what follows from these alone is worked out once.
# Mistakes are not remembered, they raise again.
_known_layout = lru_cache(256)(_layout)
_known_lowered = lru_cache(256)(_lowered)


def make(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Number | None,
    enable_gqa: bool,
    kernel: str | Kernel,
    window: tuple[int, int] | None,
    alibi_slopes: Tensor | None,
) -> tuple[Call, tuple[int, ...]]:
    """The call in four dimensions, and the (…, H) axes of the result."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    settled = kernels.eager(query, key, value)
    layout = _known_layout if settled else _layout
    batch, heads, key_heads, lead, as_given = layout(query.shape, key.shape, value.shape, enable_gqa)

    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        as_given = False
        dtypes = query.dtype, key.dtype, value.dtype
        try:
            dtype = reduce(torch.promote_types, dtypes)
        except RuntimeError as error:
            found = ", ".join(map(str, dtypes))
            raise TypeError(f"query, key and value have no common dtype, convert them: {found}") from error
    device = query.device.type
    if autocasts(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        as_given = False

    def four(x: Tensor, h: int) -> Tensor:
        x = x if x.dtype == dtype else x.to(dtype)
        shape = x.shape
        x = x.expand(*batch, h, *shape[-2:]) if shape[:-2] != (*batch, h) else x
        return x[None] if not batch else x if len(batch) == 1 else x.flatten(0, len(batch) - 1)

    q, k, v = query, key, value
    if not as_given:
        q, k, v = four(q, heads), four(k, key_heads), four(v, key_heads)
    _, _, rows, size = q.shape
    columns = k.shape[2]

    dropout_p, scale = plain(dropout_p), plain(scale)
    kernels.check("dropout_p", dropout_p, 0, 1, "in [0, 1]", tensors=False)
    if scale is None:
        scale = 1 / math.sqrt(size) if size else 1.0
    lowered = _known_lowered if settled and type(kernel) is str and type(scale) is float else _lowered
    chosen, form = lowered(kernel, scale)
    batch_or_one = batch or (1,)

    def per_row(x: Number, name: str) -> Number:
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 1 and name != "scale":
            x = x[:, None]  # of a kernel's parameter, one number per head
        fits(x, (*batch_or_one, heads, rows), name, "(…, H, T)")
        return _four(x, batch_or_one, 2, name)

    if isinstance(scale, Tensor):
        scale = per_row(scale, "scale")
        form = lower(chosen, scale)
    if isinstance(form.r, Tensor) or isinstance(form.level, Tensor):
        form = replace(form, r=per_row(form.r, "alpha"), level=per_row(form.level, "margin"))
    mask, bias, causal, lower_right = _masks(attn_mask, is_causal, rows, columns)
    check_together(
        query=query, key=key, value=value, attn_mask=mask if bias is None else bias, scale=scale,
        alpha=form.r, margin=form.level,
    )  # fmt: skip

    def dense(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        fits(x, (*batch_or_one, heads, rows, columns), "attn_mask", "(…, H, T, S)")
        return _four(x, batch_or_one, 3, "attn_mask")

    mask, bias = dense(mask), dense(bias)

    left, right = (-1, -1) if window is None else check_window(window)
    if causal:
        right = 0
    if alibi_slopes is not None:
        alibi_slopes = slopes_of(alibi_slopes, query, q.shape[0], heads)
    diagonal = 0 if causal and not lower_right else columns - rows
    return (
        Call(
            q, k, v, scale, form, chosen, mask, bias, alibi_slopes,
            diagonal, left, right, float(dropout_p),
        ),
        lead,
    )  # fmt: skip


def _masks(
    attn_mask: Any, is_causal: bool, rows: int, columns: int
) -> tuple[Tensor | None, Tensor | None, bool, bool]:
    """(bool mask, additive bias, causal?, lower-right aligned?)."""
    if attn_mask is None:
        return None, None, is_causal, False
    if is_causal_bias(attn_mask):
        _same_lengths("causal bias", (attn_mask.seq_len_q, attn_mask.seq_len_kv), rows, columns)
        lower_right = attn_mask.variant.name == "LOWER_RIGHT"
        if is_causal and lower_right and rows != columns:
            raise ValueError("is_causal is upper-left aligned and attn_mask lower-right: give one of them")
        return None, None, True, lower_right
    if hasattr(attn_mask, "mask_mod") and hasattr(attn_mask, "to_dense"):
        return _block_mask(attn_mask, rows, columns), None, is_causal, False
    if isinstance(attn_mask, Tensor) and (attn_mask.is_nested or attn_mask.layout != torch.strided):
        raise TypeError("attn_mask must be a dense tensor: call to_dense() on it")
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or a causal bias, got {type(attn_mask).__name__}")
    if attn_mask.dtype == torch.bool:
        return attn_mask, None, is_causal, False
    if not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating-point, got {attn_mask.dtype}")
    return None, forbid(attn_mask), is_causal, False


def is_causal_bias(mask: Any) -> bool:
    """Whether it is a ``torch.nn.attention.bias.CausalBias``, whose module imports the compiler."""
    return hasattr(mask, "variant") and hasattr(mask, "seq_len_kv")


def _same_lengths(kind: str, made: tuple[int, int], rows: int, columns: int) -> None:
    if made != (rows, columns):
        raise ValueError(f"the {kind} was made for lengths {made}, the call has ({rows}, {columns})")


def _block_mask(block_mask: Any, rows: int, columns: int) -> Tensor:
    """The keys that a flex-attention ``BlockMask`` allows: in one of its blocks, and by its function."""
    from torch.nn.attention.flex_attention import create_mask

    _same_lengths("block mask", tuple(block_mask.seq_lengths), rows, columns)
    blocks = block_mask.to_dense().bool()
    for axis, size in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
        blocks = blocks.repeat_interleave(size, axis)
    batch, heads = block_mask.shape[:2]
    dense = create_mask(block_mask.mask_mod, batch, heads, rows, columns, device=str(blocks.device))
    return dense & blocks[..., :rows, :columns]


def forbid(scores: Tensor) -> Tensor:
    """The dtype's most negative finite number is what many callers write for −∞: read it so."""
    # An expanded tensor stays small: its broadcast axes are looked at once.
    small = scores.float() if scores.dtype.itemsize == 1 else scores
    for axis, stride in enumerate(scores.stride()):
        small = small if stride else small.narrow(axis, 0, min(1, small.shape[axis]))
    return torch.where(small <= torch.finfo(scores.dtype).min, -torch.inf, small).expand_as(scores)


def restore(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(B, H, …) with the leading axes that the caller gave."""
    return x if x.shape[:2] == lead else x.reshape(*lead, *x.shape[2:])


# ---- packed sequences ----------------------------------------------------------------------------

# An operator, so that a compiled graph looks at the values when it runs.
_library = torch.library.Library("parzen", "FRAGMENT")
_library.define(
    "offsets(Tensor cu_q, Tensor cu_k, SymInt total_q, SymInt total_k, SymInt max_q, SymInt max_k) "
    "-> (Tensor, Tensor)"
)


def _offsets(
    cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    for name, cu, most, total in (("q", cu_q, max_q, total_q), ("k", cu_k, max_k, total_k)):
        if cu[0] != 0 or cu[-1] != total:
            raise ValueError(f"cu_seq_{name} must ascend from 0 to {total}, got {cu.tolist()}")
        lengths = cu.to(torch.int64).diff()
        if bool(((lengths < 0) | (lengths > most)).any()):
            raise ValueError(f"cu_seq_{name} must ascend by at most max_{name} = {most}, got {cu.tolist()}")
    if cu_q.shape != cu_k.shape:
        raise ValueError("cu_seq_q and cu_seq_k must hold the same number of sequences")
    return cu_q.to(torch.int64, copy=True).contiguous(), cu_k.to(torch.int64, copy=True).contiguous()


_library.impl("offsets", _offsets, "CompositeExplicitAutograd")
torch.library.register_fake(
    "parzen::offsets",
    lambda cu_q, cu_k, *_: tuple(cu.new_empty(cu.shape, dtype=torch.int64) for cu in (cu_q, cu_k)),
    lib=_library,
)


def packed(call: Call, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int) -> tuple[Tensor, Tensor]:
    """The offsets of packed sequences as int64, checked against the lengths of ``call``.

    Raises:
        ValueError: offsets that do not ascend from 0 to the totals, or lengths beyond max_q or max_k.
        TypeError: offsets that are not tensors of integers.
    """
    for name, cu, most in (("q", cu_seq_q, max_q), ("k", cu_seq_k, max_k)):
        if not isinstance(cu, Tensor) or cu.is_floating_point() or cu.is_complex() or cu.dtype == torch.bool:
            got = cu.dtype if isinstance(cu, Tensor) else type(cu).__name__
            raise TypeError(f"cu_seq_{name} must be a tensor of integers, got {got}")
        if cu.ndim != 1 or cu.shape[0] < 1:
            raise ValueError(f"cu_seq_{name} must have shape (sequences + 1,), got {tuple(cu.shape)}")
        if cu.device != call.q.device:
            raise ValueError(
                f"cu_seq_{name} is on {cu.device} and query on {call.q.device}: move one of them"
            )
        if not isinstance(most, int | torch.SymInt) or isinstance(most, bool):
            raise TypeError(f"max_{name} must be an integer, got {most!r}")
        if most < 0:
            raise ValueError(f"max_{name} must be ≥ 0, got {most}")
    total_q, total_k = call.q.shape[2], call.k.shape[2]
    longest = torch.sym_min(max_q, total_q), torch.sym_min(max_k, total_k)
    return torch.ops.parzen.offsets(cu_seq_q, cu_seq_k, total_q, total_k, *longest)
