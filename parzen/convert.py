"""Moving a trained model from softmax to another kernel: swap it, anneal to it, match its scale.

convert(model, "biweight")                        every attention layer, in place
annealing = anneal(model, "biweight", steps=500)  or step by step, from softmax
match(model, batches, loss)                       a scale for each head, so that entropies stay
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen import kernels
from parzen.attention import AttentionWeights, attention, attention_weights
from parzen.kernels import Exp, Kernel, Power, UnitMass, WithinMargin, spell
from parzen.rewire import Reach, Rewiring

# Under which name a layer keeps its Attention.
CHILD = "parzen"


class Attention(nn.Module):
    """What a converted layer calls in place of ``scaled_dot_product_attention``, with the same arguments.

    Attributes:
        kernel: of all its heads. A tensor in it is a parameter or buffer here, in the state dict too.
        gain: (H,), what ``match`` multiplies scale with; None for 1. It is part of the state dict.
        seen: where calls are noted down, if anywhere.
        called: whether it ever was, outside of ``torch.compile``.
    """

    gain: Tensor | None
    kernel_parameter: Tensor | None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.register_buffer("gain", None)
        self.seen: list[tuple[Tensor, Tensor, dict[str, Any]]] | None = None
        self.called = False
        # The fused softmax layers of torch keep away from modules with hooks.
        self.register_forward_pre_hook(_nothing)

    @property
    def kernel(self) -> Kernel:
        """The kernel in use, at the present value of its parameter."""
        return self._kernel if self.kernel_parameter is None else self._kernel.at(self.kernel_parameter)

    @kernel.setter
    def kernel(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernels.hold(self, kernel)

    def options(self, query: Tensor, scale: float | None = None) -> dict[str, Any]:
        """Kernel and scale, as ``attention`` takes them."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        factor = 1.0 if self.gain is None else self.gain.to(torch.promote_types(query.dtype, torch.float32))
        return {
            "kernel": self.kernel,
            "scale": scale * (factor[:, None] if isinstance(factor, Tensor) else factor),
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The kernel regression, (…, H, T, Ev)."""
        how = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
        if not self.called and not torch.compiler.is_compiling():
            self.called = True
        if self.seen is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            self.seen.append((query.detach(), key.detach(), {**how, "scale": scale}))
        return attention(query, key, value, dropout_p=dropout_p, **how, **self.options(query, scale))

    def extra_repr(self) -> str:
        """The kernel, and whether scales were matched."""
        return spell(self.kernel) + ("" if self.gain is None else ", matched")

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        found = state_dict.get(prefix + "gain")
        if found is not None and self.gain is None:
            self.gain = torch.empty_like(found)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _nothing(module: nn.Module, inputs: Any) -> None:
    pass


class _MultiheadAttention(nn.MultiheadAttention):
    """torch's own layer with the same parameters and arguments; weights are those before dropout."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint on attn_mask in nn.MultiheadAttention: give the mask too")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat((x, b.expand(len(x), 1, -1)), 1) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        hidden = is_causal and key_padding_mask is None and k.shape[1] == key.shape[1]
        allowed = None if hidden else self._allowed(attn_mask, key_padding_mask, len(q), k.shape[1], q.dtype)
        how: dict[str, Any] = {"attn_mask": allowed, "is_causal": hidden}
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        attend: Attention = getattr(self, CHILD)
        output = attend(q, k, v, dropout_p=self.dropout if self.training else 0.0, **how)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        found = attention_weights(q, k, **how, **attend.options(q)).weights if need_weights else None
        if found is not None and average_attn_weights:
            found = found.mean(1)
        if not batched:
            return output[0], None if found is None else found[0]
        return output if self.batch_first else output.transpose(0, 1), found

    def _allowed(
        self, mask: Tensor | None, padding: Tensor | None, batch: int, keys: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Both masks as one, True or 0 where a key is seen; keys added at the end always are."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        if padding is not None:
            padding = padding[:, None, None, :]
        found = [m for m in (mask, padding) if m is not None]
        if not found:
            return None
        found = [F.pad(m, (0, keys - m.shape[-1])) for m in found]
        if all(m.dtype == torch.bool for m in found):
            return ~(found[0] if len(found) == 1 else found[0] | found[1])
        return sum(
            torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m
            for m in found
        )  # type: ignore[return-value]


# ---- layers whose code calls scaled_dot_product_attention ---------------------------------------------


@dataclass
class _Was:
    """What a layer was: its class, and the attributes that were rebuilt."""

    cls: type
    attributes: dict[str, Any]
    rewiring: Rewiring


class _Layer:
    """What such a layer becomes, besides what it is: its class is made for it alone, by ``_rewire``.

    Copied and pickled is a layer of the class that it was, and made anew is the rest.
    """

    _parzen: ClassVar[_Was]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, given, *rest = reduced
        given = tuple(self._parzen.cls if a is type(self) else a for a in given)
        if rest and isinstance(rest[0], dict):
            rest[0] = {**rest[0], **self._parzen.attributes}
        return (_rewired, (make, given, getattr(self, CHILD)), *rest)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._parzen.attributes.update(_swap_attributes(self, self._parzen.rewiring))


def _rewired(make: Callable[..., nn.Module], given: tuple[Any, ...], attend: Attention) -> nn.Module:
    """A layer that is about to get its state back."""
    module = make(*given)
    _rewire(module, attend, Reach(F.scaled_dot_product_attention))
    return module


def _rewire(module: nn.Module, attend: Attention, reach: Reach) -> None:
    """Gives the layer a class in which ``attend`` is called in place of torch's function.

    Raises:
        ValueError: code that cannot be rebuilt.
    """
    cls: Any = type(module)
    rewiring = Rewiring(reach, attend, {nn.MultiheadAttention: _MultiheadAttention})
    try:
        base: Any = rewiring.layer(cls)
        before = _swap_attributes(module, rewiring)
    except BaseException:
        rewiring.undo()
        raise

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        # Neither noted down nor looked at in a graph: what changes an attribute cannot be checkpointed there.
        if not getattr(self, CHILD).called and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{cls.__name__} was converted, and its forward ended without "
                "scaled_dot_product_attention: switch it on in the layer's options (such as sdpa or flash), "
                "or use parzen.weights in place of its softmax"
            )
        return output

    names = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
        "forward": forward, "_parzen": _Was(cls, before, rewiring),
    }  # fmt: skip
    module.__class__ = type(cls)(cls.__name__, (_Layer, base), names)
    rewiring.forget()
    weakref.finalize(module, rewiring.undo).atexit = False


