// The plain C interface of weight maps: rows of scores in, rows of weights out. One struct of 8-byte fields,
// filled by backends/native.py.
#pragma once
#include "engine.h"

namespace parzen {

// All arrays are (rows, n) without gaps, float or double.
struct WeightMap {
  int64_t rows, n, is_double, profile, rule, nearest, threads;
  double scale, level, r;
  double least;              // scores up to here are not allowed
  ParallelFor parallel_for;  // null: this thread does everything
  const void* x;             // scores; in backward the weights
  const void* dout;          // backward only
  void* out;                 // weights; in backward the gradient of the scores
};

// What only some maps have.
struct RowMap {
  const WeightMap* map;
  const void *r_at, *level_at;  // (rows) in place of r and level, or null
  const void* score;            // backward of a power within a margin or radius: the scores
  void* push;                   // (rows), likewise, or null: the gradient of the margin, of −θ for a radius
};

// 0, or 1 when memory ran out.
struct WeightMaps {
  int32_t (*forward)(const RowMap&);
  int32_t (*backward)(const RowMap&);
};

}  // namespace parzen
