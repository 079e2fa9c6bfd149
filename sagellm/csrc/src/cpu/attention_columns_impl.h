// Attention of many query rows by products of bfloat16 pairs. For `kernels_impl.h` alone, which says what it is compiled for.
//
// Queries lie in the lanes of vectors and keys in rows. So keys are read where they are, and what softmax does with the scores of
// a query is done for all of them side by side.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef DOT_BF16

constexpr int kColumnVectors = 3;
constexpr int kColumns = kColumnVectors * WIDTH;  // query rows that are computed together
constexpr int kColumnKeys = 128;                  // keys in a round: their weights and values stay in the first-level cache
constexpr int kRowsAtOnce = 8;

// Up to kColumns query rows of a key head.
struct Columns {
  int first, count;       // rows of the task
  std::int32_t* queries;  // pairs of numbers, [head size / 2][kColumns]
  float* totals;          // [head size][kColumns]
  float *tops, *sums;     // [kColumns]
};

inline std::size_t attend_columns_bytes(int rows, int heads, int head_size) {
  const auto all = static_cast<std::size_t>(heads * ((rows + kColumns - 1) / kColumns) * kColumns);
  const auto size = static_cast<std::size_t>(padded(head_size, 2)), keys = static_cast<std::size_t>(kColumnKeys);
  // queries, totals, tops and sums; scores; values in pairs, these in columns, and keys that are decoded
  return all * size * 6 + all * 8 + keys * kColumns * 4 + keys * size * 6 + 9 * 64;
}

// out[row][lane] (+)= pairs of a row times pairs of the columns, for `steps` of them. The next row lies `stride` bytes on and the
// next pair adjacent; with `is_across` the other way round.
template <int rows, int vectors, bool is_across>
void multiply_columns(const char* input, std::size_t stride, const void* columns, int steps, float* out, bool accumulate) {
  Vec sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = accumulate ? load(out + r * kColumns + v * WIDTH) : Vec{};
  }
  const auto* at = static_cast<const std::int32_t*>(columns);
  for (int s = 0; s < steps; ++s, at += kColumns, input += is_across ? stride : 4) {
    __m512bh column[vectors];
    for (int v = 0; v < vectors; ++v) column[v] = reinterpret_cast<__m512bh>(load_words(at + v * WIDTH));
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, input + static_cast<std::size_t>(r) * (is_across ? 4 : stride), 4);
      const auto number = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < vectors; ++v) BFloat16Dot::add(sums[r][v], column[v], number);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) store(out + r * kColumns + v * WIDTH, sums[r][v]);
  }
}

// kTile numbers of two tokens to pairs.
inline void pair_up(const std::uint16_t* first, const std::uint16_t* second, std::uint16_t* to) {
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kTile)));
  Halves a, b, low;
  std::memcpy(&a, first, sizeof(a));
  std::memcpy(&b, second, sizeof(b));
  for (int i = 0; i < kTile; ++i) low[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * kTile);
  const Halves pairs[2] = {__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + kTile / 2)};
  std::memcpy(to, pairs, sizeof(pairs));
}

// 2^x for x from -126 up to 0, within 8e-5 of it, where bfloat16 rounds by up to 4e-3: the best polynomial of the third degree
// between -1/2 and 1/2.
inline Vec rough_power_of_two(Vec x) {
  const Vec magic = broadcast(12582912.f);
  x = larger(x, broadcast(-126.f));
  const Vec shifted = x + magic, rest = x - (shifted - magic);
  Vec y = rest * 0.0551713f + 0.24261111f;
  y = y * rest + 0.69326103f;
  y = y * rest + 0.99992808f;
  return as_float(as_bits(y) + ((as_bits(shifted) - as_bits(magic)) << 23));
}