def _swap_attributes(module: Any, rewiring: Rewiring) -> dict[str, Any]:
    """Rebuilds what the layer keeps among its attributes, such as a processor; what they were."""
    before = {name: value for name, value in vars(module).items() if rewiring.reached(value)}
    for name, value in before.items():
        vars(module)[name] = rewiring(value)
    return before


# ---- converting ----------------------------------------------------------------------------------


def convert(model: nn.Module, kernel: str | Kernel) -> tuple[str, ...]:
    """Gives every attention layer of ``model`` another kernel, in place; weights and state dict stay.

    Layers are ``nn.MultiheadAttention`` (also inside ``nn.Transformer…``), modules whose code reaches
    ``F.scaled_dot_product_attention`` (by any name, through functions, objects and decorators of any module),
    and those of models of transformers, for which call ``parzen.integrations.transformers.register()`` first.
    Doing it again changes the kernel; ``restore`` takes it back.

    A layer stays an instance of its class, and is copied, pickled, compiled and checkpointed as before. A
    tensor in the kernel becomes a parameter or buffer of each layer.

    Args:
        model: any module.
        kernel: a name, or a ``Kernel``.

    Returns:
        The names of the layers, as in ``model.named_modules()``.

    Raises:
        ValueError: no such layer, a kernel that is none, code that cannot be rebuilt, or a model of
            transformers with a layer that cannot be converted; the model is then what it was. A layer whose
            first ``forward`` ends without its attention raises a RuntimeError there.

    Example:
        >>> from parzen.nn import convert
        >>> convert(torch.nn.TransformerEncoderLayer(16, 2), "biweight")
        ('self_attn',)
    """
    chosen = kernels.kernel(kernel)
    reach = Reach(F.scaled_dot_product_attention)
    found = [(name, module) for name, module in model.named_modules() if _is_layer(module, reach)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer to convert: no nn.MultiheadAttention, and no module whose "
            "code reaches scaled_dot_product_attention; see parzen.weights for a softmax written by hand"
        )
    new = [module for _, module in found if not isinstance(getattr(module, CHILD, None), Attention)]
    try:
        for module in new:
            module.add_module(CHILD, Attention(chosen))
            _change(module, reach)
        for encoder in _encoders(model):
            # Nested tensors are for the fused softmax layers only.
            vars(encoder).setdefault("nested_before", encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
        _tell_transformers(model)
    except BaseException:
        for module in new:
            _restore(module)
        _restore_encoders(model)
        if len(new) == len(found):
            _forget_transformers(model)
        raise
    for _, module in found:
        getattr(module, CHILD).kernel = chosen
    return tuple(name for name, _ in found)


def restore(model: nn.Module) -> tuple[str, ...]:
    """Takes ``convert`` back: every converted layer is what it was, and its names are returned.

    Kernels and gains are lost. A model of transformers has the attention implementation that it had.

    Raises:
        ValueError: the model was not converted.

    Example:
        >>> from parzen.nn import convert, restore
        >>> model = torch.nn.TransformerEncoderLayer(16, 2)
        >>> convert(model, "biweight") == restore(model)
        True
    """
    names = tuple(layers(model))
    for name in names:
        _restore(model.get_submodule(name))
    _restore_encoders(model)
    _forget_transformers(model)
    return names


def _encoders(model: nn.Module) -> Iterator[nn.TransformerEncoder]:
    return (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))


