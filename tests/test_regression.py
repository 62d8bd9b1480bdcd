"""Kernel regression: against sums written out in numpy, statsmodels, and scikit-learn's own suite."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import parzen
from parzen import regression
from parzen.regression import KernelClassifier, KernelRegressor, law

KERNELS = [
    "gaussian", "epanechnikov", "biweight", "triweight", "entmax?alpha=1.3", "normrelu", "relumax",
    "knn_gaussian?k=12", "knn_uniform?k=12", "uniform", "gaussian_truncated", "power?r=2&radius=h",
]  # fmt: skip


def table(n=120, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    y = np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=n)
    return X, y


def brute_weights(x, X, h, kernel, leave_out=None):
    """w(x) by the formulas: threshold by bisection, distances one by one, in float64."""
    name, _, rest = kernel.partition("?")
    u2 = (((x - X) / h) ** 2).sum(1)
    s = 1 - 0.5 * u2
    if leave_out is not None:
        s[leave_out] = -np.inf
    if name == "gaussian":
        phi = np.exp(s - s.max())
    elif name in ("normrelu", "uniform", "gaussian_truncated", "power"):
        inside = (u2 <= 1) & np.isfinite(s)
        shape = {"normrelu": 1 - u2, "uniform": np.ones_like(u2), "power": (1 - u2) ** 2}
        phi = np.where(inside, shape.get(name, np.exp(-u2 / 2)), 0)
    elif name == "relumax":
        phi = np.maximum(s - s.max() + 1, 0)
    elif name.startswith("knn"):
        cut = np.sort(s)[-int(rest.removeprefix("k="))]
        phi = np.where(s >= cut, np.exp(s - s.max()) if name == "knn_gaussian" else 1, 0)
    else:
        r = {"epanechnikov": 1, "biweight": 2, "triweight": 3, "entmax": 1 / 0.3}[name]
        low, high = s.max() / r - 1, s.max() / r
        for _ in range(200):
            middle = (low + high) / 2
            more = (np.maximum(s / r - middle, 0) ** r).sum() > 1
            low, high = (middle, high) if more else (low, middle)
        phi = np.maximum(s / r - low, 0) ** r
    total = phi.sum()
    return phi / total if total > 0 else phi


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prediction_is_the_weighted_mean(kernel):
    X, y = table()
    h = np.array([0.8, 1.5, 2.0])
    model = KernelRegressor(kernel, bandwidth=h, outside="nan").fit(X, y)
    Q = np.random.default_rng(1).normal(size=(40, 3))
    W = np.array([brute_weights(q, X, h, kernel) for q in Q])
    expected = np.where(W.sum(1) > 0, W @ y, np.nan)
    np.testing.assert_allclose(model.predict(Q), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(model.neighbours(Q).toarray(), W, rtol=1e-7, atol=1e-9)
    _, std = model.predict(Q, return_std=True)
    spread = np.sqrt((W * (y - expected[:, None]) ** 2).sum(1))
    np.testing.assert_allclose(std, np.where(W.sum(1) > 0, spread, np.nan), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_leave_one_out_is_a_fit_without_the_point(kernel):
    X, y = table(60)
    h = [1.0, 1.5, 2.0]
    model = KernelRegressor(kernel, bandwidth=h).fit(X, y)
    residual = []
    for i in range(60):
        rest = KernelRegressor(kernel, bandwidth=h).fit(np.delete(X, i, 0), np.delete(y, i))
        residual.append(y[i] - rest.predict(X[i : i + 1])[0])
    expected = 1 - np.square(residual).sum() / np.square(y - y.mean()).sum()
    assert model.loo_score_ == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_degrees_of_freedom_and_support(kernel):
    X, y = table(80)
    h = np.array([0.8, 1.5, 2.0])
    model = KernelRegressor(kernel, bandwidth=h).fit(X, y)
    W = np.array([brute_weights(x, X, h, kernel) for x in X])
    assert model.effective_df_ == pytest.approx(np.trace(W), rel=1e-8)
    assert model.n_support_ == pytest.approx((W > 1e-15).sum(1).mean(), rel=0.02)


@pytest.mark.parametrize("degree", [0, 1])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "gaussian"])
def test_a_tree_of_the_points_changes_nothing(kernel, degree):
    X, y = table(3000, 2)
    # Queries far away have few neighbours, those in the middle more than the first look takes.
    Q = np.random.default_rng(1).normal(size=(300, 2)) * 1.5
    model = KernelRegressor(kernel, bandwidth=[0.15, 0.2], degree=degree, outside="nan").fit(X, y)
    assert model._tree is not None
    # A line needs points around it: far from them, or of few that nearly coincide, rounding grows.
    inside = (np.abs(Q).max(1) < 1.5) & (np.diff(model.neighbours(Q).indptr) > 9)
    many = inside if degree else np.full(300, True)
    assert many.sum() > 80
    tree, std_tree = model.predict(Q, return_std=True)
    model._tree = None
    plain, std = model.predict(Q, return_std=True)
    close = {"rtol": 0, "atol": 1e-10 if degree else 1e-11}
    np.testing.assert_allclose(tree[many], plain[many], **close)
    np.testing.assert_allclose(std_tree[many], std[many], **close)


@pytest.mark.parametrize("outside", ["nearest", "mean"])
@pytest.mark.parametrize("kernel", ["biweight", "normrelu", "relumax", "knn_uniform?k=12"])
def test_the_tree_leaves_points_out_as_the_pass_does(kernel, outside):
    X, y = table(2500, 2)
    X[:20] *= 6  # lonely ones
    model = KernelRegressor(kernel, bandwidth=[0.15, 0.2], outside=outside, random_state=0).fit(X, y)
    assert model._tree is not None
    rows = np.concatenate([np.arange(100), np.arange(2000, 2100)])
    tree, neighbours = model._leave_out(rows), model.neighbours(X[:200])
    own, support = model.effective_df_, model.n_support_
    model._tree = None
    np.testing.assert_allclose(tree, model._leave_out(rows), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(neighbours.toarray(), model.neighbours(X[:200]).toarray(), atol=1e-10)
    model._assess(np.sort(np.random.RandomState(0).permutation(2500)[:2048]))
    assert model.effective_df_ == pytest.approx(own, rel=1e-9)
    # A pass sees, in fewer rows, also what rounding leaves.
    assert model.n_support_ == pytest.approx(support, rel=0.02)


def test_a_combination_of_features_is_learned():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 6)) * [1, 10, 1, 0.1, 1, 1] + 5
    direction = np.array([1, 0.1, 1, 0, 0, 0]) / np.sqrt(3)
    y = np.sin(2 * X @ direction) + 0.1 * rng.normal(size=800)
    plain = KernelRegressor(random_state=0).fit(X, y)
    learned = KernelRegressor(features=1, random_state=0).fit(X, y)
    assert learned.map_.shape == (6, 1)
    along = learned.map_[:, 0] / np.linalg.norm(learned.map_[:, 0]) * np.sign(learned.map_[0, 0])
    np.testing.assert_allclose(along, direction / np.linalg.norm(direction), atol=0.03)
    assert learned.loo_score_ > 0.95
    assert plain.loo_score_ < learned.loo_score_ - 0.02
    # It is kernel regression of the combination.
    by_hand = KernelRegressor(bandwidth=1.0).fit(X @ learned.map_, y)
    np.testing.assert_allclose(learned.predict(X[:50]), by_hand.predict(X[:50] @ learned.map_), atol=1e-9)
    assert 1 / np.linalg.norm(learned.map_[0]) == pytest.approx(learned.bandwidth_[0])


def test_carried_bandwidths_can_be_checked(capsys):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4500, 1))
    y = np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=4500)
    model = KernelRegressor("biweight", refine=True, verbose=True, random_state=0).fit(X, y)
    assert sorted(model.refined_) == pytest.approx([0.5, 2**-0.5, 1, 2**0.5, 2])
    assert 1 - model.loo_score_ == pytest.approx(min(model.refined_.values()), rel=1e-9)
    plain = KernelRegressor("biweight", random_state=0).fit(X, y)
    best = min(model.refined_, key=model.refined_.get)
    np.testing.assert_allclose(model.bandwidth_, plain.bandwidth_ * best)
    assert "bandwidths times 0.50, 4,500 points" in capsys.readouterr().out


def test_queries_may_lie_in_a_file(tmp_path):
    X, y = table(300, 2)
    model = KernelRegressor(bandwidth=[0.3, 1.0]).fit(X, y)
    file = np.memmap(tmp_path / "queries", np.float32, "w+", shape=(70_000, 2))
    file[:] = np.random.default_rng(1).normal(size=file.shape)
    np.testing.assert_array_equal(model.predict(file)[-5:], model.predict(np.array(file[-5:])))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "biweight"},
        {"kernel": "epanechnikov", "degree": 1, "bandwidth": 3.0},
        {"kernel": "relumax", "metric": "cosine"},
        {"kernel": "normrelu", "bandwidth": 0.2},
        {"kernel": "normrelu", "bandwidth": 0.2, "outside": "nan"},
        {"kernel": "knn_uniform?k=5", "bandwidth": 1.0},
        {"kernel": "triweight", "features": 1},
        {"kernel": "biweight", "refine": True},
    ],
    ids=lambda options: ",".join(str(value) for value in options.values()),
)
def test_a_table_may_lie_in_a_file(options, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(900, 3)).astype(np.float32)
    X[700:] = X[:200]
    y = np.stack([np.sin(X[:, 0]), X[:, 1]], 1) + 0.1 * rng.normal(size=(900, 2))
    weight = rng.integers(0, 3, 900)
    queries = rng.normal(size=(50, 3))
    file = np.memmap(tmp_path / "table", np.float32, "w+", shape=X.shape)
    file[:] = X
    monkeypatch.setattr(regression, "_TUNED", 300)
    held = KernelRegressor(random_state=0, **options).fit(X, y, weight)
    for name, number in (("_HELD", 0), ("_READ", 500), ("_PASS", 30)):
        monkeypatch.setattr(regression, name, number)
    read = KernelRegressor(random_state=0, **options).fit(file, y, weight)
    assert isinstance(read._points.z, regression._Mapped)
    assert read.loo_score_ == pytest.approx(held.loo_score_, abs=1e-12)
    assert read.n_support_ == held.n_support_
    assert read.effective_df_ == pytest.approx(held.effective_df_)
    np.testing.assert_allclose(read.bandwidth_, held.bandwidth_)
    np.testing.assert_allclose(read.predict(queries), held.predict(queries), rtol=0, atol=1e-11)
    found, wanted = read.neighbours(queries), held.neighbours(queries)
    np.testing.assert_allclose(found.toarray(), wanted.toarray(), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="keep the file"):
        read.save(tmp_path / "model")


def test_a_table_in_a_file_needs_a_compact_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(regression, "_HELD", 0)
    file = np.memmap(tmp_path / "table", np.float64, "w+", shape=(20, 2))
    with pytest.raises(ValueError, match="gaussian gives every row weight"):
        KernelRegressor("gaussian").fit(file, np.zeros(20))


def test_distinct_rows_are_found_whatever_their_code(monkeypatch):
    X = np.array([[0.0, 1], [-0.0, 1], [2, 3], [1, 0], [2, 3], [3, 2], [0, 1]])
    kept = np.array([1, 2, 3, 4, 5, 6])
    monkeypatch.setattr(regression, "_READ", 4)
    first, which = regression._distinct(X, kept)
    assert first.tolist() == [1, 2, 3, 5]
    assert which.tolist() == [0, 1, 2, 1, 3, 0]
    # All rows share a code.
    monkeypatch.setattr(regression, "_mixed", lambda x: np.zeros(len(x), np.uint64))
    assert [x.tolist() for x in regression._distinct(X, kept)] == [first.tolist(), which.tolist()]


_LARGER = """
import resource, sys
import numpy as np, torch
from parzen.regression import KernelRegressor

