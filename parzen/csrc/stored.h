// Rows of any stored type, of any width: read as vectors of the type that is computed in.
#pragma once
#include "matmul.h"

namespace parzen {
namespace {

struct Bfloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INLINE V<float> load_as(const float* p) { return load(p); }
INLINE V<double> load_as(const double* p) { return load(p); }
INLINE U<float> widen(const void* p) {
  typedef uint16_t Short __attribute__((vector_size(BYTES / 2)));
  Short x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, U<float>);
}
INLINE V<float> load_as(const Bfloat* p) { return (V<float>)(widen(p) << 16); }
INLINE V<float> load_as(const Half* p) {
  const U<float> x = widen(p), rest = (x & 0x7fff) << 13;
  // The exponent moves by 112; below 2⁻¹⁴ through a difference, which no flushing of small numbers touches.
  const V<float> small = (V<float>)(rest + (113u << 23)) - 6.103515625e-05f;
  const I<float> tiny = (I<float>)((x & 0x7c00) == 0), top = (I<float>)((x & 0x7c00) == 0x7c00);
  const V<float> size = select<float>(tiny, small, (V<float>)(rest + ((top ? U<float>{} + 224u : U<float>{} + 112u) << 23)));
  return (V<float>)((U<float>)size | ((x & 0x8000) << 16));
}

template <class X>
struct Computed {
  using T = float;
};
template <>
struct Computed<double> {
  using T = double;
};

// The last elements of a row, n < LANES of them, and zeros.
template <class X, class T = typename Computed<X>::T>
INLINE V<T> load_some_as(const X* p, int64_t n) {
  if constexpr (sizeof(X) == sizeof(T)) {
    return load_some(p, n);
  } else {
    alignas(64) X x[LANES<T>] = {};
    memcpy(x, p, n * sizeof(X));
    return load_as(x);
  }
}

// q·x; q ends in zeros up to a whole vector.
template <class X, class T = typename Computed<X>::T>
INLINE T product(const T* q, const X* x, int64_t E) {
  constexpr int L = LANES<T>;
  V<T> acc[4] = {};
  int64_t e = 0;
  for (; e + 4 * L <= E; e += 4 * L)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) acc[c] = fma<T>(load(q + e + c * L), load_as(x + e + c * L), acc[c]);
  for (; e + L <= E; e += L) acc[0] = fma<T>(load(q + e), load_as(x + e), acc[0]);
  if (e < E) acc[1] = fma<T>(load(q + e), load_some_as(x + e, E - e), acc[1]);
  return sum<T>((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

}  // namespace
}  // namespace parzen
