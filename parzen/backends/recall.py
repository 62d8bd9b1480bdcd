"""Attention to a store of keys and values that are kept as 8-bit integers as well (``csrc/memory.cpp``).

    scale·(q·c + Σ_e q_e d_e step_j code_je) ± slack_ij   bounds the score s_ij from both sides

with c and d a centre and a spread per coordinate of a chunk. Thresholds move with the scores: one found on
lower bounds is a lower bound, and a key whose upper bound lies below it is never read.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from parzen.backends import cpu, reference
from parzen.backends.engine import number, three
from parzen.call import Call
from parzen.kernels import Form

# Keys in a chunk, which is coded when it is full; a power of two, and a multiple of the engine's block.
CHUNK = 1024
BLOCK = 64
# The integer products of wider keys may not fit 32 bits.
_MOST_CODED = 1024
_STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

# struct Recall of csrc/memory.h: 8-byte fields in the same order.
_ARGS = struct.Struct("=15q3d3q" + 6 * "5q" + "2q")


@dataclass(frozen=True)
class Codes:
    """What bounds the scores of one full chunk: of each key, E bytes, a step and an error."""

    codes: Tensor  # (B, H, CHUNK/64, E/4, 64, 4) uint8
    bounds: Tensor  # (B, H, CHUNK/64, 2, 64) float32
    frame: Tensor  # (B, H, 2·E + 1) float32: c, d and a radius

    def reordered(self, index: Tensor) -> Codes:
        """Those of the sequences ``index``."""
        return Codes(*(x.index_select(0, index) for x in (self.codes, self.bounds, self.frame)))

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.codes.nbytes + self.bounds.nbytes + self.frame.nbytes


def entry(keys: Tensor, values: Tensor, codes: Codes | None) -> tuple[int, ...]:
    """struct Chunk of csrc/memory.h for (B, H, room, E) and (B, H, room, Ev), contiguous."""
    addresses = (0, 0, 0) if codes is None else (codes.codes, codes.bounds, codes.frame)
    return (
        keys.data_ptr(),
        values.data_ptr(),
        keys.shape[2] * keys.shape[3],
        values.shape[2] * values.shape[3],
        *(x.data_ptr() if isinstance(x, Tensor) else 0 for x in addresses),
    )


def why_not(keys: Tensor, form: Form | None = None) -> str | None:
    """None if ``run`` can serve keys (…, E) like these, and the kernel, else a sentence that says why not."""
    if keys.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {keys.device}"
    if not cpu._built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return None if form is None else form.beyond


def code(keys: Tensor) -> Codes | None:
    """The codes of a full chunk (B, H, CHUNK, E), contiguous; None where rows are too wide."""
    engine = cpu._engine()
    assert engine is not None
    b, h, n, e = keys.shape
    if not 0 < e <= _MOST_CODED or 0 in (b, h):
        return None
    blocks = n // BLOCK
    codes = Codes(
        keys.new_empty((b, h, blocks, -(-e // 4), BLOCK, 4), dtype=torch.uint8),
        keys.new_empty((b, h, blocks, 2, BLOCK), dtype=torch.float32),
        keys.new_empty((b, h, 2 * e + 1), dtype=torch.float32),
    )
    table = array("q", entry(keys, keys, codes))
    args = _ARGS.pack(
        b, h, h, 0, n, e, 0, _STORED[keys.dtype], *6 * (0,), torch.get_num_threads(), 0.0, 0.0, 0.0,
        engine.parallel_for, table.buffer_info()[0], n, *32 * (0,),
    )  # fmt: skip
    cpu._check(engine.code(engine.number, args))
    return codes


def run(call: Call, table: array, stored: torch.dtype, counts: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Attention (B, H, T, Ev) of ``call`` to the chunks of ``table``, in float32 or for float64 in that.

    Args:
        call: its keys and values only tell their shape; no bias, slopes or dropout.
        table: ``entry`` of every chunk, one after the other.
        stored: the type of keys and values.
        counts: two int64 tensors (B, H, T) that receive how many keys were read, and have weight.
    """
    dtype = reference.compute_dtype(stored)
    q = call.q.to(dtype)
    q = q if q.stride(-1) == 1 else q.contiguous()
    b, h, t, e = q.shape
    o = q.new_empty((b, h, t, call.v.shape[3]))
    form = call.form
    rows = [cpu._as(three(x), dtype) for x in (call.scale, form.level, form.r)]
    engine = cpu._engine()
    assert engine is not None
    args = _ARGS.pack(
        b, h, call.k.shape[1], t, call.k.shape[2], e, o.shape[3], _STORED[stored],
        form.profile, form.rule, form.k, call.diagonal, call.left, call.right, torch.get_num_threads(),
        number(call.scale), number(form.level), number(form.r),
        engine.parallel_for, table.buffer_info()[0], CHUNK,
        *cpu._view(q), *cpu._view(o), *cpu._view(call.mask), *(n for x in rows for n in cpu._view(x)),
        *(map(cpu._address, counts) if counts else (0, 0)),
    )  # fmt: skip
    cpu._check(engine.recall(engine.number, args))
    return o
