"""The Triton engine: exact attention on a GPU, by lists of what has weight or by tiles that are multiplied.

    o_i = Σ_{j in support} w_ij v_j        ds_ij = a_ij (do_i·v_j − μ_i) on the support, 0 elsewhere

One pass of q·kᵀ keeps, per query, the maximum, a rising lower bound of its threshold and a bounded list of
the keys above it; thresholds are solved on the lists, and outputs gathered from them. Where a list would
overflow, its tile of queries goes through the keys again: Newton steps over the tiles that still matter,
then products of tiles. Backward knows the thresholds: two more passes of q·kᵀ, one for each side, take what
has weight from lists or, where a tile is crowded, by products. What forward saves is O(T); results do not
depend on the order in which the GPU runs. Under ``TRITON_INTERPRET=1``, set before Triton is imported, the
same code runs on CPU tensors, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from parzen.backends import engine
from parzen.backends.engine import TENSORS, gradient_shapes
from parzen.call import Call
from parzen.kernels import EVERYWHERE, EXP, MARGIN, NEAREST, POWER, THRESHOLD, UNIT_MASS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTALLED = find_spec("triton") is not None
WIDEST = 256
# What the kernels have branches for.
PROFILES = (EXP, POWER)
RULES = (EVERYWHERE, UNIT_MASS, THRESHOLD, MARGIN, NEAREST)
_LONGEST = 2**30
# Programs for each processor of the GPU; each has scratch memory of its own.
_PROGRAMS = 4
# Numbers a row that the kernels save, and sums that they give back (STATS and EXTRAS there).
_STATS, _EXTRAS = 6, 4


@dataclass(frozen=True)
class Config:
    """How the kernels are cut.

    Attributes:
        m, n: queries and keys of a tile, powers of two ≥ 16.
        warps: of a program.
        lists: whether forward tries lists at all.
        capacity: entries of a list in forward; more in a row send its tile of queries through the keys again.
        room: entries of a list elsewhere, which is emptied when it is full; at least m and n.
        crowd: a tile with more weights than this in one of its rows (columns, for the gradients of keys) is
            multiplied; −1 always, a large number never.
    """

    m: int = 64
    n: int = 32
    warps: int = 8
    lists: bool = True
    capacity: int = 512
    room: int = 128
    crowd: int = 8


def config(width: int, itemsize: int, capability: tuple[int, int]) -> Config:
    """For rows of ``width`` numbers (padded) of ``itemsize`` bytes on such a GPU; (0, 0) is the interpreter.

    Register spills decide, as ``make gpu-compile`` finds them. Shared memory stays under 48 KB, but for
    float32 beyond 128.
    """
    if capability == (0, 0):
        return Config(m=32, n=32, capacity=64, room=64, crowd=4)
    if width * itemsize <= 128:
        return Config() if capability >= (9, 0) else Config(m=32, n=32, warps=4)
    return Config(m=32, n=32) if width * itemsize <= 256 else Config(m=16, n=16)


def options(chosen: Config) -> dict[str, Any]:
    """How Triton is to compile."""
    made: dict[str, Any] = {
        "num_warps": chosen.warps,
        # A product that is rounded in one place and not in another would move a key across a threshold.
        "enable_fp_fusion": False,
    }
    if torch.version.hip is None:
        # As many as 8 warps can have: ptxas would rather spill some than use them all.
        made["maxnreg"] = 255
    return made


@cache
def _kernels() -> Any:
    from parzen.backends.triton import kernels

    return kernels


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU; (9, 0) where there is none to ask, and (0, 0) for the interpreter."""
    if device.type == "cpu":
        return (0, 0)
    if torch.version.hip is not None or not torch.cuda.is_available():
        return (9, 0)
    return torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does, without importing the compiler; by name, as the type of a
# function has no such attribute.
for _constant in (_interpreted, _capability):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


