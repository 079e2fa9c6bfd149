#include "experts.h"

#include <cmath>

namespace sage::cpu {

Routes::Routes(int rows, const Experts& experts) : panel(std::min(rows, kExpertRows)) {
  const int num_slots = rows * experts.top_k, num_experts = static_cast<int>(experts.down.size());
  // An expert's last block may be less than full.
  const Size num_blocks = size(std::min(num_slots, num_experts + num_slots / panel));
  blocks.resize(num_blocks);
  slots.resize(num_blocks * size(panel));
  weights.resize(size(num_slots));
}

void choose_experts(const float* logits, int rows, const Experts& experts, Routes* routes) {
  const int num_experts = static_cast<int>(experts.down.size());
  std::vector<float> left(size(num_experts));
  std::vector<std::vector<int>> slots_by_expert(size(num_experts));
  for (int row = 0; row < rows; ++row, logits += experts.router.outputs) {
    float top = logits[0], total = 0, chosen = 0;
    for (int e = 1; e < num_experts; ++e) top = std::max(top, logits[e]);
    for (int e = 0; e < num_experts; ++e) total += left[size(e)] = std::exp(logits[e] - top);
    float* weights = routes->weights.data() + size(row) * size(experts.top_k);
    for (int k = 0; k < experts.top_k; ++k) {
      const auto best = std::max_element(left.begin(), left.end());
      chosen += weights[k] = *best;
      slots_by_expert[size(static_cast<int>(best - left.begin()))].push_back(row * experts.top_k + k);
      *best = -1;
    }
    for (int k = 0; k < experts.top_k; ++k) weights[k] /= experts.renormalize ? chosen : total;
  }
  std::fill(routes->blocks.begin(), routes->blocks.end(), ExpertBlock{});
  Size block = 0;
  for (int e = 0; e < num_experts; ++e) {
    const std::vector<int>& slots = slots_by_expert[size(e)];
    for (Size first = 0; first < slots.size(); first += size(routes->panel), ++block) {
      const Size count = std::min(slots.size() - first, size(routes->panel));
      routes->blocks[block] = {e, static_cast<int>(count)};
      std::copy_n(slots.data() + first, count, routes->slots.data() + block * size(routes->panel));
    }
  }
}

Cut cut_of_experts(const Kernels& kernels, const Routes& routes, const Matrix& matrix, int threads, bool pairs) {
  Cut cut(kernels, {0, routes.panel}, matrix, threads, pairs);
  cut.panels = static_cast<int>(routes.blocks.size());
  cut.rows = cut.panels * cut.panel;
  return cut;
}

}  // namespace sage::cpu
