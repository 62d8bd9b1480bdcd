"""The CPU engine: exact attention whose cost follows the support (``parzen/csrc``).

    o_i = Σ_{j in support} w_ij v_j        ds_ij = a_ij (do_i·v_j − μ_i) on the support, 0 elsewhere

One pass over the keys keeps, per query, the candidates above a rising lower bound of its threshold; what
is left at the end is the support. Value product and backward visit the support only, or go block by
block with matrix products where a tile of queries has a dense one. The library is plain C, without
libtorch and OpenMP, and runs on torch's own thread pool; results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parzen.backends import engine, native, reference, sharding
from parzen.backends.engine import TENSORS, gradient_shapes
from parzen.call import Call
from parzen.kernels import EVERYWHERE, EXP, MARGIN, NEAREST, POWER, THRESHOLD, UNIT_MASS, recording

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# What csrc/engine.h enumerates.
PROFILES = (EXP, POWER)
RULES = (EVERYWHERE, UNIT_MASS, THRESHOLD, MARGIN, NEAREST)

# A query's support list holds this many keys on average over its tile; a tile that needs more is
# recomputed in backward. It bounds what forward saves: 8 bytes an entry in float32, and only entries in
# use become resident.
PER_ROW = 512
# Queries of a tile, whose lists follow one another (ROWS of csrc/engine.cpp).
TILE = 48


def _built() -> bool:
    return native.engine() is not None


# What torch.compiler.assume_constant_result does, without importing the compiler.
_built._dynamo_marked_constant = True  # type: ignore[attr-defined]


def info() -> dict[str, Any]:
    """What was built and what is in use, as plain data."""
    engine = native.engine()
    if engine is None:
        return {"built": False, "isas": [], "isa": None, "threads": None}
    return {
        "built": True,
        "isas": list(engine.isas),
        "isa": engine.isa,
        "threads": "torch's pool" if engine.parallel_for else "one (this torch exports no parallel loop)",
    }


# ---- one call of the library ---------------------------------------------------------------------


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with unit stride along the last axis."""
    x = _as(x, dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _as(x: Any, dtype: torch.dtype) -> Any:
    # A to() without work would take a small call a tenth longer.
    return x if x is None or x.dtype == dtype else x.to(dtype)


_LISTS = ("stats", "where", "count", "index", "score")


def _pack(
    inputs: Sequence[Any], numbers: Sequence[Any], saved: tuple[Tensor, ...] | None, **results: Any
) -> bytes:
    """``native.ARGS`` of a call; ``results`` are the fields that forward or backward alone has."""
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, seed, first_q, first_k = inputs
    profile, rule, nearest, diagonal, left, right, scale, level, r, dropout, *packed = numbers
    b, h, t, e = q.shape
    rows, s, lower_right = t, k.shape[2], False
    if first_q is not None:
        b = first_q.numel() - 1
        t, s, lower_right = packed
    stats, where, count, index, score = saved or (None,) * 5
    return native.ARGS.pack(
        B=b, H=h, Hk=k.shape[1], T=t, S=s, E=e, D=v.shape[3],
        is_double=q.dtype == torch.float64, profile=profile, rule=rule, nearest=nearest,
        diagonal=diagonal, left=left, right=right, threads=torch.get_num_threads(),
        scale=scale, level=level, r=r, dropout=dropout, parallel_for=native.loaded().parallel_for,
        first_q=first_q, first_k=first_k, rows=rows, lower_right=lower_right, seed=seed,
        q=q, k=k, v=v, mask=mask, bias=bias, slopes=slopes,
        scale_at=scale_at, level_at=level_at, r_at=r_at,
        stats=stats, where=where, count=count, index=index, score=score,
        per_row=0 if index is None else index.shape[-1], **results,
    )  # fmt: skip


def _saved(args: Sequence[Any], save: bool) -> tuple[Tensor, ...]:
    q, k = args[:2]
    b, h, t, _ = q.shape
    dtype = reference.compute_dtype(q.dtype)
    if not save:
        b = 0
    lists = (b, h, t, torch.sym_min(k.shape[2], PER_ROW))
    return (
        q.new_empty((b, h, t, 5), dtype=dtype),
        q.new_empty((b, h, t), dtype=torch.int64),
        q.new_empty((b, h, t), dtype=torch.int32),
        q.new_empty(lists, dtype=torch.int32),
        q.new_empty(lists, dtype=dtype),
    )


def _prepare(tensors: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, *rest = tensors
    dtype = reference.compute_dtype(q.dtype)
    return (
        *(_rows(x, dtype) for x in (q, k, v)),
        mask,
        *(_as(x, dtype) for x in (bias, slopes, scale_at, level_at, r_at)),
        *rest,
    )


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *args, save = args  # type: ignore[assignment]
    saved = _saved(args, save)
    return _output(args, saved if save else None), *saved


def _output(args: Sequence[Any], saved: tuple[Tensor, ...] | None) -> Tensor:
    """The output for INPUTS, which fills ``saved`` for backward."""
    q, _, v = args[:3]
    shape = q.shape[:3]
    if 0 in shape:
        return q.new_empty((*shape, v.shape[3]))
    inputs = _prepare(args[:TENSORS])
    o = inputs[0].new_empty((*shape, v.shape[3]))
    packed = _pack(inputs, args[TENSORS:], saved, o=o)
    native.loaded().call("forward", packed)
    found: Tensor = _as(o, q.dtype)
    return found


def _backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v = args[:3]
    needs: list[bool] = args[-1]
    saved = tuple(x.contiguous() for x in args[-6:-1])
    numbers = args[TENSORS:-6]
    dtype = reference.compute_dtype(q.dtype)
    shapes = gradient_shapes(args, needs)
    extra = [
        torch.zeros(shape, dtype=dtype) if need else do.new_empty(0, dtype=dtype)
        for shape, need in zip(shapes, needs, strict=True)
    ]
    if 0 in (q.shape[0], q.shape[1], q.shape[2]):
        return *(x.new_zeros(x.shape) for x in (q, k, v)), *extra
    inputs = _prepare(args[:TENSORS])
    do = _rows(do, dtype)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype) for x in inputs[:3])
    dbias = extra[0] if needs[0] else None
    dslopes, dscale, dlevel, dr = (x if need else None for x, need in zip(extra[1:], needs[1:], strict=True))
    axes = ("dbias_B", "dbias_H", "dbias_T", "dbias_S")
    sizes = () if dbias is None else zip(axes, dbias.shape, strict=True)
    packed = _pack(
        inputs, numbers, saved, dout=do, dq=dq, dk=dk, dv=dv, dbias=dbias, **dict(sizes),
        dscale=dscale, dlevel=dlevel, dr=dr, dslopes=dslopes,
    )  # fmt: skip
    native.loaded().call("backward", packed)
    return *(_as(g, x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)), *extra


