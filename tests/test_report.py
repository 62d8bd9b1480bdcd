"""The report and the ledger: read from run folders, the same bytes again, honest about what is not known."""

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from run_folders import OFFSETS, add_run, add_runs
from scipy import stats

from parzen.kernels import kernel
from parzen.lab.errors import UserError
from parzen.lab.experiments import EXPERIMENTS, find_runs
from parzen.lab.experiments.claims import LOSS, MOSAICS, POLYNOMIALS, Place, Results
from parzen.lab.experiments.kernels import FORMULAS
from parzen.lab.reports import page
from parzen.lab.reports.document import html, report
from parzen.lab.reports.figures import Map, draw, rc_context
from parzen.lab.reports.groups import group
from parzen.lab.reports.ledger import FAILS, HOLDS, NOT_RUN, UNSURE, claims
from parzen.lab.reports.plates import plates_of
from parzen.lab.reports.tables import against, latex, markdown, notes, to_csv
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import TrainConfig
from parzen.lab.statistics import among, difference, mean
from parzen.lab.tasks.length import LengthConfig
from parzen.models.mosaic import MosaicConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    to = tmp_path_factory.mktemp("ledger") / "report"
    return {path.name: path for path in report(find_runs([folder]), to)}


# ---- statistics ----------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_students():
    estimate = mean([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert estimate.mean - estimate.half() == pytest.approx(low)
    assert estimate.mean + estimate.half() == pytest.approx(high)
    assert mean([5.0]).half() == math.inf
    assert mean([5.0]).show() == "5.000"


def test_a_difference_of_two_is_the_paired_test():
    scores = {"a": {0: 1.0, 1: 2.5, 2: 2.0, 7: 9.0}, "b": {0: 0.5, 1: 1.0, 2: 1.2}}
    estimate = difference(scores, "a", "b")
    low, high = stats.ttest_rel([1.0, 2.5, 2.0], [0.5, 1.0, 1.2]).confidence_interval(0.95)
    assert estimate.mean - estimate.half() == pytest.approx(low)
    assert estimate.mean + estimate.half() == pytest.approx(high)
    with pytest.raises(ValueError, match="no seed in common"):
        difference({"a": {0: 1.0}, "b": {1: 1.0}}, "a", "b")


def test_pooled_differences_cover_as_they_say():
    """Two seeds, eight kernels: 95 % of the intervals hold the truth, at a fraction of the paired width."""
    rng = np.random.default_rng(0)
    hits, pooled_width, paired_width, trials = 0, 0.0, 0.0, 2000
    for _ in range(trials):
        noise = rng.normal(size=2) + rng.normal(size=(8, 2))
        scores = {str(i): dict(enumerate(row + (i == 0))) for i, row in enumerate(noise)}
        estimate = difference(scores, "0", "1")
        assert estimate.freedom == 7
        hits += abs(estimate.mean - 1) <= estimate.half()
        pooled_width += estimate.half()
        paired_width += difference(scores, "0", "1", pooled=False).half()
    assert hits / trials == pytest.approx(0.95, abs=0.015)
    assert pooled_width < 0.4 * paired_width


def test_an_interval_among_others_is_that_of_a_difference():
    """Half of it is that of the difference by √2, seed effects have gone; alone it is Student's."""
    scores = {"a": {0: 1.0, 1: 9.1}, "b": {0: 2.0, 1: 10.0}, "c": {0: 3.0, 1: 11.2}, "d": {1: 5.0}}
    estimate = among(scores, "a")
    assert estimate.mean == pytest.approx(5.05)
    assert estimate.half() == pytest.approx(difference(scores, "a", "b").half() / math.sqrt(2))
    assert among({"a": scores["a"]}, "a") == mean([1.0, 9.1])
    assert among(scores, "d") == mean([5.0])


# ---- groups and tables ---------------------------------------------------------------------------


def test_runs_are_grouped_by_all_but_the_seed(folder):
    groups = group(find_runs([folder]))
    assert [(g.name, g.setting, len(g.runs)) for g in groups] == [
        ("biweight", "1 layer", 2),
        ("epanechnikov", "1 layer", 2),
        ("knn_gaussian?k=4", "1 layer", 2),
        ("gaussian", "1 layer", 2),
        ("biweight", "4 layers", 1),
        ("epanechnikov", "4 layers", 1),
        ("knn_gaussian?k=4", "4 layers", 1),
        ("gaussian", "4 layers", 1),
        ("triweight", "4 layers", 1),
    ]
    assert [g.finished for g in groups] == [True] * 8 + [False]
    # A folder that is named twice counts once.
    assert [len(g.runs) for g in group(find_runs([folder, folder]))] == [len(g.runs) for g in groups]


def test_other_settings_are_other_panels(tmp_path):
    for steps in (4, 6):
        for seed in (0, 1):
            add_run(tmp_path, "gaussian", seed=seed, steps=steps)
    groups = group(find_runs([tmp_path]))
    assert sorted(g.setting for g in groups) == ["1 layer, steps = 4", "1 layer, steps = 6"]
    assert [len(g.runs) for g in groups] == [2, 2]


def test_settings_of_several_tasks_are_told_apart_by_the_task(tmp_path):
    add_run(tmp_path, steps=4)
    add_run(tmp_path, steps=6)
    model = MosaicConfig(vocab=17, layers=2, heads=4, width=16, slots=8, kernel="gaussian")
    for name in ("sort", "reverse"):
        run = Run.create(tmp_path, RunConfig(LengthConfig(name), model, TrainConfig(4)))
        run.log({"step": 1, "tokens": 100, "loss": 1.0})
    assert {g.setting for g in group(find_runs([tmp_path]))} == {
        "1 layer, stories, steps = 4",
        "1 layer, stories, steps = 6",
        "2 layers, length sort",
        "2 layers, length reverse",
    }


def test_different_token_counts_are_said_and_never_averaged(tmp_path):
    add_run(tmp_path, seed=0)
    shorter = add_run(tmp_path, seed=1)
    file = shorter.folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("12000", "11400"))
    groups = group(find_runs([tmp_path]))
    assert sorted(g.name for g in groups) == ["gaussian (11,400 tokens)", "gaussian (12,000 tokens)"]
    assert all(len(g.runs) == 1 for g in groups)
    assert "1 layer: not all rows are trained on the same number of tokens." in notes(groups)


def test_seeds_whose_batches_hold_some_tokens_more_are_one_group(tmp_path):
    add_run(tmp_path, seed=0)
    longer = add_run(tmp_path, seed=1)
    file = longer.folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("12000", "12030"))
    (one,) = group(find_runs([tmp_path]))
    assert [run.seed for run in one.runs] == [0, 1]
    assert one.name == "gaussian"


