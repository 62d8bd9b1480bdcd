// Items of work over torch's threads, and the scratch memory of each worker.
#pragma once
#include <stdlib.h>

#include "engine.h"
#include "simd.h"

namespace parzen {
namespace {

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t tiles_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Workers take items in turn; which worker takes which item has no influence on any result.
struct Job {
  void (*item)(const void* job, int64_t number, char* scratch);
  const void* data;
  int64_t items, scratch;
  int64_t next = 0;
  int32_t failed = 0;
};

void work(int64_t begin, int64_t end, void* context) {
  Job& job = *(Job*)context;
  if (begin >= end) return;
  char* scratch = nullptr;
  for (int64_t i; (i = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.items;) {
    if (!scratch && !(scratch = (char*)aligned_alloc(64, (job.scratch + 127) / 64 * 64))) {
      __atomic_store_n(&job.failed, 1, __ATOMIC_RELAXED);
      return;
    }
    job.item(job.data, i, scratch);
  }
  free(scratch);
}

// A is any struct of arguments with `threads` and `parallel_for`. 0, or 1 when memory ran out.
template <class A>
int32_t run(const A& args, Job job) {
  const int64_t workers = smaller(args.threads, job.items);
  if (args.parallel_for && workers > 1) {
    if (args.parallel_for(0, workers, 1, work, &job)) return 1;
  } else {
    work(0, 1, &job);
  }
  return job.failed;
}

// Hands out 64-byte aligned pieces; with no base it only measures.
struct Pieces {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* p = (T*)(base + used);
    used += (n * (int64_t)sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

}  // namespace
}  // namespace parzen
