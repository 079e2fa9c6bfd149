#define NAMESPACE amx
#define WIDTH 16
#define ROWS 12
#define DOT_BF16
#define MATRIX_UNIT
#include "kernels_impl.h"

namespace sage::cpu {

const Kernels* amx_kernels(Type weights) {
  using namespace amx;
  return weights == Type::kFloat32 ? kernels_of<Float32>("amx") : kernels_of<BFloat16Dot>("amx");
}

}  // namespace sage::cpu
