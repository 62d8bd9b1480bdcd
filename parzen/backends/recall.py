"""Attention to a store of keys and values that are kept as 8-bit integers as well (``csrc/memory.cpp``).

    scale·(q·c + Σ_e q_e d_e step_j code_je) ± slack_ij   bounds the score s_ij from both sides

with c and d a centre and a spread per coordinate of a chunk. Thresholds move with the scores: one found on
lower bounds is a lower bound, and a key whose upper bound lies below it is never read.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from parzen.backends import cpu, native, reference
from parzen.backends.engine import number, three, unknown
from parzen.call import Call
from parzen.kernels import Form

# Keys in a chunk, which is coded when it is full; a power of two, and a multiple of the engine's block.
CHUNK = 1024
BLOCK = 64
# The integer products of wider keys may not fit 32 bits.
_MOST_CODED = 1024
# Numbers of 8 bytes in an ``entry``.
ENTRY = native.CHUNK.size // 8
_STORED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


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


def entry(keys: Tensor, values: Tensor, codes: Codes | None) -> bytes:
    """struct Chunk of csrc/memory.h for (B, H, room, E) and (B, H, room, Ev), contiguous."""
    return native.CHUNK.pack(
        keys=keys,
        values=values,
        keys_head=keys.shape[2] * keys.shape[3],
        values_head=values.shape[2] * values.shape[3],
        **({} if codes is None else vars(codes)),
    )


def why_not(keys: Tensor, form: Form | None = None) -> str | None:
    """None if ``code`` can serve keys (…, E) like these, and ``run`` a kernel ``form``; else why not."""
    if keys.device.type != "cpu":
        return f"the CPU engine works on CPU tensors, these are on {keys.device}"
    if not cpu._built():
        return "the CPU engine was not built (no C++ compiler when parzen was installed)"
    return None if form is None else unknown(form, "the engine of a store", cpu.PROFILES, cpu.RULES)


def code(keys: Tensor) -> Codes | None:
    """The codes of a full chunk (B, H, CHUNK, E), contiguous; None where rows are too wide."""
    engine = native.loaded()
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
    args = native.RECALL.pack(
        B=b, H=h, Hk=h, S=n, E=e, stored=_STORED[keys.dtype], threads=torch.get_num_threads(),
        parallel_for=engine.parallel_for, chunks=table.buffer_info()[0], chunk=n,
    )  # fmt: skip
    engine.call("code", args)
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
    scale_at, level_at, r_at = (cpu._as(three(x), dtype) for x in (call.scale, form.level, form.r))
    scored, support = counts or (None, None)
    engine = native.loaded()
    args = native.RECALL.pack(
        B=b, H=h, Hk=call.k.shape[1], T=t, S=call.k.shape[2], E=e, D=o.shape[3], stored=_STORED[stored],
        profile=form.profile, rule=form.rule, nearest=form.k, diagonal=call.diagonal,
        left=call.left, right=call.right, threads=torch.get_num_threads(),
        scale=number(call.scale), level=number(form.level), r=number(form.r),
        parallel_for=engine.parallel_for, chunks=table.buffer_info()[0], chunk=CHUNK,
        q=q, o=o, mask=call.mask, scale_at=scale_at, level_at=level_at, r_at=r_at,
        scored=scored, support=support,
    )  # fmt: skip
    engine.call("recall", args)
    return o
