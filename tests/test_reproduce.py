"""Figures and tables in one command: planned, done once, reported with the paper's claims."""

import json
from pathlib import Path

import pytest

from parzen.cli import main
from parzen.lab.experiments import EXPERIMENTS, find_runs, regbench, stories, targets
from parzen.lab.reports import ledger, reproduce
from parzen.lab.reports.reproduce import Request
from parzen.lab.run import sweep
from parzen.lab.run.config import RunConfig
from parzen.lab.run.cost import computed, timed
from parzen.lab.run.train import Storage, train

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def planned(target, **options):
    plan = reproduce.planned(targets()[target].trained, Request(dry=True, **options))
    return {name: {f for part in parts for f in part.planned()} for name, parts in plan.items()}


def test_the_committed_results_are_what_the_small_scale_plans():
    found = {
        path.parent.relative_to(ROOT / "results")
        for name in ("regbench", "regbench-easier", "length")
        for path in (ROOT / "results" / name).rglob("results.json")
    }
    assert len(found) > 15
    plan = planned("table1", scale="small", to=Path(".")) | planned("table2", scale="small", to=Path("."))
    assert found <= set().union(*plan.values())
    # Those on stories but for the text, which is not part of the repository.
    committed = [
        RunConfig.from_json(json.loads(path.read_bytes()), str(path), [stories.StoriesConfig])
        for path in (ROOT / "results" / "stories").rglob("config.json")
    ]
    configs = [
        config
        for one in stories.FIGURE2["small"]
        for config in stories.plan(one, committed[0].task, one.tokens)
    ]
    assert {c.digest() for c in configs} == {c.digest() for c in committed}


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        # Depths × kernels × seeds; sizes × models × seeds; tasks × (kernels + Transformers) × seeds.
        ("figure2", {"stories": 3 * 8 * 3}),
        ("table1", {"regbench": 6 * (8 + 6) * 3}),
        ("table2", {f"length/{task}": (8 + 4) * 3 for task in ("sort", "reverse", "mqmtar")}),
    ],
)
def test_the_plan_at_the_scale_of_the_paper(target, runs):
    assert {name: len(folders) for name, folders in planned(target, scale="paper").items()} == runs


