// Attention of few query rows, as those of decode steps. For `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

// Scores and queries of all heads, and the most that keys and values of few bits take besides, in whole numbers too.
inline std::size_t attend_few_bytes(int rows, int heads, int head_size) {
  const auto r = static_cast<std::size_t>(rows), d = static_cast<std::size_t>(padded(head_size, kTile));
  const auto keys = static_cast<std::size_t>(kSplit + kTile);
  return aligned_to_64(static_cast<std::size_t>(heads) * r * (keys + d) * 4) + aligned_to_64(keys * 8) +
         aligned_to_64(static_cast<std::size_t>(heads) * keys * 16) + aligned_to_64(r * (keys + d) * 2) +
         aligned_to_64(kTile * d * 4) + aligned_to_64(r * 16) + 16 * 64;
}

// Adds up each of WIDTH vectors: result[i] is the sum of values[i].
inline Vec add_up(Vec (&values)[WIDTH]) {
  // With AVX2 a shuffle of two vectors that crosses their halves is three instructions, so halves are joined last.
  constexpr bool kJoinsHalves = WIDTH == 8;
  const IVec even = indices([](int i) { return kJoinsHalves ? i / 4 * 4 + i % 2 * 2 + i / 2 % 2 * WIDTH : 2 * i; });
  const IVec odd = even + 1;
  for (int left = WIDTH; left > (kJoinsHalves ? 2 : 1); left /= 2) {
    for (int i = 0; i < left / 2; ++i) {
      const Vec a = values[2 * i], b = values[2 * i + 1];
      values[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  if constexpr (!kJoinsHalves) return values[0];
  const IVec low = indices([](int i) { return i + i / (WIDTH / 2) * (WIDTH / 2); }), high = low + WIDTH / 2;
  return __builtin_shuffle(values[0], values[1], low) + __builtin_shuffle(values[0], values[1], high);
}

// Scores of WIDTH keys for up to `rows` queries; a key is read once for all of them. `fixed`: the head size where it is
// known when this is compiled, so that queries stay in registers, else 0.
template <class T, int fixed, int rows = 4>
void score_keys(int num_rows, const typename T::Input* const* queries, const typename T::Weight* const (&keys)[WIDTH],
                int size, float* scores, int wide) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return score_keys<T, fixed, rows - 1>(num_rows, queries, keys, size, scores, wide);
  }
  const typename T::Input* of_rows[rows];
  std::copy_n(queries, rows, of_rows);
  Vec products[rows][WIDTH];
  for (int j = 0; j < WIDTH; j += T::kKeysAtOnce) {
    const typename T::Weight* some[T::kKeysAtOnce];
    std::copy_n(keys + j, T::kKeysAtOnce, some);
    Vec sums[rows][T::kKeysAtOnce]{};
    T::template dots<rows>(of_rows, some, fixed > 0 ? fixed : size, sums);
    for (int r = 0; r < rows; ++r) std::copy_n(sums[r], T::kKeysAtOnce, products[r] + j);
  }
  for (int r = 0; r < rows; ++r) store(scores + r * wide, add_up(products[r]));
}

// out[r] += weights[r] . values of kNumbers numbers of `count` adjacent tokens; a value is read once for all rows.
template <class T, int rows = 4>
void add_values(int num_rows, const typename T::Input* weights, std::size_t wide, int count,
                const typename T::Weight* value, std::size_t stride, float* out, int size) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return add_values<T, rows - 1>(num_rows, weights, wide, count, value, stride, out, size);
  }
  Vec sums[rows][4];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < 4; ++v) sums[r][v] = load(out + r * size + v * WIDTH);
  }
  T::template add_values<rows>(weights, wide, count, value, stride, sums);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < 4; ++v) store(out + r * size + v * WIDTH, sums[r][v]);
  }
}

