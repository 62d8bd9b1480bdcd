// Vectors for one instruction set. PARZEN_ISA names it; everything here is internal to one object.
#pragma once
#include <stdint.h>
#include <string.h>

#include <initializer_list>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace parzen {
namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTER_ROWS = 6, REGISTER_VECTORS = 4;
constexpr bool COMPRESSES = true;
#elif defined(__AVX2__)
constexpr int BYTES = 32, REGISTER_ROWS = 6, REGISTER_VECTORS = 2;
constexpr bool COMPRESSES = false;
#elif defined(__ARM_NEON)
constexpr int BYTES = 16, REGISTER_ROWS = 6, REGISTER_VECTORS = 4;
constexpr bool COMPRESSES = false;
#else
constexpr int BYTES = 16, REGISTER_ROWS = 4, REGISTER_VECTORS = 2;
constexpr bool COMPRESSES = false;
#endif

#define INLINE inline __attribute__((always_inline))

template <class T>
struct Simd;
template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(BYTES)));
  typedef int32_t I __attribute__((vector_size(BYTES)));
  typedef uint32_t U __attribute__((vector_size(BYTES)));
  using Int = int32_t;
  using UInt = uint32_t;
};
template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(BYTES)));
  typedef int64_t I __attribute__((vector_size(BYTES)));
  typedef uint64_t U __attribute__((vector_size(BYTES)));
  using Int = int64_t;
  using UInt = uint64_t;
};
template <class T>
using V = typename Simd<T>::V;
template <class T>
using I = typename Simd<T>::I;
template <class T>
using U = typename Simd<T>::U;
template <class T>
constexpr int LANES = BYTES / sizeof(T);

template <class T>
INLINE V<T> load(const T* p) {
  V<T> x;
  memcpy(&x, p, BYTES);
  return x;
}
template <class T>
INLINE void store(T* p, V<T> x) {
  memcpy(p, &x, BYTES);
}
template <class T>
INLINE V<T> splat(T x) {
  return x - V<T>{};  // x + 0 would not be x for −0, and so cost an addition
}
// a·b + c, rounded once where the instruction set can. The compiler is told not to contract by itself
// (-ffp-contract=off): the same formula must give the same bits wherever it is inlined.
template <class T>
INLINE V<T> fma(V<T> a, V<T> b, V<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (V<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else return (V<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (V<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else return (V<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__ARM_NEON)
  if constexpr (sizeof(T) == 4) return (V<T>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  else return (V<T>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}
// As maxps: b where the comparison is unordered.
template <class T>
INLINE V<T> maximum(V<T> a, V<T> b) {
  return a > b ? a : b;
}
template <class T>
INLINE V<T> select(I<T> on, V<T> a, V<T> b) {
  return on ? a : b;
}

template <class T>
INLINE T sum(V<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)x);
  else return _mm512_reduce_add_pd((__m512d)x);
#else
  T part[LANES<T>];
  store(part, x);
  for (int w = LANES<T> / 2; w; w /= 2)
    for (int l = 0; l < w; l++) part[l] += part[l + w];
  return part[0];
#endif
}
template <class T>
INLINE T largest(V<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)x);
  else return _mm512_reduce_max_pd((__m512d)x);
#else
  T part[LANES<T>];
  store(part, x);
  for (int w = LANES<T> / 2; w; w /= 2)
    for (int l = 0; l < w; l++) part[l] = part[l] > part[l + w] ? part[l] : part[l + w];
  return part[0];
#endif
}

// Bit l is set unless x[l] <= cut: a NaN counts as above, so that it reaches the output.
template <class T>
INLINE uint32_t above(V<T> x, V<T> cut) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)x, (__m512)cut, _CMP_NLE_UQ);
  else return _mm512_cmp_pd_mask((__m512d)x, (__m512d)cut, _CMP_NLE_UQ);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)cut, _CMP_NLE_UQ));
  else return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)x, (__m256d)cut, _CMP_NLE_UQ));
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return _mm_movemask_ps(_mm_cmpnle_ps((__m128)x, (__m128)cut));
  else return _mm_movemask_pd(_mm_cmpnle_pd((__m128d)x, (__m128d)cut));
