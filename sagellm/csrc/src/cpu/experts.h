// Which rows go through which experts.
#pragma once

#include <vector>

#include "product.h"

namespace sage::cpu {

constexpr int kExpertRows = 48;  // of a block

// Rows that go through one expert together.
struct ExpertBlock {
  int expert = 0, count = 0;
};

// The experts of each row. Its arrays keep their sizes, so that a thread that is late reads numbers of another layer,
// and nothing outside of them.
struct Routes {
  int panel = 1;                    // rows of a block at most
  std::vector<ExpertBlock> blocks;  // those without rows at the end
  std::vector<int> slots;           // [blocks][panel]: row * top_k + which of the row's experts
  std::vector<float> weights;       // by slot

  Routes() = default;
  Routes(int rows, const Experts& experts);
  const int* slots_of(int block) const { return slots.data() + size(block) * size(panel); }
};

// `logits`: the router's results, [rows][its outputs]. The first expert of equal ones is chosen.
void choose_experts(const float* logits, int rows, const Experts& experts, Routes* routes);

// Chunks of a product of all blocks with their experts' weights, each like `matrix`. A panel is a block.
Cut cut_of_experts(const Kernels& kernels, const Routes& routes, const Matrix& matrix, int threads, bool pairs);

}  // namespace sage::cpu