def test_the_table_in_three_forms(folder):
    groups = group(find_runs([folder]))
    lines = markdown(groups).splitlines()
    # What needs no model comes once, not once for each setting.
    assert lines[2].startswith("| unigram | 1 layer; 4 layers | 5.800 |")
    assert "\n".join(lines).count("unigram") == 1
    first = next(line for line in lines if line.startswith("| biweight"))
    loss = groups[0].estimate("loss")
    assert loss is not None
    assert first.startswith(
        f"| biweight | 1 layer | {loss.mean:.3f} ± {loss.half():.3f} | 10.5% ± 6.4% | −0.05"
    )
    assert "| triweight | 4 layers | — | — | — | unfinished | — | 1 |" in markdown(groups)
    rows = list(csv.DictReader(io.StringIO(to_csv(groups))))
    assert float(rows[0]["loss"]) == loss.mean
    assert float(rows[0]["loss_interval"]) == loss.half()
    one_seed = next(row for row in rows if row["setting"] == "4 layers")
    assert (one_seed["loss_interval"], one_seed["seeds"], one_seed["finished"]) == ("", "1", "True")
    assert (rows[-1]["loss"], rows[-1]["finished"]) == ("", "False")
    assert r"knn\_gaussian?k=4 & 1 layer" in latex(groups)
    assert r"10.5\% $\pm$ 6.4\%" in latex(groups)
    assert any("one seed has no interval" in note for note in notes(groups))
    assert "1 run is unfinished (dashed curves)." in notes(groups)


