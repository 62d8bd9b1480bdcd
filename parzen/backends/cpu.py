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
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parzen.backends import engine, reference
from parzen.backends.engine import TENSORS, gradient_shapes
from parzen.call import Call
from parzen.kernels import recording

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# A query's support list holds this many keys on average over its tile; a tile that needs more is
# recomputed in backward. It bounds what forward saves: 8 bytes an entry in float32, and only entries in
# use become resident.
PER_ROW = 512
# Queries of a tile, whose lists follow one another (ROWS of csrc/engine.cpp).
TILE = 48


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
    complete = hasattr(lib, "parzen_recall") and hasattr(lib, "parzen_weights")
    if lib.parzen_args_size() != _ARGS.size or not complete:
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


def _built() -> bool:
    return _engine() is not None


# What torch.compiler.assume_constant_result does, without importing the compiler.
_built._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    return (x.data_ptr(), *strides, *_NO_VIEW[1 + len(strides) :])


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with unit stride and a multiple of 16 columns along the last axis."""
    x = _as(x, dtype)
    if x.shape[-1] % 16:
        return F.pad(x, (0, -x.shape[-1] % 16))
    return x if x.stride(-1) == 1 else x.contiguous()


def _as(x: Any, dtype: torch.dtype) -> Any:
    # A to() without work would take a small call a tenth longer.
    return x if x is None or x.dtype == dtype else x.to(dtype)


def _pack(
    inputs: Sequence[Any],
    numbers: Sequence[Any],
    o: Tensor | None,
    saved: tuple[Tensor, ...] | None,
    backward: tuple[int, ...],
) -> bytes:
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, seed, first_q, first_k = inputs
    profile, rule, nearest, diagonal, left, right, scale, level, r, dropout, *packed = numbers
    library = _engine()
    assert library is not None
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
        library.parallel_for, _address(first_q), _address(first_k), rows, lower_right, _address(seed),
        *_view(q), *_view(k), *_view(v), *_view(o), *_view(mask), *_view(bias),
        *slope_view, *row_views,
        *saves,
        *backward,
    )  # fmt: skip


def _check(status: int) -> None:
    if status:
        raise MemoryError("the CPU engine ran out of memory")


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


def _cut(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """x as ``_rows`` found it."""
    found: Tensor = _as(x if x.shape[3] == width else x[..., :width], dtype)
    return found


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *args, save = args  # type: ignore[assignment]
    saved = _saved(args, save)
    return _output(args, saved if save else None), *saved


_NO_BACKWARD = 5 * _NO_VIEW + 8 * (0,)


def _output(args: Sequence[Any], saved: tuple[Tensor, ...] | None) -> Tensor:
    """The output for INPUTS, which fills ``saved`` for backward."""
    q, _, v = args[:3]
    shape = q.shape[:3]
    if 0 in shape:
        return q.new_empty((*shape, v.shape[3]))
    inputs = _prepare(args[:TENSORS])
    o = inputs[0].new_empty((*shape, inputs[2].shape[3]))
    library = _engine()
    assert library is not None
    packed = _pack(inputs, args[TENSORS:], o, saved, _NO_BACKWARD)
    _check(library.forward(library.number, packed))
    return _cut(o, v.shape[3], q.dtype)


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
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *extra
    inputs = _prepare(args[:TENSORS])
    do = _rows(do, dtype)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype) for x in inputs[:3])
    dbias = extra[0] if needs[0] else None
    dslopes, dscale, dlevel, dr = (
        _address(x) if need else 0 for x, need in zip(extra[1:], needs[1:], strict=True)
    )
    library = _engine()
    assert library is not None
    sizes = tuple(dbias.shape) if dbias is not None else (0, 0, 0, 0)
    backward = (
        *_view(do), *_view(dq), *_view(dk), *_view(dv), *_view(dbias), *sizes, dscale, dlevel, dr, dslopes
    )  # fmt: skip
    packed = _pack(inputs, numbers, None, saved, backward)
    _check(library.backward(library.number, packed))
    return *(_cut(g, x.shape[3], x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)), *extra


engine.register("cpu", _forward, _backward, _saved, ("stats", "where", "count", "index", "score"), ("CPU",))


# ---- the backend ---------------------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    """None if ``run`` can serve the call, else a sentence that says why not."""
    if call.q.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {call.q.device}"
    if call.q.dtype not in _DTYPES:
        return f"the CPU engine computes in float32 and float64, the inputs are {call.q.dtype}"
    if recording():
        return "an exported graph must consist of plain operators"
    if call.dropout > 0 and torch._C._are_functorch_transforms_active():
        return "the CPU engine draws dropout by the place in the batch, which vmap changes"
    if call.k.shape[2] >= 2**31:
        return "the CPU engine numbers keys in 32 bits"
    if not _built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return call.form.beyond


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
