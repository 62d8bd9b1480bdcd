"""Length generalisation: the command, its samples, and what it measures."""

import json
import resource
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parzen.attention import attention_weights
from parzen.cli import main
from parzen.lab.errors import UserError
from parzen.lab.experiments import claims, find_runs, kernel_use, length, open_run
from parzen.lab.run.config import RunConfig
from parzen.lab.run.sweep import best_model, build
from parzen.lab.run.train import Storage, train
from parzen.lab.tasks.length import TASKS, LengthConfig, Lengths, score, to_device, written
from parzen.lab.tasks.mqmtar import MQMTAR
from parzen.lab.tasks.sequence import Samples, exact_match
from parzen.lab.tasks.sort import Sort
from parzen.lab.tasks.task import IGNORED
from parzen.models.generate import TransformerReader
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import SequenceConfig, SequenceModel

COMMAND = ["length", "--task", "sort", "--scale", "tiny", "--models", "mosaic,transformer"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("length")
    assert main([*COMMAND, "--steps", "5", "--runs", str(folder)]) == 0
    return folder


# ---- the command ---------------------------------------------------------------------------------


def test_every_run_is_measured_at_every_length(runs):
    found = {run.config.name: run.results() for run in find_runs([runs])}
    assert set(found) == {
        "gaussian",
        "biweight",
        "transformer",
        "transformer, ssmax",
        "transformer, biweight",
        "transformer, biweight, asentmax",
    }
    for name, got in found.items():
        for key in ("exact_match", "token_accuracy", "token_accuracy_generated"):
            assert list(got[key]) == ["3", "6"]
            assert all(0 <= value <= 1 for value in got[key].values())
        assert got["samples"] == {"3": 40, "6": 40}
        assert got["loss"] == got["validation"]["loss"] > 0
        layers, heads = 1, 2
        for table in got["heads"].values():
            assert np.shape(table["right_weight"]) == np.shape(table["support"]) == (layers, heads)
        assert 0 < got["right_weight"]["3"] <= 1
        assert ("share_of_keys" in got) == (name in ("gaussian", "biweight"))
        assert got["escape_step"] is None
    assert found["gaussian"]["mean_support"]["6"] > found["biweight"]["mean_support"]["6"]
    assert found["biweight"]["heads"]["6"]["bandwidth"][0][0] > 0
    assert found["gaussian"]["heads"]["6"]["bandwidth"] == [[None, None]]


def test_what_is_finished_is_not_run_again(runs, capsys, monkeypatch):
    monkeypatch.setattr("parzen.lab.run.sweep.train", None)
    assert main([*COMMAND, "--steps", "5", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "6 runs, 6 of them done" in out
    header, _, *rows = out.splitlines()[-8:]
    assert header.split() == ["model", "seed", "3", "6", "escape", "step", "run"]
    assert [row.split("  ")[0] for row in rows[-2:]] == [
        "transformer, biweight, nape",
        "transformer, biweight, asentmax, nape",
    ]


def test_configs_come_back_from_their_json(runs):
    for run in find_runs([runs]):
        assert (
            RunConfig.from_json(json.loads(json.dumps(run.config.to_json())), "here", [LengthConfig])
            == run.config
        )
        assert isinstance(run.config.task, LengthConfig)


def test_the_ledger_finds_exact_match_by_length(runs, tmp_path):
    assert main(["report", str(runs), "--to", str(tmp_path / "length" / "sort")]) == 0
    place = claims.Place("sort", "length/sort", (("model.kind", "mosaic"),))
    scores = claims.Results(tmp_path).scores(place, claims.exact(3, 6))
    assert set(scores) == {"gaussian", "biweight"}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"models": ("transformer",)}, 4),
        ({"models": ("transformer",), "kernels": ("gaussian",), "bandwidths": ("fixed", "power_law")}, 2),
        ({"models": ("transformer",), "positions": ("none", "rotary", "alibi", "nape", "learned")}, 20),
        ({"bandwidths": ("published", "power_law"), "kernels": ("gaussian",), "seeds": (0, 1)}, 4),
        ({}, 8),
    ],
)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_plan_names_its_runs_apart(task, scale, options, count):
    configs = length.plan(length.LengthSettings(task, scale, **options))
    assert len({config.digest() for config in configs}) == len(configs) == count
    for config in configs[:1]:
        assert config.task.name == task
        assert config.model.vocab == config.task.task().vocab
    if scale == "small":
        assert configs[0].train.steps * configs[0].train.batch * configs[0].task.row(16) < 12e6


