"""The weights of an output layer, p = weights(W h + b), without the rows × classes matrix.

It is attention of h over the rows of W. Where the CPU engine serves it and few classes have weight, its lists
of them are all that is kept; elsewhere some rows at a time are computed as matrix products, and again in
backward.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parzen.backends import cpu, maps
from parzen.backends.engine import arguments, run_forward
from parzen.backends.reference import compute_dtype, weight_map
from parzen.call import Call
from parzen.kernels import EXP, UNIT_MASS, UNIT_NORM, Form, Kernel, Number, Power, UnitMass, differentiated

# Scores held at once; rows of one call of the engine, and how many of them are looked at first.
AT_ONCE, ENGINE_ROWS, PROBE = 2**22, 4096, cpu.TILE
LIST_ROWS = 5 * cpu.TILE
# With fewer classes the matrix is small; where more have weight, matrix products are faster than lists.
LEAST_CLASSES, MOST_SUPPORT = 1024, cpu.PER_ROW * 3 // 4


def best_sums(p: Tensor, at: Tensor, a: Number, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """p_m, Σ_{j≠m} p_j and Σ_{j≠m} p_j^{1+a} along the last axis, for the classes m = ``at``.

    With ``norm`` the powers are of p_j/p_m.
    """
    rest, best = p.scatter(-1, at, 0), p.gather(-1, at)
    if norm:
        powers = (rest / best) ** (1 + a)
    elif isinstance(a, Tensor):
        powers = rest ** (1 + a)
    else:
        powers = (
            rest * rest if a == 1 else rest * rest.sqrt() if a == 0.5 else rest if a == 0 else rest ** (1 + a)
        )
    return best, rest.sum(-1, keepdim=True), powers.sum(-1, keepdim=True)


def _weights(z: Tensor, form: Form) -> Tensor:
    if maps.why_not(z, form) is None:
        return maps.run(z, form, 1.0, -torch.inf)
    return weight_map(z, form)[0]


def _chunks(first: int, last: int, classes: int) -> list[slice]:
    step = max(1, AT_ONCE // max(1, classes))
    return [slice(start, min(start + step, last)) for start in range(first, last, step)]


class _Rows:
    """What forward fills for each row: the sums, the best score and class, and the list of its weights.

    ``size`` is −1 for a row without a list. The lists follow one another in ``index`` and ``p``.
    """

    def __init__(self, like: Tensor, rows: int, classes: int) -> None:
        self.sums, self.top = like.new_empty(3, rows, 1), like.new_empty(rows, 1)
        self.at = like.new_empty(rows, 1, dtype=torch.int64)
        self.size = like.new_full((rows,), -1, dtype=torch.int32)
        kept = rows * min(classes, cpu.PER_ROW)
        # Memory that is not written to does not become resident.
        self.index, self.p = like.new_empty(kept, dtype=torch.int32), like.new_empty(kept)
        self.used = 0

    def put(self, rows: slice, p: Tensor, z: Tensor, form: Form, columns: Tensor | None = None) -> None:
        """Of scores z and weights p, whose columns are the classes or, in each row, those of ``columns``."""
        top, at = z.max(-1, keepdim=True)
        a = 0.0 if form.profile == EXP else 1 / form.r
        for out, x in zip(self.sums, best_sums(p, at, a, form.rule == UNIT_NORM), strict=True):
            out[rows] = x
        self.top[rows] = top
        self.at[rows] = at if columns is None else columns.gather(1, at)


def _engine_lists(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each row's list begins (−1: it has none), its size, and all classes and scores."""
    if bias is not None:
        # One more coordinate.
        hidden = torch.cat((hidden, hidden.new_ones(len(hidden), 1)), 1)
        weight = torch.cat((weight, bias[:, None]), 1)
    q, k = hidden[None, None], weight[None, None]
    # No values are wanted: as few columns as the engine takes.
    call = Call(q, k, k[..., :1], 1.0, form, Kernel(Power(form.r), UnitMass()))
    _, _, where, count, index, score = run_forward(*arguments("cpu", call), True)
    return cpu.starts(where, count).flatten(), count.flatten(), index.flatten(), score.flatten()


def _by_lists(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Form, found: _Rows, first: int, last: int
) -> None:
    """The rows from ``first`` to ``last`` that the engine leaves a list of."""
    start, size, index, score = _engine_lists(hidden[first:last], weight, bias, form)
    listed = (start >= 0) & (size > 0)
    for begin in range(0, last - first, LIST_ROWS):
        part = slice(begin, min(begin + LIST_ROWS, last - first))
        if not bool(listed[part].all()):
            continue
        sizes = size[part].long()
        column = torch.arange(int(sizes.max()))
        inside = column < sizes[:, None]
        at = torch.where(inside, start[part, None] + column, 0)
        columns = index[at]
        z = torch.where(inside, score[at], -torch.inf)
        p = _weights(z, form)
        rows = slice(first + part.start, first + part.stop)
        found.put(rows, p, z, form, columns)
        total = int(sizes.sum())
        found.size[rows] = sizes.int()
        found.index[found.used : found.used + total] = columns[inside]
        found.p[found.used : found.used + total] = p[inside]
        found.used += total


