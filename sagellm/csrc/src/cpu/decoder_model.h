// Parts that the steps of a decoder share: its model, and the numbers that stages hand on.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "product.h"
#include "sagellm/decoder.h"

namespace sage {

struct Decoder::Model {
  const cpu::Kernels* kernels;
  DecoderShape shape;
  std::vector<DecoderLayer> layers;
  Matrix embedding;
  const float* last_norm;
  Matrix head;

  int num_logits() const { return shape.ranks > 1 ? shape.logits : head.outputs; }
  // Logits of each rank but the last, which may have less.
  int part() const { return shape.ranks > 1 ? cpu::padded(cpu::divided(shape.logits, shape.ranks), cpu::kTile) : 0; }
};

namespace cpu {

// Numbers that begin with a line of the cache, so that a tile of one thread shares no line with a tile of another.
template <class T>
class Lines {
 public:
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  T& operator[](Size at) { return data()[at]; }
  Size size() const { return size_; }
  void resize(Size count) {
    size_ = count;
    lines_.resize((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line));
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
  Size size_ = 0;
};

}  // namespace cpu

// Numbers that stages hand on. They stay in place while a thread may still read them.
struct Decoder::Buffers {
  int capacity = 0;  // tokens
  std::shared_ptr<const cpu::AttentionCosts> costs;  // of the cache, where sequences read keys together if that pays
  cpu::Lines<float> hidden, squares, qkv, branch, partials, logits;
  cpu::Lines<char> input, queries, attended, fed;
  // Routers' outputs, the results of each slot, and their sums where ranks add them up by themselves.
  cpu::Lines<float> routed, expert_branch, expert_sums;
  cpu::Lines<char> expert_fed;
  cpu::Lines<char> rounded;  // inputs of the next product in 8 bits

  void reserve(const Model& model, int tokens, cpu::Size partials_needed, cpu::Size logits_needed);
};

}  // namespace sage