def _restore_encoders(model: nn.Module) -> None:
    for encoder in _encoders(model):
        encoder.use_nested_tensor = vars(encoder).pop("nested_before", encoder.use_nested_tensor)


def _change(module: nn.Module, reach: Reach) -> None:
    """Has the layer call its Attention, if it does not by itself."""
    if isinstance(module, _MultiheadAttention) or _uses_the_interface(type(module)):
        return
    if type(module) is nn.MultiheadAttention:
        module.__class__ = _MultiheadAttention
    else:
        _rewire(module, getattr(module, CHILD), reach)


def _restore(module: nn.Module) -> None:
    if isinstance(module, _Layer):
        was = module._parzen
        vars(module).update(was.attributes)
        was.rewiring.undo()
        module.__class__ = was.cls
    elif isinstance(module, _MultiheadAttention):
        module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
    module._modules.pop(CHILD, None)


def _is_layer(module: nn.Module, reach: Reach) -> bool:
    if isinstance(module, Attention):
        return False
    if isinstance(module, nn.MultiheadAttention | _Layer):
        return True
    cls = type(module)
    if _uses_the_interface(cls):
        # The models as a whole mention it too.
        return not hasattr(cls, "set_attn_implementation")
    return reach.layer(cls) or any(map(reach, vars(module).values()))


def _uses_the_interface(cls: type) -> bool:
    return any(mentions(c, "ALL_ATTENTION_FUNCTIONS") for c in cls.__mro__)


# The name of transformers' attention implementation that leaves the kernel to each layer.
CONVERTED = "parzen:converted"


def _tell_transformers(model: nn.Module) -> None:
    """Has a model of transformers call parzen at all; each layer knows which kernel."""
    for module in model.modules():
        tell = getattr(module, "set_attn_implementation", None)
        if tell is None:
            continue
        if "parzen.integrations.transformers" not in sys.modules:
            raise ValueError(
                "transformers does not know parzen: call parzen.integrations.transformers.register() first"
            )
        vars(module).setdefault("attention_before", [(c, c._attn_implementation) for c in configs_of(module)])
        try:
            if any(_uses_the_interface(type(m)) for m in module.modules()):
                tell(CONVERTED)
            elif configs_of(module)[0]._attn_implementation == "eager" and getattr(
                module, "_supports_sdpa", False
            ):
                # Its layers have a branch for each, and torch's function is in this one.
                tell("sdpa")
        except ValueError as error:
            if "is not supported" not in str(error):
                # The integration refuses it: a layer that is no part of what was converted.
                raise
            raise ValueError(
                "transformers does not know parzen: call parzen.integrations.transformers.register() first"
            ) from error
        return


def _forget_transformers(model: nn.Module) -> None:
    """Gives models of transformers the implementations back that they had."""
    for module in model.modules():
        for config, name in vars(module).pop("attention_before", ()):
            config._attn_implementation_internal = name


