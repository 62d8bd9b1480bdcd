// Keys once more as 8-bit integers, with a bound for what that loses; and their products with a query of 15 bits.
//
//   q·k = q·c + Σ_e (q_e d_e)·k'_e,    k'_e = (k_e − c_e)/d_e = step·code_e + error_e
//
// c and d, a median and a spread for each coordinate of a chunk, take out what all its keys share, and what one
// coordinate has more than another: then one step for all coordinates of a key loses little.
#pragma once
#include <math.h>

#include "memory.h"
#include "stored.h"

namespace parzen {
namespace {

// Products of E coordinates must fit 32 bits.
constexpr int64_t MOST_CODED = 1024, SAMPLE = 31;
constexpr float FINEST = 127 * 128;  // the largest integer of a query, two digits of base 128

// c, d, and the largest ‖k'‖ of the chunk.
INLINE int64_t frame_size(int64_t E) { return 2 * E + 1; }

template <class X>
INLINE double as_double(const X* p) {
  if constexpr (sizeof(X) == 2) return load_some_as(p, 1)[0];
  else return *p;
}

INLINE double median(double* x, int64_t n) {
  for (int64_t i = 1; i < n; i++)
    for (int64_t j = i; j > 0 && x[j] < x[j - 1]; j--) {
      const double y = x[j];
      x[j] = x[j - 1], x[j - 1] = y;
    }
  return n ? x[n / 2] : 0;
}

// c and d from a few of the keys; whatever they are, the bounds hold. d is a power of two, so that dividing by it
// loses nothing.
template <class X>
void frame_of(const X* keys, int64_t n, int64_t E, float* centre, float* spread) {
  int64_t sample[SAMPLE], found = 0;
  for (int64_t i = 0; i < SAMPLE; i++) {
    const int64_t j = (2 * i + 1) * n / (2 * SAMPLE);
    bool good = true;
    for (int64_t e = 0; e < E; e++) good &= fabs(as_double(keys + j * E + e)) < 1e16;
    if (good) sample[found++] = j;
  }
  float most = 0;
  for (int64_t e = 0; e < E; e++) {
    double x[SAMPLE];
    for (int64_t i = 0; i < found; i++) x[i] = as_double(keys + sample[i] * E + e);
    centre[e] = (float)median(x, found);
    for (int64_t i = 0; i < found; i++) x[i] = fabs(x[i] - centre[e]);
    spread[e] = (float)median(x, found);
    most = spread[e] > most ? spread[e] : most;
  }
  for (int64_t e = 0; e < E; e++) {
    // Coordinates that hardly vary in the sample may do so elsewhere.
    const float s = spread[e] > most / 64 ? spread[e] : most / 64;
    spread[e] = s > 1e-12f && s < 1e12f ? ldexpf(1, ilogbf(s)) : 1;
  }
}

// Codes of one chunk of one head.
template <class X>
void code_chunk(const X* keys, int64_t n, int64_t E, uint8_t* codes, float* bounds, float* frame) {
  const int64_t width = code_width(E);
  float *centre = frame, *spread = frame + E;
  frame_of(keys, n, E, centre, spread);
  memset(codes, 128, n * width);
  double x[MOST_CODED];
  uint8_t row[MOST_CODED];
  memset(row + width - 4, 128, 4);
  float& radius = frame[2 * E];
  radius = 0;
  for (int64_t j = 0; j < n; j++) {
    double top = 0, error = 0, norm = 0;
    bool finite = true;
    for (int64_t e = 0; e < E; e++) {
      x[e] = (as_double(keys + j * E + e) - centre[e]) / spread[e];
      const double size = fabs(x[e]);
      finite &= size < 1e16;
      top = size > top ? size : top;
      norm += x[e] * x[e];
    }
    const bool coded = finite && (top == 0 || top > 1e-12);
    const float length = coded ? (float)sqrt(norm) * (1 + 1e-5f) : INFINITY;
    radius = length > radius ? length : radius;
    float* bound = bounds + j / BLOCK * 2 * BLOCK + j % BLOCK;
    bound[0] = 0, bound[BLOCK] = INFINITY;
    if (!coded) continue;
    const float step = top > 0 ? (float)(top / 126.9) : 1.0f;
    const double inverse = 1 / (double)step;
    for (int64_t e = 0; e < E; e++) {
      const double code = (x[e] * inverse + 6755399441055744.0) - 6755399441055744.0, d = x[e] - code * step;
      error += d * d;
      row[e] = (uint8_t)((int32_t)code + 128);
    }
    bound[0] = step, bound[BLOCK] = (float)sqrt(error) * (1 + 1e-5f) + 1e-30f;
    uint8_t* out = codes + j / BLOCK * BLOCK * width + j % BLOCK * 4;
    for (int64_t e = 0; e < width; e += 4) memcpy(out + e * BLOCK, row + e, 4);
  }
}

// A query against one chunk: its score with key j is within `slack·step + error·error_j + least` of
// base + factor·step_j·(product of integers).
struct CodedQuery {
  float base, factor, slack, error, least;
  int32_t offset;   // −128·Σ n: undoes the shift of the keys
  int16_t* n;       // q'_e ≈ n_e·(top/FINEST) = (128·high + low)·…
  int8_t *high, *low;
};

// False where the numbers are too large or small for the bounds; then every key is to be read.
template <class T>
bool code_query(const T* q, int64_t E, double scale, const float* frame, CodedQuery& out) {
  const int64_t width = code_width(E);
  const float *centre = frame, *spread = frame + E;
  double base = 0, sizes = 0, norm = 0, top = 0, x[MOST_CODED];
  for (int64_t e = 0; e < E; e++) {
    const double shift = (double)q[e] * centre[e];
    base += shift, sizes += fabs(shift);
    x[e] = (double)q[e] * spread[e];
    norm += x[e] * x[e];
    const double size = fabs(x[e]);
    top = size > top ? size : top;
  }
  if (!(norm < 1e32 && sizes < 1e32 && (top == 0 || top > 1e-12) && scale < 1e30)) return false;
  const double step = top > 0 ? top / FINEST : 1, inverse = 1 / step;
  double error = 0;
  int32_t total = 0;
  for (int64_t e = 0; e < E; e++) {
    const double n = (x[e] * inverse + 6755399441055744.0) - 6755399441055744.0, d = x[e] - n * step;
    error += d * d;
    const int32_t whole = (int32_t)n, high = (whole + 64) >> 7;
    total += whole;
    out.n[e] = (int16_t)whole, out.high[e] = (int8_t)high, out.low[e] = (int8_t)(whole - 128 * high);
  }
  for (int64_t e = E; e < width; e++) out.n[e] = 0, out.high[e] = out.low[e] = 0;
  norm = sqrt(norm) * (1 + 1e-5);
  // Of float sums, the score's own and those made of these numbers.
  const double rounding = (double)(E + 32) * 2.4e-7, longest = 128 * sqrt((double)E);
  out.base = (float)(scale * base);
  out.factor = (float)(scale * step);
  out.slack = (float)(scale * (sqrt(error) * (1 + 1e-5) + rounding * norm) * longest);
  out.error = (float)(scale * norm * (1 + rounding));
  // The last term: where products vanish.
  out.least = (float)(scale * rounding * sizes) + 1e-36f;
  out.offset = -128 * total;
  return true;
}

// out[j] = Σ n·code of the 64 keys of a block, exactly. `ahead` is a block that comes later: the processor's own
// prefetching stops at each 4 KiB, which is where a block of 64-wide keys ends.
#if defined(__AVX512VNNI__)
INLINE void integer_products(const CodedQuery& q, const uint8_t* codes, const uint8_t* ahead, int64_t width, int32_t* out) {
  __m512i high[4], low[4];
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) high[c] = _mm512_setzero_si512(), low[c] = _mm512_set1_epi32(q.offset);
  for (int64_t e = 0; e < width; e += 4, codes += 4 * BLOCK) {
    int32_t a, b;
    memcpy(&a, q.high + e, 4);
    memcpy(&b, q.low + e, 4);
    const __m512i x = _mm512_set1_epi32(a), y = _mm512_set1_epi32(b);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const __m512i key = _mm512_loadu_si512(codes + 64 * c);
      __builtin_prefetch(ahead + e * BLOCK + 64 * c);
      // In assembly, because GCC 12 copies every accumulator around the intrinsic.
      asm("vpdpbusd %2, %1, %0" : "+v"(high[c]) : "v"(key), "v"(x));
      asm("vpdpbusd %2, %1, %0" : "+v"(low[c]) : "v"(key), "v"(y));
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++)
    _mm512_storeu_si512(out + 16 * c, _mm512_add_epi32(_mm512_slli_epi32(high[c], 7), low[c]));
}
#elif defined(__SSE2__)
#if defined(__AVX512BW__)
typedef __m512i Words;
INLINE Words words(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Words four_of(int64_t x) { return _mm512_set1_epi64(x); }
INLINE Words add_products(Words sum, Words a, Words b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
#elif defined(__AVX2__)
typedef __m256i Words;
INLINE Words words(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
INLINE Words four_of(int64_t x) { return _mm256_set1_epi64x(x); }
INLINE Words add_products(Words sum, Words a, Words b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#else
typedef __m128i Words;
INLINE Words words(const uint8_t* p) { return _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128()); }
INLINE Words four_of(int64_t x) { return _mm_set1_epi64x(x); }
INLINE Words add_products(Words sum, Words a, Words b) { return _mm_add_epi32(sum, _mm_madd_epi16(a, b)); }
#endif
INLINE void integer_products(const CodedQuery& q, const uint8_t* codes, const uint8_t* ahead, int64_t width, int32_t* out) {
  constexpr int KEYS = BYTES / 8, AT_ONCE = 8;  // keys in a vector, vectors in registers
  for (int first = 0; first < BLOCK; first += KEYS * AT_ONCE) {
    Words sum[AT_ONCE];
#pragma GCC unroll 8
    for (int c = 0; c < AT_ONCE; c++) sum[c] = four_of(0);
    for (int64_t e = 0; e < width; e += 4) {
      int64_t four;
      memcpy(&four, q.n + e, 8);
      const Words x = four_of(four);
      const uint8_t* at = codes + e * BLOCK + 4 * first;
      if (e % 16 == 0) fetch(ahead + width * first + e * KEYS * AT_ONCE, 16 * KEYS * AT_ONCE);
#pragma GCC unroll 8
      for (int c = 0; c < AT_ONCE; c++) sum[c] = add_products(sum[c], words(at + 4 * KEYS * c), x);
    }
    // Two sums a key. They may wrap around; what is left in the end fits.
    uint32_t part[2 * KEYS * AT_ONCE];
    memcpy(part, sum, sizeof part);
    for (int j = 0; j < KEYS * AT_ONCE; j++) out[first + j] = (int32_t)(part[2 * j] + part[2 * j + 1] + (uint32_t)q.offset);
  }
}
#else
INLINE void integer_products(const CodedQuery& q, const uint8_t* codes, const uint8_t*, int64_t width, int32_t* out) {
  uint32_t sum[BLOCK];
  for (int j = 0; j < BLOCK; j++) sum[j] = (uint32_t)q.offset;
  for (int64_t e = 0; e < width; e += 4, codes += 4 * BLOCK)
    for (int j = 0; j < BLOCK; j++)
      for (int i = 0; i < 4; i++) sum[j] += (uint32_t)(q.n[e + i] * (int32_t)codes[4 * j + i]);
  memcpy(out, sum, sizeof sum);
}
#endif

}  // namespace
}  // namespace parzen
