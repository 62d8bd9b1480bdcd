"""Layers: multi-head attention with any kernel, a bandwidth of its own in each head, and positions.

The score of query i and key j in head h is

    s_ij = scale_h(i)·(q_i·k_j) − slope_h·|i − j|        scale = 1/h²

Two small tables say how its parts are chosen: ``BANDWIDTHS`` how scale depends on the head, the query and
the number of keys in sight, ``POSITIONS`` how positions enter. What becomes of the scores is a kernel of
``parzen.KERNELS``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen import kernels
from parzen.attention import AttentionWeights, attention, attention_weights
from parzen.backends import BACKENDS
from parzen.call import (
    autocasts,
    check_flags,
    check_scale,
    check_tensor,
    check_together,
    check_window,
    fits,
    is_causal_bias,
)
from parzen.convert import anneal as anneal
from parzen.convert import convert as convert
from parzen.convert import match as match
from parzen.convert import restore as restore
from parzen.kernels import AlphaPower, Kernel, Number, Power, UnitMass, WithinMargin, spell

Device = torch.device | str | None


def _wide(x: Tensor) -> Tensor:
    """float32 at least: bfloat16 does not tell 257 keys from 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _softplus_inverse(y: float) -> float:
    return y + math.log(-math.expm1(-y))


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


# ---- the bandwidth and its schedules -------------------------------------------------------------


