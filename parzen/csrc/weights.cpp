// Weight maps on rows of scores. Forward reads a row once for its maximum and its candidates, solves the
// threshold on them, and writes zeros and the support. Backward needs the weights alone.
#include "weights.h"

#include "support.h"
#include "threads.h"

namespace parzen {
namespace {

constexpr int BLOCK = 8, MOST_ROWS = 16;

struct Task {
  const WeightMap& A;
  Args rules;  // what support.h reads of a call
  int64_t together;
};

INLINE int64_t rows_together(int64_t n) { return larger(1, smaller(MOST_ROWS, 32768 / larger(1, n))); }

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
    if (row.n >= row.trigger) tighten<K, T>(rules, row);
  }
  drop(row);
  return true;
}

template <Kind K, class T>
void forward_item(const void* data, int64_t number, char* scratch) {
  const Task& task = *(const Task*)data;
  const WeightMap& A = task.A;
  const int64_t first = number * task.together, count = smaller(task.together, A.rows - first);
  Row<T> rows[MOST_ROWS];
  T sigma[MOST_ROWS] = {};
  bool good[MOST_ROWS];
  Pieces pieces{scratch};
  for (int64_t i = 0; i < count; i++) {
    Row<T>& row = rows[i];
    row.r = (T)A.r;
    row.level = (T)A.level;
    row.score = pieces.take<T>(A.n + 2 * LANES<T>);
    row.weight = pieces.take<T>(A.n + 2 * LANES<T>);
    row.index = pieces.take<int32_t>(A.n + 2 * LANES<T>);
    good[i] = collect<K, T>(task.rules, A, (const T*)A.in + (first + i) * A.n, row);
    if (!good[i]) row.n = 0;
  }
  if constexpr (K >= POWER_1)
    if (A.rule == UNIT_MASS) unit_mass<K, T>(rows, count, sigma);
  for (int64_t i = 0; i < count; i++) {
    Row<T>& row = rows[i];
    T* w = (T*)A.out + (first + i) * A.n;
    if (!good[i]) {
      const T* s = (const T*)A.in + (first + i) * A.n;
      for (int64_t j = 0; j < A.n; j++) w[j] = s[j] <= (T)A.least || s[j] * (T)A.scale == -INFINITY ? 0 : (T)NAN;
      continue;
    }
    const Stats<T> stats = finish<K, T>(task.rules, row, sigma[i]);
    memset(w, 0, A.n * sizeof(T));
    for (int64_t l = 0; l < row.n; l++) w[row.index[l]] = row.weight[l] * stats.inverse;
  }
}

// a of ds = a·(dw − μ), from the weight: w^{(r−1)/r}; w itself for exp.
template <Kind K, class T>
INLINE V<T> steep(V<T> w, T power) {
  if constexpr (K == GAUSS) return w;
  if constexpr (K == POWER_1) return w == w ? V<T>{} + 1 : w;
  if constexpr (K == POWER_2) {
    for (int l = 0; l < LANES<T>; l++) w[l] = sizeof(T) == 4 ? (T)sqrtf((float)w[l]) : (T)sqrt((double)w[l]);
    return w;
  }
  const T normal = sizeof(T) == 4 ? T(1.1754944e-38) : T(2.2250738585072014e-308);
  const V<T> a = exponential(power * logarithm<T>(w < normal ? splat(normal) : w));
  return w == w ? a : w;
}

template <Kind K, class T>
void backward_item(const void* data, int64_t number, char*) {
  const Task& task = *(const Task*)data;
  const WeightMap& A = task.A;
  constexpr int64_t L = LANES<T>;
  const T power = (T)(1 - 1 / A.r);
  for (int64_t i = number * task.together; i < smaller((number + 1) * task.together, A.rows); i++) {
    const T *w = (const T*)A.in + i * A.n, *dw = (const T*)A.dout + i * A.n;
    T* ds = (T*)A.out + i * A.n;
    if (K == POWER_0) {
      memset(ds, 0, A.n * sizeof(T));
      continue;
    }
    V<T> total = {}, product = {};
    auto some = [&](const T* p, int64_t j) {
      V<T> x = {};
      if (j + L <= A.n) return load(p + j);
      memcpy(&x, p + j, (A.n - j) * sizeof(T));
      return x;
    };
    for (int64_t j = 0; j < A.n; j += L) {
      const V<T> p = some(w, j);
      if (!above<T>(p, V<T>{})) continue;
      const I<T> on = ~(p <= 0);
      const V<T> a = select<T>(on, steep<K, T>(p, power), V<T>{});
      total += a;
      product += select<T>(on, a * some(dw, j), V<T>{});
    }
    const T mass = K == GAUSS ? 1 : sum<T>(total);
    const V<T> mu = splat(mass == 0 ? 0 : sum<T>(product) / mass), scale = splat((T)A.scale);
    for (int64_t j = 0; j < A.n; j += L) {
      const V<T> p = some(w, j);
      V<T> g = {};
      if (above<T>(p, V<T>{})) {
        g = steep<K, T>(p, power) * (some(dw, j) - mu) * scale;
        g = select<T>(~(p <= 0), g, V<T>{});
      }
      if (j + L <= A.n) store(ds + j, g);
      else memcpy(ds + j, &g, (A.n - j) * sizeof(T));
    }
  }
}

template <Kind K, class T>
int32_t run_type(const WeightMap& A, bool back) {
  Task task{A, {}, rows_together(A.n)};
  task.rules.rule = A.rule;
  task.rules.nearest = A.nearest;
  Job job{};
  job.item = back ? backward_item<K, T> : forward_item<K, T>;
  job.data = &task;
  job.items = tiles_of(A.rows, task.together);
  job.scratch = back ? 64 : task.together * ((A.n + 2 * LANES<T>) * (int64_t)(2 * sizeof(T) + 4) + 192);
  return run(A, job);
}
template <Kind K>
int32_t run_kind(const WeightMap& A, bool back) {
  return A.is_double ? run_type<K, double>(A, back) : run_type<K, float>(A, back);
}
int32_t run_any(const WeightMap& A, bool back) {
  if (A.profile == EXP) return run_kind<GAUSS>(A, back);
  return A.r == 0   ? run_kind<POWER_0>(A, back)
         : A.r == 1 ? run_kind<POWER_1>(A, back)
         : A.r == 2 ? run_kind<POWER_2>(A, back)
         : A.r == 3 ? run_kind<POWER_3>(A, back)
                    : run_kind<POWER_ANY>(A, back);
}
int32_t forward(const WeightMap& A) { return run_any(A, false); }
int32_t backward(const WeightMap& A) { return run_any(A, true); }

}  // namespace

namespace maps {
extern const WeightMaps PARZEN_ISA;
const WeightMaps PARZEN_ISA = {forward, backward};
}  // namespace maps
}  // namespace parzen
