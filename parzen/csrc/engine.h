// The plain C interface of the engine: one struct of 8-byte fields, filled by backends/native.py.
#pragma once
#include <stdint.h>

namespace parzen {

enum Profile : int64_t { EXP, POWER };
enum Rule : int64_t { EVERYWHERE, UNIT_MASS, THRESHOLD, MARGIN, NEAREST };

// A strided array; strides in elements, 0 where the axis is broadcast. p is null when absent.
struct View {
  void* p;
  int64_t b, h, i, j;
};

// torch_parallel_for of libtorch_cpu (2.10 and later).
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

struct Args {
  // E and D are any widths; a row's elements follow one another. For packed sequences B is their number, T and S the longest lengths.
  int64_t B, H, Hk, T, S, E, D;
  int64_t is_double, profile, rule, nearest, diagonal, left, right, threads;
  double scale, level, r, dropout;
  ParallelFor parallel_for;            // null: this thread does everything
  const int64_t *first_q, *first_k;    // packed sequences: B + 1 row offsets each, or null
  int64_t rows, lower_right;           // all packed rows; whether their diagonal ends in the corner
  const int64_t* seed;
  View q, k, v, o, mask, bias;
  View slopes, scale_at, level_at, r_at;  // j is unused
  // What forward leaves for backward; stats is null when nothing is to be saved.
  void* stats;      // (H rows…, 5): what turns a score into its weight
  int64_t* where;   // at the first row of a tile: its offset in index/score, or -1 for a dense tile
  int32_t* count;   // per row: its support size
  int32_t* index;
  void* score;
  int64_t per_row;  // index and score hold per_row entries for each row
  // Backward.
  View dout, dq, dk, dv, dbias;
  int64_t dbias_B, dbias_H, dbias_T, dbias_S;
  void *dscale, *dlevel, *dr, *dslopes;  // row arrays, or null
};

// 0, or 1 when memory ran out.
struct Engine {
  int32_t (*forward)(const Args&);
  int32_t (*backward)(const Args&);
};

}  // namespace parzen
