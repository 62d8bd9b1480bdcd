"""The benchmark of kernel regression: what it measures, and that nothing wrong is timed."""

import json

import numpy as np
import pandas as pd
import pytest

from parzen.cli import main
from parzen.lab.bench import regression as bench
from parzen.regression import KernelRegressor


def test_quick(tmp_path, capsys, monkeypatch):
    small = pd.DataFrame({"x": np.linspace(0, 6, 60)})
    small["y"] = np.sin(small["x"])
    monkeypatch.setattr(bench, "tables", lambda: {"sine": (small, "y")})
    monkeypatch.setattr(bench, "SIZES", bench.SIZES[:1])
    options = ["--quick", "--kernels", "biweight", "--out", str(tmp_path)]
    assert main(["bench", "regression", *options]) == 0
    lines = [json.loads(line) for line in (tmp_path / "regression.jsonl").read_text().splitlines()]
    (timed,) = [one for one in lines if "ratio" in one]
    assert (timed["points"], timed["features"], timed["queries"]) == (1000, 2, 1000)
    assert 10 < timed["support"] < 200
    assert timed["ratio"] == pytest.approx(timed["seconds"] / timed["nearest_seconds"])
    told = {one["model"]: one["score"] for one in lines if "table" in one}
    assert {"biweight", "biweight, local lines", "nearest 16", "linear", "boosted trees"} <= told.keys()
    assert np.mean(told["biweight"]) > 0.95
    assert "| points | features" in (tmp_path / "regression.md").read_text()
    assert "sine: 60 rows" in capsys.readouterr().out


def test_tables_are_there():
    pytest.importorskip("statsmodels", reason="its tables are among those that are compared")
    found = bench.tables()
    assert len(found["diabetes (scikit-learn)"][0]) == 442
    assert len(found["randhie (statsmodels)"][0]) == 20_190
    for frame, target in found.values():
        assert target in frame


def test_a_wrong_prediction_is_not_timed(monkeypatch):
    right = KernelRegressor.predict
    monkeypatch.setattr(KernelRegressor, "predict", lambda self, X: right(self, X) + 1e-6)
    with pytest.raises(AssertionError, match="nothing is timed"):
        bench.time_size(500, 2, 500, 0.5)
