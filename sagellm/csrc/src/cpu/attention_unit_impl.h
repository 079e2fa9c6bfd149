// Attention of decode steps by the matrix unit. For `kernels_impl.h` alone, which says what it is compiled for.
//
// Scores: keys are the rows of a register as they lie in the cache, and queries its columns. Values: weights are the rows, and
// pairs of tokens are brought side by side first. A result depends on its own row alone, as that of `attend_few`.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef MATRIX_UNIT

constexpr int kUnitKeys = 2 * kUnitRows;  // keys of a step
constexpr int kUnitPart = 64;             // numbers of a head that are computed together
constexpr int kUnitStage = 64;            // values that are brought side by side before they are multiplied

inline bool takes_unit(const Attend& task) { return task.format == Format::kPlain && task.head_size % kUnitPart == 0; }

// Query rows of a register, padded so that a vector holds whole keys of a result.
inline int columns_of(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : kUnitRows; }

inline std::size_t attend_unit_bytes(int rows, int heads, int head_size) {
  const auto all = static_cast<std::size_t>(heads * rows), size = static_cast<std::size_t>(head_size);
  const std::size_t weights = all * static_cast<std::size_t>(kSplit + kUnitKeys) * 4;
  const std::size_t queries = static_cast<std::size_t>(heads) * size * kUnitRows * 2;
  return weights + queries + kUnitKeys * size * 2 + kUnitStage * kUnitPart * 2 + kUnitKeys * kUnitRows * (4 + 2) + 8 * 64;
}

// Results [kUnitRows keys][columns] to scores[row][key].
template <int columns>
void put_scores(const float* results, int first, int last, float* scores, int wide) {
  constexpr int kKeys = kUnitRows / columns;  // of a vector
  IVec lines[columns];
  for (int i = 0; i < columns; ++i) lines[i] = load_words(results + i * WIDTH);
  transpose(lines);  // lane columns * a + i of a row is key kKeys * i + a
  const IVec order = indices([](int key) { return columns * (key % kKeys) + key / kKeys; });
  for (int row = first; row < last; ++row) store(scores + row * wide, as_float(__builtin_shuffle(lines[row], order)));
}

inline void put_scores(int columns, const float* results, int first, int last, float* scores, int wide) {
  const auto put = columns == 4 ? put_scores<4> : columns == 8 ? put_scores<8> : put_scores<kUnitRows>;
  put(results, first, last, scores, wide);
}

// Query rows of a head to pairs of numbers, [head size / 2][columns].
inline void put_queries(const Attend& task, int head, int columns, std::int32_t* to) {
  const int rows = task.tokens * task.share, words = task.head_size / 2;
  std::fill_n(to, words * columns, 0);
  for (int row = 0; row < rows; ++row) {
    const auto* query = query_of<std::uint16_t>(task, head, row);
    for (int word = 0; word < words; ++word) std::memcpy(to + word * columns + row, query + 2 * word, 4);
  }
}

// The keys or values of kUnitRows tokens of a head.
struct Lines {
  const char* at;
  std::size_t stride;  // bytes
};

// `token(i)`: where in the cache the task's key number i of these is. `buffer`: for lines that are not adjacent.
template <class F>
Lines lines_of(const Attend& task, const char* cache, int head, bool are_adjacent, F token, char* buffer) {
  const std::size_t bytes = static_cast<std::size_t>(task.head_size) * 2, before = static_cast<std::size_t>(head) * bytes;
  if (are_adjacent) return {slot(task, cache, token(0)) + before, task.slot_stride};
  for (int i = 0; i < kUnitRows; ++i) {
    std::memcpy(buffer + static_cast<std::size_t>(i) * bytes, slot(task, cache, token(i)) + before, bytes);
  }
  return {buffer, bytes};
}

