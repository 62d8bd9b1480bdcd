// Attention forward and backward for one instruction set. docs: math.md §3 and §4.
//
// Forward, per tile of ROWS queries: scores block by block, candidates above a rising cut kept in
// lists, thresholds solved on the lists, values combined on the support. Backward: once over the
// queries (dq and the row gradients), once over the keys (dk, dv), each on the support only. A tile
// whose support is dense is recomputed block by block with matrix products instead. Both ways add in
// ascending key or query order, so the split of work over threads never changes a bit.
#include <stdlib.h>

#include "engine.h"
#include "matmul.h"
#include "screen.h"
#include "support.h"
#include "threads.h"

namespace parzen {
namespace {

constexpr int ROWS = 48;
static_assert(ROWS % MR == 0 && BLOCK % NR<float> == 0 && BLOCK % NR<double> == 0, "tiles of whole groups");
// Above these shares of the allowed keys a tile is dense: forward value product, and backward.
constexpr double DENSE_VALUES = 0.35, DENSE_BACKWARD = 0.4;

// ---- geometry ------------------------------------------------------------------------------------

template <class T>
struct Problem {
  const Args& A;
  T *keys_packed = nullptr, *values_packed = nullptr;  // per (b, hk), blocks of packed keys; or null
  uint8_t* codes = nullptr;                            // the same as 8-bit integers, where they screen
  float* steps = nullptr;
  Bound* bounds = nullptr;
  bool direct = false;                                 // so few queries that packing keys does not pay
  int64_t list_stride = 0;                             // one row's list, with room for a vector more
  int64_t* used = nullptr;                             // next free entry of index/score
  T *list_p = nullptr, *list_ds = nullptr;             // backward: per support entry,
  T *mu = nullptr, *tie = nullptr;                     // and per row

