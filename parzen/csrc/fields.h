// The fields of the structs that Python packs, by name: backends/native.py compares them with its own.
#pragma once
#include <stddef.h>
#include "engine.h"
#include "memory.h"
#include "weights.h"

namespace parzen {

struct Field {
  const char* name;
  int64_t offset, size;
};

#define ARGS_FIELDS(X)                                                                                  \
  X(B) X(H) X(Hk) X(T) X(S) X(E) X(D) X(is_double) X(profile) X(rule) X(nearest) X(diagonal) X(left)    \
  X(right) X(threads) X(scale) X(level) X(r) X(dropout) X(parallel_for) X(first_q) X(first_k) X(rows)   \
  X(lower_right) X(seed) X(q) X(k) X(v) X(o) X(mask) X(bias) X(slopes) X(scale_at) X(level_at) X(r_at)  \
  X(stats) X(where) X(count) X(index) X(score) X(per_row) X(dout) X(dq) X(dk) X(dv) X(dbias) X(dbias_B) \
  X(dbias_H) X(dbias_T) X(dbias_S) X(dscale) X(dlevel) X(dr) X(dslopes)

#define RECALL_FIELDS(X)                                                                                \
  X(B) X(H) X(Hk) X(T) X(S) X(E) X(D) X(stored) X(profile) X(rule) X(nearest) X(diagonal) X(left)       \
  X(right) X(threads) X(scale) X(level) X(r) X(parallel_for) X(chunks) X(chunk) X(q) X(o) X(mask)       \
  X(scale_at) X(level_at) X(r_at) X(scored) X(support)

#define CHUNK_FIELDS(X) X(keys) X(values) X(keys_head) X(values_head) X(codes) X(bounds) X(frame)

#define WEIGHT_MAP_FIELDS(X)                                                                          \
  X(rows) X(n) X(is_double) X(profile) X(rule) X(nearest) X(threads) X(scale) X(level) X(r) X(least) \
  X(parallel_for) X(x) X(dout) X(out)

#define ROW_MAP_FIELDS(X) X(map) X(r_at) X(level_at) X(score) X(push)

// The list of S, which the compiler refuses where it leaves out a field.
#define FIELD(name) {#name, offsetof(S, name), sizeof(S::name)},
#define SIZE(name) +sizeof(S::name)
#define FIELDS_OF(STRUCT, LIST)                                                           \
  struct STRUCT##Fields {                                                                 \
    using S = STRUCT;                                                                     \
    static_assert(0 LIST(SIZE) == sizeof(S), "a field of " #STRUCT " is not in its list"); \
    static constexpr Field list[] = {LIST(FIELD)};                                        \
  };

FIELDS_OF(Args, ARGS_FIELDS)
FIELDS_OF(Recall, RECALL_FIELDS)
FIELDS_OF(Chunk, CHUNK_FIELDS)
FIELDS_OF(WeightMap, WEIGHT_MAP_FIELDS)
FIELDS_OF(RowMap, ROW_MAP_FIELDS)

}  // namespace parzen