engine.register("cpu", _forward, _backward, _saved, _LISTS, ("CPU",))


# ---- the backend ---------------------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    """None if ``run`` can serve the call, else a sentence that says why not."""
    if call.q.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {call.q.device}"
    if call.q.dtype not in _DTYPES:
        return f"the CPU engine computes in float32 and float64, the inputs are {call.q.dtype}"
    if recording():
        return "an exported graph must consist of plain operators"
    if call.dropout > 0 and (torch._C._are_functorch_transforms_active() or sharding.sharded(call.q)):
        return "the CPU engine draws dropout by the place in the batch, which vmap and sharding change"
    if call.k.shape[2] >= 2**31:
        return "the CPU engine numbers keys in 32 bits"
    if not _built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return engine.unknown(call.form, "the CPU engine", PROFILES, RULES)


def run(call: Call) -> Tensor:
    """Attention (B, H, T, Ev), with gradients of every tensor in the call."""
    args = engine.arguments("cpu", call)
    if engine.learns(args) or not engine.plain(args[:TENSORS]):
        return engine.apply(args)
    return _output(args[:TENSORS] + args[TENSORS + 1 :], None)


run_varlen = partial(engine.run_varlen, "cpu")


def support(call: Call) -> Tensor:
    """How many keys each query keeps: (B, H, T), int32, without any (T, S) array."""
    reason = why_not(call)
    if reason is not None:
        raise ValueError(reason)
    return engine.run_forward(*engine.arguments("cpu", call), True)[3]


def starts(where: Tensor, count: Tensor) -> Tensor:
    """Where each row's list begins in ``index`` and ``score``, −1 where it was not kept: (B, H, T)."""
    count = count.long()
    before = count.cumsum(-1) - count
    first = torch.arange(count.shape[-1]) // TILE * TILE
    tile = where[..., first]
    return torch.where(tile < 0, -1, tile + before - before[..., first])
