#define NAMESPACE avx512_bf16
#define WIDTH 16
#define ROWS 12
#define DOT_BF16
#include "kernels_impl.h"

namespace sage::cpu {

const Kernels* avx512_bf16_kernels(Type weights) {
  using namespace avx512_bf16;
  return weights == Type::kFloat32 ? kernels_of<Float32>("avx512_bf16") : kernels_of<BFloat16Dot>("avx512_bf16");
}

}  // namespace sage::cpu
