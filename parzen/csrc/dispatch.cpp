// What backends/native.py calls: the instruction sets in this build that this processor can run.
#include <string.h>
#include "fields.h"

namespace parzen {
extern const Engine baseline, avx2, avx512, avx512vnni, neon;
namespace memory {
extern const Memory baseline, avx2, avx512, avx512vnni, neon;
}  // namespace memory
namespace maps {
extern const WeightMaps baseline, avx2, avx512, avx512vnni, neon;
}  // namespace maps
}  // namespace parzen

using namespace parzen;

struct Isa {
  const char* name;
  const Engine* engine;
  const Memory* memory;
  const WeightMaps* maps;
  bool (*supported)();
};

#if defined(__x86_64__)
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Worst first.
static const Isa isas[] = {
#ifdef PARZEN_HAS_baseline
    {"baseline", &baseline, &memory::baseline, &maps::baseline, [] { return true; }},
#endif
#ifdef PARZEN_HAS_avx2
    {"avx2", &avx2, &memory::avx2, &maps::avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#ifdef PARZEN_HAS_avx512
    {"avx512", &avx512, &memory::avx512, &maps::avx512, has_avx512},
#endif
#ifdef PARZEN_HAS_avx512vnni
    {"avx512vnni", &avx512vnni, &memory::avx512vnni, &maps::avx512vnni, [] { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }},
#endif
#ifdef PARZEN_HAS_neon
    {"neon", &neon, &memory::neon, &maps::neon, [] { return true; }},
#endif
};
constexpr int64_t COUNT = sizeof isas / sizeof *isas;

#define EXPORT extern "C" __attribute__((visibility("default")))

// The name of instruction set `number`, worst first, "" if this processor lacks it, null past the last.
EXPORT const char* parzen_isa(int64_t number) {
  if (number >= COUNT) return nullptr;
  return isas[number].supported() ? isas[number].name : "";
}

// One more whenever what a field means changes and its name stays: CONTRACT of backends/native.py.
EXPORT int64_t parzen_contract() { return 1; }

struct Struct {
  const char* name;
  const Field* fields;
  int64_t count;
};
#define STRUCT(name) {#name, name##Fields::list, (int64_t)(sizeof name##Fields::list / sizeof(Field))}
static const Struct structs[] = {STRUCT(Args), STRUCT(Recall), STRUCT(Chunk), STRUCT(WeightMap), STRUCT(RowMap)};

// Field `number` of a struct; 0 past its last, and for a struct that is not here.
EXPORT int32_t parzen_field(const char* name, int64_t number, Field* field) {
  for (const Struct& s : structs)
    if (!strcmp(s.name, name) && number < s.count) {
      *field = s.fields[number];
      return 1;
    }
  return 0;
}

EXPORT int32_t parzen_forward(int64_t isa, const Args* args) { return isas[isa].engine->forward(*args); }
EXPORT int32_t parzen_backward(int64_t isa, const Args* args) { return isas[isa].engine->backward(*args); }

EXPORT int32_t parzen_recall(int64_t isa, const Recall* args) { return isas[isa].memory->recall(*args); }
EXPORT int32_t parzen_code(int64_t isa, const Recall* args) { return isas[isa].memory->code(*args); }

EXPORT int32_t parzen_weights(int64_t isa, const WeightMap* args) {
  return isas[isa].maps->forward({args, nullptr, nullptr, nullptr, nullptr});
}
EXPORT int32_t parzen_weights_backward(int64_t isa, const WeightMap* args) {
  return isas[isa].maps->backward({args, nullptr, nullptr, nullptr, nullptr});
}
EXPORT int32_t parzen_weight_rows(int64_t isa, const RowMap* args) { return isas[isa].maps->forward(*args); }
EXPORT int32_t parzen_weight_rows_backward(int64_t isa, const RowMap* args) { return isas[isa].maps->backward(*args); }
