"""Attention with a choice of kernel: check the call once, choose a backend, run it."""

from __future__ import annotations

import itertools
import math
import platform
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant

from parzen import kernels
from parzen.backends import BACKENDS, Call, choose, cpu, packed, reference
from parzen.kernels import LARGEST, LEAST, UNLIMITED, Kernel, Number, Power, WithinMargin, lower


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
        kernel: a name such as ``"epanechnikov"`` or ``"relumax?margin=2"``, or a ``Kernel``. Its tensor
            parameters (α, margin) hold one value per head (H,), or broadcast to (…, H, T).
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
    """
    call, lead = _call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    _, module = choose(call, backend)
    return _restore(module.run(call), lead)


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
        dropout_p, enable_gqa, kernel, window, alibi_slopes, backend: as for ``attention``. Backends other
            than the engines ("cpu", "triton") go through the sequences one by one: they read the offsets, so
            a compiled graph breaks there.

    Returns:
        (total_q, H, Ev).

    Raises:
        ValueError, TypeError, NotImplementedError: as ``attention``, or offsets that do not ascend from 0 to
            the totals.
    """
    left, right = (-1, -1) if window is None else check_window(window)
    check_flags(is_causal=is_causal)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"packed sequences are (total, H, size), got {name} {tuple(x.shape)}")
    limits = (left, 0 if is_causal else right)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    call, _ = _call(
        q, k, v, None, dropout_p, False, scale, enable_gqa, kernel, limits, alibi_slopes
    )  # fmt: skip
    # Each sequence has a diagonal of its own.
    call = replace(call, diagonal=0)
    offsets = packed(call, cu_seq_q, cu_seq_k, max_q, max_k)
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
    for (q0, k0), (q1, k1) in itertools.pairwise(zip(*lists, strict=True)):
        part = _rows(replace(call, k=call.k[:, :, k0:k1], v=call.v[:, :, k0:k1]), q0, q1)
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
    """
    check_flags(sparse=sparse)
    call, lead = _call(
        query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    rows = call.q.shape[2]
    step = max(1, 2**22 // max(1, call.k.shape[2])) if sparse else max(1, rows)
    parts = [_rows(call, start, min(start + step, rows)) for start in range(0, max(1, rows), step)]
    results = [reference.weights(part) for part in parts]
    dense = [_restore(w, lead) for w, _ in results]
    support = torch.cat([(w > 0).sum(-1) for w in dense], -1)
    # Of θ in score units: τ = c·θ, and t = 0 at the distance H.
    level = torch.cat([theta for _, theta in results], 2)[..., 0]
    squared = 2 - 2 * level / call.scale
    radius = squared.clamp_min(0).sqrt() if call.kernel.compact else torch.full_like(level, torch.inf)
    gain = call.form.r if call.form.rule == kernels.UNIT_MASS else 1 / call.kernel.gain
    return AttentionWeights(
        torch.cat([w.to_sparse() for w in dense] if sparse else dense, -2),
        _restore(level / gain, lead),
        support,
        _restore(radius, lead),
    )


def weights(
    scores: Tensor, kernel: str | Kernel = "epanechnikov", dim: int = -1, scale: Number = 1.0
) -> Tensor:
    """w = φ(c·scale·scores − τ), normalised along ``dim``: the weight map alone.

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
    """
    check_tensor("scores", scores)
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
    s = _forbid(scores).to(reference.compute_dtype(scores.dtype)).movedim(dim, -1) * scale
    w, _ = reference.weight_map(s, form)
    return w.movedim(-1, dim).to(scores.dtype)


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why each of the others does not (or would come later)."""

    backend: str
    reasons: dict[str, str]

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
    """
    call, _ = _call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel, window, alibi_slopes
    )
    chosen, _ = choose(call, backend)
    reasons = {}
    for name, module in BACKENDS.items():
        reason = module.why_not(call)
        reasons[name] = "serves this call" if name == chosen else reason or f"could, after {chosen}"
    return Explanation(chosen, reasons)


def info() -> dict[str, Any]:
    """Versions, backends and what was built, as plain data."""
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


def _restore(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(B, H, …) with the leading axes that the caller gave."""
    return x if x.shape[:2] == lead else x.reshape(*lead, *x.shape[2:])


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


# ---- the door: everything is checked here, once --------------------------------------------------


def check_scale(scale: Number, tensors: bool = True) -> None:
    """Raise unless ``scale`` is a finite number > 0, or a tensor of such."""
    kernels.check("scale = 1/h²", scale, LEAST, LARGEST, "finite and > 0 in float32", tensors)


