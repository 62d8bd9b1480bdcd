"""Kernels as attention implementations of transformers, in its own models with random weights."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.testing import assert_close
from torch.utils.data import Dataset
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import parzen
from parzen.integrations.transformers import MemoryCache, MemoryLayer, attention_function, register
from parzen.kernels import KERNELS

register()
register("knn_gaussian?k=3", "parzen:relumax?margin=0.5")

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
WINDOW = 4
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

# Class, config class and config of each architecture.
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": WINDOW,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": None},
    ),
}  # fmt: skip
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**SIZES, "local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 2,
         "global_attn_every_n_layers": 2},
    ),
}  # fmt: skip
OTHERS = {
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 4, "num_labels": 3},
    ),
}  # fmt: skip
MODELS = DECODERS | ENCODERS | OTHERS
CHOSEN = ["gaussian", "epanechnikov", "biweight", "relumax?margin=0.5", "knn_gaussian?k=3"]


def make(name, implementation="parzen:biweight", **changes):
    """The model with the same weights every time, larger than usual so that attention is far from uniform."""
    model, config, fields = MODELS[name]
    config = getattr(transformers, config)(**{**fields, **changes}, attn_implementation=implementation)
    torch.manual_seed(0)
    model = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in key:
                p.mul_(6)
    assert model.config._attn_implementation == implementation
    return model


def inputs(name, length=9, batch=2):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, VOCAB, (batch, length), generator=generator)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name == "bart":
        given["decoder_input_ids"] = torch.randint(3, VOCAB, (batch, length - 2), generator=generator)
    return given


def witness(k):
    """Attention as transformers' eager code does it, with the weight map of ``k`` in place of softmax."""

    def attend(module, query, key, value, attention_mask, *, scaling, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = parzen.weights(scores, k)
        return (weights @ value).transpose(1, 2), weights

    return attend


@pytest.fixture
def witnessed():
    """Registers witnesses with the masks of eager attention, and takes them away again."""
    names = []

    def add(k):
        names.append(f"witness-{len(names)}")
        AttentionInterface.register(names[-1], witness(k))
        AttentionMaskInterface.register(names[-1], AttentionMaskInterface()["eager"])
        return names[-1]

    yield add
    for name in names:
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]


# ---- names ---------------------------------------------------------------------------------------


def test_every_kernel_is_registered_by_its_name_and_aliases():
    names = register()
    assert set(names) == {f"parzen:{n}" for key, row in KERNELS.items() for n in (key, *row.aliases)}
    for name in names:
        assert name in AttentionInterface()
        assert name in AttentionMaskInterface()
    assert register("parzen:knn_gaussian?k=32", "exp?margin=2") == (
        "parzen:knn_gaussian?k=32",
        "parzen:exp?margin=2",
    )


def test_a_wrong_name_registers_nothing():
    with pytest.raises(ValueError, match="unknown kernel 'nope'; known: gaussian"):
        register("biweight?", "nope")
    with pytest.raises(ValueError, match="k must be"):
        register("triweight", "knn_gaussian?k=0")
    assert "parzen:nope" not in AttentionInterface()
    with pytest.raises(ValueError, match="unknown kernel 'biwieght'; did you mean 'biweight'"):
        make("llama", "parzen:biwieght")
    assert "parzen:biwieght" not in AttentionInterface()


# ---- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
def test_the_gaussian_is_what_transformers_computes(name, theirs):
    model, given = make(name, "parzen:gaussian"), inputs(name)
    with torch.no_grad():
        ours = model(**given).logits
        model.set_attn_implementation(theirs)
        assert_close(ours, model(**given).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernel", CHOSEN[1:])
def test_other_kernels_replace_softmax_and_nothing_else(name, kernel, witnessed):
    model, given = make(name, f"parzen:{kernel}"), inputs(name)
    if "attention_mask" in given:
        given["attention_mask"][0, :3] = 0
    seen = given.get("decoder_attention_mask", given.get("attention_mask"))
    with torch.no_grad():
        ours = model(**given).logits
        model.set_attn_implementation("sdpa")
        softmax = model(**given).logits
        model.set_attn_implementation(witnessed(kernel))
        expected = model(**given).logits
    if name == "bart" or seen is None:
        seen = torch.ones(expected.shape[:-1])
    seen = seen.bool()
    assert_close(ours[seen], expected[seen], rtol=1e-4, atol=1e-4)
    # Or the comparison would say nothing about the kernel.
    assert (ours - softmax)[seen].abs().max() > 1e-2


def test_every_kernel_of_the_table_runs_and_trains():
    given = inputs("llama")
    model = make("llama", "eager")
    for name in KERNELS:
        model.set_attn_implementation(f"parzen:{name}")
        model.zero_grad()
        loss = model(**given, labels=given["input_ids"]).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"is_causal": False}])
