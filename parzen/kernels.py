"""The table: what a kernel is, which kernels exist, and how one is spelled.

A kernel is data: a *profile* (how weight falls with distance) and a *support rule* (where the
neighbourhood ends). With scores ``s_j = scale·(q·k_j) + bias_j`` and ``scale = 1/h²``,

    t_j = c·s_j − τ        w_j = φ(t_j) / Σ_l φ(t_l)        o = Σ_j w_j v_j

The rule chooses the threshold τ and the gain c; off the support φ is 0. A new kernel made of known
parts is one row of ``KERNELS``; nothing else in the package knows kernels by name.

Source: *Sparse Attention as Compact Kernel Regression* (arXiv 2601.22766), eq. 7–22.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Number: TypeAlias = "float | Tensor"


def plain(value: Any) -> Any:
    """A scalar of numpy as the Python number that it is; anything else as it came."""
    return value.item() if isinstance(value, np.generic) else value


class _ByValue:
    """Equality and hash by value; a tensor parameter is compared by identity."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, f.name, plain(value))

    def _key(self) -> tuple[object, ...]:
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return (type(self), *(id(v) if isinstance(v, Tensor) else v for v in values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


_PLAIN = (Tensor, torch.nn.Parameter)


def eager(*tensors: Any) -> bool:
    """Whether torch works on these at once, as plain tensors: it compiles, traces, intercepts, maps nothing."""
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    for x in tensors:
        if type(x) not in _PLAIN:
            return False
    return True


def recording() -> bool:
    """Whether a graph of plain operators is wanted: torch.export, torch.onnx.export, torch.jit.trace."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def differentiated(*values: Any) -> bool:
    """Whether derivatives of one of these may be wanted.

    Where they are not, the compiler cannot trace through every autograd.Function.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def readable(value: Tensor) -> bool:
    """Whether looking at the values is free: not traced, not mapped, not on another device."""
    return (
        value.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def check(name: str, value: object, low: float, high: float, domain: str, tensors: bool = True) -> None:
    """Raise unless ``low ≤ value ≤ high``. A tensor that cannot be read for free is trusted."""
    if isinstance(value, Tensor) and tensors:
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
        if readable(value) and value.numel():
            # As float64: a narrower type would round the bounds, to 0 and ∞.
            least, most = (x.item() for x in value.detach().double().aminmax())
            if not low <= least <= most <= high:
                raise ValueError(f"{name} must be {domain}, got values from {least} to {most}")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        kinds = "a number or a tensor" if tensors else "a number"
        raise TypeError(f"{name} must be {kinds}, got {type(value).__name__}")
    elif not low <= value <= high:
        raise ValueError(f"{name} must be {domain}, got {value!r}")


# The range of float32, which margins and scales must fit; and a length or count that is no limit, but still
# fits 64 bits when positions are added.
LEAST, LARGEST, UNLIMITED = 2.0**-126, 2.0**128 - 2.0**104, 2**40
ABOVE_ONE = 1 + 2.0**-52
ALPHAS = "> 0 (1 is softmax, 2 sparsemax)"


# ---- profiles ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Exp(_ByValue):
    """φ(t) = exp t, the Gaussian: ``exp(−½‖q−k‖²/h²)`` on unit keys."""


@dataclass(frozen=True, eq=False)
class Power(_ByValue):
    """φ(t) = [t]₊ʳ: r = 0, 1, 2, 3 are uniform, Epanechnikov, biweight, triweight.

    ``r``: a number ≥ 0; or (under unit mass only) one < −1, Student's t with weight everywhere, or a tensor
    with one exponent ≥ 1 per head.
    """

    r: Number

    def __post_init__(self) -> None:
        super().__post_init__()
        heavy = isinstance(self.r, int | float) and self.r < -1
        low = -(2.0**60) if heavy else 0
        check("r", self.r, low, 2.0**60, "a number ≥ 0 and ≤ 2⁶⁰, or < −1 under UnitMass")


@dataclass(frozen=True, eq=False)
class AlphaPower(_ByValue):
    """φ(t) = [t]₊ʳ, r = 1/(α−1), for a tensor α > 0 that is read at each use: it may be learned."""

    alpha: Tensor

    def __post_init__(self) -> None:
        check("alpha", self.alpha, LEAST, LARGEST, ALPHAS)

    @property
    def r(self) -> Tensor:
        """The exponent at the present α."""
        r = exponent(self.alpha)
        assert isinstance(r, Tensor)
        return r


# ---- support rules -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Everywhere(_ByValue):
    """Every allowed key is in the neighbourhood."""


@dataclass(frozen=True, eq=False)
class UnitMass(_ByValue):
    """τ solves Σ_j φ(s_j/r − τ) = 1: the entmax family, α = 1 + 1/r."""


@dataclass(frozen=True, eq=False)
class UnitNorm(_ByValue):
    """τ solves Σ_j [s_j − τ]₊^{r+1} = 1: normmax, α = 1 + 1/r, whose weights have the largest p·s − ‖p‖_α."""


@dataclass(frozen=True, eq=False)
class WithinRadius(_ByValue):
    """Keys within a fixed distance of the query: cos ≥ 1 − δ²/2.

    ``radius``: δ > 0 (unit vectors are at most 2 apart), or None for the bandwidth h itself. The
    support may be empty; the output is then 0.
    """

    radius: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius is not None:
            if isinstance(self.radius, Tensor):
                raise TypeError("radius must be a number; for one per head use the tensor scale = 1/h²")
            check("radius", self.radius, LEAST, 2.0**60, "a number > 0 and ≤ 2⁶⁰", tensors=False)


@dataclass(frozen=True, eq=False)
class WithinMargin(_ByValue):
    """Keys whose score is within ``margin`` of the best one: s_j ≥ max s − b.

    ``margin``: b > 0, a number or a tensor with one margin per head.
    """

    margin: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check("margin", self.margin, LEAST, LARGEST, "a number > 0, finite in float32")


@dataclass(frozen=True, eq=False)
class Nearest(_ByValue):
    """The ``k`` ≥ 1 best-scoring keys, all of them if they are fewer; ties at the k-th score are all kept."""

    k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.k, int) or isinstance(self.k, bool):
            raise TypeError(f"k must be an integer ≥ 1, got {self.k!r}")
        if self.k < 1:
            raise ValueError(f"k must be an integer ≥ 1, got {self.k}")


Profile: TypeAlias = "Exp | Power | AlphaPower"
Rule: TypeAlias = "Everywhere | UnitMass | UnitNorm | WithinRadius | WithinMargin | Nearest"


@dataclass(frozen=True, eq=False)
class Kernel(_ByValue):
    """A profile and a support rule, checked against the valid cells.

    ==============  =====================================
    rule            profiles
    ==============  =====================================
    Everywhere      Exp
    UnitMass        Power(r), r > 0 or < −1; AlphaPower(α)
    UnitNorm        Power(r), r > 0; AlphaPower(α), α > 1
    WithinRadius    Exp, Power(r)
    WithinMargin    Exp, Power(r)
    Nearest         Exp, Power(0)
    ==============  =====================================

    Raises:
        ValueError: another combination, or a parameter outside its domain.

    Example:
        >>> from parzen.kernels import Kernel, Power, WithinMargin
        >>> print(Kernel(Power(2), WithinMargin(1.0)))  # [t]₊² within a margin of the best score
        power?r=2&margin=1
    """

    profile: Profile
    rule: Rule

    def __post_init__(self) -> None:
        profile, rule = self.profile, self.rule
        if not isinstance(profile, Exp | Power | AlphaPower):
            raise TypeError(f"profile must be Exp() or Power(r), got {profile!r}")
        if not isinstance(rule, Everywhere | UnitMass | UnitNorm | WithinRadius | WithinMargin | Nearest):
            raise TypeError(f"rule must be a support rule of parzen.kernels, got {rule!r}")
        r = profile.r if isinstance(profile, Power) else None
        learned = isinstance(profile, AlphaPower) or isinstance(r, Tensor)
        if learned and not (isinstance(rule, UnitMass) or (r is None and isinstance(rule, UnitNorm))):
            raise ValueError("a tensor r needs the UnitMass rule; elsewhere give a number")
        if r is not None and not isinstance(rule, UnitMass):
            check("r", r, 0, 2.0**60, "a number ≥ 0 and ≤ 2⁶⁰: below −1 it needs the UnitMass rule")
        if isinstance(rule, Everywhere) and r is not None:
            raise ValueError("Everywhere goes with Exp only: a power has no finite value far away")
        if isinstance(rule, UnitMass | UnitNorm):
            name = type(rule).__name__
            if isinstance(profile, Exp):
                raise ValueError(f"{name} goes with Power(r); Exp needs no unit mass")
            if isinstance(profile, AlphaPower):
                if isinstance(rule, UnitNorm):
                    check("alpha", profile.alpha, ABOVE_ONE, LARGEST, "> 1 for normmax")
            elif isinstance(r, Tensor):
                check("r", r, 1, 2.0**60, "≥ 1 where it is a tensor; give alpha instead")
            elif r == 0:
                raise ValueError(f"{name} goes with Power(r), r > 0, got Power(0)")
        if isinstance(rule, Nearest) and r not in (None, 0):
            raise ValueError(f"Nearest goes with Exp or Power(0), got Power({r!r})")

    @property
    def compact(self) -> bool:
        """Whether far keys get a weight of exactly 0."""
        r = self.profile.r if isinstance(self.profile, Power) else 1.0
        return not isinstance(self.rule, Everywhere) and (isinstance(r, Tensor) or r >= 0)

    @property
    def gain(self) -> Number:
        """c in ``t = c·s − τ``."""
        if not isinstance(self.profile, Exp):
            if isinstance(self.rule, UnitMass):
                return 1 / self.profile.r
            if isinstance(self.rule, WithinRadius):
                return 2.0
        return 1.0

    @property
    def learned(self) -> tuple[str, Tensor] | None:
        """The name and value of the parameter that is a tensor (alpha, r or margin), if one is."""
        for part in (self.profile, self.rule):
            for f in fields(part):
                value = getattr(part, f.name)
                if isinstance(value, Tensor):
                    return f.name, value
        return None

    def at(self, value: Tensor) -> Kernel:
        """The same kernel with another tensor in the place of ``learned``."""
        assert self.learned is not None
        change: dict[str, Any] = {self.learned[0]: value}
        if isinstance(self.profile, Exp) or "margin" in change:
            return replace(self, rule=replace(self.rule, **change))
        return replace(self, profile=replace(self.profile, **change))

    def __str__(self) -> str:
        return spell(self)


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table: a kernel at its default parameters, and what people call it.

    ``parameters`` are the names that ``kernel(name, …)`` accepts.
    """

    kernel: Kernel
    ml_name: str
    statistical_name: str
    aliases: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    source: str = ""


# fmt: off
KERNELS: dict[str, Row] = {
    "gaussian": Row(Kernel(Exp(), Everywhere()), "softmax", "Gaussian", ("softmax",), ("radius",), "eq. 6"),
    "epanechnikov": Row(Kernel(Power(1), UnitMass()), "sparsemax", "Epanechnikov, adaptive", ("sparsemax",), ("radius",), "prop. 3.1"),
    "biweight": Row(Kernel(Power(2), UnitMass()), "1.5-entmax", "biweight, adaptive", ("entmax15",), ("radius",), "prop. 3.1"),
    "triweight": Row(Kernel(Power(3), UnitMass()), "4/3-entmax", "triweight, adaptive", ("entmax43",), ("radius",), "prop. 3.1"),
    "entmax": Row(Kernel(Power(2), UnitMass()), "α-entmax", "power, r = 1/(α−1)", (), ("alpha",), "prop. 3.1"),
    "normrelu": Row(Kernel(Power(1), WithinRadius()), "normReLU", "Epanechnikov, fixed radius", (), ("radius",), "eq. 12"),
    "relumax": Row(Kernel(Power(1), WithinMargin(1.0)), "ReLUmax", "Epanechnikov, max-anchored", (), ("margin",), "eq. 20–22"),
    "knn_uniform": Row(Kernel(Power(0), Nearest(16)), "top-k average", "uniform kNN", ("topk_uniform",), ("k",), "eq. 18"),
    "knn_gaussian": Row(Kernel(Exp(), Nearest(16)), "top-k softmax", "Gaussian kNN", ("topk_softmax",), ("k",), "eq. 19"),
    "uniform": Row(Kernel(Power(0), WithinRadius()), "—", "uniform, fixed radius", (), ("radius",), "eq. 8"),
    "gaussian_truncated": Row(Kernel(Exp(), WithinRadius()), "—", "Gaussian, fixed radius", (), ("radius",), "eq. 7"),
}
# fmt: on


def exponent(alpha: Number) -> Number:
    """r = 1/(α−1) of α-entmax; for a tensor, in float32 at least, NaN for α ≤ 0 and finite at α = 1.

    Near α = 1 a tensor entry becomes the closest α above or below 1 that the dtype tells apart, so it keeps
    its gradient; the weights there are softmax to rounding.
    """
    if not isinstance(alpha, Tensor):
        return 1 / (alpha - 1)
    alpha = alpha if alpha.dtype == torch.float64 else alpha.float()
    excess = alpha - 1
    tiny = torch.finfo(alpha.dtype).eps / 2
    excess = torch.where(excess.abs() < tiny, excess + tiny, excess)
    return torch.where(alpha > 0, 1 / excess, torch.nan)


def _entmax(alpha: Number) -> Kernel:
    if isinstance(alpha, Tensor):
        return Kernel(AlphaPower(alpha), UnitMass())
    check("alpha", alpha, LEAST, LARGEST, ALPHAS)
    # Beyond float64 resolution α-entmax is softmax; the exponent would overflow.
    if abs(alpha - 1) < 2**-52:
        return Kernel(Exp(), Everywhere())
    return Kernel(Power(exponent(alpha)), UnitMass())


def _normmax(alpha: Number = 2.0) -> Kernel:
    if isinstance(alpha, Tensor):
        return Kernel(AlphaPower(alpha), UnitNorm())
    check("alpha", alpha, ABOVE_ONE, LARGEST, "> 1 for normmax")
    return Kernel(Power(exponent(alpha)), UnitNorm())


# Free combinations, spelled "power?r=2&margin=1" or "exp?k=8": a profile, and the rule that the
# parameter's name implies.
_RULES: dict[str, type] = {"radius": WithinRadius, "margin": WithinMargin, "k": Nearest}


def _free(profile: str, parameters: dict[str, Number]) -> Kernel:
    rest = dict(parameters)
    shape: Profile = Power(rest.pop("r", 1)) if profile == "power" else Exp()
    if len(rest) > 1 or any(name not in _RULES for name in rest):
        allowed = ", ".join((["r"] if profile == "power" else []) + list(_RULES))
        raise ValueError(
            f"{profile!r} takes {allowed} (at most one of {', '.join(_RULES)}), got {', '.join(rest)}"
        )
    for name, value in rest.items():
        rule: Rule = _RULES[name]() if value == "h" else _RULES[name](value)
        return Kernel(shape, rule)
    return Kernel(shape, UnitMass() if profile == "power" else Everywhere())


def _parse(text: str) -> tuple[str, dict[str, Number]]:
    name, _, query = text.partition("?")
    parameters: dict[str, Number] = {}
    for item in query.split("&") if query else []:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: expected name?parameter=value&…, got {item!r}")
        if key in parameters:
            raise ValueError(f"{text!r}: {key} is given twice")
        try:
            parameters[key] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            # "radius=h" in a free combination: the bandwidth itself.
            if (key, value) != ("radius", "h"):
                raise ValueError(f"{text!r}: {key} must be a number, got {value!r}") from None
            parameters[key] = value  # type: ignore[assignment]
    return name.strip().lower(), parameters


def kernel(name: str | Kernel, **parameters: Number) -> Kernel:
    """The kernel called ``name``, with some of its parameters changed.

    In t = c·s − τ, w ∝ φ(t): its profile φ says how the weight of a score s falls with distance, its support
    rule chooses the gain c and the threshold τ, below which the weight is exactly 0.

    ``kernel("relumax", margin=2.0)`` and ``kernel("relumax?margin=2")`` are the same; the text form is
    the one spelling used by Python, the command line and configs. Names and aliases are the rows of
    ``KERNELS``; a ``radius`` fixes the neighbourhood of ``epanechnikov``, ``biweight``, ``triweight`` and
    ``gaussian``, as in a statistics book; ``normmax`` takes ``alpha``; ``power`` (with ``r``) and ``exp`` combine freely with one of
    ``radius``, ``margin``, ``k``: ``kernel("power?r=2&margin=1")``.

    Args:
        name: a name, an alias, ``name?parameter=value&…``, or a ``Kernel`` (returned as it is). Mind that
            ``"epanechnikov"`` is sparsemax, whose radius adapts to each row; the Epanechnikov kernel of a
            statistics book, with the bandwidth h for all, is ``"epanechnikov?radius=h"`` (normReLU).
        **parameters: ``alpha`` > 0 (entmax) or > 1 (normmax), ``margin`` > 0 (relumax), ``radius`` > 0 or
            "h", the bandwidth (normrelu, uniform, gaussian_truncated, and the names of a profile), ``k`` ≥ 1
            (knn_*). alpha and margin may be tensors: a
            one-dimensional tensor holds one value per head. The kernel keeps the tensor itself and reads it
            at each use, so that it may be a parameter under training.

    Raises:
        ValueError: unknown name (the known ones are listed), or a parameter outside its domain.
        TypeError: a parameter of another type.

    Example:
        >>> parzen.kernel("relumax?margin=2") == parzen.kernel("relumax", margin=2.0)
        True
        >>> print(parzen.kernel("epanechnikov?radius=h"))  # with a fixed bandwidth it is normReLU
        normrelu
    """
    if isinstance(name, Kernel):
        if parameters:
            raise TypeError(f"a Kernel already has its parameters; {', '.join(parameters)} given too")
        return name
    if not isinstance(name, str):
        raise TypeError(f"kernel must be a name or a Kernel, got {type(name).__name__}")
    base, spelled = _parse(name)
    for key in parameters:
        if key in spelled:
            raise ValueError(f"{key} is given twice: in {name!r} and as an argument")
    given = spelled | {name: plain(value) for name, value in parameters.items()}
    if base in ("power", "exp"):
        return _free(base, given)
    if base == "normmax":
        if not given.keys() <= {"alpha"}:
            raise ValueError(f"kernel 'normmax' takes alpha, got {', '.join(map(repr, given))}")
        return _normmax(**given)
    row = KERNELS.get(base) or next((r for r in KERNELS.values() if base in r.aliases), None)
    if row is None:
        known = [n for key, r in KERNELS.items() for n in (key, *r.aliases)] + ["normmax", "power", "exp"]
        near = difflib.get_close_matches(base, known, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown kernel {base!r}; {meant}known: {', '.join(known)}")
    for key in given:
        if key not in row.parameters or (key == "radius" and base in row.aliases):
            names = [] if base in row.aliases and "radius" in row.parameters else row.parameters
            takes = f"takes {', '.join(names)}" if names else "takes no parameter"
            raise ValueError(f"kernel {base!r} {takes}, got {key!r}")
    if not given:
        return row.kernel
    if "alpha" in given:
        return _entmax(given["alpha"])
    rule: Any = WithinRadius if "radius" in given else type(row.kernel.rule)
    values = {n: None if n == "radius" and value == "h" else value for n, value in given.items()}
    return Kernel(row.kernel.profile, rule(**values))


def hold(module: torch.nn.Module, kernel: Kernel) -> None:
    """Makes a kernel's tensor the ``kernel_parameter`` of a module: trained, moved and saved with it.

    It is a buffer unless it is a parameter, and None where the kernel has numbers only.
    """
    module._parameters.pop("kernel_parameter", None)
    module._buffers.pop("kernel_parameter", None)
    held = kernel.learned
    if held is not None and isinstance(held[1], torch.nn.Parameter):
        module.kernel_parameter = held[1]
    else:
        module.register_buffer("kernel_parameter", None if held is None else held[1])


def _digits(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def spell(k: Kernel) -> str:
    """The shortest text that ``kernel`` reads back as ``k`` (tensor parameters show their shape)."""
    for name, row in KERNELS.items():
        if row.kernel == k:
            return name
    profile, rule = k.profile, k.rule
    if isinstance(rule, UnitNorm) and not isinstance(profile, Exp):
        alpha = profile.alpha if isinstance(profile, AlphaPower) else 1 + 1 / profile.r
        return f"normmax?alpha={_digits(alpha)}"
    if isinstance(rule, UnitMass) and not isinstance(profile, Exp):
        r = profile.r
        if not isinstance(r, Tensor) and kernel("entmax", alpha=1 + 1 / r) == k:
            return f"entmax?alpha={_digits(1 + 1 / r)}"
        return f"power?r={_digits(r)}"
    values = {f.name: getattr(rule, f.name) for f in fields(rule)}
    shown = "&".join(f"{key}={'h' if v is None else _digits(v)}" for key, v in values.items())
    for name, row in KERNELS.items():
        if row.kernel.profile == profile and type(row.kernel.rule) is type(rule):
            return f"{name}?{shown}"
    head = f"power?r={_digits(profile.r)}&" if isinstance(profile, Power) else "exp?"
    return head + shown


# ---- what backends receive -----------------------------------------------------------------------

EXP, POWER = 0, 1
EVERYWHERE, UNIT_MASS, THRESHOLD, MARGIN, NEAREST, UNIT_NORM = range(6)


@dataclass(frozen=True)
class Form:
    """A kernel lowered to numbers, thresholds in units of the scores.

    With θ the threshold on s (so τ = c·θ), φ acts on ``s − θ``, or on ``(s − θ)/r`` under unit mass; a
    constant factor inside φ cancels in w. No backend needs to know more:

    ==========  ===========================================  ========================
    rule        θ                                            support
    ==========  ===========================================  ========================
    EVERYWHERE  —                                            every allowed key
    UNIT_MASS   Σ [(s−θ)/r]₊ʳ = 1                            s > θ
    THRESHOLD   ``level``                                    s ≥ θ (s > θ if r > 0)
    MARGIN      max s − ``level``                            s ≥ θ (s > θ if r > 0)
    NEAREST     k-th largest s (−∞ if fewer)                 s ≥ θ
    UNIT_NORM   Σ [s−θ]₊^{r+1} = 1                           s > θ
    ==========  ===========================================  ========================

    ``r`` and ``level`` are floats or tensors broadcastable to (B, H, T); tensors carry gradients.
    """

    profile: int
    rule: int
    r: Number = 1.0
    level: Number = 0.0
    k: int = 0

    @property
    def closed(self) -> bool:
        """Whether a key exactly at the threshold belongs to the support."""
        return self.profile == EXP or (not isinstance(self.r, Tensor) and self.r == 0)

    @property
    def beyond(self) -> str | None:
        """Why the engines do not serve it, although the reference does; None where they may."""
        if self.rule == UNIT_NORM:
            return "normmax goes through the reference"
        if self.rule == UNIT_MASS:
            r = self.r
            low = float(r.detach().min()) if isinstance(r, Tensor) and readable(r) and r.numel() else r
            if not isinstance(low, Tensor) and low < 1:
                return "α outside [1, 2] goes through the reference"
        return None


def _wide(x: Number) -> Number:
    """A float in place of an int, which torch holds to 64 bits."""
    return float(x) if isinstance(x, int) else x


def lower(k: Kernel, scale: Number) -> Form:
    """The numbers of kernel ``k`` at ``scale`` = 1/h² (a float or a tensor)."""
    profile, rule = k.profile, k.rule
    code = EXP if isinstance(profile, Exp) else POWER
    r = 1.0 if isinstance(profile, Exp) else _wide(profile.r)
    if isinstance(rule, UnitMass | UnitNorm):
        return Form(code, UNIT_MASS if isinstance(rule, UnitMass) else UNIT_NORM, r)
    if isinstance(rule, WithinRadius):
        # cos ≥ 1 − δ²/2 times the scale; at δ = h, scale·δ² is 1.
        level = scale - 0.5 if rule.radius is None else scale * (1 - rule.radius**2 / 2)
        return Form(code, THRESHOLD, r, level)
    if isinstance(rule, WithinMargin):
        return Form(code, MARGIN, r, _wide(rule.margin))
    if isinstance(rule, Nearest):
        return Form(code, NEAREST, r, k=min(rule.k, UNLIMITED))
    return Form(code, EVERYWHERE, r)
