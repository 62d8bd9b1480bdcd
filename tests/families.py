"""Every family of transformers in tiny random models: does the kernel reach its attention?

    python tests/families.py found.json               # all, going on where it stopped
    python tests/families.py found.json llama bert    # these anew

Of each config class the most telling model is made from its own defaults, made smaller; nothing is
downloaded. One process a family. Of each model it is judged, with the kernel by name and by ``convert``,
whether it works (the Gaussian is eager attention, another kernel is the witness and moves the output, and
tokens that must not matter do not) or is refused with a reason. Everything else is ``wrong``. The table in
docs/transformers.md is written from what was found, by ``table``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

import parzen
from parzen.integrations.transformers import register

KERNEL = "biweight"
MEMORY, SECONDS = 12 << 30, 60
FOLDER = Path(transformers.__file__).parent / "models"

# ---- smaller configs -----------------------------------------------------------------------------

VOCAB, LAYERS, EXPERTS = 1000, 2, 4
WIDTH = re.compile(
    r"(hidden|embd|embed|dim(ension)?s?($|_)|width|inter_?|ffn|channels|rank|d_model|d_ff|d_kv|d_inner|proj"
    r"|units|features_|mlp_|intermediate|_size_per_head|latents?_size|num_pos_feats|q_size|dim$)"
)
NOT_WIDTH = re.compile(
    r"(token|_id$|_ids$|position|layers|image_|patch|num_channels|in_channels|window|kernel|stride|temperature|groups"
    r"|num_|rate|ratio|embedding_base|max_|min_|_act|rotary_dim|act_dim|state_dim)"
)
HEAD = re.compile(
    r"(head_dim|head_size|d_kv|kv_channels|dim_head|d_head|headdim|rotary_dim|query_pre_attn_scalar)"
)
HEADS = re.compile(r"(heads|n_head|num_query_groups)")
DEPTH = re.compile(
    r"(^|_)(n_layers?|num_layers|layers|depth|num_hidden_layers|num_blocks|n_blocks)$|_layers$|^num_hidden"
)
NOT_DEPTH = re.compile(
    r"(no_rope|feature_layers|mlp_only|moe_layers|num_nextn|dense_layers|kv_shared|share|idx|source)"
)
EXPERT = re.compile(
    r"(experts|moe_k$|num_local_experts|n_routed|expert_num|experts_per_tok|top_?k|moe_topk|n_group|topk_group)"
)
TOKEN = re.compile(r"(token_id|token_index|token_ids|pad_id|_id$)")


def width(v: int) -> int:
    return v if v < 64 else max(16, v // 16 // 2 * 2)


def smaller(config: PreTrainedConfig, how: str) -> dict[str, Any]:
    """The fields of a config class that make its models small; those of parts within."""
    fields = {k: v for k, v in vars(config).items() if not k.startswith("_") or k == "_out_features"}
    known = set(inspect.signature(type(config).__init__).parameters) | set(
        getattr(type(config), "__dataclass_fields__", {})
    )
    depth = next(
        (
            fields[n]
            for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
            if isinstance(fields.get(n), int)
        ),
        0,
    )
    kinds = fields.get("layer_types")
    chosen = None
    if isinstance(kinds, list) and len(kinds) == depth and all(isinstance(k, str) for k in kinds):
        first = {k: i for i, k in reversed(list(enumerate(kinds)))}
        chosen = sorted(first.values())
        if len(chosen) < LAYERS:
            chosen = sorted({*chosen, *range(LAYERS)})[:LAYERS]
    elif depth:
        chosen = list(range(min(LAYERS, depth)))
    new: dict[str, Any] = {}
    for name, v in fields.items():
        if name not in known:
            continue
        if isinstance(v, PreTrainedConfig):
            new[name] = {**smaller(v, how), "model_type": v.model_type}
        elif isinstance(v, bool) or v is None or isinstance(v, str | float):
            continue
        elif isinstance(v, int):
            small = number(name, v, how, chosen, depth)
            if small != v:
                new[name] = small
        elif (
            isinstance(v, list | tuple)
            and v
            and all(isinstance(x, int) and not isinstance(x, bool) for x in v)
        ):
            if depth > LAYERS and len(v) == depth and chosen:
                new[name] = [number(name, v[i], how, chosen, depth) for i in chosen]
            elif name in ("depths", "blocks_per_stage", "layers"):
                new[name] = [1 for x in v]
            elif TOKEN.search(name):
                new[name] = [token(x) for x in v]
            elif how != "deep" and HEADS.search(name):
                continue
            elif how == "narrow" and (
                WIDTH.search(name) or name in ("dim", "dims", "hidden_sizes", "embed_dims")
            ):
                new[name] = [max(8, x // 4) for x in v]
        elif isinstance(v, list) and depth > LAYERS and len(v) == depth and chosen:
            new[name] = [v[i] for i in chosen]
    return new


def number(name: str, v: int, how: str, chosen: Any, depth: int) -> int:
    if "vocab" in name and v > VOCAB:
        return VOCAB
    if TOKEN.search(name):
        return token(v)
    if DEPTH.search(name) and not NOT_DEPTH.search(name) and v > LAYERS:
        return len(chosen) if chosen and v == depth else LAYERS
    if EXPERT.search(name) and v > 2:
        return 2 if re.search("tok|top|group|moe_k", name) else EXPERTS
    if how != "deep":
        if HEADS.search(name):
            return v // 4 if v % 4 == 0 else v
        if how == "thin":
            wide = WIDTH.search(name) and not NOT_WIDTH.search(name) and not HEAD.search(name)
            return v // 4 if wide and v % 4 == 0 and v >= 64 else v
        if HEAD.search(name):
            return v // 4 if v >= 32 else v
        if WIDTH.search(name) and not NOT_WIDTH.search(name):
            return width(v)
    if name in ("num_queries",) and v > 20:
        return 20
    if name == "max_position_embeddings" and v > 4096:
        return 4096
    return v


def token(v: int) -> int:
    return v if v < VOCAB - 200 else VOCAB - 200 + v % 197


# Where the rules are not enough: fields by config class, dotted.
FIELDS: dict[str, dict[str, Any]] = {
    "AutoformerConfig": {"prediction_length": 8, "context_length": 16},
    "BambaConfig": {"attn_layer_indices": [1]},
    "DbrxConfig": {"attn_config.rope_theta": 10000.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "HunYuanDenseV1Config": {"head_dim": 32},
    "HunYuanMoEV1Config": {"head_dim": 32},
    "HunYuanVLConfig": {"text_config.head_dim": 32},
    "InformerConfig": {"prediction_length": 8, "context_length": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "NllbMoeConfig": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "MinistralConfig": {"head_dim": 32},
    "NemotronConfig": {"num_key_value_heads": 4, "head_dim": 32},
    "TimesFmConfig": {"context_length": 64},
    "TimeSeriesTransformerConfig": {"prediction_length": 8, "context_length": 16},
}


def tiny(cls: type[PreTrainedConfig], how: str, **more: Any) -> PreTrainedConfig:
    """A small config of the class.

    Args:
        how: "narrow", or "deep" where widths stay what they are.
    """
    fields = smaller(cls(), how)
    for name, v in {**FIELDS.get(cls.__name__, {}), **more}.items():
        *path, last = name.split(".")
        where = fields
        for part in path:
            where = where.setdefault(part, {})
        where[last] = v
    return cls(**fields)


# ---- inputs --------------------------------------------------------------------------------------

BATCH, LENGTH, PADDED = 2, 12, 3


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the names that the config or a part of it has."""
    parts = [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in names:
            v = getattr(part, name, None) if part is not None else None
            if v is not None:
                return v
    return default


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def text(config: Any, length: int = LENGTH) -> torch.Tensor:
    special = set()
    for part in [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))]:
        for k, v in vars(part).items() if part is not None else ():
            if TOKEN.search(k):
                special |= set(v if isinstance(v, list | tuple) else [v])
    vocab = min(
        [v for k in ("vocab_size", "text_vocab_size") if isinstance(v := find(config, k), int) and v > 8]
        or [100]
    )
    usual = [i for i in range(3, min(vocab, 700)) if i not in special]
    pick = torch.randint(0, len(usual), (BATCH, length), generator=torch.Generator().manual_seed(1))
    return torch.tensor(usual)[pick]


