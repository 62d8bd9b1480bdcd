"""Runs on stories from the command line: the same batches, gone on with, evaluated, written on from."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from parzen.attention import attention_weights
from parzen.cli import main
from parzen.lab.data.text import generated_stories
from parzen.lab.experiments import find_runs
from parzen.lab.experiments.kernel_use import attention_map, kernel_use
from parzen.lab.run import sweep
from parzen.lab.tasks.stories import loss
from parzen.models.mosaic import ContextualMemory, Mosaic, MosaicConfig


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    path.write_text("".join(json.dumps(story) + "\n" for story in generated_stories(0, 40_000)))
    return path


SMALL = [
    *("--width", "16", "--heads", "2", "--slots", "8", "--vocab", "300", "--context", "16"),
    *("--batch", "2", "--tokens", "160"),
]


def command(text, runs, *more):
    return ["compare", "stories", "--data", str(text), "--runs", str(runs), *SMALL, *more]


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert main(command(text, runs, "--kernels", "gaussian,relumax?margin=2", "--seeds", "0", "1")) == 0
    return runs


def test_every_kernel_and_seed_has_a_finished_run(done):
    runs = find_runs([done])
    assert sorted((r.config.model.kernel, r.config.seed) for r in runs) == [
        ("gaussian", 0),
        ("gaussian", 1),
        ("relumax?margin=2", 0),
        ("relumax?margin=2", 1),
    ]
    for r in runs:
        got = r.results()
        assert got["tokens"] == 160
        assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))
        assert got["loss"] == pytest.approx(r.metrics()[-1]["loss"], rel=1e-6)
        assert len(got["loss_by_position"]) == 16
        assert len(got["support_by_position"]) == 15
        assert [len(row) for row in got["support"]] == [2]
        assert len(got["attention"]["words"]) == len(got["attention"]["layers"][0][0]) == 16
        gaussian = r.config.model.kernel == "gaussian"
        assert (got["share_of_keys"] == 1) == gaussian
        assert all((h is None) == gaussian for row in got["bandwidth"] for h in row)
        assert set(got["baselines"]) == {"unigram", "bigram"}


def test_finished_runs_are_not_done_again(done, text, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "train", None)
    assert main(command(text, done, "--kernels", "gaussian,relumax?margin=2", "--seeds", "0", "1")) == 0
    out = capsys.readouterr().out
    assert "160 training tokens a run\n4 runs, 4 of them done" in out
    assert out.count("relumax?margin=2") == 2


def test_a_run_that_fails_does_not_stop_the_others(text, tmp_path, capsys, monkeypatch):
    real = sweep.build

    def broken(config):
        model = real(config)
        if config.model.kernel == "gaussian":
            model.norm.weight.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(sweep, "build", broken)
    assert main(command(text, tmp_path, "--kernels", "gaussian,biweight")) == 1
    out = capsys.readouterr().err
    assert "failed: gaussian, 1 layer, seed 0: the loss became nan at step 1" in out
    assert [r.config.model.kernel for r in find_runs([tmp_path]) if r.finished] == ["biweight"]


def test_a_mistake_of_ours_ends_one_run_and_leaves_its_traceback(text, tmp_path, capsys, monkeypatch):
    real = sweep.build

    def broken(config):
        if config.model.kernel == "gaussian":
            raise RuntimeError("out of luck")
        return real(config)

    monkeypatch.setattr(sweep, "build", broken)
    arguments = command(text, tmp_path, "--kernels", "gaussian,biweight")
    assert main(arguments) == 1
    assert "failed: gaussian, 1 layer, seed 0: RuntimeError: out of luck (see " in capsys.readouterr().err
    runs = {r.config.model.kernel: r for r in find_runs([tmp_path])}
    assert runs["biweight"].finished
    error = runs["gaussian"].folder / "error.txt"
    assert "in broken\n" in error.read_text()
    monkeypatch.setattr(sweep, "build", real)
    assert main(arguments) == 0
    assert not error.exists()


def test_a_run_goes_on_from_its_folder_alone(text, done, tmp_path, capsys):
    """With its last checkpoint taken away it ends with the same numbers."""
    shutil.copytree(done, tmp_path / "runs")
    run = next(r for r in find_runs([tmp_path / "runs"]) if r.config.model.kernel != "gaussian")
    before = run.results(), run.metrics()
    for name in ("results.json", "last.safetensors", "best.safetensors", "metrics.jsonl"):
        (run.folder / name).unlink()
    assert main(["resume", str(run.folder)]) == 0
    assert "1 run, 0 of them done" in capsys.readouterr().out
    assert (run.results(), run.metrics()) == before
    (run.folder / "results.json").unlink()
    text_file = json.loads((run.folder / "text.json").read_text())
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(story) + "\n" for story in generated_stories(1, 40_000)))
    (run.folder / "text.json").write_text(json.dumps(text_file | {"data": str(other)}))
    assert main(["resume", str(run.folder)]) == 1
    assert f"{other} has changed since" in capsys.readouterr().err


def test_only_one_process_trains_a_run(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sweep.PATIENCE, "process", 0.3)
    arguments = command(text, tmp_path, "--kernels", "gaussian")
    assert main([*arguments, "--seeds", "1"]) == 0
    (run,) = find_runs([tmp_path])
    (run.folder / "results.json").unlink()
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); "
            "print('held', flush=True); time.sleep(60)",
            str(run.folder / "config.json"),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    assert main([*arguments, "--seeds", "1"]) == 1
    assert f"another process is training {run.folder}" in capsys.readouterr().err
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert main([*arguments, "--seeds", "1"]) == 0
    assert run.finished


class Elsewhere(torch.nn.Module):
    """Parameters on a device that is not the CPU, and a forward that minds where its input is."""

    def __init__(self, vocab):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
        self.vocab = vocab

    def forward(self, tokens):
        assert tokens.device == self.weight.device
        return torch.zeros(*tokens.shape, self.vocab)


def test_inputs_go_where_the_model_is():
    windows = torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5, dtype=torch.long)
    assert loss(Elsewhere(7), windows) == pytest.approx(math.log(7))
    assert kernel_use(Elsewhere(7), windows[0]) == {}


def test_minutes_become_tokens_once(text, tmp_path, capsys):
    arguments = command(text, tmp_path, "--kernels", "gaussian,biweight")
    at = arguments.index("--tokens")
    arguments[at : at + 2] = ["--minutes", "0.01"]
    assert main(arguments) == 0
    tokens = json.loads((tmp_path / "minutes.json").read_text())["tokens"]
    assert tokens % 32 == 0
    assert {r.results()["tokens"] for r in find_runs([tmp_path])} == {tokens}
    assert main(arguments) == 0
    assert "2 of them done" in capsys.readouterr().out


def test_evaluate_says_the_same_as_the_end_of_training(done, tmp_path, capsys):
    r = next(r for r in find_runs([done]) if r.config.model.kernel != "gaussian")
    assert main(["evaluate", str(r.folder), "--to", str(tmp_path / "e.json")]) == 0
    assert "bandwidth H, layer 1" in capsys.readouterr().out
    got = json.loads((tmp_path / "e.json").read_text())
    best = min(line["loss"] for line in r.metrics())
    assert got["loss"] == pytest.approx(best, rel=1e-6)


def test_evaluate_on_another_text(done, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(generated_stories(5, 5_000)))
    r = find_runs([done])[0]
    assert main(["evaluate", str(r.folder), "--valid", str(other), "--to", str(tmp_path / "e.json")]) == 0
    assert json.loads((tmp_path / "e.json").read_text())["loss"] > 0


def test_generate_is_seeded(done, capsys):
    folder = str(find_runs([done])[0].folder)
    outs = []
    for seed in ("1", "1", "2"):
        assert main(["generate", folder, "--prompt", "Once", "--tokens", "12", "--seed", seed]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0].startswith("Once")
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["runs"], "runs does not exist"),
        (["runs", "{tmp}"], "there is no run in"),
        # Before any text is read: it is not there.
        (["train", "stories", "--data", "{tmp}/no.txt", "--vocab", "10"], "--vocab must be at least 257"),
        (["train", "stories", "--data", "{tmp}/no.txt", "--dropout", "2"], "dropout must be in"),
        (["train", "stories", "--data", "{tmp}/no.txt", "--heads", "3"], "heads must divide width"),
        (["evaluate", "{tmp}"], "is not the folder of a run"),
        (["generate", "{tmp}/nowhere"], "is not the folder of a run"),
        (["train", "stories", "--data", "{tmp}/nothing.txt"], "nothing.txt"),
        (["train", "stories", "--kernel", "sparsmax"], "unknown kernel"),
        (
            ["train", "stories", "--data", "{text}", "--heads", "3", "--width", "16", "--tokens", "10"],
            "heads must divide width",
        ),
        (["train", "stories", "--data", "{text}", "--dropout", "2", "--tokens", "10"], "dropout must be in"),
        (["compare", "stories", "--tokens", "5", "--minutes", "1"], "not allowed with"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, words, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([a.format(tmp=tmp_path, text=text) for a in argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("parzen: error: ")
    assert err.count("\n") == 1


def test_kernel_use_against_the_weights_themselves():
    torch.manual_seed(0)
    model = Mosaic(MosaicConfig(vocab=11, layers=2, heads=2, width=16, slots=4, kernel="biweight")).eval()
    tokens = torch.randint(0, 11, (5, 9))
    got = kernel_use(model, tokens, batch=2)
    x = model.embedding(tokens)
    block = model.blocks[0]
    assert isinstance(block.mixer, ContextualMemory)
    query, key, scale = block.mixer.read(block.mixer_norm(x))
    w = attention_weights(query, key, is_causal=True, scale=scale, kernel="biweight")
    expected = (w.weights > 0).double().sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.tensor(got["support"][0], dtype=torch.float64), expected)
    h = w.bandwidth.double().mean((0, 2))
    torch.testing.assert_close(torch.tensor(got["bandwidth"][0], dtype=torch.float64), h, rtol=1e-6, atol=0)
    entropy = -(w.weights * w.weights.clamp_min(1e-30).log()).sum(-1).double().mean((0, 2))
    torch.testing.assert_close(
        torch.tensor(got["entropy"][0], dtype=torch.float64), entropy, rtol=1e-5, atol=1e-6
    )
    rows = attention_map(model, tokens[0])
    torch.testing.assert_close(torch.tensor(rows[0])[:, 1:, :-1], w.weights[0], rtol=0, atol=1e-4)
    assert not torch.tensor(rows[0])[:, 0].any()


def test_a_transformer_beside_a_mosaic_and_losses_for_tensorboard(text, tmp_path, capsys):
    chosen = ["--models", "mosaic,transformer,mamba", "--kernels", "biweight", "--tensorboard"]
    assert main(command(text, tmp_path, *chosen, "--positions", "nape")) == 0
    runs = {r.config.name: r for r in find_runs([tmp_path])}
    assert {*runs} == {"biweight", "transformer, biweight", "mamba"}
    assert runs["transformer, biweight"].config.model.positions == "nape"
    for name, r in runs.items():
        assert r.finished
        assert ("attention" in r.results()) == (name == "biweight")
        assert [*(r.folder / "tensorboard").glob("events.*")]
    out = capsys.readouterr().out
    assert "transformer, biweight" in out
    assert main(["generate", str(runs["mamba"].folder)]) == 2
    assert "is no mosaic that was trained on stories" in capsys.readouterr().err


def test_positions_that_do_not_exist(text, tmp_path, capsys):
    assert main(command(text, tmp_path, "--models", "transformer", "--positions", "left")) == 2
    assert "unknown positions 'left'; known: learned, none" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_trains_one_run_in_two_processes_and_one_speaks(text, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = command(text, tmp_path / "runs", "--kernels", "gaussian,biweight")
    done = subprocess.run(
        [*launch, "-m", "parzen", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("2 runs, 0 of them done") == 1
    assert all(r.finished for r in find_runs([tmp_path / "runs"]))


def test_runs_are_found(done, capsys):
    assert main(["runs", str(done)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "task", "model"]
    shown = {line.split()[0] for line in lines[2:]}
    assert shown == {str(r.folder) for r in find_runs([done])}
    assert all("finished" in line for line in lines[2:])
    assert main(["evaluate", str(done)]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == lines
    assert f"{done} is not the folder of a run but of those above; give one of them" in said.err


def test_a_run_that_is_damaged_is_listed_and_left_out_of_a_report(done, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "runs")
    first, second, *others = find_runs([tmp_path / "runs"])
    (first.folder / "config.json").write_text("{")
    log = second.folder / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert main(["runs", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr()
    assert str(first.folder) in said.out
    assert f"parzen: warning: {first.folder / 'config.json'} is damaged" in said.err
    assert main(["report", str(tmp_path / "runs"), "--to", str(tmp_path / "to")]) == 1
    said = capsys.readouterr().err
    assert f"parzen: warning: left out: {first.folder / 'config.json'} is damaged" in said
    assert f"parzen: warning: left out: {log} is damaged: the run is finished, and it ends at step" in said
    assert "remove" not in said
    table = json.loads((tmp_path / "to" / "summary.json").read_text())
    runs = {run["run"] for group in table["groups"] for run in group["runs"]}
    assert runs == {run.folder.name for run in others}


def test_a_run_that_is_asked_to_end_saves_and_is_gone_on_with(text, tmp_path, capsys):
    """SIGTERM, of Slurm or Docker: status 143, what it said how to go on, and no step is done twice."""
    arguments = command(text, tmp_path, "--kernels", "biweight")
    arguments[arguments.index("--tokens") + 1] = "64000"
    process = subprocess.Popen(
        [sys.executable, "-m", "parzen", *arguments, "--save-seconds", "9999"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for line in process.stdout:
        if "step" in line:
            break
    process.terminate()
    said = process.stdout.read()
    assert process.wait(60) == 143
    process.stdout.close()
    (run,) = find_runs([tmp_path])
    assert f"the same command goes on from here, or: parzen resume {run.folder}\n" in said
    saved = run.load("last")[1]["step"]
    assert 0 < saved < 2000
    assert main(["resume", str(run.folder)]) == 0
    out = capsys.readouterr().out
    steps = [int(n) for n in re.findall(r"step (\d+)/2000", out)]
    assert min(steps) > saved
    assert steps[-1] == 2000
    # The table is the last thing.
    last = out.splitlines()[-1].split()
    assert (last[0], last[-1]) == ("biweight", run.folder.name)


def test_a_damaged_config_is_not_taken_for_a_finished_run(done, text, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "runs")
    again = command(text, tmp_path / "runs", "--kernels", "gaussian,relumax?margin=2", "--seeds", "0", "1")
    run = find_runs([tmp_path / "runs"])[0]
    config = run.folder / "config.json"
    config.write_text(
        config.read_text().replace("gaussian", "biweight").replace("relumax?margin=2", "biweight")
    )
    assert main(again) == 2
    assert "does not belong to its folder" in capsys.readouterr().err
    config.write_text("{")
    assert main(again) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_finished_run_without_weights_says_how_to_get_them(done, tmp_path, capsys):
    run = find_runs([done])[0]
    shutil.copytree(run.folder, tmp_path / run.folder.name)
    (tmp_path / run.folder.name / "best.safetensors").unlink()
    assert main(["evaluate", str(tmp_path / run.folder.name)]) == 2
    said = capsys.readouterr().err
    assert "move its results.json and last.safetensors aside, and it is trained again" in said
    assert "remove" not in said


def test_a_prompt_that_is_no_text(done, capsys):
    assert main(["generate", str(find_runs([done])[0].folder), "--prompt", "a\udcff"]) == 2
    assert capsys.readouterr().err == "parzen: error: the prompt is not UTF-8\n"
