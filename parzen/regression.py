"""Kernel regression and classification for tables of data, as scikit-learn estimators on the attention op.

    f(x) = Σ_j w_j(x) y_j      w_j = φ(c·s_j − τ) / Σ_l φ(c·s_l − τ)      s_j = 1 − ½ Σ_e ((x_e − x_je)/h_e)²

A query attends to the training points, with one bandwidth h_e for each feature. ``kernel`` is any row of
``parzen.KERNELS``. What statistics calls the Epanechnikov kernel, with a neighbourhood of fixed radius h, is
``normrelu`` there; ``epanechnikov``, ``biweight`` and ``triweight`` are the same profiles with unit mass:
their neighbourhoods widen where points are few and are never empty.

Rows with the same features are one point that carries their weights: a row given twice is a row of weight 2,
and leaving a point out leaves no copy of it behind. Everything is computed in float64 on centred features.

Source: Nadaraya (1964), Watson (1964); local linear: Fan (1992); arXiv 2601.22766, §3. Needs scikit-learn
(``pip install 'parzen[sklearn]'``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from parzen import kernels, store
from parzen.attention import attention, weights
from parzen.kernels import Kernel, Nearest, Power, UnitMass, UnitNorm, WithinRadius

try:
    from scipy.optimize import minimize
    from scipy.sparse import csr_matrix, diags
    from scipy.spatial import KDTree
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError("parzen.regression needs scikit-learn: pip install 'parzen[sklearn]'") from error

if TYPE_CHECKING:
    from typing_extensions import Self

Array: TypeAlias = "np.ndarray[Any, Any]"

# Bandwidths are searched on so many points at most, from so many starts on fewer.
_TUNED, _TRIED, _STARTS = 4096, 512, 2
# Rows that are left out one by one for residuals, and numbers held at once.
_LEFT_OUT, _SCORES = 2048, 2**24
# What a file of a model holds: its numbers, and its tensors with the names of their axes.
_FORMAT = "parzen.regression/1"
_SETTINGS = ("n_features_in_", "_flat", "_rows", "loo_score_", "effective_df_", "n_support_")
_SHAPES = {
    "z": ("points", "coordinates"),
    "weight": ("points",),
    "y": ("points", "outputs"),
    "square": ("points", "outputs"),
    "_point": ("kept",),
    "_row": ("kept",),
    "_share": ("kept",),
    "_centre": ("features",),
    "_spread": ("features",),
    "_map": ("features", "coordinates"),
    "_scaled": ("bandwidths",),
    "bandwidth_": ("given",),
    "_mean": ("outputs",),
    "_residual": ("left out", "outputs"),
    "_residual_weight": ("left out",),
}
# Queries at once.
_BLOCK = 2**16
# Bytes from which a table in a file is read in blocks again and again, and not held.
_HELD = 2**28
# Queries of one such pass over it, and numbers of one block.
_PASS, _READ = 4096, 2**20
# Columns of a learned map before it is narrowed.
_WIDE = 16
# Of each feature's bandwidth, times its starting value.
_WIDEST = 1e3
_WIDEST_LOCAL_LINEAR = 64
# Squared distance from a neighbourhood, in its variances for each feature, from which its slope counts less.
_FAR = 9
# Where a tree of the points finds neighbours sooner than a pass over all of them.
_TREE_FEATURES, _TREE_POINTS = 8, 2048


class _Mapped:
    """Rows of a table in a file, changed as they are read: what of a tensor (n, d) is needed here."""

    def __init__(self, table: Array, rows: Array, change: Callable[[Array], Tensor]) -> None:
        self.table, self.rows, self.change = table, rows, change

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self[:1].shape[1]

    def __getitem__(self, index: Any) -> Tensor:
        return self.change(self.table[self.rows[index]])


def _in_a_file(X: Array) -> bool:
    """Whether X is a memory-mapped array, or a part of one, too large to hold."""
    base: Any = X
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return base is not None and X.nbytes > _HELD


def _blocks(X: Array, rows: Array) -> Iterator[tuple[slice, Array]]:
    """X[rows] in float64, with 0 for −0, block by block."""
    step = max(1, _READ // X.shape[1])
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        yield some, X[rows[some]].astype(np.float64) + 0.0


def _mixed(x: Array) -> Array:
    """A number for each row (Steele, Lea, Flood (2014), SplitMix, in each column; the sum wraps)."""
    bits = x.view(np.uint64) + np.arange(x.shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    mixed: Array = bits.sum(1)
    return mixed


def _distinct(X: Array, rows: Array) -> tuple[Array, Array]:
    """Of X[rows] the first row of each kind: (points,), and which of these every row is: (rows,)."""
    code = np.concatenate([_mixed(x) for _, x in _blocks(X, rows)])
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[which] != np.arange(len(rows)))
    pairs = zip(_blocks(X, rows[again]), _blocks(X, rows[first[which[again]]]), strict=True)
    if not all((x == y).all() for (_, x), (_, y) in pairs):
        # Different rows share a number, which takes intent.
        _, first, which = np.unique(X[rows] + 0.0, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return rows[first[order]], place[which.reshape(-1)]


@dataclass(frozen=True)
class _Points:
    """Distinct training points: what each carries, and which rows it stands for."""

    z: Any  # (n, d), centred and in units of the spread: a tensor, or read from a file
    weight: Tensor  # (n,): of its rows, added up
    y: Tensor  # (n, outputs): the weighted mean of their targets (less the mean of all, in regression)
    square: Tensor  # (n, outputs): that of the squares of y

    def part(self, index: Any) -> _Points:
        return _Points(self.z[index], self.weight[index], self.y[index], self.square[index])


@dataclass(frozen=True)
class _Fit:
    """What the points say about queries: means, local variances, and where there was nobody."""

    mean: Tensor  # (t, outputs)
    variance: Tensor  # (t, outputs)
    empty: Tensor  # (t,) bool


def law(kernel: Kernel, features: int, smoothness: float = 2.0) -> float:
    """The power of n with which 1/h² must grow for the least error of regression.

    ``(2r − 2β)/(r(2β + d))`` under unit mass, ``2/(2β + d)`` elsewhere, for d features and a target of
    smoothness 0 < β ≤ 2 (2: twice differentiable). It is 0 for the biweight in unit mass (r = β).

    Under unit mass a neighbourhood of radius H holds n·γʳ·H^{2r+d} ∝ 1, and the error is least at
    H ∝ n^{−1/(2β+d)}.
    """
    if isinstance(kernel.rule, UnitMass | UnitNorm) and isinstance(kernel.profile, Power):
        # What sums to 1 under a unit norm is the power r + 1.
        r = float(kernel.profile.r) + isinstance(kernel.rule, UnitNorm)
        return (2 * r - 2 * smoothness) / (r * (2 * smoothness + features))
    return 2 / (2 * smoothness + features)


class _KernelEstimator(BaseEstimator):
    """What regression and classification share: the points, the bandwidths, the neighbourhoods."""

    _centred = True
    _map: Tensor | None
    map_: Array
    bandwidth_: Array

    def __init__(
        self,
        kernel: str | Kernel = "biweight",
        *,
        bandwidth: Any = "cv",
        degree: int = 0,
        metric: str = "euclidean",
        features: Any = "scale",
        outside: str = "nearest",
        refine: bool = False,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.degree = degree
        self.metric = metric
        self.features = features
        self.outside = outside
        self.refine = refine
        self.verbose = verbose
        self.random_state = random_state

    # ---- fitting ---------------------------------------------------------------------------------

    def _check_parameters(self, features: int) -> Kernel:
        kernel = kernels.kernel(self.kernel)
        if kernel.learned is not None:
            raise ValueError(f"kernel must have numbers for its parameters, got {kernel}")
        for name, value, known in (
            ("degree", self.degree, (0, 1)),
            ("metric", self.metric, ("euclidean", "cosine")),
            ("outside", self.outside, ("nearest", "mean", "nan")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if self.degree == 1 and self.metric != "euclidean":
            raise ValueError("degree=1 needs metric='euclidean': a line through directions is not defined")
        if self.degree == 1 and features > _WIDEST_LOCAL_LINEAR:
            raise ValueError(
                f"degree=1 solves for every feature in every neighbourhood: at most {_WIDEST_LOCAL_LINEAR}, "
                f"got {features}; choose features, or degree=0"
            )
        learned = self.features == "learn" or (
            isinstance(self.features, Integral)
            and not isinstance(self.features, bool)
            and int(self.features) > 0
        )
        if not learned and self.features != "scale":
            raise ValueError(f"features must be 'scale', 'learn' or a number > 0, got {self.features!r}")
        if learned and (self.metric != "euclidean" or not isinstance(self.bandwidth, str)):
            raise ValueError("learned features need metric='euclidean' and bandwidth='cv'")
        return kernel

    def _check_directions(self, X: Array) -> None:
        zero = np.flatnonzero(~X.any(1))
        if self.metric == "cosine" and zero.size:
            raise ValueError(f"metric='cosine' needs a direction, row {zero[0]} is all zeros: drop it")

    def _fixed_bandwidth(self, features: int) -> Array | None:
        """The bandwidths that were given; None where they are to be found."""
        if isinstance(self.bandwidth, str):
            if self.bandwidth != "cv":
                raise ValueError(f"bandwidth must be 'cv' or numbers > 0, got {self.bandwidth!r}")
            return None
        h = check_array(
            np.atleast_1d(self.bandwidth), ensure_2d=False, dtype=np.float64, input_name="bandwidth"
        )
        wanted = 1 if self.metric == "cosine" else features
        if h.shape not in ((1,), (wanted,)):
            raise ValueError(f"bandwidth must be one number or {wanted}, got shape {h.shape}")
        if not (h > 0).all():
            raise ValueError(f"bandwidth must be > 0, got {self.bandwidth!r}")
        return np.broadcast_to(h, wanted).copy()

    def _standardised(self, X: Array) -> Tensor:
        x = np.asarray(X, dtype=np.float64)
        if self.metric == "euclidean":
            z = torch.from_numpy((x - self._centre) / self._spread)
            return z if self._map is None else z @ self._map
        return torch.from_numpy(x / self._spread / np.linalg.norm(x / self._spread, axis=-1, keepdims=True))

    def _fit(self, X: Array, y: Array, sample_weight: Any) -> None:
        """Points, bandwidths and residuals for targets y (rows, outputs)."""
        self._kernel, self._tree, self._map = self._check_parameters(X.shape[1]), None, None
        self._check_directions(X)
        fixed = self._fixed_bandwidth(X.shape[1])
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        kept = np.flatnonzero(weight)
        distinct, self._point = _distinct(X, kept)
        self._row, self._share = kept, weight[kept]
        euclidean = self.metric == "euclidean"
        self._centre = sum(x.sum(0) for _, x in _blocks(X, distinct)) / len(distinct)
        largest = np.max([np.abs(x).max(0) for _, x in _blocks(X, distinct)], 0)
        if euclidean:
            squares = sum(((x - self._centre) ** 2).sum(0) for _, x in _blocks(X, distinct))
            spread = np.sqrt(squares / len(distinct))
        else:
            spread = np.full(X.shape[1], largest.max())
        # Of a constant column rounding leaves about an ulp.
        tiny = 8 * np.finfo(np.float64).eps * largest
        self._spread = np.where(spread > tiny, spread, 1.0)
        self._varying = spread > tiny

        def added(values: Array) -> Array:
            sums = [np.bincount(self._point, x * self._share, len(distinct)) for x in values.T]
            return np.stack(sums, 1)

        total = added(np.ones((len(kept), 1)))
        # Of probabilities nothing is subtracted, so that 0 stays 0.
        self._mean = (
            np.average(y[kept], axis=0, weights=self._share) if self._centred else np.zeros(y.shape[1])
        )
        centred = y[kept] - self._mean
        columns = (total[:, 0], added(centred) / total, added(centred**2) / total)
        if not _in_a_file(X):
            z: Any = self._standardised(X[distinct])
        elif self._kernel.compact:
            z = _Mapped(X, distinct, self._standardised)
        else:
            raise ValueError(
                f"kernel {self._kernel} gives every row weight, too many of {X.nbytes >> 20} MB in a file: "
                "choose a compact kernel, or load it with numpy.array"
            )
        self._points = _Points(z, *map(torch.from_numpy, columns))
        random = check_random_state(self.random_state)
        unit = self._spread if euclidean else np.ones(1)
        if fixed is None:
            h = torch.from_numpy(self._search(random.permutation(len(distinct))[:_TUNED]))
        else:
            h = torch.from_numpy(fixed / unit)
        self._set_bandwidths(h)
        rows = np.sort(random.permutation(len(distinct))[:_LEFT_OUT])
        if fixed is None and self.refine and len(distinct) > _TUNED:
            self._refine(rows)
        if self._map is not None:
            self.map_ = (self._map / self._scaled).numpy() / self._spread[:, None]
            with np.errstate(divide="ignore"):
                self.bandwidth_ = 1 / np.linalg.norm(self.map_, axis=1)
        else:
            # A bandwidth that was given comes back as it is.
            self.bandwidth_ = fixed if fixed is not None else self._scaled.numpy() * unit
        self._assess(rows)

    def _search(self, order: Array) -> Array:
        """The bandwidths with the least leave-one-out error of the points ``order``, in units of the spread,
        carried to all; learned features replace the points.
        """
        points, kernel = self._points, self._kernel
        n, d = points.z.shape
        m = len(order)
        varying = max(1, int(self._varying.sum())) if self.metric == "euclidean" else max(1, d - 1)
        # Silverman's rule, for features of spread 1.
        rule = np.full(1 if self.metric == "cosine" else d, max(m, 2) ** (-1 / (varying + 4)))
        # A uniform weight on the k nearest does not depend on a common bandwidth.
        h = rule
        if m >= 3 and not (isinstance(kernel.rule, Nearest) and isinstance(kernel.profile, Power)):
            tried, tuned = points.part(order[:_TRIED]), points.part(order)
            factors = np.geomspace(0.05, 20, 13)
            losses = [self._error(torch.from_numpy(np.log(rule * f)), tried).item() for f in factors]
            found = []
            for i in np.argsort(losses, kind="stable")[:_STARTS]:
                found.append(self._descend(self._error, np.log(rule * factors[i]), tried, 30))
                self._say(f"start {len(found)} of {_STARTS}, {len(tried.z):,} points", found[-1][0])
            error, log_h = min(found, key=lambda one: one[0])
            if m > _TRIED:
                log_h = log_h - 0.5 * law(kernel, varying) * math.log(m / _TRIED)
                error, log_h = self._descend(self._error, log_h, tuned, 12)
                self._say(f"{m:,} points", error)
            h = np.exp(log_h)
        if self.features != "scale":
            rank = min(varying, 4 if self.features == "learn" else int(self.features))
            chosen = self._learn(h, rank, points.part(order))
            self._map = chosen
            if not isinstance(points.z, _Mapped):
                self._points = replace(points, z=points.z @ chosen)
            varying, h = rank, np.ones(rank)
        return h * np.exp(-0.5 * law(kernel, varying) * math.log(n / m))

    def _learn(self, h: Array, rank: int, points: _Points) -> Tensor:
        """A map z ↦ zA of the features to a few, in units of the bandwidth: (features, rank).

        It goes down the gradient of the leave-one-out error, first from the features of the least bandwidths
        with room to turn, then from the main axes of what that found.

        Source: Weinberger, Tesauro (2007), *Metric learning for kernel regression*.
        """
        wide = max(rank, min(len(h), _WIDE))
        start = np.zeros((len(h), wide))
        most = np.argsort(h)[:wide]
        start[most, np.arange(wide)] = 1 / h[most]

        def error(flat: Tensor, points: _Points) -> Tensor:
            moved = replace(points, z=points.z @ flat.reshape(len(h), -1))
            return self._error(flat.new_zeros(moved.z.shape[1]), moved)

        found, flat = self._descend(error, start.ravel(), points, 60, bounded=False)
        axes, size, _ = np.linalg.svd(flat.reshape(len(h), wide), full_matrices=False)
        found, flat = self._descend(error, (axes * size)[:, :rank].ravel(), points, 60, bounded=False)
        self._say(f"{rank} learned features, {len(points.z):,} points", found)
        return torch.from_numpy(flat.reshape(-1, rank))

    def _descend(
        self,
        error: Callable[[Tensor, _Points], Tensor],
        start: Array,
        points: _Points,
        steps: int,
        bounded: bool = True,
    ) -> tuple[float, Array]:
        """Least error and where it is, from ``start`` down the gradient."""

        def value(x: Array) -> tuple[float, Array]:
            here = torch.tensor(x, requires_grad=True)
            size = error(here, points)
            (slope,) = torch.autograd.grad(size, here)
            return size.item(), slope.numpy()

        if isinstance(self._kernel.profile, Power) and self._kernel.profile.r == 0:
            # A step has no slope: what the common factors found stays.
            return error(torch.from_numpy(start), points).item(), start
        reach = math.log(_WIDEST)
        bounds = [(x - reach, x + reach) for x in start] if bounded else None
        result = minimize(
            value, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps}
        )
        return float(result.fun), result.x

    def _refine(self, rows: Array) -> None:
        """Of the bandwidths and those times ½ … 2 take the ones with the least error on all points."""
        h, part = self._scaled, self._points.part(rows)
        weight = (part.weight / part.weight.sum())[:, None]
        variance = float((weight * (part.y - (weight * part.y).sum(0)) ** 2).sum())
        self.refined_: dict[float, float] = {}
        for factor in (1.0, 0.5, 2**-0.5, 2**0.5, 2.0):
            self._set_bandwidths(h * factor)
            error = float((weight * (part.y - self._leave_out(rows)) ** 2).sum())
            self.refined_[factor] = error / max(variance, 1e-300)
            self._say(f"bandwidths times {factor:.2f}, {len(self._points.z):,} points", self.refined_[factor])
        self._set_bandwidths(h * min(self.refined_, key=self.refined_.__getitem__))

    def _say(self, what: str, error: float) -> None:
        if self.verbose:
            print(f"{type(self).__name__}: {what}: leave-one-out error {error:.4f} of the variance")

    def _error(self, log_h: Tensor, points: _Points) -> Tensor:
        """Mean squared leave-one-out error, weighted, in units of the targets' variance."""
        n = len(points.z)
        others = ~torch.eye(n, dtype=torch.bool)
        mean, _ = self._means(points.z, points, log_h.exp(), others)
        weight = points.weight / points.weight.sum()
        variance = (weight[:, None] * (points.y - weight @ points.y) ** 2).sum()
        return (weight[:, None] * (points.y - mean) ** 2).sum() / variance.clamp_min(1e-300)

    def _set_bandwidths(self, h: Tensor) -> None:
        """Take h, in units of the spread, and a tree of the points where it pays."""
        self._scaled, self._tree = h, None
        z = self._points.z
        n, d = z.shape
        few = self.metric == "euclidean" and d <= _TREE_FEATURES and n >= _TREE_POINTS
        if not (few and self._kernel.compact) or isinstance(z, _Mapped):
            return
        q, k = self._sides(z[:: math.ceil(n * n / _SCORES)], self._points, h)
        support = (weights(q @ k.T, self._kernel) > 0).sum(1).double().mean()
        if support < n / 16:
            self._tree, self._count = KDTree((z / h).numpy()), math.ceil(1.25 * float(support)) + 8

    @property
    def _sparse(self) -> bool:
        """Whether neighbourhoods come as the few points that have weight."""
        return self._tree is not None or isinstance(self._points.z, _Mapped)

    def _leave_out(self, rows: Array) -> Tensor:
        """What the points ``rows`` would get without themselves: (rows, outputs)."""
        points, n = self._points, len(self._points.z)
        some = torch.from_numpy(rows)
        if n == 1:
            return torch.full_like(points.y[some], torch.nan)
        if self._sparse:
            return self._means(points.z[some], points, self._scaled, without=rows)[0]
        found = torch.empty_like(points.y[some])
        # A byte for each pair.
        step = max(1, 4 * _SCORES // n)
        for start in range(0, len(rows), step):
            here = some[start : start + step]
            others = torch.ones(len(here), n, dtype=torch.bool)
            others[torch.arange(len(here)), here] = False
            found[start : start + step] = self._means(points.z[here], points, self._scaled, others)[0]
        return found

    def _assess(self, rows: Array) -> None:
        """Residuals of the points ``rows``, left out one at a time, and what follows from them."""
        points, n = self._points, len(self._points.z)
        part = points.part(rows)
        found = self._leave_out(rows)
        self._residual = (part.y - found).numpy()
        self._residual_weight = part.weight.numpy()
        self._left_out = found.numpy() + self._mean
        # What each point weighs in its own fit, and how many have weight there.
        own, support = 0.0, 0
        if not self._sparse:
            rows = rows[:: math.ceil(len(rows) * n / (4 * _SCORES))]
        for some, index, w in self._neighbourhoods(points.z[torch.from_numpy(rows)], self._kernel):
            own += float(w[index == torch.from_numpy(rows[some])[:, None]].sum())
            support += int((w > 0).sum())
        self.effective_df_ = own / len(rows) * n
        self.n_support_ = support / len(rows)

    # ---- neighbourhoods --------------------------------------------------------------------------

    def _sides(self, z: Tensor, points: _Points, h: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products are the scores s."""
        if self.metric == "cosine":
            return z, points.z
        q, k = z / h, points.z / h
        half_q, half_k = (0.5 * (x * x).sum(-1, keepdim=True) for x in (q, k))
        one_q, one_k = torch.ones_like(half_q), torch.ones_like(half_k)
        # Only a radius is measured from s = 1.
        top = 1.0 if isinstance(self._kernel.rule, WithinRadius) else 0.0
        return torch.cat([q, one_q, top - half_q], -1), torch.cat([k, -half_k, one_k], -1)

    def _scale(self, h: Tensor) -> Any:
        return h**-2 if self.metric == "cosine" else 1.0

    def _columns(self, x: Tensor, weight: Tensor, y: Tensor, square: Tensor) -> Tensor:
        """What is averaged around a query, of points with coordinates x: (..., columns)."""
        weight = weight[..., None]
        values = [weight, weight * y, weight * square]
        if self.degree == 1:
            outer, cross = x[..., :, None] * x[..., None, :], x[..., :, None] * y[..., None, :]
            values += [weight * x, weight * outer.flatten(-2), weight * cross.flatten(-2)]
        return torch.cat(values, -1)

    def _averages(
        self, z: Tensor, points: _Points, h: Tensor, kernel: Kernel, allowed: Tensor | None
    ) -> Tensor:
        """Σ_j w_j(z) columns_j, with coordinates from the origin: (queries, columns)."""
        q, k = self._sides(z, points, h)
        columns = self._columns(points.z, points.weight, points.y, points.square)
        return attention(q, k, columns, allowed, kernel=kernel, scale=self._scale(h))

    def _neighbourhoods(
        self, z: Tensor, kernel: Kernel, without: Array | None = None, width: int = 1
    ) -> Iterator[tuple[Array, Tensor, Tensor]]:
        """Which points have weight around each of z, block by block: queries, points (·, m), weights (·, m).

        ``without`` names a point for each query that is left out (where ``_sparse``), ``width`` says how many
        numbers will be gathered for each point.

        Weight falls with distance, and the threshold on some of the points is never above that on all: where
        the last of the nearest has no weight, no other point has.
        """
        n, h = len(self._points.z), self._scaled
        if isinstance(self._points.z, _Mapped):
            yield from self._read(z, kernel, without, width)
            return
        if self._tree is None:
            every = torch.arange(n)
            step = max(1, _SCORES // n)
            for start in range(0, len(z), step):
                q, k = self._sides(z[start : start + step], self._points, h)
                yield np.arange(start, start + len(q)), every, weights(q @ k.T, kernel, scale=self._scale(h))
            return
        # Queries next to each other find their points in the cache.
        left, count = KDTree((z / h).numpy()).indices if len(z) else np.arange(0), self._count
        while left.size:
            count, more = min(count, n), [left[:0]]
            step = max(1, _SCORES // (16 * count * width))
            for start in range(0, len(left), step):
                some = left[start : start + step]
                found = self._tree.query((z[some] / h).numpy(), k=count, workers=torch.get_num_threads())
                distance, index = map(torch.from_numpy, found)
                s = 1 - 0.5 * distance**2
                if without is not None:
                    s[index == torch.from_numpy(without[some])[:, None]] = -torch.inf
                w = weights(s, kernel)
                whole = (w[:, -1] == 0) if count < n else torch.ones(len(w), dtype=torch.bool)
                more.append(some[~whole.numpy()])
                if bool(whole.any()):
                    yield some[whole.numpy()], index[whole], w[whole]
            left, count = np.concatenate(more), 2 * count

    def _read(
        self, z: Tensor, kernel: Kernel, without: Array | None, width: int
    ) -> Iterator[tuple[Array, Tensor, Tensor]]:
        """``_neighbourhoods`` by passes over a file: who has no weight among some has none among all."""
        n, d = self._points.z.shape
        scale = self._scale(self._scaled)
        waiting = [np.arange(i, min(i + _PASS, len(z))) for i in range(0, len(z), _PASS)]
        while waiting:
            some = waiting.pop()
            s, index = z.new_empty(len(some), 0), torch.empty(len(some), 0, dtype=torch.int64)
            step = max(1, min(_READ // d, _READ // len(some)))
            for start in range(0, n, step):
                q, k = self._sides(z[some], self._points.part(slice(start, start + step)), self._scaled)
                here = torch.arange(start, start + len(k)).expand(len(q), -1)
                s, index = torch.cat([s, q @ k.T], 1), torch.cat([index, here], 1)
                if without is not None:
                    s[index == torch.from_numpy(without[some])[:, None]] = -torch.inf
                w = weights(s, kernel, scale=scale)
                place = w.topk(max(1, int((w > 0).sum(1).max())), 1).indices.sort(1).values
                s, index = s.gather(1, place), index.gather(1, place)
                if index.numel() > _READ and len(some) > 1:
                    waiting += np.array_split(some, 2)
                    break
            else:
                w, step = weights(s, kernel, scale=scale), max(1, _READ // (s.shape[1] * width))
                for start in range(0, len(some), step):
                    part = slice(start, start + step)
                    yield some[part], index[part], w[part]

    def _near(self, z: Tensor, kernel: Kernel, without: Array | None) -> Tensor:
        """As ``_averages``, with coordinates from each query, from the points with weight alone."""
        points = self._points
        d, outputs = z.shape[1], points.y.shape[1]
        width = 1 + 2 * outputs + self.degree * (d + d * d + d * outputs)
        out = z.new_empty(len(z), width)
        if self.degree == 0:
            # Nothing is measured from the query.
            columns = self._columns(z, points.weight, points.y, points.square)
        for some, index, w in self._neighbourhoods(z, kernel, without, width):
            if self.degree == 0:
                out[some] = embedding_bag(index, columns, per_sample_weights=w, mode="sum")
            else:
                x = points.z[index] - z[some][:, None]
                around = self._columns(x, points.weight[index], points.y[index], points.square[index])
                out[some] = (w[:, None] @ around)[:, 0]
        return out

    def _look(
        self,
        z: Tensor,
        points: _Points,
        h: Tensor,
        kernel: Kernel,
        allowed: Tensor | None = None,
        without: Array | None = None,
    ) -> _Fit:
        """Weighted means of the targets around z, of degree 0 or 1."""
        d, outputs = z.shape[1], points.y.shape[1]
        if points is self._points and allowed is None and self._sparse:
            seen, origin = self._near(z, kernel, without), z
        else:
            seen, origin = self._averages(z, points, h, kernel, allowed), torch.zeros_like(z)
        mass, seen = seen[:, :1], seen[:, 1:]
        empty = mass[:, 0] == 0
        seen = seen / torch.where(mass == 0, 1.0, mass)
        mean, square = seen[:, :outputs], seen[:, outputs : 2 * outputs]
        variance = square - mean**2
        # Of the nearest alone there is no line.
        if self.degree == 1 and kernel is self._kernel:
            centre, outer, cross = seen[:, 2 * outputs :].split([d, d * d, d * outputs], 1)
            spread = outer.reshape(-1, d, d) - centre[:, :, None] * centre[:, None]
            slope_of = cross.reshape(-1, d, outputs) - centre[:, :, None] * mean[:, None]
            # Directions without spread, and those that rounding alone fills, have slope 0.
            trace = spread.diagonal(dim1=1, dim2=2).clamp_min(0).mean(-1)
            size = outer.reshape(-1, d, d).diagonal(dim1=1, dim2=2).mean(-1)
            ridge = 1e-9 * trace + 1e-13 * size + 1e-300
            ahead = (z - origin - centre)[:, :, None]
            solved = torch.linalg.solve(
                spread + ridge[:, None, None] * torch.eye(d, dtype=z.dtype), torch.cat([slope_of, ahead], 2)
            )
            slope, far = solved[:, :, :outputs], (ahead * solved[:, :, outputs:]).sum((1, 2)) / d
            variance = variance - (slope * (spread @ slope)).sum(1)
            # A line through points close together says nothing far from them.
            trust = _FAR / far.clamp_min(_FAR)
            mean = mean + trust[:, None] * (ahead * slope).sum(1)
        return _Fit(mean, variance.clamp_min(0), empty)

    def _means(
        self,
        z: Tensor,
        points: _Points,
        h: Tensor,
        allowed: Tensor | None = None,
        without: Array | None = None,
    ) -> tuple[Tensor, _Fit]:
        """The means, with what ``outside`` says where nobody was near; and what was seen."""
        fit = self._look(z, points, h, self._kernel, allowed, without)
        if not bool(fit.empty.any()):
            return fit.mean, fit
        if self.outside == "mean":
            other = (points.weight @ points.y / points.weight.sum()).expand_as(fit.mean)
        elif self.outside == "nan" and allowed is None and without is None:
            other = torch.full_like(fit.mean, torch.nan)
        else:
            some = fit.empty
            nearest = self._look(
                z[some],
                points,
                h.detach(),
                kernels.kernel("knn_uniform?k=1"),
                None if allowed is None else allowed[some],
                None if without is None else without[some.numpy()],
            )
            other = torch.zeros_like(fit.mean).index_put((some,), nearest.mean.detach())
        return torch.where(fit.empty[:, None], other, fit.mean), fit

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self)
        checked: Array = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        self._check_directions(checked)
        return checked

    def _predict(self, X: Any) -> tuple[Array, Array, Array]:
        """Means, local variances and which rows were empty, block by block."""
        X = self._checked(X)
        outputs = self._points.y.shape[1]
        mean, variance = np.empty((len(X), outputs)), np.empty((len(X), outputs))
        empty = np.empty(len(X), dtype=bool)
        for start in range(0, len(X), _BLOCK):
            some = slice(start, start + _BLOCK)
            found, fit = self._means(self._standardised(X[some]), self._points, self._scaled)
            mean[some] = found.numpy() + self._mean
            variance[some], empty[some] = fit.variance.numpy(), fit.empty.numpy()
        return mean, variance, empty

    def save(self, path: str | Path) -> None:
        """Write the fitted model to one file in the safetensors format, settings as JSON in its header.

        The file appears whole or not at all. Of ``random_state`` only a number is kept.

        Raises:
            ValueError: there is nothing to save yet, or the table lies in a file that is too large to hold.
            TypeError: labels that JSON cannot hold.
            OSError: the file cannot be written.
            ImportError: ``safetensors`` is not installed.
        """
        check_is_fitted(self)
        if isinstance(self._points.z, _Mapped):
            raise ValueError("a model of a table in a file is not saved: keep the file, and fit again")
        options = self.get_params() | {"kernel": str(self._kernel)}
        if not isinstance(self.random_state, Integral):
            options["random_state"] = None
        settings = {name: getattr(self, name) for name in _SETTINGS if hasattr(self, name)}
        settings["options"] = {name: np.asarray(value).tolist() for name, value in options.items()}
        settings["class"] = type(self).__name__
        for name in ("feature_names_in_", "classes_"):
            if hasattr(self, name):
                settings[name] = getattr(self, name).tolist()
        state = vars(self) | vars(self._points)
        tensors = {name: torch.as_tensor(state[name]) for name in _SHAPES if state.get(name) is not None}
        store.write(path, _FORMAT, settings, tensors)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted model that ``save`` wrote.

        Raises:
            OSError: no such file, or it cannot be read.
            ValueError: it is damaged, or no file of a model of this class.
            ImportError: ``safetensors`` is not installed.
        """
        with store.reading(path, _FORMAT, f"{cls.__name__}.save") as (settings, tensors):
            return cls._from(settings, tensors)

    @classmethod
    def _from(cls, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        if settings.pop("class") != cls.__name__:
            raise ValueError("a model of another class")
        model = cls(**settings.pop("options"))
        for name in ("feature_names_in_", "classes_"):
            if name in settings:
                setattr(model, name, np.array(settings.pop(name), object if "names" in name else None))
        if not set(settings) <= set(_SETTINGS):
            raise ValueError("the settings are not those of a model")
        model.__dict__ |= settings
        sizes, found = {"features": model.n_features_in_}, {}
        for name, shape in _SHAPES.items():
            x = tensors.pop(name, None)
            if x is None and name != "_map":
                raise ValueError(f"{name} is missing")
            if x is not None:
                dtype = torch.int64 if name in ("_point", "_row") else torch.float64
                known = tuple(sizes.setdefault(axis, size) for axis, size in zip(shape, x.shape, strict=True))
                if x.dtype != dtype or x.shape != known:
                    raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}")
                found[name] = x
        for index, size in ((found["_point"], sizes["points"]), (found["_row"], model._rows)):
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise ValueError("a row that does not exist")
        model._points = _Points(*(found.pop(field.name) for field in fields(_Points)))
        model._kernel = model._check_parameters(model.n_features_in_)
        h, model._map = found.pop("_scaled"), found.pop("_map", None)
        model.__dict__ |= {name: x.numpy() for name, x in found.items()}
        if model._map is not None:
            model.map_ = (model._map / h).numpy() / model._spread[:, None]
        model._set_bandwidths(h)
        return model

    def neighbours(self, X: Any) -> Any:
        """Why this prediction: the training rows that have weight, and their weights.

        Args:
            X: (queries, features).

        Returns:
            A ``scipy.sparse`` matrix (queries, training rows), of weights that sum to 1 in each row; a row
            without any is an empty neighbourhood. Under ``degree=0`` its product with the targets is the
            prediction.
        """
        X = self._checked(X)
        at, point, value = [], [], []
        for start in range(0, len(X), _BLOCK):
            z = self._standardised(X[start : start + _BLOCK])
            for some, index, w in self._neighbourhoods(z, self._kernel):
                row, column = w.nonzero(as_tuple=True)
                at.append(start + some[row.numpy()])
                point.append(index.expand_as(w)[row, column].numpy())
                value.append(w[row, column].numpy())
        n = len(self._points.z)
        entries = (np.concatenate(value), (np.concatenate(at), np.concatenate(point)))
        found = csr_matrix(entries, shape=(len(X), n))
        rows = csr_matrix((self._share, (self._point, self._row)), shape=(n, self._rows))
        shared = (found @ rows).tocsr()
        total = np.asarray(shared.sum(1)).ravel()
        return diags(1 / np.where(total == 0, 1, total)) @ shared


class KernelRegressor(RegressorMixin, _KernelEstimator):
    """Kernel regression: the weighted mean of the targets nearby, or the line through them.

        f(x) = Σ_j w_j(x) y_j,        w from ``kernel`` on s_j = 1 − ½ Σ_e ((x_e − x_je)/h_e)²

    Args:
        kernel: a name such as ``"biweight"``, ``"gaussian"``, ``"normrelu"`` (statistics' Epanechnikov, of
            fixed radius h), ``"knn_gaussian?k=32"``, or a ``parzen.Kernel``. Default "biweight": unit mass,
            never empty, and its bandwidth needs no change with the number of rows (``law``).
        bandwidth: "cv" finds one for each feature by leave-one-out, on at most 4,096 points, carried to more
            by ``law``; or a number > 0, or one for each feature, in the units of that feature (with
            metric="cosine" one number). Under unit mass it sets the scale: neighbourhoods find their radius.
        degree: 0, the local mean (Nadaraya–Watson), or 1, local linear; where a query is more than 3 spreads
            of its neighbourhood away from it (for each feature), the slope counts less.
        metric: "euclidean", or "cosine": s_j = cos(x, x_j)/h².
        features: "scale", a bandwidth for each; "learn", as many as 4 learned combinations of them, or their
            number: distances are those of (x − x_j)·``map_``. Linear maps fit a few rows too well: compare.
        outside: what an empty neighbourhood gives (rules with a radius only): "nearest", the target of the
            nearest point; "mean", that of all; "nan".
        refine: with more than 4,096 points also try the carried bandwidths times ½ … 2 on all of them
            (``refined_``: the errors) and take the best.
        verbose: print how the search goes.
        random_state: of the points that bandwidths and residuals are taken from, where there are more than
            4,096 and 2,048.

    Attributes:
        bandwidth_: (features,), in their units; of learned features, how far along each alone s falls by ½.
        map_: (features, learned), with ``features`` other than "scale".
        loo_score_: R² of predictions for points that are left out (a sample of at most 2,048).
        effective_df_: Σ_i w_i(x_i), estimated from the same sample.
        n_support_: the mean number of points with weight.

    Example:
        >>> import numpy as np
        >>> from parzen.regression import KernelRegressor
        >>> x = np.linspace(0, 6, 200)[:, None]
        >>> model = KernelRegressor().fit(x, np.sin(x[:, 0]))
        >>> bool(abs(model.predict([[1.0]])[0] - np.sin(1)) < 0.01)
        True
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegressor:
        """Keep the points and find the bandwidths.

        Args:
            X: (rows, features), finite; a memory-mapped float32 or float64 array of 256 MB or more is read in
                blocks (compact kernels only).
            y: (rows,) or (rows, outputs), finite.
            sample_weight: (rows,) ≥ 0: how many rows each stands for.
        """
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=[np.float64, np.float32])
        y = np.asarray(y, dtype=np.float64)
        self._flat, self._rows = y.ndim == 1, len(X)
        self._fit(X, y.reshape(len(y), -1), sample_weight)
        weight = self._residual_weight[:, None]
        y_left = self._left_out + self._residual
        mean = (weight * y_left).sum(0) / weight.sum()
        total = (weight * (y_left - mean) ** 2).sum(0)
        kept = total > 0
        error = (weight * self._residual**2).sum(0)
        self.loo_score_ = float(np.mean(1 - error[kept] / total[kept])) if kept.any() else math.nan
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """f(x): (queries,) or (queries, outputs); with ``return_std`` also the targets' spread around it.

        The spread is that of the neighbourhood, √Σ_j w_j (y_j − f)², not the error of f; NaN if it is empty.
        """
        mean, variance, empty = self._predict(X)
        mean = mean[:, 0] if self._flat else mean
        if not return_std:
            return mean
        std = np.where(empty[:, None], np.nan, np.sqrt(variance))
        return mean, std[:, 0] if self._flat else std

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper ends that hold a new target with probability ``coverage`` in (0, 1).

        f(x) ∓ the ⌈(m + 1)·coverage⌉-th smallest of m leave-one-out residuals' sizes: the jackknife's
        conformal interval, of one width everywhere; infinite where m is too small.

        Source: Barber et al. (2021), *Predictive inference with the jackknife+*, §1.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be in (0, 1), got {coverage!r}")
        mean = self.predict(X)
        size = np.sort(np.abs(self._residual), 0)
        place = math.ceil((len(size) + 1) * coverage)
        half = size[place - 1] if place <= len(size) else np.full(size.shape[1], np.inf)
        half = half[0] if self._flat else half
        return mean - half, mean + half


class KernelClassifier(ClassifierMixin, _KernelEstimator):
    """Kernel classification: p(c | x) = Σ_j w_j(x) [y_j = c], which may be exactly 0.

    Arguments and attributes as of ``KernelRegressor`` (bandwidths have the least leave-one-out Brier score;
    ``loo_score_`` is the accuracy), with ``degree=0`` only.

    Attributes:
        classes_: the labels, in the order of ``predict_proba``.

    Example:
        >>> import numpy as np
        >>> from parzen.regression import KernelClassifier
        >>> x = np.linspace(0, 6, 200)[:, None]
        >>> model = KernelClassifier().fit(x, x[:, 0] > 3)
        >>> model.predict([[1.0], [5.0]]).tolist()
        [False, True]
    """

    def __init__(
        self,
        kernel: str | Kernel = "biweight",
        *,
        bandwidth: Any = "cv",
        metric: str = "euclidean",
        features: Any = "scale",
        outside: str = "nearest",
        refine: bool = False,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.metric = metric
        self.features = features
        self.outside = outside
        self.refine = refine
        self.verbose = verbose
        self.random_state = random_state

    degree = 0
    _centred = False

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelClassifier:
        """Keep the points and find the bandwidths.

        Args:
            X: (rows, features), finite.
            y: (rows,) labels.
            sample_weight: (rows,) ≥ 0: how many rows each stands for.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, code = np.unique(y, return_inverse=True)
        self._rows = len(X)
        self._fit(X, np.eye(len(self.classes_))[code], sample_weight)
        truth = self._left_out + self._residual
        right = self._left_out.argmax(1) == truth.argmax(1)
        self.loo_score_ = (
            float(np.average(right, weights=self._residual_weight)) if len(right) > 1 else math.nan
        )
        return self

    def predict_proba(self, X: Any) -> Array:
        """p(c | x): (queries, classes), rows sum to 1."""
        mean, _, _ = self._predict(X)
        return mean / mean.sum(1, keepdims=True)

    def predict(self, X: Any) -> Array:
        """The label with the largest probability; the first of equals."""
        best = np.nan_to_num(self.predict_proba(X)).argmax(1)
        return self.classes_[best]
