// Attention of many query rows by products of bfloat16 pairs. For `kernels_impl.h` alone, which says what it is compiled for.
//
// Queries lie in the lanes of vectors and keys in rows. So keys are read where they are, and what softmax does with the scores of
// a query is done for all of them side by side. The matrix unit takes weights as rows: vectors turn them before they store them.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

#ifdef DOT_BF16

constexpr int kColumnVectors = 3;
constexpr int kColumns = kColumnVectors * WIDTH;  // query rows that are computed together
constexpr int kColumnKeys = 128;                  // keys in a round: their weights and values stay in the first-level cache
constexpr int kRowsAtOnce = 8;
constexpr int kPairedKeys = 2 * WIDTH;            // whose weights are made together

// Up to kColumns query rows of a key head.
struct Columns {
  int first, count;       // rows of the task
  std::int32_t* queries;  // pairs of numbers, [head size / 2][kColumns]
  float* totals;          // [head size][kColumns]; with the matrix unit [kColumns][head size]
  float *tops, *sums;     // [kColumns]
};

inline std::size_t attend_columns_bytes(int rows, int heads, int head_size) {
  const auto all = static_cast<std::size_t>(heads * ((rows + kColumns - 1) / kColumns) * kColumns);
  const auto size = static_cast<std::size_t>(padded(head_size, 2)), keys = static_cast<std::size_t>(kColumnKeys);
  // queries, totals, tops and sums; scores and weights; values in pairs, and keys that are decoded
  return all * size * 6 + all * 8 + keys * kColumns * 6 + keys * size * 4 + size * 4 + 10 * 64;
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

// Weights are cut to bfloat16, which takes off so much in the mean. They are made as much larger before.
constexpr float kCutOff = 1.0028f;

// kCutOff * 2^x for x up to 0, within 7e-4 of it, where bfloat16 is off by up to 8e-3; 0 below -127. `bits`: (x + 127) * 2^23.
// For x = n + f the float with these bits is 2^n (1 + f). The best polynomial of the third degree makes 2^f of 1 + f.
inline Vec rough_power_of_two(Vec bits) {
  const auto positive = reinterpret_cast<Vec>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(bits), _mm512_setzero_ps()));
  const IVec whole = __builtin_convertvector(positive, IVec);
  const Vec mantissa = as_float((whole & 0x7fffff) | 0x3f800000);
  Vec by = mantissa * (-0.10644571f * kCutOff) + 0.70747595f * kCutOff;
  by = by * mantissa - 1.3773079f * kCutOff;
  by = by * mantissa + 1.77561493f * kCutOff;
  return as_float(whole) * by;
}

// Which keys of a round, `count` of them from `begin` on, the columns see.
template <int vectors>
struct Seen {
  bool all;  // all of them, as they are
  IVec first[vectors], last[vectors];

  Seen(const Attend& task, const Columns& columns, int begin, int count) {
    const auto token_of = [&](int lane) { return (columns.first + std::min(lane, columns.count - 1)) / task.share; };
    all = count % kPairedKeys == 0 && task.softcap == 0.f && first_seen(task, token_of(columns.count - 1)) <= begin &&
          last_seen(task, token_of(0)) >= begin + count;
    if (all) return;
    for (int lane = 0; lane < vectors * WIDTH; ++lane) {
      first[lane / WIDTH][lane % WIDTH] = first_seen(task, token_of(lane)) - begin;
      last[lane / WIDTH][lane % WIDTH] = std::min(last_seen(task, token_of(lane)) - begin, count);
    }
  }
};

// The largest scores of keys [from, end) of a round. Scores that are not seen become kNone.
template <int vectors>
void find_tops(const Attend& task, const Seen<vectors>& seen, float* scores, int from, int end, Vec (&tops)[vectors]) {
  float* at = scores + from * kColumns;
  if (seen.all) {
    for (int k = from; k < end; k += 2, at += 2 * kColumns) {
      for (int v = 0; v < vectors; ++v) {
        tops[v] = larger(tops[v], larger(load(at + v * WIDTH), load(at + kColumns + v * WIDTH)));
      }
    }
    return;
  }
  for (int k = from; k < end; ++k, at += kColumns) {
    for (int v = 0; v < vectors; ++v) {
      Vec score = load(at + v * WIDTH);
      if (task.softcap != 0.f) score = scaled(task, score);
      score = ((seen.first[v] <= k) & (seen.last[v] > k)) ? score : broadcast(kNone);
      store(at + v * WIDTH, score);
      tops[v] = larger(tops[v], score);
    }
  }
}

