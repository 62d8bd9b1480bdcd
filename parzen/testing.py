"""The conformance check: what every kernel must do on every backend.

``check_kernel(kernel, backend)`` raises an ``AssertionError`` that names the case. It compares output and
every gradient with the float64 definition written below from the formulas alone: bisection for the
threshold and autograd for the derivatives; none of the library's own solver or backward is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from parzen import kernels
from parzen.attention import attention, explain
from parzen.backends import BACKENDS
from parzen.kernels import (
    Everywhere,
    Exp,
    Kernel,
    Nearest,
    Number,
    UnitMass,
    UnitNorm,
    WithinMargin,
    WithinRadius,
)

Attention = Callable[..., Tensor]


# ---- the witness: float64, from the formulas -----------------------------------------------------


def bisect_mass(x: Tensor, r: Number) -> Tensor:
    """τ with Σ [x − τ]₊ʳ = 1 along the last axis, by bisection; infinite entries stay outside.

    The entry of the most weight, the last one to leave if r < 0, is between 1 and n^{−1/r} above τ.
    """
    falls = torch.as_tensor(r, dtype=x.dtype) < 0
    best = torch.where(falls, x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
    heavy = torch.ones_like(best)
    light = torch.as_tensor(float(max(1, x.shape[-1])), dtype=x.dtype) ** (-1 / r) * heavy
    for _ in range(80):
        middle = (heavy + light) / 2
        above = ((middle + (x - best)).clamp_min(0) ** r).sum(-1, keepdim=True) >= 1
        heavy, light = torch.where(above, middle, heavy), torch.where(above, light, middle)
    return best - (heavy + light) / 2


def witness_weights(s: Tensor, kernel: Kernel, scale: Number = 1.0) -> Tensor:
    """The weights of float64 rows ``s`` (already scaled; −∞ = not allowed), differentiable.

    Parameters that are tensors, and ``scale``, broadcast to ``s`` with a last axis of 1.
    """
    profile, rule = kernel.profile, kernel.rule
    r: Any = None if isinstance(profile, Exp) else profile.r
    allowed = s > -torch.inf
    rows = allowed.any(-1, keepdim=True)
    # A row with nothing allowed is solved as if it were all zeros, and erased at the end.
    s = torch.where(rows, s, 0)
    best = s.amax(-1, keepdim=True)
    if isinstance(rule, UnitMass | UnitNorm):
        # x and the power of it that sums to 1.
        x, power = (s / r, r) if isinstance(rule, UnitMass) else (s, r + 1)
        with torch.no_grad():
            tau = bisect_mass(x, power)
            inside = (x > tau) & allowed
        # Newton steps at the solution: they leave τ in place and give it its derivative.
        for _ in range(2):
            y = torch.where(inside, x - tau, 1)
            mass = torch.where(inside, y**power, 0).sum(-1, keepdim=True)
            slope = torch.where(inside, power * y ** (power - 1), 0).sum(-1, keepdim=True)
            tau = tau + (mass - 1) / slope
        value = torch.where(inside, torch.where(inside, x - tau, 1) ** r, 0)
    else:
        theta: Any = torch.full_like(best, -torch.inf)
        if isinstance(rule, WithinRadius):
            theta = scale - 0.5 if rule.radius is None else scale * (1 - rule.radius**2 / 2)
            theta = theta + torch.zeros_like(best)
        elif isinstance(rule, WithinMargin):
            theta = best - rule.margin
        elif isinstance(rule, Nearest):
            order = s.detach().sort(-1, descending=True).values
            if order.shape[-1] >= rule.k:
                theta = order[..., rule.k - 1 : rule.k]
        inside = allowed & (s >= theta)
        if r is None:
            value = torch.where(inside, torch.exp(torch.where(inside, s, best) - best), 0)
        elif r == 0:
            value = inside.to(s.dtype)
        else:
            inside = inside & (s > theta)
            value = torch.where(inside, torch.where(inside, s - theta, 1) ** r, 0)
    total = value.sum(-1, keepdim=True)
    return torch.where(rows & (total > 0), value / torch.where(total > 0, total, 1), 0)


def witness(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: Number | None = None,
    *,
    kernel: str | Kernel,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Dense attention (B, H, T, E) × (B, Hk, S, E) × (B, Hk, S, Ev) in float64, from the formulas."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // max(1, key.shape[1])
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    rows, columns = query.shape[2], key.shape[2]
    factor: Any = query.shape[-1] ** -0.5 if scale is None else scale
    factor = factor.double()[..., None] if isinstance(factor, Tensor) else factor
    s = torch.einsum("bhte,bhse->bhts", query, key) * factor
    position = torch.arange(rows)[:, None] + (0 if is_causal else columns - rows)
    ahead = torch.arange(columns)[None, :] - position
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[..., None, None] * ahead.abs()
    allowed = torch.ones(rows, columns, dtype=torch.bool)
    if is_causal:
        allowed = allowed & (ahead <= 0)
    if window is not None:
        allowed = (
            allowed & ((ahead >= -window[0]) | (window[0] < 0)) & ((ahead <= window[1]) | (window[1] < 0))
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.double()
    if columns == 0:
        return s @ value
    s = s.masked_fill(~allowed, -torch.inf)
    return witness_weights(s, _double(kernels.kernel(kernel)), factor) @ value


def _double(kernel: Kernel) -> Kernel:
    """Per-head parameters (H,) as float64 (H, 1, 1)."""
    profile, rule = kernel.profile, kernel.rule
    if not isinstance(profile, Exp) and isinstance(profile.r, Tensor):
        profile = kernels.Power(profile.r.double()[:, None, None])
    if isinstance(rule, WithinMargin) and isinstance(rule.margin, Tensor):
        rule = WithinMargin(rule.margin.double()[:, None, None])
    return Kernel(profile, rule)


# ---- the cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One shape and set of options of the sweep; ``options`` are keyword arguments of ``attention``."""

    name: str
    sizes: tuple[int, int, int, int, int, int, int]  # B, H, Hk, T, S, E, Ev
    options: dict[str, Any]


