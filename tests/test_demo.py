"""The first end-to-end run, at toy size: training, evaluation, the report, and how it ends early."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parzen.cli import main
from parzen.lab.console import duration, markdown_table, progress, show_table
from parzen.lab.data.text import generated_stories
from parzen.lab.experiments import find_runs, stories
from parzen.lab.experiments.kernel_use import kernel_use
from parzen.lab.reports import demo
from parzen.lab.run import sweep
from parzen.lab.tasks.stories import loss
from parzen.lab.tasks.task import IGNORED
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


TOY = replace(
    demo.SIZE, vocab=300, context=16, batch=2, layers=(1,), heads=2, width=8, slots=4, curve=3, sample=5
)


def found(to):
    """The runs that a demo left in ``to``, by kernel."""
    return {r.config.model.kernel: r for r in find_runs([to / "runs"])}


# ---- end to end ----------------------------------------------------------------------------------


def test_the_command(text, tmp_path, capsys):
    to = tmp_path / "new" / "run"
    kernels = [*demo.SIZE.kernels, "relumax?margin=2"]
    chosen = ["--tokens", "1500", "--kernels", ",".join(kernels)]
    assert main(["demo", "--data", str(text), *chosen, "--to", str(to)]) == 0
    assert {"index.html", "table.md", "loss.png", "summary.json", "runs"} <= {p.name for p in to.iterdir()}
    assert (to / "loss.png").read_bytes().startswith(b"\x89PNG")
    results = {name: r.results() for name, r in found(to).items()}
    assert {*results} == {*kernels}
    for got in results.values():
        assert got["tokens"] == 3 * 4 * 128
        assert 0 < got["loss"] < 1.05 * math.log(2048)
        assert 0 < got["baselines"]["bigram"] < got["baselines"]["unigram"]
    assert results["gaussian"]["share_of_keys"] == 1
    assert all(got["share_of_keys"] < 0.5 for name, got in results.items() if name != "gaussian")
    printed = capsys.readouterr().out
    report = (to / "table.md").read_text()
    for name in ("unigram", "bigram", *kernels):
        loss = results[name]["loss"] if name in results else results["gaussian"]["baselines"][name]
        assert f"| {name} | 2 layers | {loss:.3f} |" in report
        assert re.search(rf"^{re.escape(name)} .* {loss:.3f} ", printed, re.MULTILINE)


def test_minutes_become_a_common_number_of_tokens_once(text, tmp_path, capsys):
    config = replace(TOY, data=text, minutes=0.05, kernels=("gaussian", "relumax"))
    assert demo.run(config, tmp_path) == 0
    first, second = found(tmp_path).values()
    tokens = first.results()["tokens"]
    assert tokens == second.results()["tokens"]
    kept = tmp_path / "runs" / "minutes.json"
    assert json.loads(kept.read_text()) == {"minutes": 0.05, "tokens": tokens}
    capsys.readouterr()
    assert demo.run(config, tmp_path) == 0
    assert "2 runs, 2 of them done" in capsys.readouterr().out
    assert demo.run(replace(config, minutes=0.04), tmp_path) == 0
    assert json.loads(kept.read_text())["minutes"] == 0.04


def test_it_learns(text, tmp_path):
    config = replace(TOY, data=text, minutes=None, tokens=19_200, kernels=("gaussian", "relumax"))
    assert demo.run(replace(config, batch=8, width=16, slots=16, lr=0.03, norm_lr=1.0), tmp_path) == 0
    for r in found(tmp_path).values():
        assert r.results()["loss"] < r.results()["baselines"]["unigram"] - 0.1


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interruption_keeps_what_was_done(text, tmp_path, monkeypatch, capsys, after):
    """Ctrl-C during the second of three kernels, after so many steps."""
    real, started = sweep.train, []

    def interrupted(model, *arguments, report, **options):
        started.append(model)

        def report_and_stop(now):
            report(now)
            if len(started) == 2 and now.step == after:
                raise KeyboardInterrupt

        if len(started) == 2 and after == 0:
            raise KeyboardInterrupt
        return real(model, *arguments, report=report_and_stop, **options)

    monkeypatch.setattr(sweep, "train", interrupted)
    kernels = ("gaussian", "epanechnikov", "relumax")
    config = replace(TOY, data=text, minutes=None, tokens=6 * 32, kernels=kernels)
    assert demo.run(config, tmp_path) == 130
    out = capsys.readouterr().out
    assert "interrupted; the same command goes on from here" in out
    assert out.count("(not finished)") == 2
    assert [name for name, r in found(tmp_path).items() if r.finished] == ["gaussian"]
    table = (tmp_path / "table.md").read_text()
    assert ("epanechnikov" in table) == (after > 0)
    assert (tmp_path / "loss.png").stat().st_size > 1000
    monkeypatch.setattr(sweep, "train", real)
    assert demo.run(config, tmp_path) == 0
    assert all(r.finished for r in found(tmp_path).values())


def test_nothing_done_yet_is_said(text, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "train", interrupted)
    assert demo.run(replace(TOY, data=text, minutes=None, tokens=32), tmp_path) == 130
    assert "saved in" not in capsys.readouterr().out


def test_ctrl_c_from_outside(text, tmp_path):
    done = subprocess.Popen(
        [
            *(sys.executable, "-m", "parzen", "demo", "--data", str(text)),
            *("--tokens", "1000000", "--to", str(tmp_path)),
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
            if "of them done" in line:
                break
        done.send_signal(signal.SIGINT)
        out, err = done.communicate(timeout=60)
    finally:
        done.kill()
    assert (done.returncode, err) == (130, "")
    assert "the same command goes on from here" in out
    assert "\nbigram" in out


@pytest.mark.parametrize("to", ["/proc/run", "{text}", "{text}/run"])
def test_a_place_that_cannot_be_written_is_known_before_training(text, capsys, monkeypatch, to):
    monkeypatch.setattr(stories, "load_stories", None)
    place = to.format(text=text)
    assert main(["demo", "--data", str(text), "--to", place]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"parzen: error: cannot write {place}")
    assert err.count("\n") == 1


def test_a_full_disk_at_the_end_still_shows_the_table(text, tmp_path, monkeypatch, capsys):
    real = os.replace

    def full(source, target):
        if Path(target).name == "table.csv":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    chosen = ["--tokens", "512", "--kernels", "gaussian", "--to", str(tmp_path / "run")]
    assert main(["demo", "--data", str(text), *chosen]) == 2
    out, err = capsys.readouterr()
    assert "\ngaussian " in out
    assert err == (
        f"parzen: error: cannot write {tmp_path}/run/table.csv: No space left on device; "
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
        assert_close(loss(model, (inputs, targets), batch), expected)


def test_share_of_keys_counts_the_allowed_ones():
    tokens = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(3)])

    def share(kernel):
        torch.manual_seed(0)
        config = MosaicConfig(12, 2, 2, 8, 3, kernel, dropout=0.5)
        return kernel_use(Mosaic(config), tokens, batch=2)["share_of_keys"]

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


def test_progress_of_a_run_that_is_gone_on_with(capsys, monkeypatch):
    """It begins where an earlier process ended, and the time left is that of the steps that are left."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("parzen.lab.console.time.monotonic", lambda: float(next(clock)))
    with progress(1, 1563) as lines:
        lines.part("one")
        for at in range(157, 162):
            lines.step("s", at)
        lines.mark("s")
    # Five steps took ten seconds; 1402 are left.
    assert capsys.readouterr().out == "one: step 161/1563, s, 46:44 left\n"


def test_bars_of_a_run_that_is_gone_on_with(capsys, monkeypatch):
    monkeypatch.setattr("parzen.lab.console.fancy", lambda: True)
    with progress(2, 100) as bars:
        bars.part("one")
        for at in range(91, 101):
            bars.step("s", at)
        assert [(task.completed, task.total) for task in bars.bars.tasks] == [(10, 110), (100, 100)]
    capsys.readouterr()


def test_durations_and_markdown():
    assert [duration(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
