"""Attention with a choice of kernel: check the call once, choose a backend, run it."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parzen import kernels
from parzen.backends import BACKENDS, choose, cpu, maps, reference
from parzen.call import (
    Call,
    check_flags,
    check_scale,
    check_tensor,
    check_together,
    check_window,
    fits,
    forbid,
    make,
    packed,
    restore,
    slopes_of,
)
from parzen.kernels import Kernel, Number, lower, plain


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | Kernel = "gaussian",
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The kernel regression o_i = Σ_j w_ij v_j, with w_ij = φ(c·s_ij − τ_i) / Σ_l φ(c·s_il − τ_i).

    φ is the kernel's profile: how weight falls with distance. Its support rule says where the neighbourhood
    of a query ends, by the gain c and the threshold τ_i: keys with c·s_ij ≤ τ_i get exactly 0.
    s_ij = scale·(q_i·k_j) + bias_ij. A drop-in for ``torch.nn.functional.scaled_dot_product_attention``
    (the same layout, defaults and masks) with any kernel of the table; ``kernel="gaussian"`` is softmax.

    Args:
        query: (…, H, T, E). Leading axes broadcast; two and three axes are read as (T, E), (H, T, E).
        key: (…, Hk, S, E).
        value: (…, Hk, S, Ev).
        attn_mask: broadcastable to (…, H, T, S): bool, True = attend, or floating, added to the scores and
            differentiable (−∞ or the dtype's most negative number = not allowed); a causal bias of
            ``torch.nn.attention.bias`` (``causal_lower_right`` too) or a flex-attention ``BlockMask`` (made
            dense), if they are for these very lengths. A mask is applied before the threshold. May be given
            together with ``is_causal`` and ``window``: a key must then pass all of them.
        dropout_p: probability in [0, 1] of dropping each weight; acts whenever it is > 0.
        is_causal: query i sees keys j ≤ i (upper-left alignment, as in SDPA).
        scale: 1/h² > 0, h the bandwidth on unit keys and queries: a float, or a tensor broadcastable to
            (…, H, T), differentiable: (H, 1) is one bandwidth per head. Default 1/√E. The values of this
            and other tensors are checked where that is free, on a CPU and not compiled; elsewhere a scale
            ≤ 0 gives weights without meaning.
        enable_gqa: allow H to be a multiple of Hk; query head h reads key head h // (H/Hk).
        kernel: a name such as ``"biweight"`` or ``"relumax?margin=2"``, or a ``Kernel``
            (``"epanechnikov"`` is sparsemax; with a fixed bandwidth ``"epanechnikov?radius=h"``). Its tensor
            parameters (α, margin) hold one value per head (H,), or broadcast to (…, H, T). The engines take
            α in [1, 2]; other kernels go through the reference, but where the values of a tensor α cannot be
            looked at (compiled, mapped, on a GPU) ask for it by name: an engine makes NaN of them.
        window: (left, right): query at position p sees keys p − left … p + right; −1 is no limit, and
            neither is a number beyond the lengths. Queries are aligned with the last keys (p = i + S − T)
            as in flash-attention, or with the first (p = i) where ``is_causal`` or ``causal_upper_left``
            says so.
        alibi_slopes: (H,) or (B, H), floating: adds ``−slope·|p − j|`` to the scores, p as for ``window``.
        backend: "auto", or one of ``parzen.backends.BACKENDS``; see ``explain``.

    Returns:
        (…, H, T, Ev), in the dtype of the inputs (promoted if they differ; autocast's under autocast).
        A query that sees no key, or whose neighbourhood is empty, gets 0 and passes no gradient. A key
        outside the neighbourhood contributes nothing, not even NaN or ∞; inside, ∞ of a value passes to the
        output. A score of NaN or +∞ makes the row NaN, one of −∞ is a key not allowed. (torch's own
        ``scaled_dot_product_attention``, which serves the Gaussian where it can, multiplies 0·∞.)

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or parameters that do not fit; or a backend asked for
            by name cannot serve the call.
        NotImplementedError: a tensor with a tangent: derivatives are reverse-mode, of any order.

    Source: arXiv 2601.22766, eq. 5 and §3.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
        >>> out = parzen.attention(q, k, v, is_causal=True, kernel="biweight")
        >>> out.shape
        torch.Size([1, 2, 5, 8])
        >>> out.sum().backward()
    """
    call, lead = make(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    _, module = choose(call, backend)
    return restore(module.run(call), lead)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
    kernel: str | Kernel = "gaussian",
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``attention`` of sequences packed one after the other, each to its own keys, without padding.

    The last query of a sequence stands at its last key (lower-right alignment, as in flash-attention), for
    ``is_causal``, ``window`` and ALiBi alike.

    Args:
        query: (total_q, H, E).
        key: (total_k, Hk, E).
        value: (total_k, Hk, Ev).
        cu_seq_q: (sequences + 1,) integers, on the queries' device: where each sequence's queries begin,
            then total_q.
        cu_seq_k: the same for the keys.
        max_q: at least the longest number of queries.
        max_k: at least the longest number of keys.
        scale: as for ``attention``; a tensor broadcasts to (H, total_q).
        alibi_slopes: (H,), or (sequences, H).
        dropout_p, enable_gqa, kernel, window, backend: as for ``attention``. Backends other than the engines
            ("cpu", "triton") go through the sequences one by one: they read the offsets, so a compiled graph
            breaks there.

    Returns:
        (total_q, H, Ev).

    Raises:
        ValueError, TypeError, NotImplementedError: as ``attention``, or offsets that do not ascend from 0 to
            the totals; an export.

    Example:
        >>> q, k, v = (torch.randn(7, 2, 8) for _ in range(3))  # sequences of 3 and 4 tokens
        >>> at = torch.tensor([0, 3, 7])
        >>> parzen.attention_varlen(q, k, v, at, at, 4, 4, is_causal=True, kernel="biweight").shape
        torch.Size([7, 2, 8])
    """
    if kernels.recording():
        raise NotImplementedError(
            "attention_varlen is not exported, its shapes are in the offsets: pad the sequences and give "
            "attention a mask"
        )
    left, right = (-1, -1) if window is None else check_window(window)
    check_flags(is_causal=is_causal)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"packed sequences are (total, H, size), got {name} {tuple(x.shape)}")
    limits = (left, 0 if is_causal else right)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    call, _ = make(q, k, v, None, dropout_p, False, scale, enable_gqa, kernel, limits, None)
    max_q, max_k = plain(max_q), plain(max_k)
    offsets = packed(call, cu_seq_q, cu_seq_k, max_q, max_k)
    if alibi_slopes is not None:
        alibi_slopes = slopes_of(alibi_slopes, query, offsets[0].shape[0] - 1, call.q.shape[1])
    # Each sequence has a diagonal of its own.
    call = replace(call, diagonal=0, slopes=alibi_slopes)
    total_q, total_k = call.q.shape[2], call.k.shape[2]
    # A backend that says so serves packed sequences at once.
    for name, module in BACKENDS.items():
        if not hasattr(module, "run_varlen") or backend not in ("auto", name):
            continue
        if backend == name or module.why_not(call) is None:
            choose(call, name)
            longest = torch.sym_min(max_q, total_q), torch.sym_min(max_k, total_k)
            return module.run_varlen(call, *offsets, *longest, lower_right=True)[0].transpose(0, 1)
    # Without values (the meta device) the shapes are those of one sequence.
    lists = [[0, total_q], [0, total_k]] if call.q.is_meta else [cu.tolist() for cu in offsets]
    parts = []
    for n, ((q0, k0), (q1, k1)) in enumerate(itertools.pairwise(zip(*lists, strict=True))):
        own = alibi_slopes if alibi_slopes is None or alibi_slopes.shape[0] == 1 else alibi_slopes[n : n + 1]
        part = replace(call, k=call.k[:, :, k0:k1], v=call.v[:, :, k0:k1], slopes=own)
        part = _rows(part, q0, q1)
        part = replace(part, diagonal=(k1 - k0) - (q1 - q0))
        parts.append(choose(part, backend)[1].run(part))
    out = torch.cat(parts, 2) if parts else call.v.new_zeros(1, call.q.shape[1], 0, call.v.shape[3])
    return out[0].transpose(0, 1)


@dataclass(frozen=True)
class AttentionWeights:
    """What ``attention`` did: the weights, and each query's neighbourhood.

    Attributes:
        weights: (…, H, T, S), dense or sparse COO.
        tau: (…, H, T): the threshold τ in ``t = c·s − τ`` (+∞ where no key is allowed).
        support: (…, H, T): how many keys have weight.
        bandwidth: (…, H, T): the radius H of the neighbourhood on unit keys, H² = 2 − 2τ/(c·scale)
            (Proposition 3.1); ∞ where every key is inside whatever its distance.

    Example:
        >>> q = torch.tensor([[1.0, 0.0]])
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> seen = parzen.attention_weights(q, k, kernel="epanechnikov", scale=0.8)
        >>> seen.support  # the third key is outside
        tensor([2])
    """

    weights: Tensor
    tau: Tensor
    support: Tensor
    bandwidth: Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | Kernel = "gaussian",
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    sparse: bool = False,
) -> AttentionWeights:
    """The weights that ``attention`` uses, with τ, support size and effective bandwidth of each row.

    Arguments as for ``attention``. With ``sparse`` the weights come as a COO tensor, made from a few rows
    at a time, so that memory follows the support and not T·S.

    Source: arXiv 2601.22766, Proposition 3.1.

    Example:
        >>> q = torch.tensor([[1.0, 0.0]])
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> parzen.attention_weights(q, k, kernel="epanechnikov", scale=0.8).weights
        tensor([[0.9000, 0.1000, 0.0000]])
    """
    check_flags(sparse=sparse)
    call, lead = make(
        query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    rows = call.q.shape[2]
    step = max(1, 2**22 // max(1, call.k.shape[2])) if sparse else max(1, rows)
    parts = [_rows(call, start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
    results = [reference.weights(part) for part in parts]
    dense = [restore(w, lead) for w, _ in results]
    support = torch.cat([(w > 0).sum(-1) for w in dense], -1)
    # Of θ in score units: τ = c·θ, and t = 0 at the distance H.
    level = torch.cat([theta for _, theta in results], 2)[..., 0]
    squared = 2 - 2 * level / call.scale
    radius = squared.clamp_min(0).sqrt() if call.kernel.compact else torch.full_like(level, torch.inf)
    r = call.form.r
    if call.form.rule == kernels.UNIT_MASS and isinstance(r, Tensor):
        radius = torch.where(r < 0, torch.inf, radius)
    gain = r if call.form.rule == kernels.UNIT_MASS else 1 / call.kernel.gain
    return AttentionWeights(
        torch.cat([w.to_sparse() for w in dense] if sparse else dense, -2),
        restore(level / gain, lead),
        support,
        restore(radius, lead),
    )


def weights(
    scores: Tensor, kernel: str | Kernel = "epanechnikov", dim: int = -1, scale: Number = 1.0
) -> Tensor:
    """w = φ(c·scale·scores − τ), normalised along ``dim``: the weight map alone.

    φ is the kernel's profile, c and τ are the gain and the threshold that its support rule sets along
    ``dim``: below it the weight is exactly 0. For sparsemax φ(t) = [t]₊, c = 1 and τ makes the sum 1.

    A drop-in for ``torch.softmax`` and for the functions of the ``entmax`` package.

    Args:
        scores: any shape; −∞, or the dtype's most negative number, marks entries that may get no weight.
            On unit vectors: the cosines.
        kernel: a name or a ``Kernel``. A tensor parameter (α, margin) is one number for each slice along
            ``dim``: it broadcasts to ``scores`` and has size 1 there, or is a single number.
        dim: the axis that sums to 1.
        scale: 1/h² > 0 (the inverse temperature), a float or a tensor like the parameters.

    Returns:
        Non-negative weights of the shape and dtype of ``scores``; float16 and bfloat16 are computed in
        float32. A slice with nothing allowed, or an empty neighbourhood, is 0; one with NaN or +∞ is NaN.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``attention``, or no such ``dim``.

    Source: arXiv 2601.22766, §3.

    Example:
        >>> parzen.weights(torch.tensor([2.0, 1.5, -1.0]), "sparsemax")
        tensor([0.7500, 0.2500, 0.0000])
    """
    check_tensor("scores", scores)
    dim, scale = plain(dim), plain(scale)
    if scores.ndim == 0:
        raise ValueError("scores must have at least one axis, got a single number")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -scores.ndim <= dim < scores.ndim:
        raise ValueError(f"dim must be an axis of scores, −{scores.ndim} … {scores.ndim - 1}, got {dim!r}")
    chosen = kernels.kernel(kernel)
    check_scale(scale)
    reduced = (*scores.shape[:dim], 1, *scores.shape[dim:][1:])

    def last(x: Number, name: str) -> Number:
        fits(x, reduced, name, "scores, with size 1 along dim,")
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        return x[(None,) * (scores.ndim - x.ndim)].movedim(dim, -1)

    scale = last(scale, "scale")
    form = lower(chosen, scale)
    check_together(scores=scores, scale=scale, alpha=form.r, margin=form.level)
    if form.rule != kernels.THRESHOLD:
        form = replace(form, r=last(form.r, "alpha"), level=last(form.level, "margin"))
    dtype = reference.compute_dtype(scores.dtype)
    # Each of these would be a node of the graph, also where it changes nothing.
    at_end = dim in (-1, scores.ndim - 1)
    rows = scores if scores.dtype == dtype else scores.to(dtype)
    rows = rows if at_end else rows.movedim(dim, -1)
    served = maps.why_not(rows, form) is None
    if served and not isinstance(scale, Tensor):
        w = maps.run(rows, form, scale, torch.finfo(scores.dtype).min)
    else:
        s = forbid(scores).to(dtype).movedim(dim, -1)
        if isinstance(scale, Tensor):
            # −∞ times the gradient of a weight of 0 would be NaN for the scale.
            hidden = s == -torch.inf
            s = torch.where(hidden, -torch.inf, torch.where(hidden, 0, s) * scale)
        else:
            s = s * scale
        w = maps.run(s, form, 1.0, -torch.inf) if served else reference.weight_map(s, form)[0]
    w = w if at_end else w.movedim(-1, dim)
    return w if w.dtype == scores.dtype else w.to(scores.dtype)


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why the others do not.

    Attributes:
        backend: the one that is used.
        why_not: of each backend: None if it can serve the call, else a sentence that says why not.

    Example:
        >>> q = torch.randn(1, 2, 5, 8)
        >>> found = parzen.explain(q, q, q, kernel="biweight", backend="reference")
        >>> found.backend
        'reference'
        >>> found.reasons["reference"]
        'serves this call'
    """

    backend: str
    why_not: dict[str, str | None]

    @property
    def reasons(self) -> dict[str, str]:
        """A sentence for each backend, also for the one that is used and those that come later."""
        known = {name: reason or f"could, after {self.backend}" for name, reason in self.why_not.items()}
        return known | {self.backend: "serves this call"}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | Kernel = "gaussian",
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
) -> Explanation:
    """Which backend ``attention`` would use for this very call, with a sentence for each backend.

    Arguments as for ``attention``. Nothing is computed.

    Example:
        >>> q = torch.randn(1, 2, 5, 8)
        >>> print(parzen.explain(q, q, q, kernel="biweight", backend="reference").why_not["reference"])
        None
    """
    call, _ = make(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    chosen, _ = choose(call, backend)
    return Explanation(chosen, {name: module.why_not(call) for name, module in BACKENDS.items()})


def info() -> dict[str, Any]:
    """Versions, backends and what was built, as plain data.

    Example:
        >>> sorted(parzen.info())[:3]
        ['backends', 'cpu engine', 'cuda']
    """
    from parzen import __version__

    return {
        "parzen": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "backends": list(BACKENDS),
        "cpu engine": cpu.info(),
    }


def _rows(call: Call, start: int, stop: int) -> Call:
    """The same call for the queries start … stop only."""

    def cut(x: Any, axis: int) -> Any:
        shared = not isinstance(x, Tensor) or x.ndim < -axis or x.shape[axis] == 1
        return x if shared else x.narrow(axis, start, stop - start)

    form = replace(call.form, r=cut(call.form.r, -1), level=cut(call.form.level, -1))
    return replace(
        call,
        q=call.q[:, :, start:stop],
        scale=cut(call.scale, -1),
        form=form,
        mask=cut(call.mask, -2),
        bias=cut(call.bias, -2),
        diagonal=call.diagonal + start,
    )
