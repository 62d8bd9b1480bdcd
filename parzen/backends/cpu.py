"""The CPU engine: exact attention whose cost follows the support (``parzen/csrc``).

    o_i = Σ_{j in support} w_ij v_j        ds_ij = a_ij (do_i·v_j − μ_i) on the support, 0 elsewhere

One pass over the keys keeps, per query, the candidates above a rising lower bound of its threshold; what
is left at the end is the support. Value product and backward visit the support only, or go block by
block with matrix products where a tile of queries has a dense one. The library is plain C, without
libtorch and OpenMP, and runs on torch's own thread pool; results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parzen.backends import Call, packed, reference
from parzen.kernels import Form, Number

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# A query's support list holds this many keys on average over its tile; a tile that needs more is
# recomputed in backward. It bounds what forward saves: 8 bytes an entry in float32, and only entries in
# use become resident.
PER_ROW = 512


# ---- the library ---------------------------------------------------------------------------------


class _Engine:
    """The loaded library, its instruction set, and torch's parallel loop."""

    def __init__(self, lib: ctypes.CDLL, isas: tuple[str, ...], isa: str, number: int) -> None:
        self.isas, self.isa, self.number = isas, isa, number
        self.forward, self.backward = lib.parzen_forward, lib.parzen_backward
        self.recall, self.code = lib.parzen_recall, lib.parzen_code
        for f in (self.forward, self.backward, self.recall, self.code):
            f.argtypes = (ctypes.c_int64, ctypes.c_char_p)
            f.restype = ctypes.c_int32
        self.parallel_for = _parallel_for()


