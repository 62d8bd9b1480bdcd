"""The loop and its runs: resumed bit for bit, killed at any moment, cut into parts, never overwritten."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parzen.lab.errors import UserError
from parzen.lab.experiments import find_runs, open_run
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import Progress, Storage, TrainConfig, optimizer_of, train
from parzen.lab.tasks.stories import StoriesConfig
from parzen.lab.tasks.task import IGNORED
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.models.sequence import SequenceConfig, SequenceModel

MODEL = MosaicConfig(vocab=17, layers=1, heads=2, width=16, slots=8, kernel="biweight", dropout=0.1)
TRAIN = TrainConfig(steps=12, batch=4, lr=1e-2, evaluate_every=4)
CONFIG = RunConfig(StoriesConfig("a", "b", "c", 17, 10), MODEL, TRAIN, seed=3)


class Cycle:
    """Predict the next of 0 1 2 … 16 0 1 …; some targets do not count."""

    vocab = 17

    def batch(self, seed, step, size):
        g = torch.Generator().manual_seed(seed * 1000 + step)
        start = torch.randint(0, 17, (size, 1), generator=g)
        tokens = (start + torch.arange(11)) % 17
        targets = tokens[:, 1:].clone()
        targets[::2, :3] = IGNORED
        return tokens[:, :-1], targets

    @torch.no_grad()
    def evaluate(self, model):
        inputs, targets = self.batch(99, 0, 8)
        logits = model(inputs).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).item()}


def model_of(config=CONFIG):
    torch.manual_seed(config.seed)
    return Mosaic(config.model)


def go(run, config=CONFIG, **options):
    model = model_of(config)
    train(model, Cycle(), config.train, config.seed, run, **options)
    return model


class StopHereError(Exception):
    pass


def stop_at(step):
    def report(progress: Progress) -> None:
        if progress.step == step:
            raise StopHereError

    return report


def logs(run):
    return (run.folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: its weights and its log."""
    run = Run.create(tmp_path_factory.mktemp("whole"), CONFIG)
    return go(run).state_dict(), logs(run)


def test_it_learns_and_logs(whole):
    lines = [json.loads(line) for line in whole[1].splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[-1]["tokens"] == 12 * 4 * 10
    assert lines[-1]["loss"] < lines[0]["loss"] < math.log(17) * 1.1


@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, whole, step):
    run = Run.create(tmp_path, CONFIG)
    with pytest.raises(StopHereError):
        go(run, report=stop_at(step), save_seconds=0)
    again = Run.create(tmp_path, CONFIG)
    assert again.folder == run.folder
    seen = []
    weights = go(again, report=lambda p: seen.append(p.step)).state_dict()
    # A checkpoint is written after each step before its report.
    assert seen == list(range(step + 1, 13))
    assert logs(run) == whole[1]
    assert all(torch.equal(weights[name], t) for name, t in whole[0].items())


def test_lines_after_the_last_checkpoint_are_not_logged_twice(tmp_path, whole):
    run = Run.create(tmp_path, CONFIG)
    with pytest.raises(StopHereError):
        go(run, report=stop_at(6), save_seconds=3600)
    assert logs(run)
    go(run)
    assert logs(run) == whole[1]


def test_micro_batches_are_fresh_parts_of_the_batch(whole):
    class Recorder(Storage):
        lines = ()

        def log(self, record, file="metrics.jsonl"):
            if file == "metrics.jsonl":
                self.lines = (*self.lines, record)

    still = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, dropout=0.0))
    results = []
    for parts in (1, 2, 4):
        keeper = Recorder()
        go(keeper, dataclasses.replace(still, train=dataclasses.replace(TRAIN, accumulate=parts)))
        results.append([line["train_loss"] for line in keeper.lines])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