def test_gradients_are_those_of_the_witness(changes, witnessed):
    given = inputs("llama")
    grads = []
    for implementation in ("parzen:biweight", witnessed("biweight")):
        model = make("llama", implementation, **changes)
        model(**given, labels=given["input_ids"]).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_close(*grads, rtol=1e-4, atol=1e-5)


# ---- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_padding_changes_nothing(name, side):
    model = make(name)
    short = inputs(name, 6)["input_ids"]
    pad = torch.zeros(2, 3, dtype=torch.long)
    real = torch.ones_like(short)
    order = 1 if side == "right" else -1
    padded, mask = (torch.cat((a, b)[::order], 1) for a, b in ((short, pad), (real, pad)))
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        expected = model(short).logits
        got = model(padded, attention_mask=mask, **positions).logits
    assert_close(got[mask.bool()], expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_padding_of_an_encoder_decoder_changes_nothing():
    model, given = make("bart"), inputs("bart")
    pad = torch.zeros(2, 3, dtype=torch.long)
    with torch.no_grad():
        expected = model(**given).logits
        given["input_ids"] = torch.cat((given["input_ids"], pad + 5), 1)
        given["attention_mask"] = torch.cat((given["attention_mask"], pad), 1)
        assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["biweight", "relumax", "knn_uniform", "normrelu", "gaussian"])
def test_a_row_that_sees_nothing_is_zero(name):
    query, key, value = (torch.randn(2, 4, 5, 8) for _ in range(3))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 2] = False
    out, _ = attention_function(parzen.kernel(name))(nn.Module(), query, key, value, mask)
    assert (out[0, 2] == 0).all()
    assert out.shape == (2, 5, 4, 8)
    assert out.is_contiguous()


# ---- generation ----------------------------------------------------------------------------------


def written_anew(model, given, count):
    """What greedy decoding writes without any cache."""
    tokens, mask = given["input_ids"], given["attention_mask"]
    for _ in range(count):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    return tokens


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_is_what_reading_everything_again_gives(name, padding, cache):
    model, given = make(name), inputs(name)
    given["attention_mask"][0, :padding] = 0
    expected = written_anew(model, given, 6)
    options = {"cache_implementation": cache, "disable_compile": True, "do_sample": False}
    assert (model.generate(**given, max_new_tokens=6, **options) == expected).all()


@pytest.mark.parametrize("length", [1, 5])
def test_a_static_cache_longer_than_what_fills_it(length):
    """Prompt, one token, then several at once: the masks that transformers leaves out and those it makes."""
    model = make("llama")
    tokens = inputs("llama", 14)["input_ids"]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for cache in (None, StaticCache(config=model.config, max_cache_len=32)):
            parts = []
            for part in tokens.split([length, 1, 4, 13 - 4 - length], 1):
                out = model(part, cache=cache, use_cache=True)
                cache = out.cache
                parts.append(out.logits)
            assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_generate_with_an_encoder():
    model, given = make("bart"), inputs("bart")
    del given["decoder_input_ids"]
    # Or it would write one word again and again.
    options = {"max_new_tokens": 6, "do_sample": False, "no_repeat_ngram_size": 1}
    expected = model.generate(**given, **options, use_cache=False)
    assert len(expected.unique()) > 4
    for cache in ("dynamic", "static"):
        got = model.generate(**given, **options, cache_implementation=cache, disable_compile=True)
        assert (got == expected).all()


# ---- a memory as the cache -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", [0, 2])
def test_generate_from_a_memory_is_what_reading_everything_again_gives(name, padding):
    model, given = make(name), inputs(name)
    given["attention_mask"][0, :padding] = 0
    cache = MemoryCache(model)
    got = model.generate(**given, max_new_tokens=6, do_sample=False, cache=cache)
    assert (got == written_anew(model, given, 6)).all()
    assert cache.get_seq_length() == 9 + 5
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [DynamicSlidingWindowLayer if name == "gemma3" else MemoryLayer, MemoryLayer]