// Scores of keys from `begin` on, [count][kColumns], to weights in pairs of keys, [count / 2][kColumns], in place. What the
// columns summed up before is scaled to their new maxima.
template <int vectors>
void weigh_columns(const Attend& task, const Columns& columns, float* scores, int begin, int count) {
  constexpr float kLog2E = 1.44269504f;
  const int first_token = columns.first / task.share, last_token = (columns.first + columns.count - 1) / task.share;
  const bool all_seen = count % 2 == 0 && first_seen(task, last_token) <= begin && last_seen(task, first_token) >= begin + count;
  const int even = padded(count, 2);
  Vec top[vectors];
  for (int v = 0; v < vectors; ++v) top[v] = broadcast(kNone);
  if (all_seen && task.softcap == 0.f) {
    for (int k = 0; k < even; ++k) {
      for (int v = 0; v < vectors; ++v) top[v] = larger(top[v], load(scores + k * kColumns + v * WIDTH));
    }
  } else {
    IVec first[vectors], last[vectors];
    for (int lane = 0; lane < vectors * WIDTH; ++lane) {
      const int token = (columns.first + std::min(lane, columns.count - 1)) / task.share;
      first[lane / WIDTH][lane % WIDTH] = first_seen(task, token) - begin;
      last[lane / WIDTH][lane % WIDTH] = std::min(last_seen(task, token) - begin, count);
    }
    for (int k = 0; k < even; ++k) {
      for (int v = 0; v < vectors; ++v) {
        float* at = scores + k * kColumns + v * WIDTH;
        Vec score = load(at);
        if (task.softcap != 0.f) score = scaled(task, score);
        score = ((first[v] <= k) & (last[v] > k)) ? score : broadcast(kNone);
        store(at, score);
        top[v] = larger(top[v], score);
      }
    }
  }
  const float unit = task.softcap == 0.f ? task.scale : 1.f, by = unit * kLog2E;
  Vec offset[vectors], total[vectors]{};
  for (int v = 0; v < vectors; ++v) {
    const Vec before = load(columns.tops + v * WIDTH), now = larger(before, top[v] * unit);
    store(columns.tops + v * WIDTH, now);
    offset[v] = (now == broadcast(kNone) ? Vec{} : now) * kLog2E;
    if (maximum(as_float((before != now) & as_bits(broadcast(1.f)))) == 0.f) continue;
    const Vec shrink = before == now ? broadcast(1.f) : exponential(before - now);
    store(columns.sums + v * WIDTH, load(columns.sums + v * WIDTH) * shrink);
    for (int n = 0; n < task.head_size; ++n) {
      float* of_number = columns.totals + n * kColumns + v * WIDTH;
      store(of_number, load(of_number) * shrink);
    }
  }
  const IVec order = indices([](int i) { return i | (i + WIDTH) << 16; });
  const auto each_pair = [&](auto weight_of) {
    for (int k = 0; k < even; k += 2) {
      for (int v = 0; v < vectors; ++v) {
        const float* at = scores + k * kColumns + v * WIDTH;
        const Vec one = weight_of(load(at), offset[v]), other = weight_of(load(at + kColumns), offset[v]);
        total[v] += one;
        total[v] += other;
        const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(other), reinterpret_cast<__m512>(one));
        const __m512i pairs = _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(both));
        _mm512_storeu_si512(scores + k / 2 * kColumns + v * WIDTH, pairs);
      }
    }
  };
  if (all_seen) {
    each_pair([&](Vec score, Vec from) { return rough_power_of_two(score * by - from); });
  } else {
    each_pair([&](Vec score, Vec from) {
      return score == broadcast(kNone) ? Vec{} : rough_power_of_two(score * by - from);
    });
  }
  for (int v = 0; v < vectors; ++v) store(columns.sums + v * WIDTH, load(columns.sums + v * WIDTH) + total[v]);
}

#ifdef MATRIX_UNIT

inline bool is_for_unit(int head_size) { return head_size % (2 * kUnitPairs) == 0; }