class Bandwidth(nn.Module):
    """scale_h(x, n) = scale_h · growth_h(x, n): here growth is 1 and scale_h one constant for all heads.

    A schedule is a subclass. ``learned`` makes scale_h a parameter of each head (positive: its logarithm is
    stored); ``needs_length`` says that scale changes with the number n of keys in sight, by ``growth``.

    Args:
        width: D of the inputs.
        growing: for each of the H heads, whether its scale grows; elsewhere growth is 1.
        head_size: E.
        scale: 1/h² > 0, the initial scale_h of every head.
        device, dtype: of the parameters.
    """

    learned: ClassVar[bool] = False
    needs_length: ClassVar[bool] = False

    def __init__(
        self,
        width: int,
        growing: list[bool],
        head_size: int,
        scale: float,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        scale = kernels.plain(scale)
        check_scale(scale, tensors=False)
        self.heads, self.head_size, self.start = len(growing), head_size, float(scale)
        self._growing = growing
        if self.learned:
            self.log_scale = nn.Parameter(torch.empty(self.heads, device=device, dtype=dtype))
        self._build(width, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _build(self, width: int, factory: dict[str, Any]) -> None:
        """Make the parameters of ``growth``."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the initial scale and growth."""
        if self.learned:
            self.log_scale.fill_(math.log(self.start))

    def base(self) -> Number:
        """scale_h: a float, or (H, 1) where it is learned."""
        return _wide(self.log_scale).exp()[:, None] if self.learned else self.start

    def growth(self, x: Tensor, n: Tensor) -> Tensor:
        """What multiplies scale_h, broadcastable to (B, H, T); ``n`` ≥ 1 is floating-point."""
        return torch.ones_like(n)

    def forward(self, x: Tensor, n: Tensor | None = None) -> Number:
        """1/h² of each query: a float, or a tensor broadcastable to (B, H, T).

        Args:
            x: (B, T, D), what the queries are made of.
            n: how many keys each query may see, broadcastable to (B, H, T); unused if scale does not grow.

        Raises:
            ValueError: no ``n`` where scale grows.
        """
        scale = self.base()
        if self.needs_length:
            if n is None:
                raise ValueError(
                    f"{type(self).__name__} grows with n, how many keys each query may see: give it"
                )
            # A query that sees nothing has output 0 whatever its scale, which must still be a number.
            n = n.clamp_min(1).to(torch.promote_types(x.dtype, torch.float32))
            growth = self.growth(x, n)
            if not all(self._growing):
                # No buffer: tools for per-sample gradients refuse a trainable module that has one.
                growing = torch.tensor(self._growing, device=growth.device)[:, None]
                growth = torch.where(growing, growth, 1)
            scale = scale * growth
        # Such tools also want a batch of outputs, as of inputs.
        return scale.expand(x.shape[0], *scale.shape[-2:]) if isinstance(scale, Tensor) else scale

    def extra_repr(self) -> str:
        """Where scale_h starts, and how many heads grow."""
        grows = f", growing heads={sum(self._growing)}/{self.heads}" if self.needs_length else ""
        return f"scale={self.start:.4g}{grows}"


class Learned(Bandwidth):
    """scale_h: a bandwidth of its own for each head, whatever n."""

    learned = True


class SSMax(Bandwidth):
    """scale_h · log n, with scale_h learned: s_h = scale_h / (initial scale) is the published factor.

    At n = 1, where the weight is 1 whatever the scale, log 2 stands for log 1 so that scale stays positive.

    Source: *Scalable-Softmax* (arXiv 2501.19399), softmax(s·log n·z).
    """

    learned = True
    needs_length = True

    def growth(self, x: Tensor, n: Tensor) -> Tensor:
        """Log n."""
        return n.clamp_min(2).log()


class ASEntmax(Bandwidth):
    """scale · (1 + β·(log(n + 1))^γ), β = softplus(W_β x) and γ = 2·tanh(W_γ x) for each query and head.

    The published n is t + 2 at position t = 0, 1, …: one more than the keys in sight, which are t + 1. Both
    matrices start at zero: growth is then 1 + log 2. scale is a constant.

    Source: *Long-Context Generalization with Sparse Attention* (arXiv 2506.16640).
    """

    needs_length = True

    def _build(self, width: int, factory: dict[str, Any]) -> None:
        self.beta = nn.Parameter(torch.empty(self.heads, width, **factory))
        self.gamma = nn.Parameter(torch.empty(self.heads, width, **factory))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to growth = 1 + log 2 everywhere."""
        super().reset_parameters()
        self.beta.zero_()
        self.gamma.zero_()

    def growth(self, x: Tensor, n: Tensor) -> Tensor:
        """1 + β·(log(n + 1))^γ: (B, H, T)."""
        beta = F.softplus(_wide(self.beta @ x.mT))
        gamma = 2 * torch.tanh(_wide(self.gamma @ x.mT))
        return 1 + beta * torch.exp(gamma * (n + 1).log().log())


class PowerLaw(Bandwidth):
    """(β₁·n^a + β₀)² for each head, with β₁ > 0, β₀ > 0 and 0 < a < 1 learned.

    Kept as scale_h·(m·n^a + 1 − m)²: √scale_h = β₁ + β₀ is the sharpness 1/h at n = 1, and m in (0, 1) the
    share of it that grows: β₁ = m·√scale_h, β₀ = (1 − m)·√scale_h. Starts at m = ½ and a = 1/(E + 4), the
    rate at which the best bandwidth of a kernel regression in E dimensions shrinks.

    Source: *Memory Mosaics at scale* (arXiv 2507.03285), β = β₁n^α + β₀ and scale = β².
    """

    learned = True
    needs_length = True

    def _build(self, width: int, factory: dict[str, Any]) -> None:
        self.share = nn.Parameter(torch.empty(self.heads, **factory))
        self.power = nn.Parameter(torch.empty(self.heads, **factory))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the initial scale, m = ½ and a = 1/(E + 4)."""
        super().reset_parameters()
        self.share.zero_()
        self.power.fill_(_logit(1 / (self.head_size + 4)))

    def growth(self, x: Tensor, n: Tensor) -> Tensor:
        """(m·n^a + 1 − m)²: (H, T), or (B, H, T)."""
        share, power = (torch.sigmoid(_wide(p))[:, None] for p in (self.share, self.power))
        return (share * torch.exp(power * n.log()) + 1 - share) ** 2


BANDWIDTHS: dict[str, type[Bandwidth]] = {
    "fixed": Bandwidth,
    "learned": Learned,
    "ssmax": SSMax,
    "asentmax": ASEntmax,
    "power_law": PowerLaw,
}


# ---- a kernel whose parameter is learned ---------------------------------------------------------


class LearnedKernel(nn.Module):
    """The kernel ``start`` with its parameter learned in each head, never outside its domain:

        unit mass:      α = 1 + sigmoid(raw)       in [1, 2], from softmax to sparsemax
        within margin:  b = softplus(raw) + ε      > 0, with ε the rounding unit of the dtype

    Args:
        start: a kernel of the entmax family with 1 < α < 2, or one within a margin; where training starts.
        heads: H.
        device, dtype: of the parameter.

    Raises:
        ValueError: a kernel with neither parameter, or α = 2, where the sigmoid has no slope.

    Example:
        >>> from parzen.nn import LearnedKernel
        >>> LearnedKernel("biweight", heads=2).value()  # α of each head
        tensor([1.5000, 1.5000], grad_fn=<AddBackward0>)
    """

    def __init__(
        self, start: str | Kernel, heads: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        heads = kernels.plain(heads)
        _positive("heads", heads)
        self.start = kernels.kernel(start)
        profile, rule = self.start.profile, self.start.rule
        self.raw = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        value: Number
        if isinstance(profile, Power | AlphaPower) and isinstance(rule, UnitMass):
            self.name, value = "alpha", 1 + 1 / profile.r
        elif isinstance(rule, WithinMargin):
            self.name, value = "margin", rule.margin
        else:
            raise ValueError(
                f"{self.start} has nothing to learn: expected an entmax kernel with 1 < α < 2, such as "
                "'entmax?alpha=1.5', or one within a margin, such as 'relumax'"
            )
        if isinstance(value, Tensor):
            raise ValueError(f"{self.name} must start as one number for all heads, got a tensor")
        if self.name == "alpha" and not 1 < value < 2:
            raise ValueError(f"a learned α must start below 2 and above 1, got {self.start}; try 'biweight'")
        self._value = value
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the kernel's own parameter, in every head."""
        value = self._value
        self.raw.fill_(_logit(value - 1) if self.name == "alpha" else _softplus_inverse(value))

    def value(self) -> Tensor:
        """α or the margin of each head, (H,)."""
        raw = _wide(self.raw)
        if self.name == "alpha":
            return 1 + torch.sigmoid(raw)
        return F.softplus(raw) + torch.finfo(raw.dtype).eps

    def forward(self) -> Kernel:
        """The kernel as it is now."""
        if self.name == "alpha":
            return kernels.kernel("entmax", alpha=self.value())
        return replace(self.start, rule=WithinMargin(self.value()))

    def extra_repr(self) -> str:
        """What is learned, and from where."""
        return f"{self.name} of each head, from {spell(self.start)}"


# ---- positions -----------------------------------------------------------------------------------


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """x with each pair of neighbouring coordinates turned by an angle proportional to its position.

    Coordinates (2i, 2i + 1) turn by position·base^(−2i/E′) (the interleaved convention), E′ = E rounded
    down to even; the last coordinate of an odd E stays. Lengths are kept, and the product of a query and a
    key depends on the difference of their positions only.

    Args:
        x: (…, T, E).
        position: (T,), integers.
        base: of the geometric sequence of angles.

    Source: *RoFormer* (arXiv 2104.09864), eq. 34.
    """
    even = x.shape[-1] // 2 * 2
    # In float64: at position 10⁵ a float32 angle is off by half a percent of a radian.
    exponent = torch.arange(0, even, 2, device=x.device, dtype=torch.float64) / max(1, even)
    angle = position[:, None] * base**-exponent
    wide = _wide(x[..., :even])
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., even:]), -1)


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8/H), 2^(−16/H), …, 2^(−8) when H is a power of two.

    Otherwise those of the next smaller power of two P, then every second one of 2P, from the first.

    Source: *Train Short, Test Long* (arXiv 2108.12409) and its published code.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