def read_in_parts(model, cache, parts, mask=None):
    """The logits of all tokens, given in parts."""
    logits, seen = [], 0
    with torch.no_grad():
        for part in parts:
            seen += part.shape[1]
            now = {} if mask is None else {"attention_mask": mask[:, :seen]}
            if mask is not None:
                now["position_ids"] = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
            logits.append(model(part, cache=cache, use_cache=True, **now).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kernel", [*CHOSEN[:-1], "uniform?radius=4"])
def test_a_memory_over_several_chunks_reads_what_a_dynamic_cache_reads(kernel, padding):
    """Of 2,160 keys two chunks are coded; both kinds of cache are held to float64."""
    register(kernel)
    model = make("llama", f"parzen:{kernel}", max_position_embeddings=4096)
    tokens = inputs("llama", 2160)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    parts, seen = tokens.split([2100, 1, 40, 17, 1, 1], 1), mask.bool()
    mask = mask if padding else None
    ours, theirs = (read_in_parts(model, cache(model), parts, mask) for cache in (MemoryCache, dynamic))
    model.double()
    got, exact = (read_in_parts(model, cache(model), parts, mask) for cache in (MemoryCache, dynamic))
    assert_close(got[seen], exact[seen], rtol=0, atol=1e-9)
    error, rounding = ((x.double() - exact)[seen].abs().max() for x in (ours, theirs))
    assert error < 3 * rounding < 0.1


def dynamic(model):
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams_from_a_memory(name):
    model, given = make(name), inputs(name)
    options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    expected = model.generate(**given, **options)
    assert (model.generate(**given, **options, cache=MemoryCache(model)) == expected).all()
    # Or no row ever changed its place.
    assert len({tuple(row) for row in expected.tolist()}) == 4


def test_guessed_tokens_are_taken_back_from_a_memory():
    model, given = make("llama"), inputs("llama", batch=1)
    options = {"max_new_tokens": 12, "do_sample": False}
    cache = MemoryCache(model)
    cropped = []
    cache.crop = lambda n, crop=cache.crop: (cropped.append(n), crop(n))
    got = model.generate(**given, **options, prompt_lookup_num_tokens=3, cache=cache)
    assert (got == model.generate(**given, **options)).all()
    assert min(cropped) < 0


def test_what_a_memory_cache_takes_back_copies_and_selects():
    model, tokens = make("llama"), inputs("llama", 14, batch=3)["input_ids"]

    def logits(part, cache):
        return read_in_parts(model, cache, [part])

    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    cache = MemoryCache(model)
    logits(tokens[:, :9], cache)
    logits(tokens[:, :3], cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 9
    twin = copy.deepcopy(cache)
    assert_close(logits(tokens[:, 9:], cache), expected[:, 9:], rtol=1e-4, atol=1e-4)
    twin.batch_select_indices(torch.tensor([2, 0]))
    twin.batch_repeat_interleave(2)
    rows = torch.tensor([2, 2, 0, 0])
    assert_close(logits(tokens[rows, 9:], twin), expected[rows, 9:], rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(logits(tokens[:2, :6], cache), expected[:2, :6], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="counts down from 0, got 2"):
        cache.crop(2)
    with pytest.raises(ValueError, match="length must be an integer in 0 … 6, got -1"):
        cache.crop(-7)


def test_weights_and_matched_scales_from_a_memory():
    model, tokens = make("llama", "eager"), inputs("llama")["input_ids"]
    parzen.nn.convert(model, "biweight")
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.parzen.gain = 0.5 + torch.arange(4) / (i + 2)
    with torch.no_grad():
        expected = model(tokens, output_attentions=True)
        got = model(tokens, output_attentions=True, cache=MemoryCache(model), use_cache=True)
    assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert_close(got.attentions, expected.attentions, rtol=1e-4, atol=1e-4)


def test_a_memory_cache_says_what_it_is_not_for():
    model, given = make("llama", attention_dropout=0.5), inputs("llama")
    with pytest.raises(RuntimeError, match="key requires a gradient, and a memory has none"):
        model(**given, cache=MemoryCache(model), use_cache=True)
    cache = MemoryCache(model)
    with torch.no_grad(), pytest.raises(ValueError, match="without dropout"):
        model.train()(**given, cache=cache, use_cache=True)
    cache = MemoryCache(model.eval())
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(TypeError, match="scaled_dot_product_attention was called on what a"):
        model(**given, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="has attn_implementation='sdpa'"):
        MemoryCache(model)
    with pytest.raises(ValueError, match="BartForConditionalGeneration has an encoder"):
        MemoryCache(make("bart"))
    with pytest.raises(ValueError, match="stays where it is"):
        cache.offload(0)


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_where_eager_gives_them(name, witnessed):
    model, given = make(name), inputs(name)
    with torch.no_grad():
        silent = model(**given)
        ours = model(**given, output_attentions=True)
        model.set_attn_implementation(witnessed("biweight"))
        expected = model(**given, output_attentions=True)
    # GPT-2 has an empty tuple of cross-attentions.
    keys = [key for key in expected if "attentions" in key and expected[key]]
    assert keys
    for key in keys:
        assert silent.get(key) is None
        assert_close(ours[key], expected[key], rtol=1e-4, atol=1e-4)
        # The last query sees every key.
        assert any((w[..., -1, :] == 0).any() for w in ours[key])
        assert_close(ours[key][0].sum(-1), torch.ones(ours[key][0].shape[:-1]))


def test_weights_are_computed_when_asked_only(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were computed")

    monkeypatch.setattr("parzen.integrations.transformers.attention_weights", refuse)
    model, given = make("gpt2"), inputs("gpt2")
    model(**given)
    with pytest.raises(AssertionError, match="were computed"):
        model(**given, output_attentions=True)


def test_generate_returns_weights():
    model, given = make("llama"), inputs("llama")
    out = model.generate(
        **given, max_new_tokens=2, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    assert [w[0].shape for w in out.attentions] == [(2, 4, 9, 9), (2, 4, 1, 10)]


# ---- what cannot be honoured ---------------------------------------------------------------------


def test_soft_caps_are_refused_and_can_be_unset():
    config = transformers.Gemma2Config(**GROUPED, head_dim=8, attn_implementation="parzen:biweight")
    model = transformers.Gemma2ForCausalLM(config)
    tokens = inputs("llama")["input_ids"]
    with pytest.raises(ValueError, match=r"Gemma2Attention passes softcap .*unset it in the config"):
        model(tokens)
    config.attn_logit_softcapping = None
    assert torch.isfinite(transformers.Gemma2ForCausalLM(config)(tokens).logits).all()


def test_position_biases_are_refused():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        attn_implementation="parzen:biweight",
    )  # fmt: skip
    model = transformers.T5EncoderModel(config)
    with pytest.raises(ValueError, match=r"T5Attention passes position_bias .* cannot honour"):
        model(inputs("llama")["input_ids"])


@pytest.mark.parametrize("name", ["s_aux", "sinks", "indices", "block_table"])
def test_other_arguments_are_refused_unless_they_are_none(name):
    attend = attention_function(parzen.kernel("biweight"))
    x = torch.randn(1, 2, 3, 4)
    attend(nn.Module(), x, x, x, None, **{name: None})
    with pytest.raises(ValueError, match=f"Module passes {name} .*parzen:biweight cannot honour"):
        attend(nn.Module(), x, x, x, None, **{name: torch.ones(2)})


# ---- training ------------------------------------------------------------------------------------


class Lines(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        tokens = torch.randint(3, VOCAB, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trained(model, folder, **options):
    """One step of ``Trainer``; the loss."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-2, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        # Of a CPU without an accelerator to pin memory for.
        warnings.filterwarnings("ignore", message=".*pin_memory.*", category=UserWarning)
        return transformers.Trainer(model, arguments, train_dataset=Lines()).train().training_loss


def test_trainer_makes_a_step(tmp_path, witnessed):
    model = make("llama")
    before = [p.clone() for p in model.parameters()]
    loss = trained(model, tmp_path)
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
    assert abs(loss - trained(make("llama", witnessed("biweight")), tmp_path)) < 1e-4


def test_gradient_checkpointing_changes_nothing():
    given = inputs("llama")
    grads = []
    for checkpointed in (False, True):
        model = make("llama").train()
        if checkpointed:
            model.activation_checkpointing_enable()
        model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_close(*grads)


def test_dropout_acts_in_training_alone():
    model, given = make("llama", attention_dropout=0.5), inputs("llama")
    assert_close(model(**given).logits, model(**given).logits, rtol=0, atol=0)
    model.train()
    assert (model(**given).logits != model(**given).logits).any()


def test_compiled_in_one_graph():
    torch.compiler.reset()
    model = make("llama")
    tokens = inputs("llama")["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
        # A layer of it alone.
        x, positions = torch.randn(1, 5, 32), torch.arange(5)[None]
        layer, rotary = model.model.layers[0], model.model.rotary_emb(torch.randn(1, 5, 32), positions)
        once = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(once(x, position_embeddings=rotary), layer(x, position_embeddings=rotary))


LOAD = """
import sys
import torch
import parzen.integrations.transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.load(sys.argv[2])
torch.save((model(tokens).logits, model.config._attn_implementation), sys.argv[2])
"""


def loaded_elsewhere(folder, tokens):
    """Logits and implementation of a saved model in a process that imports parzen, and no more."""
    torch.save(tokens, folder / "tokens.pt")
    arguments = [sys.executable, "-c", LOAD, str(folder), str(folder / "tokens.pt")]
    subprocess.run(arguments, check=True, capture_output=True)
    return torch.load(folder / "tokens.pt")


@pytest.mark.parametrize("kernel", ["parzen:biweight", "parzen:knn_gaussian?k=3"])
def test_a_kernel_by_name_is_in_the_saved_config(kernel, tmp_path):
    model, tokens = make("llama", kernel), inputs("llama")["input_ids"]
    model.save_pretrained(tmp_path)
    logits, implementation = loaded_elsewhere(tmp_path, tokens)
    assert implementation == kernel
    assert_close(logits, model(tokens).logits)
    assert not hasattr(model.config, "parzen")
    # Another choice is stronger, and is what is saved then.
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert again.config._attn_implementation == "sdpa"
    again.save_pretrained(tmp_path)
    assert "parzen" not in (tmp_path / "config.json").read_text()


def test_kernels_and_gains_of_a_converted_model_are_saved(tmp_path):
    model, tokens = make("llama", "eager"), inputs("llama")["input_ids"]
    softmax = model(tokens).logits
    parzen.nn.convert(model, "biweight")
    assert model.config._attn_implementation == "parzen:converted"
    first, second = (layer.self_attn.parzen for layer in model.model.layers)
    first.kernel, second.gain = parzen.kernel("relumax?margin=2"), torch.tensor([0.5, 1, 2, 3])
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    logits, implementation = loaded_elsewhere(tmp_path, tokens)
    assert_close(logits, expected)
    assert implementation == "parzen:converted"
    # The base model alone, and one with another head.
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert_close(base(tokens).last_hidden_state @ model.lm_head.weight.T, expected, rtol=1e-4, atol=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    parzen.nn.restore(again)
    assert_close(again(tokens).logits, softmax, rtol=1e-4, atol=1e-4)


def test_saving_warns_where_a_kernel_cannot_be_kept(tmp_path):
    model = make("llama", "eager")
    parzen.nn.convert(model, parzen.kernel("power", r=nn.Parameter(torch.tensor(2.0))))
    with pytest.warns(
        UserWarning, match=r"kernel of model\.layers\.\d\.self_attn is learned.*load the state dict"
    ):
        model.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert any(key.endswith("parzen.kernel_parameter") for key in saved)


@pytest.mark.parametrize("before", ["sdpa", "eager", "parzen:epanechnikov"])
@pytest.mark.parametrize("copied", [False, True])
def test_restore_gives_the_implementation_back(before, copied):
    model, tokens = make("llama", before), inputs("llama")["input_ids"]
    expected = model(tokens).logits
    parzen.nn.convert(model, "biweight")
    parzen.nn.convert(model, "triweight")
    assert (model(tokens).logits - expected).abs().max() > 1e-2
    model = copy.deepcopy(model) if copied else model
    parzen.nn.restore(model)
    assert model.config._attn_implementation == before
    assert_close(model(tokens).logits, expected, rtol=0, atol=0)
    assert "attention_before" not in vars(model)


def test_a_layer_without_a_kernel_says_so():
    model = make("llama", "eager")
    model.set_attn_implementation("parzen:converted")
    with pytest.raises(ValueError, match=r"LlamaAttention has no kernel: call parzen\.nn\.convert"):
        model(**inputs("llama"))


def test_a_choice_that_transformers_only_logs_about_is_refused():
    model = own_code("Bloom", attn_implementation="eager")
    with pytest.raises(ValueError, match="BloomForCausalLM cannot have parzen:biweight"):
        model.set_attn_implementation("parzen:biweight")


# ---- models that the kernel does not reach -------------------------------------------------------

SMALL = {"vocab_size": VOCAB, "hidden_size": 32}
OWN_CODE = {
    "Bloom": ("BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": 4}),
    "Mpt": ("MptForCausalLM", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "MPNet": ("MPNetForMaskedLM", SIZES),
    "Falcon": ("FalconForCausalLM", {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        {**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
}


def own_code(name, **options):
    model, fields = OWN_CODE[name]
    config = getattr(transformers, f"{name}Config")(**{**fields, "bos_token_id": 1, "eos_token_id": None})
    return getattr(transformers, model)._from_config(config, **options).eval()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("Bloom", r"layer h\.0\.self_attention \(BloomAttention\)"),
        ("Mpt", r"layer blocks\.0\.attn \(MptAttention\)"),
        ("MPNet", r"layer encoder\.layer\.0\.attention\.attn \(MPNetSelfAttention\)"),
        # These look up a class for each layer, and said KeyError.
        ("Falcon", "FALCON_ATTENTION_CLASSES"),
        ("GPTNeo", "GPT_NEO_ATTENTION_CLASSES"),
    ],
)
def test_a_model_with_attention_code_of_its_own_is_refused(name, layer, tmp_path):
    with pytest.raises(ValueError, match=f"cannot have parzen:biweight: .*{layer}"):
        own_code(name, attn_implementation="parzen:biweight")
    own_code(name, attn_implementation="eager").save_pretrained(tmp_path)
    cls = getattr(transformers, OWN_CODE[name][0])
    with pytest.raises(ValueError, match=f"cannot have parzen:biweight: .*{layer}"):
        cls.from_pretrained(tmp_path, attn_implementation="parzen:biweight")


def test_a_layer_put_in_later_is_refused_when_the_kernel_is_set():
    model = make("bert", "eager")
    model.bert.encoder.layer[1].attention.self = own_code("MPNet").mpnet.encoder.layer[1].attention.attn
    layer = r"layer bert\.encoder\.layer\.1\.attention\.self \(MPNetSelfAttention\)"
    with pytest.raises(ValueError, match=layer):
        model.set_attn_implementation("parzen:biweight")
    # It stays what it was.
    assert model.config._attn_implementation == "eager"


def test_a_pooling_head_that_takes_no_mask_is_not_refused():
    """SigLIP pools by an nn.MultiheadAttention, which keeps softmax; its layers have the kernel."""
    fields = {**OTHERS["vit"][2], "vision_use_head": True}
    config = transformers.SiglipVisionConfig(**{k: v for k, v in fields.items() if k != "num_labels"})
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel._from_config(config, attn_implementation="parzen:gaussian").eval()
    assert isinstance(model.head.attention, nn.MultiheadAttention)
    given = inputs("vit")
    with torch.no_grad():
        ours = model(**given).pooler_output
        model.set_attn_implementation("eager")
        assert_close(ours, model(**given).pooler_output, atol=1e-5, rtol=1e-5)


def test_a_branch_not_taken_is_not_called_converted():
    model = own_code("Falcon", attn_implementation="eager")
    parzen.nn.convert(model, "biweight")
    with pytest.raises(RuntimeError, match="ended without scaled_dot_product_attention"):
        model(inputs("llama")["input_ids"])


@pytest.mark.parametrize("alibi", [False, True])
@torch.no_grad()
def test_falcon_is_converted_in_its_branch_of_torch_own_attention(alibi):
    config = transformers.FalconConfig(
        **OWN_CODE["Falcon"][1], alibi=alibi, bos_token_id=1, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for p in model.parameters():
        p.mul_(6 if p.ndim == 2 else 1)
    given = inputs("llama")
    expected = model(**given).logits
    assert len(parzen.nn.convert(model, "gaussian")) == 2
    assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-4)
    parzen.nn.convert(model, "biweight")
    got = model(**given).logits
    assert (got - expected).abs().max() > 0.1
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][:, -1] = 5 + (other["input_ids"][:, -1] == 5)
    assert_close(model(**other).logits[:, :-1], got[:, :-1])
    given["attention_mask"][0, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**given, **options, use_cache=False)
    assert (model.generate(**given, **options) == expected).all()


def test_a_memory_cache_says_so_where_a_model_changes_what_it_keeps():
    key = torch.randn(1, 2, 3, 8)
    layer = MemoryLayer()
    keys, _ = layer.update(key, key)
    with pytest.raises(TypeError, match="changes keys or values behind its cache, and needs a DynamicCache"):
        nn.functional.pad(keys, (0, 1))


def test_what_has_another_implementation_is_not_looked_at():
    model = make("bert", "eager")
    model.bert.encoder.layer[1].spare = own_code("MPNet").mpnet.encoder.layer[1].attention.attn
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


# ---- what the first call shows -------------------------------------------------------------------


def weigh(scores):
    return scores.softmax(-1)


class ByHelperAttention(nn.Module):
    """Its softmax is in a function that it calls."""

    def forward(self, hidden_states, **kwargs):
        return weigh(hidden_states @ hidden_states.mT) @ hidden_states, None


class SkippingAttention(type(make("llama").model.layers[0].self_attn)):
    """Knows the interface, and goes another way."""

    def forward(self, hidden_states, **kwargs):
        if hidden_states.shape[1] > 100:
            return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"], None
        return hidden_states, None


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (ByHelperAttention, "has attention code of its own"),
        (SkippingAttention, "ended without the attention"),
    ],
)
def test_a_layer_that_does_not_call_us_is_found_at_the_first_call(layer, why):
    model, given = make("llama", "eager"), inputs("llama")
    attn = layer(model.config, 1) if layer is SkippingAttention else layer()
    model.model.layers[1].self_attn = attn
    model.set_attn_implementation("parzen:biweight")
    message = (
        rf"cannot have parzen:biweight: its layer model\.layers\.1\.self_attn \({layer.__name__}\) {why}"
    )
    with pytest.raises(ValueError, match=message):
        model(**given)
    model.set_attn_implementation("eager")
    model(**given)


def test_the_first_call_is_watched_and_no_other():
    model, given = make("llama"), inputs("llama")
    hooked = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooked == [layer.self_attn for layer in model.model.layers]
    expected = copy.deepcopy(model)(**given).logits
    assert_close(pickle.loads(pickle.dumps(model))(**given).logits, expected)
    # One that ends by an exception says nothing.
    for _ in range(2):
        with pytest.raises(IndexError):
            model(given["input_ids"] + VOCAB)
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: seen.append(1))
    assert_close(model(**given).logits, expected)
    assert seen == [1]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in hooked]
    assert hooks == [(1, 0), (0, 0)]
    assert not hooked[0]._forward_hooks_always_called


def test_an_interrupted_first_call_leaves_nothing_behind():
    model, given = make("llama"), inputs("llama")

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(**given)
    handle.remove()
    model(**given)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Mamba", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCAB}),
        ("ResNet", {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}),
    ],
)
def test_a_model_without_attention_is_refused(name, fields):
    config, cls = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}Model")
    message = f"{name}Model cannot have parzen:biweight: it has no layer with an attention"
    with pytest.raises(ValueError, match=message):
        cls._from_config(config(**fields), attn_implementation="parzen:biweight")
    model = cls._from_config(config(**fields))
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("parzen:biweight")


@pytest.mark.parametrize("name", ["AlignText", "Aimv2Text"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_masks_that_transformers_leaves_out_for_layers_that_do_not_say_is_causal(name, side, witnessed):
    """The first is no decoder and has no ``is_causal``; the second is one, and has False."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "eos_token_id": 2})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager").eval()
    for p in model.parameters():
        p.data.mul_(4 if p.ndim == 2 else 1)
    given = inputs("bert")
    if side != "none":
        given["attention_mask"][0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        for kernel in ("gaussian", "biweight"):
            model.set_attn_implementation(witnessed(kernel))
            expected = model(**given).last_hidden_state
            model.set_attn_implementation(f"parzen:{kernel}")
            ours = model(**given).last_hidden_state
            assert_close(ours[seen], expected[seen], rtol=1e-4, atol=1e-4)
