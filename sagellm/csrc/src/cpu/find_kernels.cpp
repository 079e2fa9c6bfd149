#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace sage::cpu {

namespace {

struct Known {
  const char* isa;
  const Kernels* (*kernels)(Type);
  bool (*runs)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// The kernel saves the tile registers of a process only after the process has asked for them.
bool has_amx() {
#if defined(__linux__)
  constexpr int kAsk = 0x1023, kTileData = 18;
  static const bool is_there = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                               __builtin_cpu_supports("amx-int8") &&
                               syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return is_there;
#else
  return false;
#endif
}
#endif
bool always() { return true; }

const Known kKnown[] = {
// the best first
#if defined(__x86_64__)
    {"amx", amx_kernels, has_amx},
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
  const bool has_pairs = std::strcmp(kernels.name, "avx512_bf16") == 0 || std::strcmp(kernels.name, "amx") == 0;
  const bool multiplies_narrow = has_pairs && cache == Type::kBFloat16;
  return *find_kernels(multiplies_narrow ? "avx512" : kernels.name, cache);
}

}  // namespace sage::cpu