// A register of rows times the columns: sums in registers 0 to 2, rows in 3, columns in 4 to 6.
template <int vectors>
void multiply_columns_in_unit(const char* rows, std::size_t stride, const std::int32_t* columns, int steps, float* out,
                              bool accumulate) {
  constexpr std::size_t kBytes = kColumns * 4;
  if (accumulate) {
    _tile_loadd(0, out, kBytes);
    if constexpr (vectors > 1) _tile_loadd(1, out + WIDTH, kBytes);
    if constexpr (vectors > 2) _tile_loadd(2, out + 2 * WIDTH, kBytes);
  } else {
    _tile_zero(0);
    if constexpr (vectors > 1) _tile_zero(1);
    if constexpr (vectors > 2) _tile_zero(2);
  }
  for (int s = 0; s < steps; ++s, rows += 64, columns += kUnitPairs * kColumns) {
    _tile_loadd(3, rows, stride);
    _tile_loadd(4, columns, kBytes);
    _tile_dpbf16ps(0, 3, 4);
    if constexpr (vectors > 1) {
      _tile_loadd(5, columns + WIDTH, kBytes);
      _tile_dpbf16ps(1, 3, 5);
    }
    if constexpr (vectors > 2) {
      _tile_loadd(6, columns + 2 * WIDTH, kBytes);
      _tile_dpbf16ps(2, 3, 6);
    }
  }
  _tile_stored(0, out, kBytes);
  if constexpr (vectors > 1) _tile_stored(1, out + WIDTH, kBytes);
  if constexpr (vectors > 2) _tile_stored(2, out + 2 * WIDTH, kBytes);
}

// As `attend_round`. `values`: [head size][kColumnKeys / 2], pairs of tokens in whole kUnitPairs.
template <int vectors>
void attend_round_in_unit(const Attend& task, const Columns& columns, const char* const* key_rows, std::size_t key_stride,
                          const std::int32_t* values, float* scores, int begin, int count) {
  written();
  for (int k = 0; k < count; k += kUnitRows) {
    multiply_columns_in_unit<vectors>(key_rows[k / kRowsAtOnce], key_stride, columns.queries, task.head_size / (2 * kUnitPairs),
                                      scores + k * kColumns, false);
  }
  weigh_columns<vectors>(task, columns, scores, begin, count);
  const int pairs = padded(count, 2) / 2, steps = padded(pairs, kUnitPairs) / kUnitPairs;
  std::fill(scores + pairs * kColumns, scores + steps * kUnitPairs * kColumns, 0.f);
  written();
  for (int n = 0; n < task.head_size; n += kUnitRows) {
    multiply_columns_in_unit<vectors>(reinterpret_cast<const char*>(values + n * (kColumnKeys / 2)), kColumnKeys * 2,
                                      reinterpret_cast<const std::int32_t*>(scores), steps, columns.totals + n * kColumns, true);
  }
}

#endif

// `keys`: rows, `key_stride` bytes apart, a block of kRowsAtOnce of them after the other at `key_rows`. `values`: pairs of tokens,
// [count / 2][head size].
template <int vectors>
void attend_round(const Attend& task, const Columns& columns, const char* const* key_rows, std::size_t key_stride,
                  const std::int32_t* values, float* scores, int begin, int count) {
  const int size = task.head_size;
  for (int k = 0; k < count; k += kRowsAtOnce) {
    multiply_columns<kRowsAtOnce, vectors, false>(key_rows[k / kRowsAtOnce], key_stride, columns.queries, padded(size, 2) / 2,
                                                  scores + k * kColumns, false);
  }
  weigh_columns<vectors>(task, columns, scores, begin, count);
  const int pairs = padded(count, 2) / 2;
  const std::size_t stride = static_cast<std::size_t>(size) * 4;
  int n = 0;
  for (; n + kRowsAtOnce <= size; n += kRowsAtOnce) {
    multiply_columns<kRowsAtOnce, vectors, true>(reinterpret_cast<const char*>(values + n), stride, scores, pairs,
                                                 columns.totals + n * kColumns, true);
  }
  for (; n < size; ++n) {
    multiply_columns<1, vectors, true>(reinterpret_cast<const char*>(values + n), stride, scores, pairs,
                                       columns.totals + n * kColumns, true);
  }
}