#else
  I<T> on = ~(x <= cut);
  uint32_t bits = 0;
  for (int l = 0; l < LANES<T>; l++) bits |= (uint32_t)(on[l] & 1) << l;
  return bits;
#endif
}

// Bit l is set where the lane of a comparison is.
template <class T>
INLINE uint32_t inside(I<T> on) {
  return above<T>(on ? V<T>{} + 1 : V<T>{}, V<T>{});
}
// The first n lanes.
template <class T>
INLINE I<T> first_lanes(int64_t n) {
  I<T> lane;
  for (int l = 0; l < LANES<T>; l++) lane[l] = l;
  return lane < (typename Simd<T>::Int)n;
}

// Writes the lanes of x in `bits` to out; may write LANES.
template <class T>
INLINE void compress(V<T> x, uint32_t bits, T* out) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_storeu_ps(out, _mm512_maskz_compress_ps(bits, (__m512)x));
  else _mm512_storeu_pd(out, _mm512_maskz_compress_pd(bits, (__m512d)x));
#else
  for (; bits; bits &= bits - 1) *out++ = x[__builtin_ctz(bits)];
#endif
}

// The first n < LANES elements at p, then zeros; what lies behind them is not touched.
template <class T>
INLINE V<T> load_some(const T* p, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
  else return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(p, (__m256i)first_lanes<T>(n));
  else return _mm256_maskload_pd(p, (__m256i)first_lanes<T>(n));
#else
  V<T> x = {};
  for (int l = 0; l < LANES<T>; l++)
    if (l < n) x[l] = p[l];
  return x;
#endif
}
template <class T>
INLINE void store_some(T* p, V<T> x, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x);
  else _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(p, (__m256i)first_lanes<T>(n), x);
  else _mm256_maskstore_pd(p, (__m256i)first_lanes<T>(n), x);
#else
  for (int l = 0; l < LANES<T>; l++)
    if (l < n) p[l] = x[l];
#endif
}
// A whole vector, or for PART the first n < LANES elements of one.
template <bool PART, class T>
INLINE V<T> load(const T* p, int64_t n) {
  if constexpr (PART) return load_some(p, n);
  else return load(p);
}
template <bool PART, class T>
INLINE void store(T* p, V<T> x, int64_t n) {
  if constexpr (PART) store_some(p, x, n);
  else store(p, x);
}
// Calls step(part, e, n) for each vector of a row of E elements: at e, and of n elements where it is the last and
// `part`, a constant in its type, says that it is not whole.
template <bool PART>
struct Some {
  constexpr operator bool() const { return PART; }
};
template <class T, class Step>
INLINE void for_row(int64_t E, Step step) {
  int64_t e = 0;
  for (; e + LANES<T> <= E; e += LANES<T>) step(Some<false>{}, e, LANES<T>);
  if (e < E) step(Some<true>{}, e, E - e);
}

// Appends the lanes of x in `bits` to a list of scores and key numbers; may write LANES past the end.
template <class T>
INLINE int64_t append(V<T> x, int32_t first, uint32_t bits, T* score, int32_t* index, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(score + n, _mm512_maskz_compress_ps(bits, (__m512)x));
    _mm512_storeu_si512(index + n,
                        _mm512_maskz_compress_epi32(bits, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  } else {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm512_storeu_pd(score + n, _mm512_maskz_compress_pd(bits, (__m512d)x));
    _mm256_storeu_si256((__m256i*)(index + n),
                        _mm256_maskz_compress_epi32(bits, _mm256_add_epi32(lane, _mm256_set1_epi32(first))));
  }
  return n + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1, n++) {
    int l = __builtin_ctz(bits);
    score[n] = x[l];
    index[n] = first + l;
  }
  return n;
#endif
}