import test_train as t
# Sums depend on how many threads share them: as many as in conftest.py.
torch.set_num_threads(1)
run = t.Run.create(Path({root!r}), t.CONFIG)
t.go(run, report=lambda p: print(p.step, flush=True), save_seconds=0)
"""


def test_kill_at_any_moment(tmp_path, whole):
    """Killed again and again at times of no particular meaning, the run still ends with the same bytes."""
    code = KILLED.format(tests=os.path.dirname(__file__), root=str(tmp_path))
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    run = Run.create(tmp_path, CONFIG)
    weights = go(run).state_dict()
    assert logs(run) == whole[1]
    assert all(torch.equal(weights[name], t) for name, t in whole[0].items())
    assert not [p for p in run.folder.iterdir() if p.name.startswith(".")]


WORKER = """
import dataclasses, json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
import test_train as t
torch.set_num_threads(1)
config = dataclasses.replace(t.CONFIG, model=dataclasses.replace(t.MODEL, dropout=0.0))
run = t.Run.create(Path({root!r}), config)
t.go(run, config)
"""


def test_two_processes_train_like_one(tmp_path):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, dropout=0.0))
    one = Run.create(tmp_path / "one", config)
    go(one, config)
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=os.path.dirname(__file__), root=str(tmp_path / "two")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    two = Run.create(tmp_path / "two", config)
    assert len(two.metrics()) == 3
    for a, b in zip(two.metrics(), one.metrics(), strict=True):
        assert a["step"] == b["step"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path, damage):
    run = Run.create(tmp_path, CONFIG)
    with pytest.raises(StopHereError):
        go(run, report=stop_at(6), save_seconds=0)
    path = run.folder / "last.safetensors"
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "garbage": b"x" * 100, "empty": b""}[damage])
    before = (path.read_bytes(), logs(run))
    with pytest.raises(UserError, match=r"last\.safetensors cannot be read"):
        go(run)
    assert (path.read_bytes(), logs(run)) == before


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    class Broken(Cycle):
        def batch(self, seed, step, size):
            if step == 7:
                with torch.no_grad():
                    model.embedding.weight.fill_(math.nan)
            return super().batch(seed, step, size)

    run = Run.create(tmp_path, CONFIG)
    model = model_of()
    with pytest.raises(UserError, match=r"the loss became nan at step 8; try a smaller learning rate"):
        train(model, Broken(), TRAIN, 3, run, save_seconds=0)
    loaded = run.load("last")
    assert loaded is not None
    assert loaded[1]["step"] == 7
    assert all(t.isfinite().all() for t in loaded[0].values())


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    run = Run.create(tmp_path, CONFIG)
    with pytest.raises(StopHereError):
        go(run, report=stop_at(5), save_seconds=0)
    before = (run.folder / "last.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        go(run, save_seconds=0)
    assert (run.folder / "last.safetensors").read_bytes() == before


def test_the_hash_names_the_folder(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    assert run.folder.name == CONFIG.digest()
    assert open_run(run.folder).config == CONFIG
    other = dataclasses.replace(CONFIG, seed=4)
    assert other.digest() != CONFIG.digest()
    assert [r.config for r in find_runs([tmp_path])] == [CONFIG]
    text = (run.folder / "config.json").read_text().replace('"seed": 3', '"seed": 4')
    (run.folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="does not belong to its folder"):
        open_run(run.folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("task"), "no 'task'"),
        (lambda c: c["model"].update(kind="lstm"), "kind 'lstm' is unknown; known: mosaic"),
        (lambda c: c["model"].update(depth=3), "MosaicConfig has no depth"),
        (lambda c: c["model"].update(heads=5), "heads must divide width"),
        (lambda c: c["train"].update(batch=0), "batch must be at least 1"),
        (lambda c: c["train"].update(precision="fp8"), "precision must be one of"),
    ],
)
def test_a_config_that_cannot_be_used(change, words):
    data = json.loads(json.dumps(CONFIG.to_json()))
    change(data)
    with pytest.raises(UserError, match=words):
        RunConfig.from_json(data, "config.json", [StoriesConfig])


def test_places_without_runs(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="there is no run"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="not the folder of a run"):
        open_run(tmp_path)


def test_decay_and_rates_by_kind_of_parameter():
    groups = optimizer_of(model_of(), dataclasses.replace(TRAIN, norm_lr=30.0, scalar_lr=0.1)).param_groups
    by_rate = {round(g["peak"], 6): g for g in groups}
    assert by_rate[0.01]["weight_decay"] == 0.1
    assert all(p.ndim >= 2 for p in by_rate[0.01]["params"])
    assert by_rate[0.3]["weight_decay"] == by_rate[0.001]["weight_decay"] == 0
    assert len(by_rate[0.3]["params"]) == 3  # two norms of the block and the last one
    assert sum(len(g["params"]) for g in groups) == len(list(model_of().parameters()))


def test_time_scales_learn_slowly_and_do_not_decay():
    model = SequenceModel(SequenceConfig(20, 16, 2, "s4", 2, dropout=0.0))
    config = dataclasses.replace(TRAIN, lr=5e-3, weight_decay=0.1)
    groups = optimizer_of(model, config).param_groups
    by = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
    ssm = model.blocks[0].mixer.ssm
    for parameter in (ssm.log_step, ssm.log_damping, ssm.frequency):
        assert by[id(parameter)] == (1e-3, 0.0)
    assert by[id(ssm.read)] == (5e-3, 0.1)
    assert by[id(ssm.skip)] == (5e-3, 0.0)
    slow = optimizer_of(model, dataclasses.replace(config, lr=1e-4)).param_groups
    assert {g["peak"] for g in slow} == {1e-4}
    mamba = SequenceModel(SequenceConfig(20, 16, 2, "mamba", 2, dropout=0.0))
    by = {id(p): g["weight_decay"] for g in optimizer_of(mamba, config).param_groups for p in g["params"]}
    mixer = mamba.blocks[0].mixer
    assert (by[id(mixer.log_a)], by[id(mixer.input.weight)]) == (0.0, 0.1)


def test_bf16_trains(tmp_path):
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(TRAIN, precision="bf16"))
    run = Run.create(tmp_path, config)
    go(run, config)
    assert run.metrics()[-1]["loss"] < run.metrics()[0]["loss"]


def test_the_learning_rate_rises_then_follows_a_cosine():
    config = TrainConfig(steps=100, lr=1.0, lr_end=0.1, warmup=0.1)
    rates = [config.lr_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[55] == pytest.approx(0.55)
    assert rates[10] == 1.0
    assert 0.1 < rates[99] < 0.101
    assert sorted(rates[9:], reverse=True) == rates[9:]
    assert TrainConfig(steps=1).lr_at(0) == TrainConfig(steps=1).lr


class Table(nn.Module):
    """Logits of the next token from a table: (B, T) → (B, T, 17)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(17.0 * 17).view(17, 17).sin())
        self.norm = nn.LayerNorm(17, bias=False)
        self.bias = nn.Parameter(torch.ones(17))

    def forward(self, tokens):
        return self.norm(self.table[tokens]) + self.bias


def test_a_step_is_adamw_with_clipping_and_decay_on_matrices_only():
    config = TrainConfig(
        2, 4, lr=0.1, lr_end=0.1, norm_lr=2, scalar_lr=0.3, warmup=0.0, clip=0.01, weight_decay=0.5
    )
    model, other, seen = Table(), Table(), []
    train(model, Cycle(), config, 0, Storage(), report=seen.append)
    theirs = torch.optim.AdamW(
        [
            {"params": [other.table], "weight_decay": 0.5},
            {"params": [other.norm.weight], "weight_decay": 0.0, "lr": 0.2},
            {"params": [other.bias], "weight_decay": 0.0, "lr": 0.03},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for step, progress in enumerate(seen):
        inputs, targets = Cycle().batch(0, step, 4)
        loss = F.cross_entropy(other(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        assert progress.loss == pytest.approx(loss.item(), rel=1e-6)
        theirs.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        theirs.step()
    assert [(p.step, p.tokens) for p in seen] == [(1, 40), (2, 80)]
    for mine, other_one in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, other_one)
