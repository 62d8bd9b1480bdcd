// Screening: keys and queries once more as 8-bit integers, whose product bounds the score from above.
//
//   q·k ≤ q̂·k̂ + ‖q‖·‖k − k̂‖ + ‖q − q̂‖·‖k̂‖ + rounding
//
// A key whose bound is not above the cut is left out, exactly; the others get their true score. Four
// products an instruction and lane, and a quarter of the bytes.
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

// One block of keys: k̂ = step·code, the largest ‖k − k̂‖ and the largest ‖k̂‖. step 0: a key is not
// finite, or too small or large for the squares in its norms; nothing may be left out.
struct Bound {
  float step, error, size;
};

struct Codes {
  const uint8_t* codes;  // per block (e/4, key, e%4), shifted by 128
  const Bound* bounds;
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
INLINE bool codable(float top) { return top == 0 || (top > 1e-12f && top < 1e18f); }
INLINE float step_of(float top) { return top > 0 ? top / 127 : 1; }

INLINE float largest_size(const float* x, int64_t E) {
  V<float> top = {};
  for (int64_t e = 0; e < E; e += LANES<float>) {
    const V<float> y = load(x + e);
    top = maximum<float>(top, maximum<float>(y, -y));
  }
  return largest<float>(top);
}

inline void code_keys(const float* x, int64_t ld, int64_t n, int64_t E, uint8_t* codes, Bound* bounds) {
  int8_t row[1024];
  for (int64_t first = 0; first < n; first += BLOCK, codes += BLOCK * E, bounds++) {
    const int64_t keys = n - first < BLOCK ? n - first : BLOCK;
    memset(codes, 128, BLOCK * E);
    float top = 0;
    for (int64_t j = 0; j < keys; j++) {
      const float size = largest_size(x + (first + j) * ld, E);
      top = size > top ? size : top;
    }
    *bounds = {0, 0, 0};
    if (!finite_rows(x + first * ld, ld, keys, E) || !codable(top)) continue;
    const float step = step_of(top);
    for (int64_t j = 0; j < keys; j++) {
      float size;
      const float error = quantise(x + (first + j) * ld, E, step, row, size);
      bounds->error = error > bounds->error ? error : bounds->error;
      bounds->size = size > bounds->size ? size : bounds->size;
      for (int64_t e = 0; e < E; e += 4) {
        uint32_t four;
        memcpy(&four, row + e, 4);
        four ^= 0x80808080u;  // + 128 in each byte
        memcpy(codes + e * BLOCK + j * 4, &four, 4);
      }
    }
    bounds->step = step;
  }
}

// The queries of a tile, an array for each property: q̂ = code/inverse.
template <int N>
struct CodedQueries {
  float inverse[N], error[N], size[N];
  int32_t offset[N];  // −128·Σ code: undoes the shift of the keys
};

// False where a query, which is finite, is not codable.
template <int N>
bool code_query(const float* x, int64_t E, int8_t* codes, CodedQueries<N>& q, int64_t i) {
  const float top = largest_size(x, E);
  if (!codable(top)) return false;
  const float step = step_of(top);
  float coded;
  q.inverse[i] = 1 / step;
  q.error[i] = quantise(x, E, step, codes, coded);
  q.size[i] = coded + q.error[i];  // ‖q‖ ≤ ‖q̂‖ + ‖q − q̂‖
  int32_t total = 0;
  for (int64_t e = 0; e < E; e++) total += codes[e];
  q.offset[i] = -128 * total;
  return true;
}

// What a score may differ from step·step·product, rounding of the comparison included.
template <int N>
INLINE float slack_of(const CodedQueries<N>& q, const Bound& k, int64_t E, int64_t i) {
  const float rounding = (float)(E + 16) * 2.4e-7f * (k.size + k.error);
  return (q.size[i] * k.error + q.error[i] * k.size) * (1 + 1e-5f) + rounding * q.size[i];
}

// The largest integer products that prove score ≤ cut, with a margin for the rounding of this very sum.
template <int N>
void product_limits(const CodedQueries<N>& q, const Bound& k, const float* cut, int64_t E, int32_t* limit) {
  const float inverse = 1 / k.step;
  for (int i = 0; i < N; i++) {
    const float x = (cut[i] - slack_of(q, k, E, i)) * q.inverse[i] * inverse;
    float most = x - 3 - fabsf(x) * 2e-6f;
    most = most > -2e9f ? most : -2147483648.0f;  // also where the cut is NaN
    limit[i] = (int32_t)(most < 2e9f ? most : 2e9f);
  }
}

#if defined(__AVX512VNNI__)
// In assembly, because GCC 12 copies every accumulator around the intrinsic.
// Bit j of hits[i] is set unless the product of query i and key j is ≤ limit[i]. On request also the
// largest product of each query.
template <bool BEST>
__attribute__((noinline)) void screen_block(const int8_t* queries, const uint8_t* keys, int64_t E,
                                            const int32_t* offset, const int32_t* limit, uint64_t* hits,
                                            int32_t* best = nullptr) {
  __m512i acc[MR][4];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) acc[i][c] = _mm512_set1_epi32(offset[i]);
  for (int64_t e = 0; e < E; e += 4, keys += 4 * BLOCK) {
    __m512i key[4];
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) key[c] = _mm512_loadu_si512(keys + 64 * c);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t four;
      memcpy(&four, queries + i * E + e, 4);
      const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int c = 0; c < 4; c++) asm("vpdpbusd %2, %1, %0" : "+v"(acc[i][c]) : "v"(key[c]), "v"(x));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    const __m512i most = _mm512_set1_epi32(limit[i]);
    if (BEST)
      best[i] = _mm512_reduce_max_epi32(
          _mm512_max_epi32(_mm512_max_epi32(acc[i][0], acc[i][1]), _mm512_max_epi32(acc[i][2], acc[i][3])));
    hits[i] = 0;
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) hits[i] |= (uint64_t)_mm512_cmpgt_epi32_mask(acc[i][c], most) << (16 * c);
  }
}
#else
template <bool BEST>
void screen_block(const int8_t*, const uint8_t*, int64_t, const int32_t*, const int32_t*, uint64_t*,
                  int32_t* = nullptr) {}
#endif

}  // namespace
}  // namespace parzen
