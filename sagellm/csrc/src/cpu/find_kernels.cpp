#include <cstring>

#include "kernels.h"

namespace sage::cpu {

namespace {

struct Known {
  const char* isa;
  const Kernels* (*kernels)(Type);
  bool (*runs)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif
bool always() { return true; }

const Known kKnown[] = {
// the best first
#if defined(__x86_64__)
    {"avx512_bf16", avx512_bf16_kernels, has_avx512_bf16},
    {"avx512", avx512_kernels, has_avx512},
    {"avx2", avx2_kernels, has_avx2},
#endif
    {"plain", plain_kernels, always},
};

}  // namespace

const Kernels* find_kernels(const char* isa, Type weights) {
  for (const Known& known : kKnown) {
    if ((*isa == '\0' || std::strcmp(isa, known.isa) == 0) && known.runs()) return known.kernels(weights);
  }
  return nullptr;
}

const Kernels& kernels_of_cache(const Kernels& kernels, Type cache) {
  if (kernels.weights == cache) return kernels;
  // Products of bfloat16 with bfloat16 would round the queries of a float32 model.
  const bool multiplies_narrow = std::strcmp(kernels.name, "avx512_bf16") == 0 && cache == Type::kBFloat16;
  return *find_kernels(multiplies_narrow ? "avx512" : kernels.name, cache);
}

}  // namespace sage::cpu
