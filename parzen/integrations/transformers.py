"""Hugging Face transformers: every kernel as an ``attn_implementation``, and the mosaic as a model of theirs.

    from parzen.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="parzen:biweight")

The import itself makes ``ParzenMosaicConfig`` and ``MosaicForCausalLM`` known to the Auto classes; kernels
are known once ``register`` was called.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.output_capturing import _active_collector

from parzen.attention import attention, attention_weights
from parzen.convert import CHILD, CONVERTED, Attention, configs_of, convert, mentions
from parzen.kernels import KERNELS, Kernel, kernel, spell
from parzen.memory import KeyValueMemory
from parzen.models.mosaic import BlockState, Mosaic, MosaicConfig

PREFIX = "parzen:"
Attend = Callable[..., tuple[Tensor, Tensor | None]]

# ---- kernels as attention implementations --------------------------------------------------------


def register(*names: str) -> tuple[str, ...]:
    """Makes kernels known to transformers, and returns the names to give as ``attn_implementation``.

    Every process does this before it makes or loads a model that uses them; doing it again changes nothing.

    Args:
        *names: as ``parzen.kernel`` spells them, with or without ``parzen:`` in front, such as
            ``"knn_gaussian?k=32"``. Default: every row of ``parzen.KERNELS`` and its aliases.

    From then on a model is refused that would not be what its name says: see ``check``.

    Raises:
        ValueError, TypeError: as ``parzen.kernel``.
    """
    texts = names or tuple(name for key, row in KERNELS.items() for name in (key, *row.aliases))
    chosen = {PREFIX + text.removeprefix(PREFIX): kernel(text.removeprefix(PREFIX)) for text in texts}
    for name, k in {**chosen, CONVERTED: None}.items():
        AttentionInterface.register(name, attention_function(k))
        # Without a mask function of the same name transformers makes no mask: padding would be attended to.
        AttentionMaskInterface.register(name, boolean_mask)
    return tuple(chosen)


# ---- masks ---------------------------------------------------------------------------------------

# By the class of a config: what the layers with such a config have as ``is_causal``.
_causal: dict[type, set[bool | None]] = {}


def boolean_mask(
    *,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' ``sdpa_mask``, leaving a mask out only where every layer is known to fill it in alike.

    None stands for a causal mask and for none at all, and the layer tells by its ``is_causal``. Some have no
    such attribute, or the other one, and then transformers' own SDPA and eager attention differ.
    """
    left_out = _left_out(config)
    return sdpa_mask(
        config=config,
        allow_is_causal_skip=allow_is_causal_skip and True in left_out,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and False in left_out,
        **kwargs,
    )


def _left_out(config: Any) -> set[bool | None]:
    """Which masks are left out for layers with this config: causal ones (True), those that hide nothing."""
    kinds = _causal.get(type(config), {None})
    # An encoder and a decoder with one config have told both apart.
    both = None not in kinds and getattr(config, "is_encoder_decoder", False)
    return kinds - {None} if both or len(kinds) == 1 else set()


# ---- models that a kernel does not reach ---------------------------------------------------------

# What a layer that attends by itself has in its code.
OWN = (
    "softmax",
    "Softmax",
    "logsumexp",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)