  INLINE int64_t queries(int64_t b) const { return A.first_q ? A.first_q[b + 1] - A.first_q[b] : A.T; }
  INLINE int64_t keys(int64_t b) const { return A.first_k ? A.first_k[b + 1] - A.first_k[b] : A.S; }
  INLINE int64_t row(int64_t b, int64_t h, int64_t i) const {
    return A.first_q ? h * A.rows + A.first_q[b] + i : (b * A.H + h) * A.T + i;
  }
  INLINE T* at_query(const View& x, int64_t b, int64_t h, int64_t i) const {
    return (T*)x.p + b * x.b + h * x.h + (A.first_q ? A.first_q[b] + i : i) * x.i;
  }
  INLINE T* at_key(const View& x, int64_t b, int64_t hk, int64_t j) const {
    return (T*)x.p + b * x.b + hk * x.h + (A.first_k ? A.first_k[b] + j : j) * x.i;
  }
  INLINE int64_t blocks_per_head() const {
    return A.first_k ? A.first_k[A.B] / BLOCK + A.B : A.B * tiles_of(A.S, BLOCK);
  }
  INLINE int64_t first_block(int64_t b, int64_t hk) const {
    return hk * blocks_per_head() + (A.first_k ? A.first_k[b] / BLOCK + b : b * tiles_of(A.S, BLOCK));
  }
  INLINE T scale(int64_t b, int64_t h, int64_t i) const {
    return A.scale_at.p ? *at_query(A.scale_at, b, h, i) : (T)A.scale;
  }
  INLINE T exponent(int64_t b, int64_t h, int64_t i) const {
    // Beyond this [1 + t/r]ʳ is exp t to the last bit, and r·t still finite.
    const double r = A.r_at.p ? *at_query(A.r_at, b, h, i) : A.r, most = 1e30;
    return (T)(r > most ? most : r);
  }
  INLINE T level(int64_t b, int64_t h, int64_t i) const {
    // In T as well a margin is positive and finite, and so is how far scores are from a threshold.
    const double x = A.level_at.p ? *at_query(A.level_at, b, h, i) : A.level;
    const double most = A.rule == MARGIN ? MOST<T> : MOST<T> / 4;
    const T level = (T)(x > most ? most : x < -most ? -most : x);
    return A.rule == MARGIN && level == 0 ? LEAST<T> : level;
  }
  INLINE T slope(int64_t b, int64_t h) const {
    return A.slopes.p ? ((T*)A.slopes.p)[b * A.slopes.b + h * A.slopes.h] : 0;
  }
  INLINE int64_t diagonal(int64_t b) const { return A.diagonal + (A.lower_right ? keys(b) - queries(b) : 0); }
  INLINE int64_t distance(int64_t b, int64_t i, int64_t j) const {
    const int64_t d = i + diagonal(b) - j;
    return d < 0 ? -d : d;
  }
};

// ---- one tile of queries -------------------------------------------------------------------------

template <class T>
struct Tile {
  int64_t b, h, hk, i0, n;   // queries [i0, i0 + n)
  int64_t lo[ROWS], hi[ROWS];  // allowed keys of each, before the mask
  int64_t first, last;       // blocks of keys to visit: [first, last)
  int64_t span;              // Σ (hi − lo)
  T scale[ROWS];
  int64_t row0;
  const T *key_panels, *value_panels;  // of its key head
  Codes codes;                         // likewise; null where the call is not screened
};

template <class T>
Tile<T> tile_at(const Problem<T>& P, int64_t b, int64_t h, int64_t t) {
  const Args& A = P.A;
  Tile<T> tile = {};
  tile.b = b, tile.h = h, tile.hk = h / (A.H / A.Hk), tile.i0 = t * ROWS;
  tile.n = larger(0, smaller(ROWS, P.queries(b) - tile.i0));
  const int64_t S = P.keys(b), diagonal = P.diagonal(b), far = INT64_C(1) << 62;
  const int64_t left = smaller(A.left, far), right = smaller(A.right, far);
  int64_t lo = S, hi = 0;
  for (int64_t i = 0; i < tile.n; i++) {
    const int64_t centre = tile.i0 + i + diagonal;
    tile.lo[i] = left < 0 ? 0 : smaller(S, larger(0, centre - left));
    tile.hi[i] = right < 0 ? S : larger(tile.lo[i], smaller(S, centre + right + 1));
    if (tile.hi[i] > tile.lo[i]) lo = smaller(lo, tile.lo[i]), hi = larger(hi, tile.hi[i]);
    tile.span += tile.hi[i] - tile.lo[i];
    tile.scale[i] = P.scale(b, h, tile.i0 + i);
  }
  tile.first = lo / BLOCK, tile.last = larger(lo / BLOCK, tiles_of(hi, BLOCK));
  tile.row0 = P.row(b, h, tile.i0);
  tile.key_panels = P.keys_packed + P.first_block(b, tile.hk) * BLOCK * A.E;
  tile.value_panels = P.values_packed + P.first_block(b, tile.hk) * BLOCK * A.D;
  if (P.codes) {
    const int64_t block = P.first_block(b, tile.hk);
    tile.codes = {P.codes + block * BLOCK * code_width(A.E), P.steps + block * BLOCK, P.bounds + block};
  }
  return tile;
}

// Scores of rows [g, g + MR) against one block of keys, −∞ where not allowed. False if no row of the
// group may look at the block.
template <class T>
__attribute__((noinline)) bool score_block(const Problem<T>& P, const Tile<T>& tile, int64_t g, int64_t block, const T* queries, T* s,
                        int64_t ld) {
  const Args& A = P.A;
  const int64_t j0 = block * BLOCK, rows = smaller(MR, tile.n - g);
  const bool plain = !A.bias.p && !A.slopes.p && !A.mask.p;
  bool any = false, all = true;
  for (int64_t i = g; i < g + rows; i++) {
    any |= tile.lo[i] < j0 + BLOCK && tile.hi[i] > j0;
    all &= tile.lo[i] <= j0 && tile.hi[i] >= j0 + BLOCK;
  }
  if (!any) return false;
  if (P.direct) {
    const T* keys = P.at_key(A.k, tile.b, tile.hk, j0);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < smaller(BLOCK, P.keys(tile.b) - j0); j++)
        s[i * ld + j] = dot(queries + (g + i) * A.E, keys + j * A.k.i, A.E) * tile.scale[g + i];
  } else {
    scores(queries + g * A.E, tile.key_panels + block * BLOCK * A.E, A.E, tile.scale + g, s, ld);
  }
  if (plain && all) return true;
  for (int64_t i = 0; i < rows; i++) {
    T* x = s + i * ld;
    const int64_t query = tile.i0 + g + i;
    // A window may begin beyond this block: nothing past its BLOCK scores is written.
    const int64_t lo = smaller(BLOCK, larger(0, tile.lo[g + i] - j0));
    const int64_t hi = larger(lo, smaller(BLOCK, tile.hi[g + i] - j0));
    if (A.bias.p) {
      const T* y = P.at_query(A.bias, tile.b, tile.h, query) + j0 * A.bias.j;
      for (int64_t j = lo; j < hi; j++) x[j] += y[j * A.bias.j];
    }
    if (A.slopes.p) {
      const T slope = P.slope(tile.b, tile.h);
      for (int64_t j = lo; j < hi; j++) x[j] -= slope * (T)P.distance(tile.b, query, j0 + j);
    }
    if (A.mask.p) {
      const uint8_t* y = (const uint8_t*)A.mask.p + tile.b * A.mask.b + tile.h * A.mask.h +
                         (A.first_q ? A.first_q[tile.b] + query : query) * A.mask.i + j0 * A.mask.j;
      if (A.mask.j == 1)
        for (int64_t j = lo; j < hi; j++) x[j] = y[j] ? x[j] : -(T)INFINITY;
      else
        for (int64_t j = lo; j < hi; j++) x[j] = y[j * A.mask.j] ? x[j] : -(T)INFINITY;
    }
    for (int64_t j = 0; j < lo; j++) x[j] = -(T)INFINITY;
    for (int64_t j = hi; j < BLOCK; j++) x[j] = -(T)INFINITY;
  }
  return true;
}

// Dropout keeps a weight by a hash of (seed, row, key), so that backward repeats it.
struct Dropout {
  uint64_t seed;
  uint32_t limit;
  double factor;
  explicit Dropout(const Args& A)
      : seed(A.seed ? (uint64_t)*A.seed : 0), limit((uint32_t)((1 - A.dropout) * 4294967295.0)),
        factor(A.dropout < 1 ? 1 / (1 - A.dropout) : 0) {}
  uint32_t row(int64_t row) const {
    uint64_t x = seed + 0x9e3779b97f4a7c15ull * (uint64_t)(row + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)(x ^ (x >> 31));
  }
  template <class T>
  INLINE T keep(uint32_t row, uint32_t key) const {
    uint32_t x = row ^ (key * 0x9e3779b9u);
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return (x ^ (x >> 16)) < limit ? (T)factor : T(0);
  }
};

template <class T>
struct PackJob {
  const Problem<T>& P;
  const View& x;
  int64_t width, chunks;
  T* out;
  uint8_t* codes;
};
constexpr int64_t PACK_BLOCKS = 16;

template <class T>
void pack_item(const void* data, int64_t number, char*) {
  const PackJob<T>& job = *(const PackJob<T>*)data;
  const Problem<T>& P = job.P;
  const int64_t chunk = number % job.chunks, hk = number / job.chunks % P.A.Hk, b = number / job.chunks / P.A.Hk;
  const int64_t j0 = chunk * PACK_BLOCKS * BLOCK, n = smaller(PACK_BLOCKS * BLOCK, P.keys(b) - j0);
  if (n <= 0) return;
  const T* x = P.at_key(job.x, b, hk, j0);
  const int64_t block = P.first_block(b, hk) + j0 / BLOCK;
  pack_panels(x, job.x.i, n, job.width, job.out + block * BLOCK * job.width);
  if constexpr (SCREENS && sizeof(T) == 4)
    if (job.codes)
      code_keys(x, job.x.i, n, job.width, job.codes + block * BLOCK * code_width(job.width), P.steps + block * BLOCK,
                P.bounds + block);
}

template <class T>
int32_t pack_keys(const Problem<T>& P, const View& x, int64_t width, T* out, uint8_t* codes = nullptr) {
  PackJob<T> job = {P, x, width, tiles_of(P.A.S, PACK_BLOCKS * BLOCK), out, codes};
  return run(P.A, {pack_item<T>, &job, P.A.B * P.A.Hk * job.chunks, 0});
}

// ---- forward -------------------------------------------------------------------------------------

template <class T>
struct ForwardScratch {
  T *queries, *scaled, *s, *out, *weights, *score, *weight, *panels;
  int8_t* query_codes;
  int32_t* picked;
  T* others;
  uint8_t* codes;
  float* steps;
  Bound* bounds;
  bool packed = false;  // whether panels hold the keys
  int32_t* index;
  Row<T>* row;
  ForwardScratch(Pieces& pieces, const Args& A, int64_t list_stride, int64_t packed_keys) {
    queries = pieces.take<T>(ROWS * A.E);
    scaled = pieces.take<T>(ROWS * A.E);
    s = pieces.take<T>(MR * BLOCK);
    out = pieces.take<T>(ROWS * A.D);
    weights = pieces.take<T>(ROWS * BLOCK);
    row = pieces.take<Row<T>>(ROWS);
    score = pieces.take<T>(ROWS * list_stride);
    weight = pieces.take<T>(ROWS * list_stride);
    index = pieces.take<int32_t>(ROWS * list_stride);
    panels = pieces.take<T>(packed_keys * A.E);
    codes = pieces.take<uint8_t>(packed_keys * code_width(A.E));
    steps = pieces.take<float>(packed_keys);
    bounds = pieces.take<Bound>(packed_keys / BLOCK);
    query_codes = pieces.take<int8_t>(ROWS * code_width(A.E));
    picked = pieces.take<int32_t>(list_stride);
    others = pieces.take<T>(list_stride);
  }
};

template <Kind K, class T>
INLINE void scan(const Args& A, Row<T>& row, const T* s, int64_t j0) {
  constexpr int N = BLOCK / LANES<T>;
  V<T> x[N], cut = splat(row.cut);
  uint32_t bits[N], any = 0;
#pragma GCC unroll 16
  for (int v = 0; v < N; v++) {
    x[v] = load(s + v * LANES<T>);
    any |= bits[v] = above<T>(x[v], cut);
  }
  if (!any) return;
  V<T> top = x[0];
#pragma GCC unroll 16
  for (int v = 1; v < N; v++) top = maximum<T>(top, x[v]);
  if (above<T>(top, splat(row.m))) {
    const T m = largest<T>(top);
    if (m > row.m) best<K, T>(A, row, m);
    cut = splat(row.cut);
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) bits[v] = above<T>(x[v], cut);
  }
  T* const score = row.score;
  int32_t* const index = row.index;
  int64_t n = row.n;
#pragma GCC unroll 16
  for (int v = 0; v < N; v++) {
    // With compressing stores an empty append is cheaper than a branch that nobody can predict.
    if (COMPRESSES || bits[v]) n = append<T>(x[v], (int32_t)(j0 + v * LANES<T>), bits[v], score, index, n);
  }
  row.n = n;
  if (row.n >= row.trigger) tighten<K, T>(A, row);
}