def test_what_needs_no_model_is_a_row_too(tmp_path):
    baselines = {"bigram": 3.5, "2-gram": {"tvd": 0.29, "loss": math.inf}}
    add_run(tmp_path, results={"loss": 2.0, "tvd": 0.1, "baselines": baselines})
    lines = markdown(group(find_runs([tmp_path]))).splitlines()
    assert lines[2] == "| bigram | 1 layer | 3.500 | — | — | — | — | — | — |"
    assert lines[3] == "| 2-gram | 1 layer | — | — | 0.290 | — | — | — | — |"


def test_a_difference_cancels_what_the_seed_does_to_all(folder):
    groups = {(g.name, g.layers): g for g in group(find_runs([folder]))}
    one = groups["epanechnikov", 1]
    estimate, loss = against(one, list(groups.values())), one.estimate("loss")
    assert estimate is not None
    assert loss is not None
    assert estimate.mean == pytest.approx(-0.05)
    assert estimate.half() < 0.1 * loss.half()
    assert against(groups["gaussian", 1], list(groups.values())) is None


# ---- files ---------------------------------------------------------------------------------------


def test_the_report_is_complete_and_the_same_again(folder, written, tmp_path):
    names = {f"{name}.{form}" for name in ("loss", "support", "attention") for form in ("png", "svg")}
    names |= {"table.md", "table.csv", "table.tex", "summary.json", "index.html"}
    assert written.keys() == names
    again = report(find_runs([folder]), tmp_path)
    assert all(path.read_bytes() == written[path.name].read_bytes() for path in again)
    assert written["index.html"].stat().st_size < 5_000_000


@pytest.mark.parametrize(
    "results",
    [
        {},
        {"loss": math.nan, "support": [[None]], "attention": {"words": ["a"], "layers": []}},
        {"loss": "low", "support": 3, "attention": {"words": [], "layers": [[[]]]}, "share_of_keys": None},
        {"loss": 2.0, "support": [[1.0], [2.0, 3.0]], "attention": [1]},
    ],
)
def test_results_that_lack_much_are_dashes(tmp_path, results):
    add_run(tmp_path / "runs", results=results)
    written = report(find_runs([tmp_path / "runs"]), tmp_path / "to")
    loss = "2.000" if results.get("loss") == 2.0 else "—"
    table = markdown(group(find_runs([tmp_path])))
    assert f"| gaussian | 1 layer | {loss} | — | — | 12,000 | — | 1 |" in table
    assert "attention.png" not in {path.name for path in written}


