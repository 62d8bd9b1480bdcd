// Screening: keys and queries once more as 8-bit integers, whose product is near the score.
//
//   |q·k − q̂·k̂| ≤ ‖q‖·‖k − k̂‖ + ‖q − q̂‖·‖k̂‖ + rounding
//
// The lists first hold these products; thresholds move with the scores, so that one found on products which
// are off by at most δ is off by at most δ, and a key whose product is 2δ below it is left out, exactly. What
// stays gets its true score. Four products an instruction and lane, and a quarter of the bytes.
#pragma once
#include <math.h>

#include "matmul.h"

namespace parzen {
namespace {

#if defined(__AVX512VNNI__)
constexpr bool SCREENS = true;
#else
constexpr bool SCREENS = false;
#endif

// One block of keys: the largest ‖k − k̂‖ and the largest ‖k̂‖. Infinite where a key is not finite, or too
// small or large for the squares in its norms; nothing may be left out.
struct Bound {
  float error, size;
};

// Keys k̂ = step·code.
struct Codes {
  const uint8_t* codes;  // per block (e/4, key, e%4), shifted by 128
  const float* steps;
  const Bound* bounds;   // per block
};

// x ≈ step·code, code within ±127.
INLINE float quantise(const float* x, int64_t E, float step, int8_t* code, float& size) {
  float error = 0, norm = 0;
  const float inverse = 1 / step;
  for (int64_t e = 0; e < E; e++) {
    const float n = (x[e] * inverse + 12582912.0f) - 12582912.0f, rounded = n * step, d = x[e] - rounded;
    code[e] = (int8_t)n;
    error += d * d;
    norm += rounded * rounded;
  }
  // Rounded up by more than the sums can have lost.
  size = sqrtf(norm) * (1 + 1e-4f);
  return sqrtf(error) * (1 + 1e-4f);
}

// Whether vectors whose largest coordinate is `top` can be coded; the codes of zeros are exact.
INLINE bool codable(float top) { return top == 0 || (top > 1e-12f && top < 1e16f); }
INLINE float step_of(float top) { return top > 0 ? top / 127 : 1; }

INLINE float largest_size(const float* x, int64_t E) {
  V<float> top = {};
  for_row<float>(E, [&](auto part, int64_t e, int64_t width) {
    const V<float> y = load<part>(x + e, width);
    top = maximum<float>(top, maximum<float>(y, -y));
  });
  return largest<float>(top);
}

inline void code_keys(const float* x, int64_t ld, int64_t n, int64_t E, uint8_t* codes, float* steps, Bound* bounds) {
  const int64_t width = code_width(E);
  int8_t row[1024] = {};
  for (int64_t first = 0; first < n; first += BLOCK, codes += BLOCK * width, steps += BLOCK, bounds++) {
    const int64_t keys = n - first < BLOCK ? n - first : BLOCK;
    memset(codes, 128, BLOCK * width);
    memset(steps, 0, BLOCK * sizeof(float));
    *bounds = {0, 0};
    for (int64_t j = 0; j < keys; j++) {
      const float *key = x + (first + j) * ld, top = largest_size(key, E);
      if (!finite(key, E) || !codable(top)) {
        *bounds = {INFINITY, INFINITY};
        break;
      }
      float size;
      const float error = quantise(key, E, steps[j] = step_of(top), row, size);
      bounds->error = error > bounds->error ? error : bounds->error;
      bounds->size = size > bounds->size ? size : bounds->size;
      for (int64_t e = 0; e < width; e += 4) {
        uint32_t four;
        memcpy(&four, row + e, 4);
        four ^= 0x80808080u;  // + 128 in each byte
        memcpy(codes + e * BLOCK + j * 4, &four, 4);
      }
    }
  }
}

// The queries of a tile, an array for each property: q̂ = step·code.
template <int N>
struct CodedQueries {
  float step[N], error[N], size[N];
  int32_t offset[N];  // −128·Σ code: undoes the shift of the keys
};

// False where a query, which is finite, is not codable.
template <int N>
bool code_query(const float* x, int64_t E, int8_t* codes, CodedQueries<N>& q, int64_t i) {
  const float top = largest_size(x, E);
  if (!codable(top)) return false;
  float coded;
  q.step[i] = step_of(top);
  q.error[i] = quantise(x, E, q.step[i], codes, coded);
  q.size[i] = coded + q.error[i];  // ‖q‖ ≤ ‖q̂‖ + ‖q − q̂‖
  int32_t total = 0;
  for (int64_t e = 0; e < E; e++) total += codes[e];
  q.offset[i] = -128 * total;
  return true;
}

// What a score may differ from step·step·product for any key within the bound, rounding included.
template <int N>
INLINE float slack_of(const CodedQueries<N>& q, const Bound& k, int64_t E, int64_t i) {
  const float rounding = (float)(E + 16) * 2.4e-7f * (k.size + k.error);
  return (q.size[i] * k.error + q.error[i] * k.size) * (1 + 1e-5f) + rounding * q.size[i];
}

#if defined(__AVX512VNNI__)
// In assembly, because GCC 12 copies every accumulator around the intrinsic.
// out[i, j] = step·step·product of one group of queries and one block of keys, exact up to 1024 coordinates.
__attribute__((noinline)) void near_scores(const int8_t* queries, const uint8_t* keys, int64_t width,
                                           const int32_t* offset, const float* query_step, const float* steps, float* out) {
  __m512i acc[MR][4];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) acc[i][c] = _mm512_set1_epi32(offset[i]);
  for (int64_t e = 0; e < width; e += 4, keys += 4 * BLOCK) {
    __m512i key[4];
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) key[c] = _mm512_loadu_si512(keys + 64 * c);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t four;
      memcpy(&four, queries + i * width + e, 4);
      const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int c = 0; c < 4; c++) asm("vpdpbusd %2, %1, %0" : "+v"(acc[i][c]) : "v"(key[c]), "v"(x));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    const __m512 step = _mm512_set1_ps(query_step[i]);
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) {
      const __m512 factor = _mm512_mul_ps(step, _mm512_loadu_ps(steps + 16 * c));
      _mm512_storeu_ps(out + i * BLOCK + 16 * c, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[i][c]), factor));
    }
  }
}