def check(model: PreTrainedModel) -> None:
    """Returns if every attention layer with ``parzen:…`` in its config calls the attention interface.

    A layer with attention code of its own would go on with softmax, and add to its scores the boolean mask
    that is made for us: neither causal nor padded any longer, without a word. Looked at is the code of each
    layer's class, by name, once, when a model is made or its attention is set; and what each layer does when
    it is called for the first time, see ``Watch``. Later calls cost nothing.

    Raises:
        ValueError: one does not; the message has its name, its class, and what to do.
    """
    configs: dict[str, Any] = {}
    reached, asked = False, ""
    for name, module in model.named_modules():
        # A layer without a config has that of what it is part of; parents come first.
        config = getattr(module, "config", None) or configs.get(name.rpartition(".")[0])
        configs[name] = config
        chosen = getattr(config, "_attn_implementation", None) or ""
        if not chosen.startswith(PREFIX):
            continue
        asked = chosen
        if _attends_by_itself(module):
            raise _cannot(type(model).__name__, chosen, name, module, OWN_CODE)
        if type(module).__name__ in READ_MASKS:
            raise _cannot(type(model).__name__, chosen, name, module, "reads the numbers of eager's mask")
        calls, converted = _calls_the_interface(module), _converted(module)
        if calls:
            _causal.setdefault(type(config), set()).add(getattr(module, "is_causal", None))
        if calls or (_is_named_attention(type(module)) and not converted):  # type: ignore[arg-type]
            Watch(type(model).__name__, name, config).put_on(module)
        reached = reached or calls or converted
    if asked and not reached and not _is_being_made_within_another(model):
        raise ValueError(
            f"{type(model).__name__} cannot have {asked}: it has no layer with an attention that the kernel "
            "could replace; leave attn_implementation out"
        )


# Of what is no attention.
READ_MASKS = ("NllbMoeSparseMLP",)
OWN_CODE = "has attention code of its own, which the kernel does not reach"


def _cannot(model: str, chosen: str, name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"{model} cannot have {chosen}: its layer {name} ({type(module).__name__}) {why}; load the model "
        'with attn_implementation="eager"'
    )


def _is_being_made_within_another(model: PreTrainedModel) -> bool:
    makers = (f.f_locals.get("self") for f in _frames() if f.f_code.co_name == "__init__")
    return any(isinstance(maker, PreTrainedModel) and maker is not model for maker in makers)


def _converted(module: nn.Module) -> bool:
    return isinstance(getattr(module, CHILD, None), Attention)


def _attends_by_itself(module: nn.Module) -> bool:
    """Whether it is an attention layer that neither calls the interface nor was converted."""
    if _converted(module) or isinstance(module, PreTrainedModel):
        return False
    return _own(type(module))  # type: ignore[arg-type]


def _calls_the_interface(module: nn.Module) -> bool:
    return not isinstance(module, PreTrainedModel) and _mentions(type(module), "ALL_ATTENTION_FUNCTIONS")  # type: ignore[arg-type]


@functools.cache
def _is_named_attention(cls: type) -> bool:
    # They weigh places of an image, or features, or are a model's last step, and take no mask of ours.
    if any(part in cls.__name__ for part in ("Deformable", "GatedAttention", "AttentionMap", "AttnBlock")):
        return False
    if issubclass(cls, nn.MultiheadAttention | PreTrainedModel) or cls.__name__.endswith("PoolingHead"):
        return False
    return any(part in cls.__name__ for part in ("Attention", "Attn"))


@functools.cache
def _mentions(cls: type, *names: str) -> bool:
    return any(mentions(c, name) for c in cls.__mro__ if c is not nn.Module for name in names)


@functools.cache
def _own(cls: type) -> bool:
    named = _is_named_attention(cls)
    return named and not _mentions(cls, "ALL_ATTENTION_FUNCTIONS") and _mentions(cls, *OWN)


class _Running(threading.local):
    """The watches of the layers that this thread is within, innermost last."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []


_running = _Running()


OURS = {attention.__code__, attention_weights.__code__}


class Seen(TorchFunctionMode):
    """What happens within a layer, whose call is ``frame``.

    Attributes:
        kernel: whether ours was called.
        own: whether softmax was, by others.
    """

    def __init__(self, frame: Any) -> None:
        super().__init__()
        self.frame, self.kernel, self.own = frame, False, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in OWN and not any(f.f_code in OURS for f in _frames()):
            self.own = True
        return function(*args, **(kwargs or {}))


def _frames() -> Iterator[Any]:
    """Those of the calls under way, innermost first."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        yield frame