def test_bands_end_inside_the_picture_and_those_of_two_seeds_are_marked(folder, tmp_path):
    for name, offsets in (("gaussian", (0, 0.3)), ("biweight", (0.3, 0))):
        for seed, offset in enumerate(offsets):
            add_run(tmp_path, name, 1, seed, offset)
    (wide,) = plates_of(group(find_runs([tmp_path])))["loss"].panels
    for one in wide.series:
        assert wide.limits[0] < wide.band(one)[0][len(one.y) // 5 :].min() < min(one.y) - 1
    groups = group(find_runs([folder]))
    charts = plates_of(groups)["loss"].panels
    shown = [(chart, one) for chart in charts for one in chart.series if one.half]
    assert len(shown) == 4
    for _, one in shown:
        assert one.two
        assert one.label.endswith("†")
    # One seed has neither.
    assert not any(one.two for chart in charts for one in chart.series if not one.half)
    table = markdown(groups)
    assert table.count("| 2† |") == 4
    assert "† two seeds" in table
    assert '<path class="band two"' in html(groups)
    assert '<path class="bar two"' in html(groups)


def test_attention_shows_every_head_and_tells_zero_from_what_cannot_be_seen(folder):
    groups = group(find_runs([folder]))
    maps = plates_of(groups)["attention"].panels
    for one in groups:
        if not one.finished:
            continue
        heads = [m for m in maps if m.part == f"{one.name}, {one.setting}"]
        assert [m.title for m in heads] == ["head 1", "head 2", "head 3", "head 4"]
        held = np.array(one.runs[0].results["attention"]["layers"][-1])
        for m, head in zip(heads, held, strict=True):
            assert (m.values == head).all()
            above = np.triu(np.ones_like(head, bool))
            assert (m.hidden == above).all()
            assert (m.zeros == ((head == 0) & ~above)).all()
    # One row of pictures for each setting.
    assert html(groups).count('<div class="panels row">') == len({m.part for m in maps}) + 2


def test_a_picture_has_a_row_for_each_part():
    """Grey where 0 could have been something, white where nothing could."""
    values, hidden = np.array([[0.0, 0.0], [0.0, 0.0]]), np.array([[True, False], [True, False]])
    names = ("a", "b")
    maps = [
        Map(str(i), part, "r", "c", values, names, names, 1.0, False, hidden) for i, part in enumerate("xxy")
    ]
    with rc_context({"svg.fonttype": "none"}):
        drawn = draw(maps, (3, 3), "svg", columns=4).decode()
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups()
    assert (float(width), float(height)) == (2 * 3 * 72, 2 * 3 * 72)
    path = re.search('class="none" d="([^"]*)"', page.maps(maps[:1], "")).group(1)
    assert path == "M12 0h12v12h-12zM12 12h12v12h-12z"


def test_nothing_is_finished(tmp_path):
    add_run(tmp_path / "runs", finished=False)
    add_run(tmp_path / "runs", "biweight", finished=False, steps=2)
    names = {path.name for path in report(find_runs([tmp_path / "runs"]), tmp_path / "to")}
    assert {"index.html", "loss.png"} <= names
    assert "support.png" not in names
    assert json.loads((tmp_path / "to" / "summary.json").read_text()) == {"groups": []}
    assert notes(group(find_runs([tmp_path])))[0] == "No run is finished: there are curves only."


@pytest.mark.parametrize(
    ("file", "text"), [("results.json", "[1]"), ("results.json", "{"), ("metrics.jsonl", '{"step": 1}\n')]
)
def test_a_damaged_run_is_named(tmp_path, file, text):
    run = add_run(tmp_path)
    (run.folder / file).write_text(text)
    with pytest.raises(UserError, match=f"{file} is damaged"):
        report(find_runs([tmp_path]), tmp_path / "to")


# ---- the ledger ----------------------------------------------------------------------------------


def summarised(tmp_path, losses, layers=8, folder="stories", curve=()):
    """Results of stories at one depth: ``losses[kernel]`` is a list, a seed each."""
    groups = [
        {
            "name": name,
            "layers": layers,
            "config": {"task": {"kind": "stories"}, "model": {"layers": layers, "kernel": name}},
            "tokens": 10,
            "runs": [
                {"run": "x", "seed": seed, "metrics": {"loss": loss}, "curve": [[1, 3.0], *curve, [2, loss]]}
                for seed, loss in enumerate(values)
            ],
        }
        for name, values in losses.items()
    ]
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "summary.json").write_text(json.dumps({"groups": groups}))
    return Results(tmp_path)


def verdict(results, row):
    return next(claim for claim in claims("exact", "small", "paper") if claim.id == row).decide(results)


BASE = dict.fromkeys(MOSAICS, 2.0) | dict.fromkeys(POLYNOMIALS, 1.9) | {"normrelu": 2.1, "relumax": 1.93}


def losses(noise=0.002, seeds=2, **changes):
    rng = np.random.default_rng(1)
    values = BASE | changes
    return {
        name: [loss + 0.1 * s + noise * rng.normal() for s in range(seeds)] for name, loss in values.items()
    }