// Keeps the lanes in `bits` of one vector of a list; the kept part never overtakes the read part.
template <class T>
INLINE int64_t keep(T* score, int32_t* index, int64_t from, uint32_t bits, int64_t n) {
  V<T> x = load(score + from);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    __m512i j = _mm512_loadu_si512(index + from);
    _mm512_storeu_ps(score + n, _mm512_maskz_compress_ps(bits, (__m512)x));
    _mm512_storeu_si512(index + n, _mm512_maskz_compress_epi32(bits, j));
  } else {
    __m256i j = _mm256_loadu_si256((const __m256i*)(index + from));
    _mm512_storeu_pd(score + n, _mm512_maskz_compress_pd(bits, (__m512d)x));
    _mm256_storeu_si256((__m256i*)(index + n), _mm256_maskz_compress_epi32(bits, j));
  }
  return n + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1, n++) {
    int l = __builtin_ctz(bits);
    score[n] = x[l];
    index[n] = index[from + l];
  }
  return n;
#endif
}

INLINE V<float> exponential(V<float> x) {
  const V<float> magic = splat(12582912.0f);
  x = select<float>(x > 88.0f, splat(88.0f), x);
  const I<float> tiny = x < -87.0f;
  const V<float> t = fma<float>(x, splat(1.44269504088896341f), magic), n = t - magic;
  V<float> y = fma<float>(n, splat(-0.693359375f), x);
  y = fma<float>(n, splat(2.12194440e-4f), y);
  V<float> p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma<float>(p, y, splat(c));
  p = fma<float>(p, y * y, y) + 1.0f;
  // The low bits of t hold n: they go to the exponent of p.
  const V<float> out = (V<float>)((U<float>)p + ((U<float>)t << 23));
  return select<float>(tiny, V<float>{}, out);
}
INLINE V<double> exponential(V<double> x) {
  const V<double> magic = splat(6755399441055744.0);
  x = select<double>(x > 709.0, splat(709.0), x);
  const I<double> tiny = x < -708.0;
  const V<double> t = fma<double>(x, splat(1.4426950408889634), magic), n = t - magic;
  V<double> y = fma<double>(n, splat(-6.93147180369123816490e-01), x);
  y = fma<double>(n, splat(-1.90821492927058770002e-10), y);
  V<double> p = splat(1.0 / 6227020800);
  for (double f : {479001600., 39916800., 3628800., 362880., 40320., 5040., 720., 120., 24., 6., 2., 1., 1.})
    p = fma<double>(p, y, splat(1 / f));
  const V<double> out = (V<double>)((U<double>)p + ((U<double>)t << 52));
  return select<double>(tiny, V<double>{}, out);
}

// log x for normal x > 0; other lanes hold anything.
template <class T>
INLINE V<T> logarithm(V<T> x) {
  constexpr bool single = sizeof(T) == 4;
  constexpr int bits = single ? 23 : 52;
  const typename Simd<T>::UInt half = single ? 0x3f3504f3 : 0x3fe6a09e667f3bcdLL;  // √½
  // Unsigned where lanes that hold anything may overflow.
  const U<T> ix = (U<T>)x;
  const I<T> e = (I<T>)(ix - half) >> bits;
  const V<T> m = (V<T>)(ix - ((U<T>)e << bits));
  // 2·atanh z with z = (m − 1)/(m + 1).
  const V<T> z = (m - 1) / (m + 1), z2 = z * z, n = __builtin_convertvector(e, V<T>);
  V<T> p = V<T>{};
  for (int d = single ? 11 : 23; d >= 3; d -= 2) p = (p + T(1) / d) * z2;
  const V<T> small = fma<T>(2 * z, p, 2 * z);
  return fma<T>(n, splat(T(0.693359375)), fma<T>(n, splat(T(-2.121944400546905827679e-4)), small));
}
// log(1 + u) where 1 + u > 0, accurate for small u.
template <class T>
INLINE V<T> log_one_plus(V<T> u) {
  const V<T> y = 1 + u;
  return logarithm<T>(y) + (u - (y - 1)) / y;
}

}  // namespace
}  // namespace parzen