def configs_of(model: Any) -> list[Any]:
    """Of a model of transformers, and of its parts."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "set_attn_implementation")}
    todo = list(found.values())
    for config in todo:
        parts = [getattr(config, name, None) for name in config.sub_configs]
        new = [c for c in parts if c is not None and id(c) not in found]
        found |= {id(c): c for c in new}
        todo += new
    return todo


def mentions(cls: type, name: str) -> bool:
    """Whether a method of the class itself, its bases aside, uses this name."""
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in vars(cls).values() if callable(f))
    return any(name in code.co_names for code in codes if code is not None)


def layers(model: nn.Module) -> dict[str, Attention]:
    """The ``Attention`` of each converted layer, by its name.

    Raises:
        ValueError: the model was not converted.
    """
    found = {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted layer; call parzen.nn.convert first")
    return found


# ---- annealing -----------------------------------------------------------------------------------


class anneal:
    """Takes the kernel of a model from softmax to ``kernel``, in so many steps of training.

        r(u) = r/u,  b(u) = b/u,  u = t/steps from 0 to 1

    Under unit mass that is α = 1 + (α_end − 1)·u; within a margin b, [1 + u·(s − m)/b]^{r/u}. Both are
    softmax at u = 0, with scale r/b times as large within a margin: 1 for ``relumax``.

    Args:
        model: converted here if it was not.
        kernel: where to end: of the entmax family, or a power within a margin.
        steps: ≥ 1, how many calls of ``step`` lead there.

    Attributes:
        kernel: the one that the model has now.

    Raises:
        ValueError: a kernel that no such path leads to.

    Example:
        >>> from parzen.nn import anneal
        >>> model = torch.nn.TransformerEncoderLayer(16, 2)
        >>> annealing = anneal(model, "biweight", 10)
        >>> annealing
        anneal(gaussian → biweight, step 0 of 10, now gaussian)
        >>> annealing.step()  # after each optimiser step
        >>> print(annealing.kernel)  # α = 1 + 0.5·u, u = 1/10
        power?r=20
    """

    def __init__(self, model: nn.Module, kernel: str | Kernel, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an integer of 1 or more, got {steps!r}")
        self.model, self.end, self.steps, self.done = model, kernels.kernel(kernel), steps, 0
        if isinstance(self.end.profile, Exp) or not isinstance(self.end.rule, UnitMass | WithinMargin):
            raise ValueError(
                f"no path leads from softmax to {spell(self.end)}: expected a power under unit mass or "
                "within a margin, such as 'biweight' or 'relumax'; convert to it at once"
            )
        if isinstance(self.end.profile, Power) and not self.end.profile.r:
            raise ValueError("a power of 0 has no path from softmax: convert to it at once")
        convert(model, self.at(0.0))

    def at(self, u: float) -> Kernel:
        """The kernel at ``u`` in [0, 1]."""
        if u <= 0:
            return kernels.kernel("gaussian")
        if u >= 1:
            return self.end
        assert not isinstance(self.end.profile, Exp)
        profile = Power(self.end.profile.r / u)
        if isinstance(self.end.rule, WithinMargin):
            return replace(self.end, profile=profile, rule=WithinMargin(self.end.rule.margin / u))
        return replace(self.end, profile=profile)

    @property
    def kernel(self) -> Kernel:
        """The kernel of now."""
        return self.end if self.done == self.steps else self.at(self.done / self.steps)

    def step(self) -> None:
        """One step on. After the last nothing is touched any more: not the count, nor the model."""
        if self.done < self.steps:
            self._go(self.done + 1)

    def _go(self, done: int) -> None:
        self.done = done
        for attend in layers(self.model).values():
            attend.kernel = self.kernel

    def state_dict(self) -> dict[str, Any]:
        """How far it is, of how many steps, and to which kernel."""
        return {"done": self.done, "steps": self.steps, "kernel": spell(self.end)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ValueError: that was on the way to another kernel, or in another number of steps.
        """
        for name, own in self.state_dict().items():
            if name != "done" and state.get(name, own) != own:
                raise ValueError(
                    f"the state has {name} {state[name]!r}, this anneal {own!r}: make it with the same"
                )
        self._go(min(self.steps, int(state["done"])))

    def __repr__(self) -> str:
        at = f"step {self.done} of {self.steps}, now {spell(self.kernel)}"
        return f"anneal(gaussian → {spell(self.end)}, {at})"


# ---- matching ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matching:
    """What ``match`` did.

    Attributes:
        loss_softmax, loss_before, loss_after: with the Gaussian, and with the kernel before and after.
        wanted, before, after: the statistic of each head, (H,) by layer.
        gain: what each head's scale is multiplied by, (H,) by layer.
    """

    loss_softmax: float
    loss_before: float
    loss_after: float
    wanted: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gain: dict[str, Tensor]


