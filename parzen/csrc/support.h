// Profiles on vectors of scores, and the thresholds of the support rules on lists of candidates.
#pragma once
#include <math.h>

#include "engine.h"
#include "simd.h"

namespace parzen {
namespace {

enum Kind { GAUSS, POWER_0, POWER_1, POWER_2, POWER_3, POWER_ANY };

template <class T>
constexpr T EPSILON = sizeof(T) == 4 ? T(1.1920929e-7) : T(2.220446049250313e-16);
template <class T>
constexpr T MOST = sizeof(T) == 4 ? T(3.4028234663852886e38) : T(1.7976931348623157e308);
template <class T>
constexpr T LEAST = sizeof(T) == 4 ? T(1.401298464324817e-45) : T(4.9406564584124654e-324);

// What a row needs to turn a score s into its weight, from t = (s − from) − shift:
//
//   unit mass          t = (s − m) − σ       y = 1 + t/r          width = r
//   margin b           t = (s − m) + b       y = t/b              width = b
//   radius             t = s − θ             y = t/(m − θ)        width = m − θ
//   k nearest          t = s − kth
//
// m is the best score. φ = yʳ on y > 0, or exp(s − m) and 1 on t ≥ 0. Differences are taken from m first:
// scores of 1e4 lose nothing, and log1p(y − 1) keeps α near 1 exact. A difference has the sign of its
// comparison, so that t decides what the threshold decides, ties included; y is at most 1, so that no power
// overflows.
template <class T>
struct Stats {
  T m, from, shift, width, inverse;
};

// a^{1/3} for a > 0, to rounding: a guess from the exponent and two Halley steps for float.
INLINE float cube_root(float a) {
  int32_t i;
  memcpy(&i, &a, 4);
  i = i / 3 + 709921077;
  float x;
  memcpy(&x, &i, 4);
  for (int step = 0; step < 2; step++) {
    const float x3 = x * x * x;
    x = x * ((x3 + 2 * a) / (2 * x3 + a));
  }
  return x;
}
INLINE double cube_root(double a) { return cbrt(a); }

// What the slope r·yʳ⁻¹ is multiplied by where Σ yʳ = 1/inverse is not quite 1, to be r·pʳ⁻¹ᐟʳ of the weight p.
// In a flat row of n keys y is known to n roundings of 1 only, but p, which is divided by its sum, to one.
template <Kind K, class T>
INLINE T steepness(T inverse, T r) {
  if constexpr (K == POWER_1) return inverse == inverse ? 1 : inverse;
  if constexpr (K == POWER_2) return (T)sqrt((double)inverse);
  if constexpr (K == POWER_3) return cube_root(inverse) * cube_root(inverse);
  return inverse > 0 ? (T)pow((double)inverse, (double)((r - 1) / r)) : 0;
}

template <Kind K, class T>
struct Shape {
  static constexpr bool closed = K == GAUSS || K == POWER_0;
  const bool unit_mass;
  V<T> m, from, shift, width, c, one, inverse, steep, r;

  INLINE Shape(const Stats<T>& s, T exponent, bool is_unit_mass)
      : unit_mass(is_unit_mass), m(splat(s.m)), from(splat(s.from)), shift(splat(s.shift)), width(splat(s.width)),
        c(splat(1 / s.width > MOST<T> ? MOST<T> : 1 / s.width)), one(splat(T(is_unit_mass))),
        inverse(splat(s.inverse)), steep(splat(unit_mass ? steepness<K, T>(s.inverse, exponent) : s.inverse)), r(splat(exponent)) {}

  INLINE V<T> t(V<T> s) const { return (s - from) - shift; }
  INLINE V<T> y(V<T> s) const {
    if constexpr (K != POWER_ANY) return fma<T>(t(s), c, one);
    // With any exponent y is 1 for the best to the bit, and under unit mass what log_y makes of y − 1.
    else return unit_mass ? 1 + t(s) / width : t(s) / width;
  }
  // Near 1 from y − 1, near 0 from y: each is exact there.
  INLINE V<T> log_y(V<T> s, V<T> y) const {
    const V<T> u = (unit_mass ? t(s) : s - m) / width;
    return logarithm<T>(y) + select<T>(y > T(0.5), u - (y - 1), V<T>{}) / y;
  }

