// Attention of a few queries to a long store, for one instruction set. docs: math.md §4.
//
//   1. Each run of chunks, the nearest chunk known, bounds the scores of its keys from both sides by 8-bit products. Thresholds move with the
//      scores: found on lower bounds they are lower bounds. Keys whose upper bound is not above stay out, exactly.
//   2. Each query merges what its runs have left, and cuts once more by all lower bounds together.
//   3. What is left then gets its true score, the threshold is solved on those, and values are read on the support.
//
// Keys without codes (the last chunk, and numbers that no code fits) are read in step 1 at once. A Gaussian leaves
// nothing out, and reads keys and values of each run in one pass. Runs and slices
// have fixed sizes and are put together in order: the split of work over threads never changes a bit.
#include "memory.h"

#include <stdlib.h>

#include "codes.h"
#include "stored.h"
#include "support.h"
#include "threads.h"

namespace parzen {
namespace {

constexpr int64_t RUN = 8;        // chunks that one item goes through
constexpr int64_t SLICE = 4096;   // candidates that one item reads
constexpr int64_t ROWS = 32;      // queries of one key head that go through the store together
constexpr int64_t LOOK_AHEAD = 16, AHEAD_BLOCKS = 3;

// ---- rows of the store ---------------------------------------------------------------------------

template <class X>
struct Store {
  using T = typename Computed<X>::T;
  const Recall& A;
  int64_t shift;  // chunk = 1 << shift keys