def cases(generator: torch.Generator | None = None) -> Iterator[Case]:
    """Odd and unequal sizes, every kind of mask and bias, grouped heads, windows, ALiBi, scales.

    About half have values as wide as the keys, the form that torch's own kernel takes.
    """
    g = generator or torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g) < 0.6

    nothing_for_row_1 = some(1, 1, 7, 9)
    nothing_for_row_1[:, :, 1] = False
    infinite = normal(7, 9).masked_fill(~some(7, 9), -torch.inf)
    positive = normal(2, 3, 7).exp()
    yield Case("plain", (2, 3, 3, 7, 9, 5, 4), {})
    yield Case("one key", (1, 1, 1, 3, 1, 2, 2), {})
    yield Case("one query", (2, 2, 2, 1, 33, 40, 3), {"is_causal": False})
    yield Case("no keys", (1, 2, 2, 3, 0, 4, 4), {})
    yield Case("no queries", (1, 2, 2, 0, 3, 4, 4), {})
    yield Case("width 1", (1, 2, 2, 5, 6, 1, 1), {"is_causal": True})
    yield Case("wide", (1, 1, 1, 4, 5, 300, 7), {})
    yield Case("causal, square", (2, 2, 2, 65, 65, 8, 8), {"is_causal": True})
    yield Case("causal, more keys", (1, 2, 2, 7, 12, 8, 8), {"is_causal": True})
    yield Case("causal, more queries", (1, 2, 2, 12, 7, 8, 8), {"is_causal": True})
    yield Case("bool mask", (2, 3, 3, 7, 9, 5, 4), {"attn_mask": some(2, 1, 7, 9)})
    yield Case("row with nothing", (2, 3, 3, 7, 9, 5, 5), {"attn_mask": nothing_for_row_1})
    yield Case("key padding", (2, 3, 3, 7, 9, 5, 5), {"attn_mask": some(2, 1, 1, 9)})
    yield Case("bias", (2, 3, 3, 7, 9, 5, 4), {"attn_mask": normal(2, 3, 7, 9)})
    yield Case("bias, broadcast", (2, 3, 3, 7, 9, 5, 4), {"attn_mask": normal(1, 3, 1, 9)})
    yield Case("bias with −∞", (2, 3, 3, 7, 9, 5, 4), {"attn_mask": infinite})
    yield Case("grouped heads", (2, 6, 2, 7, 9, 5, 5), {"enable_gqa": True})
    yield Case("grouped, causal", (2, 6, 3, 9, 9, 5, 5), {"enable_gqa": True, "is_causal": True})
    yield Case("window", (1, 2, 2, 20, 20, 8, 8), {"window": (5, 2)})
    yield Case("window, causal", (1, 2, 2, 20, 24, 8, 8), {"window": (5, -1), "is_causal": True})
    yield Case("window, unequal", (1, 2, 2, 9, 21, 8, 8), {"window": (4, 0)})
    yield Case("ALiBi", (2, 2, 2, 9, 12, 8, 8), {"alibi_slopes": torch.tensor([0.5, 0.1])})
    yield Case("scale per head", (2, 3, 3, 7, 9, 5, 5), {"scale": positive[0, :, :1]})
    yield Case("scale per query", (2, 3, 3, 7, 9, 5, 5), {"scale": positive})
    yield Case("long, causal", (1, 2, 2, 150, 150, 16, 16), {"is_causal": True, "scale": 1.0})
    yield Case("small scale", (1, 2, 2, 33, 70, 16, 8), {"scale": 0.01})
    yield Case("large scale", (1, 2, 2, 33, 70, 16, 16), {"scale": 4.0})