template <Kind K, class T>
void start_rows(const Problem<T>& P, const Tile<T>& tile, ForwardScratch<T>& scratch) {
  const Args& A = P.A;
  for (int64_t i = 0; i < tile.n; i++) {
    Row<T>& row = scratch.row[i];
    row.r = P.exponent(tile.b, tile.h, tile.i0 + i);
    row.level = P.level(tile.b, tile.h, tile.i0 + i);
    row.score = scratch.score + i * P.list_stride;
    row.weight = scratch.weight + i * P.list_stride;
    row.index = scratch.index + i * P.list_stride;
    start<K, T>(A, row, tile.hi[i] - tile.lo[i]);
  }
}

// A true score costs as much as this many products of a row: longer lists than that share are found by products.
constexpr int64_t SCREEN_COST = 16;
// From how many keys on screening pays: early, the cut is low and most keys pass.
template <Kind K>
constexpr int64_t SCREEN_KEYS = K <= POWER_2 ? 1024 : 6144;

// Sets the best of a list anew.
template <class T>
INLINE void find_best(Row<T>& row) {
  pad(row.score, row.index, row.n);
  V<T> top = splat<T>(-INFINITY);
  for (int64_t l = 0; l < row.n; l += LANES<T>) top = maximum<T>(load(row.score + l), top);
  row.m = largest<T>(top);
}

// The candidates of a tile by screening. False, with nothing lost but time, where too many keys pass or a key
// has no codes.
template <Kind K, class T>
bool screen_tile(const Problem<T>& P, const Tile<T>& tile, ForwardScratch<T>& scratch) {
  const Args& A = P.A;
  const int64_t width = code_width(A.E);
  Bound worst = {0, 0};
  for (int64_t block = tile.first; block < tile.last; block++) {
    const Bound& bound = tile.codes.bounds[block];
    worst.error = bound.error > worst.error ? bound.error : worst.error;
    worst.size = bound.size > worst.size ? bound.size : worst.size;
  }
  if (worst.size == INFINITY) return false;
  CodedQueries<ROWS> queries = {};
  memset(scratch.query_codes, 0, ROWS * width);
  copy_rows(P.at_query(A.q, tile.b, tile.h, tile.i0), A.q.i, tile.n, A.E, tile.scale, scratch.scaled);
  for (int64_t i = 0; i < tile.n; i++) {
    const T* query = scratch.scaled + i * A.E;
    Row<T>& row = scratch.row[i];
    // A query without codes keeps every key, and the others of its tile their bits.
    const bool coded = finite(query, A.E) && code_query(query, A.E, scratch.query_codes + i * width, queries, i);
    row.slack = coded ? 2 * slack_of(queries, worst, A.E, i) : INFINITY;
    row.cut -= row.slack;
  }
  auto too_many = [&] {
    int64_t total = 0;
    for (int64_t i = 0; i < tile.n; i++) total += scratch.row[i].slack < INFINITY ? scratch.row[i].n : 0;
    return total * SCREEN_COST > tile.span + ROWS * BLOCK * SCREEN_COST;
  };
  for (int64_t block = tile.first; block < tile.last; block++) {
    const int64_t j0 = block * BLOCK;
    for (int64_t g = 0; g < tile.n; g += MR) {
      near_scores(scratch.query_codes + g * width, tile.codes.codes + j0 * width, width, queries.offset + g,
                  queries.step + g, tile.codes.steps + j0, scratch.s);
      for (int64_t i = g; i < smaller(g + MR, tile.n); i++) {
        T* s = scratch.s + (i - g) * BLOCK;
        for (int64_t j = 0; j < smaller(BLOCK, tile.lo[i] - j0); j++) s[j] = -(T)INFINITY;
        for (int64_t j = larger(0, tile.hi[i] - j0); j < BLOCK; j++) s[j] = -(T)INFINITY;
        scan<K, T>(A, scratch.row[i], s, j0);
      }
    }
    if ((block - tile.first) % 16 == 15 && too_many()) return false;
  }
  for (int64_t i = 0; i < tile.n; i++)
    if (scratch.row[i].n) tighten<K, T>(A, scratch.row[i]);
  if (too_many()) return false;
  const T* keys = P.at_key(A.k, tile.b, tile.hk, 0);
  auto true_scores = [&](int64_t i, int64_t n, T* out) {
    scores_at(scratch.queries + i * A.E, keys, A.k.i, A.E, scratch.picked, n, tile.scale[i], out);
  };
  for (int64_t i = 0; i < tile.n; i++) {
    Row<T>& row = scratch.row[i];
    const T delta = row.slack / 2, middle = row.cut + row.slack;
    // First those above the threshold of the products. Theirs is within rounding of the final one, so that of
    // the others only those less than δ below it are left.
    Row<T> high = row;
    high.n = pick(row.score, row.index, row.n, middle, true, scratch.picked);
    true_scores(i, high.n, row.weight);
    high.score = row.weight, high.index = scratch.picked, high.slack = 0;
    if (A.rule == THRESHOLD) high.cut = cut_at<K, T>(row.level);
    find_best(high);
    if (high.n) best<K, T>(A, high, high.m), raise_cut<K, T>(A, high);
    const T low = high.cut - delta < middle ? high.cut - delta : middle;
    if (low > row.cut) {
      row.cut = low;
      drop(row);
    }
    const int64_t others = pick(row.score, row.index, row.n, middle, false, scratch.picked);
    true_scores(i, others, scratch.others);
    put(row.score, row.n, middle, row.weight, scratch.others);
    row.slack = 0, row.cut = high.cut;
    find_best(row);
    if (A.rule == THRESHOLD) drop(row);
  }
  return true;
}

// Not with masks: they would have to be read for every key.
template <Kind K, class T>
bool screens(const Args& A) {
  return SCREENS && sizeof(T) == 4 && A.rule != EVERYWHERE && !A.bias.p && !A.mask.p && !A.slopes.p &&
         A.S >= SCREEN_KEYS<K> && A.E >= 32 && A.E <= 1024;
}