  explicit Store(const Recall& args) : A(args), shift(63 - __builtin_clzll((uint64_t)args.chunk)) {}
  INLINE const X* key(int64_t head, int64_t j) const {
    const Chunk& chunk = A.chunks[j >> shift];
    return (const X*)chunk.keys + head * chunk.keys_head + (j & (A.chunk - 1)) * A.E;
  }
  INLINE const X* value(int64_t head, int64_t j) const {
    const Chunk& chunk = A.chunks[j >> shift];
    return (const X*)chunk.values + head * chunk.values_head + (j & (A.chunk - 1)) * A.D;
  }
};

// What depends on the stored type, for all kernels.
template <class T>
struct Access {
  // out[j] = scale·q·k_j of the keys [j0, j0 + n) of one chunk.
  void (*scores)(const Recall& A, int64_t head, const T* q, T scale, int64_t j0, int64_t n, T* out);
  // The same at index[l], where the bounds of the score differ.
  int64_t (*scores_at)(const Recall& A, int64_t head, const T* q, T scale, const int32_t* index, const float* lower,
                       const float* upper, int64_t n, T* out);
  // out += Σ_l w[l]·v[index[l]]
  void (*combine)(const Recall& A, int64_t head, const T* w, const int32_t* index, int64_t n, T* out);
  // out += Σ_l w[l]·v[j0 + l], all of one chunk
  void (*combine_all)(const Recall& A, int64_t head, const T* w, int64_t j0, int64_t n, T* out);
};

template <class X, class T>
void scores(const Recall& A, int64_t head, const T* q, T scale, int64_t j0, int64_t n, T* out) {
  const X* x = Store<X>(A).key(head, j0);
  for (int64_t j = 0; j < n; j++, x += A.E) {
    fetch(x + LOOK_AHEAD * A.E, A.E * sizeof(X));
    out[j] = product(q, x, A.E) * scale;
  }
}

template <class X, class T>
int64_t scores_at(const Recall& A, int64_t head, const T* q, T scale, const int32_t* index, const float* lower,
                  const float* upper, int64_t n, T* out) {
  const Store<X> store(A);
  int64_t read = 0;
  for (int64_t l = 0; l < n; l++) {
    if (l + LOOK_AHEAD < n) fetch(store.key(head, index[l + LOOK_AHEAD]), A.E * sizeof(X));
    const bool known = sizeof(T) == 4 && lower[l] == upper[l];
    read += !known;
    out[l] = known ? (T)lower[l] : product(q, store.key(head, index[l]), A.E) * scale;
  }
  return read;
}

// out[c] += Σ_l w[l]·row(l)[c] for the columns of N vectors, which stay in registers. A weight of 0 takes nothing,
// not even NaN.
template <int N, class T, class Rows>
INLINE void add_columns(T* out, const T* w, int64_t n, Rows row) {
  constexpr int L = LANES<T>;
  V<T> acc[N];
#pragma GCC unroll 4
  for (int c = 0; c < N; c++) acc[c] = load(out + c * L);
  for (int64_t l = 0; l < n; l++) {
    if (l + LOOK_AHEAD < n) fetch(row(l + LOOK_AHEAD), N * L * sizeof(*row(0)));
    if (w[l] == 0) continue;
    const auto* x = row(l);
    const V<T> f = splat(w[l]);
#pragma GCC unroll 4
    for (int c = 0; c < N; c++) acc[c] = fma<T>(f, load_as(x + c * L), acc[c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < N; c++) store(out + c * L, acc[c]);
}

template <class T, class Rows>
INLINE void add_rows(T* out, const T* w, int64_t n, int64_t D, Rows row) {
  constexpr int L = LANES<T>;
  int64_t d = 0;
  for (; d + 4 * L <= D; d += 4 * L) add_columns<4>(out + d, w, n, [&](int64_t l) { return row(l) + d; });
  for (; d + L <= D; d += L) add_columns<1>(out + d, w, n, [&](int64_t l) { return row(l) + d; });
  for (int64_t l = 0; l < n && d < D; l++)
    if (w[l] != 0) store<T>(out + d, fma<T>(splat(w[l]), load_some_as(row(l) + d, D - d), load(out + d)));
}

template <class X, class T>
void combine(const Recall& A, int64_t head, const T* w, const int32_t* index, int64_t n, T* out) {
  const Store<X> store(A);
  add_rows(out, w, n, A.D, [&](int64_t l) { return store.value(head, index[l]); });
}

template <class X, class T>
void combine_all(const Recall& A, int64_t head, const T* w, int64_t j0, int64_t n, T* out) {
  const X* x = Store<X>(A).value(head, j0);
  add_rows(out, w, n, A.D, [&](int64_t l) { return x + l * A.D; });
}

template <class X>
Access<typename Computed<X>::T> access_of() {
  using T = typename Computed<X>::T;
  return {scores<X, T>, scores_at<X, T>, combine<X, T>, combine_all<X, T>};
}

// ---- candidates ----------------------------------------------------------------------------------

// What one run leaves of a row: three arrays of n in one piece of memory.
struct Found {
  float* lower = nullptr;
  int64_t n = 0, read = 0;
  float m = -INFINITY;
  INLINE float* upper() const { return lower + n; }
  INLINE int32_t* index() const { return (int32_t*)(lower + 2 * n); }
};

// The keys of a row that may still count.
struct Candidates {
  float cut, m, r, level;
  int64_t n, trigger;
  float *lower, *upper;
  int32_t* index;
};

template <Kind K>
INLINE void reached(const Recall& A, Candidates& row, float m) {
  row.m = m;
  const float bound = A.rule == UNIT_MASS ? unit_mass_cut<float>(m, 0, row.r)
                      : A.rule == MARGIN  ? margin_cut<float>(m, row.level)
                                          : -INFINITY;
  // A margin of NaN must reach the output.
  if (!(bound <= row.cut)) row.cut = bound;
}

template <Kind K>
void start(const Recall& A, Candidates& row, double r, double level, float seed) {
  row.n = 0, row.m = -INFINITY, row.r = (float)r, row.level = (float)level;
  row.cut = seed;
  if (A.rule == THRESHOLD)
    row.cut = cut_at<K, float>(row.level - 2 * EPSILON<float> * fabsf(row.level) - LEAST<float>);
  row.trigger = A.rule == UNIT_MASS ? 64 : A.rule == NEAREST ? A.nearest + 64 : A.rule == MARGIN ? 256 : INT64_MAX;
}

INLINE void drop(Candidates& row) {
  int64_t kept = 0;
  const V<float> cut = splat(row.cut);
  for (int64_t l = 0; l < row.n; l += LANES<float>) {
    const V<float> upper = load(row.upper + l);
    uint32_t bits = above<float>(upper, cut);
    if (row.n - l < LANES<float>) bits &= (1u << (row.n - l)) - 1;
    compress(upper, bits, row.upper + kept);
    kept = keep(row.lower, row.index, l, bits, kept);
  }
  row.n = kept;
}

// Raises the cut by the lower bounds so far and drops what is below.
template <Kind K>
void tighten(const Recall& A, Candidates& row, int steps) {
  pad(row.lower, row.index, row.n);
  if constexpr (K >= POWER_1) {
    if (A.rule == UNIT_MASS && row.m > -INFINITY) {
      const float begin = (row.cut - row.m) + row.r;
      const float sigma = solve<K, float>(row.lower, row.n, row.m, begin > 0 ? begin : 0, row.r, steps);
      const float bound = unit_mass_cut(row.m, sigma, row.r);
      if (bound > row.cut) row.cut = bound;
    }
  }
  if (A.rule == NEAREST && count_from(row.lower, row.n, -MOST<float>) >= A.nearest) {
    const float bound = below(nearest(row.lower, row.n, A.nearest, steps == 1 ? A.nearest / 2 : 0, row.m));
    if (bound > row.cut) row.cut = bound;
  }
  const int64_t before = row.n;
  drop(row);
  const int64_t growth = row.n * 8 > before * 7 ? 3 * row.n : row.n / 2;
  row.trigger = row.n + larger(growth, 64);
}

// Takes the bounds of a block of keys, those in `allowed`.
template <Kind K>
INLINE void scan(const Recall& A, Candidates& row, const float* lower, const float* upper, uint64_t allowed, int64_t j0) {
  constexpr int N = BLOCK / LANES<float>;
  constexpr uint32_t FULL = (1u << LANES<float>) - 1;
  uint32_t bits[N], any = 0;
  auto hits = [&] {
    any = 0;
    const V<float> cut = splat(row.cut);
#pragma GCC unroll 16
    for (int v = 0; v < N; v++)
      any |= bits[v] = above<float>(load(upper + v * LANES<float>), cut) & (uint32_t)(allowed >> (v * LANES<float>)) & FULL;
  };
  hits();
  if (!any) return;
  float m = row.m;
  for (int v = 0; v < N; v++) {
    const V<float> x = load(lower + v * LANES<float>);
    for (uint32_t b = bits[v] & above<float>(x, splat(m)); b; b &= b - 1) {
      const float y = lower[v * LANES<float> + __builtin_ctz(b)];
      m = y > m ? y : m;
    }
  }
  if (m > row.m) {
    reached<K>(A, row, m);
    hits();
  }
  for (int v = 0; v < N; v++) {
    if (!bits[v]) continue;
    compress(load(upper + v * LANES<float>), bits[v], row.upper + row.n);
    row.n = append<float>(load(lower + v * LANES<float>), (int32_t)(j0 + v * LANES<float>), bits[v], row.lower, row.index, row.n);
  }
  if (row.n >= row.trigger) tighten<K>(A, row, 1);
}

// Bounds of one block from its integer products. Where they are not finite, or so large that sums might not be,
// nothing is known: −∞ and ∞.
INLINE void bounds_of(const CodedQuery& q, const int32_t* products, const float* bounds, float* lower, float* upper) {
  const V<float> base = splat(q.base), factor = splat(q.factor), slack = splat(q.slack), least = splat(q.least),
                 error = splat(q.error), all = splat<float>(INFINITY);
#pragma GCC unroll 16
  for (int j = 0; j < BLOCK; j += LANES<float>) {
    I<float> whole;
    memcpy(&whole, products + j, BYTES);
    const V<float> step = load(bounds + j);
    const V<float> a = fma<float>(__builtin_convertvector(whole, V<float>) * factor, step, base);
    const V<float> off = fma<float>(error, load(bounds + BLOCK + j), fma<float>(slack, step, least));
    const I<float> good = (maximum<float>(a, -a) + off < 1e37f) & (step > 0);
    store<float>(lower + j, select<float>(good, a - off, -all));
    store<float>(upper + j, select<float>(good, a + off, all));
  }
}

// ---- one call ------------------------------------------------------------------------------------

template <class T>
struct Query {
  int64_t n = 0, read = 0;  // candidates; keys read exactly
  float *lower = nullptr, *upper = nullptr;
  int32_t* index = nullptr;
  T *score = nullptr, *weight = nullptr, *sums = nullptr;  // sums: what each slice adds to the output
  T cut = 0, inverse = 0;
  float seed = -INFINITY;  // a lower bound of the threshold, before the store is gone through
};

template <class T>
struct Pass {
  const Recall& A;
  Access<T> access;
  int64_t t0, queries, runs;  // queries [t0, t0 + queries)
  Found* found;                // per row and run
  Query<T>* rows;              // per row (b, h, t)
  const int64_t* wide;         // rows of more than one slice, and their first slices
  const int64_t* first;
  int64_t wide_rows;
  mutable int32_t failed = 0;

  INLINE T* at(const View& x, int64_t b, int64_t h, int64_t t) const { return (T*)x.p + b * x.b + h * x.h + t * x.i; }
  INLINE T scale(int64_t b, int64_t h, int64_t t) const { return A.scale_at.p ? *at(A.scale_at, b, h, t) : (T)A.scale; }
  INLINE double exponent(int64_t b, int64_t h, int64_t t) const {
    const double r = A.r_at.p ? *at(A.r_at, b, h, t) : A.r;
    return r > 1e30 ? 1e30 : r;
  }
  INLINE double level(int64_t b, int64_t h, int64_t t) const {
    const double x = A.level_at.p ? *at(A.level_at, b, h, t) : A.level;
    const double most = A.rule == MARGIN ? MOST<T> : MOST<T> / 4;
    return x > most ? most : x < -most ? -most : x;
  }
  INLINE void limits(int64_t t, int64_t& lo, int64_t& hi) const {
    const int64_t p = t + A.diagonal, far = INT64_C(1) << 62;
    lo = A.left < 0 ? 0 : larger(0, p - smaller(A.left, far));
    hi = A.right < 0 ? A.S : larger(lo, smaller(A.S, p + smaller(A.right, far) + 1));
  }
  INLINE int64_t room() const { return tiles_of(A.E, LANES<T>) * LANES<T>; }
  INLINE int64_t width() const { return tiles_of(A.D, LANES<T>) * LANES<T>; }
  // The query in whole vectors.
  INLINE void query(int64_t b, int64_t h, int64_t t, T* out) const {
    const T* q = at(A.q, b, h, t);
    memcpy(out, q, A.E * sizeof(T));
    memset(out + A.E, 0, (room() - A.E) * sizeof(T));
  }
  INLINE void fail() const { __atomic_store_n(&failed, 1, __ATOMIC_RELAXED); }
};

template <class T>
struct RunScratch {
  T *query, *score;
  float *lower, *upper, *block;
  int32_t *index, *products;
  CodedQuery* coded;
  Candidates* candidates;
  int64_t *read, *seen;
  RunScratch(Pieces& pieces, const Recall& A, int64_t rows) {
    const int64_t keys = RUN * A.chunk + BLOCK, width = code_width(A.E) + BLOCK;
    query = pieces.take<T>(rows * (A.E + BLOCK));
    score = pieces.take<T>(BLOCK);
    block = pieces.take<float>(2 * BLOCK);
    products = pieces.take<int32_t>(BLOCK);
    int16_t* n = pieces.take<int16_t>(width);
    int8_t *high = pieces.take<int8_t>(width), *low = pieces.take<int8_t>(width);
    coded = pieces.take<CodedQuery>(1);
    if (pieces.base) *coded = {0, 0, 0, 0, 0, 0, n, high, low};
    candidates = pieces.take<Candidates>(rows);
    read = pieces.take<int64_t>(rows);
    seen = pieces.take<int64_t>(rows);
    lower = pieces.take<float>(rows * keys);
    upper = pieces.take<float>(rows * keys);
    index = pieces.take<int32_t>(rows * keys);
  }
};

template <class T>
INLINE uint64_t allowed_keys(const Recall& A, int64_t b, int64_t h, int64_t t, int64_t j0, int64_t lo, int64_t hi) {
  uint64_t bits = ~UINT64_C(0);
  if (lo > j0) bits <<= lo - j0;
  if (hi < j0 + BLOCK) bits &= ~UINT64_C(0) >> (j0 + BLOCK - hi);
  if (A.mask.p) {
    const uint8_t* mask = (const uint8_t*)A.mask.p + b * A.mask.b + h * A.mask.h + t * A.mask.i;
    if (A.mask.j == 0) return *mask ? bits : 0;
    for (uint64_t rest = bits; rest; rest &= rest - 1)
      if (!mask[(j0 + __builtin_ctzll(rest)) * A.mask.j]) bits &= ~(rest & -rest);
  }
  return bits;
}

template <class T>
struct Place {
  int64_t b, h, t, head;
  Place(const Pass<T>& P, int64_t row) {
    t = P.t0 + row % P.queries, h = row / P.queries % P.A.H, b = row / P.queries / P.A.H;
    head = b * P.A.Hk + h / (P.A.H / P.A.Hk);
  }
};

// The keys [lo, hi) of chunk c go to the candidates, by their codes or by their scores.
template <Kind K, class T>
void look(const Pass<T>& P, const Place<T>& at, int64_t c, int64_t next, int64_t lo, int64_t hi, const T* q, bool screened,
          const RunScratch<T>& scratch, Candidates& row) {
  const Recall& A = P.A;
  const Chunk &chunk = A.chunks[c], &after = A.chunks[next];
  const int64_t blocks = A.chunk / BLOCK, width = code_width(A.E);
  const T scale = P.scale(at.b, at.h, at.t);
  float *lower = scratch.block, *upper = lower + BLOCK;
  for (int64_t j0 = lo / BLOCK * BLOCK; j0 < hi; j0 += BLOCK) {
    const uint64_t allowed = allowed_keys<T>(A, at.b, at.h, at.t, j0, lo, hi);
    if (!allowed) continue;
    if (screened) {
      const int64_t inside = (j0 - c * A.chunk) / BLOCK, block = at.head * blocks + inside;
      const Chunk& later = inside + AHEAD_BLOCKS < blocks || !after.codes ? chunk : after;
      const int64_t ahead = at.head * blocks + (inside + AHEAD_BLOCKS) % blocks;
      fetch(later.bounds + ahead * 2 * BLOCK, 2 * BLOCK * sizeof(float));
      integer_products(*scratch.coded, chunk.codes + block * BLOCK * width, later.codes + ahead * BLOCK * width, width,
                       scratch.products);
      bounds_of(*scratch.coded, scratch.products, chunk.bounds + block * 2 * BLOCK, lower, upper);
    } else {
      const int64_t begin = larger(lo, j0) - j0, end = smaller(hi, j0 + BLOCK) - j0;
      P.access.scores(A, at.head, q, scale, j0 + begin, end - begin, scratch.score + begin);
      for (int64_t j = begin; j < end; j++) {
        const T s = scratch.score[j];
        lower[j] = upper[j] = (float)s;
        if (sizeof(T) == 8 || s != s) {
          const T off = (s < 0 ? -s : s) * T(1.3e-7) + T(1e-36);
          const bool good = off < T(1e30);
          lower[j] = good ? (float)(s - off) : -INFINITY, upper[j] = good ? (float)(s + off) : INFINITY;
        }
      }
    }
    scan<K>(A, row, lower, upper, allowed, j0);
  }
}

// The keys of chunk c that a query may look at.
template <class T>
INLINE bool limits_in(const Pass<T>& P, int64_t t, int64_t c, int64_t& lo, int64_t& hi) {
  P.limits(t, lo, hi);
  lo = larger(lo, c * P.A.chunk), hi = smaller(hi, (c + 1) * P.A.chunk);
  return lo < hi;
}

// Where keys move slowly the best of a run may be far below the best of all, and all its keys look alike. So the
// chunk whose centre is nearest to the query goes first, and what it says of the threshold goes to all runs.
template <Kind K, class T>
void seed_item(const void* data, int64_t number, char* memory) {
  const Pass<T>& P = *(const Pass<T>*)data;
  const Recall& A = P.A;
  const Place<T> at(P, number);
  Pieces pieces = {memory};
  RunScratch<T> scratch(pieces, A, 1);
  P.query(at.b, at.h, at.t, scratch.query);
  int64_t best = -1, lo, hi;
  double most = -INFINITY;
  for (int64_t c = 0; c < tiles_of(A.S, A.chunk); c++) {
    if (!A.chunks[c].codes || !limits_in(P, at.t, c, lo, hi)) continue;
    const float* centre = A.chunks[c].frame + at.head * frame_size(A.E);
    double near = 0;
    for (int64_t e = 0; e < A.E; e++) near += (double)scratch.query[e] * centre[e];
    if (near > most) best = c, most = near;
  }
  if (best < 0) return;
  Candidates& row = *scratch.candidates;
  start<K>(A, row, P.exponent(at.b, at.h, at.t), P.level(at.b, at.h, at.t), -INFINITY);
  row.lower = scratch.lower, row.upper = scratch.upper, row.index = scratch.index;
  if (!code_query(scratch.query, A.E, P.scale(at.b, at.h, at.t), A.chunks[best].frame + at.head * frame_size(A.E), *scratch.coded))
    return;
  limits_in(P, at.t, best, lo, hi);
  look<K>(P, at, best, best, lo, hi, scratch.query, true, scratch, row);
  if (row.n) tighten<K>(A, row, 100);
  P.rows[number].seed = row.cut;
}

// Step 1 for one run of chunks of one key head, and all its queries.
template <Kind K, class T>
void run_item(const void* data, int64_t number, char* memory) {
  const Pass<T>& P = *(const Pass<T>*)data;
  const Recall& A = P.A;
  const int64_t run = number % P.runs, head = number / P.runs, b = head / A.Hk, hk = head % A.Hk, group = A.H / A.Hk;
  const int64_t rows = group * P.queries, first = (b * A.H + hk * group) * P.queries, keys = RUN * A.chunk + BLOCK;
  Pieces pieces = {memory};
  RunScratch<T> scratch(pieces, A, rows);
  for (int64_t i = 0; i < rows; i++) {
    const Place<T> at(P, first + i);
    Candidates& row = scratch.candidates[i];
    start<K>(A, row, P.exponent(b, at.h, at.t), P.level(b, at.h, at.t), P.rows[first + i].seed);
    row.lower = scratch.lower + i * keys, row.upper = scratch.upper + i * keys, row.index = scratch.index + i * keys;
    scratch.read[i] = scratch.seen[i] = 0;
    P.query(b, at.h, at.t, scratch.query + i * P.room());
  }
  const int64_t last = smaller(tiles_of(A.S, A.chunk), (run + 1) * RUN);
  for (int64_t c = run * RUN; c < last; c++) {
    const Chunk& chunk = A.chunks[c];
    const float* frame = chunk.frame + head * frame_size(A.E);
    for (int64_t i = 0; i < rows; i++) {
      const Place<T> at(P, first + i);
      int64_t lo, hi;
      if (!limits_in(P, at.t, c, lo, hi)) continue;
      Candidates& row = scratch.candidates[i];
      const T* q = scratch.query + i * P.room();
      // Where most keys count anyway they are read at once.
      const bool sparse = scratch.seen[i] < 2 * A.chunk || row.n * 4 <= scratch.seen[i] * 3;
      const bool screened = chunk.codes && sparse &&
                            code_query(q, A.E, P.scale(b, at.h, at.t), frame, *scratch.coded);
      scratch.seen[i] += hi - lo;
      // A whole chunk lies too far away.
      if (screened && scratch.coded->base + scratch.coded->error * frame[2 * A.E] + scratch.coded->least <= row.cut) continue;
      look<K>(P, at, c, smaller(c + 1, last - 1), lo, hi, q, screened, scratch, row);
      if (!screened) scratch.read[i] += hi - lo;
    }
  }
  for (int64_t i = 0; i < rows; i++) {
    Candidates& row = scratch.candidates[i];
    Found& found = P.found[(first + i) * P.runs + run];
    found.read = scratch.read[i];
    found.m = row.m;
    if (row.n == 0) continue;
    found.lower = (float*)malloc(row.n * 12);
    if (!found.lower) return P.fail();
    found.n = row.n;
    memcpy(found.lower, row.lower, row.n * 4);
    memcpy(found.upper(), row.upper, row.n * 4);
    memcpy(found.index(), row.index, row.n * 4);
  }
}

// ---- steps 2 and 3 -------------------------------------------------------------------------------

template <Kind K, class T>
bool merge(const Pass<T>& P, int64_t number) {
  const Recall& A = P.A;
  const Place<T> at(P, number);
  Query<T>& query = P.rows[number];
  Candidates row;
  start<K>(A, row, P.exponent(at.b, at.h, at.t), P.level(at.b, at.h, at.t), query.seed);
  const Found* found = P.found + number * P.runs;
  int64_t total = 0;
  float m = -INFINITY;
  for (int64_t run = 0; run < P.runs; run++) {
    total += found[run].n, query.read += found[run].read;
    m = found[run].m > m ? found[run].m : m;
  }
  if (!total) return true;
  const int64_t room = total + BLOCK;
  row.lower = (float*)aligned_alloc(64, tiles_of(room * 12, 64) * 64);
  if (!row.lower) return false;
  row.upper = row.lower + room, row.index = (int32_t*)(row.upper + room);
  query.lower = row.lower;
  if (m > -INFINITY) reached<K>(A, row, m);
  for (int64_t run = 0; run < P.runs; run++) {
    if (!found[run].n) continue;
    memcpy(row.lower + row.n, found[run].lower, found[run].n * 4);
    memcpy(row.upper + row.n, found[run].upper(), found[run].n * 4);
    memcpy(row.index + row.n, found[run].index(), found[run].n * 4);
    row.n += found[run].n;
  }
  drop(row);
  tighten<K>(A, row, 100);
  query.upper = row.upper, query.index = row.index, query.n = row.n;
  query.cut = row.cut;
  const int64_t lists = row.n + BLOCK;
  query.score = (T*)aligned_alloc(64, tiles_of((2 * lists + tiles_of(row.n, SLICE) * P.width()) * (int64_t)sizeof(T), 64) * 64);
  if (!query.score) return false;
  query.weight = query.score + lists, query.sums = query.weight + lists;
  return true;
}

template <class T>
void score_slice(const Pass<T>& P, int64_t number, int64_t slice, T* q) {
  const Place<T> at(P, number);
  Query<T>& query = P.rows[number];
  const int64_t l = slice * SLICE, n = smaller(SLICE, query.n - l);
  P.query(at.b, at.h, at.t, q);
  const int64_t read = P.access.scores_at(P.A, at.head, q, P.scale(at.b, at.h, at.t), query.index + l, query.lower + l,
                                          query.upper + l, n, query.score + l);
  __atomic_fetch_add(&query.read, read, __ATOMIC_RELAXED);
}

template <Kind K, class T>
void solve_row(const Pass<T>& P, int64_t number) {
  const Place<T> at(P, number);
  Query<T>& query = P.rows[number];
  Args rule = {};
  rule.rule = P.A.rule, rule.nearest = P.A.nearest;
  Row<T> row = {};
  row.n = query.n, row.score = query.score, row.weight = query.weight, row.index = query.index;
  row.r = (T)P.exponent(at.b, at.h, at.t), row.level = (T)P.level(at.b, at.h, at.t);
  if (rule.rule == MARGIN && row.level == 0) row.level = LEAST<T>;
  // A score of −∞ is a key that is not allowed.
  row.cut = rule.rule == THRESHOLD ? cut_at<K, T>(row.level) : -(T)INFINITY;
  parzen::drop(row);
  row.m = -INFINITY;
  for (int64_t l = 0; l < row.n; l++) row.m = row.score[l] > row.m ? row.score[l] : row.m;
  T sigma = 0;
  if constexpr (K >= POWER_1)
    if (rule.rule == UNIT_MASS) {
      row.cut = unit_mass_cut<T>(row.m, 0, row.r);
      if (query.cut > row.cut) row.cut = query.cut;
      unit_mass<K, T>(&row, 1, &sigma);
    }
  query.inverse = finish<K, T>(rule, row, sigma).inverse;
  query.n = row.n;
}

template <class T>
void add_slice(const Pass<T>& P, int64_t number, int64_t slice) {
  const Query<T>& query = P.rows[number];
  const int64_t l = slice * SLICE, n = smaller(SLICE, query.n - l), width = P.width();
  memset(query.sums + slice * width, 0, width * sizeof(T));
  if (n > 0)
    P.access.combine(P.A, Place<T>(P, number).head, query.weight + l, query.index + l, n, query.sums + slice * width);
}

template <class T>
void write_row(const Pass<T>& P, int64_t number) {
  const Recall& A = P.A;
  const Place<T> at(P, number);
  const Query<T>& query = P.rows[number];
  T* o = P.at(A.o, at.b, at.h, at.t);
  memset(o, 0, A.D * sizeof(T));
  for (int64_t slice = 0; slice < tiles_of(query.n, SLICE); slice++)
    for (int64_t d = 0; d < A.D; d++) o[d] += query.sums[slice * P.width() + d];
  if (query.n)
    for (int64_t d = 0; d < A.D; d++) o[d] *= query.inverse;
  const int64_t row = (at.b * A.H + at.h) * A.T + at.t;
  if (A.scored) A.scored[row] = query.read, A.support[row] = query.n;
}

template <Kind K, class T>
void merge_item(const void* data, int64_t number, char* memory) {
  const Pass<T>& P = *(const Pass<T>*)data;
  if (!merge<K>(P, number)) return P.fail();
  if (P.rows[number].n > SLICE) return;
  if (P.rows[number].n) {
    score_slice(P, number, 0, (T*)memory);
    solve_row<K>(P, number);
    add_slice(P, number, 0);
  }
  write_row(P, number);
}

// The same for rows of many candidates, slice by slice.
template <class T>
INLINE int64_t slice_of(const Pass<T>& P, int64_t number, int64_t& row) {
  int64_t i = 0;
  while (P.first[i + 1] <= number) i++;
  row = P.wide[i];
  return number - P.first[i];
}
template <class T>
void score_item(const void* data, int64_t number, char* memory) {
  const Pass<T>& P = *(const Pass<T>*)data;
  int64_t row;
  const int64_t slice = slice_of(P, number, row);
  score_slice(P, row, slice, (T*)memory);
}
template <Kind K, class T>
void solve_item(const void* data, int64_t number, char*) {
  const Pass<T>& P = *(const Pass<T>*)data;
  solve_row<K>(P, P.wide[number]);
}
template <class T>
void add_item(const void* data, int64_t number, char*) {
  const Pass<T>& P = *(const Pass<T>*)data;
  int64_t row;
  const int64_t slice = slice_of(P, number, row);
  if (slice * SLICE < P.rows[row].n) add_slice(P, row, slice);
}

template <Kind K, class T>
int32_t recall_queries(const Recall& A, const Access<T>& access, int64_t t0, int64_t queries) {
  const int64_t rows = A.B * A.H * queries, runs = tiles_of(A.S, RUN * A.chunk);
  Pass<T> P = {A, access, t0, queries, runs, nullptr, nullptr, nullptr, nullptr, 0};
  P.found = (Found*)calloc(larger(1, rows * runs), sizeof(Found));
  P.rows = (Query<T>*)calloc(rows, sizeof(Query<T>));
  int64_t* wide = (int64_t*)malloc((2 * rows + 1) * sizeof(int64_t));
  int32_t failed = !P.found || !P.rows || !wide;
  if (!failed) {
    for (int64_t i = 0; i < rows * runs; i++) P.found[i] = Found();
    for (int64_t i = 0; i < rows; i++) P.rows[i] = Query<T>();
    Pieces pieces = {nullptr};
    RunScratch<T> measure(pieces, A, A.H / A.Hk * queries);
    const bool seeded = A.rule != THRESHOLD && runs > 1;
    failed = seeded && run(A, {seed_item<K, T>, &P, rows, pieces.used});
    failed = failed || run(A, {run_item<K, T>, &P, A.B * A.Hk * runs, pieces.used}) || P.failed;
    const int64_t query = P.room() * (int64_t)sizeof(T);
    failed = failed || run(A, {merge_item<K, T>, &P, rows, query}) || P.failed;
    if (!failed) {
      int64_t slices = 0, *first = wide + rows;
      for (int64_t i = 0; i < rows; i++) {
        if (P.rows[i].n <= SLICE || !P.rows[i].score) continue;
        wide[P.wide_rows] = i, first[P.wide_rows++] = slices;
        slices += tiles_of(P.rows[i].n, SLICE);
      }
      first[P.wide_rows] = slices;
      P.wide = wide, P.first = first;
      if (slices) {
        failed = run(A, {score_item<T>, &P, slices, query}) || run(A, {solve_item<K, T>, &P, P.wide_rows, 0}) ||
                 run(A, {add_item<T>, &P, slices, 0});
        for (int64_t i = 0; i < P.wide_rows && !failed; i++) write_row(P, wide[i]);
      }
    }
  }
  for (int64_t i = 0; P.found && i < rows * runs; i++) free(P.found[i].lower);
  for (int64_t i = 0; P.rows && i < rows; i++) free(P.rows[i].lower), free(P.rows[i].score);
  free(P.found);
  free(P.rows);
  free(wide);
  return failed;
}

// ---- everything ----------------------------------------------------------------------------------

// What a Gaussian makes of one run: Σ e^{s−m} v, apart, and Σ e^{s−m} over its n keys.
template <class T>
struct Part {
  T m, mass;
  int64_t n;
};

template <class T>
struct Parts {
  const Pass<T>& P;
  Part<T>* part;  // per row and run
  T* sums;
};

// Weights of one block relative to the best score so far.
template <class T>
void add_block(const Pass<T>& P, const Place<T>& at, const T* q, int64_t j0, int64_t lo, int64_t hi, T* score, Part<T>& part,
               T* sums) {
  const uint64_t allowed = allowed_keys<T>(P.A, at.b, at.h, at.t, j0, lo, hi);
  const int64_t begin = larger(lo, j0) - j0, end = smaller(hi, j0 + BLOCK) - j0;
  if (!allowed) return;
  P.access.scores(P.A, at.head, q, P.scale(at.b, at.h, at.t), j0 + begin, end - begin, score + begin);
  for (uint64_t rest = ~allowed; rest; rest &= rest - 1) score[__builtin_ctzll(rest)] = -(T)INFINITY;
  V<T> best = splat(-(T)INFINITY), mass = {};
  int64_t n = 0;
  for (int j = 0; j < BLOCK; j += LANES<T>) {
    const V<T> s = load(score + j);
    n += __builtin_popcount(above<T>(s, splat(-(T)INFINITY)));
    best = maximum<T>(s, best);
  }
  if (!n) return;
  const T m = largest<T>(best);
  if (m > part.m) {
    const V<T> less = exponential(splat(part.m) - m);
    for (int64_t d = 0; d < P.width() && part.n; d += LANES<T>) store<T>(sums + d, load(sums + d) * less);
    part.mass = part.n ? part.mass * less[0] : 0, part.m = m;
  }
  part.n += n;
  for (int j = 0; j < BLOCK; j += LANES<T>) {
    const V<T> w = exponential(load(score + j) - part.m);
    mass += w;
    store<T>(score + j, w);
  }
  part.mass += sum<T>(mass);
  P.access.combine_all(P.A, at.head, score + begin, j0 + begin, end - begin, sums);
}

template <class T>
void part_item(const void* data, int64_t number, char* memory) {
  const Parts<T>& all = *(const Parts<T>*)data;
  const Pass<T>& P = all.P;
  const Recall& A = P.A;
  const int64_t run = number % P.runs, head = number / P.runs, group = A.H / A.Hk, rows = group * P.queries;
  const int64_t first = head * rows, last = smaller(A.S, (run + 1) * RUN * A.chunk);
  T *query = (T*)memory, *score = query + rows * P.room();
  for (int64_t i = 0; i < rows; i++) {
    const Place<T> at(P, first + i);
    P.query(at.b, at.h, at.t, query + i * P.room());
    all.part[(first + i) * P.runs + run].m = -INFINITY;
  }
  for (int64_t j0 = run * RUN * A.chunk; j0 < last; j0 += BLOCK)
    for (int64_t i = 0; i < rows; i++) {
      const Place<T> at(P, first + i);
      const int64_t part = (first + i) * P.runs + run;
      int64_t lo, hi;
      P.limits(at.t, lo, hi);
      if (lo < j0 + BLOCK && hi > j0) add_block(P, at, query + i * P.room(), j0, lo, hi, score, all.part[part], all.sums + part * P.width());
    }
}

template <class T>
void write_parts(const Parts<T>& all, int64_t number) {
  const Pass<T>& P = all.P;
  const Recall& A = P.A;
  const Place<T> at(P, number);
  const Part<T>* part = all.part + number * P.runs;
  T *o = P.at(A.o, at.b, at.h, at.t), m = -INFINITY, mass = 0;
  memset(o, 0, A.D * sizeof(T));
  int64_t n = 0, lo, hi;
  for (int64_t run = 0; run < P.runs; run++) m = part[run].m > m ? part[run].m : m, n += part[run].n;
  for (int64_t run = 0; run < P.runs; run++) {
    if (!part[run].n) continue;
    const T factor = exponential(splat(part[run].m) - m)[0], *sums = all.sums + (number * P.runs + run) * P.width();
    mass += factor * part[run].mass;
    for (int64_t d = 0; d < A.D; d++) o[d] += factor * sums[d];
  }
  for (int64_t d = 0; d < A.D && n; d++) o[d] /= mass;
  const int64_t row = (at.b * A.H + at.h) * A.T + at.t;
  P.limits(at.t, lo, hi);
  if (A.scored) A.scored[row] = hi - lo, A.support[row] = n;
}

template <class T>
int32_t recall_everything(const Recall& A, const Access<T>& access, int64_t t0, int64_t queries) {
  const int64_t rows = A.B * A.H * queries, runs = tiles_of(A.S, RUN * A.chunk);
  const Pass<T> P = {A, access, t0, queries, runs, nullptr, nullptr, nullptr, nullptr, 0};
  Parts<T> all = {P, (Part<T>*)calloc(rows * runs + 1, sizeof(Part<T>)), (T*)calloc(rows * runs * P.width() + 1, sizeof(T))};
  const int64_t scratch = (A.H / A.Hk * queries * P.room() + BLOCK) * (int64_t)sizeof(T);
  int32_t failed = !all.part || !all.sums || run(A, {part_item<T>, &all, A.B * A.Hk * runs, scratch});
  for (int64_t row = 0; row < rows && !failed; row++) write_parts(all, row);
  free(all.part);
  free(all.sums);
  return failed;
}

template <Kind K, class T>
int32_t recall_kind(const Recall& A, const Access<T>& access) {
  const int64_t at_once = larger(1, ROWS / (A.H / A.Hk));
  auto some = K == GAUSS && A.rule == EVERYWHERE ? recall_everything<T> : recall_queries<K, T>;
  for (int64_t t = 0; t < A.T; t += at_once)
    if (some(A, access, t, smaller(at_once, A.T - t))) return 1;
  return 0;
}

template <class T>
int32_t recall_type(const Recall& A, const Access<T>& access) {
  if (A.profile == EXP) return recall_kind<GAUSS>(A, access);
  if (A.r_at.p) return recall_kind<POWER_ANY>(A, access);
  return A.r == 0   ? recall_kind<POWER_0>(A, access)
         : A.r == 1 ? recall_kind<POWER_1>(A, access)
         : A.r == 2 ? recall_kind<POWER_2>(A, access)
         : A.r == 3 ? recall_kind<POWER_3>(A, access)
                    : recall_kind<POWER_ANY>(A, access);
}

int32_t recall(const Recall& A) {
  switch (A.stored) {
    case FLOAT: return recall_type(A, access_of<float>());
    case DOUBLE: return recall_type(A, access_of<double>());
    case BFLOAT: return recall_type(A, access_of<Bfloat>());
    default: return recall_type(A, access_of<Half>());
  }
}

template <class X>
void code_item(const void* data, int64_t head, char*) {
  const Recall& A = *(const Recall*)data;
  const Chunk& chunk = A.chunks[0];
  const int64_t width = code_width(A.E);
  code_chunk((const X*)chunk.keys + head * chunk.keys_head, A.chunk, A.E, chunk.codes + head * A.chunk * width,
             chunk.bounds + head * A.chunk * 2, chunk.frame + head * frame_size(A.E));
}

int32_t code(const Recall& A) {
  auto item = A.stored == FLOAT    ? code_item<float>
              : A.stored == DOUBLE ? code_item<double>
              : A.stored == BFLOAT ? code_item<Bfloat>
                                   : code_item<Half>;
  return run(A, {item, &A, A.B * A.Hk, 0});
}

}  // namespace

namespace memory {
extern const Memory PARZEN_ISA;
const Memory PARZEN_ISA = {recall, code};
}  // namespace memory

}  // namespace parzen