def test_intervals_decide(tmp_path):
    rows = {
        "compact-over-gaussian": HOLDS,
        "compact-over-nearest": HOLDS,
        "along": HOLDS,
        "unit-mass-over-normrelu": HOLDS,
        "relumax-over-normrelu": HOLDS,
        "relumax-slightly-behind": HOLDS,
        "nearest-competitive": HOLDS,
        # No curve rises, so none rises more.
        "nearest-unstable": FAILS,
    }
    results = summarised(tmp_path, losses())
    assert {key: verdict(results, f"figure2/small/8/{key}").verdict for key in rows} == rows
    assert verdict(results, "figure2/small/8/compact-over-gaussian").result.startswith(
        ("epanechnikov over gaussian: 0.1", "biweight over gaussian: 0.", "triweight over gaussian: 0.")
    )
    worse = summarised(tmp_path, losses(triweight=2.2))
    assert verdict(worse, "figure2/small/8/compact-over-gaussian").verdict == FAILS
    assert verdict(worse, "figure2/small/8/relumax-slightly-behind").verdict == FAILS
    noisy = summarised(tmp_path, losses(noise=0.3))
    assert verdict(noisy, "figure2/small/8/compact-over-gaussian").verdict == UNSURE


def test_one_seed_cannot_tell(tmp_path):
    outcome = verdict(summarised(tmp_path, losses(seeds=1)), "figure2/small/8/compact-over-gaussian")
    assert outcome.verdict == UNSURE
    assert outcome.result.endswith("(one seed)")


def test_what_was_not_run_is_said_and_scales_are_apart(tmp_path):
    results = summarised(tmp_path, {name: values for name, values in losses().items() if name != "triweight"})
    assert verdict(results, "figure2/small/8/compact-over-gaussian").verdict == NOT_RUN
    assert verdict(results, "figure2/small/8/relumax-over-normrelu").verdict == HOLDS
    for row in ("figure2/small/4/relumax-over-normrelu", "figure2/paper/8/relumax-over-normrelu"):
        assert verdict(results, row).verdict == NOT_RUN


def test_alike_needs_narrow_intervals(tmp_path):
    same = dict.fromkeys(MOSAICS, 2.0) | {"normrelu": 2.1, "knn_uniform": 2.1}
    row = "figure2/paper/12/alike"
    place = {"layers": 12, "folder": "paper/stories"}
    assert verdict(summarised(tmp_path, losses(**same), **place), row).verdict == HOLDS
    assert verdict(summarised(tmp_path, losses(noise=0.1, **same), **place), row).verdict == UNSURE
    assert verdict(summarised(tmp_path, losses(**same | {"biweight": 1.9}), **place), row).verdict == FAILS


def test_the_gap_between_depths(tmp_path):
    summarised(tmp_path, losses(), folder="paper/stories/8")
    for lead, expected in ((0.02, HOLDS), (0.3, FAILS)):
        changes = dict.fromkeys(POLYNOMIALS, 2.0 - lead)
        results = summarised(tmp_path, losses(**changes), 12, "paper/stories/12")
        assert verdict(results, "figure2/paper/12/gap-narrows").verdict == expected


def test_rises_of_the_curve_count(tmp_path):
    calm, rough = summarised(tmp_path, losses(), curve=[[1, 2.5]]), tmp_path / "stories" / "summary.json"
    assert calm.groups
    data = json.loads(rough.read_text())
    for one in data["groups"]:
        if one["name"] == "knn_gaussian":
            for run in one["runs"]:
                run["curve"].insert(2, [1.5, 2.8])
    rough.write_text(json.dumps(data))
    assert verdict(Results(tmp_path), "figure2/small/8/nearest-unstable").verdict == HOLDS


def test_other_settings_are_not_compared(tmp_path):
    """The larger setting decides; a run of another one is shown only where there is nothing else."""
    summarised(tmp_path, losses())
    path = tmp_path / "stories" / "summary.json"
    data = json.loads(path.read_text())
    for name in ("gaussian", "retnet"):
        other = json.loads(json.dumps(data["groups"][0])) | {"name": name}
        other["config"]["train"] = {"lr": 1.0, "name": name}
        other["runs"][0]["metrics"]["loss"] = 0.5
        data["groups"].append(other)
    path.write_text(json.dumps(data))
    results = Results(tmp_path)
    assert verdict(results, "figure2/small/8/compact-over-gaussian").verdict == HOLDS
    place = Place("8 layers", "stories", (("model.layers", 8),))
    own, foreign = (results.estimate(place, LOSS, name) for name in ("gaussian", "retnet"))
    assert own is not None
    assert foreign is not None
    assert own.mean == pytest.approx(2.05, abs=0.01)
    assert foreign.mean < 1.5
    assert results.estimate(place, LOSS, "mamba") is None