def _listable(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> bool:
    """Whether the engine serves these rows and, as far as the first of them tell, few classes have weight."""
    if form.rule != UNIT_MASS or form.beyond or hidden.device.type != "cpu" or not cpu._built():
        return False
    if len(weight) < LEAST_CLASSES or len(hidden) <= PROBE:
        return False
    p = _weights(F.linear(hidden[:PROBE], weight, bias), form)
    return bool((p > 0).sum() <= PROBE * MOST_SUPPORT)


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, profile: int, rule: int, r: float
) -> tuple[Tensor, ...]:
    form, dtype = Form(profile, rule, r), compute_dtype(hidden.dtype)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    rows, classes = len(hidden), len(weight)
    found = _Rows(hidden, rows, classes)
    for first in range(0, rows, ENGINE_ROWS):
        last = min(first + ENGINE_ROWS, rows)
        if _listable(hidden[first:last], weight, bias, form):
            _by_lists(hidden, weight, bias, form, found, first, last)
    for part in _dense_parts(found.size, classes):
        z = F.linear(hidden[part], weight, bias)
        found.put(part, _weights(z, form), z, form)
    return found.sums, found.top, found.at, found.size, found.index, found.p


def _dense_parts(size: Tensor, classes: int) -> list[slice]:
    """The rows without a list, some at a time."""
    if not size.numel():
        return []
    edges = [0, *(1 + (size[1:] < 0).ne(size[:-1] < 0).nonzero().flatten()).tolist(), len(size)]
    runs = [pair for pair in itertools.pairwise(edges) if size[pair[0]] < 0]
    return [part for first, last in runs for part in _chunks(first, last, classes)]


def _bags(x: Tensor, index: Tensor, size: Tensor, factor: Tensor) -> Tensor:
    """Σ of the rows x[index] times ``factor``, for each list of ``size``."""
    offsets = size.cumsum(0, dtype=torch.int32) - size
    return F.embedding_bag(index, x, offsets, mode="sum", per_sample_weights=factor)


def _backward(
    g: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    size: Tensor, index: Tensor, p: Tensor, profile: int, rule: int, r: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    form, dtype = Form(profile, rule, r), compute_dtype(hidden.dtype)
    dtypes = hidden.dtype, weight.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    g = g.to(dtype)
    classes = len(weight)
    sizes = size.clamp_min(0)
    used = int(sizes.sum())
    if used:
        index, row = index[:used], torch.arange(len(size), dtype=torch.int32).repeat_interleave(sizes)
        factor = p[:used] * g.flatten()[row]
        dh = _bags(weight, index, sizes, factor)
        # By classes: the same lists, turned.
        counts = torch.bincount(index, minlength=classes).int()
        order = index.sort(stable=True).indices
        row, factor = row[order], factor[order]
        dw = _bags(hidden, row, counts, factor)
        db = weight.new_zeros(classes)
        if bias is not None:
            db.index_add_(0, index[order], factor)
    else:
        dh, dw, db = (torch.zeros_like(x) for x in (hidden, weight, weight[:, 0]))
    for part in _dense_parts(size, classes):
        q = _weights(F.linear(hidden[part], weight, bias), form).mul_(g[part])
        torch.mm(q, weight, out=dh[part])
        dw.addmm_(q.T, hidden[part])
        db += q.sum(0)
    return dh.to(dtypes[0]), dw.to(dtypes[1]), db


_library = torch.library.Library("parzen", "FRAGMENT")
_INPUTS, _NUMBERS = "Tensor hidden, Tensor weight, Tensor? bias", "int profile, int rule, float r"
_LISTS = "Tensor size, Tensor index, Tensor p"
_library.define(f"output({_INPUTS}, {_NUMBERS}) -> (Tensor sums, Tensor top, Tensor at, {_LISTS})")
_library.define(f"output_backward(Tensor g, {_INPUTS}, {_LISTS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)")
_library.impl("output", _forward, "CompositeExplicitAutograd")
_library.impl("output_backward", _backward, "CompositeExplicitAutograd")


def _fake_forward(hidden: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    found = _Rows(hidden.to(compute_dtype(hidden.dtype)), hidden.shape[0], weight.shape[0])
    return found.sums, found.top, found.at, found.size, found.index, found.p


def _fake_backward(g: Tensor, hidden: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    db = weight.new_empty(weight.shape[0], dtype=compute_dtype(hidden.dtype))
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), db


torch.library.register_fake("parzen::output", _fake_forward, lib=_library)
torch.library.register_fake("parzen::output_backward", _fake_backward, lib=_library)


class _Output(torch.autograd.Function):
    """(hidden, weight, bias, numbers) → (0, sums, top, at, lists), where the 0 carries the gradient p."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> tuple[Tensor, ...]:
        sums, top, at, *lists = torch.ops.parzen.output(hidden, weight, bias, *numbers)
        return torch.zeros_like(top), sums, top, at, *lists

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = inputs[3:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output[4:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> Any:
        rest = (None,) * len(ctx.numbers)
        if g is None:
            return None, None, None, *rest
        hidden, weight, bias, *lists = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Differentiable once more, with the matrix.
            z = F.linear(hidden, weight, bias)
            p = _weights(z.to(compute_dtype(z.dtype)), Form(*ctx.numbers)).to(z.dtype) * g
            dh, dw, db = p @ weight, p.T @ hidden, p.sum(0)
        else:
            dh, dw, db = torch.ops.parzen.output_backward(g, hidden, weight, bias, *lists, *ctx.numbers)
        return dh, dw, None if bias is None else db.to(bias.dtype), *rest


def run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor]:
    """0 with the gradient p for the scores, the three ``best_sums``, the best score, its class: (N, 1).

    Args:
        hidden: (N, D).
        weight: (V, D), of the same dtype.
        bias: (V,), likewise, or None.
        form: everywhere or unit mass; its numbers are floats.
    """
    args = hidden, weight, bias, form.profile, form.rule, float(form.r)
    apply = _Output.apply if differentiated(hidden, weight, bias) else _Output.forward
    carrier, sums, top, at, *_ = apply(*args)
    return carrier, tuple(sums), top, at