class Watch:
    """Looks on while a layer with ``parzen:…`` is called for the first time, and is then taken off.

    Raises:
        ValueError: the layer attended without the kernel, or calls the interface in its code and did not.
    """

    def __init__(self, model: str, name: str, config: Any) -> None:
        self.model, self.name, self.config = model, name, config

    def put_on(self, module: nn.Module) -> None:
        """Watches the next call of ``module``, in place of another watch."""
        self.take_off(module)
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    @staticmethod
    def take_off(module: nn.Module) -> None:
        """No longer, if at all."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), Watch):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)

    def before(self, module: nn.Module, args: Any) -> None:
        """What the layer does from now on is seen."""
        if torch.compiler.is_compiling():
            return
        # What was interrupted from outside is still there.
        frames = list(_frames())
        while _running.seen and _running.seen[-1].frame not in frames:
            _running.seen.pop().__exit__(None, None, None)
        _running.seen.append(Seen(sys._getframe(1)))
        _running.seen[-1].__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Judges what it did, unless it ended by an exception."""
        if torch.compiler.is_compiling() or not _running.seen:
            return
        seen = _running.seen.pop()
        seen.__exit__(None, None, None)
        if output is None:
            return
        self.take_off(module)
        chosen = self.config._attn_implementation or ""
        if seen.kernel or not chosen.startswith(PREFIX):
            return
        if seen.own:
            raise _cannot(self.model, chosen, self.name, module, OWN_CODE)
        if _calls_the_interface(module):
            raise _cannot(self.model, chosen, self.name, module, "ended without the attention of its config")


def _refuse_tables(model: PreTrainedModel, chosen: str) -> None:
    """Some families look the class of a layer up under the implementation's name, and would find none.

    Raises:
        ValueError: the model is of such a family.
    """
    subs = (getattr(model.config, name, None) for name in model.config.sub_configs)
    if not all((sub._attn_implementation or "").startswith(PREFIX) for sub in subs if sub is not None):
        # Told apart part by part: some of them may well have another.
        return
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and chosen not in table:
            raise ValueError(
                f"{type(model).__name__} cannot have {chosen}: it has attention code of its own for each of "
                f"{', '.join(table)} ({name}); load the model with one of them"
            )