  // Whether a score belongs to the support; a NaN does.
  INLINE I<T> on(V<T> s) const {
    if constexpr (closed) return ~(t(s) < 0);
    else return ~(y(s) <= 0);
  }
  // φ of a score known to be on the support, and φ'·r·c for powers, φ itself for exp.
  INLINE void raw(V<T> s, V<T>& phi, V<T>& slope) const {
    if constexpr (K == GAUSS) {
      phi = slope = exponential(s - m);
    } else if constexpr (K == POWER_0) {
      // A NaN, or +∞ for the best, must reach the output.
      const V<T> z = s - m;
      phi = select<T>(z == z, V<T>{} + 1, z);
      slope = V<T>{};
    } else {
      const V<T> y = this->y(s);
      if constexpr (K == POWER_1) {
        phi = y;
        slope = c;
      } else if constexpr (K == POWER_2) {
        phi = y * y;
        slope = 2 * c * y;
      } else if constexpr (K == POWER_3) {
        slope = 3 * c * (y * y);
        phi = y * y * y;
      } else {
        phi = exponential(r * log_y(s, y));
        // A NaN must survive the bit tricks of log and exp.
        phi = select<T>(y == y, phi, y);
        slope = r * c * (phi / y);
      }
    }
  }
  INLINE V<T> weight(V<T> s) const {
    V<T> phi, slope;
    raw(s, phi, slope);
    return select<T>(on(s), phi, V<T>{}) * inverse;
  }
  INLINE I<T> weights(V<T> s, V<T>& p, V<T>& a) const {
    I<T> inside = on(s);
    V<T> phi, slope;
    raw(s, phi, slope);
    p = select<T>(inside, phi, V<T>{}) * inverse;
    a = select<T>(inside, slope, V<T>{}) * steep;
    return inside;
  }
  // y-derivative factor of r: p·(log y − 1 + 1/y); the bracket is u²/2 − 2u³/3 + … near u = 0.
  INLINE V<T> exponent_factor(V<T> s, V<T> p) const {
    const V<T> z = t(s) / width, exact = log_one_plus<T>(z) - z / (1 + z);
    V<T> series = V<T>{};
    constexpr int terms = sizeof(T) == 4 ? 9 : 17;
    for (int n = terms; n >= 2; n--) series = series * z + (n % 2 ? -1 : 1) * T(n - 1) / n;
    series = series * z * z;
    I<T> near = (z > T(-0.1)) & (z < T(0.1));
    return select<T>(on(s), p * select<T>(near, series, exact), V<T>{});
  }
};

template <class T>
INLINE T below(T x) {
  return x == -INFINITY ? x : (T)(sizeof(T) == 4 ? nextafterf((float)x, -INFINITY) : nextafter((double)x, -INFINITY));
}

// The lists may be read up to the end of their last vector.
template <class T>
INLINE void pad(T* score, int32_t* index, int64_t n) {
  store(score + n, splat<T>(-INFINITY));
  memset(index + n, 0, LANES<T> * sizeof(int32_t));
}

// A step below this is the last: what is left is its square, but for r < 2 where keys at the threshold
// still count to first order.
template <Kind K, class T>
INLINE T last_step(T r) {
  const T strict = 2 * EPSILON<T>, loose = sizeof(T) == 4 ? T(1e-4) : T(4e-9);
  return K == POWER_1 || (K == POWER_ANY && !(r >= 2)) ? strict : loose;
}

// y^r and y^{r−1} at z = s − m − σ, zero where y ≤ 0.
template <Kind K, class T>
INLINE void rise(V<T> z, V<T> r, V<T> c, V<T>& mass, V<T>& slope) {
  const V<T> u = z / r;
  V<T> y = K == POWER_ANY ? 1 + u : fma<T>(z, c, splat<T>(1));
  const I<T> inside = y > 0;
  y = select<T>(inside, y, V<T>{});
  if constexpr (K == POWER_1) {
    mass += y;
    slope += select<T>(inside, V<T>{} + 1, V<T>{});
  } else if constexpr (K == POWER_2) {
    slope += y;
    mass += y * y;
  } else if constexpr (K == POWER_3) {
    const V<T> y2 = y * y;
    slope += y2;
    mass += y2 * y;
  } else {
    const V<T> phi = exponential(r * log_one_plus<T>(u));
    mass += select<T>(inside, phi, V<T>{});
    slope += select<T>(inside, phi / y, V<T>{});
  }
}

// The Newton step of ‖y‖_r = 1 in σ from a = Σ yʳ and b = Σ yʳ⁻¹: r·(‖y‖ − 1)·‖y‖^{r−1} / b.
template <Kind K, class T>
INLINE T newton_step(T a, T b, T r) {
  if constexpr (K == POWER_1) return (a - 1) / b;
  if constexpr (K == POWER_2) {
    const T norm = sizeof(T) == 4 ? (T)sqrtf((float)a) : (T)sqrt((double)a);
    return 2 * (norm - 1) * norm / b;
  }
  if constexpr (K == POWER_3) {
    const T norm = cube_root(a);
    return 3 * (norm - 1) * norm * norm / b;
  }
  const double log_mass = log((double)a), log_norm = log_mass / r;
  return (T)(r * expm1(log_norm) * exp(log_mass - log_norm) / b);
}

// σ of unit mass by Newton's method from the left: ‖y‖_r is convex and decreasing in σ, so that every
// iterate is a lower bound.
template <Kind K, class T>
T solve(const T* score, int64_t n, T m, T sigma, T r, int steps) {
  const T last = last_step<K, T>(r);
  for (; steps; steps--) {
    V<T> mass = {}, slope = {};
    const V<T> vm = splat(m), vs = splat(sigma), vr = splat(r), vc = splat(1 / r);
    for (int64_t l = 0; l < n; l += LANES<T>) rise<K, T>((load(score + l) - vm) - vs, vr, vc, mass, slope);
    const T step = newton_step<K, T>(sum<T>(mass), sum<T>(slope), r);
    // Also the way out for NaN. A step back is rounding at the root.
    if (!(step > last * (1 + sigma))) return step > -T(0.01) ? sigma + step : sigma;
    sigma += step;
  }
  return sigma;
}

constexpr int64_t SHORT = 128;

// The same for a vector of short lists at once, one in each lane: z[l][lane] = s − m, −∞ after the end.
template <Kind K, class T>
void solve_lanes(const T* z, int64_t n, T* sigma, const T* r) {
  const V<T> vr = load(r), vc = 1 / vr;
  V<T> vs = load(sigma);
  T last[LANES<T>];
  bool open[LANES<T>];
  for (int l = 0; l < LANES<T>; l++) last[l] = last_step<K, T>(r[l]), open[l] = true;
  for (int steps = 100; steps; steps--) {
    V<T> mass = {}, slope = {};
    for (int64_t l = 0; l < n; l++) rise<K, T>(load(z + l * LANES<T>) - vs, vr, vc, mass, slope);
    T a[LANES<T>], b[LANES<T>], step[LANES<T>];
    store(a, mass);
    store(b, slope);
    for (int l = 0; l < LANES<T>; l++) step[l] = newton_step<K, T>(a[l], b[l], r[l]);
    store(sigma, vs);
    bool any = false;
    for (int l = 0; l < LANES<T>; l++) {
      const bool on = open[l] & (step[l] > last[l] * (1 + sigma[l]));
      sigma[l] = open[l] & (step[l] > -T(0.01)) ? sigma[l] + step[l] : sigma[l];
      open[l] = on;
      any |= on;
    }
    if (!any) return;
    vs = load(sigma);
  }
}

template <class T>
INLINE int64_t count_from(const T* score, int64_t n, T at) {
  I<T> hits = {};
  const V<T> v = splat(at);
  for (int64_t l = 0; l < n; l += LANES<T>) hits -= load(score + l) >= v;
  int64_t total = 0;
  for (int l = 0; l < LANES<T>; l++) total += hits[l];
  return total;
}

// Floats in their order as integers, so that bisection always ends.
template <class T>
INLINE typename Simd<T>::Int ordered(T x) {
  typename Simd<T>::Int i;
  memcpy(&i, &x, sizeof x);
  constexpr int bits = 8 * sizeof(T) - 1;
  return i ^ ((i >> bits) & ~((typename Simd<T>::Int)1 << bits));
}
template <class T>
INLINE T unordered(typename Simd<T>::Int i) {
  constexpr int bits = 8 * sizeof(T) - 1;
  i ^= (i >> bits) & ~((typename Simd<T>::Int)1 << bits);
  T x;
  memcpy(&x, &i, sizeof x);
  return x;
}

// The k-th largest of n ≥ k scores (NaN aside), or one with up to `slack` more scores above it.
template <class T>
T nearest(const T* score, int64_t n, int64_t k, int64_t slack, T best) {
  using Int = typename Simd<T>::Int;
  if (count_from(score, n, best) >= k) return best;
  V<T> least = splat<T>(INFINITY);
  for (int64_t l = 0; l < n; l += LANES<T>) {
    V<T> x = load(score + l);
    least = (x < least) & (x > -INFINITY) ? x : least;
  }
  T low = -largest<T>(-least), high = best;
  // Invariant: at least k scores are ≥ low, fewer than k are ≥ high. Values first, then bit patterns.
  for (int step = 0; step < 100; step++) {
    T middle = low / 2 + high / 2;
    if (step >= 16) {
      const Int a = ordered(low), b = ordered(high);
      middle = unordered<T>((a & b) + ((a ^ b) >> 1));
    }
    if (!(middle > low && middle < high)) {
      if (step >= 16) break;
      step = 15;
      continue;
    }
    const int64_t c = count_from(score, n, middle);
    if (c < k) {
      high = middle;
    } else {
      low = middle;
      if (c <= k + slack) break;
    }
  }
  least = splat<T>(INFINITY);
  for (int64_t l = 0; l < n; l += LANES<T>) {
    V<T> x = load(score + l);
    least = (x < least) & (x >= low) ? x : least;
  }
  return -largest<T>(-least);
}

// The candidates of one row while its keys stream by. `cut` never exceeds the final threshold:
// θ found on a subset of the keys is a lower bound. Scores known up to δ are cut `slack` = 2δ lower.
template <class T>
struct Row {
  T cut, slack, m, r, level;
  int64_t n, trigger;
  T *score, *weight;
  int32_t* index;
};

template <Kind K, class T>
INLINE T cut_at(T threshold) {
  return Shape<K, T>::closed ? below(threshold) : threshold;
}

// θ is known up to rounding only, and t is rounded as well; a bound must not exceed either. Numbers so small
// that the products vanish are subtracted without rounding.
template <class T>
INLINE T unit_mass_cut(T m, T sigma, T r) {
  return (m + (sigma - r)) - 4 * EPSILON<T> * ((m < 0 ? -m : m) + r);
}
template <class T>
INLINE T margin_cut(T m, T level) {
  return (m - level) - (2 * EPSILON<T> * ((m < 0 ? -m : m) + level) + LEAST<T>);
}

template <Kind K, class T>
void start(const Args& A, Row<T>& row, int64_t keys) {
  row.n = 0;
  row.m = -INFINITY;
  row.slack = 0;
  row.cut = A.rule == THRESHOLD ? cut_at<K, T>(row.level) : -(T)INFINITY;
  row.trigger = A.rule == UNIT_MASS ? 16 : A.rule == NEAREST ? A.nearest + 16 : A.rule == MARGIN ? 64 : INT64_MAX;
  // The last solve takes few keys as they are.
  if (keys <= SHORT) row.trigger = INT64_MAX;
}

template <Kind K, class T>
INLINE void best(const Args& A, Row<T>& row, T m) {
  row.m = m;
  const T bound = (A.rule == UNIT_MASS ? unit_mass_cut<T>(m, 0, row.r)
                   : A.rule == MARGIN  ? margin_cut<T>(m, row.level)
                                       : -(T)INFINITY) - row.slack;
  // A margin of NaN must reach the output.
  if (!(bound <= row.cut)) row.cut = bound;
}

template <class T>
INLINE void drop(Row<T>& row) {
  int64_t kept = 0;
  const V<T> cut = splat(row.cut);
  for (int64_t l = 0; l < row.n; l += LANES<T>) {
    uint32_t bits = above<T>(load(row.score + l), cut);
    if (row.n - l < LANES<T>) bits &= (1u << (row.n - l)) - 1;
    kept = keep(row.score, row.index, l, bits, kept);
  }
  row.n = kept;
  pad(row.score, row.index, row.n);
}

template <class T>
INLINE T start_sigma(const Row<T>& row) {
  const T sigma = ((row.cut + row.slack) - row.m) + row.r;
  return sigma > 0 ? sigma : 0;
}

// Raises the cut from the candidates so far.
template <Kind K, class T>
INLINE void raise_cut(const Args& A, Row<T>& row) {
  pad(row.score, row.index, row.n);
  if constexpr (K >= POWER_1) {
    if (A.rule == UNIT_MASS) {
      const T sigma = solve<K, T>(row.score, row.n, row.m, start_sigma(row), row.r, 1);
      const T bound = unit_mass_cut(row.m, sigma, row.r) - row.slack;
      if (bound > row.cut) row.cut = bound;
    }
  }
  if (A.rule == NEAREST && row.n >= A.nearest)
    row.cut = below(nearest(row.score, row.n, A.nearest, A.nearest / 2, row.m) - row.slack);
}

// The same, and drops what is below.
template <Kind K, class T>
void tighten(const Args& A, Row<T>& row) {
  raise_cut<K, T>(A, row);
  const int64_t before = row.n;
  drop(row);
  // Where little falls away the support is dense: look again much later.
  const int64_t growth = row.n * 8 > before * 7 ? 3 * row.n : row.n / 2;
  const int64_t least = K == POWER_3 ? 64 : 32;
  row.trigger = row.n + (growth > least ? growth : least);
}

template <Kind K, class T>
void solve_short(Row<T>* const* rows, int count, T* sigma) {
  alignas(64) T z[SHORT * LANES<T>], r[LANES<T>];
  int64_t longest = 0;
  for (int l = 0; l < count; l++) longest = rows[l]->n > longest ? rows[l]->n : longest;
  for (int l = 0; l < LANES<T>; l++) {
    // Lanes without a row: one key, solved at once.
    const bool real = l < count;
    const int64_t n = real ? rows[l]->n : 1;
    r[l] = real ? rows[l]->r : 1;
    sigma[l] = real ? start_sigma(*rows[l]) : 0;
    for (int64_t j = 0; j < n; j++) z[j * LANES<T> + l] = real ? rows[l]->score[j] - rows[l]->m : 0;
    for (int64_t j = n; j < longest; j++) z[j * LANES<T> + l] = -INFINITY;
  }
  solve_lanes<K, T>(z, longest, sigma, r);
}

// σ of every row under unit mass. Short lists go through together; the choice is each row's own, so a
// row's bits do not depend on its neighbours.
template <Kind K, class T>
void unit_mass(Row<T>* rows, int64_t n, T* sigma) {
  Row<T>* batch[LANES<T>];
  int64_t at[LANES<T>];
  T found[LANES<T>];
  int count = 0;
  for (int64_t i = 0; i < n; i++) {
    Row<T>& row = rows[i];
    if (row.n > SHORT) {
      sigma[i] = solve<K, T>(row.score, row.n, row.m, start_sigma(row), row.r, 100);
    } else if (row.n > 0) {
      at[count] = i;
      batch[count++] = &row;
    }
    if (count && (count == LANES<T> || i == n - 1)) {
      solve_short<K, T>(batch, count, found);
      for (; count; count--) sigma[at[count - 1]] = found[count - 1];
    }
  }
}

// The threshold of all keys. Leaves exactly the support in the list, and φ of each of its scores.
template <Kind K, class T>
Stats<T> finish(const Args& A, Row<T>& row, T sigma) {
  // Nothing allowed, or nothing within the radius: weights 0 for every score, never NaN.
  constexpr Stats<T> nothing = {(T)INFINITY, (T)INFINITY, 0, 1, 0};
  if (row.n == 0) return nothing;
  // Everything but −∞.
  Stats<T> s = {row.m, 0, -MOST<T>, 1, 1};
  const bool unit_mass = K >= POWER_1 && A.rule == UNIT_MASS;
  if (unit_mass) {
    s = {row.m, row.m, sigma, row.r, 1};
  } else if (A.rule == MARGIN) {
    s = {row.m, row.m, -row.level, row.level, 1};
  } else if (A.rule == THRESHOLD) {
    s = {row.m, row.level, 0, row.m - row.level, 1};
  } else if (A.rule == NEAREST && row.n >= A.nearest) {
    s.from = nearest(row.score, row.n, A.nearest, (int64_t)0, row.m), s.shift = 0;
    row.cut = below(s.from);
    drop(row);
  }
  const Shape<K, T> shape(s, row.r, unit_mass);
  // Candidates are a superset of the support of powers and margins; the other lists are exact.
  const bool exact = K <= POWER_0 && A.rule != MARGIN;
  // In parts, so that the sum of many small weights loses no digits.
  V<T> total = {}, part = {};
  int64_t kept = 0;
  for (int64_t l = 0; l < row.n; l += LANES<T>) {
    if (l % (32 * LANES<T>) == 0) total += part, part = V<T>{};
    V<T> x = load(row.score + l), phi, slope;
    shape.raw(x, phi, slope);
    I<T> on = shape.on(x);
    uint32_t bits = inside<T>(on);
    if (row.n - l < LANES<T>) {
      bits &= (1u << (row.n - l)) - 1;
      on = on & first_lanes<T>(row.n - l);
    }
    phi = select<T>(on, phi, V<T>{});
    part += phi;
    if (exact) {
      store(row.weight + l, phi);
    } else {
      compress(phi, bits, row.weight + kept);
      kept = keep(row.score, row.index, l, bits, kept);
    }
  }
  if (!exact) row.n = kept;
  if (row.n == 0) return nothing;
  s.inverse = 1 / sum<T>(total + part);
  return s;
}

}  // namespace
}  // namespace parzen