def test_tokens_become_steps():
    (config,) = length.plan(length.LengthSettings("copy", kernels=("gaussian",), tokens=100_000))
    a_step = config.train.batch * 34
    assert config.task.row(16) == 34
    assert (config.train.steps - 1) * a_step < 100_000 <= config.train.steps * a_step


def test_escape_is_the_first_evaluation_above_a_half(runs, monkeypatch):
    lines = [{"step": s, "exact_match": e} for s, e in ((5, 0.1), (10, 0.5), (15, 0.6), (20, 0.9))]
    (run, *_) = find_runs([runs])
    model = best_model(run)
    for count, step in ((4, 15), (3, 15), (2, None)):
        monkeypatch.setattr(run, "metrics", lambda n=count: lines[:n])
        assert length.measure(run, model)["escape_step"] == step


def test_other_lengths_are_measured_and_kept(runs, tmp_path, capsys):
    run = next(r for r in find_runs([runs]) if r.config.name == "biweight")
    folder = shutil.copytree(run.folder, tmp_path / run.folder.name)
    before = open_run(folder).results()
    command = ["evaluate", str(folder), "--lengths", "3,12"]
    assert main([*command, "--to", str(tmp_path / "got.json")]) == 0
    got = json.loads((tmp_path / "got.json").read_text())
    assert got["samples"] == {"3": 40, "12": 40}
    assert got["exact_match"]["3"] == before["exact_match"]["3"]
    assert open_run(folder).results() == before
    assert main([*command, "--keep"]) == 0
    after = open_run(folder).results()
    assert after.keys() == before.keys()
    for name in ("exact_match", "samples", "heads", "mean_support"):
        assert list(after[name]) == ["3", "6", "12"]
        assert after[name]["12"] == got[name]["12"]
        assert after[name]["6"] == before[name]["6"]
    assert after["validation"] == before["validation"]
    capsys.readouterr()
    (folder / "results.json").unlink()
    for arguments, message in (
        (["--lengths", "12", "--keep"], "is not finished"),
        (["--lengths", "12,3"], "in ascending order"),
        (["--lengths", "0"], "whole number ≥ 1"),
        (["--keep"], "--keep goes with --lengths"),
    ):
        assert main(["evaluate", str(folder), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_learned_positions_end(tmp_path, capsys):
    arguments = ["--positions", "learned", "--kernels", "gaussian", "--steps", "1", "--runs", str(tmp_path)]
    assert main(["length", "--task", "sort", "--scale", "tiny", "--models", "transformer", *arguments]) == 0
    folder = str(find_runs([tmp_path])[0].folder)
    assert main(["evaluate", folder, "--lengths", "4"]) == 0
    assert main(["evaluate", folder, "--lengths", "7"]) == 2
    assert "16 tokens are more than the 14 positions that were learned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "add"], "invalid choice: 'add'"),
        ([], "required: --task"),
        (["--task", "sort", "--models", "mosaic,mamba"], "unknown name 'mamba'"),
        (["--task", "sort", "--lengths", "32,16"], "test lengths in ascending order, got (32, 16)"),
        (["--task", "sort", "--lengths", "16,x"], "such as 1000 or 1e6, got 'x'"),
        (["--task", "mqmtar", "--lengths", "5"], "room for 1 pair(s)"),
        (["--task", "mqmtar", "--lengths", "8,65536"], "at most 16 pairs, one a key, got 8738"),
        (["--task", "sort", "--kernels", "gauss"], "gauss"),
        (["--task", "sort", "--models", "transformer", "--bandwidths", "published"], "unknown bandwidth"),
        (["--task", "sort", "--positions", "sine"], "unknown name 'sine'"),
        (["--task", "sort", "--tokens", "9", "--steps", "9"], "not allowed with argument"),
        (["--task", "sort", "--lr", "-1"], "expected a number > 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments, message, tmp_path, capsys):
    assert main(["length", "--scale", "tiny", "--runs", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "add"}, "unknown task 'add'"),
        ({"shortest": 17}, r"got \(17, 16\); swap them"),
        ({"lengths": ()}, "ascending order"),
        ({"lengths": (16, 16)}, "ascending order"),
        ({"test": 0}, "expected test of 1 or more"),
        ({"symbols": 1}, "2 or more symbols"),
        ({"name": "mqmtar", "symbols": 64}, "room for 2 pair"),
    ],
)
def test_bad_configs_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        LengthConfig(**options)


# ---- samples -------------------------------------------------------------------------------------

SMALL = {
    name: LengthConfig(name, shortest=12, symbols=64 if name == "mqmtar" else 32, validation=300, test=300)
    for name in TASKS
}
every_task = pytest.mark.parametrize("data", SMALL.values(), ids=SMALL)


@every_task
def test_training_validation_and_tests_share_no_sample(data):
    task = Lengths(data)

    def rows(tokens):
        return {tuple(row[row != task.task.pad].tolist()) for row in tokens}

    steps = [rows(task.batch(seed, step, 100)[0]) for seed in (0, 1) for step in range(3)]
    others = [
        set().union(*(rows(batch.tokens) for batch in data.samples("validation", 300, (12, 16)))),
        *(set().union(*(rows(b.tokens) for b in data.samples("test", 300, at))) for at in data.lengths),
    ]
    assert len(set().union(*steps, *others)) == 600 + 300 + 4 * 300


@every_task
def test_a_step_is_the_same_whenever_it_is_drawn_and_batches_are_small(data):
    task = Lengths(data)
    for one, other in zip(task.batch(3, 7, 16), Lengths(data).batch(3, 7, 16), strict=True):
        assert torch.equal(one, other)
    sizes = [batch.tokens.numel() for batch in data.samples("test", 300, 128)]
    assert max(sizes) <= 2**14
    assert len(sizes) > 1
    whole = torch.cat([batch.tokens for batch in data.samples("test", 300, 128)])
    assert torch.equal(whole, data.task().batch(0, "test", range(300), 128).tokens)


def test_longer_tests_have_fewer_samples():
    data = LengthConfig(test=1000)
    assert [data.tests(at) for at in (16, 128, 129, 1024, 1025)] == [1000, 1000, 100, 100, 10]
    assert LengthConfig(test=1).tests(10**4) == 1


# ---- what is measured ----------------------------------------------------------------------------

EASY = LengthConfig("copy", 2, 3, (3, 6), symbols=4, validation=100, test=100)


def trained(model, steps=150):
    setting = length.SCALES["tiny"]["copy"]
    recipe = setting.mosaic if isinstance(model, MosaicConfig) else setting.transformer
    schedule = length._training(length.LengthSettings("copy", "tiny", steps=steps), recipe, EASY)
    config = RunConfig(EASY, model, schedule)
    network = build(config)
    train(network, Lengths(EASY), schedule, 0, Storage())
    return network.eval()


VOCAB = EASY.task().vocab
BIWEIGHT = "biweight"
MODELS = {
    "mosaic": MosaicConfig(VOCAB, 2, 2, 32, 32, BIWEIGHT, dropout=0.0),
    "power_law": MosaicConfig(VOCAB, 2, 2, 32, 32, BIWEIGHT, dropout=0.0, bandwidth="power_law"),
    "transformer": SequenceConfig(VOCAB, 32, 2, heads=2, positions="nape", bandwidth="ssmax", dropout=0.0),
    "learned": SequenceConfig(VOCAB, 32, 2, heads=2, max_length=20, kernel=BIWEIGHT, dropout=0.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_an_exact_match_where_the_given_target_is(name):
    model = trained(MODELS[name])
    reader = TransformerReader(model) if isinstance(model, SequenceModel) else model
    verdicts = []
    for at in EASY.lengths:
        batch = EASY.task().batch(0, "test", range(100), at)
        with torch.no_grad():
            expected = exact_match(model(batch.tokens), batch.labels)
        said, due = written(reader, batch)
        assert torch.equal((said == due).all(1), expected)
        assert torch.equal(due, batch.labels[batch.labels != IGNORED].view(100, -1))
        verdicts += expected.tolist()
    assert 5 < sum(verdicts) < 195


@pytest.mark.parametrize("positions", ["learned", "none", "rotary", "alibi", "nape"])
@pytest.mark.parametrize("bandwidth", ["fixed", "ssmax", "asentmax", "power_law"])
def test_a_transformer_reads_on_as_it_reads(positions, bandwidth):
    config = SequenceConfig(9, 24, 3, heads=4, positions=positions, bandwidth=bandwidth, kernel=BIWEIGHT)
    model = SequenceModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(9, (2, 13))
    whole = model(tokens)
    reader = TransformerReader(model)
    got, state = reader.prefill(tokens[:, :4])
    assert_close(got, whole[:, 3])
    got, state = reader.prefill(tokens[:, 4:7], state)
    assert_close(got, whole[:, 6])
    for t in range(7, 13):
        got, state = reader.step(tokens[:, t], state)
        assert_close(got, whole[:, t])


def test_only_a_transformer_is_read_on():
    with pytest.raises(ValueError, match="got 's4'"):
        TransformerReader(SequenceModel(SequenceConfig(9, 8, 1, mixer="s4")))


def test_generation_needs_sources_of_one_length():
    batch = EASY.task().batch(0, "test", range(9), (2, 3))
    with pytest.raises(ValueError, match="of one length; got several"):
        written(Mosaic(MODELS["mosaic"]), batch)


class Solver(torch.nn.Module):
    """Says what the labels ask, but for some samples."""

    def __init__(self, batches, wrong):
        super().__init__()
        self.batches, self.left = iter(batches), wrong
        self.anchor = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens):
        batch = next(self.batches)
        said = batch.labels.clamp(min=0)
        for row in range(min(self.left, len(said))):
            said[row, batch.lengths[row] - 1] = 0
        self.left = max(0, self.left - len(said))
        return 30.0 * torch.nn.functional.one_hot(said, VOCAB)


def test_scores_are_over_all_batches():
    task = EASY.task()
    batches = [task.batch(0, "test", range(i, i + 10), 3) for i in range(0, 30, 10)]
    got = score(Solver(batches, 3), batches)
    assert got["exact_match"] == pytest.approx(0.9)
    # One of four labels, in three samples of thirty.
    assert got["token_accuracy"] == pytest.approx(1 - 0.1 / 4)
    assert got["loss"] == pytest.approx(30 * 0.1 / 4, abs=1e-6)


# ---- the right keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mosaic", "transformer"])
@pytest.mark.parametrize("name", ["mqmtar", "sort"])
def test_weights_on_the_right_keys(kind, name):
    data = SMALL[name]
    task = data.task()
    if kind == "mosaic":
        config = MosaicConfig(task.vocab, 2, 2, 16, 8, BIWEIGHT, bandwidth="power_law")
        model = Mosaic(config).eval()
    else:
        config = SequenceConfig(
            task.vocab, 16, 2, heads=2, positions="nape", bandwidth="ssmax", kernel=BIWEIGHT
        )
        model = SequenceModel(config).eval()
    batch = task.batch(0, "test", range(3), 16)
    found = length.attention_use(model, task, batch)

    # The same by the definition: the whole map of the first layer, and one query after the other.
    with torch.no_grad():
        x = model.blocks[0].mixer_norm(model.embedding(batch.tokens))
        if kind == "mosaic":
            query, key, scale = model.blocks[0].mixer.read(x)
            weights = attention_weights(query, key, is_causal=True, scale=scale, kernel=BIWEIGHT).weights
            weights = torch.nn.functional.pad(weights, (0, 1, 1, 0))
        else:
            weights = model.blocks[0].mixer.weights(x).weights
    on_right, support = [], []
    for row in range(3):
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        sep = tokens.index(task.sep)
        origins = task.origins(batch.tokens[row, 1:sep].numpy())
        for n, t in enumerate(range(sep, len(tokens))):
            support.append((weights[row, :, t] > 0).sum(1).double())
            if n < len(origins) and origins[n].any():
                (places,) = np.flatnonzero(origins[n])[None] + 1
                assert all(tokens[p] == labels[t] for p in places)
                places = places - (kind == "mosaic")
                on_right.append(weights[row, :, t, places].sum(1).double())
    assert_close(torch.tensor(found["right_weight"][0]).double(), torch.stack(on_right).mean(0))
    assert_close(torch.tensor(found["support"][0]).double(), torch.stack(support).mean(0))


def test_weights_do_not_depend_on_how_many_are_held(monkeypatch):
    data = SMALL["reverse"]
    task = data.task()
    batch = task.batch(0, "test", range(3), 32)
    for config in (
        MosaicConfig(task.vocab, 1, 2, 16, 8, BIWEIGHT, bandwidth="ssmax"),
        SequenceConfig(task.vocab, 16, 1, heads=2, positions="rotary", bandwidth="asentmax", kernel=BIWEIGHT),
    ):
        model = Mosaic(config) if isinstance(config, MosaicConfig) else SequenceModel(config)
        whole = length.attention_use(model.eval(), task, batch)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_use, "WEIGHTS", 1)
            parts = length.attention_use(model, task, batch)
        for key, value in whole.items():
            assert np.array(parts[key], float) == pytest.approx(np.array(value, float), abs=1e-6, nan_ok=True)


def test_a_model_without_attention_has_none_to_show():
    task = EASY.task()
    model = SequenceModel(SequenceConfig(task.vocab, 8, 1, mixer="s4")).eval()
    assert length.attention_use(model, task, task.batch(0, "test", [0], 3)) == {}


# ---- long ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mosaic", "transformer"])
def test_a_sample_of_65536_fits_into_memory(kind):
    data = replace(
        length.SCALES["paper"]["mqmtar"].data, lengths=(65_536,), test=1, validation=1, symbols=128
    )
    vocab = data.task().vocab
    model = (
        SequenceConfig(vocab, 32, 1, heads=4, positions="nape", bandwidth="asentmax", kernel=BIWEIGHT)
        if kind == "transformer"
        else MosaicConfig(vocab, 1, 4, 32, 64, BIWEIGHT)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    network = SequenceModel(model) if kind == "transformer" else Mosaic(model)
    got = length.results(network.eval(), SimpleNamespace(task=data))
    assert got["samples"] == {"65536": 1}
    assert got["token_accuracy_generated"] == {}
    assert 0 <= got["right_weight"]["65536"] <= 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2 * 2**20, f"{grown / 2**20:.1f} GiB"
    batch = to_device(next(data.samples("test", 1, 65_536)), network)
    assert batch.tokens.shape[1] == MQMTAR().sample(0, "test", 0, 65_536)[0].size + 14


def test_the_report_has_a_figure_and_a_column_for_each_length(runs, tmp_path):
    assert main(["report", str(runs), "--to", str(tmp_path)]) == 0
    assert {"length.png", "length.svg"} <= {path.name for path in tmp_path.iterdir()}
    header = (tmp_path / "table.md").read_text().splitlines()[0]
    assert "| exact match, 3 | exact match, 6 |" in header
    assert "exact_match.6_interval" in (tmp_path / "table.csv").read_text().splitlines()[0]


# ---- a new task ----------------------------------------------------------------------------------


def test_a_task_whose_targets_differ_in_length_is_refused_at_once(monkeypatch):
    class Uneven(Sort):
        def _draw(self, *arguments):
            source, lengths, target, _ = super()._draw(*arguments)
            return Samples(source, lengths, target, lengths - np.arange(len(lengths)) % 2)

    monkeypatch.setitem(TASKS, "uneven", lambda c: Uneven(c.symbols))
    with pytest.raises(UserError, match="expected sources, and targets, of one length"):
        length.plan(length.LengthSettings("uneven", "tiny"))