// Coordinates [0, 4) of 16 keys, one coordinate a vector, or for PART only the first of them.
template <bool PART>
INLINE void gather_four(const float* keys, int64_t ld, const int32_t* index, int64_t width, __m512* out) {
  const auto four = [&](int key) {
    const float* p = keys + index[key] * ld;
    return PART ? _mm_maskz_loadu_ps((__mmask8)((1 << width) - 1), p) : _mm_loadu_ps(p);
  };
  __m512 x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_castps128_ps512(four(i));
#pragma GCC unroll 4
    for (int lane = 1; lane < 4; lane++)
      x[i] = _mm512_mask_broadcast_f32x4(x[i], (__mmask16)(15 << 4 * lane), four(4 * lane + i));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}

// out[l] = factor·Σ_e query[e]·keys[index[l], e], to the bit what `scores` gives. 32 are read and written at once:
// the index ends in that many zeros.
__attribute__((noinline)) void scores_at(const float* query, const float* keys, int64_t ld, int64_t E,
                                         const int32_t* index, int64_t n, float factor, float* out) {
  for (int64_t l = 0; l < n; l += 32) {
    if (l + 32 < n)
      for (int64_t i = 0; i < 32; i++) fetch(keys + index[l + 32 + i] * ld, E * sizeof(float));
    __m512 acc[2] = {};
    const auto add = [&](auto part, int64_t e, int64_t width) {
      __m512 x[2][4];
      gather_four<part>(keys + e, ld, index + l, width, x[0]);
      gather_four<part>(keys + e, ld, index + l + 16, width, x[1]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        if (part && i >= width) break;
        const __m512 y = _mm512_set1_ps(query[e + i]);
        acc[0] = _mm512_fmadd_ps(y, x[0][i], acc[0]);
        acc[1] = _mm512_fmadd_ps(y, x[1][i], acc[1]);
      }
    };
    int64_t e = 0;
    for (; e + 4 <= E; e += 4) add(Some<false>{}, e, 4);
    if (e < E) add(Some<true>{}, e, E - e);
    for (int i = 0; i < 2; i++) _mm512_storeu_ps(out + l + 16 * i, _mm512_mul_ps(acc[i], _mm512_set1_ps(factor)));
  }
}
// The keys of a list whose score is above the cut, or is not, in order; returns their number. 32 zeros follow.
INLINE int64_t pick(const float* score, const int32_t* index, int64_t n, float cut, bool above, int32_t* out) {
  int64_t picked = 0;
  for (int64_t l = 0; l < n; l += 16) {
    __mmask16 bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(score + l), _mm512_set1_ps(cut), _CMP_NLE_UQ);
    if (!above) bits = ~bits;
    if (n - l < 16) bits &= (1 << (n - l)) - 1;
    _mm512_storeu_si512(out + picked, _mm512_maskz_compress_epi32(bits, _mm512_loadu_si512(index + l)));
    picked += __builtin_popcount(bits);
  }
  memset(out + picked, 0, 32 * sizeof(int32_t));
  return picked;
}
// Puts other numbers in the place of the scores, in order: those of `high` where the score is above the cut.
INLINE void put(float* score, int64_t n, float cut, const float* high, const float* low) {
  for (int64_t l = 0; l < n; l += 16) {
    const __mmask16 bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(score + l), _mm512_set1_ps(cut), _CMP_NLE_UQ);
    const __m512 x = _mm512_maskz_expandloadu_ps(bits, high);
    _mm512_storeu_ps(score + l, _mm512_mask_expandloadu_ps(x, (__mmask16)~bits, low));
    high += __builtin_popcount(bits), low += 16 - __builtin_popcount(bits);
  }
}
#else
inline void near_scores(const int8_t*, const uint8_t*, int64_t, const int32_t*, const float*, const float*, float*) {}
inline void scores_at(const float*, const float*, int64_t, int64_t, const int32_t*, int64_t, float, float*) {}
INLINE int64_t pick(const float*, const int32_t*, int64_t, float, bool, int32_t*) { return 0; }
INLINE void put(float*, int64_t, float, const float*, const float*) {}
#endif

}  // namespace
}  // namespace parzen