// to[column][row] = from[row][column] of words, for up to WIDTH rows; rows beyond them are like the last one.
inline void turn(const void* from, std::size_t row_bytes, int rows, int columns, void* to, std::size_t to_bytes, int to_rows) {
  const auto row_at = [&](int row) { return static_cast<const char*>(from) + static_cast<std::size_t>(row) * row_bytes; };
  const auto put_at = [&](int column) { return static_cast<char*>(to) + static_cast<std::size_t>(column) * to_bytes; };
  int column = 0;
  for (; column + WIDTH <= columns; column += WIDTH) {
    IVec words[WIDTH];
    for (int i = 0; i < WIDTH; ++i) words[i] = load_words(row_at(std::min(i, rows - 1)) + column * 4);
    transpose(words);
    for (int i = 0; i < WIDTH; ++i) {
      if (to_rows == WIDTH)
        *reinterpret_cast<IVecAt*>(put_at(column + i)) = words[i];
      else
        std::memcpy(put_at(column + i), &words[i], static_cast<std::size_t>(to_rows) * 4);
    }
  }
  for (; column < columns; ++column) {
    for (int i = 0; i < to_rows; ++i) std::memcpy(put_at(column) + i * 4, row_at(std::min(i, rows - 1)) + column * 4, 4);
  }
}

