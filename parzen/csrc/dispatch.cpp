// What backends/cpu.py calls: the instruction sets in this build that this processor can run.
#include "engine.h"

namespace parzen {
#if defined(__x86_64__)
extern const Engine baseline, avx2, avx512;
#else
extern const Engine neon;
#endif
}  // namespace parzen

using namespace parzen;

static const Engine* engine(int64_t number) {
#if defined(__x86_64__)
  if (number == 0) return &baseline;
  if (number == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2;
  if (number == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return &avx512;
#else
  if (number == 0) return &neon;
#endif
  return nullptr;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// The name of instruction set `number`, worst first, "" if this processor lacks it, null past the last.
EXPORT const char* parzen_isa(int64_t number) {
#if defined(__x86_64__)
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  if (number > 2) return nullptr;
#else
  static const char* const names[] = {"neon"};
  if (number > 0) return nullptr;
#endif
  return engine(number) ? names[number] : "";
}

EXPORT int64_t parzen_args_size() { return sizeof(Args); }
EXPORT int32_t parzen_forward(int64_t isa, const Args* args) { return engine(isa)->forward(*args); }
EXPORT int32_t parzen_backward(int64_t isa, const Args* args) { return engine(isa)->backward(*args); }