template <Kind K, class T>
void forward_tile(const Problem<T>& P, Tile<T>& tile, ForwardScratch<T>& scratch) {
  const Args& A = P.A;
  copy_rows(P.at_query(A.q, tile.b, tile.h, tile.i0), A.q.i, tile.n, A.E, (const T*)nullptr, scratch.queries);
  start_rows<K>(P, tile, scratch);
  bool found = false;
  if constexpr (SCREENS && sizeof(T) == 4)
    if (tile.codes.codes && (tile.last - tile.first) * BLOCK >= SCREEN_KEYS<K>) {
      found = screen_tile<K>(P, tile, scratch);
      if (!found) start_rows<K>(P, tile, scratch);
    }
  auto by_products = [&] {
    if (!P.keys_packed && !P.direct) {
      if (!scratch.packed) pack_panels(P.at_key(A.k, tile.b, tile.hk, 0), A.k.i, P.keys(tile.b), A.E, scratch.panels);
      scratch.packed = true;
      tile.key_panels = scratch.panels;
    }
    for (int64_t block = tile.first; block < tile.last; block++)
      for (int64_t g = 0; g < tile.n; g += MR)
        if (score_block(P, tile, g, block, scratch.queries, scratch.s, BLOCK))
          for (int64_t i = g; i < smaller(g + MR, tile.n); i++)
            scan<K, T>(A, scratch.row[i], scratch.s + (i - g) * BLOCK, block * BLOCK);
  };

  Stats<T> stats[ROWS];
  auto support = [&] {
    T sigma[ROWS];
    int64_t total = 0;
    for (int64_t i = 0; i < tile.n; i++) {
      const Row<T>& row = scratch.row[i];
      pad(row.score, row.index, row.n);
    }
    if constexpr (K >= POWER_1)
      if (A.rule == UNIT_MASS) unit_mass<K, T>(scratch.row, tile.n, sigma);
    for (int64_t i = 0; i < tile.n; i++) {
      stats[i] = finish<K, T>(A, scratch.row[i], sigma[i]);
      total += scratch.row[i].n;
    }
    return total;
  };
  auto is_sparse = [&](int64_t total) {
    return total <= DENSE_BACKWARD * tile.span && total <= A.per_row * tile.n;
  };

  if (!found) by_products();
  const int64_t total = support();
  if (A.stats) {
    const bool sparse = is_sparse(total);
    int64_t offset = sparse ? __atomic_fetch_add(P.used, total, __ATOMIC_RELAXED) : -1;
    A.where[tile.row0] = offset;
    for (int64_t i = 0; i < tile.n; i++) {
      const Row<T>& row = scratch.row[i];
      ((Stats<T>*)A.stats)[tile.row0 + i] = stats[i];
      A.count[tile.row0 + i] = (int32_t)row.n;
      if (!sparse || row.n == 0) continue;
      memcpy((T*)A.score + offset, row.score, row.n * sizeof(T));
      memcpy(A.index + offset, row.index, row.n * sizeof(int32_t));
      offset += row.n;
    }
  }
  if (A.dropout > 0) {
    const Dropout dropout(A);
    for (int64_t i = 0; i < tile.n; i++) {
      const Row<T>& row = scratch.row[i];
      const uint32_t key = dropout.row(tile.row0 + i);
      for (int64_t l = 0; l < row.n; l++) row.weight[l] *= dropout.keep<T>(key, row.index[l]);
    }
  }
  memset(scratch.out, 0, tile.n * A.D * sizeof(T));
  const T* values = P.at_key(A.v, tile.b, tile.hk, 0);
  const int64_t first_key = tile.first * BLOCK, end_key = smaller(tile.last * BLOCK, P.keys(tile.b));
  // 0·NaN is NaN: values that are not finite may only meet the weights of their own key.
  if (total <= DENSE_VALUES * tile.span ||
      !finite_rows(values + first_key * A.v.i, A.v.i, end_key - first_key, A.D)) {
    for (int64_t i = 0; i < tile.n; i++) {
      const Row<T>& row = scratch.row[i];
      combine(scratch.out + i * A.D, row.weight, row.index, row.n, values, A.v.i, A.D);
    }
  } else {
    int64_t at[ROWS] = {};
    for (int64_t block = tile.first; block < tile.last; block++) {
      const int64_t j0 = block * BLOCK, width = smaller(BLOCK, P.keys(tile.b) - j0);
      for (int64_t i = 0; i < tile.n; i++) {
        const Row<T>& row = scratch.row[i];
        T* w = scratch.weights + i * BLOCK;
        int64_t& l = at[i];
        // A run of keys without gaps is a plain copy.
        if (l + BLOCK <= row.n && row.index[l + BLOCK - 1] == j0 + BLOCK - 1) {
          memcpy(w, row.weight + l, BLOCK * sizeof(T));
          l += BLOCK;
          continue;
        }
        memset(w, 0, BLOCK * sizeof(T));
        for (; l < row.n && row.index[l] < j0 + BLOCK; l++) w[row.index[l] - j0] = row.weight[l];
      }
      gemm(scratch.out, A.D, scratch.weights, BLOCK, 1, values + j0 * A.v.i, A.v.i, tile.n, A.D, width);
    }
  }
  for (int64_t i = 0; i < tile.n; i++) {
    T* o = P.at_query(A.o, tile.b, tile.h, tile.i0 + i);
    const T *sum = scratch.out + i * A.D, inverse = stats[i].inverse;
    for_row<T>(A.D, [&](auto part, int64_t d, int64_t width) {
      store<part, T>(o + d, load<part>(sum + d, width) * inverse, width);
    });
  }
}

template <Kind K, class T>
void forward_item(const void* data, int64_t number, char* memory) {
  const Problem<T>& P = *(const Problem<T>*)data;
  Pieces pieces = {memory};
  ForwardScratch<T> scratch(pieces, P.A, P.list_stride, 0);
  const int64_t tiles = tiles_of(P.A.T, ROWS), head = number / tiles;
  // The last tiles first: under a causal mask they are the longest.
  Tile<T> tile = tile_at(P, head / P.A.H, head % P.A.H, tiles - 1 - number % tiles);
  if (tile.n) forward_tile<K, T>(P, tile, scratch);
}

// All queries of one key head, whose panels then stay in the cache of one core.
template <Kind K, class T>
void forward_head(const void* data, int64_t number, char* memory) {
  const Problem<T>& P = *(const Problem<T>*)data;
  const Args& A = P.A;
  Pieces pieces = {memory};
  ForwardScratch<T> scratch(pieces, A, P.list_stride, tiles_of(A.S, BLOCK) * BLOCK);
  const int64_t hk = number % A.Hk, b = number / A.Hk, group = A.H / A.Hk;
  const bool screened = screens<K, T>(A) && !P.direct;
  if constexpr (SCREENS && sizeof(T) == 4)
    if (screened) code_keys(P.at_key(A.k, b, hk, 0), A.k.i, P.keys(b), A.E, scratch.codes, scratch.steps, scratch.bounds);
  for (int64_t h = hk * group; h < (hk + 1) * group; h++)
    for (int64_t t = 0; t < tiles_of(P.queries(b), ROWS); t++) {
      Tile<T> tile = tile_at(P, b, h, t);
      if (screened) tile.codes = {scratch.codes, scratch.steps, scratch.bounds};
      forward_tile<K, T>(P, tile, scratch);
    }
}

template <class T>
T* allocate(int64_t n) {
  return (T*)aligned_alloc(64, (n * (int64_t)sizeof(T) + 127) / 64 * 64);
}

// Odd multiples of a cache line, so that the rows of a tile do not fight for the same sets.
INLINE int64_t list_stride_of(int64_t S) { return tiles_of(S, BLOCK) * BLOCK + BLOCK + 16; }

constexpr int64_t DIRECT = 4;

// Whether one thread for each key head keeps all threads busy.
INLINE bool heads_suffice(const Args& A) {
  const int64_t heads = A.B * A.Hk, rounds = tiles_of(heads, larger(1, A.threads));
  return heads * 5 >= rounds * A.threads * 4;
}

template <Kind K, class T>
int32_t forward_kind(const Args& A) {
  Problem<T> P = {A};
  P.list_stride = list_stride_of(A.S);
  int64_t used = 0;
  P.used = &used;
  // Not where backward may have to find the same scores again, to the bit.
  P.direct = A.T <= DIRECT && !A.stats;
  Pieces pieces = {nullptr};
  if (heads_suffice(A)) {
    ForwardScratch<T> measure(pieces, A, P.list_stride, tiles_of(A.S, BLOCK) * BLOCK);
    return run(A, {forward_head<K, T>, &P, A.B * A.Hk, pieces.used});
  }
  ForwardScratch<T> measure(pieces, A, P.list_stride, 0);
  int32_t failed = 0;
  if (!P.direct) {
    P.keys_packed = allocate<T>(A.Hk * P.blocks_per_head() * BLOCK * A.E);
    failed = !P.keys_packed;
    if (screens<K, T>(A)) {
      P.codes = allocate<uint8_t>(A.Hk * P.blocks_per_head() * BLOCK * code_width(A.E));
      P.steps = allocate<float>(A.Hk * P.blocks_per_head() * BLOCK);
      P.bounds = allocate<Bound>(A.Hk * P.blocks_per_head());
      failed |= !P.codes || !P.steps || !P.bounds;
    }
    failed = failed || pack_keys(P, A.k, A.E, P.keys_packed, P.codes);
  }
  if (!failed) failed = run(A, {forward_item<K, T>, &P, A.B * A.H * tiles_of(A.T, ROWS), pieces.used});
  free(P.keys_packed);
  free(P.codes);
  free(P.steps);
  free(P.bounds);
  return failed;
}