// The heads of a group of tokens lie side by side and are read one after the other: memory is read in one run.
template <class T>
void attend_few(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Weight = typename T::Weight;
  using Input = typename T::Input;
  const int rows = task.tokens * task.share, size = task.head_size, count = task.end - task.begin;
  const bool is_plain = task.format == Format::kPlain;
  // Adjacent tokens whose values are added together: in the cache they lie side by side, decoded ones have so much room.
  const int most = is_plain && task.depths == nullptr ? kSplit : WIDTH;
  const int wide = padded(count, WIDTH), group = std::min(most, 1 << task.block_shift);
  const std::size_t stride = is_plain ? task.slot_stride / sizeof(Weight) : static_cast<std::size_t>(size);
  const std::size_t slot_bytes = static_cast<std::size_t>(task.heads) * bytes_of_head(task.format, size, sizeof(Weight));
  const auto all_rows = static_cast<std::size_t>(task.heads * rows);
  Scratch parts(scratch);
  auto* scores = parts.take<float>(all_rows * static_cast<std::size_t>(wide));    // [heads][rows][wide]
  auto* queries = parts.take<Input>(all_rows * static_cast<std::size_t>(size));   // [heads][rows][size]
  auto* decoded = parts.take<Weight>(static_cast<std::size_t>(WIDTH * size));     // of a head of as many tokens
  const auto scores_of = [&](int head, int row) { return scores + (head * rows + row) * wide; };
  const auto result = [&](float* of, int head) { return of + static_cast<std::size_t>(head) * task.result_stride; };
  for (int head = 0; head < task.heads; ++head) {
    std::fill_n(result(out, head), rows * size, 0.f);
    std::fill_n(result(max, head), rows, kNone);
    std::fill_n(result(sums, head), rows, 0.f);
  }
  if (task.depths == nullptr && first_seen(task, 0) >= task.end) return;  // the window has passed these keys
  // Keys that lie elsewhere for each token: those of a tree, and what is computed together with its first ones.
  const auto differ = [&](int first, int last) { return task.depths != nullptr && last > task.first_new && first < task.end; };
  for (int each = 0; each < task.heads * rows; ++each) {
    T::arrange(query_of<Input>(task, each / rows, each % rows), size, queries + each * size);
  }
  const auto score = size == 64 ? score_keys<T, 64> : size == 128 ? score_keys<T, 128> : score_keys<T, 0>;
  const auto score_rows = [&](int head, int first, int last, const Weight* const(&keys)[WIDTH], int i) {
    for (int row = first; row < last; row += 4) {
      const Input* of_rows[4];
      for (int r = 0; r < 4; ++r) of_rows[r] = queries + (head * rows + std::min(row + r, last - 1)) * size;
      score(last - row, of_rows, keys, size, scores_of(head, row) + i, wide);
    }
  };
  read_ahead(task, task.keys, slot_bytes);
  for (int i = 0; i < wide; i += WIDTH) {
    const Weight* keys[WIDTH];
    if (differ(task.begin + i, task.begin + i + WIDTH)) {
      for (int t = 0; t < task.tokens; ++t) {
        for (int j = 0; j < WIDTH; ++j) {
          const int key = slot_of(task, t, std::min(task.begin + i + j, task.end - 1));
          keys[j] = reinterpret_cast<const Weight*>(slot(task, task.keys, key));
        }
        for (int head = 0; head < task.heads; ++head) {
          score_rows(head, t * task.share, (t + 1) * task.share, keys, i);
          for (auto& key : keys) key += size;
        }
      }
      continue;
    }
    const auto token = [&](int j) { return std::min(task.begin + i + j, task.end - 1); };
    for (int j = 0; j < WIDTH; ++j) {
      keys[j] = is_plain ? reinterpret_cast<const Weight*>(slot(task, task.keys, token(j))) : decoded + j * size;
    }
    for (int head = 0; head < task.heads; ++head) {
      for (int j = 0; j < WIDTH && !is_plain; ++j) {
        decode_key<T>(task, token(j), head, decoded + j * size);
      }
      score_rows(head, 0, rows, keys, i);
      for (auto& key : keys) key += is_plain ? size : 0;
    }
  }
  read_ahead(task, task.values, slot_bytes);
  for (int head = 0; head < task.heads; ++head) {
    weigh_rows<T>(task, rows, scores_of(head, 0), wide, result(max, head), result(sums, head));
  }
  const std::size_t weights_stride = static_cast<std::size_t>(wide) * (sizeof(float) / sizeof(Input));
  const auto add_rows = [&](int head, int first, int last, const Weight* values, std::size_t apart, int i, int here) {
    for (int row = first; row < last; row += 4) {
      const auto* weights = reinterpret_cast<const Input*>(scores_of(head, row)) + i;
      float* to = result(out, head) + row * size;
      int part = 0;
      for (; part + T::kNumbers <= size; part += T::kNumbers) {
        add_values<T>(last - row, weights, weights_stride, here, values + part, apart, to + part, size);
      }
      for (int t = 0; t < here && part < size; ++t) {
        for (int r = 0; r < std::min(4, last - row); ++r) {
          const float weight =
              T::to_float(weights[static_cast<std::size_t>(r) * weights_stride + static_cast<std::size_t>(t)]);
          if (weight == 0.f) continue;
          const Weight* value = values + static_cast<std::size_t>(t) * apart;
          for (int n = part; n < size; ++n) to[r * size + n] += weight * T::to_float(value[n]);
        }
      }
    }
  };
  for (int i = 0; i < count; i += group) {
    const int here = std::min(group, count - i);
    if (differ(task.begin + i, task.begin + i + here)) {
      for (int t = 0; t < task.tokens; ++t) {
        for (int head = 0; head < task.heads; ++head) {
          for (int j = 0; j < here; ++j) {
            const char* value = slot(task, task.values, slot_of(task, t, task.begin + i + j));
            std::copy_n(reinterpret_cast<const Weight*>(value) + head * size, size, decoded + j * size);
          }
          add_rows(head, t * task.share, (t + 1) * task.share, decoded, static_cast<std::size_t>(size), i, here);
        }
      }
      continue;
    }
    const auto* values = is_plain ? reinterpret_cast<const Weight*>(slot(task, task.values, task.begin + i)) : decoded;
    for (int head = 0; head < task.heads; ++head, values += is_plain ? size : 0) {
      for (int t = 0; t < here && !is_plain; ++t) {
        decode_token<T>(task, task.values, task.value_scales, task.begin + i + t, head, decoded + t * size);
      }
      add_rows(head, 0, rows, values, stride, i, here);
    }
  }
  for (int head = 0; head < task.heads; ++head) {
    for (int row = 0; row < rows; ++row) {
      float* to = result(out, head) + row * size;
      for (int part = 0; part + T::kNumbers <= size; part += T::kNumbers) T::in_order(to + part);
    }
  }
}

}  // namespace sage::cpu::NAMESPACE
