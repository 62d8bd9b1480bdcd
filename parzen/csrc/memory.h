// The plain C interface of a growing store of keys and values: structs of 8-byte fields, filled by
// backends/native.py.
#pragma once
#include "engine.h"

namespace parzen {

enum Stored : int64_t { FLOAT, DOUBLE, BFLOAT, HALF };

// Keys one after the other, and what bounds their scores; all heads (b, hk) of a store have the same chunks.
// With a centre c and a spread d for each coordinate, both of this chunk and head,
//
//   k = c + d·(step·code) + d·e,    ‖e‖ ≤ error,    code within ±127
//
// step 0 and error ∞: this key is not coded, and must be read.
struct Chunk {
  const void *keys, *values;           // (B, Hk, room, E) and (B, Hk, room, D)
  int64_t keys_head, values_head;      // elements from one head to the next
  uint8_t* codes;                      // (B, Hk, blocks, e/4, key, e%4), shifted by 128; null: not coded
  float* bounds;                       // (B, Hk, blocks, 2, key): step and error
  float* frame;                        // (B, Hk, 2·E + 1): c, d, and the largest ‖(k − c)/d‖
};

struct Recall {
  int64_t B, H, Hk, T, S, E, D, stored, profile, rule, nearest, diagonal, left, right, threads;
  double scale, level, r;
  ParallelFor parallel_for;      // null: this thread does everything
  const Chunk* chunks;
  int64_t chunk;                 // keys in each but the last, a multiple of 64
  View q, o, mask;               // q and o are float, or double for a store of doubles
  View scale_at, level_at, r_at;  // likewise; j is unused
  int64_t* scored;               // per row, how many keys were read exactly and how many have weight; or null
  int64_t* support;
};

// 0, or 1 when memory ran out.
struct Memory {
  int32_t (*recall)(const Recall&);
  // Codes of one full chunk of B·Hk heads.
  int32_t (*code)(const Recall&);
};

}  // namespace parzen