// ---- backward, over the queries ------------------------------------------------------------------

template <class T>
struct BackwardScratch {
  T *queries, *scaled, *douts, *s, *block_p, *block_ds, *dq, *p, *a, *dw, *strip_s, *key_panels, *value_panels;
  BackwardScratch(Pieces& pieces, const Args& A, int64_t stride, int64_t packed_keys) {
    queries = pieces.take<T>(ROWS * A.E);
    scaled = pieces.take<T>(ROWS * A.E);
    douts = pieces.take<T>(ROWS * A.D);
    s = pieces.take<T>(MR * BLOCK);
    block_p = pieces.take<T>(ROWS * BLOCK);
    block_ds = pieces.take<T>(ROWS * BLOCK);
    dq = pieces.take<T>(ROWS * A.E);
    // Strips: one value for each row of a dense tile and each key it may look at.
    p = pieces.take<T>(ROWS * stride);
    a = pieces.take<T>(ROWS * stride);
    dw = pieces.take<T>(ROWS * stride);
    strip_s = pieces.take<T>(ROWS * stride);
    key_panels = pieces.take<T>(packed_keys * A.E);
    value_panels = pieces.take<T>(packed_keys * A.D);
  }
};

template <class T>
void load_tile(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch) {
  const Args& A = P.A;
  const T* q = P.at_query(A.q, tile.b, tile.h, tile.i0);
  copy_rows(q, A.q.i, tile.n, A.E, (const T*)nullptr, scratch.queries);
  copy_rows(q, A.q.i, tile.n, A.E, tile.scale, scratch.scaled);
  copy_rows(P.at_query(A.dout, tile.b, tile.h, tile.i0), A.dout.i, tile.n, A.D, (const T*)nullptr, scratch.douts);
  // A query with NaN has NaN ds wherever it has support; elsewhere 0·NaN must not reach the keys.
  for (int64_t i = 0; i < tile.n; i++)
    for (T* x : {scratch.queries, scratch.scaled})
      if (!finite(x + i * A.E, A.E)) memset(x + i * A.E, 0, A.E * sizeof(T));
}

// What the mean μ and the gradient of r sum over the support of a row.
template <class T>
struct Sums {
  V<T> u = {}, u_dw = {}, g = {}, g_dw = {};
  T mu(bool unit_mass) const { return unit_mass ? (sum<T>(u) != 0 ? sum<T>(u_dw) / sum<T>(u) : sum<T>(u_dw) * 0) : sum<T>(u_dw); }
};

template <class T>
INLINE void finish_row(const Problem<T>& P, const Tile<T>& tile, int64_t i, const Sums<T>& sums, T mu, T total) {
  const Args& A = P.A;
  const int64_t row = tile.row0 + i;
  P.mu[row] = mu;
  if (A.dr) ((T*)A.dr)[row] = sum<T>(sums.g_dw) - mu * sum<T>(sums.g);
  if (A.dlevel) ((T*)A.dlevel)[row] = A.rule == MARGIN ? total : -total;
}

// dq from its unscaled sum; the scale gets q·that.
template <class T>
INLINE void finish_query(const Problem<T>& P, const Tile<T>& tile, int64_t i, T* dq) {
  const Args& A = P.A;
  if (A.dscale) {
    const T* q = P.at_query(A.q, tile.b, tile.h, tile.i0 + i);
    V<T> dot = {};
    for_row<T>(A.E, [&](auto part, int64_t e, int64_t width) { dot += load<part>(q + e, width) * load<part>(dq + e, width); });
    ((T*)A.dscale)[tile.row0 + i] = sum<T>(dot);
  }
  T* out = P.at_query(A.dq, tile.b, tile.h, tile.i0 + i);
  for (int64_t e = 0; e < A.E; e++) out[e] = dq[e] * tile.scale[i];
}

template <class T>
INLINE T* bias_row(const Problem<T>& P, const Tile<T>& tile, int64_t i) {
  return P.at_query(P.A.dbias, tile.b, tile.h, tile.i0 + i);
}

template <Kind K, class T>
void queries_sparse(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch) {
  const Args& A = P.A;
  const Dropout dropout(A);
  const bool unit_mass = A.rule == UNIT_MASS;
  int64_t offset = A.where[tile.row0];
  for (int64_t i = 0; i < tile.n; i++) {
    const int64_t row = tile.row0 + i, n = A.count[row];
    const int32_t* index = A.index + offset;
    T *s = scratch.strip_s, *a = scratch.a, *dw = scratch.dw, *p = P.list_p + offset, *ds = P.list_ds + offset;
    offset += n;
    const Stats<T>& stats = ((const Stats<T>*)A.stats)[row];
    const Shape<K, T> shape(stats, P.exponent(tile.b, tile.h, tile.i0 + i), unit_mass);
    // Without keys there is no list at all.
    if (n) memcpy(s, (const T*)A.score + (p - P.list_p), n * sizeof(T));
    store(s + n, splat<T>(-INFINITY));
    dots(dw, P.at_query(A.dout, tile.b, tile.h, tile.i0 + i), index, n, P.at_key(A.v, tile.b, tile.hk, 0), A.v.i, A.D);
    const uint32_t key = dropout.row(row);
    if (A.dropout > 0)
      for (int64_t l = 0; l < n; l++) dw[l] *= dropout.keep<T>(key, index[l]);
    store(dw + n, V<T>{});
    Sums<T> sums;
    T* weight = scratch.a + P.list_stride;  // the strips of other rows are free here
    for (int64_t l = 0; l < n; l += LANES<T>) {
      V<T> x = load(s + l), y = load(dw + l), pv, av;
      shape.weights(x, pv, av);
      // A row of NaN is NaN as a whole; the padding after the list is not part of it.
      V<T> u = unit_mass ? av : pv;
      if (n - l < LANES<T>) {
        alignas(64) T lane[LANES<T>];
        for (int64_t t = 0; t < LANES<T>; t++) lane[t] = t < n - l ? 1 : 0;
        I<T> in = load(lane) > 0;
        u = select<T>(in, u, V<T>{});
        pv = select<T>(in, pv, V<T>{});
      }
      store(weight + l, pv);
      store(a + l, av);
      sums.u += u;
      sums.u_dw += u * y;
      if (A.dr) {
        V<T> g = shape.exponent_factor(x, pv);
        sums.g += g;
        sums.g_dw += g * y;
      }
    }
    const T mu = sums.mu(unit_mass);
    V<T> total = {};
    for (int64_t l = 0; l < n; l += LANES<T>) {
      V<T> d = load(a + l) * (load(dw + l) - mu);
      store(dw + l, d);
      if (n - l >= LANES<T>) total += d;
      else
        for (int64_t t = 0; t < n - l; t++) total[t] += d[t];
    }
    T all = sum<T>(total);
    finish_row(P, tile, i, sums, mu, all);
    if (A.rule == MARGIN) {
      int64_t ties = 0;
      for (int64_t l = 0; l < n; l++) ties += s[l] == stats.m;
      const T tie = ties ? -all / ties : 0;
      for (int64_t l = 0; l < n; l++) dw[l] += s[l] == stats.m ? tie : 0;
      P.tie[row] = tie;
    }
    for (int64_t l = 0; l < n; l++) {
      p[l] = A.dropout > 0 ? weight[l] * dropout.keep<T>(key, index[l]) : weight[l];
      ds[l] = dw[l];
    }
    if (A.dslopes) {
      T slope = 0;
      for (int64_t l = 0; l < n; l++) slope -= ds[l] * (T)P.distance(tile.b, tile.i0 + i, index[l]);
      ((T*)A.dslopes)[row] = slope;
    }
    if (A.dbias.p) {
      T* out = bias_row(P, tile, i);
      for (int64_t l = 0; l < n; l++) out[index[l] * A.dbias.j] += ds[l];
    }
    T* dq = scratch.dq;
    memset(dq, 0, A.E * sizeof(T));
    combine(dq, ds, index, n, P.at_key(A.k, tile.b, tile.hk, 0), A.k.i, A.E);
    finish_query(P, tile, i, dq);
  }
}

