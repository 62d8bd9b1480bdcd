"""The first end-to-end run, at toy size: training, evaluation, the report, and how it ends early."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parzen.cli import main
from parzen.lab import demo, evaluate
from parzen.lab.console import duration, markdown_table, progress, show_table
from parzen.lab.errors import UserError
from parzen.lab.tasks.stories import IGNORED, generated_stories
from parzen.models.mosaic import Mosaic, MosaicConfig


@pytest.fixture(autouse=True)
def _quiet_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The demo leaves torch's threads alone then, which the other tests share.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    path.write_text("".join(json.dumps(story) + "\n" for story in generated_stories(0, 60_000)))
    return path


TOY = demo.DemoConfig(vocab=300, context=16, batch=2, layers=1, heads=2, width=8, slots=4, curve=3, sample=5)


# ---- end to end ----------------------------------------------------------------------------------


def test_the_command(text, tmp_path, capsys):
    to = tmp_path / "new" / "run"
    kernels = [*demo.KERNELS, "relumax?margin=2"]
    assert (
        main(["demo", "--data", str(text), "--steps", "3", "--kernels", ",".join(kernels), "--to", str(to)])
        == 0
    )
    assert sorted(p.name for p in to.iterdir()) == ["config.json", "loss.png", "results.json", "results.md"]
    assert (to / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((to / "results.json").read_text())
    rows = {row["kernel"]: row for row in record["kernels"]}
    assert [*rows] == kernels
    tokens = 3 * 4 * 128
    for row in rows.values():
        assert row["tokens"] == tokens
        assert row["curve"][-1] == [tokens, row["loss"]]
        assert 0 < row["loss"] < 1.05 * math.log(2048)
        assert row["tokens_per_second"] > 0
    assert rows["gaussian"]["share"] == 1
    assert all(row["share"] < 0.5 for name, row in rows.items() if name != "gaussian")
    assert 0 < record["baselines"]["bigram"] < record["baselines"]["unigram"]
    printed = capsys.readouterr().out
    report = (to / "results.md").read_text()
    for name in ("unigram", "bigram", *kernels):
        loss = rows[name]["loss"] if name in rows else record["baselines"][name]
        assert f"| {name} | {loss:.3f} |" in report
        assert f"\n{name} " in printed


def test_every_kernel_starts_alike_and_sees_the_same_batches(text, tmp_path):
    """The same kernel under two spellings ends at exactly the same loss."""
    config = replace(TOY, data=text, steps=4, kernels=("biweight", "entmax?alpha=1.5"), to=tmp_path)
    assert demo.run(config) == 0
    first, second = json.loads((tmp_path / "results.json").read_text())["kernels"]
    assert first["curve"] == second["curve"]


def test_minutes_become_a_common_number_of_steps(text, tmp_path, capsys):
    config = replace(TOY, data=text, minutes=0.05, kernels=("gaussian", "relumax"), to=tmp_path)
    assert demo.run(config) == 0
    first, second = json.loads((tmp_path / "results.json").read_text())["kernels"]
    assert first["tokens"] == second["tokens"] > 20 * 2 * 16


def test_it_learns(text, tmp_path):
    config = replace(TOY, data=text, to=tmp_path, kernels=("gaussian", "relumax"))
    assert demo.run(replace(config, steps=150, batch=8, width=16, slots=16, lr=0.03)) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    losses = [row["loss"] for row in record["kernels"]]
    assert max(losses) < record["baselines"]["unigram"] - 0.1


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interruption_keeps_what_was_done(text, tmp_path, monkeypatch, capsys, after):
    """Ctrl-C during the second of three kernels, after so many steps."""
    real, started = demo.train, []

    def interrupted(model, *arguments, report):
        started.append(model)

        def report_and_stop(now):
            report(now)
            if len(started) == 2 and now.step == after:
                raise KeyboardInterrupt

        if len(started) == 2 and after == 0:
            raise KeyboardInterrupt
        return real(model, *arguments, report=report_and_stop)

    monkeypatch.setattr(demo, "train", interrupted)
    config = replace(TOY, data=text, steps=6, kernels=("gaussian", "epanechnikov", "relumax"), to=tmp_path)
    assert demo.run(config) == 130
    rows = json.loads((tmp_path / "results.json").read_text())["kernels"]
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    if after == 0:
        assert [row["loss"] is None for row in rows] == [False, True]
        return
    assert [row["tokens"] for row in rows] == [6 * 32, after * 32]
    assert rows[1]["loss"] == rows[1]["curve"][-1][1]
    assert rows[1]["share"] is None
    assert f"epanechnikov ({after * 32} tokens)" in printed
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_kernel_that_fails_does_not_take_the_others_with_it(text, tmp_path, monkeypatch):
    real = demo._model

    def broken(config, vocab, kernel):
        model = real(config, vocab, kernel)
        if kernel == "relumax":
            model.norm.weight.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(demo, "_model", broken)
    config = replace(TOY, data=text, steps=2, kernels=("gaussian", "relumax"), to=tmp_path)
    with pytest.raises(UserError, match="relumax: the loss became nan at step 1"):
        demo.run(config)
    first, second = json.loads((tmp_path / "results.json").read_text())["kernels"]
    assert first["share"] == 1
    assert second["loss"] is None


def test_ctrl_c_from_outside(text, tmp_path):
    done = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "parzen",
            "demo",
            "--data",
            str(text),
            "--steps",
            "100000",
            "--to",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        # A shell that runs the tests in the background makes them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout is not None
    try:
        for line in done.stdout:
            if "each 100000 steps" in line:
                break
        done.send_signal(signal.SIGINT)
        out, err = done.communicate(timeout=60)
    finally:
        done.kill()
    assert (done.returncode, err) == (130, "")
    assert "this is what was done so far" in out
    assert "bigram" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize("to", ["/proc/run", "{text}", "{text}/run"])
def test_a_place_that_cannot_be_written_is_known_before_training(text, capsys, monkeypatch, to):
    monkeypatch.setattr(demo, "load_stories", None)
    place = to.format(text=text)
    assert main(["demo", "--data", str(text), "--to", place]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"parzen: error: cannot write {place}")
    assert err.count("\n") == 1


def test_a_full_disk_at_the_end_still_shows_the_table(text, tmp_path, monkeypatch, capsys):
    real = os.replace

    def full(source, target):
        if Path(target).name == "results.json":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    argv = [
        "demo",
        "--data",
        str(text),
        "--steps",
        "1",
        "--kernels",
        "gaussian",
        "--to",
        str(tmp_path / "run"),
    ]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert "\ngaussian " in out
    assert err == (
        f"parzen: error: cannot write {tmp_path}/run/results.json: No space left on device; "
        "free some space or choose another place\n"
    )


def test_a_bad_file_is_one_line(tmp_path, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\x00")
    assert main(["demo", "--data", str(bad), "--to", str(tmp_path / "run")]) == 2
    assert (
        capsys.readouterr().err
        == f"parzen: error: {bad} is binary; give plain text or JSON lines (or .xz/.gz of these)\n"
    )


# ---- evaluation ----------------------------------------------------------------------------------


class Table(nn.Module):
    """Logits of the next token from a table: (B, T) → (B, T, 4)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(16.0).view(4, 4).sin())
        self.norm = nn.LayerNorm(4, bias=False)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, tokens):
        return self.norm(self.table[tokens]) + self.bias