def check_flags(**flags: object) -> None:
    """Raise unless every flag is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | torch.SymBool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_window(window: Any) -> tuple[int, int]:
    """(left, right), with −1 for no limit; so is a limit beyond every length."""
    pair = window if isinstance(window, tuple | list) else ()
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
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    first = next(iter(given))
    for name, x in given.items():
        if x.device != given[first].device:
            raise ValueError(
                f"{name} is on {x.device} and {first} on {given[first].device}: move one of them"
            )
        # Of nested transforms only the innermost shows: a wrapped tensor may carry a tangent further in.
        if forward_ad._current_level >= 0 and (
            torch._C._functorch.is_functorch_wrapped_tensor(x)
            or forward_ad.unpack_dual(x).tangent is not None
        ):
            raise NotImplementedError(
                f"{name} has a tangent, and parzen has no forward-mode derivatives: use torch.func.jacrev, "
                "vjp or torch.autograd.functional.jvp, which take reverse mode"
            )


def _per_head(kernel: Kernel) -> Kernel:
    """One-dimensional tensor parameters (H,) as (H, 1), ready to broadcast to (B, H, T)."""

    def column(part: Any) -> Any:
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        rows = {n: v[:, None] for n, v in values.items() if isinstance(v, Tensor) and v.ndim == 1}
        return replace(part, **rows) if rows else part

    profile, rule = kernel.profile, kernel.rule
    learnt = (isinstance(profile, Power) and isinstance(profile.r, Tensor)) or (
        isinstance(rule, WithinMargin) and isinstance(rule.margin, Tensor)
    )
    return Kernel(column(profile), column(rule)) if learnt else kernel


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


def _call(
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
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_tensor(name, x)
        if x.ndim < 2:
            raise ValueError(f"{name} must be (…, H, length, size), got shape {tuple(x.shape)}")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key sizes differ: {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value lengths differ: {key.shape[-2]} and {value.shape[-2]}")

    device = query.device.type
    try:
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    except RuntimeError as error:
        dtypes = ", ".join(str(x.dtype) for x in named.values())
        raise TypeError(f"query, key and value have no common dtype, convert them: {dtypes}") from error
    available = torch.amp.is_autocast_available(device)
    if available and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    batches = [x.shape[:-3] for x in named.values()]
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError as error:
        raise ValueError(f"leading axes do not broadcast: {[tuple(b) for b in batches]}") from error
    heads, key_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key))
    value_heads = value.shape[-3] if value.ndim > 2 else 1
    if key_heads != value_heads:
        raise ValueError(f"key has {key_heads} heads but value {value_heads}")
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
        if heads == 1 and not enable_gqa:
            heads = key_heads
        elif key_heads != 1 or enable_gqa:
            hint = "must be a multiple" if enable_gqa else "must agree, or pass enable_gqa=True"
            raise ValueError(f"query has {heads} heads and key {key_heads}: they {hint}")

    def four(x: Tensor, h: int) -> Tensor:
        x = x.to(dtype)
        x = x[(None,) * max(0, 3 - x.ndim)]
        x = x.expand(*batch, h, *x.shape[-2:]) if x.shape[:-2] != (*batch, h) else x
        return x[None] if not batch else x if len(batch) == 1 else x.flatten(0, len(batch) - 1)

    q, k, v = four(query, heads), four(key, key_heads), four(value, key_heads)
    rows, columns = q.shape[2], k.shape[2]
    lead = (*batch, heads) if max(x.ndim for x in named.values()) > 2 else ()

    kernels.check("dropout_p", dropout_p, 0, 1, "in [0, 1]", tensors=False)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    check_scale(scale)
    batch_or_one = tuple(batch) or (1,)

    def per_row(x: Number, name: str) -> Number:
        if not isinstance(x, Tensor):
            return x
        fits(x, (*batch_or_one, heads, rows), name, "(…, H, T)")
        return _four(x, batch_or_one, 2, name)

    scale = per_row(scale, "scale")
    chosen = _per_head(kernels.kernel(kernel))
    form = lower(chosen, scale)
    mask, bias, causal, lower_right = _masks(attn_mask, is_causal, rows, columns)
    check_together(
        **named, attn_mask=mask if bias is None else bias, scale=scale, alibi_slopes=alibi_slopes,
        alpha=form.r, margin=form.level,
    )  # fmt: skip
    form = replace(form, r=per_row(form.r, "alpha"), level=per_row(form.level, "margin"))
    full = (*batch_or_one, heads, rows, columns)
    for dense in (mask, bias):
        fits(dense, full, "attn_mask", "(…, H, T, S)")
    mask = None if mask is None else _four(mask, batch_or_one, 3, "attn_mask")
    bias = None if bias is None else _four(bias, batch_or_one, 3, "attn_mask")

    left, right = (-1, -1) if window is None else check_window(window)
    if causal:
        right = 0
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        fits(alibi_slopes, (q.shape[0], heads), "alibi_slopes", "(B, H)")
        alibi_slopes = alibi_slopes.expand(heads)[None] if alibi_slopes.ndim < 2 else alibi_slopes
        alibi_slopes = alibi_slopes.expand(-1, heads)
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
    if isinstance(attn_mask, CausalBias):
        _same_lengths("causal bias", (attn_mask.seq_len_q, attn_mask.seq_len_kv), rows, columns)
        lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
        if is_causal and lower_right and rows != columns:
            raise ValueError("is_causal is upper-left aligned and attn_mask lower-right: give one of them")
        return None, None, True, lower_right
    if hasattr(attn_mask, "mask_mod") and hasattr(attn_mask, "to_dense"):
        return _block_mask(attn_mask, rows, columns), None, is_causal, False
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or a causal bias, got {type(attn_mask).__name__}")
    if attn_mask.dtype == torch.bool:
        return attn_mask, None, is_causal, False
    if not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating-point, got {attn_mask.dtype}")
    return None, _forbid(attn_mask), is_causal, False


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


def _forbid(scores: Tensor) -> Tensor:
    """The dtype's most negative finite number is what many callers write for −∞: read it so."""
    # An expanded tensor stays small: its broadcast axes are looked at once.
    small = scores.float() if scores.dtype.itemsize == 1 else scores
    for axis, stride in enumerate(scores.stride()):
        small = small if stride else small.narrow(axis, 0, min(1, small.shape[axis]))
    return torch.where(small <= torch.finfo(scores.dtype).min, -torch.inf, small).expand_as(scores)