template <Kind K, class T>
void queries_dense(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch) {
  const Args& A = P.A;
  const Dropout dropout(A);
  const bool unit_mass = A.rule == UNIT_MASS;
  const int64_t ld = P.list_stride, base = tile.first * BLOCK, width = (tile.last - tile.first) * BLOCK;
  Sums<T> sums[ROWS];
  for (int64_t block = tile.first; block < tile.last; block++) {
    const int64_t column = block * BLOCK - base;
    for (int64_t g = 0; g < tile.n; g += MR) {
      if (!score_block(P, tile, g, block, scratch.queries, scratch.s, BLOCK)) {
        for (int64_t i = g; i < smaller(g + MR, tile.n); i++) {
          memset(scratch.p + i * ld + column, 0, BLOCK * sizeof(T));
          memset(scratch.a + i * ld + column, 0, BLOCK * sizeof(T));
          memset(scratch.dw + i * ld + column, 0, BLOCK * sizeof(T));
          for (int64_t j = 0; j < BLOCK; j++) scratch.strip_s[i * ld + column + j] = -INFINITY;
        }
        continue;
      }
      scores(scratch.douts + g * A.D, tile.value_panels + block * BLOCK * A.D, A.D, (const T*)nullptr,
             scratch.block_p, BLOCK);
      for (int64_t i = g; i < smaller(g + MR, tile.n); i++) {
        const int64_t row = tile.row0 + i;
        const Stats<T>& stats = ((const Stats<T>*)A.stats)[row];
        const Shape<K, T> shape(stats, P.exponent(tile.b, tile.h, tile.i0 + i), unit_mass);
        T *dw = scratch.block_p + (i - g) * BLOCK, *strip = scratch.p + i * ld + column;
        if (A.dropout > 0) {
          const uint32_t key = dropout.row(row);
          for (int64_t j = 0; j < BLOCK; j++) dw[j] *= dropout.keep<T>(key, (uint32_t)(block * BLOCK + j));
        }
        for (int64_t j = 0; j < BLOCK; j += LANES<T>) {
          V<T> x = load(scratch.s + (i - g) * BLOCK + j), p, a;
          I<T> inside = shape.weights(x, p, a);
          V<T> y = select<T>(inside, load(dw + j), V<T>{}), u = unit_mass ? a : p;
          sums[i].u += u;
          sums[i].u_dw += u * y;
          if (A.dr) {
            V<T> factor = shape.exponent_factor(x, p);
            sums[i].g += factor;
            sums[i].g_dw += factor * y;
          }
          store(strip + j, p);
          store(scratch.a + i * ld + column + j, a);
          store(scratch.dw + i * ld + column + j, y);
          if (A.rule == MARGIN) store(scratch.strip_s + i * ld + column + j, x);
        }
        if (A.dropout > 0) {
          const uint32_t key = dropout.row(row);
          for (int64_t j = 0; j < BLOCK; j++) strip[j] *= dropout.keep<T>(key, (uint32_t)(block * BLOCK + j));
        }
      }
    }
  }
  const T* keys = P.at_key(A.k, tile.b, tile.hk, base);
  const int64_t n = smaller(width, P.keys(tile.b) - base);
  for (int64_t i = 0; i < tile.n; i++) {
    T *a = scratch.a + i * ld, *dw = scratch.dw + i * ld, *s = scratch.strip_s + i * ld;
    const int64_t row = tile.row0 + i;
    const T mu = sums[i].mu(unit_mass);
    V<T> total = {};
    for (int64_t j = 0; j < width; j += LANES<T>) {
      V<T> d = load(a + j) * (load(dw + j) - mu);
      store(a + j, d);
      total += d;
    }
    const T all = sum<T>(total);
    finish_row(P, tile, i, sums[i], mu, all);
    if (A.rule == MARGIN) {
      const T m = ((const Stats<T>*)A.stats)[row].m;
      int64_t ties = 0;
      for (int64_t j = 0; j < width; j++) ties += s[j] == m;
      const T tie = ties ? -all / ties : 0;
      for (int64_t j = 0; j < width; j++) a[j] += s[j] == m ? tie : 0;
      P.tie[row] = tie;
    }
    if (A.dslopes) {
      T slope = 0;
      for (int64_t j = 0; j < n; j++) slope -= a[j] * (T)P.distance(tile.b, tile.i0 + i, base + j);
      ((T*)A.dslopes)[row] = slope;
    }
    if (A.dbias.p) {
      T* out = bias_row(P, tile, i) + base * A.dbias.j;
      for (int64_t j = 0; j < n; j++) out[j * A.dbias.j] += a[j];
    }
  }
  memset(scratch.dq, 0, tile.n * A.E * sizeof(T));
  if (finite_rows(keys, A.k.i, n, A.E)) {
    for (int64_t j = 0; j < n; j += BLOCK)
      gemm(scratch.dq, A.E, scratch.a + j, ld, 1, keys + j * A.k.i, A.k.i, tile.n, A.E, smaller(BLOCK, n - j));
  } else {
    for (int64_t i = 0; i < tile.n; i++)
      for (int64_t j = 0; j < n; j++) {
        const int32_t only = (int32_t)j;
        if (scratch.a[i * ld + j] != 0)
          combine(scratch.dq + i * A.E, scratch.a + i * ld + j, &only, 1, keys, A.k.i, A.E);
      }
  }
  for (int64_t i = 0; i < tile.n; i++) finish_query(P, tile, i, scratch.dq + i * A.E);
}

template <Kind K, class T>
void queries(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch) {
  if (P.A.where[tile.row0] >= 0) {
    queries_sparse<K, T>(P, tile, scratch);
  } else {
    load_tile(P, tile, scratch);
    queries_dense<K, T>(P, tile, scratch);
  }
}

// Tiles that add to the same element of the bias gradient form one item, visited in order.
template <class T>
struct Groups {
  int64_t b, h, t;        // items along each axis
  int64_t bs, hs, ts;     // tiles inside an item along each axis
  explicit Groups(const Args& A) {
    const int64_t tiles = tiles_of(A.T, ROWS);
    const bool bias = A.dbias.p;
    bs = bias && A.dbias_B == 1 ? A.B : 1, hs = bias && A.dbias_H == 1 ? A.H : 1;
    ts = bias && A.dbias_T == 1 ? tiles : 1;
    b = A.B / larger(bs, 1), h = A.H / larger(hs, 1), t = tiles / larger(ts, 1);
  }
};

template <Kind K, class T>
void queries_item(const void* data, int64_t number, char* memory) {
  const Problem<T>& P = *(const Problem<T>*)data;
  Pieces pieces = {memory};
  BackwardScratch<T> scratch(pieces, P.A, P.list_stride, 0);
  const Groups<T> groups(P.A);
  const int64_t t = groups.t - 1 - number % groups.t, h = number / groups.t % groups.h, b = number / groups.t / groups.h;
  for (int64_t bb = b * groups.bs; bb < (b + 1) * groups.bs; bb++)
    for (int64_t hh = h * groups.hs; hh < (h + 1) * groups.hs; hh++)
      for (int64_t tt = t * groups.ts; tt < (t + 1) * groups.ts; tt++) {
        const Tile<T> tile = tile_at(P, bb, hh, tt);
        if (tile.n == 0) continue;
        queries<K, T>(P, tile, scratch);
      }
}

