"""``parzen regress``: a table of someone's own in, a comparison, a model and predictions out."""

import gzip
import json
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from parzen.cli import main
from parzen.lab.data.table import read_table
from parzen.regression import KernelClassifier, KernelRegressor

PYARROW = find_spec("pyarrow") is not None


def frame(n=80, seed=0):
    rng = np.random.default_rng(seed)
    group = rng.choice(["männlich", "weiblich", "x,y"], n)
    size = rng.normal(size=n) * 100
    y = np.sin(size / 50) + (group == "weiblich") + 0.1 * rng.normal(size=n)
    return pd.DataFrame({"size": size, "group": group, "flag": rng.random(n) > 0.5, "y": y})


def spoken(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_table_becomes_a_model_and_predictions(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = frame()
    table["name"] = [f"person {i}" for i in range(80)]
    table["always"] = "same"
    table.loc[3, "size"] = np.nan
    table.loc[4, "group"] = None
    table.loc[5, "size"] = np.inf
    table.to_csv("people.csv.gz", index=False)
    assert main(["regress", "people.csv.gz", "--target", "y", "--kernels", "biweight,normrelu"]) == 0
    text = spoken(capsys)
    assert "name: 80 different words, no category" in text
    assert "always: always same" in text
    assert "3 of 80 rows, with a missing value" in text
    summary = json.loads((tmp_path / "people-regression/summary.json").read_text())
    assert summary["rows"] == 77
    assert list(summary["bandwidths"]) == [
        "size", "group=männlich", "group=weiblich", "group=x,y", "flag"
    ]  # fmt: skip
    assert {one["model"] for one in summary["scores"]} == {"biweight", "normrelu", "nearest 16", "linear"}
    by_kernel = {one["model"]: np.mean(one["score"]) for one in summary["scores"]}
    assert by_kernel["biweight"] > by_kernel["linear"]
    assert (tmp_path / "people-regression/figure.png").read_bytes()[1:4] == b"PNG"

    new = frame(5, seed=1).drop(columns="y")
    new.loc[1, "group"] = "unheard of"
    new.to_csv("new.tsv", index=False, sep="\t")
    assert main(["regress", "new.tsv", "--predict", "people-regression", "--coverage", "0.8"]) == 0
    found = pd.read_csv("new-predicted.csv")
    assert list(found) == ["y", "low", "high"]
    assert found.isna().all(axis=1).tolist() == [False, True, False, False, False]
    model = KernelRegressor.load("people-regression/model.safetensors")
    by_hand = pd.DataFrame({"size": new["size"]})
    for level in ("männlich", "weiblich", "x,y"):
        by_hand[f"group={level}"] = (new["group"] == level).astype(float)
    by_hand["flag"] = new["flag"].astype(float)
    np.testing.assert_allclose(found["y"][[0, 2, 3, 4]], model.predict(by_hand)[[0, 2, 3, 4]])
    assert "predictions for 4 rows" in spoken(capsys)


def test_labels_are_told_apart(tmp_path, capsys):
    table = frame(90)
    table["y"] = np.where(table["y"] > 0.5, "high", "low")
    file, out = tmp_path / "labels.tsv", tmp_path / "out"
    table.to_csv(file, sep="\t", index=False)
    assert main(["regress", str(file), "--target", "y", "--kernels", "epanechnikov", "--out", str(out)]) == 0
    assert isinstance(KernelClassifier.load(out / "model.safetensors"), KernelClassifier)
    assert "right labels" in spoken(capsys)
    predicted = tmp_path / "p.csv"
    assert main(["regress", str(file), "--predict", str(out), "--out", str(predicted)]) == 0
    found = pd.read_csv(predicted)
    assert (found["y"] == table["y"]).mean() > 0.8
    assert found["probability"].between(0.5, 1).all()


def write(name, data):
    def make(folder):
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return [str(folder / name), "--target", "y"]

    return make


def many(names):
    return "x,y\n" + "\n".join(f"{i},{name}" for i, name in enumerate(names))


WRONG = {
    "no file": (lambda folder: [str(folder / "no.csv"), "--target", "y"], "there is no file"),
    "another kind": (write("a.xlsx", "x"), "no table that can be read"),
    "empty": (write("a.csv", ""), "cannot be read as a table"),
    "a first line only": (write("a.csv", "x,y\n"), "no rows below its first line"),
    "ragged": (write("a.csv", 'x,y\n1,2\n1,2,3,"4'), "cannot be read as a table"),
    "not a gzip": (write("a.csv.gz", "x,y\n1,2\n"), "cannot be read as a table"),
    "a cut gzip": (write("a.csv.gz", gzip.compress(b"x,y\n" * 999)[:-20]), "cannot be read as a table"),
    "not utf-8": (write("a.csv", b"x,y\n\xff,2\n"), "cannot be read as a table"),
    "no parquet": (write("a.parquet", "x"), "cannot be read as a table" if PYARROW else "needs pyarrow"),
    "no such column": (write("a.csv", "x,z\n1,2\n"), "has no column 'y'; it has x, z"),
    "one column": (write("a.csv", "y\n" + "1\n2\n" * 20), "no column to predict 'y' from"),
    "few rows": (write("a.csv", "x,y\n" + "1,2\n" * 5), "has 5 rows without a missing value"),
    "all missing": (write("a.csv", "x,y\n" + ",2\n" * 50), "has 0 rows without a missing value"),
    "a constant target": (write("a.csv", many(["1"] * 30)), "the same number in every row"),
    "too many labels": (write("a.csv", many(f"n{i}" for i in range(200))), "has 200 labels"),
    "a rare label": (write("a.csv", many(["a"] * 30 + ["b"] * 2)), "a label with 2 rows"),
    "one label": (write("a.csv", many(["a"] * 30)), "has 1 labels"),
    "no target": (lambda folder: [str(folder / "a.csv")], "--target COLUMN"),
    "no model": (lambda f: [*write("a.csv", many("12"))(f)[:1], "--predict", str(f)], "holds no model"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, words = WRONG[name]
    assert main(["regress", *make(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "a-regression").exists()


def test_parquet_is_read(tmp_path):
    pytest.importorskip("pyarrow", reason="parquet files are read with pyarrow, which is not installed")
    frame().to_parquet(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "a.parquet"), frame(), check_dtype=False)


def test_a_damaged_model_is_one_line(tmp_path, capsys):
    file, out = tmp_path / "a.csv", tmp_path / "out"
    frame(40).to_csv(file, index=False)
    assert main(["regress", str(file), "--target", "y", "--kernels", "biweight", "--out", str(out)]) == 0
    whole = (out / "model.safetensors").read_bytes()
    for path, data in (("model.safetensors", whole[:-9]), ("columns.json", b"{}"), ("columns.json", b"[")):
        kept = (out / path).read_bytes()
        (out / path).write_bytes(data)
        capsys.readouterr()
        assert main(["regress", str(file), "--predict", str(out), "--out", str(tmp_path / "p.csv")]) == 2
        assert "damaged" in capsys.readouterr().err
        assert not (tmp_path / "p.csv").exists()
        (out / path).write_bytes(kept)