def test_the_plan_is_printed_with_what_it_costs_and_nothing_is_done(tmp_path, capsys):
    assert main(["reproduce", "all", "--scale", "paper", "--dry-run", "--to", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "432 runs, 0 done; about" in out
    assert "GPU-hours" in out
    assert not [*tmp_path.iterdir()]


def test_computed_costs_by_hand():
    (config,) = regbench.plan(regbench.RegBenchSettings("paper", models=("transformer",)), 1000)
    parameters = sum(p.numel() for p in sweep.build(config).parameters())
    # 14.5 strings of 25 letters and a bar; 200 epochs of 32 batches.
    steps, T = 200 * 32, 377
    assert config.task.sequence_length == T
    got = computed(config)
    operations = steps * 32 * T * (6 * parameters + 6 * 8 * 128 * T)
    assert got.seconds == pytest.approx(max(operations / (0.3 * 312e12), steps * 8 * 2e-3))
    assert got.memory == 16 * parameters + T * 32 * (64 * 8 * 128 + 8 * 20)


def test_a_timed_step_leaves_nothing_behind():
    (config,) = regbench.plan(
        regbench.RegBenchSettings("tiny", kernels=("gaussian",), models=("mosaic",)), 64
    )
    task = regbench.work(sweep.Run(Path("nowhere"), config)).task
    cost = timed(config, task, sweep.LOCAL)
    assert 0 < cost.seconds < 600
    assert cost.memory > 1e7
    assert not cost.computed


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    to = tmp_path_factory.mktemp("results")
    assert main(["reproduce", "table1", "--scale", "tiny", "--to", str(to)]) == 0
    return to


def test_a_table_is_written_beside_the_claims(table):
    folder = table / "tiny" / "regbench"
    assert len(find_runs([folder / "runs"])) == (2 + 6) * 2
    text = (table / "tiny" / "ledger.md").read_text()
    claims = [claim for claim in ledger.claims("tiny") if claim.where == "Table 1"]
    assert all(f"`{claim.id}`" in text for claim in claims)
    assert "Figure 2" not in text
    page = (folder / "index.html").read_text()
    assert all(claim.text in page for claim in claims)
    # Two seeds, so there is an interval.
    row = next(line for line in (folder / "table.md").read_text().splitlines() if "mamba" in line)
    assert "±" in row


def test_what_is_done_is_not_done_again(table, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "train", None)
    assert main(["reproduce", "table1", "--scale", "tiny", "--to", str(table)]) == 0
    assert "16 runs, 16 of them done" in capsys.readouterr().out


def test_one_failure_and_one_interruption_lose_nothing_else(tmp_path, capsys, monkeypatch):
    real = sweep.train
    arguments = ["reproduce", "table1", "--scale", "tiny", "--seeds", "0", "--to", str(tmp_path)]

    def unlucky(model, task, config, seed, keeper, **options):
        if isinstance(keeper, sweep.Run) and keeper.config.name == "h3":
            raise KeyboardInterrupt if interrupt else ZeroDivisionError("broken")
        return real(model, task, config, seed, keeper, **options)

    monkeypatch.setattr(sweep, "train", unlucky)
    interrupt = True
    assert main(arguments) == 130
    assert "interrupted; the same command goes on from here" in capsys.readouterr().out
    done = {run.config.name for run in find_runs([tmp_path]) if run.finished}
    assert {"gaussian", "s4"} <= done
    interrupt = False
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert f"8 runs, {len(done)} of them done" in said.out
    assert "failed: h3, 1 layer, seed 0: ZeroDivisionError: broken (see" in said.err
    assert len([run for run in find_runs([tmp_path]) if run.finished]) == 7
    assert "mamba" in (tmp_path / "tiny" / "regbench" / "table.md").read_text()
    monkeypatch.setattr(sweep, "train", real)
    assert main(arguments) == 0
    assert all(run.finished for run in find_runs([tmp_path]))


def test_figure_1_needs_no_runs(tmp_path, capsys):
    assert main(["reproduce", "figure1", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "tiny" / "kernels" / "kernels.png").stat().st_size > 10_000
    text = (tmp_path / "tiny" / "ledger.md").read_text()
    assert "| Figure 1 | exact | 8 | 0 | 0 | 0 |" in text


def test_figure_2_on_a_text_of_ones_own(tmp_path, capsys):
    assert main(["reproduce", "figure2", "--scale", "small", "--to", str(tmp_path)]) == 2
    assert "parzen data tinystories" in capsys.readouterr().err
    assert main(["reproduce", "figure2", "--scale", "small", "--to", str(tmp_path), "--dry-run"]) == 0
    assert "40 runs, 0 done" in capsys.readouterr().out


def test_the_best_of_a_grid_by_validation_loss(tmp_path, capsys):
    arguments = ["regbench", "--scale", "tiny", "--models", "s4", "--grid", "--runs", str(tmp_path)]
    assert main(arguments) == 0
    runs = find_runs([tmp_path])
    points = {(r.config.model.width, r.config.train.lr) for r in runs}
    assert points == {(16, 2e-3), (16, 1e-2), (32, 2e-3), (32, 1e-2)}
    (chosen,) = sweep.chosen([sweep.RunSet(tmp_path, [r.config for r in runs], None, tuned=True)], runs)
    losses = {r.folder: min(line["loss"] for line in r.metrics()) for r in runs}
    assert losses[chosen.folder] == min(losses.values())
    rows = capsys.readouterr().out.split("────\n")[-1].splitlines()
    assert [row.split()[0] for row in rows].count("s4") == 1


def test_heads_are_tuned_where_there_are_any():
    def count(model):
        return len(regbench.plan(regbench.RegBenchSettings("paper", models=(model,), grid=True), 1000))

    assert count("transformer") == 3 * count("mamba") == 5 * 5 * 3 * 2 * 2 * 2
    assert len(regbench.plan(regbench.RegBenchSettings("paper", models=("mosaic",), grid=True), 1000)) == 8


def test_when_and_where_a_run_was_begun_is_kept_with_its_times():
    class Kept(Storage):
        def __init__(self):
            self.lines = []

        def log(self, record, file="metrics.jsonl"):
            self.lines.append((file, record))

    (config,) = regbench.plan(regbench.RegBenchSettings("tiny", models=("s4",)), 64)
    kept = Kept()
    train(sweep.build(config), regbench.work(sweep.Run(Path("nowhere"), config)).task, config.train, 0, kept)
    file, first = kept.lines[0]
    assert file == "times.jsonl"
    assert first["step"] == 0
    assert {"begun", "on"} <= set(first)


@pytest.mark.slow
def test_everything_at_the_smallest_scale(tmp_path):
    assert main(["reproduce", "all", "--scale", "tiny", "--to", str(tmp_path)]) == 0
    text = (tmp_path / "tiny" / "ledger.md").read_text()
    assert all(f"| {where} | " in text for where in (row.where for row in EXPERIMENTS.values()))
    assert all(run.finished for run in find_runs([tmp_path]))
    pages = {str(p.parent.relative_to(tmp_path / "tiny")) for p in tmp_path.rglob("index.html")}
    assert pages == {"stories", "regbench", "length/sort", "length/reverse", "length/mqmtar"}