// Scores [count][kColumns] of a round to weights, by their largest ones. `count`: whole kPairedKeys. `shrink(v, by)` scales what
// the columns of a vector have added up before to their new maxima. `put(k, v, pairs)` takes the weights of kPairedKeys keys from
// k on, in pairs of keys.
template <int vectors, class Shrink, class Put>
void weigh_columns(const Attend& task, const Columns& columns, const float* scores, const Vec (&tops)[vectors], int count,
                   Shrink shrink, Put put) {
  constexpr float kLog2E = 1.44269504f, kOne = 1 << 23;
  const float unit = task.softcap == 0.f ? task.scale : 1.f, by = unit * kLog2E * kOne;
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  for (int v = 0; v < vectors; ++v) {
    const Vec before = load(columns.tops + v * WIDTH), now = larger(before, tops[v] * unit);
    Vec total = load(columns.sums + v * WIDTH);
    if (maximum(as_float((before != now) & as_bits(broadcast(1.f)))) != 0.f) {
      const Vec less = before == now ? broadcast(1.f) : exponential(before - now);
      total *= less;
      shrink(v, less);
      store(columns.tops + v * WIDTH, now);
    }
    const Vec offset = (127.f - (now == broadcast(kNone) ? Vec{} : now) * kLog2E) * kOne;
    for (int k = 0; k < count; k += kPairedKeys) {
      const float* at = scores + k * kColumns + v * WIDTH;
      IVec pairs[WIDTH];
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) {
        const Vec one = rough_power_of_two(load(at + 2 * i * kColumns) * by + offset),
                  other = rough_power_of_two(load(at + (2 * i + 1) * kColumns) * by + offset);
        pairs[i] = (as_bits(one) >> 16) | (as_bits(other) & static_cast<std::int32_t>(0xffff0000));
        BFloat16Dot::add(total, reinterpret_cast<__m512bh>(pairs[i]), ones);
      }
      put(k, v, pairs);
    }
    store(columns.sums + v * WIDTH, total);
  }
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

// As `attend_round`. Weights are turned to rows, so that pairs of values are multiplied as packed weights are. `values`: tiles
// of kTile numbers, [head size / kTile][kColumnKeys / 2][kTile]; `pair(k)` puts those of kUnitRows keys there. Behind the scores
// is room for the weights. Vectors work between products that need nothing of theirs: the processor does both at once.
template <int vectors, class Pair>
void attend_round_in_unit(const Attend& task, const Columns& columns, const char* const* key_rows, std::size_t key_stride,
                          const std::int32_t* values, float* scores, int begin, int count, Pair pair) {
  const int size = task.head_size, whole = padded(count, kPairedKeys), tiles = size / kTile;
  const Seen<vectors> seen(task, columns, begin, count);
  Vec tops[vectors];
  std::fill_n(tops, vectors, broadcast(kNone));
  written();
  for (int k = 0; k < whole; k += kUnitRows) {
    if (k < count) {
      multiply_columns_in_unit<vectors>(key_rows[k / kRowsAtOnce], key_stride, columns.queries, size / (2 * kUnitPairs),
                                        scores + k * kColumns, false);
    }
    pair(k);
    if (k > 0) find_tops(task, seen, scores, k - kUnitRows, k, tops);
  }
  find_tops(task, seen, scores, whole - kUnitRows, whole, tops);
  auto* weights = reinterpret_cast<std::uint16_t*>(scores + kColumnKeys * kColumns);  // [kColumns][kColumnKeys]
  const auto add_values = [&](int v, int tile) {
    const auto* of_tile = reinterpret_cast<const std::uint16_t*>(values) + tile * kTile * kColumnKeys;
    multiply_in_unit<1>(weights + v * WIDTH * kColumnKeys, kColumnKeys * 2, of_tile, whole / kPairedKeys, kUnitPairs,
                        columns.totals + v * WIDTH * size + tile * kTile, static_cast<std::size_t>(size) * 4, true);
  };
  const auto shrink = [&](int v, Vec by) {
    for (int lane = 0; lane < WIDTH; ++lane) {
      float* of_row = columns.totals + (v * WIDTH + lane) * size;
      for (int n = 0; n < size; n += WIDTH) store(of_row + n, load(of_row + n) * by[lane]);
    }
  };
  const auto put = [&](int k, int v, IVec (&pairs)[WIDTH]) {
    transpose(pairs);
    for (int i = 0; i < WIDTH; ++i) *reinterpret_cast<IVecAt*>(weights + (v * WIDTH + i) * kColumnKeys + k) = pairs[i];
    for (int tile = tiles * k / whole; v > 0 && tile < tiles * (k + kPairedKeys) / whole; ++tile) add_values(v - 1, tile);
  };
  weigh_columns(task, columns, scores, tops, whole, shrink, put);
  for (int tile = 0; tile < tiles; ++tile) add_values(vectors - 1, tile);
}