# Half precision: inputs are exact, sums are float32, so one rounding of the result (½ ulp,
# 3.9e-3 and 4.9e-4) is left.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4.5e-3, torch.float16: 6e-4}


def check_kernel(
    kernel: str | Kernel,
    backend: str = "auto",
    dtype: torch.dtype = torch.float64,
    *,
    device: str = "cpu",
    attend: Attention = attention,
    tolerance: float | None = None,
    seed: int = 0,
) -> int:
    """Compare ``attend`` with the float64 witness, output and all gradients; the number of cases run.

    Kernels whose weights, or their derivatives, jump at a threshold (r < 1, Exp) get inputs of small
    integers, which every dtype represents exactly, with ties among them: rounding cannot move a key across.

    Args:
        kernel: what ``parzen.kernel`` accepts, with numbers for parameters: the cases differ in heads.
        backend: a name for ``attention``; a case that this backend refuses (``why_not``) is passed over.
        dtype: of query, key and value, floating-point. Errors are measured relative to
            ``max(1, |expected|)``, against ``TOLERANCE[dtype]`` unless ``tolerance`` is given.
        device: where query, key and value live.
        attend: the function under test, with the signature of ``attention``.
        seed: of the random inputs.

    Raises:
        AssertionError: naming the case, the tensor and the largest error.
        ValueError: a backend that is unknown or refuses every case, a kernel with tensor parameters, or a
            dtype without a tolerance.

    Example:
        >>> from parzen.testing import check_kernel
        >>> check_kernel("biweight", "reference") > 10  # so many cases agree with the float64 witness
        True
    """
    chosen = kernels.kernel(kernel)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
    parameters = (getattr(part, f.name) for part in (chosen.profile, chosen.rule) for f in fields(part))
    if any(isinstance(x, Tensor) for x in parameters):
        raise ValueError(f"the cases differ in heads: give {chosen} numbers for its parameters, not tensors")
    if tolerance is None and dtype not in TOLERANCE:
        known = ", ".join(map(str, TOLERANCE))
        raise ValueError(f"dtype must be one of {known}, or pass a tolerance; got {dtype}")
    jumps = not isinstance(chosen.rule, UnitMass | UnitNorm | Everywhere) and (
        isinstance(chosen.profile, Exp) or bool(chosen.profile.r < 1)
    )
    allowed = TOLERANCE[dtype] if tolerance is None else tolerance
    done, reason = 0, None
    for number, case in enumerate(cases()):
        arguments, names = _inputs(case, dtype, device, jumps, seed + number)
        options = dict(arguments)
        if backend != "auto":
            tensors = {n: options.pop(n) for n in ("query", "key", "value")}
            reason = explain(**tensors, **options, kernel=chosen).why_not[backend]
            if reason is not None:
                continue
        label = f"{chosen} on {backend}, {dtype}, {case.name}"
        expected, expected_grads = _run(lambda **kw: _as_witness(kw, chosen), arguments, names)
        got, grads = _run(lambda **kw: attend(**kw, kernel=chosen, backend=backend), arguments, names)
        _close(got, expected, allowed, f"{label}: output")
        for name, a, b in zip(names, grads, expected_grads, strict=True):
            _close(a, b, allowed, f"{label}: gradient of {name}")
        done += 1
    if not done:
        raise ValueError(f"backend {backend!r} serves no case of {chosen} in {dtype}: {reason}")
    return done


