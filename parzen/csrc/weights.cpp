// Weight maps on rows of scores. Forward reads a row once for its maximum and its candidates, solves the
// threshold on them, and writes zeros and the support. Backward needs the weights alone, but for a power within
// a margin or radius, whose height it reads from the scores.
#include "weights.h"

#include "support.h"
#include "threads.h"

namespace parzen {
namespace {

constexpr int BLOCK = 8, MOST_ROWS = 16;

struct Task {
  const RowMap& R;
  const WeightMap& A;
  Args rules;  // what support.h reads of a call
  int64_t together;
};

template <class T>
INLINE T of_row(const void* at, double number, int64_t row) {
  return at ? ((const T*)at)[row] : (T)number;
}

INLINE int64_t rows_together(int64_t n) { return larger(1, smaller(MOST_ROWS, 32768 / larger(1, n))); }

// log x for normal x > 0 by a polynomial, without a division (Cephes).
INLINE V<float> logarithm_of(V<float> x) {
  const U<float> ix = (U<float>)x;
  const I<float> e = (I<float>)(ix - 0x3f3504f3u) >> 23;
  const V<float> m = (V<float>)(ix - ((U<float>)e << 23)) - 1, m2 = m * m, n = __builtin_convertvector(e, V<float>);
  V<float> p = splat(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma<float>(p, m, splat(c));
  p = fma<float>(p * m, m2, fma<float>(n, splat(-2.12194440e-4f), m2 * -0.5f));
  return fma<float>(n, splat(0.693359375f), m + p);
}
INLINE V<double> logarithm_of(V<double> x) { return logarithm<double>(x); }

// 1/y to rounding or so for y in a row's range.
INLINE V<float> reciprocal(V<float> y) {
#if defined(__AVX512F__)
  const V<float> x = (V<float>)_mm512_rcp14_ps((__m512)y);
  return fma<float>(x, 1 - x * y, x);
#else
  return 1 / y;
#endif
}
INLINE V<double> reciprocal(V<double> y) { return 1 / y; }

// yʳ and yʳ⁻¹ of y = 1 + u, 0 where y ≤ 0 and NaN where it is.
template <class T>
INLINE void any_power(V<T> u, V<T> r, V<T>& phi, V<T>& slope) {
  const V<T> y = 1 + u;
  const I<T> on = ~(y <= 0);
  // A y of NaN, or one too small for its reciprocal, must not spoil the sums.
  const V<T> inverse = reciprocal(select<T>(y > EPSILON<T>, y, splat(EPSILON<T>)));
  const V<T> power = exponential(r * fma<T>(u - (y - 1), inverse, logarithm_of(y)));
  phi = select<T>(on, y == y ? power : y, V<T>{});
  slope = phi * inverse;
}

// The power below any other one: its σ is a lower bound, as (1 + u/r)ʳ grows with r, and costs no logarithms.
template <class T>
T solve_below(const T* score, int64_t n, T m, T sigma, T r, int steps) {
  if (r < 2) return solve<POWER_1, T>(score, n, m, sigma, 1, steps);
  if (r < 3) return solve<POWER_2, T>(score, n, m, sigma, 2, steps);
  return solve<POWER_3, T>(score, n, m, sigma, 3, steps);
}

// σ of any power: from between those of two powers without logarithms (the last of them is exp), by Newton's
// method on ‖y‖ᵣ. From the right the first step may go back; the norm is almost linear in σ.
template <class T>
T solve_between(const T* score, int64_t n, T m, T start, T r) {
  const T low = solve_below(score, n, m, start, r, 100);
  T high = low, x = 0;
  const V<T> vm = splat(m), vr = splat(r), vc = 1 / vr;
  if (r < 2) {
    high = solve<POWER_2, T>(score, n, m, low, 2, 100), x = (1 - 1 / r) * 2;
  } else if (r < 3) {
    high = solve<POWER_3, T>(score, n, m, low, 3, 100), x = (T(0.5) - 1 / r) * 6;
  } else {
    V<T> mass = {};
    for (int64_t l = 0; l < n; l += LANES<T>) mass += exponential(load(score + l) - vm);
    high = (T)log((double)sum<T>(mass)), x = 1 - 3 / r;
  }
  T sigma = low + x * (high - low);
  // What a step leaves is its square, but for r < 2 where keys at the threshold count to first order.
  const T last = r < T(1.25) ? 2 * EPSILON<T> : sizeof(T) == 8 ? T(4e-9) : r < 2 ? T(1e-5) : T(5e-4);
  for (int steps = 100; steps; steps--) {
    V<T> mass = {}, slope = {};
    const V<T> vs = splat(sigma);
    for (int64_t l = 0; l < n; l += LANES<T>) {
      V<T> phi, rise;
      any_power<T>(((load(score + l) - vm) - vs) * vc, vr, phi, rise);
      mass += phi;
      slope += rise;
    }
    const double a = sum<T>(mass), u = log(a) / r;
    // 1 − exp(−u), whose digits a small u keeps.
    double gap = 0;
    if (u < 0.1 && u > -0.1) {
      for (int k = sizeof(T) == 4 ? 6 : 11; k; k--) gap = (1 - gap) * u / k;
    } else {
      gap = -expm1(-u);
    }
    T step = (T)(r * gap * a / (double)sum<T>(slope));
    // Never to the left of the bound, where Newton's steps go right.
    if (!(sigma + step > low)) step = low - sigma;
    const T size = step < 0 ? -step : step;
    // Also the way out for NaN.
    if (!(size > last * (1 + sigma))) return step == step ? sigma + step : sigma;
    sigma += step;
  }
  return sigma;
}

// Raises the cut by that bound and drops what is below.
template <class T>
void tighten_below(Row<T>& row, int steps) {
  pad(row.score, row.index, row.n);
  const T bound = unit_mass_cut(row.m, solve_below(row.score, row.n, row.m, start_sigma(row), row.r, steps), row.r);
  if (bound > row.cut) row.cut = bound;
  const int64_t before = row.n;
  drop(row);
  const int64_t growth = row.n * 8 > before * 7 ? 3 * row.n : row.n / 2;
  row.trigger = row.n + (growth > 32 ? growth : 32);
}

// The candidates of one row; false where it has NaN or +∞.
template <Kind K, class T>
bool collect(const Args& rules, const WeightMap& A, const T* s, Row<T>& row) {
  constexpr int64_t L = LANES<T>;
  start<K, T>(rules, row, A.n);
  const V<T> scale = splat((T)A.scale), least = splat((T)A.least), none = splat<T>(-INFINITY);
  for (int64_t j = 0; j < A.n; j += BLOCK * L) {
    V<T> x[BLOCK], top = none;
    I<T> good = ~I<T>{};
    const bool whole = j + BLOCK * L <= A.n;
    for (int c = 0; c < BLOCK; c++) {
      V<T> raw = none;
      const int64_t at = j + c * L;
      if (whole || at + L <= A.n) {
        raw = load(s + at);
      } else if (at < A.n) {
        memcpy(&raw, s + at, (A.n - at) * sizeof(T));
      }
      x[c] = select<T>(raw <= least, none, raw * scale);
      good &= x[c] < INFINITY;
      top = maximum<T>(x[c], top);
    }
    if (inside<T>(~good)) return false;
    if (!above<T>(top, splat(row.cut))) continue;
    const T m = largest<T>(top);
    if (m > row.m) best<K, T>(rules, row, m);
    const V<T> cut = splat(row.cut);
    for (int c = 0; c < BLOCK; c++)
      if (const uint32_t bits = above<T>(x[c], cut))
        row.n = append<T>(x[c], (int32_t)(j + c * L), bits, row.score, row.index, row.n);
    if (row.n >= row.trigger) {
      if (K == POWER_ANY && rules.rule == UNIT_MASS) tighten_below(row, 1);
      else tighten<K, T>(rules, row);
    }
  }
  drop(row);
  return true;
}

// A row under unit mass that fits a few vectors: no lists. False where it has NaN or +∞.
template <Kind K, class T>
bool short_row(const WeightMap& A, const T* s, T* w, T r) {
  constexpr int64_t L = LANES<T>, MOST_VECTORS = SHORT / L;
  const V<T> scale = splat((T)A.scale), least = splat((T)A.least), none = splat<T>(-INFINITY);
  const int64_t vectors = tiles_of(A.n, L);
  V<T> z[MOST_VECTORS], top = none;
  I<T> good = ~I<T>{};
  for (int64_t c = 0; c < vectors; c++) {
    V<T> raw = none;
    if ((c + 1) * L <= A.n) raw = load(s + c * L);
    else memcpy(&raw, s + c * L, (A.n - c * L) * sizeof(T));
    z[c] = select<T>(raw <= least, none, raw * scale);
    good &= z[c] < INFINITY;
    top = maximum<T>(z[c], top);
  }
  if (inside<T>(~good)) return false;
  const T m = largest<T>(top);
  if (m == -INFINITY) {
    memset(w, 0, A.n * sizeof(T));
    return true;
  }
  const T sigma = K == POWER_ANY ? solve_between<T>((const T*)z, vectors * L, m, 0, r)
                                 : solve<K, T>((const T*)z, vectors * L, m, 0, r, 100);
  const Shape<K, T> shape({m, m, sigma, r, 1}, r, true);
  V<T> total = {};
  for (int64_t c = 0; c < vectors; c++) {
    V<T> phi, slope;
    if constexpr (K == POWER_ANY) {
      any_power<T>(shape.t(z[c]) * (1 / shape.r), shape.r, phi, slope);
    } else {
      shape.raw(z[c], phi, slope);
      phi = select<T>(shape.on(z[c]), phi, V<T>{});
    }
    total += z[c] = phi;
  }
  const V<T> inverse = splat(1 / sum<T>(total));
  for (int64_t c = 0; c < vectors; c++) {
    const V<T> p = z[c] * inverse;
    if ((c + 1) * L <= A.n) store(w + c * L, p);
    else memcpy(w + c * L, &p, (A.n - c * L) * sizeof(T));
  }
  return true;
}

template <class T>
void bad_row(const WeightMap& A, const T* s, T* w) {
  for (int64_t j = 0; j < A.n; j++) w[j] = s[j] <= (T)A.least || s[j] * (T)A.scale == -INFINITY ? 0 : (T)NAN;
}

template <Kind K, class T>
void forward_item(const void* data, int64_t number, char* scratch) {
  const Task& task = *(const Task*)data;
  const RowMap& R = task.R;
  const WeightMap& A = task.A;
  const int64_t first = number * task.together, count = smaller(task.together, A.rows - first);
  Row<T> rows[MOST_ROWS];
  T sigma[MOST_ROWS] = {};
  bool good[MOST_ROWS];
  if constexpr (K >= POWER_1)
    if (A.rule == UNIT_MASS && A.n <= SHORT) {
      for (int64_t i = first; i < first + count; i++) {
        const T* s = (const T*)A.x + i * A.n;
        T* w = (T*)A.out + i * A.n;
        if (!short_row<K, T>(A, s, w, of_row<T>(R.r_at, A.r, i))) bad_row(A, s, w);
      }
      return;
    }
  Pieces pieces{scratch};
  for (int64_t i = 0; i < count; i++) {
    Row<T>& row = rows[i];
    row.r = of_row<T>(R.r_at, A.r, first + i);
    row.level = of_row<T>(R.level_at, A.level, first + i);
    row.score = pieces.take<T>(A.n + 2 * LANES<T>);
    row.weight = pieces.take<T>(A.n + 2 * LANES<T>);
    row.index = pieces.take<int32_t>(A.n + 2 * LANES<T>);
    good[i] = collect<K, T>(task.rules, A, (const T*)A.x + (first + i) * A.n, row);
    if (!good[i]) row.n = 0;
  }
  if constexpr (K == POWER_ANY) {
    if (A.rule == UNIT_MASS)
      for (int64_t i = 0; i < count; i++)
        if (Row<T>& row = rows[i]; row.n) sigma[i] = solve_between(row.score, row.n, row.m, start_sigma(row), row.r);
  } else if constexpr (K >= POWER_1) {
    if (A.rule == UNIT_MASS) unit_mass<K, T>(rows, count, sigma);
  }
  for (int64_t i = 0; i < count; i++) {
    Row<T>& row = rows[i];
    T* w = (T*)A.out + (first + i) * A.n;
    if (!good[i]) {
      bad_row(A, (const T*)A.x + (first + i) * A.n, w);
      continue;
    }
    const Stats<T> stats = finish<K, T>(task.rules, row, sigma[i]);
    memset(w, 0, A.n * sizeof(T));
    for (int64_t l = 0; l < row.n; l++) w[row.index[l]] = row.weight[l] * stats.inverse;
  }
}

INLINE V<float> square_root(V<float> x) {
#if defined(__AVX512F__)
  return (V<float>)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (V<float>)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (V<float>)_mm_sqrt_ps((__m128)x);
#else
  for (int l = 0; l < LANES<float>; l++) x[l] = sqrtf(x[l]);
  return x;
#endif
}
INLINE V<double> square_root(V<double> x) {
#if defined(__AVX512F__)
  return (V<double>)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  return (V<double>)_mm256_sqrt_pd((__m256d)x);
#else
  for (int l = 0; l < LANES<double>; l++) x[l] = sqrt(x[l]);
  return x;
#endif
}
// a^{2/3} for normal a > 0: a guess from the exponent and two of Halley's steps.
INLINE V<float> two_thirds(V<float> a) {
  const V<float> bits = __builtin_convertvector((I<float>)a, V<float>);
  V<float> x = (V<float>)(__builtin_convertvector(bits * (1.0f / 3), I<float>) + 709921077);
  for (int step = 0; step < 2; step++) {
    const V<float> x3 = x * x * x;
    x = x * ((x3 + 2 * a) / (2 * x3 + a));
  }
  return x * x;
}
INLINE V<double> two_thirds(V<double> a) { return exponential(logarithm<double>(a) * (2.0 / 3)); }

// a of ds = a·(dw − μ), from a weight > 0 or NaN: w^{(r−1)/r}; w itself for exp.
template <Kind K, class T>
INLINE V<T> steep(V<T> w, T power) {
  if constexpr (K == GAUSS) return w;
  if constexpr (K == POWER_1) return w == w ? V<T>{} + 1 : w;
  if constexpr (K == POWER_2) return square_root(w);
  const T normal = sizeof(T) == 4 ? T(1.1754944e-38) : T(2.2250738585072014e-308);
  const V<T> x = w < normal ? splat(normal) : w;
  const V<T> a = K == POWER_3 ? two_thirds(x) : exponential(power * logarithm_of(x));
  return w == w ? a : w;
}

// Whether `a` is dear enough to be kept between the two passes over a row.
template <Kind K>
constexpr bool keeps_steep = K >= POWER_2;

template <class T>
INLINE V<T> some(const T* p, int64_t j, int64_t n) {
  V<T> x = {};
  if (j + LANES<T> <= n) return load(p + j);
  memcpy(&x, p + j, (n - j) * sizeof(T));
  return x;
}
template <class T>
INLINE void put(T* p, int64_t j, int64_t n, V<T> x) {
  if (j + LANES<T> <= n) store(p + j, x);
  else memcpy(p + j, &x, (n - j) * sizeof(T));
}

// A row of a power within a margin or radius: a = r·w/(s − θ), μ = Σ w dw. The best key takes what moves the
// margin.
template <class T>
void backward_anchored(const RowMap& R, int64_t row) {
  const WeightMap& A = *R.map;
  constexpr int64_t L = LANES<T>;
  const int64_t at = row * A.n;
  const T *w = (const T*)A.x + at, *dw = (const T*)A.dout + at, *s = (const T*)R.score + at;
  T* ds = (T*)A.out + at;
  const V<T> r = splat(of_row<T>(R.r_at, A.r, row)), scale = splat((T)A.scale), least = splat((T)A.least);
  const V<T> level = splat(of_row<T>(R.level_at, A.level, row)), none = splat<T>(-INFINITY);
  auto score = [&](int64_t j) {
    const V<T> raw = some(s, j, A.n);
    return select<T>(raw <= least, none, raw * scale);
  };
  V<T> top = none, product = {};
  for (int64_t j = 0; j < A.n; j += L) {
    const V<T> p = some(w, j, A.n);
    if (!above<T>(p, V<T>{})) continue;
    const I<T> on = ~(p <= 0);
    product += select<T>(on, p * some(dw, j, A.n), V<T>{});
    top = maximum<T>(select<T>(on, score(j), none), top);
  }
  const bool margin = A.rule == MARGIN;
  const T m = largest<T>(top);
  const V<T> mu = splat(sum<T>(product)), vm = splat(m), tiny = splat(LEAST<T>);
  V<T> push = {};
  int64_t ties = 0;
  for (int64_t j = 0; j < A.n; j += L) {
    const V<T> p = some(w, j, A.n);
    V<T> g = {};
    if (above<T>(p, V<T>{})) {
      const I<T> on = ~(p <= 0);
      const V<T> x = score(j), height = margin ? (x - vm) + level : x - level;
      g = select<T>(on, r * p / select<T>(height > tiny, height, tiny) * (some(dw, j, A.n) - mu), V<T>{});
      push += g;
      ties += __builtin_popcount(inside<T>(on & (x == vm)));
    }
    put(ds, j, A.n, g * scale);
  }
  const T moved = sum<T>(push);
  if (R.push) ((T*)R.push)[row] = margin ? moved : -moved;
  if (!margin || !ties) return;
  const V<T> share = splat(moved / ties) * scale;
  for (int64_t j = 0; j < A.n; j += L) {
    const V<T> p = some(w, j, A.n);
    if (!above<T>(p, V<T>{})) continue;
    put(ds, j, A.n, some((const T*)ds, j, A.n) - select<T>(~(p <= 0) & (score(j) == vm), share, V<T>{}));
  }
}

template <Kind K, class T>
void backward_item(const void* data, int64_t number, char* scratch) {
  const Task& task = *(const Task*)data;
  const RowMap& R = task.R;
  const WeightMap& A = task.A;
  constexpr int64_t L = LANES<T>;
  const bool anchored = K >= POWER_1 && (A.rule == MARGIN || A.rule == THRESHOLD);
  T* kept = (T*)scratch;
  for (int64_t i = number * task.together; i < smaller((number + 1) * task.together, A.rows); i++) {
    const T *w = (const T*)A.x + i * A.n, *dw = (const T*)A.dout + i * A.n;
    T* ds = (T*)A.out + i * A.n;
    if (K == POWER_0) {
      memset(ds, 0, A.n * sizeof(T));
      continue;
    }
    if (anchored) {
      backward_anchored<T>(R, i);
      continue;
    }
    const T power = 1 - 1 / of_row<T>(R.r_at, A.r, i);
    V<T> total = {}, product = {};
    for (int64_t j = 0; j < A.n; j += L) {
      const V<T> p = some(w, j, A.n);
      if (!above<T>(p, V<T>{})) continue;
      const I<T> on = ~(p <= 0);
      const V<T> a = select<T>(on, steep<K, T>(p, power), V<T>{});
      if constexpr (keeps_steep<K>) store(kept + j, a);
      total += a;
      product += select<T>(on, a * some(dw, j, A.n), V<T>{});
    }
    const T mass = K == GAUSS ? 1 : sum<T>(total);
    const V<T> mu = splat(mass == 0 ? 0 : sum<T>(product) / mass), scale = splat((T)A.scale);
    for (int64_t j = 0; j < A.n; j += L) {
      const V<T> p = some(w, j, A.n);
      V<T> g = {};
      if (above<T>(p, V<T>{})) {
        V<T> a;
        if constexpr (keeps_steep<K>) a = load(kept + j);
        else a = steep<K, T>(p, power);
        g = select<T>(~(p <= 0), a * (some(dw, j, A.n) - mu) * scale, V<T>{});
      }
      put(ds, j, A.n, g);
    }
  }
}

template <Kind K, class T>
int32_t run_type(const RowMap& R, bool back) {
  const WeightMap& A = *R.map;
  Task task{R, A, {}, rows_together(A.n)};
  task.rules.rule = A.rule;
  task.rules.nearest = A.nearest;
  Job job{};
  job.item = back ? backward_item<K, T> : forward_item<K, T>;
  job.data = &task;
  job.items = tiles_of(A.rows, task.together);
  job.scratch = back ? (A.n + LANES<T>) * (int64_t)sizeof(T)
                     : task.together * ((A.n + 2 * LANES<T>) * (int64_t)(2 * sizeof(T) + 4) + 192);
  return run(A, job);
}
template <Kind K>
int32_t run_kind(const RowMap& R, bool back) {
  return R.map->is_double ? run_type<K, double>(R, back) : run_type<K, float>(R, back);
}
int32_t run_any(const RowMap& R, bool back) {
  const WeightMap& A = *R.map;
  if (A.profile == EXP) return run_kind<GAUSS>(R, back);
  return A.r == 0   ? run_kind<POWER_0>(R, back)
         : A.r == 1 ? run_kind<POWER_1>(R, back)
         : A.r == 2 ? run_kind<POWER_2>(R, back)
         : A.r == 3 ? run_kind<POWER_3>(R, back)
                    : run_kind<POWER_ANY>(R, back);
}
int32_t forward(const RowMap& R) { return run_any(R, false); }
int32_t backward(const RowMap& R) { return run_any(R, true); }

}  // namespace

namespace maps {
extern const WeightMaps PARZEN_ISA;
const WeightMaps PARZEN_ISA = {forward, backward};
}  // namespace maps
}  // namespace parzen