def nape_slopes(heads: int) -> list[float]:
    """1, 1/2, 1/3, … for the first ⌊H/2⌋ heads, 0 (no positions at all) for the others.

    Source: *Long-Context Generalization with Sparse Attention* (arXiv 2506.16640).
    """
    near = heads // 2
    return [1 / (j + 1) for j in range(near)] + [0.0] * (heads - near)


@dataclass(frozen=True)
class Positions:
    """How positions enter attention.

    Attributes:
        rotary: whether queries and keys are rotated.
        slopes: the ALiBi slope of each head, given their number; None for none.
        grow_sloped: whether a bandwidth schedule acts on the heads that have a slope, too.
    """

    rotary: bool = False
    slopes: Callable[[int], list[float]] | None = None
    grow_sloped: bool = True


POSITIONS: dict[str, Positions] = {
    "none": Positions(),
    "rotary": Positions(rotary=True),
    "alibi": Positions(slopes=alibi_slopes),
    "nape": Positions(slopes=nape_slopes, grow_sloped=False),
}


# ---- the layer -----------------------------------------------------------------------------------

# What arguments of torch.nn.MultiheadAttention are called here.
OF_TORCH = {
    "embed_dim": "width",
    "num_heads": "heads",
    "batch_first": "nothing, since the batch is always first",
}
Init = TypeVar("Init", bound=Callable[..., None])


