// Attention of many query rows, as those of prompts. For `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

constexpr int kRound = 256;  // keys in a round

inline std::size_t attend_many_bytes(int rows, int heads, int head_size) {
  const auto r = static_cast<std::size_t>(rows), d = static_cast<std::size_t>(padded(head_size, kTile));
  return aligned_to_64(static_cast<std::size_t>(heads) * r * d * 4) * 2 + aligned_to_64(r * kRound * 4) * 2 +
         aligned_to_64(kRound * d * 4) * 2 + aligned_to_64(r * 12);
}

// The tile of `multiply` for kTile keys of a head from `begin` on, whose codes lie in groups. Keys beyond `last` are any.
template <class T, Format format>
void pack_groups(const Attend& task, int begin, int last, typename T::Weight* tile) {
  constexpr int kParts = format == Format::kLevels4 ? 2 : 1;
  const int words = static_cast<int>(bytes_of_head(format, task.head_size, 0) / 4);
  for (int key = 0; key < kTile; key += kKeyGroup) {
    const int group = std::min(begin + key, (last - 1) / kKeyGroup * kKeyGroup);
    float scales[kKeyGroup], moves[kKeyGroup];  // a number is scale * code - scale * zero
    const char* slots[kKeyGroup];
    for (int i = 0; i < kKeyGroup; ++i) {
      typename T::Weight pair[2];
      std::memcpy(pair, scales_at(task, task.key_scales, group + i), sizeof(pair));
      scales[i] = T::to_float(pair[0]);
      moves[i] = scales[i] * T::to_float(pair[1]);
      slots[i] = slot(task, task.keys, group + i);
    }
    for (int word = 0; word < words; ++word) {
      const int at = word * kKeyGroup;
      for (int lane = 0; lane < kKeyGroup; lane += WIDTH) {
        IVec codes;
        if ((at + lane) % words + WIDTH <= words) {
          codes = load_words(slots[(at + lane) / words] + (at + lane) % words * 4);
        } else {
          std::int32_t of_slots[WIDTH];
          for (int i = 0; i < WIDTH; ++i) {
            const int place = at + lane + i;
            std::memcpy(of_slots + i, slots[place / words] + place % words * 4, 4);
          }
          codes = load_words(of_slots);
        }
        const Vec scale = load(scales + lane), move = load(moves + lane);
        const auto number = [&](int part, int byte) {
          const IVec code = kParts == 1 ? (codes >> (8 * byte)) & 255 : (codes >> (8 * byte + 4 * part)) & 15;
          return __builtin_convertvector(code, Vec) * scale - move;
        };
        for (int part = 0; part < kParts; ++part) {
          for (int byte = 0; byte < 4; byte += 2) {
            const int at_number = part * (task.head_size / 2) + word * 4 + byte;
            store_pair<T>(tile + at_number * kTile + (key + lane) * T::kStep, number(part, byte), number(part, byte + 1));
          }
        }
      }
    }
  }
}

// Keys [kTile][words] of 4 bytes to a tile, [words][kTile].
inline void pack_keys(const char* const (&keys)[kTile], int words, void* tile) {
  auto* to = static_cast<std::int32_t*>(tile);
  int word = 0;
  for (; word + WIDTH <= words; word += WIDTH) {
    for (int j = 0; j < kTile; j += WIDTH) {
      IVec rows[WIDTH];
      for (int i = 0; i < WIDTH; ++i) rows[i] = load_words(keys[j + i] + word * 4);
      transpose(rows);
      for (int i = 0; i < WIDTH; ++i) *reinterpret_cast<IVecAt*>(to + (word + i) * kTile + j) = rows[i];
    }
  }
  for (; word < words; ++word) {
    for (int j = 0; j < kTile; ++j) std::memcpy(to + word * kTile + j, keys[j] + word * 4, 4);
  }
}