def _parallel_for() -> int:
    """The address of ``torch_parallel_for``, or 0 where this torch does not export it."""
    try:
        lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(lib.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _path() -> Path | None:
    """The library. An editable install keeps it in another folder of the package's path.

    PARZEN_ENGINE names another build, such as one with sanitizers.
    """
    if other := os.environ.get("PARZEN_ENGINE"):
        return Path(other)
    places = (Path(folder) / "_engine" / "engine.so" for folder in sys.modules["parzen"].__path__)
    return next((place for place in places if place.exists()), None)


def _open() -> tuple[ctypes.CDLL, list[str]] | None:
    """The library and its instruction sets, worst first, "" where this processor lacks one."""
    path = _path()
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    lib.parzen_isa.argtypes = (ctypes.c_int64,)
    lib.parzen_isa.restype = ctypes.c_char_p
    lib.parzen_args_size.restype = ctypes.c_int64
    if lib.parzen_args_size() != _ARGS.size or not hasattr(lib, "parzen_recall"):
        raise ImportError(f"{path} was built from another version of parzen: build it again")
    names: list[str] = []
    while (name := lib.parzen_isa(len(names))) is not None:
        names.append(name.decode())
    return lib, names


def _choose(isa: str | None) -> _Engine | None:
    """The engine for ``isa``, or for the best instruction set; None where it was not built.

    Raises:
        ValueError: the instruction set is not available; the available ones are named.
    """
    opened = _open()
    if opened is None:
        return None
    lib, names = opened
    usable = tuple(name for name in names if name)
    isa = isa or usable[-1]
    if isa not in usable:
        raise ValueError(f"PARZEN_CPU_ISA={isa!r}: this processor and build have {', '.join(usable)}")
    return _Engine(lib, usable, isa, names.index(isa))


@cache
def _engine() -> _Engine | None:
    return _choose(os.environ.get("PARZEN_CPU_ISA"))


@torch.compiler.assume_constant_result
def _built() -> bool:
    return _engine() is not None


def info() -> dict[str, Any]:
    """What was built and what is in use, as plain data."""
    engine = _engine()
    if engine is None:
        return {"built": False, "isas": [], "isa": None, "threads": None}
    return {
        "built": True,
        "isas": list(engine.isas),
        "isa": engine.isa,
        "threads": "torch's pool" if engine.parallel_for else "one (this torch exports no parallel loop)",
    }


# ---- one call of the library ---------------------------------------------------------------------

# struct Args of csrc/engine.h: 8-byte fields in the same order.
_VIEW = "5q"
_ARGS = struct.Struct("=" + "15q" + "4d" + "6q" + 6 * _VIEW + 4 * _VIEW + "6q" + 5 * _VIEW + "8q")
_NO_VIEW = (0, 0, 0, 0, 0)


def _view(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides, 0 along the axes that broadcast."""
    if x is None:
        return _NO_VIEW
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return (x.data_ptr(), *strides, *[0] * (4 - len(strides)))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with unit stride and a multiple of 16 columns along the last axis."""
    x = x.to(dtype)
    if x.shape[-1] % 16:
        return F.pad(x, (0, -x.shape[-1] % 16))
    return x if x.stride(-1) == 1 else x.contiguous()


def _as(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _pack(
    inputs: Sequence[Any],
    numbers: tuple[Any, ...],
    o: Tensor | None,
    saved: tuple[Tensor, ...] | None,
    backward: tuple[int, ...],
) -> bytes:
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, seed, first_q, first_k = inputs
    profile, rule, nearest, diagonal, left, right, scale, level, r, dropout, *packed = numbers
    engine = _engine()
    assert engine is not None
    b, h, t, e = q.shape
    rows, s, lower_right = t, k.shape[2], False
    if first_q is not None:
        b = first_q.numel() - 1
        t, s, lower_right = packed
    threads = torch.get_num_threads()
    row_views = (*_view(scale_at), *_view(level_at), *_view(r_at))
    slope_view = _NO_VIEW if slopes is None else (*_view(slopes)[:3], 0, 0)
    saves = (0, 0, 0, 0, 0, 0) if saved is None else (*map(_address, saved), saved[3].shape[-1])
    return _ARGS.pack(
        b, h, k.shape[1], t, s, e, v.shape[3],
        q.dtype == torch.float64, profile, rule, nearest, diagonal, left, right, threads,
        scale, level, r, dropout,
        engine.parallel_for, _address(first_q), _address(first_k), rows, lower_right, _address(seed),
        *_view(q), *_view(k), *_view(v), *_view(o), *_view(mask), *_view(bias),
        *slope_view, *row_views,
        *saves,
        *backward,
    )  # fmt: skip


def _check(status: int) -> None:
    if status:
        raise MemoryError("the CPU engine ran out of memory")


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? scale_at, "
    "Tensor? level_at, Tensor? r_at, Tensor? seed, Tensor? first_q, Tensor? first_k, int profile, int rule, "
    "int nearest, SymInt diagonal, SymInt left, SymInt right, float scale, float level, float r, "
    "float dropout, SymInt longest_q, SymInt longest_k, bool lower_right"
)
_library = torch.library.Library("parzen", "FRAGMENT")
_library.define(
    f"cpu_forward({_INPUTS}, bool save) -> (Tensor o, Tensor stats, Tensor where, Tensor count, "
    "Tensor index, Tensor score)"
)
_library.define(
    f"cpu_backward(Tensor do, {_INPUTS}, Tensor stats, Tensor where, Tensor count, Tensor index, "
    "Tensor score, bool[] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, "
    "Tensor dscale, Tensor dlevel, Tensor dr)"
)
# How many of the inputs above are tensors, where the seed is, and dropout among the numbers.
_TENSORS, _SEED, _DROPOUT = 12, 9, 9


def _saved(q: Tensor, k: Tensor, save: bool) -> tuple[Tensor, ...]:
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
    q, k, v = args[:3]
    numbers, save = args[_TENSORS:-1], args[-1]
    saved = _saved(q, k, save)
    if 0 in (q.shape[0], q.shape[1], q.shape[2]):
        return q.new_empty((*q.shape[:3], v.shape[3])), *saved
    inputs = _prepare(args[:_TENSORS])
    o = inputs[0].new_empty((*q.shape[:3], inputs[2].shape[3]))
    engine = _engine()
    assert engine is not None
    no_backward = 5 * _NO_VIEW + 8 * (0,)
    packed = _pack(inputs, numbers, o, saved if save else None, no_backward)
    _check(engine.forward(engine.number, packed))
    return o[..., : v.shape[3]].to(q.dtype), *saved


def _gradient_shapes(args: Sequence[Any], needs: Sequence[bool]) -> list[tuple[int, ...]]:
    """Of bias, slopes, scale_at, level_at and r_at: zero elements where not needed."""
    q, bias = args[0], args[4]
    rows = tuple(q.shape[:3])
    shapes = [tuple(bias.shape) if needs[0] else (0,)]
    return shapes + [rows if need else (0,) for need in needs[1:]]


def _backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v = args[:3]
    needs: list[bool] = args[-1]
    saved = tuple(x.contiguous() for x in args[-6:-1])
    numbers = args[_TENSORS:-6]
    dtype = reference.compute_dtype(q.dtype)
    extra = [torch.zeros(shape, dtype=dtype) for shape in _gradient_shapes(args, needs)]
    if 0 in (q.shape[0], q.shape[1], q.shape[2]):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *extra
    inputs = _prepare(args[:_TENSORS])
    do = _rows(do, dtype)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype) for x in inputs[:3])
    dbias = extra[0] if needs[0] else None
    dslopes, dscale, dlevel, dr = (
        _address(x) if need else 0 for x, need in zip(extra[1:], needs[1:], strict=True)
    )
    engine = _engine()
    assert engine is not None
    sizes = tuple(dbias.shape) if dbias is not None else (0, 0, 0, 0)
    backward = (
        *_view(do), *_view(dq), *_view(dk), *_view(dv), *_view(dbias), *sizes, dscale, dlevel, dr, dslopes
    )  # fmt: skip
    packed = _pack(inputs, numbers, None, saved, backward)
    _check(engine.backward(engine.number, packed))
    grads = [g[..., : x.shape[3]].to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)]
    return *grads, *extra


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    q, k, v = args[:3]
    return q.new_empty((*q.shape[:3], v.shape[3])), *_saved(q, k, args[-1])