def _inputs(
    case: Case, dtype: torch.dtype, device: str, jumps: bool, seed: int
) -> tuple[dict[str, Any], list[str]]:
    g = torch.Generator().manual_seed(seed)
    b, h, hk, t, s, e, ev = case.sizes

    def draw(*shape: int) -> Tensor:
        if jumps:
            return torch.randint(-2, 3, shape, generator=g).to(dtype)
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    arguments: dict[str, Any] = {
        "query": draw(b, h, t, e),
        "key": draw(b, hk, s, e),
        "value": draw(b, hk, s, ev),
    }
    arguments |= case.options
    if jumps:
        # Powers of two and integers keep the scores exact.
        scale = arguments.get("scale", 1.0)
        scale = torch.exp2(torch.log2(scale).round()) if isinstance(scale, Tensor) else 0.5
        arguments["scale"] = scale
        bias = arguments.get("attn_mask")
        if bias is not None and bias.dtype != torch.bool:
            arguments["attn_mask"] = bias.round()
        if "alibi_slopes" in arguments:
            arguments["alibi_slopes"] = torch.tensor([0.5, 0.25])
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            arguments[name] = x.to(
                device=device, dtype=dtype if x.ndim == 4 else torch.promote_types(dtype, torch.float32)
            )
        elif isinstance(x, Tensor):
            arguments[name] = x.to(device)
    names = ["query", "key", "value"]
    names += [
        n
        for n in ("attn_mask", "scale")
        if isinstance(arguments.get(n), Tensor) and arguments[n].is_floating_point()
    ]
    return arguments, names


def _as_witness(arguments: dict[str, Any], kernel: Kernel) -> Tensor:
    arguments = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    arguments.pop("enable_gqa", None)
    return witness(**arguments, kernel=kernel)


def _run(
    f: Callable[..., Tensor], arguments: dict[str, Any], names: list[str]
) -> tuple[Tensor, list[Tensor]]:
    leaves = {n: arguments[n].detach().clone().requires_grad_() for n in names}
    out = f(**(arguments | leaves))
    g = torch.Generator().manual_seed(1)
    # Exact in every dtype, so that both sides differentiate the same loss.
    seed = torch.randint(-8, 9, out.shape, generator=g) / 4
    loss = (out * seed.to(out)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return out.detach(), list(grads)


def _close(got: Tensor, expected: Tensor, tolerance: float, label: str) -> None:
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if got.shape != expected.shape:
        raise AssertionError(f"{label}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not expected.numel():
        return
    size = expected.abs().amax().clamp_min(1)
    error = ((got - expected).abs() / size).amax()
    if not bool(error <= tolerance):
        raise AssertionError(f"{label}: error {float(error):.2e}, allowed {tolerance:.0e}")
