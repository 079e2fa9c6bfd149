#define NAMESPACE avx512
#define WIDTH 16
#define ROWS 12
#include "kernels_impl.h"

namespace sage::cpu {

const Kernels* avx512_kernels(Type weights) {
  using namespace avx512;
  return weights == Type::kFloat32 ? kernels_of<Float32>("avx512") : kernels_of<BFloat16>("avx512");
}

}  // namespace sage::cpu