def test_loss_is_the_mean_over_real_targets():
    model = Table()
    inputs = torch.tensor([[0, 1, 2], [3, 0, 0], [1, 0, 0]])
    targets = torch.tensor([[1, 2, 3], [0, IGNORED, IGNORED], [2, 2, IGNORED]])
    real = targets != IGNORED
    logits = torch.log_softmax(model(inputs[real]), -1)
    expected = -logits.gather(1, targets[real][:, None]).mean().item()
    for batch in (1, 2, 3):
        assert_close(evaluate.loss(model, (inputs, targets), batch), expected)


def test_share_of_keys_counts_the_allowed_ones():
    tokens = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(3)])

    def share(kernel):
        torch.manual_seed(0)
        config = MosaicConfig(12, 2, 2, 8, 3, kernel, dropout=0.5)
        return evaluate.kernel_use(Mosaic(config), tokens, batch=2)["share_of_keys"]

    assert share("gaussian") == 1
    # Query t of 1 … 11 has t keys: min(t, 3) of them are used, no two tokens being the same.
    assert share("knn_uniform?k=3") == (1 + 2 + 3 * 9) / 66
    assert 0 < share("epanechnikov") < share("biweight") < 1


# ---- the console ---------------------------------------------------------------------------------


def test_plain_tables_line_up(capsys):
    show_table(("name", "n"), [("a", "1"), ("long name", "—"), ("b", "1,000")], title="Title")
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "name           n",
        "─────────  ─────",
        "a              1",
        "long name      —",
        "b          1,000",
    ]


def test_tables_and_bars_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("parzen.lab.console.fancy", lambda: True)
    show_table(("name", "n"), [("[bold]a", "1")])
    assert "[bold]a" in capsys.readouterr().out
    with progress(2, 3) as bars:
        for name in ("one", "two"):
            bars.part(name)
            for _ in range(3):
                bars.step("status [x]")
            bars.mark("the end")
    assert "3/3" in (shown := capsys.readouterr().out)
    assert "the end" in shown


def test_plain_progress_says_where_it_is(capsys):
    with progress(2, 4) as lines:
        lines.part("one")
        for _ in range(2):
            lines.step("s")
        lines.mark("half")
        for _ in range(2):
            lines.step("s")
        lines.part("two")
        lines.step("s")
        lines.mark("again")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("one: step 2/4, half, 0:00 left")
    assert second.startswith("two: step 1/4, again, 0:00 left")


def test_durations_and_markdown():
    assert [duration(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_the_figure_takes_kernels_without_points():
    from parzen.lab.figures import loss_curves

    png = loss_curves({"gaussian": [(100, 3.0), (200, 2.0)], "relumax": []}, bigram=2.5)
    assert png.startswith(b"\x89PNG")
    assert np.frombuffer(png, np.uint8).size > 1000
