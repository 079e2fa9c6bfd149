#define NAMESPACE plain
#define WIDTH 4
#define ROWS 3
#include "kernels_impl.h"

namespace sage::cpu {

const Kernels* plain_kernels(Type weights) {
  using namespace plain;
  return weights == Type::kFloat32 ? kernels_of<Float32>("plain") : kernels_of<BFloat16>("plain");
}

}  // namespace sage::cpu