def image(config: Any) -> list[int]:
    size = find(config, "image_size", "img_size", "input_size", default=64)
    if isinstance(size, dict):
        size = [size.get("height", 64), size.get("width", 64)]
    h, w = size if isinstance(size, list | tuple) else (size, size)
    return [find(config, "num_channels", "in_channels", "in_chans", default=3), h, w]


def inputs(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Calls to try, the likeliest first."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    base: dict[str, Any] = {}
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        base["decoder_input_ids"] = text(config, LENGTH - 2)
    ids = {"input_ids": text(config), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    ids = {k: v for k, v in ids.items() if k in names}
    mels = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    frames = find(config, "num_frames", "frames_per_clip", default=8)
    c, h, w = image(config)
    source = find(config, "max_source_positions", default=100)
    longest, context = find(config, "max_length", default=100), find(config, "context_length", default=64)
    kinds: dict[str, list[torch.Tensor]] = {
        "pixel_values": [randn(BATCH, c, h, w), randn(BATCH, frames, c, h, w), randn(BATCH, c, 64, 64),
                         randn(BATCH, 1, c, h, w), randn(BATCH, c, 224, 224), randn(BATCH, 16, c * 14 * 14)],
        "pixel_values_videos": [randn(BATCH, frames, c, h, w)],
        "input_values": [randn(BATCH, 4000), randn(BATCH, 1, 4000), randn(BATCH, longest, mels),
                         randn(BATCH, 40, mels)],
        "input_features": [randn(BATCH, mels, 2 * source), randn(BATCH, 60, mels), randn(BATCH, mels, 3000),
                           randn(BATCH, 1, 1001, 64), randn(BATCH, 60, 80), randn(BATCH, 60, 160),
                           randn(BATCH, mels, 60)],
        "past_values": [randn(BATCH, context, find(config, "num_input_channels", default=1)),
                        randn(BATCH, 64)],
        "inputs_embeds": [randn(BATCH, LENGTH, find(config, "hidden_size", "d_model", default=64))],
    }  # fmt: skip
    calls: list[dict[str, Any]] = []
    if main == "input_ids" or "input_ids" in names:
        calls.append({**ids, **base})
        if "pixel_values" in names:
            calls += [{**ids, "pixel_values": x, **base} for x in kinds["pixel_values"]]
        if "bbox" in names:
            calls.append({**ids, "bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long), **base})
        if "decoder_input_ids" in names and not base:
            calls.append({**ids, "decoder_input_ids": text(config, LENGTH - 2)})
        if "input_features" in names:
            calls += [{**ids, "input_features": x, **base} for x in kinds["input_features"]]
    for name in (main, *kinds):
        if name in names and name in kinds:
            calls += [{name: x, **base} for x in kinds[name]]
    if "hidden_states" in names:
        wide = find(config, "hidden_size", "embed_dim", "d_model", default=64)
        calls += [{"hidden_states": randn(BATCH, LENGTH, wide)}]
        channels = find(config, "in_channels", "num_channels", default=3)
        p = find(config, "patch_size", default=14)
        p = p if isinstance(p, int) else p[-1]
        tp = find(config, "temporal_patch_size", default=1)
        tp = tp if isinstance(tp, int) else tp[0]
        merge = 2 * find(config, "spatial_merge_size", default=1)
        grid = torch.tensor([[1, merge, merge], [1, 2 * merge, merge]])
        flat = {"hidden_states": randn(int(grid.prod(1).sum()), channels * p * p * tp)}
        calls += [{**flat, "grid_thw": grid}]
    if "pixel_values" in names and "grid_thw" in names:
        p = find(config, "patch_size", default=14)
        p = p if isinstance(p, int) else p[-1]
        t = find(config, "temporal_patch_size", default=1)
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        calls += [
            {"pixel_values": randn(32, 3 * p * p * t), "grid_thw": grid},
            {"pixel_values": randn(32, 3, p, p), "grid_thw": grid},
        ]
    if "past_observed_mask" in names:
        lags = max(find(config, "lags_sequence", default=[0]))
        past, future = config.context_length + lags, config.prediction_length
        features = config.num_time_features
        calls += [
            {
                "past_values": randn(BATCH, past),
                "past_time_features": randn(BATCH, past, features),
                "past_observed_mask": torch.ones(BATCH, past),
                "future_values": randn(BATCH, future),
                "future_time_features": randn(BATCH, future, features),
            }
        ]
    return calls


# ---- judging -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Truth:
    """What a model gives for a call: with eager attention, with SDPA and the witness if it has them.

    ``effects`` are those of ``unmoved``.
    """

    call: dict[str, Any]
    eager: list[torch.Tensor]
    sdpa: list[torch.Tensor] | None
    witness: list[torch.Tensor] | None
    effects: dict[str, Any]


WITNESS = "witness"


def attend_densely(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Eager attention with the weight map of the kernel in place of softmax."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scaling = kwargs.get("scaling")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = parzen.weights(scores if mask is None else scores + mask, KERNEL)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def floats(output: Any) -> list[torch.Tensor]:
    """The tensors of numbers in an output, caches aside."""
    if isinstance(output, torch.Tensor):
        return [output.detach()] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [
            t
            for k, v in output.items()
            if not any(w in k for w in ("past", "cache", "attentions"))
            for t in floats(v)
        ]
    if isinstance(output, list | tuple):
        return [t for v in output for t in floats(v)]
    return []


def run(model: nn.Module, call: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        found = floats(
            model(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}, **more)
        )
    if not found:
        raise ValueError("no numbers in the output")
    return found


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """|a − b| over the largest of |a|, place by place; None if the shapes differ."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return None
    found = []
    for x, y in zip(a, b, strict=True):
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        scale = x[x.isfinite()].abs().max() if x.isfinite().any() else 1.0
        d = torch.where(same, 0.0, (x - y).abs() / max(float(scale), 1e-12))
        found.append(torch.where(d.isfinite(), d, torch.inf))
    return found


def places(d: torch.Tensor) -> torch.Tensor:
    """The largest of each place (B, T) over what it has."""
    return d.flatten(2).amax(2) if d.ndim > 2 else d


def largest(d: list[torch.Tensor] | None) -> float:
    return float("inf") if d is None else max((float(x.max()) for x in d if x.numel()), default=0.0)


def shake(model: nn.Module) -> None:
    """Weights that make attention far from uniform, and gates open."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point() or not p.numel():
                continue
            if p.ndim == 2 and "embed" not in name and "position" not in name:
                p.copy_(torch.randn(p.shape, generator=g) * 1.3 / p.shape[1] ** 0.5)
            elif p.ndim >= 1 and (p == 0).all() and ("bias" not in name or p.ndim > 1):
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
            elif p.ndim > 1 and p.abs().max() < 1e-3:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            elif p.ndim == 1 and p.abs().max() < 1e-3 and "bias" not in name:
                p.fill_(0.5)
            elif p.ndim == 0 and p.abs() < 1e-3:
                p.fill_(0.5)
            elif not p.isfinite().all() or p.abs().max() > 1e4:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)

        for _, b in model.named_buffers():
            # Code books.
            if b.ndim == 2 and b.is_floating_point() and b.numel() and (b == 0).all():
                b.copy_(torch.randn(b.shape, generator=g))


def pad(call: dict[str, Any], side: str) -> dict[str, Any]:
    new = dict(call)
    mask = call["attention_mask"].clone()
    mask[0, slice(None, PADDED) if side == "left" else slice(-PADDED, None)] = 0
    new["attention_mask"] = mask
    return new


def changes(call: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of calls that differ in tokens which some positions must not see."""
    pairs = {}
    for name in ("input_ids", "decoder_input_ids"):
        if name in call:
            other = call[name].clone()
            other[:, -1] = call[name][:, 0] + (call[name][:, -1] == call[name][:, 0])
            pairs[f"last of {name}"] = (call, {**call, name: other})
    if "attention_mask" in call and "input_ids" in call:
        for side in ("left", "right"):
            first = pad(call, side)
            other = call["input_ids"].clone()
            hidden = first["attention_mask"] == 0
            other[hidden] = other[1, :PADDED] + (other[hidden] == other[1, :PADDED])
            pairs[f"padding on the {side}"] = (first, {**first, "input_ids": other})
    return pairs


def judge(model: PreTrainedModel, set_kernel: Any, truth: Truth) -> str:
    """Whether it works or what is wrong; ``set_kernel`` takes a kernel's name."""
    call, effects, witness = truth.call, truth.effects, truth.witness
    set_kernel("gaussian")
    gaussian = run(model, call)
    if (off := largest(difference(truth.eager, gaussian))) > 2e-3:
        # Some add a boolean mask to the scores in eager attention.
        if truth.sdpa is None or largest(difference(truth.sdpa, gaussian)) > 2e-3:
            return f"wrong: the Gaussian is off eager by {off:.1e}"
        effects, witness = {}, None
    for name, (first, _, _, expected) in effects.items():
        # Rows that see nothing, as at the left of a causal model, are no one's business.
        if name == "padding on the right" and (d := difference(expected, run(model, first))) is not None:
            seen = first["attention_mask"].bool()
            off = max((float(x[seen].max()) for x in d if x.shape[:2] == seen.shape), default=0.0)
            if off > 2e-3:
                return f"wrong: with {name} the Gaussian is off eager by {off:.1e}"
    set_kernel(KERNEL)
    other = run(model, call)
    if witness is not None and (off := largest(difference(witness, other))) > 2e-3:
        return f"wrong: the kernel is off the witness by {off:.1e}"
    if (moved := largest(difference(gaussian, other))) < 1e-4:
        return f"wrong: the kernel moves the output by {moved:.1e}"
    for name, (first, second, unmoved, _) in effects.items():
        d = difference(run(model, first), run(model, second))
        if d is None:
            return f"wrong: {name} changes shapes"
        for x, still in zip(d, unmoved, strict=True):
            if still.any() and (leak := float(places(x)[still].max())) > 1e-5:
                return f"wrong: {name} changes what must not see it by {leak:.1e}"
    return "works"


def unmoved(model: PreTrainedModel, call: dict[str, Any]) -> dict[str, Any]:
    """The pairs of ``changes``, where nothing moved with eager attention, and what it gave for the first."""
    found = {}
    for name, (first, second) in changes(call).items():
        try:
            one = run(model, first)
            d = difference(one, run(model, second))
        # Eager attention, nothing of ours: such a change does not fit this model's inputs, in whatever words.
        except Exception as error:
            trace(error)
            continue
        if d is not None:
            found[name] = (first, second, [places(x) < 1e-6 for x in d], one)
    return found


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def families() -> list[str]:
    """All of the installed transformers."""
    folders = (p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
    return sorted(set(folders) - {"auto", "deprecated"})


RANK = ("ForConditionalGeneration", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model")


def candidates(family: str) -> dict[type, list[type]]:
    """The model classes of each config class, the most telling first."""
    found: dict[type, list[type]] = {}
    for file in sorted((FOLDER / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
        for cls in vars(module).values():
            if (
                not (isinstance(cls, type) and issubclass(cls, PreTrainedModel))
                or cls.__module__ != module.__name__
            ):
                continue
            config = getattr(cls, "config_class", None)
            if cls.__name__.endswith("PreTrainedModel") or not isinstance(config, type):
                continue
            found.setdefault(config, []).append(cls)
    for classes in found.values():
        classes.sort(key=lambda c: next((i for i, s in enumerate(RANK) if c.__name__.endswith(s)), len(RANK)))
    return found


def build(config: type, classes: list[type]) -> tuple[Any, Any, Any, Any]:
    """A class, its config, a call that works and the eager output."""
    why = ""
    for how in ("narrow", "thin", "deep"):
        for cls in classes[:4]:
            try:
                made = tiny(config, how)
                torch.manual_seed(0)
                model = cls._from_config(made, attn_implementation="eager").eval()
                shake(model)
            except MemoryError:
                raise
            # A configuration made up here, in a model's own code: the table says "not made", and the reason.
            except Exception as error:
                why = why or f"{cls.__name__}: {line(error)}"
                trace(cls, error)
                continue
            for call in inputs(model):
                try:
                    return model, made, call, run(model, call)
                # Likewise for its inputs: the table names what none of them suited.
                except Exception as error:
                    why = why if "/" in why else f"{cls.__name__}/{line(error)}"
                    trace(cls, error, list(call))
    raise ValueError(why or "no call found")


def trace(*what: Any) -> None:
    if os.environ.get("TRACE"):
        print(*[w for w in what if not isinstance(w, BaseException)])
        for w in what:
            if isinstance(w, BaseException):
                traceback.print_exception(w)


def examine(config: type, classes: list[type]) -> dict[str, Any]:
    record: dict[str, Any] = {"config": config.__name__}
    try:
        model, made, call, eager = build(config, classes)
    # Of whatever kind, with eager attention: the row says that the family was not made, and why.
    except Exception as error:
        return {**record, "model": classes[0].__name__, "built": False, "why": str(error)[:300]}
    cls = type(model)
    record |= {"model": cls.__name__, "built": True, "call": {k: list(v.shape) for k, v in call.items()}}
    if largest(difference(eager, run(model, call))) > 1e-6:
        return {**record, "built": False, "why": "another output every time"}
    if not any(x.isfinite().all() for x in eager):
        return {**record, "built": False, "why": "no finite output"}
    state = model.state_dict()

    def again() -> Any:
        new = cls._from_config(copy.deepcopy(made), attn_implementation="eager").eval()
        new.load_state_dict(state)
        return new

    def otherwise(name: Any) -> Any:
        try:
            other = again()
            other.set_attn_implementation(name)
            return run(other, call)
        except Exception as error:
            trace(error)
            return None

    sdpa = otherwise("sdpa") or otherwise(dict.fromkeys(made.sub_configs, "sdpa"))
    truth = Truth(call, eager, sdpa, otherwise(WITNESS), unmoved(model, call))
    # Conversion changes nn.MultiheadAttention too, which the witness leaves alone.
    converted = dataclasses.replace(truth, witness=None)
    for way in ("parzen", "convert"):
        at = "load"
        try:
            new = again()
            if way == "parzen":
                # By the constructor, as when a checkpoint is loaded.
                new = cls._from_config(copy.deepcopy(made), attn_implementation=f"parzen:{KERNEL}").eval()
                new.load_state_dict(state)
            else:
                parzen.nn.convert(new, KERNEL)
            at = "call"

            def set_kernel(name: str, way: str = way, new: Any = new) -> None:
                if way == "parzen":
                    new.set_attn_implementation(f"parzen:{name}")
                else:
                    parzen.nn.convert(new, name)

            record[way] = judge(new, set_kernel, truth if way == "parzen" else converted)
        except Exception as error:
            said = any(w in str(error) for w in ("parzen", "was converted", "no layer to convert"))
            record[way] = f"refused at {at}" if said else f"crash at {at}"
            record[f"{way}_why"] = line(error)
            trace(cls, error)
    return record


class Late(BaseException):
    pass


def late(*args: Any) -> None:
    raise Late


def child(family: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if not os.environ.get("TRACE"):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        found = candidates(family)
        if not found:
            pipe.send({"family": family, "why": "no model of its own"})
        for config, classes in found.items():
            signal.alarm(SECONDS)
            try:
                pipe.send({"family": family, **examine(config, classes)})
            except Late as error:
                trace(error)
                why = f"took more than {SECONDS} s"
                pipe.send({"family": family, "config": config.__name__, "built": False, "why": why})
    except BaseException as error:
        pipe.send({"family": family, "built": False, "why": line(error)})
    pipe.close()
    os._exit(0)


def sweep(path: Path, names: list[str], again: bool) -> None:
    """Judges families, and notes down what was found after each.

    Args:
        path: of the notes.
        names: of families.
        again: also those that are in the notes.
    """
    done = json.loads(path.read_text()) if path.exists() else {}
    context = multiprocessing.get_context("fork")
    for family in names:
        if family in done and not again:
            continue
        receive, send = context.Pipe(False)
        process = context.Process(target=child, args=(family, send))
        process.start()
        send.close()
        records = []
        while True:
            try:
                records.append(receive.recv())
            except EOFError:
                break
        process.join()
        if process.exitcode:
            why = f"ended by signal {-process.exitcode}"
            records.append({"family": family, "built": False, "why": why})
        done[family] = records
        path.write_text(json.dumps(done, indent=1, sort_keys=True))
        for r in records:
            said = (r.get(k) for k in ("model", "parzen", "parzen_why", "convert", "convert_why", "why"))
            print(family, *filter(None, said), sep=" | ", flush=True)


# ---- the table in the docs -----------------------------------------------------------------------

PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"
# What an error says, in short; the first that fits.
REASONS = {
    r"for each of .*\((\w+_CLASSES)": r"attention code of its own (`\1`)",
    r"\((\w+)\) has attention code": r"attention code of its own (`\1`)",
    r"\((\w+)\) ended without": r"`\1` does not always call the interface",
    r"\((\w+)\) reads the numbers": r"`\1` reads eager's mask",
    r"no layer with an attention": "no attention",
    r"passes \w+ \((.*?)\)": r"\1",
    r"no layer to convert": "no layer to convert",
    r"was converted, and": "softmax written by hand",
    r"requires the (\w+) library|No module named '(\w+)'": r"needs \1\2",
    r"took more|ended by signal|MemoryError": "too large for the limits here",
    r"another output every time|no finite output": r"\g<0>",
    r"/|no call": "wants inputs that are not made here",
    r"": "its config is not made smaller by the rules here",
}


def reason(text: str) -> str:
    """In short."""
    for pattern, short in REASONS.items():
        if match := re.search(pattern, text):
            return match.expand(short)
    raise AssertionError(text)


def verdict(records: list[dict[str, Any]], way: str) -> str:
    """What became of the models of a family that were made."""
    kinds = [r[way].split()[0].strip(":") for r in records if way in r]
    if not kinds:
        return "not made"
    works = kinds.count("works")
    if others := sorted(set(kinds) - {"works"}):
        return others[0] if not works else f"works; {others[0]}: {len(kinds) - works} of {len(kinds)} models"
    return "works"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Of what ``sweep`` wrote, Markdown."""
    own = {f: r for f, r in found.items() if r and r[0].get("why") != "no model of its own"}
    rows = {f: [verdict(r, way) for way in ("parzen", "convert")] for f, r in own.items()}
    works = [f for f, row in rows.items() if row == ["works", "works"]]
    lines = [
        f"Of the {len(own)} families of transformers {transformers.__version__} with models of their own "
        f"({len(found) - len(own)} have none), {len(works)} work by name and by `convert` in every model "
        "made:",
        "",
        ", ".join(f"`{f}`" for f in works) + ".",
        "",
        "| family | by name | by `convert` | why |",
        "|---|---|---|---|",
    ]
    for f, row in rows.items():
        if f in works:
            continue
        bad = [r for r in own[f] if not (r.get("parzen") == r.get("convert") == "works")]
        texts = [r.get("parzen_why") or r.get("convert_why") or r.get("why") or "?" for r in bad]
        made = [t for t, r in zip(texts, bad, strict=True) if "parzen" in r]
        why = dict.fromkeys(map(reason, made or texts))
        lines.append(f"| `{f}` | {row[0]} | {row[1]} | {'; '.join(why)} |")
    return "\n".join(lines) + "\n"


def write(found: dict[str, list[dict[str, Any]]]) -> None:
    """Puts the table where it stands in the docs."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table(found) + END + rest.split(END)[1], encoding="utf-8")


def prepare() -> None:
    """What every process needs, which are forks of this one."""
    torch.set_num_threads(1)
    register()
    AttentionInterface.register(WITNESS, attend_densely)
    AttentionMaskInterface.register(WITNESS, AttentionMaskInterface()["eager"])


if __name__ == "__main__":
    prepare()
    path, *names = sys.argv[1:]
    sweep(Path(path), names or families(), bool(names))
    if not names:
        write(json.loads(Path(path).read_text()))
