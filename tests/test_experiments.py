"""The experiments from the command line, at a size that takes seconds."""

import json

import pytest
import torch

from parzen.cli import main
from parzen.lab.experiments import find_runs, regbench, run
from parzen.lab.reports.document import report
from parzen.lab.tasks.regbench import BAR, InContext, RegBenchConfig, load_regbench, score, summary, truth_of
from parzen.models.sequence import MIXERS, Mixer

# ---- RegBench ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regbench_runs(tmp_path_factory):
    runs = tmp_path_factory.mktemp("regbench")
    assert main(["regbench", "--scale", "tiny", "--models", "mosaic,mamba", "--runs", str(runs)]) == 0
    return runs


def test_every_model_has_scores_and_mosaics_say_what_their_kernel_does(regbench_runs):
    found = {run.config.name: run.results() for run in find_runs([regbench_runs])}
    assert set(found) == {"gaussian", "epanechnikov", "mamba"}
    for name, got in found.items():
        assert 0 < got["tvd"] < 1
        assert 0 <= got["accuracy_all"] <= 1
        assert got["parameters"] > 0
        assert len(got["by_position"]["loss"]) == len(got["by_position"]["count"]) > 256
        assert ("share_of_keys" in got) == (name != "mamba")
    assert found["gaussian"]["share_of_keys"] == 1 > found["epanechnikov"]["share_of_keys"]


def test_regbench_is_not_run_again_and_lists_n_grams(regbench_runs, capsys, monkeypatch):
    monkeypatch.setattr("parzen.lab.run.sweep.train", None)
    assert (
        main(["regbench", "--scale", "tiny", "--models", "mosaic,mamba", "--runs", str(regbench_runs)]) == 0
    )
    out = capsys.readouterr().out
    assert "3 runs, 3 of them done" in out
    rows = [line.split()[0] for line in out.split("────\n")[-1].splitlines()]
    assert rows[:2] == ["3-gram", "2-gram"]
    assert set(rows[3:]) == {"gaussian", "epanechnikov", "mamba"}


def test_a_run_can_be_evaluated_again(regbench_runs, tmp_path, capsys):
    run = next(r for r in find_runs([regbench_runs]) if r.config.name == "epanechnikov")
    assert main(["evaluate", str(run.folder), "--to", str(tmp_path / "again.json")]) == 0
    got = json.loads((tmp_path / "again.json").read_text())
    assert got["tvd"] == run.results()["tvd"]
    assert "support, layer 1" in capsys.readouterr().out
    assert main(["evaluate", str(run.folder), "--valid", str(tmp_path)]) == 2
    assert "--valid has no meaning for it" in capsys.readouterr().err
    assert main(["evaluate", str(run.folder), "--lengths", "8"]) == 2
    assert "--lengths has no meaning for it" in capsys.readouterr().err


def test_the_report_reads_regbench(regbench_runs, tmp_path, capsys):
    assert main(["report", str(regbench_runs), "--to", str(tmp_path)]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "TVD" in table
    assert "mamba" in table
    assert "| 3-gram | 1 layer" in table
    groups = json.loads((tmp_path / "summary.json").read_text())["groups"]
    assert {g["config"]["task"]["examples"] for g in groups} == {64}
    assert all({"tvd", "accuracy_last"} <= set(run["metrics"]) for g in groups for run in g["runs"])


def test_an_epoch_reads_every_instance_once_and_another_epoch_in_another_order():
    data = load_regbench(11, validation=2, test=2)
    task = InContext(data)

    def epoch(seed, number, size=4):
        batches = [task.batch(seed, number * 3 + i, size) for i in range(3)]
        return [tuple(row[row > 0].tolist()) for tokens, _ in batches for row in tokens]

    expected = sorted(tuple(i.tokens[:-1].tolist()) for i in data.train)
    assert sorted(epoch(0, 0)) == sorted(epoch(0, 1)) == sorted(epoch(1, 0)) == expected
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 1) == epoch(0, 1)


class Oracle(torch.nn.Module):
    """Says what the automaton says; rows come in order of length, as ``score`` gives them."""

    def __init__(self, instances, batch):
        super().__init__()
        ordered = sorted(instances, key=len)
        self.parts = [truth_of(ordered[i : i + batch]) for i in range(0, len(ordered), batch)]

    def forward(self, tokens):
        truth = self.parts.pop(0)
        assert truth.shape[:2] == tokens.shape
        truth[truth.sum(2) == 0] = 1 / 20
        return truth.log()


def test_the_automaton_itself_scores_perfectly():
    data = load_regbench(1, validation=1, test=20)
    got = summary(score(Oracle(data.test, 8), data.test, batch=8))
    assert got["accuracy_all"] == got["accuracy_last"] == 1
    assert got["tvd"] < 1e-6


def test_easier_automata():
    experiment = regbench.RegBenchSettings(scale="tiny", models=("s4",), states=4, letters=6)
    (config,) = regbench.plan(experiment, 64)
    task = config.task
    assert (task.states, task.letters) == ((4, 4), (6, 6))
    data = load_regbench(8, validation=1, test=1, bounds=task)
    assert all(len({t for t in i.tokens.tolist() if t != BAR}) <= 6 for i in data.train)
    again = type(config).from_json(json.loads(json.dumps(config.to_json())), "here", [RegBenchConfig])
    assert again == config
    assert isinstance(again.task, RegBenchConfig)


def test_n_grams_are_scored_in_batches_as_one_by_one():
    data = load_regbench(1, validation=1, test=5)
    for order, worst in ((1, 0.8), (2, 0.5)):
        scores = regbench.score_ngram(data.test, order, batch=2)
        alone = regbench.score_ngram(data.test, order, batch=1)
        assert scores.tvd == pytest.approx(alone.tvd, rel=1e-12)
        assert 0.1 < scores.tvd < worst


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mosaic,lstm"], "unknown name 'lstm'"),
        (["--models", "s4,s4"], "a name is given twice"),
        (["--states", "2"], "expected at most 1 edges"),
        (["--letters", "40"], "expected at most 18 letters"),
        (["--lr", "0"], "expected a number > 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments, message, tmp_path, capsys):
    assert main(["regbench", "--scale", "tiny", "--runs", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- a new mixer ---------------------------------------------------------------------------------


def test_a_new_mixer_trains_and_changes_no_table_of_the_paper(tmp_path, monkeypatch):
    before = {scale: regbench.plan(regbench.RegBenchSettings(scale), 64) for scale in regbench.SCALES}
    monkeypatch.setitem(MIXERS, "lazy", Mixer(lambda config: torch.nn.Identity()))
    for scale, planned in before.items():
        assert regbench.plan(regbench.RegBenchSettings(scale), 64) == planned
        (config,) = regbench.plan(regbench.RegBenchSettings(scale, models=("lazy",)), 64)
        assert config.name == "lazy"
    one = regbench.RegBenchSettings("tiny", models=("lazy",), runs=tmp_path)
    assert run(regbench.EXPERIMENT.trained, one) == 0
    (done,) = find_runs([tmp_path])
    assert done.finished
    report([done], tmp_path / "report")
    assert "lazy" in (tmp_path / "report" / "table.md").read_text()
