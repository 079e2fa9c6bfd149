#define NAMESPACE avx2
#define WIDTH 8
#define ROWS 3
#include "kernels_impl.h"

namespace sage::cpu {

const Kernels* avx2_kernels(Type weights) {
  using namespace avx2;
  return weights == Type::kFloat32 ? kernels_of<Float32>("avx2") : kernels_of<BFloat16>("avx2");
}

}  // namespace sage::cpu