def _fake_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v = args[:3]
    dtype = reference.compute_dtype(q.dtype)
    extra = [q.new_empty(shape, dtype=dtype) for shape in _gradient_shapes(args, args[-1])]
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *extra)


_library.impl("cpu_forward", _forward, "CPU")
_library.impl("cpu_backward", _backward, "CPU")
torch.library.register_fake("parzen::cpu_forward", _fake_forward, lib=_library)
torch.library.register_fake("parzen::cpu_backward", _fake_backward, lib=_library)


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
        folded.append(x if _SEED <= n < _TENSORS else _fold(x, d, size))
    return folded


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // size))


def _refuse_packed(args: Sequence[Any]) -> None:
    if args[_SEED + 1] is not None:
        raise RuntimeError("packed sequences have no vmap rule: pack the samples instead")


class _Attention(torch.autograd.Function):
    """(inputs of cpu_forward) → (o, what backward needs)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.parzen.cpu_forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.numbers = inputs[_TENSORS:]
        ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> Any:
        nothing = (None,) * (_TENSORS + len(ctx.numbers))
        if do is None:
            return nothing
        tensors = ctx.saved_tensors
        needs = [bool(n) for n in ctx.needs_input_grad[4:9]]
        args = (do, *tensors[:_TENSORS], *ctx.numbers, *tensors[_TENSORS:], needs)
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


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    """cpu_backward with every gradient reduced to the shape of its input."""
    tensors, needs = args[5:10], args[-1]
    dq, dk, dv, *rest = torch.ops.parzen.cpu_backward(*args)
    reduced = []
    for n, (grad, x, need) in enumerate(zip(rest, tensors, needs, strict=True)):
        if need and n == 1:
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
        ctx.numbers, ctx.count = inputs[1 + _TENSORS : -6], len(inputs)
        ctx.needs = inputs[-1]
        ctx.save_for_backward(*inputs[: 1 + _TENSORS])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        do, *tensors = ctx.saved_tensors
        if ctx.numbers[_DROPOUT] > 0:
            raise RuntimeError(
                "the CPU engine has no second derivative with dropout_p > 0; use dropout_p = 0"
            )
        # q, k, v, and those of bias, slopes, scale, level and r that have a gradient.
        chosen = [0, 1, 2] + [4 + n for n, need in enumerate(ctx.needs) if need]

        def first(do: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            def value(*inputs: Tensor) -> Tensor:
                given = list(tensors)
                for n, x in zip(chosen, inputs, strict=True):
                    given[n] = x
                return _dense(given, ctx.numbers)

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
        size, saved = info.batch_size, args[-6:-1]
        needs = args[-1]
        if in_dims[-6] is None:
            # Only do differs between the samples.
            samples = [_Backward.apply(x, *args[1:]) for x in args[0].movedim(in_dims[0], 0)]
            return tuple(torch.stack(g) for g in zip(*samples, strict=True)), (0,) * 8
        do = args[0].expand(size, *args[0].shape) if in_dims[0] is None else args[0].movedim(in_dims[0], 0)
        inputs = _fold_inputs(size, in_dims[1:-6], args[1:-6])
        lists = [x.movedim(d, 0).flatten(0, 1) for x, d in zip(saved, in_dims[-6:-1], strict=True)]
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


# ---- the backend ---------------------------------------------------------------------------------


def _three(x: Number) -> Tensor | None:
    """A tensor parameter, broadcastable to (B, H, T), with exactly three axes."""
    if not isinstance(x, Tensor):
        return None
    return x[(None,) * (3 - x.ndim)]


def _number(x: Number) -> float:
    return 0.0 if isinstance(x, Tensor) else x


def _dense(tensors: Sequence[Any], numbers: tuple[Any, ...]) -> Tensor:
    """What these arguments of cpu_forward stand for, by the dense reference."""
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, _, first_q, first_k = tensors
    profile, rule, nearest, diagonal, left, right, scale, level, r, _, _, _, lower_right = numbers

    def one(rows: slice, columns: slice, diagonal: int) -> Tensor:
        def cut(x: Any, other: float) -> Any:
            return other if x is None else x if x.shape[-1] == 1 else x[..., rows]

        form = Form(profile, rule, cut(r_at, r), cut(level_at, level), nearest)
        call = Call(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], cut(scale_at, scale), form,
            None, mask, bias, slopes, diagonal, left, right,  # type: ignore[arg-type]
        )  # fmt: skip
        return reference.run(call)

    if first_q is None:
        return one(slice(None), slice(None), diagonal)
    parts = []
    starts = zip(first_q.tolist(), first_q[1:].tolist(), first_k.tolist(), first_k[1:].tolist(), strict=False)
    for q0, q1, k0, k1 in starts:
        corner = (k1 - k0) - (q1 - q0) if lower_right else 0
        parts.append(one(slice(q0, q1), slice(k0, k1), diagonal + corner))
    return torch.cat(parts, 2)


def why_not(call: Call) -> str | None:
    """None if ``run`` can serve the call, else a sentence that says why not."""
    if call.q.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {call.q.device}"
    if call.q.dtype not in _DTYPES:
        return f"the CPU engine computes in float32 and float64, the inputs are {call.q.dtype}"
    if torch.compiler.is_exporting():
        return "an exported graph must consist of plain operators"
    if call.dropout > 0 and torch._C._are_functorch_transforms_active():
        return "the CPU engine draws dropout by the place in the batch, which vmap changes"
    if call.k.shape[2] >= 2**31:
        return "the CPU engine numbers keys in 32 bits"
    if not _built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return None


def _arguments(
    call: Call,
    first: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int, int, bool] = (0, 0, False),
) -> tuple[Any, ...]:
    """The inputs of cpu_forward."""
    form = call.form
    # The engine reads it, whatever device is the default.
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu") if call.dropout > 0 else None
    return (
        call.q, call.k, call.v, call.mask, call.bias, call.slopes,
        _three(call.scale), _three(form.level), _three(form.r), seed, *first,
        form.profile, form.rule, form.k, call.diagonal, call.left, call.right,
        _number(call.scale), _number(form.level), _number(form.r), call.dropout, *longest,
    )  # fmt: skip


def _apply(args: tuple[Any, ...]) -> Tensor:
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:_TENSORS])
    if learns or torch._C._are_functorch_transforms_active():
        return _Attention.apply(*args)[0]
    return torch.ops.parzen.cpu_forward(*args, False)[0]


def run(call: Call) -> Tensor:
    """Attention (B, H, T, Ev), with gradients of every tensor in the call."""
    return _apply(_arguments(call))


def run_varlen(
    call: Call,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    lower_right: bool = False,
) -> Tensor:
    """Attention of packed sequences, each to its own keys: (1, H, total_q, Ev), with gradients.

    Args:
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
    return _apply(_arguments(call, offsets, (max_q, max_k, lower_right)))


def support(call: Call) -> Tensor:
    """How many keys each query keeps: (B, H, T), int32, without any (T, S) array."""
    reason = why_not(call)
    if reason is not None:
        raise ValueError(reason)
    return torch.ops.parzen.cpu_forward(*_arguments(call), True)[3]