// Online softmax over rounds of keys (Milakov and Gimelshein, 2018; FlashAttention). A row gets the same numbers whatever rows
// and keys it does not see are beside it.
inline void attend_columns(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  using Number = std::uint16_t;
  const int rows = task.tokens * task.share, size = task.head_size, even_size = padded(size, 2);
  const int groups = (rows + kColumns - 1) / kColumns;  // of columns
  const auto row_bytes = static_cast<std::size_t>(even_size) * sizeof(Number);
  const bool is_plain = task.format == Format::kPlain;
#ifdef MATRIX_UNIT
  const bool in_unit = is_for_unit(size);
  const UnitShapes shapes(kUnitRows, kUnitRows, kUnitPairs);
#else
  constexpr bool in_unit = false;
#endif
  const bool in_place = is_plain && size == even_size && (1 << task.block_shift) >= (in_unit ? 2 : 1) * kRowsAtOnce;
  const std::size_t head_bytes = bytes_of_head(task.format, size, sizeof(Number));
  Scratch parts(scratch);
  const auto all = static_cast<std::size_t>(task.heads * groups * kColumns), numbers = static_cast<std::size_t>(even_size);
  auto* queries = parts.take<std::int32_t>(all * numbers / 2);
  auto* totals = parts.take<float>(all * numbers);
  auto *tops = parts.take<float>(all), *of_sums = parts.take<float>(all);
  auto* scores = parts.take<float>(static_cast<std::size_t>(kColumnKeys * kColumns));
  auto* values = parts.take<std::int32_t>(kColumnKeys / 2 * numbers);
  [[maybe_unused]] auto* of_numbers = parts.take<std::int32_t>(kColumnKeys / 2 * numbers);  // values of a round by number
  auto* decoded = parts.take<Number>(kColumnKeys * numbers);  // keys or values of a round that are not read in place
  std::fill_n(totals, all * numbers, 0.f);
  std::fill_n(tops, all, kNone);
  std::fill_n(of_sums, all, 0.f);
  const auto columns_of = [&](int head, int group) {
    const auto at = static_cast<std::size_t>((head * groups + group) * kColumns);
    const int first = group * kColumns;
    return Columns{first, std::min(kColumns, rows - first), queries + at * numbers / 2, totals + at * numbers, tops + at,
                   of_sums + at};
  };
  const auto query_of = [&](int head, int row) {
    return static_cast<const Number*>(task.query) + static_cast<std::size_t>(row / task.share) * task.query_stride +
           static_cast<std::size_t>((head * task.share + row % task.share) * size);
  };
  auto* in_rows = reinterpret_cast<Number*>(scores);
  for (int head = 0; head < task.heads; ++head) {
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      for (int lane = 0; lane < columns.count; lane += WIDTH) {
        const int here = std::min(WIDTH, columns.count - lane);
        for (int i = 0; i < here; ++i) {
          std::copy_n(query_of(head, columns.first + lane + i), size, in_rows + i * even_size);
          if (size < even_size) in_rows[i * even_size + size] = 0;
        }
        turn(in_rows, row_bytes, here, even_size / 2, columns.queries + lane, kColumns * 4, WIDTH);
      }
    }
  }
  // Rounds begin at the same keys whatever the first query is: sums then run in the same order.
  const int first = std::max(task.begin, first_seen(task, 0)) / kColumnKeys * kColumnKeys,
            last = std::min(task.end, task.first_position + task.tokens);
  const auto attend_keys = [&](int head, int begin) {
    const int count = std::min(kColumnKeys, last - begin);
    const auto bytes_before = static_cast<std::size_t>(head) * head_bytes;
    for (int k = 0; k < count; k += 2) {
      const Number* tokens[2];
      for (int i = 0; i < 2; ++i) {  // the weight of a token beyond the last one is 0
        const int token = begin + std::min(k + i, count - 1);
        tokens[i] = decoded + i * even_size;
        if (is_plain)
          tokens[i] = reinterpret_cast<const Number*>(slot(task, task.values, token) + bytes_before);
        else
          decode_token<BFloat16Dot>(task, task.values, task.value_scales, token, head, decoded + i * even_size);
      }
      auto* to = reinterpret_cast<Number*>(values + k / 2 * size);
      int n = 0;
      for (; n + kTile <= size; n += kTile) pair_up(tokens[0] + n, tokens[1] + n, to + 2 * n);
      for (; n < size; ++n) {
        to[2 * n] = tokens[0][n];
        to[2 * n + 1] = tokens[1][n];
      }
    }
#ifdef MATRIX_UNIT
    if (in_unit) {
      const int pairs = padded(count, 2) / 2, whole = padded(pairs, kUnitPairs);
      std::fill(values + pairs * size, values + whole * size, 0);
      for (int pair = 0; pair < whole; pair += kUnitPairs) {
        turn(values + pair * size, row_bytes * 2, kUnitPairs, size, of_numbers + pair, kColumnKeys * 2, kUnitPairs);
      }
    }
#endif
    const char* key_rows[kColumnKeys / kRowsAtOnce];
    for (int k = 0; k < count; ++k) {
      const bool is_first = k % kRowsAtOnce == 0;
      Number* to = decoded + k * even_size;
      if (in_place) {
        if (is_first) key_rows[k / kRowsAtOnce] = slot(task, task.keys, begin + k) + bytes_before;
        continue;
      }
      if (is_first) key_rows[k / kRowsAtOnce] = reinterpret_cast<const char*>(to);
      if (is_plain)
        std::memcpy(to, slot(task, task.keys, begin + k) + bytes_before, head_bytes);
      else
        decode_key<BFloat16Dot>(task, begin + k, head, to);
      if (size < even_size) to[size] = 0;
    }
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      const int first_token = columns.first / task.share, last_token = (columns.first + columns.count - 1) / task.share;
      if (last_seen(task, last_token) <= begin || first_seen(task, first_token) >= begin + count) continue;
      const int vectors = (columns.count + WIDTH - 1) / WIDTH;
      auto attend = vectors == 3 ? attend_round<3> : vectors == 2 ? attend_round<2> : attend_round<1>;
#ifdef MATRIX_UNIT
      if (in_unit) attend = vectors == 3 ? attend_round_in_unit<3> : vectors == 2 ? attend_round_in_unit<2> : attend_round_in_unit<1>;
#endif
      attend(task, columns, key_rows, in_place ? task.slot_stride : row_bytes, in_unit ? of_numbers : values, scores, begin, count);
    }
  };
  each_round(task, first, last, kColumnKeys, head_bytes, attend_keys);
  for (int head = 0; head < task.heads; ++head) {
    const std::size_t of_head = static_cast<std::size_t>(head) * task.result_stride;
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      std::copy_n(columns.tops, columns.count, max + of_head + columns.first);
      std::copy_n(columns.sums, columns.count, sums + of_head + columns.first);
      for (int n = 0; n < size; n += WIDTH) {
        for (int lane = 0; lane < columns.count; lane += WIDTH) {
          turn(columns.totals + n * kColumns + lane, kColumns * 4, std::min(WIDTH, size - n), std::min(WIDTH, columns.count - lane),
               out + of_head + (columns.first + lane) * size + n, static_cast<std::size_t>(size) * 4, std::min(WIDTH, size - n));
        }
      }
    }
  }
}

#endif

}  // namespace sage::cpu::NAMESPACE