// ---- backward, over the keys ---------------------------------------------------------------------

template <class T>
INLINE int64_t lower_bound(const int32_t* index, int64_t n, int64_t key) {
  int64_t lo = 0;
  while (n > 0) {
    const int64_t half = n / 2;
    if (index[lo + half] < key) lo += half + 1, n -= half + 1;
    else n = half;
  }
  return lo;
}

// x[index[l]] += w[l]·y
template <class T, int N, bool PART = false>
INLINE void scatter_columns(T* x, int64_t ld, const T* w, const int32_t* index, int64_t n, const T* y,
                            int64_t width = 0) {
  V<T> v[N];
#pragma GCC unroll 16
  for (int c = 0; c < N; c++) v[c] = load<PART>(y + c * LANES<T>, width);
  for (int64_t l = 0; l < n; l++) {
    if (l + AHEAD < n) fetch(x + index[l + AHEAD] * ld, N * BYTES);
    T* row = x + index[l] * ld;
    const V<T> f = splat(w[l]);
#pragma GCC unroll 16
    for (int c = 0; c < N; c++)
      store<PART, T>(row + c * LANES<T>, fma<T>(f, v[c], load<PART>(row + c * LANES<T>, width)), width);
  }
}
template <class T>
void scatter(T* x, int64_t ld, const T* w, const int32_t* index, int64_t n, const T* y, int64_t D) {
  constexpr int W = REGISTER_VECTORS;
  int64_t d = 0;
  for (; d + W * LANES<T> <= D; d += W * LANES<T>) scatter_columns<T, W>(x + d, ld, w, index, n, y + d);
  for (; d + LANES<T> <= D; d += LANES<T>) scatter_columns<T, 1>(x + d, ld, w, index, n, y + d);
  if (d < D) scatter_columns<T, 1, true>(x + d, ld, w, index, n, y + d, D - d);
}

template <class T>
void keys_sparse(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch, int64_t from, int64_t to) {
  const Args& A = P.A;
  T *dk = P.at_key(A.dk, tile.b, tile.hk, 0), *dv = P.at_key(A.dv, tile.b, tile.hk, 0);
  const bool whole = from == 0 && to >= P.keys(tile.b);
  int64_t offset = A.where[tile.row0];
  for (int64_t i = 0; i < tile.n; i++) {
    const int64_t n = A.count[tile.row0 + i];
    const int32_t* index = A.index + offset;
    const int64_t lo = whole ? 0 : lower_bound<T>(index, n, from), hi = whole ? n : lower_bound<T>(index, n, to);
    scatter(dv, A.dv.i, P.list_p + offset + lo, index + lo, hi - lo, P.at_query(A.dout, tile.b, tile.h, tile.i0 + i), A.D);
    scatter(dk, A.dk.i, P.list_ds + offset + lo, index + lo, hi - lo, scratch.scaled + i * A.E, A.E);
    offset += n;
  }
}

template <Kind K, class T>
void keys_dense(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch, int64_t from, int64_t to) {
  const Args& A = P.A;
  const Dropout dropout(A);
  const int64_t first = larger(tile.first, from / BLOCK), last = smaller(tile.last, tiles_of(to, BLOCK));
  if (first >= last) return;
  for (int64_t block = first; block < last; block++) {
    const int64_t j0 = block * BLOCK, width = smaller(BLOCK, P.keys(tile.b) - j0);
    int64_t begin = tile.n, end = 0;
    for (int64_t g = 0; g < tile.n; g += MR) {
      T *p = scratch.block_p + g * BLOCK, *ds = scratch.block_ds + g * BLOCK;
      const int64_t rows = smaller(MR, tile.n - g);
      if (!score_block(P, tile, g, block, scratch.queries, p, BLOCK)) {
        memset(p, 0, rows * BLOCK * sizeof(T));
        memset(ds, 0, rows * BLOCK * sizeof(T));
        continue;
      }
      begin = smaller(begin, g), end = g + rows;
      scores(scratch.douts + g * A.D, tile.value_panels + block * BLOCK * A.D, A.D, (const T*)nullptr,
             ds, BLOCK);
      for (int64_t i = 0; i < rows; i++) {
        const int64_t row = tile.row0 + g + i;
        const Stats<T>& stats = ((const Stats<T>*)A.stats)[row];
        const Shape<K, T> shape(stats, P.exponent(tile.b, tile.h, tile.i0 + g + i), A.rule == UNIT_MASS);
        const V<T> mu = splat(P.mu[row]), tie = splat(A.rule == MARGIN ? P.tie[row] : 0), m = splat(stats.m);
        const uint32_t key = dropout.row(row);
        if (A.dropout > 0)
          for (int64_t j = 0; j < BLOCK; j++) ds[i * BLOCK + j] *= dropout.keep<T>(key, (uint32_t)(j0 + j));
        for (int64_t j = 0; j < BLOCK; j += LANES<T>) {
          T *at_p = p + i * BLOCK + j, *at_ds = ds + i * BLOCK + j;
          V<T> x = load(at_p), pv, av;
          I<T> inside = shape.weights(x, pv, av);
          V<T> d = av * (select<T>(inside, load(at_ds), V<T>{}) - mu);
          if (A.rule == MARGIN) d += select<T>(x == m, tie, V<T>{});
          store(at_p, pv);
          store(at_ds, d);
        }
        if (A.dropout > 0)
          for (int64_t j = 0; j < BLOCK; j++) p[i * BLOCK + j] *= dropout.keep<T>(key, (uint32_t)(j0 + j));
      }
    }
    if (begin >= end) continue;
    const int64_t n = end - begin;
    gemm(P.at_key(A.dv, tile.b, tile.hk, j0), A.dv.i, scratch.block_p + begin * BLOCK, 1, BLOCK,
         scratch.douts + begin * A.D, A.D, width, A.D, n);
    gemm(P.at_key(A.dk, tile.b, tile.hk, j0), A.dk.i, scratch.block_ds + begin * BLOCK, 1, BLOCK,
         scratch.scaled + begin * A.E, A.E, width, A.E, n);
  }
}

// The same from the strips that queries_dense has just left: nothing is computed twice.
template <class T>
void keys_from_strips(const Problem<T>& P, const Tile<T>& tile, BackwardScratch<T>& scratch) {
  const Args& A = P.A;
  const int64_t ld = P.list_stride, j0 = tile.first * BLOCK;
  const int64_t n = smaller(tile.last * BLOCK, P.keys(tile.b)) - j0;
  gemm(P.at_key(A.dv, tile.b, tile.hk, j0), A.dv.i, scratch.p, 1, ld, scratch.douts, A.D, n, A.D, tile.n);
  gemm(P.at_key(A.dk, tile.b, tile.hk, j0), A.dk.i, scratch.a, 1, ld, scratch.scaled, A.E, n, A.E, tile.n);
}

template <class T>
struct KeyJob {
  const Problem<T>& P;
  int64_t chunk, chunks;  // keys in a chunk, chunks of one head
};

template <class T>
void clear_keys(const Problem<T>& P, int64_t b, int64_t hk, int64_t from, int64_t to) {
  // Rows of no width are nowhere.
  for (int64_t j = from; j < to; j++) {
    if (P.A.E) memset(P.at_key(P.A.dk, b, hk, j), 0, P.A.E * sizeof(T));
    if (P.A.D) memset(P.at_key(P.A.dv, b, hk, j), 0, P.A.D * sizeof(T));
  }
}