def entropy(found: AttentionWeights) -> Tensor:
    """−Σ w log w of each row, (…, H, T), in nats."""
    return torch.special.entr(found.weights).sum(-1)


def support(found: AttentionWeights) -> Tensor:
    """How many keys of each row have weight, (…, H, T)."""
    return found.support.to(found.weights.dtype)


STATISTICS: dict[str, Callable[[AttentionWeights], Tensor]] = {"entropy": entropy, "support": support}
# Gains are looked for within these, by halving the interval of their logarithm so often.
LEAST, MOST, HALVINGS = 2.0**-8, 2.0**8, 24


@torch.no_grad()
def match(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    *,
    statistic: str = "entropy",
    target: float | None = None,
) -> Matching:
    """Multiplies the scale of each head so that the mean of a statistic over its rows equals a target.

    Queries and keys are those that the model has with softmax, layer by layer; they are kept in memory, so
    give a few batches. A larger scale never raises entropy or support.

    Args:
        model: converted, with the kernel it shall have.
        batches: calibration text, gone through three times.
        loss: of one of the batches; it calls the model.
        statistic: "entropy", in nats, or "support", in keys.
        target: of every head. Default, for entropy: what the head has with softmax.

    Returns:
        What was reached, and the mean loss before and after. Gains stay within 2⁻⁸ … 2⁸.

    Raises:
        ValueError: a model that was not converted; no batch; no target where softmax has none.

    Example:
        >>> from parzen.nn import convert, match
        >>> model = torch.nn.TransformerEncoderLayer(16, 2).eval()
        >>> _ = convert(model, "biweight")
        >>> found = match(model, [torch.randn(10, 1, 16)], lambda x: model(x).pow(2).mean())
        >>> found.gain["self_attn"].shape  # what the scale of each head is multiplied by
        torch.Size([2])
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if target is None and statistic != "entropy":
        raise ValueError("softmax gives every key weight: a target for the support is needed")
    attends, batches = layers(model), list(batches)
    if not batches:
        raise ValueError("match needs at least one batch to calibrate on")
    for attend in attends.values():
        attend.gain = None

    def mean_loss() -> float:
        return sum(float(loss(batch)) for batch in batches) / len(batches)

    before = mean_loss()
    with _softmax(attends.values()):
        softmax = mean_loss()
        seen = {name: attend.seen or [] for name, attend in attends.items()}
    wanted, found, reached, gains = ({} for _ in range(4))
    for name, attend in attends.items():
        if not seen[name]:
            raise ValueError(f"the loss did not call layer {name}")

        def mean(gain: Tensor | None, kernel: Kernel, calls: Any = seen[name]) -> Tensor:
            return _mean(calls, kernel, gain, STATISTICS[statistic])

        own = mean(None, attend.kernel)
        wanted[name] = (
            mean(None, kernels.kernel("gaussian")) if target is None else torch.full_like(own, target)
        )
        low, high = torch.full_like(own, LEAST).log(), torch.full_like(own, MOST).log()
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            above = mean(middle.exp(), attend.kernel) > wanted[name]
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        found[name], gains[name] = own, ((low + high) / 2).exp()
        reached[name] = mean(gains[name], attend.kernel)
        attend.gain = gains[name]
    return Matching(softmax, before, mean_loss(), wanted, found, reached, gains)


@contextmanager
def _softmax(attends: Iterable[Attention]) -> Iterator[None]:
    """For a while the Gaussian, and calls are noted down."""
    attends = list(attends)
    kept = [attend.kernel for attend in attends]
    try:
        for attend in attends:
            attend.kernel, attend.seen = kernels.kernel("gaussian"), []
        yield
    finally:
        for attend, kernel in zip(attends, kept, strict=True):
            attend.kernel, attend.seen = kernel, None


def _mean(
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]],
    kernel: Kernel,
    gain: Tensor | None,
    statistic: Callable[[AttentionWeights], Tensor],
) -> Tensor:
    """The mean over all rows that see a key, (H,), float32."""
    total = count = torch.zeros(())
    for query, key, how in calls:
        query, key = query.float(), key.float()
        scale = how["scale"] if gain is None else how["scale"] * gain[:, None]
        weights = attention_weights(query, key, **{**how, "scale": scale}, kernel=kernel)
        rows = weights.support > 0
        others = [n for n in range(rows.ndim) if n != rows.ndim - 2]
        total = total + torch.where(rows, statistic(weights), 0).sum(others)
        count = count + rows.sum(others)
    return total / count.clamp_min(1)