// Online softmax over rounds of keys (Milakov and Gimelshein, 2018; FlashAttention).
template <class T>
void attend_many(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Weight = typename T::Weight;
  using Input = typename T::Input;
  const int rows = task.tokens * task.share, size = task.head_size;
  const int wide = padded(size, kTile), inputs = padded(size, 2);
  const auto r_count = static_cast<std::size_t>(rows), wide_count = static_cast<std::size_t>(wide),
             of_heads = r_count * wide_count * static_cast<std::size_t>(task.heads);
  const bool is_plain = task.format == Format::kPlain;
  const std::size_t head_bytes = bytes_of_head(task.format, size, sizeof(Weight));
  Scratch parts(scratch);
  auto* queries = parts.take<Input>(of_heads);
  auto* total = parts.take<float>(of_heads);
  auto* scores = parts.take<float>(r_count * kRound);
  auto* weights = parts.take<Input>(r_count * kRound);
  auto* packed = parts.take<Weight>(kRound * wide_count);
  auto* decoded = parts.take<Weight>(kRound * wide_count);  // keys or values of a round that are of few bits
  for (int each = 0; each < task.heads * rows; ++each) {
    const int head = each / rows, row = each % rows;
    std::copy_n(query_of<Input>(task, head, row), size, queries + each * inputs);
    if (size % 2 != 0) queries[each * inputs + size] = T::from_float(0.f);
    max[static_cast<std::size_t>(head) * task.result_stride + static_cast<std::size_t>(row)] = kNone;
    sums[static_cast<std::size_t>(head) * task.result_stride + static_cast<std::size_t>(row)] = 0.f;
  }
  std::fill_n(total, of_heads, 0.f);
  // Rounds begin at the same keys whatever the first query is: sums then run in the same order.
  const int first = std::max(task.begin, first_seen(task, 0)) / kRound * kRound,
            last = std::min(task.end, task.first_position + task.tokens);
  const auto attend_round = [&](int head, int begin) {
    const int count = std::min(kRound, last - begin), keys = padded(count, kTile);
    const Input* of_queries = queries + head * rows * inputs;
    float* of_total = total + head * rows * wide;
    float *of_max = max + static_cast<std::size_t>(head) * task.result_stride,
          *of_sums = sums + static_cast<std::size_t>(head) * task.result_stride;
    const auto row_of = [&](const char* cache, int i) {
      if (!is_plain) return reinterpret_cast<const char*>(decoded + i * size);
      return slot(task, cache, begin + i) + static_cast<std::size_t>(head) * head_bytes;
    };
    const bool is_grouped = has_key_groups(task.format);
    for (int i = 0; i < count && !is_plain && !is_grouped; ++i) {
      decode_token<T>(task, task.keys, task.key_scales, begin + i, head, decoded + i * size);
    }
    for (int i = 0; i < keys; i += kTile) {
      Weight* tile = packed + i * inputs;
      if (is_grouped) {
        Attend of_head = task;
        of_head.keys += static_cast<std::size_t>(head) * head_bytes;
        of_head.key_scales += static_cast<std::size_t>(head) * 2 * sizeof(Weight);
        const auto pack = task.format == Format::kLevels4 ? pack_groups<T, Format::kLevels4> : pack_groups<T, Format::kLevels8>;
        pack(of_head, begin + i, last, tile);
      } else {
        const char* key[kTile];
        for (int j = 0; j < kTile; ++j) key[j] = row_of(task.keys, std::min(i + j, count - 1));
        pack_keys(key, size / T::kStep, tile);
        for (int j = 0; j < kTile && size % T::kStep != 0; ++j) {
          tile[(size - 1) * kTile + j * T::kStep] = reinterpret_cast<const Weight*>(key[j])[size - 1];
          tile[(size - 1) * kTile + j * T::kStep + 1] = Weight{};
        }
      }
      multiply<T>(of_queries, static_cast<std::size_t>(inputs), rows, tile, 1, T::kStep == 2 ? inputs : size, scores + i,
                  kRound, false);
    }
    for (int row = 0; row < rows; ++row) {
      float* of_row = scores + row * kRound;
      const float before = of_max[row];
      float weight = 0.f;
      of_max[row] = std::max(before, mask(task, row, of_row, begin, keys));
      if (of_max[row] == kNone)
        std::fill_n(of_row, keys, 0.f);
      else
        weight = weigh(of_row, keys, of_max[row]);
      to_input<T>(of_row, nullptr, keys, weights + row * kRound);
      const float shrink = before == kNone ? 0.f : std::exp(before - of_max[row]);
      of_sums[row] = of_sums[row] * shrink + weight;
      if (shrink != 1.f) {
        for (int n = 0; n < wide; ++n) of_total[row * wide + n] *= shrink;
      }
    }
    const int even = padded(count, 2);
    for (int i = 0; i < count && !is_plain; ++i) {
      decode_token<T>(task, task.values, task.value_scales, begin + i, head, decoded + i * size);
    }
    for (int n = 0; n < size; n += kTile) {
      const int numbers = std::min(kTile, size - n);
      const auto value = [&](int i) {
        return reinterpret_cast<const Weight*>(row_of(task.values, std::min(i, count - 1))) + n;
      };
      for (int i = 0; i < even; i += T::kStep) {
        Weight* to = packed + i * kTile;
        if (numbers < kTile) std::fill_n(to, kTile * T::kStep, Weight{});
        if constexpr (T::kStep == 1) {
          std::copy_n(value(i), numbers, to);
        } else {  // the weight of a token beyond the last one is 0
          const Weight *even_value = value(i), *odd_value = value(i + 1);
          for (int j = 0; j < numbers; ++j) {
            const std::uint32_t pair = even_value[j] | static_cast<std::uint32_t>(odd_value[j]) << 16;
            std::memcpy(to + 2 * j, &pair, 4);
          }
        }
      }
      multiply<T>(weights, kRound, rows, packed, 1, even, of_total + n, static_cast<std::size_t>(wide), true);
    }
  };
  each_round(task, first, last, kRound, head_bytes, attend_round);
  for (int each = 0; each < task.heads * rows; ++each) {
    std::copy_n(total + each * wide, size, out + static_cast<std::size_t>(each / rows) * task.result_stride +
                                               static_cast<std::size_t>(each % rows * size));
  }
}

}  // namespace sage::cpu::NAMESPACE