def _names_of_torch(init: Init) -> Init:
    """``init``, which says what an argument is called here that torch calls otherwise."""

    @functools.wraps(init)
    def checked(self: nn.Module, *args: Any, **given: Any) -> None:
        if there := [name for name in given if name in OF_TORCH]:
            said = ", ".join(f"{name} is called {OF_TORCH[name]}" for name in there)
            raise TypeError(f"{type(self).__name__}(width, heads, …): {said}")
        init(self, *args, **given)

    return cast(Init, checked)


class KernelAttention(nn.Module):
    """Multi-head attention y = W_o [o_1 … o_H], o_h the kernel regression of values on keys in head h.

    The last query stands at the last key: query i of T sees S keys from position i + S − T (which is i in
    self-attention). ``causal``, ``window``, ``positions`` and the number of keys in sight all count from
    there, so ``layer(x[:, -1:], context=x)`` is ``layer(x)[:, -1:]``.

    Args:
        width: D of inputs and outputs.
        heads: H.
        key_heads: Hk, a divisor of H; H/Hk query heads share a key head. Default H.
        head_size: E. Default D/H.
        kernel: a name, such as ``"biweight"`` or ``"relumax?margin=2"``, or a ``Kernel``.
        learn_kernel: learn its α or margin in each head (``LearnedKernel``).
        bandwidth: how scale behaves, a name of ``BANDWIDTHS``: "fixed"; "learned" (scale_h);
            "ssmax" (scale_h·log n); "asentmax" (scale·(1 + β·(log(n + 1))^γ)); "power_law" ((β₁n^a + β₀)²).
            n is the number of keys that the query may see: t + 1 at position t = 0, 1, … if causal.
        scale: 1/h² to start from. Default 1/√E; e² with ``unit_keys``.
        unit_keys: divide each query and key by its length, so that q·k is a cosine.
        positions: a name of ``POSITIONS``: "none", "rotary", "alibi" or "nape".
        causal: see no key ahead.
        window: (left, right), see only keys that near; −1 is no limit.
        dropout: in [0, 1), on the weights, in training mode only.
        bias: whether the four linear maps have one.
        backend: "auto" or a name of ``parzen.backends.BACKENDS``.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: sizes that do not divide, an unknown name (the known ones are listed), or an
            argument outside its domain.

    Example:
        >>> from parzen.nn import KernelAttention
        >>> layer = KernelAttention(64, 4, kernel="biweight", bandwidth="learned", causal=True)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    slopes: Tensor | None
    kernel_parameter: Tensor | None

    @_names_of_torch
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_size: int | None = None,
        kernel: str | Kernel = "gaussian",
        learn_kernel: bool = False,
        bandwidth: str = "fixed",
        scale: float | None = None,
        unit_keys: bool = False,
        positions: str = "none",
        causal: bool = False,
        window: tuple[int, int] | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, heads, key_heads, head_size = map(kernels.plain, (width, heads, key_heads, head_size))
        scale, dropout = kernels.plain(scale), kernels.plain(dropout)
        key_heads = heads if key_heads is None else key_heads
        for name, size in (("width", width), ("heads", heads), ("key_heads", key_heads)):
            _positive(name, size)
        if heads % key_heads:
            raise ValueError(f"key_heads must divide heads, got {key_heads} for {heads} heads")
        if head_size is None:
            if width % heads:
                raise ValueError(f"heads must divide width ({heads} for {width}), or pass head_size")
            head_size = width // heads
        _positive("head_size", head_size)
        kernels.check("dropout", dropout, 0, math.nextafter(1, 0), "in [0, 1)", tensors=False)
        check_flags(learn_kernel=learn_kernel, unit_keys=unit_keys, causal=causal, bias=bias)
        for name, value, table in (
            ("bandwidth", bandwidth, BANDWIDTHS),
            ("positions", positions, POSITIONS),
            ("backend", backend, {"auto": None, **BACKENDS}),
        ):
            if not isinstance(value, str) or value not in table:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(table)}")
        if scale is None:
            scale = math.exp(2) if unit_keys else head_size**-0.5
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        self.width, self.heads, self.key_heads, self.head_size = width, heads, key_heads, head_size
        self.unit_keys, self.positions, self.dropout, self.backend = unit_keys, positions, dropout, backend
        self.causal, self.window = causal, _limits(window, causal)

        self.query = nn.Linear(width, heads * head_size, bias, **factory)
        self.key = nn.Linear(width, key_heads * head_size, bias, **factory)
        self.value = nn.Linear(width, key_heads * head_size, bias, **factory)
        self.output = nn.Linear(heads * head_size, width, bias, **factory)

        self._kernel = kernels.kernel(kernel)
        self.learned_kernel = LearnedKernel(self._kernel, heads, **factory) if learn_kernel else None
        kernels.hold(self, self._kernel)

        scheme = POSITIONS[positions]
        self._slopes = scheme.slopes(heads) if scheme.slopes else None
        slopes = None
        if self._slopes is not None:
            kept = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
            slopes = torch.tensor(self._slopes, device=device, dtype=kept)
        self.register_buffer("slopes", slopes, persistent=False)
        growing = [scheme.grow_sloped or slope == 0 for slope in self._slopes or [0.0] * heads]
        self.bandwidth = BANDWIDTHS[bandwidth](width, growing, head_size, scale, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the linear maps again and set all else to its initial value (after ``to_empty``, say)."""
        if self.slopes is not None and self._slopes is not None:
            self.slopes.copy_(torch.tensor(self._slopes))
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    @property
    def kernel(self) -> Kernel:
        """The kernel in use; with ``learn_kernel``, at the present α or margin of each head."""
        if self.learned_kernel is not None:
            return self.learned_kernel()
        # Not the tensor that came: moving or loading the layer may have put another in its place.
        return self._kernel if self.kernel_parameter is None else self._kernel.at(self.kernel_parameter)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D): what each query recalls.

        Args:
            x: (B, T, D), what the queries are made of.
            context: (B, S, D), what the keys and values are made of; default x (self-attention).
            attn_mask: broadcastable to (B, H, T, S): bool, True = attend, or floating, added to the scores.
            key_padding_mask: (B, S), bool, True = attend. (``torch.nn.MultiheadAttention`` has it the other
                way round.)

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit.
        """
        query, key, options = self._read(x, context, attn_mask, key_padding_mask)
        value = self._split(self.value(x if context is None else context), self.key_heads)
        p = self.dropout if self.training else 0.0
        o = attention(query, key, value, dropout_p=p, backend=self.backend, **options)
        return self.output(o.transpose(1, 2).flatten(2))

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        sparse: bool = False,
    ) -> AttentionWeights:
        """The weights (B, H, T, S) of ``forward`` without dropout, with τ, support and radius of each row.

        Arguments as for ``forward``; ``sparse`` as for ``parzen.attention_weights``.
        """
        query, key, options = self._read(x, context, attn_mask, key_padding_mask)
        return attention_weights(query, key, sparse=sparse, **options)

    def _dtype(self) -> torch.dtype | None:
        """Of the inputs, where the maps are plain; adapters and quantised maps take what they take."""
        plain = isinstance(self.query, nn.Linear) and self.query.weight.is_floating_point()
        return self.query.weight.dtype if plain else None

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, H·E) → (B, H, T, E)."""
        return x.unflatten(-1, (heads, self.head_size)).transpose(1, 2)

    def _read(
        self, x: Tensor, context: Tensor | None, attn_mask: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries, keys, and all other arguments that the weights depend on."""
        context = x if context is None else context
        for name, given in (("x", x), ("context", context)):
            check_tensor(name, given)
            if given.ndim != 3 or given.shape[-1] != self.width or given.shape[0] != x.shape[0]:
                raise ValueError(
                    f"{name} must be (batch, length, {self.width}), the same batch for x and context; "
                    f"got {tuple(given.shape)}"
                )
            device, dtype = given.device.type, self._dtype()
            if dtype is not None and given.dtype != dtype and not autocasts(device):
                raise TypeError(f"{name} must be {dtype} like the weights, got {given.dtype}; convert one")
        check_together(x=x, context=context, attn_mask=attn_mask, key_padding_mask=padding)
        query = self._split(self.query(x), self.heads)
        key = self._split(self.key(context), self.key_heads)
        if self.unit_keys:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        rows, columns = x.shape[1], context.shape[1]
        position = torch.arange(columns - rows, columns, device=x.device)
        if POSITIONS[self.positions].rotary:
            query = rotate(query, position)
            key = rotate(key, torch.arange(columns, device=x.device))
        mask = _merge(attn_mask, padding, (x.shape[0], self.heads, rows, columns))
        n = (self._in_sight(position, columns, mask),) if self.bandwidth.needs_length else ()
        return query, key, {
            "attn_mask": mask,
            "scale": self.bandwidth(x, *n),
            "enable_gqa": self.key_heads != self.heads,
            "kernel": self.kernel,
            "window": self.window,
            "alibi_slopes": self.slopes,
        }  # fmt: skip

    def _in_sight(self, position: Tensor, columns: int, mask: Tensor | None) -> Tensor:
        """How many keys each query may see, broadcastable to (B, H, T)."""
        left, right = self.window or (-1, -1)
        first = (position - left if left >= 0 else 0 * position).clamp(0, columns)
        end = (position + right + 1 if right >= 0 else 0 * position + columns).clamp(0, columns)
        if mask is None:
            return end - first
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        if mask.shape[-2] == 1:
            # The same keys for all queries: differences of running totals, no T×S table.
            total = F.pad(allowed.expand(*allowed.shape[:-1], columns).cumsum(-1), (1, 0)).squeeze(-2)
            return total[..., end] - total[..., first]
        column = torch.arange(columns, device=position.device)
        near = (column >= first[:, None]) & (column < end[:, None])
        return (allowed & near).sum(-1)

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        shown = [f"width={self.width}", f"heads={self.heads}", f"kernel={spell(self._kernel)}"]
        if self.key_heads != self.heads:
            shown.append(f"key_heads={self.key_heads}")
        if self.head_size * self.heads != self.width:
            shown.append(f"head_size={self.head_size}")
        shown += [name for name in ("unit_keys", "causal") if getattr(self, name)]
        if self.window is not None and self.window != (-1, 0):
            shown.append(f"window={self.window}")
        if self.positions != "none":
            shown.append(f"positions={self.positions}")
        if self.dropout:
            shown.append(f"dropout={self.dropout}")
        if self.backend != "auto":
            shown.append(f"backend={self.backend}")
        return ", ".join(shown)


def _positive(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} must be an integer ≥ 1, got {size!r}")


def _limits(window: tuple[int, int] | None, causal: bool) -> tuple[int, int] | None:
    """The window with nothing ahead if causal. (Unlike ``is_causal``, it counts from the last key.)"""
    if window is None:
        return (-1, 0) if causal else None
    left, right = check_window(window)
    return (left, 0) if causal else (left, right)


def _merge(mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """One mask of four dimensions, broadcastable to ``shape``, that says what both say."""
    if mask is not None:
        if not isinstance(mask, Tensor) or is_causal_bias(mask):
            raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}; see causal, window")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool (True = attend) or floating-point, got {mask.dtype}")
        fits(mask, shape, "attn_mask", "(B, H, T, S)")
        mask = mask[(None,) * (4 - mask.ndim)]
    if padding is None:
        return mask
    expected = (shape[0], shape[3])
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.shape != expected:
        got = (
            f"{padding.dtype} {tuple(padding.shape)}"
            if isinstance(padding, Tensor)
            else type(padding).__name__
        )
        raise ValueError(
            f"key_padding_mask must be a tensor, bool (True = attend) of shape (B, S) = {expected}, got {got}"
        )
    padding = padding[:, None, None, :]
    if mask is None:
        return padding
    return mask & padding if mask.dtype == torch.bool else torch.where(padding, mask, -torch.inf)