// As `attend_few`, of a plain cache of bfloat16.
inline void attend_in_unit(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  const int rows = task.tokens * task.share, size = task.head_size, count = task.end - task.begin;
  const int wide = padded(count, kUnitKeys), columns = columns_of(rows), words = size / 2;
  const std::size_t slot_bytes = static_cast<std::size_t>(task.heads * size) * 2;
  const bool has_runs = (1 << task.block_shift) >= kUnitRows;
  Scratch parts(scratch);
  auto* scores = parts.take<float>(static_cast<std::size_t>(task.heads * rows * wide));  // [heads][rows][wide]
  auto* queries = parts.take<std::int32_t>(static_cast<std::size_t>(task.heads * words * kUnitRows));
  auto* buffer = parts.take<char>(static_cast<std::size_t>(kUnitKeys * size) * 2);
  auto* pairs = parts.take<std::uint16_t>(kUnitStage * kUnitPart);      // of values
  auto* results = parts.take<float>(kUnitKeys * kUnitRows);             // scores as the unit writes them
  auto* of_token = parts.take<std::uint16_t>(kUnitKeys * kUnitRows);    // weights of one token of a tree
  const auto scores_of = [&](int head) { return scores + head * rows * wide; };
  const auto result = [&](float* of, int head) { return of + static_cast<std::size_t>(head) * task.result_stride; };
  for (int head = 0; head < task.heads; ++head) {
    std::fill_n(result(out, head), rows * size, 0.f);
    std::fill_n(result(max, head), rows, kNone);
    std::fill_n(result(sums, head), rows, 0.f);
  }
  if (task.depths == nullptr && first_seen(task, 0) >= task.end) return;  // the window has passed these keys
  const auto differ = [&](int i, int number) {  // as in `attend_few`
    return task.depths != nullptr && task.begin + i + number > task.first_new && task.begin + i < task.end;
  };
  // Lines of `number` keys from i on, as token `t` of a tree sees them; -1: as they lie.
  const auto lines = [&](const char* cache, int head, int i, int t, char* to) {
    const auto token = [&](int j) {
      const int key = std::min(task.begin + i + j, task.end - 1);
      return t < 0 ? key : slot_of(task, t, key);
    };
    return lines_of(task, cache, head, t < 0 && has_runs && i + kUnitRows <= count, token, to);
  };
  const std::size_t half = static_cast<std::size_t>(kUnitRows * size) * 2;

  read_ahead(task, task.keys, slot_bytes);
  for (int head = 0; head < task.heads; ++head) put_queries(task, head, columns, queries + head * words * columns);
  {
    const UnitShapes shapes(kUnitRows, kUnitRows, kUnitPairs, columns);
    const auto score = [&](int head, int i, int t) {
      const Lines first = lines(task.keys, head, i, t, buffer), second = lines(task.keys, head, i + kUnitRows, t, buffer + half);
      const std::int32_t* query = queries + head * words * columns;
      const auto column_bytes = static_cast<std::size_t>(columns) * 4;
      written();
      _tile_zero(0);
      _tile_zero(1);
      for (int number = 0; number < size; number += 2 * kUnitPairs, query += kUnitPairs * columns) {
        _tile_loadd(6, query, column_bytes);
        _tile_loadd(4, first.at + number * 2, first.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, second.at + number * 2, second.stride);
        _tile_dpbf16ps(1, 5, 6);
      }
      _tile_stored(0, results, column_bytes);
      _tile_stored(1, results + kUnitRows * columns, column_bytes);
      written();
      const int from = std::max(t, 0) * task.share, to = t < 0 ? rows : from + task.share;
      put_scores(columns, results, from, to, scores_of(head) + i, wide);
      put_scores(columns, results + kUnitRows * columns, from, to, scores_of(head) + i + kUnitRows, wide);
    };
    for (int i = 0; i < wide; i += kUnitKeys) {
      read_ahead(task, task.values, slot_bytes, i / kUnitKeys, wide / kUnitKeys);  // while keys are multiplied
      for (int head = 0; head < task.heads; ++head) {
        if (!differ(i, kUnitKeys)) score(head, i, -1);
        for (int t = 0; differ(i, kUnitKeys) && t < task.tokens; ++t) score(head, i, t);
      }
    }
  }

  for (int head = 0; head < task.heads; ++head) {
    weigh_rows<BFloat16Dot>(task, rows, scores_of(head), wide, result(max, head), result(sums, head));
  }

  const UnitShapes shapes(rows, rows, kUnitPairs);
  const auto weight_bytes = static_cast<std::size_t>(wide) * 4;
  for (int head = 0; head < task.heads; ++head) {
    const auto* weights = reinterpret_cast<const char*>(scores_of(head));  // bfloat16 by now, rows as far apart as the scores
    for (int part = 0; part < size; part += kUnitPart) {
      // Values of tokens from i on, in pairs, to `to`.
      const auto pair_values = [&](int i, int t, std::uint16_t* to) {
        for (const int from : {i, i + kUnitRows}) {
          const Lines values = lines(task.values, head, from, t, buffer);
          for (int j = 0; j < kUnitRows; j += 2, to += 2 * kUnitPart) {
            const char* value = values.at + static_cast<std::size_t>(j) * values.stride + part * 2;
            pair_tokens(value, value + values.stride, to);
            pair_tokens(value + 2 * kTile, value + values.stride + 2 * kTile, to + 2 * kTile);
          }
        }
      };
      const auto add = [&](const void* rows_of_weights, std::size_t stride, const std::uint16_t* values) {
        written();
        _tile_loadd(4, rows_of_weights, stride);
        _tile_loadd(6, values, kUnitPart * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 2 * WIDTH, kUnitPart * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + 4 * WIDTH, kUnitPart * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, values + 6 * WIDTH, kUnitPart * 4);
        _tile_dpbf16ps(3, 4, 7);
      };
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int i = 0; i < wide; i += kUnitStage) {
        const int end = std::min(i + kUnitStage, wide);
        for (int j = i; j < end; j += kUnitKeys) {
          if (!differ(j, kUnitKeys)) pair_values(j, -1, pairs + (j - i) * kUnitPart);
        }
        for (int j = i; j < end; j += kUnitKeys) {
          if (!differ(j, kUnitKeys)) {
            add(weights + j * 2, weight_bytes, pairs + (j - i) * kUnitPart);
            continue;
          }
          for (int t = 0; t < task.tokens; ++t) {  // the rows of other tokens add nothing
            pair_values(j, t, pairs + (j - i) * kUnitPart);
            std::fill_n(of_token, kUnitKeys * kUnitRows, std::uint16_t{0});
            for (int row = t * task.share; row < (t + 1) * task.share; ++row) {
              std::memcpy(of_token + row * kUnitKeys, weights + static_cast<std::size_t>(row) * weight_bytes + j * 2, kUnitKeys * 2);
            }
            add(of_token, kUnitKeys * 2, pairs + (j - i) * kUnitPart);
          }
        }
      }
      float* to = result(out, head) + part;
      const auto out_bytes = static_cast<std::size_t>(size) * 4;
      _tile_stored(0, to, out_bytes);
      _tile_stored(1, to + WIDTH, out_bytes);
      _tile_stored(2, to + 2 * WIDTH, out_bytes);
      _tile_stored(3, to + 3 * WIDTH, out_bytes);
      written();
      for (int row = 0; row < rows; ++row) BFloat16Dot::in_order(to + row * size);
    }
  }
}

#endif

}  // namespace sage::cpu::NAMESPACE