template <Kind K, class T>
void keys_item(const void* data, int64_t number, char* memory) {
  const KeyJob<T>& job = *(const KeyJob<T>*)data;
  const Problem<T>& P = job.P;
  const Args& A = P.A;
  Pieces pieces = {memory};
  BackwardScratch<T> scratch(pieces, A, P.list_stride, 0);
  const int64_t hk = number / job.chunks % A.Hk, b = number / job.chunks / A.Hk, group = A.H / A.Hk;
  const int64_t from = number % job.chunks * job.chunk, to = smaller(P.keys(b), from + job.chunk);
  clear_keys(P, b, hk, from, to);
  for (int64_t h = hk * group; h < (hk + 1) * group; h++)
    for (int64_t t = 0; t < tiles_of(A.T, ROWS); t++) {
      const Tile<T> tile = tile_at(P, b, h, t);
      if (tile.n == 0 || tile.first * BLOCK >= to || tile.last * BLOCK <= from) continue;
      load_tile(P, tile, scratch);
      if (A.where[tile.row0] >= 0) keys_sparse(P, tile, scratch, from, to);
      else keys_dense<K, T>(P, tile, scratch, from, to);
    }
}

// Both sides of one key head by one thread, where there are heads enough for all threads. Every sum
// has the order it has above.
template <Kind K, class T>
void head_item(const void* data, int64_t number, char* memory) {
  const Problem<T>& P = *(const Problem<T>*)data;
  const Args& A = P.A;
  Pieces pieces = {memory};
  BackwardScratch<T> scratch(pieces, A, P.list_stride, tiles_of(A.S, BLOCK) * BLOCK);
  const int64_t hk = number % A.Hk, b = number / A.Hk, group = A.H / A.Hk;
  clear_keys(P, b, hk, 0, P.keys(b));
  bool packed = false;
  const int64_t tiles = tiles_of(P.queries(b), ROWS);
  // The key side of sparse tiles waits until a dense one needs its turn, or the end: K and V, then dK and
  // dV, are half of what would have to fit the cache together.
  int64_t done = 0;
  auto catch_up = [&](int64_t end) {
    for (; done < end; done++) {
      const Tile<T> tile = tile_at(P, b, hk * group + done / tiles, done % tiles);
      load_tile(P, tile, scratch);
      keys_sparse(P, tile, scratch, 0, P.keys(b));
    }
  };
  for (int64_t number = 0; number < group * tiles; number++) {
    Tile<T> tile = tile_at(P, b, hk * group + number / tiles, number % tiles);
    if (A.where[tile.row0] >= 0) {
      queries_sparse<K, T>(P, tile, scratch);
      continue;
    }
    if (!packed) {
      pack_panels(P.at_key(A.k, b, hk, 0), A.k.i, P.keys(b), A.E, scratch.key_panels);
      pack_panels(P.at_key(A.v, b, hk, 0), A.v.i, P.keys(b), A.D, scratch.value_panels);
      packed = true;
    }
    catch_up(number);
    load_tile(P, tile, scratch);
    tile.key_panels = scratch.key_panels, tile.value_panels = scratch.value_panels;
    queries_dense<K, T>(P, tile, scratch);
    if (tile.last > tile.first) keys_from_strips(P, tile, scratch);
    done = number + 1;
  }
  catch_up(group * tiles);
}

template <Kind K, class T>
int32_t backward_kind(const Args& A) {
  Problem<T> P = {A};
  P.list_stride = list_stride_of(A.S);
  const int64_t all_rows = A.H * (A.first_q ? A.rows : A.B * A.T), tiles = A.B * A.H * tiles_of(A.T, ROWS);
  int64_t entries = 0;
  bool dense = false;
  for (int64_t number = 0; number < tiles; number++) {
    const int64_t t = number % tiles_of(A.T, ROWS), head = number / tiles_of(A.T, ROWS);
    const int64_t b = head / A.H, n = smaller(ROWS, P.queries(b) - t * ROWS);
    if (n <= 0) continue;
    const int64_t row = P.row(b, head % A.H, t * ROWS);
    if (A.where[row] < 0) {
      dense = true;
      continue;
    }
    const int32_t* count = A.count + row;
    for (int64_t i = 0; i < n; i++) entries += count[i];
  }
  T* lists = allocate<T>(2 * entries + 2 * all_rows);
  if (!lists) return 1;
  P.list_p = lists, P.list_ds = lists + entries, P.mu = lists + 2 * entries, P.tie = P.mu + all_rows;
  const Groups<T> groups(A);
  const bool by_head = groups.bs == 1 && groups.hs == 1 && heads_suffice(A);
  Pieces pieces = {nullptr};
  BackwardScratch<T> measure(pieces, A, P.list_stride, by_head && dense ? tiles_of(A.S, BLOCK) * BLOCK : 0);
  int32_t failed = 0;
  if (by_head) {
    failed = run(A, {head_item<K, T>, &P, A.B * A.Hk, pieces.used});
  } else {
    if (dense) {
      P.keys_packed = allocate<T>(A.Hk * P.blocks_per_head() * BLOCK * A.E);
      P.values_packed = allocate<T>(A.Hk * P.blocks_per_head() * BLOCK * A.D);
      failed = !P.keys_packed || !P.values_packed || pack_keys(P, A.k, A.E, P.keys_packed) ||
               pack_keys(P, A.v, A.D, P.values_packed);
    }
    if (!failed) failed = run(A, {queries_item<K, T>, &P, groups.b * groups.h * groups.t, pieces.used});
    // Enough chunks for the threads, each of whole blocks.
    const int64_t heads = A.B * A.Hk, wanted = tiles_of(4 * A.threads, larger(1, heads));
    KeyJob<T> job = {P, larger(4, tiles_of(tiles_of(A.S, BLOCK), wanted)) * BLOCK, 0};
    job.chunks = tiles_of(A.S, job.chunk);
    if (!failed) failed = run(A, {keys_item<K, T>, &job, heads * job.chunks, pieces.used});
  }
  free(P.keys_packed);
  free(P.values_packed);
  free(lists);
  return failed;
}

// ---- dispatch ------------------------------------------------------------------------------------

template <Kind K>
int32_t forward_type(const Args& A) {
  return A.is_double ? forward_kind<K, double>(A) : forward_kind<K, float>(A);
}
template <Kind K>
int32_t backward_type(const Args& A) {
  return A.is_double ? backward_kind<K, double>(A) : backward_kind<K, float>(A);
}

Kind kind_of(const Args& A) {
  if (A.profile == EXP) return GAUSS;
  if (A.r_at.p) return POWER_ANY;
  return A.r == 0 ? POWER_0 : A.r == 1 ? POWER_1 : A.r == 2 ? POWER_2 : A.r == 3 ? POWER_3 : POWER_ANY;
}

int32_t forward(const Args& A) {
  switch (kind_of(A)) {
    case GAUSS: return forward_type<GAUSS>(A);
    case POWER_0: return forward_type<POWER_0>(A);
    case POWER_1: return forward_type<POWER_1>(A);
    case POWER_2: return forward_type<POWER_2>(A);
    case POWER_3: return forward_type<POWER_3>(A);
    default: return forward_type<POWER_ANY>(A);
  }
}
int32_t backward(const Args& A) {
  switch (kind_of(A)) {
    case GAUSS: return backward_type<GAUSS>(A);
    case POWER_0: return backward_type<POWER_0>(A);
    case POWER_1: return backward_type<POWER_1>(A);
    case POWER_2: return backward_type<POWER_2>(A);
    case POWER_3: return backward_type<POWER_3>(A);
    default: return backward_type<POWER_ANY>(A);
  }
}

}  // namespace

extern const Engine PARZEN_ISA;
const Engine PARZEN_ISA = {forward, backward};

}  // namespace parzen