#endif

// `keys`: rows, `key_stride` bytes apart, a block of kRowsAtOnce of them after the other at `key_rows`. `values`: pairs of tokens,
// [count / 2][head size].
template <int vectors>
void attend_round(const Attend& task, const Columns& columns, const char* const* key_rows, std::size_t key_stride,
                  const std::int32_t* values, float* scores, int begin, int count) {
  const int size = task.head_size, whole = padded(count, kPairedKeys);
  for (int k = 0; k < count; k += kRowsAtOnce) {
    multiply_columns<kRowsAtOnce, vectors, false>(key_rows[k / kRowsAtOnce], key_stride, columns.queries, padded(size, 2) / 2,
                                                  scores + k * kColumns, false);
  }
  Vec tops[vectors];
  std::fill_n(tops, vectors, broadcast(kNone));
  find_tops(task, Seen<vectors>(task, columns, begin, count), scores, 0, whole, tops);
  const auto shrink = [&](int v, Vec by) {
    for (int n = 0; n < size; ++n) {
      float* of_number = columns.totals + n * kColumns + v * WIDTH;
      store(of_number, load(of_number) * by);
    }
  };
  const auto put = [&](int k, int v, const IVec (&pairs)[WIDTH]) {  // over scores that are used up
    for (int i = 0; i < WIDTH; ++i) {
      *reinterpret_cast<IVecAt*>(scores + (k / 2 + i) * kColumns + v * WIDTH) = pairs[i];
    }
  };
  weigh_columns(task, columns, scores, tops, whole, shrink, put);
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
  auto* scores = parts.take<float>(static_cast<std::size_t>(kColumnKeys * kColumns) * 3 / 2);  // and weights of bfloat16
  auto* values = parts.take<std::int32_t>(kColumnKeys / 2 * numbers);
  auto* decoded = parts.take<Number>(kColumnKeys * numbers);  // keys of a round that are not read in place
  auto* of_pair = parts.take<Number>(2 * numbers);            // values of two tokens
  std::fill_n(totals, all * numbers, 0.f);
  std::fill_n(tops, all, kNone);
  std::fill_n(of_sums, all, 0.f);
  const auto columns_of = [&](int head, int group) {
    const auto at = static_cast<std::size_t>((head * groups + group) * kColumns);
    const int first = group * kColumns;
    return Columns{first, std::min(kColumns, rows - first), queries + at * numbers / 2, totals + at * numbers, tops + at,
                   of_sums + at};
  };
  auto* in_rows = reinterpret_cast<Number*>(scores);
  for (int head = 0; head < task.heads; ++head) {
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      for (int lane = 0; lane < columns.count; lane += WIDTH) {
        const int here = std::min(WIDTH, columns.count - lane);
        for (int i = 0; i < here; ++i) {
          std::copy_n(query_of<Number>(task, head, columns.first + lane + i), size, in_rows + i * even_size);
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
    const auto pair_values = [&](int from, int end) {
      const char* run = nullptr;  // of kRowsAtOnce tokens
      for (int k = from; k < end; k += 2) {
        const Number* tokens[2];
        if (in_place && k % kRowsAtOnce == 0) run = slot(task, task.values, begin + k) + bytes_before;
        for (int i = 0; i < 2; ++i) {  // the weight of a token beyond the last one is 0
          const int token = std::min(k + i, count - 1);
          tokens[i] = of_pair + i * even_size;
          if (in_place)
            tokens[i] = reinterpret_cast<const Number*>(run + static_cast<std::size_t>(token % kRowsAtOnce) * task.slot_stride);
          else if (is_plain)
            tokens[i] = reinterpret_cast<const Number*>(slot(task, task.values, begin + token) + bytes_before);
          else
            decode_token<BFloat16Dot>(task, task.values, task.value_scales, begin + token, head, of_pair + i * even_size);
        }
#ifdef MATRIX_UNIT
        if (in_unit) {
          auto* tile = reinterpret_cast<Number*>(values) + k * kTile;
          for (int n = 0; n < size; n += kTile) pair_tokens(tokens[0] + n, tokens[1] + n, tile + n * kColumnKeys);
          continue;
        }
#endif
        auto* to = reinterpret_cast<Number*>(values + k / 2 * size);
        int n = 0;
        for (; n + kTile <= size; n += kTile) pair_up(tokens[0] + n, tokens[1] + n, to + 2 * n);
        for (; n < size; ++n) {
          to[2 * n] = tokens[0][n];
          to[2 * n + 1] = tokens[1][n];
        }
      }
    };
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
    const std::size_t key_stride = in_place ? task.slot_stride : row_bytes;
    bool is_paired = false;
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      const int first_token = columns.first / task.share, last_token = (columns.first + columns.count - 1) / task.share;
      if (last_seen(task, last_token) <= begin || first_seen(task, first_token) >= begin + count) continue;
      const int vectors = (columns.count + WIDTH - 1) / WIDTH;
#ifdef MATRIX_UNIT
      if (in_unit) {
        const auto pair = [&](int k) {
          if (is_paired) return;
          pair_values(k, std::min(k + kUnitRows, count));
          for (int n = 0; n < size && k + kUnitRows > count; n += kTile) {  // weights of 0 must not meet infinity
            std::int32_t* tile = values + n * (kColumnKeys / 2);
            std::fill(tile + std::max(k, padded(count, 2)) / 2 * kTile, tile + (k + kUnitRows) / 2 * kTile, 0);
          }
        };
        const auto attend = vectors == 3   ? attend_round_in_unit<3, decltype(pair)>
                            : vectors == 2 ? attend_round_in_unit<2, decltype(pair)>
                                           : attend_round_in_unit<1, decltype(pair)>;
        attend(task, columns, key_rows, key_stride, values, scores, begin, count, pair);
        is_paired = true;
        continue;
      }
#endif
      if (!is_paired) pair_values(0, count);
      is_paired = true;
      const auto attend = vectors == 3 ? attend_round<3> : vectors == 2 ? attend_round<2> : attend_round<1>;
      attend(task, columns, key_rows, key_stride, values, scores, begin, count);
    }
  };
  each_round(task, first, last, kColumnKeys, head_bytes, attend_keys);
  for (int head = 0; head < task.heads; ++head) {
    const std::size_t of_head = static_cast<std::size_t>(head) * task.result_stride;
    for (int group = 0; group < groups; ++group) {
      const Columns columns = columns_of(head, group);
      std::copy_n(columns.tops, columns.count, max + of_head + columns.first);
      std::copy_n(columns.sums, columns.count, sums + of_head + columns.first);
      float* of_group = out + of_head + columns.first * size;
#ifdef MATRIX_UNIT
      if (in_unit) {
        std::copy_n(columns.totals, columns.count * size, of_group);
        interleave<kUnitRun>(of_group, columns.count * size);
        continue;
      }
#endif
      for (int n = 0; n < size; n += WIDTH) {
        for (int lane = 0; lane < columns.count; lane += WIDTH) {
          turn(columns.totals + n * kColumns + lane, kColumns * 4, std::min(WIDTH, size - n), std::min(WIDTH, columns.count - lane),
               of_group + lane * size + n, static_cast<std::size_t>(size) * 4, std::min(WIDTH, size - n));
        }
      }
    }
  }
}

#endif

}  // namespace sage::cpu::NAMESPACE
