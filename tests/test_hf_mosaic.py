"""The mosaic as a model of transformers: saved, loaded, trained, and generating one step a token."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from parzen import cli
from parzen.integrations.transformers import MosaicCache, MosaicForCausalLM, ParzenMosaicConfig, register
from parzen.lab.data.tokens import train_tokenizer
from parzen.lab.run import sweep
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import TrainConfig
from parzen.lab.tasks.length import LengthConfig
from parzen.lab.tasks.stories import StoriesConfig
from parzen.models.generate import generate
from parzen.models.mosaic import Mosaic, MosaicConfig

SMALL = MosaicConfig(40, 2, 2, 16, 8, "biweight", dropout=0.0)
OPTIONS = {
    "published": SMALL,
    "gated": MosaicConfig(40, 2, 2, 16, 8, "epanechnikov", gated_keys=True, dropout=0.0),
    "power_law": MosaicConfig(40, 1, 2, 16, 8, "relumax?margin=2", bandwidth="power_law", dropout=0.0),
}


def make(config=SMALL):
    model = MosaicForCausalLM(ParzenMosaicConfig.of(config, eos_token_id=0, pad_token_id=0)).eval()
    with torch.no_grad():
        # So that what is written depends on what was read.
        for block in model.mosaic.blocks:
            block.mixer.output.weight.mul_(8)
    return model


def prompt(length=7, batch=3):
    tokens = torch.randint(1, 40, (batch, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


# ---- configs, weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_configs_go_there_and_back(config, tmp_path):
    theirs = ParzenMosaicConfig.of(config, eos_token_id=3)
    assert theirs.mosaic() == config
    theirs.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is ParzenMosaicConfig
    assert again.mosaic() == config
    assert again.eos_token_id == 3


def test_the_defaults_are_the_published_model():
    assert ParzenMosaicConfig().mosaic() == MosaicConfig()


def test_bad_configs_are_refused():
    with pytest.raises(ValueError, match="heads must divide width"):
        ParzenMosaicConfig(num_attention_heads=5)
    with pytest.raises(ValueError, match="unknown kernel"):
        ParzenMosaicConfig(kernel="nope")
    register("biweight")
    with pytest.raises(ValueError, match=r"has its kernel in its config.*kernel='biweight'"):
        MosaicForCausalLM(ParzenMosaicConfig(attn_implementation="parzen:biweight"))


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_saved_and_loaded_it_is_the_same_bit_for_bit(config, tmp_path, monkeypatch):
    # What is left uninitialised is never right by luck.
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    model = make(config)
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    # No checkpoint holds the buffers.
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, again))
    assert_close(ours, theirs, rtol=0, atol=0)
    tokens = prompt()["input_ids"]
    assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_what_a_checkpoint_lacks_is_drawn_as_usual(tmp_path):
    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for key in ("mosaic.embedding.weight", "mosaic.blocks.0.mixer.bandwidth.sharpness"):
        del weights[key]
    save_file(weights, file, metadata={"format": "pt"})
    again = MosaicForCausalLM.from_pretrained(tmp_path)
    fresh = Mosaic(SMALL)
    assert abs(again.mosaic.embedding.weight.std() / fresh.embedding.weight.std() - 1) < 0.1
    assert_close(again.mosaic.blocks[0].mixer.bandwidth.sharpness, fresh.blocks[0].mixer.bandwidth.sharpness)
    assert_close(again.mosaic.blocks[1].mixer.output.weight, weights["mosaic.blocks.1.mixer.output.weight"])


def test_tokens_can_be_added():
    model = make()
    model.resize_token_embeddings(44, mean_resizing=False)
    assert model(torch.tensor([[43, 2]])).logits.shape == (1, 2, 44)
    assert model.config.mosaic().vocab == 44


# ---- forward -------------------------------------------------------------------------------------


def test_logits_and_loss_are_those_of_the_mosaic():
    model, tokens = make(), prompt()["input_ids"]
    out = model(tokens, labels=tokens)
    expected = model.mosaic(tokens)
    assert_close(out.logits, expected, rtol=0, atol=0)
    assert_close(out.loss, F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert_close(model(tokens, logits_to_keep=2).logits, expected[:, -2:])
    assert_close(model(tokens, logits_to_keep=torch.tensor([0, 3])).logits, expected[:, [0, 3]])
    assert_close(model(tokens, return_dict=False)[0], expected)


def padded(tokens):
    """The same tokens among others that are masked: left, right, and all over."""
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :3] = mask[1, 7:] = mask[2, [0, 5, 9]] = 0
    spread = torch.full((3, 10), 17)
    spread[mask.bool()] = tokens.flatten()
    return {"input_ids": spread, "attention_mask": mask}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_masked_tokens_are_not_read(config, use_cache):
    model, tokens = make(config), prompt()["input_ids"]
    given = padded(tokens)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        got = model(**given, use_cache=use_cache).logits
    assert_close(got[given["attention_mask"].bool()], expected.flatten(0, 1))
    # At the end of a padded row stands what follows its last token.
    assert_close(got[:, -1], expected[:, -1])


def test_reading_on_from_a_cache():
    model, tokens = make(), prompt(12)["input_ids"]
    with torch.no_grad():
        expected, cache, parts = model(tokens, use_cache=False).logits, None, []
        for part in tokens.split([1, 4, 1, 6], 1):
            out = model(part, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
        assert_close(torch.cat(parts, 1), expected)
        assert (cache.get_seq_length(), cache.batch_size) == (12, 3)
        with pytest.raises(ValueError, match="read 3 sequences, got 2"):
            model(tokens[:2], cache=cache)
        with pytest.raises(ValueError, match="cannot take back"):
            cache.crop(-1)
    with pytest.raises(ValueError, match="passes no gradients"):
        model(tokens, cache=cache)


def test_reordered_rows_go_on_as_the_rows_they_were():
    model, given = make(), padded(prompt()["input_ids"])
    order = torch.tensor([2, 0, 0, 1])
    following = torch.randint(1, 40, (4, 2))
    with torch.no_grad():
        cache = MosaicCache()
        model(**given, cache=cache)
        cache.reorder_cache(order)
        got = model(following, cache=cache).logits
        rows = [x[order] for x in given.values()]
        tokens = torch.cat((rows[0], following), 1)
        mask = torch.cat((rows[1], torch.ones_like(following)), 1)
        assert_close(got, model(tokens, attention_mask=mask, use_cache=False).logits[:, -2:])


def test_what_it_does_not_have_is_refused():
    model, tokens = make(), prompt()["input_ids"]
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=f"no {name}"):
            model(tokens, **{name: True})
    with pytest.raises(ValueError, match=r"attention_mask must be \(3, 7 or more\)"):
        model(tokens, attention_mask=torch.ones(3, 1, 7, 7))


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_greedy_generation_is_what_reading_everything_again_gives(config):
    model, given = make(config), prompt()
    model.generation_config.eos_token_id = None
    expected = generate(model.mosaic, given["input_ids"], 8, temperature=0)
    assert len(expected.unique()) > 4
    for use_cache in (True, False):
        got = model.generate(**given, max_new_tokens=8, do_sample=False, use_cache=use_cache)
        assert (got[:, 7:] == expected).all()
        left = {k: F.pad(x, (2, 0)) for k, x in given.items()}
        got = model.generate(**left, max_new_tokens=8, do_sample=False, use_cache=use_cache)
        assert (got[:, 9:] == expected).all()


def test_generation_takes_one_step_a_token(monkeypatch):
    model, given, lengths = make(), prompt(), []
    extend = model.mosaic.extend

    def counted(tokens, state):
        lengths.append(tokens.shape[1])
        return extend(tokens, state)

    monkeypatch.setattr(model.mosaic, "extend", counted)
    model.generation_config.eos_token_id = None
    model.generate(**given, max_new_tokens=5, do_sample=False)
    assert lengths == [7, 1, 1, 1, 1]


@pytest.mark.parametrize("how", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 3}])
def test_sampling_and_beams_do_not_depend_on_the_cache(how):
    model, given = make(), prompt()
    written = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        written.append(model.generate(**given, max_new_tokens=6, use_cache=use_cache, **how))
    assert (written[0] == written[1]).all()


def test_an_assistant_is_refused():
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        make().generate(**prompt(batch=1), assistant_model=make(), max_new_tokens=4)


def test_trainer_learns(tmp_path):
    model = make()
    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(1, 9)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] / 2


# ---- export --------------------------------------------------------------------------------------

TEXT = ["Once there was a cat. The cat sat on a mat.", "A dog ran to the red mat."] * 10


def weights(config):
    return {f"model.{key}": w for key, w in sweep.build(config).state_dict().items()}


@pytest.fixture
def run(tmp_path):
    """A run that has a checkpoint, of weights as they are drawn."""
    tokenizer = train_tokenizer(TEXT, 300)
    config = RunConfig(
        StoriesConfig(vocab=300, context=8), MosaicConfig(300, 1, 2, 16, 8, "triweight"), TrainConfig(1, 1)
    )
    run = Run.create(tmp_path / "runs", config)
    run.save("best", weights(config), {})
    (run.folder / "tokenizer.json").write_text(tokenizer.to_str())
    return run


def test_export(run, tmp_path, capsys):
    to = tmp_path / "exported"
    assert cli.main(["export", str(run.folder), "--to", str(to)]) == 0
    assert capsys.readouterr().out == f"saved {to}\n"
    assert not [p for p in to.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
    assert json.loads((to / "config.json").read_text())["kernel"] == "triweight"
    trained = sweep.best_model(run)
    text = "The cat ran to a mat."
    ids = tokenizer(text)["input_ids"]
    from tokenizers import Tokenizer

    assert ids == Tokenizer.from_file(str(run.folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text
    assert_close(model(torch.tensor([ids])).logits, trained(torch.tensor([ids])), rtol=0, atol=0)
    batch = tokenizer(["A dog", "Once there was"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    both = model.generate(**batch, max_new_tokens=4, do_sample=False)
    one = model.generate(**tokenizer(["A dog"], return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert (both[0, -4:] == one[0, -4:]).all()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def error(capsys, *argv):
    assert cli.main([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_export_says_what_is_wrong_in_one_line(run, tmp_path, capsys):
    assert "not the folder of a run" in error(capsys, "export", tmp_path, "--to", tmp_path / "a")
    assert "--to" in error(capsys, "export", run.folder)
    file = tmp_path / "file"
    file.touch()
    assert f"cannot write into {file}: it is a file" in error(capsys, "export", run.folder, "--to", file)
    assert "cannot write into /proc/x" in error(capsys, "export", run.folder, "--to", Path("/proc/x"))
    (run.folder / "tokenizer.json").unlink()
    assert "cannot read a tokeniser" in error(capsys, "export", run.folder, "--to", tmp_path / "a")
    (run.folder / "best.safetensors").unlink()
    assert "has no best.safetensors" in error(capsys, "export", run.folder, "--to", tmp_path / "a")


def test_export_of_another_task_is_refused(tmp_path, capsys):
    config = RunConfig(LengthConfig(), MosaicConfig(300, 1, 2, 16, 8), TrainConfig(1, 1))
    run = Run.create(tmp_path, config)
    run.save("best", weights(config), {})
    assert "no mosaic that was trained on stories" in error(
        capsys, "export", run.folder, "--to", tmp_path / "a"
    )