def test_a_report_feeds_the_ledger(written):
    results = Results(written["summary.json"].parent.parent)
    place = Place("1 layer", written["summary.json"].parent.name, (("model.layers", 1),))
    scores = results.scores(place, LOSS)
    assert scores.keys() == OFFSETS.keys()
    assert scores["epanechnikov"][1] - scores["gaussian"][1] == pytest.approx(-0.05)


def test_a_claim_about_levels_and_lengths(tmp_path):
    def write(exact_match):
        run = {"run": "x", "curve": [], "metrics": {f"exact_match.{n}": v for n, v in exact_match.items()}}
        config = {"task": {}, "model": {"kind": "mosaic", "layers": 2, "kernel": "gaussian"}}
        entry = {
            "name": "gaussian",
            "config": config,
            "tokens": 1,
            "runs": [run | {"seed": s} for s in (0, 1)],
        }
        (tmp_path / "length" / "sort").mkdir(parents=True, exist_ok=True)
        (tmp_path / "length" / "sort" / "summary.json").write_text(json.dumps({"groups": [entry]}))
        return Results(tmp_path)

    results = write({16: 1.0, 32: 0.6, 64: 0.1, 128: 0.0})
    assert verdict(results, "table2/small/sort/gaussian-in-distribution").verdict == HOLDS
    assert verdict(results, "table2/small/sort/gaussian-collapses").verdict == HOLDS
    assert verdict(results, "table2/small/reverse/gaussian-collapses").verdict == NOT_RUN
    assert verdict(write({16: 0.5, 128: 0.9}), "table2/small/sort/gaussian-in-distribution").verdict == FAILS
    assert verdict(results, "table2/small/sort/uniform-fails").verdict == NOT_RUN


def test_a_wrong_kernel_is_found_out(monkeypatch):
    assert verdict(Results(Path("nowhere")), "figure1/biweight").verdict == HOLDS
    monkeypatch.setitem(FORMULAS, "biweight", FORMULAS["triweight"])
    assert verdict(Results(Path("nowhere")), "figure1/biweight").verdict == FAILS


def test_no_row_is_missing():
    ids = [claim.id for claim in claims("exact", "small", "paper")]
    assert len(ids) == len(set(ids))
    assert {claim.id.rsplit("/", 1)[0] for claim in claims("exact", "small", "paper")} == {
        "figure1",
        *(f"figure2/small/{n}" for n in (1, 4, 8, 12)),
        *(f"figure2/paper/{n}" for n in (1, 8, 12)),
        "table1/small/1000",
        *(f"table1/paper/{n}" for n in (1000, 2500, 5000, 10000, 20000, 40000)),
        *(f"table2/{scale}/{task}" for scale in ("small", "paper") for task in ("sort", "reverse", "mqmtar")),
    }

    def cells(name, scale):
        return [(len(table.names), len(table.columns)) for table in EXPERIMENTS[name].tables(scale)]

    for scale, depths, sizes, lengths in (
        ("tiny", 1, 1, (2, 2, 2)),
        ("small", 4, 1, (4, 4, 4)),
        ("paper", 3, 6, (7, 5, 11)),
    ):
        assert cells("stories", scale) == [(8, depths)]
        assert cells("regbench", scale) == [(14, sizes)]
        assert cells("length", scale) == [(8, n) for n in lengths]
    # As the report calls them.
    assert [str(kernel(name)) for name in MOSAICS] == list(MOSAICS)


def test_a_damaged_summary_is_named(tmp_path):
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        Results(tmp_path)
