// Register-blocked products. Every element of every result is one chain of multiply-adds in
// ascending order of the summed index, so its bits do not depend on how work is cut into tiles.
#pragma once
#include "simd.h"

namespace parzen {
namespace {

constexpr int MR = REGISTER_ROWS;
template <class T>
constexpr int NR = REGISTER_VECTORS* LANES<T>;  // keys in a panel
constexpr int BLOCK = 64;                       // keys in a block: one or more panels

// Bytes of a row of 8-bit codes: whole fours.
INLINE int64_t code_width(int64_t E) { return (E + 3) / 4 * 4; }

// x[i][l] becomes x[l][i], by exchanging blocks of 1, 2, 4, … lanes between pairs of rows.
template <class T, int W = 1>
INLINE void transpose(V<T>* x) {
  if constexpr (W < LANES<T>) {
    I<T> low, high;
    for (int l = 0; l < LANES<T>; l++) {
      low[l] = l & W ? LANES<T> + l - W : l;
      high[l] = l & W ? LANES<T> + l : l + W;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; i++)
      if (!(i & W)) {
        const V<T> a = x[i], b = x[i + W];
        x[i] = __builtin_shuffle(a, b, low);
        x[i + W] = __builtin_shuffle(a, b, high);
      }
    transpose<T, 2 * W>(x);
  }
}

// Keys [0, n) of x as panels (key/NR, e, key%NR), zeros up to the end of the last block.
template <class T>
void pack_panels(const T* x, int64_t ld, int64_t n, int64_t E, T* out) {
  for (int64_t first = 0; first < (n + BLOCK - 1) / BLOCK * BLOCK; first += NR<T>, out += NR<T> * E)
    for (int64_t j = 0; j < NR<T>; j += LANES<T>)
      for_row<T>(E, [&](auto part, int64_t e, int64_t width) {
        V<T> square[LANES<T>];
#pragma GCC unroll 16
        for (int i = 0; i < LANES<T>; i++)
          square[i] = first + j + i < n ? load<part>(x + (first + j + i) * ld + e, width) : V<T>{};
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < LANES<T>; i++)
          if (!part || i < width) store(out + (e + i) * NR<T> + j, square[i]);
      });
}

// Rows [0, n) of x times their factors, then zero rows up to a whole group.
template <class T>
void copy_rows(const T* x, int64_t ld, int64_t n, int64_t E, const T* factor, T* out) {
  for (int64_t i = 0; i < n; i++) {
    const T f = factor ? factor[i] : 1;
    for_row<T>(E, [&](auto part, int64_t e, int64_t width) {
      store<part, T>(out + i * E + e, load<part>(x + i * ld + e, width) * f, width);
    });
  }
  for (int64_t i = n; i % MR; i++) memset(out + i * E, 0, E * sizeof(T));
}

template <class T>
bool finite(const T* x, int64_t E) {
  V<T> zero = {};
  for_row<T>(E, [&](auto part, int64_t e, int64_t width) { zero += load<part>(x + e, width) * 0; });
  return sum<T>(zero) == 0;
}
template <class T>
bool finite_rows(const T* x, int64_t ld, int64_t n, int64_t E) {
  bool all = true;
  for (int64_t i = 0; i < n; i++) all &= finite(x + i * ld, E);
  return all;
}

// out[i, j] = factor[i]·Σ_e rows[i, e]·panel[e, j] for one group of rows and one block of keys. A factor, if any,
// comes last: products that are equal stay equal.
template <class T>
__attribute__((noinline)) void scores(const T* rows, const T* panel, int64_t E, const T* factor, T* out, int64_t ld) {
  for (int p = 0; p < BLOCK / NR<T>; p++, panel += NR<T> * E) {
    V<T> acc[MR][REGISTER_VECTORS] = {};
    const T* b = panel;
    for (int64_t e = 0; e < E; e++, b += NR<T>) {
      V<T> key[REGISTER_VECTORS];
#pragma GCC unroll 8
      for (int c = 0; c < REGISTER_VECTORS; c++) key[c] = load(b + c * LANES<T>);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        V<T> x = splat(rows[i * E + e]);
#pragma GCC unroll 8
        for (int c = 0; c < REGISTER_VECTORS; c++) acc[i][c] = fma<T>(x, key[c], acc[i][c]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < REGISTER_VECTORS; c++) store(out + i * ld + p * NR<T> + c * LANES<T>, factor ? acc[i][c] * factor[i] : acc[i][c]);
  }
}

// N vectors of columns, or for PART the first `width` lanes of one.
template <class T, int M, int N, bool PART>
INLINE void gemm_tile(T* c, int64_t ldc, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb, int64_t K,
                      int64_t width) {
  V<T> acc[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) acc[i][n] = load<PART>(c + i * ldc + n * LANES<T>, width);
  for (int64_t k = 0; k < K; k++, a += ak, b += ldb) {
    V<T> x[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) x[n] = load<PART>(b + n * LANES<T>, width);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      V<T> y = splat(a[i * am]);
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) acc[i][n] = fma<T>(y, x[n], acc[i][n]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) store<PART>(c + i * ldc + n * LANES<T>, acc[i][n], width);
}

template <class T, int N, bool PART = false>
void gemm_columns(T* c, int64_t ldc, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb, int64_t M,
                  int64_t K, int64_t width = 0) {
  int64_t i = 0;
  for (; i + MR <= M; i += MR) gemm_tile<T, MR, N, PART>(c + i * ldc, ldc, a + i * am, am, ak, b, ldb, K, width);
  if (i + 4 <= M) {
    gemm_tile<T, 4, N, PART>(c + i * ldc, ldc, a + i * am, am, ak, b, ldb, K, width);
    i += 4;
  }
  if (i + 2 <= M) {
    gemm_tile<T, 2, N, PART>(c + i * ldc, ldc, a + i * am, am, ak, b, ldb, K, width);
    i += 2;
  }
  if (i < M) gemm_tile<T, 1, N, PART>(c + i * ldc, ldc, a + i * am, am, ak, b, ldb, K, width);
}

// c[m, n] += Σ_k a[m, k]·b[k, n] for n < N.
template <class T>
void gemm(T* c, int64_t ldc, const T* a, int64_t am, int64_t ak, const T* b, int64_t ldb, int64_t M, int64_t N,
          int64_t K) {
  int64_t n = 0;
  for (; n + NR<T> <= N; n += NR<T>)
    gemm_columns<T, REGISTER_VECTORS>(c + n, ldc, a, am, ak, b + n, ldb, M, K);
  for (; n + LANES<T> <= N; n += LANES<T>) gemm_columns<T, 1>(c + n, ldc, a, am, ak, b + n, ldb, M, K);
  if (n < N) gemm_columns<T, 1, true>(c + n, ldc, a, am, ak, b + n, ldb, M, K, N - n);
}

constexpr int AHEAD = 8;

INLINE void fetch(const void* p, int64_t bytes) {
  for (int64_t o = 0; o < bytes; o += 64) __builtin_prefetch((const char*)p + o);
}

template <class T, int N, bool PART = false>
INLINE void combine_columns(T* out, const T* w, const int32_t* index, int64_t n, const T* x, int64_t ld,
                            int64_t width = 0) {
  V<T> acc[N];
#pragma GCC unroll 16
  for (int c = 0; c < N; c++) acc[c] = load<PART>(out + c * LANES<T>, width);
  for (int64_t l = 0; l < n; l++) {
    if (l + AHEAD < n) fetch(x + index[l + AHEAD] * ld, N * BYTES);
    const T* row = x + index[l] * ld;
    V<T> y = splat(w[l]);
#pragma GCC unroll 16
    for (int c = 0; c < N; c++) acc[c] = fma<T>(y, load<PART>(row + c * LANES<T>, width), acc[c]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < N; c++) store<PART>(out + c * LANES<T>, acc[c], width);
}

// out += Σ_l w[l]·x[index[l]]
template <class T>
void combine(T* out, const T* w, const int32_t* index, int64_t n, const T* x, int64_t ld, int64_t D) {
  constexpr int W = REGISTER_VECTORS;
  int64_t d = 0;
  for (; d + W * LANES<T> <= D; d += W * LANES<T>)
    combine_columns<T, W>(out + d, w, index, n, x + d, ld);
  for (; d + LANES<T> <= D; d += LANES<T>) combine_columns<T, 1>(out + d, w, index, n, x + d, ld);
  if (d < D) combine_columns<T, 1, true>(out + d, w, index, n, x + d, ld, D - d);
}

template <class T>
INLINE T dot(const T* x, const T* y, int64_t D) {
  V<T> acc[2] = {};
  int64_t d = 0;
  for (; d + 2 * LANES<T> <= D; d += 2 * LANES<T>) {
    acc[0] = fma<T>(load(x + d), load(y + d), acc[0]);
    acc[1] = fma<T>(load(x + d + LANES<T>), load(y + d + LANES<T>), acc[1]);
  }
  if (d + LANES<T> <= D) acc[0] = fma<T>(load(x + d), load(y + d), acc[0]), d += LANES<T>;
  if (d < D) acc[1] = fma<T>(load_some(x + d, D - d), load_some(y + d, D - d), acc[1]);
  return sum<T>(acc[0] + acc[1]);
}

// out[l] = y·x[index[l]]
template <class T>
void dots(T* out, const T* y, const int32_t* index, int64_t n, const T* x, int64_t ld, int64_t D) {
  for (int64_t l = 0; l < n; l++) {
    if (l + AHEAD < n) fetch(x + index[l + AHEAD] * ld, D * sizeof(T));
    out[l] = dot(y, x + index[l] * ld, D);
  }
}

}  // namespace
}  // namespace parzen