# ---- one launch ----------------------------------------------------------------------------------


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """0 along the axes that broadcast."""
    if x is None:
        return (0, 0, 0, 0)
    return tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class _Launch:
    """What all kernels of one call share."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    heads: tuple[int, int]
    lengths: tuple[int, int]
    place: tuple[int, int, int]
    numbers: tuple[float, float, float]
    static: dict[str, Any]
    config: Config
    batch: int
    longest: tuple[int, int]

    def grid(self, work: int) -> int:
        """As many programs as the device holds at once, or fewer."""
        device = self.tensors[0].device
        if device.type == "cpu":
            return min(work, 3)
        return min(work, _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count)

    def scratch(self, grid: int, rows: int, entries: int) -> Tensor:
        """Index and score of every entry of every program's lists."""
        return self.tensors[0].new_empty((grid, rows, entries), dtype=torch.int64)

    def on(self) -> AbstractContextManager[object]:
        """The tensors' device as the current one."""
        device = self.tensors[0].device
        return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def _launch(args: Sequence[Any]) -> _Launch:
    q, k, v, mask, bias, slopes, scale_at, level_at, r_at, _, first_q, first_k = args[:TENSORS]
    profile, rule, _, diagonal, left, right, scale, level, r, _, *longest, lower_right = args[TENSORS:]
    q, k, v = (_unit(x) for x in (q, k, v))
    packed = first_q is not None
    batch = first_q.numel() - 1 if packed else q.shape[0]
    mask = None if mask is None else mask.view(torch.uint8)
    rows = [
        None if x is None else x.to(torch.float32).expand(q.shape[:3]).contiguous()
        for x in (scale_at, level_at, r_at)
    ]
    if slopes is not None:
        slopes = slopes.to(torch.float32).expand(batch, q.shape[1]).contiguous()
    given = (mask, bias, slopes, *rows, first_q, first_k)
    power = profile == POWER and r_at is None and r in (0, 1, 2, 3)
    e, ev = q.shape[3], v.shape[3]
    width = max(_padded(e), _padded(ev))
    chosen = config(width, q.element_size(), _capability(q.device))
    return _Launch(
        # A kernel does not read what is not there: any pointer does.
        tensors=(q, k, v, *(q if x is None else x for x in given)),
        strides=(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_strides(mask), *_strides(bias)),
        heads=(q.shape[1], q.shape[1] // k.shape[1]),
        lengths=(q.shape[2], k.shape[2]),
        place=(diagonal, *(-1 if n >= _LONGEST else n for n in (left, right))),
        numbers=(scale, level, r),
        static={
            "PROFILE": profile,
            "RULE": rule,
            "R": int(r) if power else -1,
            "SCALE_AT": scale_at is not None,
            "LEVEL_AT": level_at is not None,
            "R_AT": r_at is not None,
            "HAS_MASK": mask is not None,
            "HAS_BIAS": bias is not None,
            "HAS_SLOPE": slopes is not None,
            "PACKED": packed,
            "LOWER_RIGHT": lower_right,
            "E": e,
            "EV": ev,
            "E_PAD": _padded(e),
            "EV_PAD": _padded(ev),
            "BLOCK_M": chosen.m,
            "BLOCK_N": chosen.n,
            "CROWD": chosen.crowd,
            **options(chosen),
        },
        config=chosen,
        batch=batch,
        longest=(longest[0], longest[1]) if packed else (q.shape[2], k.shape[2]),
    )


# ---- operators -----------------------------------------------------------------------------------


def _step(profile: int, r: float, r_at: Tensor | None) -> bool:
    """A profile without slope."""
    return profile == POWER and r_at is None and r == 0


def _means(args: Sequence[Any]) -> tuple[bool, bool]:
    """Which averages of the values backward needs: by weight, by slope."""
    profile, rule, r = args[TENSORS], args[TENSORS + 1], args[TENSORS + 8]
    moves = rule == MARGIN and profile != EXP and not _step(profile, r, args[8])
    return rule != UNIT_MASS, rule == UNIT_MASS or moves


def _saved(args: Sequence[Any], save: bool) -> tuple[Tensor, ...]:
    q, v = args[0], args[2]
    lead = (q.shape[0] if save else 0, *q.shape[1:3])
    widths = (_STATS, *(v.shape[3] if needed else 0 for needed in _means(args)))
    return tuple(q.new_empty((*lead, n), dtype=torch.float32) for n in widths)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *args, save = args  # type: ignore[assignment]
    q, _, v = args[:3]
    saved = _saved(args, save)
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    if 0 in (q.shape[0], q.shape[1], q.shape[2]):
        return o, *saved
    launch = _launch(args)
    c = launch.config
    tiles = -(-launch.longest[0] // c.m)
    work = launch.batch * q.shape[1] * tiles
    grid = launch.grid(work)
    alive = q.new_empty((grid, -(-launch.longest[1] // c.n)), dtype=torch.int8)
    if work:
        with launch.on():
            _kernels().forward[(grid,)](
                *launch.tensors, o, saved[1], saved[2], saved[0], launch.scratch(grid, c.m, c.capacity),
                alive, *launch.strides, *launch.heads, *launch.lengths, q.shape[2], tiles, work,
                alive.shape[1], *launch.place, *launch.numbers, args[TENSORS + 2],
                SAVE=save, LISTS=c.lists and args[TENSORS + 1] != EVERYWHERE, CAPACITY=c.capacity,
                **launch.static,
            )  # fmt: skip
    return o, *saved


def _backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *args, stats, mean, other, needs = args  # type: ignore[assignment]
    q, k, v, _, bias = args[:5]
    profile, rule, r, r_at = args[TENSORS], args[TENSORS + 1], args[TENSORS + 8], args[8]
    shapes = gradient_shapes((*args, needs), needs)
    extra = [q.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    if 0 in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]):
        return dq, dk, dv, *extra
    launch = _launch(args)
    c = launch.config
    do, stats = do.contiguous(), stats.contiguous()
    mu = ((other if rule == UNIT_MASS else mean) * do).sum(-1)
    push = mu
    by_weight, by_slope = _means(args)
    if by_weight and by_slope:
        # The threshold moves with the best key, which gets what all the others push it by.
        push = stats[..., 3] * ((other * do).sum(-1) - mu) / stats[..., 4].clamp_min(1)
    heads, groups = launch.heads
    common = (*launch.tensors, do, stats, mu, push)
    static = {**launch.static, "CAPACITY": c.room}
    with launch.on():
        if not _step(profile, r, r_at):
            tiles = -(-launch.longest[0] // c.m)
            work = launch.batch * heads * tiles
            grid = launch.grid(work)
            sums = q.new_zeros((*q.shape[:3], _EXTRAS), dtype=torch.float32)
            dense = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32) if needs[0] else sums
            _kernels().backward_queries[(grid,)](
                *common, dq, sums, dense, launch.scratch(grid, c.m, c.room),
                *launch.strides, heads, groups, *launch.lengths, q.shape[2], tiles, work,
                *launch.place, *launch.numbers,
                SLOPES=needs[1], BY_R=needs[4], DENSE=needs[0], **static,
            )  # fmt: skip
            if needs[0]:
                extra[0] = dense.sum_to_size(bias.shape)
            level = sums[..., 1] if rule == MARGIN else -sums[..., 1]
            by_level = level if profile != EXP else torch.zeros_like(level)
            found = (sums[..., 2], sums[..., 0], by_level, sums[..., 3])
            extra[1:] = [x.contiguous() if need else e
                         for x, e, need in zip(found, extra[1:], needs[1:], strict=True)]  # fmt: skip
        tiles = -(-launch.longest[1] // c.n)
        work = launch.batch * heads // groups * tiles
        grid = launch.grid(work)
        _kernels().backward_keys[(grid,)](
            *common, dk, dv, launch.scratch(grid, c.n, c.room),
            *launch.strides, heads, groups, *launch.lengths, q.shape[2], k.shape[2], tiles, work,
            *launch.place, *launch.numbers, **static,
        )  # fmt: skip
    return dq, dk, dv, *extra


engine.register("triton", _forward, _backward, _saved, ("stats", "mean", "other"), ("CPU", "CUDA"))


# ---- the backend ---------------------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    """None if ``run`` can serve the call, else a sentence that says why not."""
    q, v = call.q, call.v
    if q.device.type != "cuda" and not (q.device.type == "cpu" and _interpreted()):
        return f"the Triton engine works on CUDA tensors, these are on {q.device}"
    if not _INSTALLED:
        return "Triton is not installed: pip install 'parzen[triton]'"
    if torch.compiler.is_exporting():
        return "an exported graph must consist of plain operators"
    if q.dtype not in _DTYPES:
        return f"the Triton engine computes in float32, the inputs are {q.dtype}"
    if call.dropout > 0:
        return "the Triton engine has no dropout"
    if not (0 < q.shape[3] <= WIDEST and 0 < v.shape[3] <= WIDEST):
        return f"the Triton engine takes heads of 1 to {WIDEST}, these have {q.shape[3]} and {v.shape[3]}"
    if max(q.shape[2], call.k.shape[2]) >= _LONGEST:
        return "the Triton engine numbers queries and keys in 30 bits"
    if q.device.type == "cuda" and _capability(q.device) < (8, 0):
        return "the Triton engine needs a GPU of compute capability 8.0 or newer"
    return engine.unknown(call.form, "the Triton engine", PROFILES, RULES)


def run(call: Call) -> Tensor:
    """Attention (B, H, T, Ev), with gradients of every tensor in the call."""
    return engine.apply(engine.arguments("triton", call))


run_varlen = partial(engine.run_varlen, "triton")


def support(call: Call) -> Tensor:
    """How many keys each query keeps: (B, H, T), int32, without any (T, S) array."""
    reason = why_not(call)
    if reason is not None:
        raise ValueError(reason)
    return engine.run_forward(*engine.arguments("triton", call), True)[1][..., 5].to(torch.int32)
