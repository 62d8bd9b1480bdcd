"""``parzen regress``: kernels compared on a table of one's own, the best of them as a model, and its use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from parzen.lab.console import markdown_table
from parzen.lab.data.table import Encoding, read_table, target_of
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.reports.figures import COLORS, Panel, draw
from parzen.lab.statistics import mean
from parzen.regression import KernelClassifier, KernelRegressor

Array: TypeAlias = "np.ndarray[Any, Any]"

KERNELS = ("gaussian", "epanechnikov", "biweight", "normrelu", "knn_gaussian?k=16")
# The longest list of labels that is taken for classes, and the smallest number of rows to learn from.
CLASSES, ROWS = 100, 10
MODEL, COLUMNS = "model.safetensors", "columns.json"
# Panels of the figure, points of a curve, rows that a partial effect is averaged over.
PANELS, POINTS, AVERAGED = 6, 60, 200


@dataclass(frozen=True)
class Score:
    """How one model does on one table.

    Attributes:
        model: its name.
        score: R², or the share of right labels, on each fold that was held out.
        left_out: the same for rows left out one by one; None where the model does not know.
        support: rows with weight, on average; None likewise.
        seconds: a fit and a prediction of one fold took, on average.
    """

    model: str
    score: tuple[float, ...]
    left_out: float | None
    support: float | None
    seconds: float


def compare(
    models: Mapping[str, Callable[[], Any]],
    X: Array | pd.DataFrame,
    y: Array,
    *,
    folds: int,
    seed: int = 0,
    show: Callable[[str], object] = print,
) -> list[Score]:
    """Each of ``models`` on the same folds: what it learns without a fold it is asked about that fold."""
    labels = y.dtype.kind not in "fiu"
    splitter = (StratifiedKFold if labels else KFold)(folds, shuffle=True, random_state=seed)
    X = np.asarray(X, dtype=np.float64)
    parts = list(splitter.split(X, y))
    scores = []
    for name, make in models.items():
        found, left_out, support, start = [], [], [], time.perf_counter()
        for train, test in parts:
            model = make().fit(X[train], y[train])
            found.append(float(model.score(X[test], y[test])))
            left_out.append(getattr(model, "loo_score_", np.nan))
            support.append(getattr(model, "n_support_", np.nan))
        seconds = (time.perf_counter() - start) / folds
        known = not np.isnan(support).any()
        scores.append(
            Score(
                name, tuple(found), float(np.mean(left_out)) if known else None,
                float(np.mean(support)) if known else None, seconds,
            )
        )  # fmt: skip
        show(f"{name}: {_figure(scores[-1])}, {seconds:.2f} s a fold")
    return scores


def _figure(score: Score) -> str:
    return mean(score.score).show()


def table(scores: Sequence[Score], measure: str) -> str:
    """The scores as Markdown, best first."""
    rows = [
        (
            one.model, _figure(one), "—" if one.left_out is None else f"{one.left_out:.3f}",
            "—" if one.support is None else f"{one.support:.1f}", f"{one.seconds:.2f}",
        )
        for one in sorted(scores, key=lambda one: -np.mean(one.score))
    ]  # fmt: skip
    return markdown_table(
        ("model", f"{measure}, held-out folds", "left out one by one", "rows with weight", "seconds a fold"),
        rows,
    )


def models_of(y: Array, kernels: Sequence[str], degree: int, features: Any, seed: int) -> dict[str, Any]:
    """Ways to make each model: the kernels, and what they are compared with."""
    if y.dtype.kind in "fiu":

        def kernel(name: str) -> Callable[[], Any]:
            return lambda: KernelRegressor(name, degree=degree, features=features, random_state=seed)

        beside = {"nearest 16": lambda: KNeighborsRegressor(16), "linear": LinearRegression}
    else:

        def kernel(name: str) -> Callable[[], Any]:
            return lambda: KernelClassifier(name, features=features, random_state=seed)

        beside = {
            "nearest 16": lambda: KNeighborsClassifier(16),
            "linear": lambda: LogisticRegression(max_iter=1000),
        }

    def scaled(make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: make_pipeline(StandardScaler(), make())

    return {name: kernel(name) for name in kernels} | {name: scaled(one) for name, one in beside.items()}


def regress(
    file: Path,
    target: str,
    *,
    out: Path,
    kernels: Sequence[str] = KERNELS,
    degree: int = 0,
    features: Any = "scale",
    folds: int = 5,
    seed: int = 0,
    show: Callable[[str], object] = print,
) -> list[Score]:
    """Compare ``kernels`` on the table in ``file``, and save the best.

    Args:
        file: csv, tsv, parquet, packed or not; its first line names the columns.
        target: the column to predict: numbers, or labels.
        out: a folder for ``table.md``, ``summary.json``, ``figure.png``, the model and its columns.
        kernels: their names.
        degree: 0, local means, or 1, local lines.
        features: as of ``KernelRegressor``.
        folds: how often a part of the rows is held out.
        seed: of the folds.
        show: receives what is said on the way.

    Raises:
        UserError: a table that cannot be used, with the reason.
    """
    frame = read_table(file)
    y = target_of(frame, target)
    number = pd.api.types.is_numeric_dtype(y) and not pd.api.types.is_bool_dtype(y)
    encoding, left_out = Encoding.of(frame.drop(columns=[target]))
    for sentence in left_out:
        show(f"left out: {sentence}")
    if not encoding.columns:
        raise UserError(f"{file} has no column to predict {target!r} from")
    X = encoding.numbers(frame)
    values = pd.to_numeric(y).to_numpy(dtype=np.float64, na_value=np.nan) if number else None
    whole = X.notna().all(axis=1) & (y.notna() if values is None else np.isfinite(values))
    missing = len(whole) - int(whole.sum())
    if missing:
        show(f"left out: {missing:,} of {len(whole):,} rows, with a missing value")
    if whole.sum() < max(ROWS, 2 * folds):
        raise UserError(
            f"{file} has {int(whole.sum())} rows without a missing value, "
            f"at least {max(ROWS, 2 * folds)} are needed; drop columns that are often empty"
        )
    X = X[whole]
    known = values[whole] if values is not None else y[whole].astype(str).to_numpy(dtype=str)
    if number and np.ptp(known) == 0:
        raise UserError(f"{target!r} is the same number in every row: there is nothing to predict")
    if not number:
        counts = np.unique(known, return_counts=True)[1]
        if not 1 < len(counts) <= CLASSES:
            raise UserError(f"{target!r} has {len(counts):,} labels: 2 to {CLASSES} can be told apart")
        if counts.min() < folds:
            raise UserError(f"{target!r} has a label with {counts.min()} rows, fewer than {folds} folds")
        if degree:
            raise UserError("--degree 1 needs a target of numbers: labels have no line")
    try:
        models = models_of(known, kernels, degree, features, seed)
        scores = compare(models, X, known, folds=folds, seed=seed, show=show)
        best = max(
            (one for one in scores if one.model in kernels), key=lambda one: float(np.mean(one.score))
        ).model
        model = models[best]().fit(X, known)
    except ValueError as error:
        raise UserError(str(error)) from error
    text = table(scores, "R²" if number else "right labels")
    show(text)
    out.mkdir(parents=True, exist_ok=True)
    model.save(out / MODEL)
    columns = {"target": target, "class": type(model).__name__, "columns": encoding.to_json()}
    summary = {
        "file": file.name, "target": target, "rows": len(known), "left out": [*left_out, missing],
        "model": best, "bandwidths": dict(zip(X.columns, model.bandwidth_.tolist(), strict=True)),
        "scores": [asdict(one) for one in scores],
    }  # fmt: skip
    for name, data in ((COLUMNS, columns), ("summary.json", summary)):
        write_whole(out / name, json.dumps(data, indent=1, ensure_ascii=False).encode())
    write_whole(out / "table.md", text.encode())
    write_whole(out / "figure.png", figure(model, X, known, target))
    show(f"saved {best} and its table and figure in {out}; use it: parzen regress NEW.csv --predict {out}")
    return scores


def predict(file: Path, folder: Path, *, out: Path, coverage: float = 0.9) -> int:
    """Predictions of the model in ``folder`` for the rows of ``file``, as a table in ``out``; how many.

    Of numbers also the ends of an interval, of labels also their probability. A row with a missing value, or
    a level that the model has not seen, gets none.

    Raises:
        UserError: no model there, or a table that does not have its columns.
    """
    try:
        columns = json.loads((folder / COLUMNS).read_text(encoding="utf-8"))
        encoding, target = Encoding.from_json(columns["columns"]), str(columns["target"])
        kind = {one.__name__: one for one in (KernelRegressor, KernelClassifier)}[columns["class"]]
        model = kind.load(folder / MODEL)
    except OSError as error:
        raise UserError(f"{folder} holds no model of `parzen regress`: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the model in {folder} is damaged, make it again: {error}") from error
    X = encoding.numbers(read_table(file))
    if list(X.columns) != model.feature_names_in_.tolist():
        raise UserError(f"the model in {folder} and its {COLUMNS} do not belong together, make them again")
    whole = X.notna().all(axis=1).to_numpy()
    found = pd.DataFrame(index=X.index)
    if whole.any():
        if isinstance(model, KernelRegressor):
            low, high = model.predict_interval(X[whole], coverage)
            said = {target: model.predict(X[whole]), "low": low, "high": high}
        else:
            chances = model.predict_proba(X[whole])
            said = {target: model.classes_[chances.argmax(1)], "probability": chances.max(1)}
        found = pd.DataFrame(said, index=X.index[whole]).reindex(X.index)
    write_whole(out, found.to_csv(index=False).encode())
    return int(whole.sum())


def figure(model: Any, X: pd.DataFrame, y: Array, target: str) -> bytes:
    """The fit with its interval over one feature; over more, the partial effect of those that matter most."""
    wide = model.bandwidth_ / np.maximum(X.std().to_numpy(), 1e-300)
    some = np.argsort(wide, kind="stable")[:PANELS]
    panels = [_panel(model, X, y, X.columns[i], target) for i in some]
    return draw(panels, (3.2, 2.5), "png", columns=3)


def _panel(model: Any, X: pd.DataFrame, y: Array, name: str, target: str) -> Panel:
    x = X[name].to_numpy()
    alone, numbers = len(X.columns) == 1, isinstance(model, KernelRegressor)
    low, high = np.quantile(x, (0, 1) if alone else (0.01, 0.99))
    grid = np.linspace(float(low), float(high), POINTS)
    if alone:
        rows = pd.DataFrame({name: grid})
        curves = model.predict(rows)[:, None] if numbers else model.predict_proba(rows)
        band = model.predict_interval(rows) if numbers else None
    else:
        some = X.iloc[np.random.default_rng(0).permutation(len(X))[:AVERAGED]]
        rows = pd.concat([some] * POINTS, ignore_index=True)
        rows[name] = np.repeat(grid, len(some))
        each = model.predict(rows)[:, None] if numbers else model.predict_proba(rows)
        curves, band = each.reshape(POINTS, len(some), -1).mean(1), None
    names = [target] if numbers else [f"{target}={label}" for label in model.classes_]

    def panel(axes: Any) -> None:
        if numbers and alone:
            axes.plot(x[:2000], y[:2000], ".", color="#88888866", markersize=3)
        if band is not None:
            axes.fill_between(grid, *band, color=COLORS[0], alpha=0.15, linewidth=0)
        for i, label in enumerate(names[: len(COLORS)]):
            axes.plot(grid, curves[:, i], color=COLORS[i], label=label)
        axes.set_xlabel(name)
        axes.set_ylabel(target if numbers else "probability")
        if not numbers:
            axes.legend(fontsize=7)

    return panel