def _watch() -> None:
    """Has transformers call ``check`` wherever it makes a model or sets its attention, and keep kernels."""
    correct, made, told, saved = (
        PreTrainedModel.get_correct_attn_implementation,
        PreTrainedModel.post_init,
        PreTrainedModel.set_attn_implementation,
        PreTrainedModel.save_pretrained,
    )

    @functools.wraps(correct)
    def get_correct_attn_implementation(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested is None and isinstance(kept := getattr(self.config, KEPT, None), str):
            requested = register(kept)[0]
        elif isinstance(requested, str) and requested.startswith(PREFIX) and requested != CONVERTED:
            # A name with a slip is said to be one, in place of the list of everything that is registered.
            register(requested)
        found = correct(self, requested, *args, **kwargs)
        if found.startswith(PREFIX):
            _refuse_tables(self, found)
        return found

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        made(self)
        if not _is_being_made_within_another(self):
            take_up(self)
        check(self)

    @functools.wraps(told)
    def set_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> None:
        configs = {id(m.config): m.config for m in self.modules() if isinstance(m, PreTrainedModel)}
        for config in list(configs.values()):
            configs |= {id(c): c for c in (getattr(config, n, None) for n in config.sub_configs) if c}
        before = [(config, config._attn_implementation) for config in configs.values()]
        try:
            told(self, *args, **kwargs)
            _taken(self, *args)
            check(self)
        except ValueError:
            # Refused means that it stays what it was.
            for config, name in before:
                config._attn_implementation_internal = name
            raise

    @functools.wraps(saved)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        with _kept(self):
            if any(isinstance(m, Attention) and m.kernel_parameter is not None for m in self.modules()):
                # One parameter of all layers, which the file has for each.
                state = kwargs.get("state_dict") or self.state_dict()
                own = {k: v.clone() for k, v in state.items() if k.endswith(".kernel_parameter")}
                kwargs["state_dict"] = {**state, **own}
            saved(self, *args, **kwargs)

    for method in (get_correct_attn_implementation, post_init, set_attn_implementation, save_pretrained):
        setattr(PreTrainedModel, method.__name__, method)


def _taken(model: PreTrainedModel, asked: Any = None, *args: Any) -> None:
    """Does what transformers leaves undone where a layer has a config that is no part of the model's.

    Raises:
        ValueError: transformers only logged that the model keeps what it has.
    """
    if not isinstance(asked, str):
        return
    if asked.startswith(PREFIX) and asked != CONVERTED and model.config._attn_implementation != asked:
        raise ValueError(
            f"{type(model).__name__} cannot have {asked}: its attention cannot be changed, since its layers "
            'do not call the attention interface; leave it at "eager"'
        )
    known = {id(config) for config in configs_of(model)}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if id(config) not in known and _calls_the_interface(module) and hasattr(config, "sub_configs"):
            config._attn_implementation_internal = model.config._attn_implementation


# ---- kernels in a saved config -------------------------------------------------------------------

# The field: "parzen:…" as ``attn_implementation``, or of a converted model {"kernels": {layer: kernel},
# "gains": {layer: heads}}, layers being named as in the base model. Gains themselves are in the state dict.
KEPT = "parzen"


def _within_base(model: PreTrainedModel, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.")


@contextmanager
def _kept(model: PreTrainedModel) -> Iterator[None]:
    """For a while the kernels are in the configs."""
    configs = configs_of(model)
    for config in configs:
        vars(config).pop(KEPT, None)
        name = config._attn_implementation or ""
        if name.startswith(PREFIX) and name != CONVERTED:
            setattr(config, KEPT, name)
    found = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    found = {name.rpartition(".")[0]: m for name, m in found.items()}
    for name, attend in found.items():
        if attend.kernel_parameter is not None:
            warnings.warn(
                f"the kernel of {name} is learned, and its parameter is saved, but the loaded model has "
                "softmax there: call parzen.nn.convert on a new model, and load the state dict",
                stacklevel=4,
            )
    whole = {_within_base(model, n): m for n, m in found.items() if m.kernel_parameter is None}
    if whole:
        kernels = {name: spell(attend.kernel) for name, attend in whole.items()}
        gains = {name: len(attend.gain) for name, attend in whole.items() if attend.gain is not None}
        setattr(model.config, KEPT, {"kernels": kernels, "gains": gains})
    try:
        yield
    finally:
        for config in configs:
            vars(config).pop(KEPT, None)


def take_up(model: PreTrainedModel) -> None:
    """Converts a model that is being made as its config says, whose weights are about to be loaded.

    Raises:
        ValueError: the config names layers that the model has not.
    """
    kept = getattr(model.config, KEPT, None)
    for config in configs_of(model):
        vars(config).pop(KEPT, None)
    if not isinstance(kept, dict):
        return
    register("gaussian")
    names = {_within_base(model, name): name for name in convert(model, "gaussian")}
    if missing := kept["kernels"].keys() - names:
        raise ValueError(
            f"the saved config has kernels for layers that {type(model).__name__} has not: "
            f"{', '.join(sorted(missing))}"
        )
    for name, spelled in kept["kernels"].items():
        getattr(model.get_submodule(names[name]), CHILD).kernel = kernel(spelled)
    for name, heads in kept["gains"].items():
        getattr(model.get_submodule(names[name]), CHILD).gain = torch.ones(heads)


# What a kernel regression has no place for, and what it would be.
REFUSED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias on the scores",
    "indices": "a selection of keys",
    "block_indices": "a selection of blocks of keys",
    "head_mask": "a mask of heads",
    "block_table": "a paged cache",
}


def attention_function(k: Kernel | None) -> Attend:
    """What transformers calls in place of its own attention, with the kernel ``k``.

        (module, query (B, H, T, E), key (B, Hk, S, E), value (B, Hk, S, Ev), attention_mask, *, scaling,
        dropout, is_causal) → (output (B, T, H, Ev), weights (B, H, T, S) or None)

    ``attention_mask`` broadcasts to (B, H, T, S), as in ``parzen.attention``. Where transformers left it out,
    a causal module's queries, if there is more than one, see the keys j ≤ i (upper-left alignment: the cache
    was empty, and its unused end is not seen); a single query sees every key. ``scaling`` is 1/h², default
    1/√E. The weights are those before dropout, and come only if they were asked for.
    Keys in a ``MemoryCache`` are read where they are.
    In a model that ``parzen.nn.convert`` went through, each layer has the kernel and scale that it was given;
    with None for ``k`` there is no other.

    Raises:
        ValueError: an argument of ``REFUSED`` is not None, or there is no kernel.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():
            for seen in _running.seen:
                seen.kernel = True
        for name, what in REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} passes {name} ({what}), and {PREFIX}{k or 'converted'} cannot "
                    "honour that: unset it in the config if it is an option, or load the model with "
                    'attn_implementation="eager"'
                )
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        causal = bool(causal) and attention_mask is None and query.shape[2] > 1
        if causal and hasattr(module, "config"):
            # Or else no mask means that nothing is hidden, as in eager attention.
            causal = True in _left_out(module.config)
        how: dict[str, Any] = {"attn_mask": attention_mask, "is_causal": causal}
        options: dict[str, Any] = {"kernel": k, "scale": scaling}
        converted = getattr(module, CHILD, None)
        if k is None and not isinstance(converted, Attention):
            raise ValueError(f"{type(module).__name__} has no kernel: call parzen.nn.convert on the model")
        if isinstance(converted, Attention):
            options = converted.options(query, scaling)
        if isinstance(key, Remembered):
            if dropout:
                raise ValueError("a MemoryCache is for inference, without dropout: call model.eval()")
            key.memory.kernel = options["kernel"]
            output = key.memory.attend(query, **how, scale=options["scale"])
        elif isinstance(converted, Attention):
            output = converted(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, **how)
        else:
            output = attention(query, key, value, dropout_p=dropout, enable_gqa=True, **how, **options)
        weights = None
        if _wanted(kwargs):
            key = key.memory.keys if isinstance(key, Remembered) else key
            weights = attention_weights(query, key, enable_gqa=True, **how, **options).weights
        return output.transpose(1, 2).contiguous(), weights

    return attend


def _wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model said ``output_attentions=True``."""
    if kwargs.get("output_attentions"):
        return True
    # Some models keep the flag to themselves, and collect what their layers return.
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        # A part of a model, compiled alone: a context variable cannot be read in a graph.
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


# ---- a cache that is read in part ----------------------------------------------------------------


class Remembered(Tensor):
    """Stands for the keys or values (B, Hk, n, E) of a ``KeyValueMemory``: their shape, and no numbers."""

    memory: KeyValueMemory

    @classmethod
    def of(cls, memory: KeyValueMemory, new: Tensor) -> Remembered:
        """For all of them, of which ``new`` (B, Hk, T, E) are the last."""
        shape = (*new.shape[:2], len(memory), new.shape[3])
        stand_in: Remembered = torch.Tensor._make_subclass(cls, new.new_empty(()).expand(shape))
        stand_in.memory = memory
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            return super().__torch_function__(function, types, args, kwargs or {})
        raise TypeError(
            f"{getattr(function, '__name__', function)} was called on what a MemoryCache keeps, which "
            f'attn_implementation="{PREFIX}…" alone can read, as it was stored: choose one; '
            "if you have one, the model changes keys or values behind its cache, and needs a DynamicCache"
        )


class MemoryLayer(CacheLayerMixin):
    """The keys and values of one layer, in a ``KeyValueMemory``."""

    is_sliding = False
    is_croppable = True

    memory: KeyValueMemory | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the memory, empty, for pairs like these."""
        heads, (e, ev) = key_states.shape[1], (x.shape[3] for x in (key_states, value_states))
        # Each call brings its kernel.
        self.memory = KeyValueMemory("gaussian", heads, e, ev, dtype=key_states.dtype)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, Hk, T, E) more of each; what stands for all of them, for the attention function."""
        if self.memory is None:
            self.lazy_initialization(key_states, value_states)
        assert self.memory is not None
        self.memory.append(key_states, value_states)
        return Remembered.of(self.memory, key_states), Remembered.of(self.memory, value_states)

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return 0 if self.memory is None else len(self.memory)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys after so many more tokens, and the first one's position."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """−1: none."""
        return -1

    def reset(self) -> None:
        """Nothing stored."""
        self.memory, self.is_initialized = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last −``tokens_to_remove`` tokens.

        Raises:
            ValueError: more than 0, or below −``get_seq_length()``.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove counts down from 0, got {tokens_to_remove}")
        if self.memory is not None:
            self.memory.truncate(len(self.memory) + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row ``beam_idx[i]``."""
        if self.memory is not None:
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes so many."""
        if self.memory is not None:
            self.memory.reorder(torch.arange(len(self.memory.keys)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("a MemoryCache stays where it is: offload a DynamicCache")


class MemoryCache(Cache):
    """A cache for ``generate`` that a compact kernel reads a fraction of (``KeyValueMemory``).

        model.generate(**inputs, cache=MemoryCache(model))        # past_key_values= in older models

    The logits are those of a ``DynamicCache``, up to rounding: also with padding, grouped heads, beams, and
    several new tokens at once. Layers of full attention keep a memory each; others, such as those with a
    sliding window, keep what a ``DynamicCache`` gives them. Faster on a CPU with the engine.

    For inference alone: gradients and dropout are refused, and so is any other attention than ``parzen:…``.

    Args:
        model: a decoder with ``attn_implementation="parzen:…"``.

    Raises:
        ValueError: another attention, or an encoder–decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        name = config._attn_implementation
        if not (name or "").startswith(PREFIX):
            raise ValueError(
                f"a MemoryCache is read by {PREFIX}… alone, and this model has "
                f"attn_implementation={name!r}: call model.set_attn_implementation"
            )
        if config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} has an encoder too: a MemoryCache is for decoders alone"
            )
        layers = DynamicCache(config=config).layers
        super().__init__(layers=[MemoryLayer() if type(x) is DynamicLayer else x for x in layers])


# ---- Memory Mosaics as models of transformers ----------------------------------------------------

# Where transformers has a name for it, that is the name here.
FIELDS = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "slots": "num_slots",
}


class ParzenMosaicConfig(PreTrainedConfig):
    """A ``parzen.models.mosaic.MosaicConfig`` under the names of transformers; the defaults are its own.

    Args:
        vocab_size, num_hidden_layers, num_attention_heads, hidden_size: sizes.
        num_slots: learned pairs per head of each persistent memory.
        kernel, persistent_kernel, dropout, bandwidth, gated_keys: as in ``MosaicConfig``.

    Raises:
        ValueError: as ``MosaicConfig``.
    """

    model_type = "parzen_mosaic"

    vocab_size: int = MosaicConfig.vocab
    num_hidden_layers: int = MosaicConfig.layers
    num_attention_heads: int = MosaicConfig.heads
    hidden_size: int = MosaicConfig.width
    num_slots: int = MosaicConfig.slots
    kernel: str = MosaicConfig.kernel
    persistent_kernel: str = MosaicConfig.persistent_kernel
    dropout: float = MosaicConfig.dropout
    bandwidth: str = MosaicConfig.bandwidth
    gated_keys: bool = MosaicConfig.gated_keys
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.mosaic()

    @classmethod
    def of(cls, config: MosaicConfig, **kwargs: Any) -> ParzenMosaicConfig:
        """The same sizes and choices; ``kwargs`` are other fields, such as ``eos_token_id``."""
        return cls(**{FIELDS.get(name, name): value for name, value in asdict(config).items()}, **kwargs)

    def mosaic(self) -> MosaicConfig:
        """The config of the model inside."""
        names = MosaicConfig.__dataclass_fields__
        return MosaicConfig(**{name: getattr(self, FIELDS.get(name, name)) for name in names})


class MosaicCache(Cache):
    """What a mosaic has read of each sequence, updated in place: a mosaic's state, not keys and values.

    Attributes:
        groups: rows of the batch, (n,) each, that have read equally many tokens, and their state.
        length: tokens handed over so far, masked ones included.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.groups: list[tuple[Tensor, list[BlockState]]] = []
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """``length``."""
        return self.length

    @property
    def batch_size(self) -> int:
        """How many sequences; −1 before the first token."""
        return sum(len(rows) for rows, _ in self.groups) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return bool(self.groups)

    @property
    def is_croppable(self) -> bool:
        """False, since what was read cannot be taken back."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("a mosaic cannot take back what it has read: generate without an assistant")

    def reset(self) -> None:
        """Nothing read."""
        self.groups, self.length = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row ``beam_idx[i]``."""
        groups = []
        for rows, state in self.groups:
            found = beam_idx.to(rows.device)[:, None] == rows
            target = found.any(1).nonzero()[:, 0]
            if len(target):
                groups.append((target, _select(state, found[target].long().argmax(1))))
        self.groups = groups

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes so many."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def split(self, counts: Tensor) -> None:
        """Makes groups that read equally many tokens next, ``counts`` (B,) saying how many."""
        groups = []
        for rows, state in self.groups:
            mine = counts[rows]
            for count in mine.unique():
                part = (mine == count).nonzero()[:, 0]
                whole = len(part) == len(rows)
                groups.append((rows[part], state if whole else _select(state, part)))
        self.groups = groups


def _select(state: list[BlockState], rows: Tensor) -> list[BlockState]:
    return [(stored.select(rows), tuple(k[rows] for k in keys)) for stored, keys in state]


class MosaicForCausalLM(PreTrainedModel, GenerationMixin):
    """A Memory Mosaic that transformers can train, save, load and generate with.

    It reads the tokens that ``attention_mask`` allows, in their order, as if the others were not there: no
    padding on either side changes anything. ``generate`` goes on from a ``MosaicCache``, one step a token.
    """

    config: ParzenMosaicConfig
    config_class = ParzenMosaicConfig
    _no_split_modules = ["MosaicBlock"]  # noqa: RUF012
    # Assisted generation would have to take tokens back.
    _is_stateful = True

    def __init__(self, config: ParzenMosaicConfig) -> None:
        super().__init__(config)
        if (name := config._attn_implementation or "").startswith(PREFIX):
            raise ValueError(
                f"a mosaic has its kernel in its config: leave out attn_implementation={name!r}, and set "
                f"kernel={name.removeprefix(PREFIX)!r}"
            )
        self.mosaic = Mosaic(config.mosaic())
        # Weights are drawn by now, unless this is a shell for a checkpoint.
        self._drawn = not self.mosaic.embedding.weight.is_meta
        self.post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fills what a checkpoint left out, and buffers that are never in one, from a mosaic of its own."""
        if self._drawn:
            return
        fresh = Mosaic(self.config.mosaic())
        theirs = dict(chain(fresh.named_parameters(), fresh.named_buffers()))
        for name, tensor in chain(self.mosaic.named_parameters(), self.mosaic.named_buffers()):
            if not getattr(tensor, "_is_hf_initialized", False):
                tensor.copy_(theirs[name])

    def _init_weights(self, module: nn.Module) -> None:
        """Draws the rows that ``resize_token_embeddings`` adds."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1 / math.sqrt(self.config.hidden_size))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is the head as well."""
        return self.mosaic.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Puts another embedding in its place."""
        self.mosaic.embedding = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: MosaicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, V); at a position that is masked, those after the token read last before it.

        Args:
            input_ids: (B, T).
            attention_mask: (B, at least T), 0 for a token that is not to be read; the last T columns count.
            cache: what was read before, updated in place.
            labels: (B, T), the tokens themselves, −100 where they do not count; shifted here. The loss is the
                mean over them, in nats.
            use_cache: whether to return a cache; default that of the config, but never where gradients are
                recorded.
            logits_to_keep: so many last positions only, or their indices; 0: all.
            return_dict: False gives a tuple.
            **kwargs: of the loss. Positions are not needed.

        Raises:
            ValueError: a mask of another shape; something asked for that a mosaic does not have; a cache
                where gradients are recorded.
        """
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            if kwargs.pop(name, None) not in (None, False):
                raise ValueError(f"a mosaic has no {name} here: leave it out")
        recording = torch.is_grad_enabled()
        if recording and (use_cache or cache is not None):
            raise ValueError("a cache passes no gradients: call within torch.no_grad(), or without a cache")
        use_cache = (self.config.use_cache and not recording) if use_cache is None else use_cache
        mask = None if attention_mask is None else _last(attention_mask, input_ids)
        if cache is not None or use_cache:
            cache = MosaicCache() if cache is None else cache
            x = self._read_on(input_ids, mask, cache)
        else:
            x = self._read(input_ids, mask)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.mosaic.head(x[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
        keyed = self.config.return_dict if return_dict is None else return_dict
        return output if keyed else output.to_tuple()

    def _read(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """What the head reads, (B, T, D), of whole sequences."""
        if mask is not None:
            # The tokens to read first; what comes after them cannot reach them.
            tokens = tokens.gather(1, (~mask).long().argsort(dim=1, stable=True))
        x = self.mosaic.embedding(tokens)
        for block in self.mosaic.blocks:
            x = block(x)
        return x if mask is None else _in_place(x, mask)

    def _read_on(self, tokens: Tensor, mask: Tensor | None, cache: MosaicCache) -> Tensor:
        """The same of the next positions."""
        batch, length = tokens.shape
        if not cache.groups:
            rows = torch.arange(batch, device=tokens.device)
            cache.groups = [(rows, self.mosaic.initial_state(batch))]
        elif cache.batch_size != batch:
            raise ValueError(f"the cache has read {cache.batch_size} sequences, got {batch} to go on with")
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        cache.split(mask.sum(1))
        x = self.mosaic.embedding.weight.new_zeros(batch, length, self.config.hidden_size)
        for i, (rows, state) in enumerate(cache.groups):
            mine = mask[rows]
            if mine.any():
                read, state = self.mosaic.extend(tokens[rows][mine].view(len(rows), -1), state)
                x[rows] = _in_place(read, mine).to(x.dtype)
                cache.groups[i] = rows, state
        cache.length += length
        return x


def _last(mask: Tensor, tokens: Tensor) -> Tensor:
    """The columns of the mask that belong to ``tokens``, as bool."""
    batch, length = tokens.shape
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        raise ValueError(
            f"attention_mask must be ({batch}, {length} or more) for a mosaic, got {tuple(mask.shape)}"
        )
    return mask[:, mask.shape[1] - length :].bool()


def _in_place(x: Tensor, mask: Tensor) -> Tensor:
    """(B, n, D) at tokens read → (B, T, D) at all positions, each with what was read last up to it."""
    index = (mask.cumsum(1) - 1).clamp(min=0)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


_watch()
AutoConfig.register(ParzenMosaicConfig.model_type, ParzenMosaicConfig, exist_ok=True)
AutoModelForCausalLM.register(ParzenMosaicConfig, MosaicForCausalLM, exist_ok=True)