table = np.memmap(sys.argv[1], np.float32, "r", shape=(1 << 21, 500))
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
try:
    np.array(table)
except MemoryError:
    pass
else:
    raise SystemExit("the limit does nothing")
y = np.array(table[:, 0], dtype=np.float64)
model = KernelRegressor(bandwidth=3.0, random_state=0).fit(table, y)
# A query next to a point gets that point's target: all others are too far for any weight.
found = model.predict(table[::9973] + np.float32(1e-4))
assert np.abs(found - y[::9973]).max() < 1e-12, np.abs(found - y[::9973]).max()
"""


@pytest.mark.slow
def test_a_table_larger_than_memory(tmp_path):
    rng = np.random.default_rng(0)
    with (tmp_path / "table").open("wb") as file:
        for _ in range(1 << 7):
            file.write(rng.normal(size=(1 << 14, 500)).astype(np.float32).tobytes())
    try:
        subprocess.run([sys.executable, "-c", _LARGER, str(tmp_path / "table")], check=True, timeout=1800)
    finally:
        (tmp_path / "table").unlink()


@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "normrelu", "relumax"])
def test_local_linear_is_weighted_least_squares(kernel):
    X, y = table(200, 2)
    h = np.array([1.2, 1.7])
    model = KernelRegressor(kernel, bandwidth=h, degree=1).fit(X, y)
    for q in np.random.default_rng(1).normal(size=(15, 2)) * 0.7:
        root = np.sqrt(brute_weights(q, X, h, kernel))[:, None]
        design = np.column_stack([np.ones(200), X - q])
        expected = np.linalg.lstsq(root * design, root[:, 0] * y, rcond=None)[0][0]
        assert model.predict(q[None])[0] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_two_points_close_together_say_nothing_far_away():
    X = np.concatenate([np.linspace(0, 1, 50), [5.0, 5.001]])[:, None]
    y = np.append(X[:50, 0], [5.0, 5.2])
    model = KernelRegressor("epanechnikov", bandwidth=0.3, degree=1).fit(X, y)
    # The line through the two alone has slope 200.
    (found,) = model.predict([[5.5]])
    assert found == pytest.approx(5.1, abs=0.002)


def test_a_line_is_fitted_exactly():
    X, _ = table(100, 2)
    y = 3 + X @ [2.0, -1.0]
    model = KernelRegressor(degree=1).fit(X, y)
    Q = np.random.default_rng(5).normal(size=(20, 2))
    np.testing.assert_allclose(model.predict(Q), 3 + Q @ [2.0, -1.0], atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # statsmodels' own
@pytest.mark.parametrize(("degree", "kind"), [(0, "lc"), (1, "ll")])
def test_statsmodels_agrees(degree, kind, monkeypatch):
    from statsmodels.nonparametric.kernel_regression import KernelReg

    X, y = table(150, 2)
    bw = [0.4, 0.9]
    theirs = KernelReg(y, X, var_type="cc", reg_type=kind, bw=np.array(bw))
    Q = np.random.default_rng(2).normal(size=(30, 2))
    ours = KernelRegressor("gaussian", bandwidth=bw, degree=degree).fit(X, y)
    np.testing.assert_allclose(ours.predict(Q), theirs.fit(Q)[0], rtol=1e-6, atol=1e-6)
    # Theirs trusts lines far from all points.
    monkeypatch.setattr(regression, "_FAR", 1e12)
    ours.fit(X, y)
    left_out = np.asarray(theirs.cv_loo(np.array(bw), theirs.est[kind])).item()
    assert np.mean(ours._residual**2) == pytest.approx(left_out, rel=1e-6)


@pytest.mark.parametrize("degree", [0, 1])
def test_the_bandwidths_are_a_minimum_of_the_error(degree):
    X, y = table(150, 2)
    model = KernelRegressor("biweight", degree=degree).fit(X, y)
    least = model._error(torch.from_numpy(np.log(model.bandwidth_ / model._spread)), model._points)
    for feature in range(2):
        for factor in (0.8, 1.25):
            h = model.bandwidth_.copy()
            h[feature] *= factor
            other = model._error(torch.from_numpy(np.log(h / model._spread)), model._points)
            assert other >= least - 1e-6
    # Against a grid that knows nothing of gradients.
    grid = np.geomspace(0.05, 50, 12)
    errors = [
        1 - KernelRegressor("biweight", degree=degree, bandwidth=[a, b]).fit(X, y).loo_score_
        for a in grid for b in grid
    ]  # fmt: skip
    assert 1 - model.loo_score_ <= min(errors) + 1e-3


def test_a_feature_that_says_nothing_gets_a_wide_bandwidth():
    X, y = table(400, 2)
    h = KernelRegressor().fit(X, y).bandwidth_
    assert h[1] > 5 * h[0]


@pytest.mark.parametrize("move", [(1e6, 1.0), (0.0, 1e-6), (1e6, 1e-2), (-1e3, 1e5)])
@pytest.mark.parametrize("kernel", ["biweight", "normrelu", "gaussian"])
def test_shifted_and_scaled_columns(kernel, move):
    shift, size = move
    X, y = table(200, 2)
    h = np.array([0.6, 0.9])
    moved = X * [size, 1] + [shift, -shift]
    # What the rounded columns are, as they were before they moved.
    back = (moved - [shift, -shift]) / [size, 1]
    expected = np.array([brute_weights(q, back, h, kernel) @ y for q in back[:50]])
    model = KernelRegressor(kernel, bandwidth=h * [size, 1]).fit(moved, y)
    np.testing.assert_allclose(model.predict(moved[:50]), expected, rtol=1e-5, atol=1e-7)
    searched = KernelRegressor(kernel).fit(moved, y)
    plain = KernelRegressor(kernel).fit(back, y)
    assert searched.loo_score_ == pytest.approx(plain.loo_score_, abs=2e-3)


@pytest.mark.parametrize("outside", ["nearest", "mean", "nan"])
def test_an_empty_neighbourhood_is_what_was_asked_for(outside):
    X = np.array([[0.0], [1.0], [1.5], [10.0]])
    y = np.array([1.0, 2.0, 4.0, 40.0])
    model = KernelRegressor("normrelu", bandwidth=1.0, outside=outside).fit(X, y)
    expected = {"nearest": 40.0, "mean": y.mean(), "nan": np.nan}[outside]
    mean, std = model.predict([[30.0], [0.2]], return_std=True)
    np.testing.assert_allclose(mean[0], expected)
    assert np.isnan(std[0])
    assert not np.isnan(std[1])
    assert mean[1] == pytest.approx(((1 - 0.04) * 1 + (1 - 0.64) * 2) / (0.96 + 0.36))
    # Left out, the lonely points have nobody near: never the value 0 unnoticed.
    assert np.isfinite(model.loo_score_)
    left = y - model._residual[:, 0]
    alone = y.mean() if outside == "mean" else 4.0
    assert left[3] == pytest.approx(alone)


def test_copies_of_a_row_are_its_weight():
    X, y = table(50, 2)
    rng = np.random.default_rng(3)
    times = rng.integers(0, 4, 50)
    Q = rng.normal(size=(20, 2))
    copies = np.repeat(X, times, 0), np.repeat(y, times)
    for kernel in KERNELS:
        weighted = KernelRegressor(kernel, bandwidth=[0.5, 2.0]).fit(X, y, sample_weight=times)
        copied = KernelRegressor(kernel, bandwidth=[0.5, 2.0]).fit(*copies)
        np.testing.assert_allclose(weighted.predict(Q), copied.predict(Q), rtol=1e-12, atol=1e-12)
        assert weighted.loo_score_ == pytest.approx(copied.loo_score_, rel=1e-9)
    # The search ends where the error is flat, to its own tolerance.
    weighted, copied = KernelRegressor().fit(X, y, sample_weight=times), KernelRegressor().fit(*copies)
    np.testing.assert_allclose(weighted.predict(Q), copied.predict(Q), rtol=1e-3, atol=1e-3)


def test_neighbours_are_the_rows_that_were_given():
    X = np.array([[0.0], [0.0], [1.0], [9.0]])
    model = KernelRegressor("normrelu", bandwidth=2.0).fit(
        X, [1.0, 3.0, 5.0, 7.0], sample_weight=[1, 3, 2, 0]
    )
    w = model.neighbours([[0.5]]).toarray()[0]
    np.testing.assert_allclose(w, [4 / 6 / 4, 4 / 6 * 3 / 4, 2 / 6, 0])
    assert model.predict([[0.5]])[0] == pytest.approx(w @ [1, 3, 5, 7])


def test_the_interval_covers():
    for coverage in (0.5, 0.9):
        held = []
        for seed in range(10):
            X, y = table(300, 1, seed)
            model = KernelRegressor().fit(X, y)
            Xn, yn = table(200, 1, 1000 + seed)
            low, high = model.predict_interval(Xn, coverage)
            held.append(((low <= yn) & (yn <= high)).mean())
        assert np.mean(held) == pytest.approx(coverage, abs=0.03)
    few = KernelRegressor(bandwidth=1.0).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])
    assert np.isinf(few.predict_interval([[0.5]], 0.9)[1]).all()


def test_probabilities_may_be_exactly_zero():
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(size=(60, 2)) - 3, rng.normal(size=(60, 2)) + 3])
    y = np.repeat(["left", "right"], 60)
    model = KernelClassifier("epanechnikov").fit(X, y)
    p = model.predict_proba([[-3, -3], [3, 3]])
    np.testing.assert_array_equal(p, [[1, 0], [0, 1]])
    assert list(model.predict([[-3, -3], [3, 3]])) == ["left", "right"]
    assert model.loo_score_ == pytest.approx(1, abs=0.02)


def test_cosine_takes_directions_only():
    X, y = table(100, 5)
    h = 0.7
    for kernel in ("gaussian", "biweight", "normrelu"):
        model = KernelRegressor(kernel, bandwidth=h, metric="cosine", outside="nan").fit(X, y)
        unit = X / np.linalg.norm(X, axis=1, keepdims=True)
        Q = np.random.default_rng(4).normal(size=(20, 5)) * 100
        expected = [brute_weights(q / np.linalg.norm(q), unit, h, kernel) for q in Q]
        expected = np.array([w @ y if w.sum() else np.nan for w in expected])
        np.testing.assert_allclose(model.predict(Q), expected, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="row 1 is all zeros"):
        KernelRegressor(metric="cosine").fit([[1.0, 0], [0, 0], [0, 1]], [1.0, 2, 3])


def test_the_law():
    assert law(parzen.kernel("biweight"), 7) == 0
    assert law(parzen.kernel("epanechnikov"), 3, smoothness=1) == 0
    assert law(parzen.kernel("epanechnikov"), 2) == pytest.approx(-2 / 6)
    assert law(parzen.kernel("triweight"), 2) == pytest.approx(2 / 18)
    assert law(parzen.kernel("gaussian"), 2) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    "X",
    [
        np.ones((1, 1)),
        np.ones((5, 2)),
        np.arange(4.0)[:, None],
        np.random.default_rng(0).normal(size=(20, 1000)),
    ],
    ids=["one row", "constant", "one column", "1,000 columns"],
)
def test_odd_tables(X):
    y = np.arange(len(X), dtype=float)
    for kernel in ("biweight", "gaussian", "knn_uniform"):
        model = KernelRegressor(kernel).fit(X, y)
        assert np.isfinite(model.predict(X)).all()
        assert (model.predict(X) >= y.min() - 1e-9).all()
        assert (model.predict(X) <= y.max() + 1e-9).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bandwidth": "silverman"}, "bandwidth must be 'cv' or numbers > 0"),
        ({"bandwidth": -1.0}, "bandwidth must be > 0"),
        ({"bandwidth": [1.0, 2.0]}, "one number or 3"),
        ({"degree": 2}, "degree must be one of 0, 1"),
        ({"metric": "manhattan"}, "metric must be one of"),
        ({"outside": "zero"}, "outside must be one of"),
        ({"kernel": "tricube"}, "unknown kernel 'tricube'"),
        ({"kernel": parzen.kernel("relumax", margin=torch.tensor(1.0))}, "numbers for its parameters"),
        ({"degree": 1, "metric": "cosine"}, "needs metric='euclidean'"),
        ({"features": "all"}, "features must be 'scale', 'learn' or a number > 0"),
        ({"features": 0}, "features must be 'scale', 'learn' or a number > 0"),
        ({"features": "learn", "bandwidth": 1.0}, "learned features need"),
        ({"features": 2, "metric": "cosine"}, "learned features need"),
    ],
    ids=str,
)
def test_wrong_options_say_what_is_right(options, words):
    X, y = table(20)
    with pytest.raises(ValueError, match=words):
        KernelRegressor(**options).fit(X, y)


def test_wrong_tables_are_refused_as_scikit_learn_does():
    X, y = table(20)
    with pytest.raises(ValueError, match="at least one non-zero"):
        KernelRegressor().fit(X, y, sample_weight=np.zeros(20))
    with pytest.raises(ValueError, match="NaN"):
        KernelRegressor().fit(np.where(X > 2, np.nan, X) * np.nan, y)
    with pytest.raises(NotFittedError):
        KernelRegressor().neighbours(X)
    with pytest.raises(ValueError, match=r"coverage must be in \(0, 1\)"):
        KernelRegressor().fit(X, y).predict_interval(X, 1.0)
    with pytest.raises(ValueError, match="at most 64"):
        KernelRegressor(degree=1).fit(np.ones((3, 65)), np.ones(3))


def test_it_is_an_estimator_among_others():
    X, y = table(80)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), KernelRegressor(bandwidth=0.5)),
        {"kernelregressor__kernel": ["biweight", "gaussian"], "kernelregressor__degree": [0, 1]},
        cv=3,
    )
    search.fit(X.astype(np.float32), np.column_stack([y, -y]))
    again = pickle.loads(pickle.dumps(search))
    np.testing.assert_array_equal(
        again.predict(X[:3].astype(np.float32)), search.predict(X[:3].astype(np.float32))
    )
    assert again.predict(X[:3].astype(np.float32)).shape == (3, 2)


X0, y0 = table()
SAVED = {
    "tree": lambda: KernelRegressor(bandwidth=0.2, random_state=3).fit(*table(2100, 2)),
    "outputs": lambda: KernelRegressor("normrelu", degree=1).fit(table(80)[0], table(80)[0][:, :2]),
    "cosine": lambda: KernelRegressor(
        "epanechnikov", bandwidth=0.7, metric="cosine", random_state=np.random.RandomState(0)
    ).fit(*table(50)),
    "learned": lambda: KernelRegressor("entmax?alpha=1.3", features=1).fit(*table(60)),
    "weights": lambda: KernelRegressor(bandwidth=[1.0, 2.0]).fit(*table(40, 2), np.arange(40) % 3),
    "frame": lambda: KernelRegressor(bandwidth=1.0).fit(pd.DataFrame(X0, columns=list("abc")), y0),
    "classes": lambda: KernelClassifier(bandwidth=1.0).fit(X0, np.where(y0 > 0, "up", "down")),
    "numbers": lambda: KernelClassifier(bandwidth=1.0).fit(X0, (y0 > 0).astype(int)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_is_the_same_model(name, tmp_path):
    model, path = SAVED[name](), tmp_path / "model.safetensors"
    model.save(path)
    again = type(model).load(path)
    X = table(30, model.n_features_in_, seed=9)[0]
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert (again.neighbours(X) != model.neighbours(X)).nnz == 0
    given, kept = model.get_params(), again.get_params()
    assert {**given, "random_state": 0} == {**kept, "random_state": 0}
    for attribute in [one for one in vars(model) if one.endswith("_") and not one.startswith("_")]:
        np.testing.assert_array_equal(getattr(again, attribute), getattr(model, attribute))
    if isinstance(model, KernelRegressor):
        np.testing.assert_array_equal(again.predict_interval(X, 0.8), model.predict_interval(X, 0.8))


def test_files_that_are_no_models_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    model = KernelRegressor(bandwidth=1.0).fit(*table(20))
    with pytest.raises(NotFittedError):
        KernelRegressor().save(path)
    with pytest.raises(FileNotFoundError):
        KernelRegressor.load(path)
    model.save(path)
    with pytest.raises(ValueError, match="another class"):
        KernelClassifier.load(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:50], whole[:-8], b"\x80" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged, or no file of KernelRegressor\.save"):
            KernelRegressor.load(path)
    model._point[0] = 20
    model.save(path)
    with pytest.raises(ValueError, match="a row that does not exist"):
        KernelRegressor.load(path)
    model._centre = model._centre[:2]
    model.save(path)
    with pytest.raises(ValueError, match="_centre"):
        KernelRegressor.load(path)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("estimator", [KernelRegressor(), KernelClassifier()], ids=lambda e: type(e).__name__)
def test_scikit_learn_suite(estimator):
    """Every check of ``check_estimator``: one failure raises."""
    ran = 0
    for one, check in estimator_checks_generator(estimator):
        name = getattr(check, "func", check).__name__
        if name == "check_array_api_input":
            continue  # optional in scikit-learn: it needs SCIPY_ARRAY_API to be set
        check(one)
        ran += 1
    assert ran > 50
