// Attention over blocks of keys and values. For `kernels_impl.h` alone, which says what it is compiled for.
#pragma once

#include "cached_impl.h"

namespace sage::cpu::NAMESPACE {

// From so many query rows on, keys are packed as weights are, and multiplied in the same way.
constexpr int kManyRows = 16;
constexpr int kRound = 256;  // keys in a round of many rows

inline std::size_t aligned_to_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool is_few(int rows, bool few) { return few && rows < kManyRows; }

inline std::size_t attend_rows_bytes(int rows, int heads, int head_size, bool few) {
  const auto r = static_cast<std::size_t>(rows);
  const auto d = static_cast<std::size_t>(padded(head_size, kTile));
  if (is_few(rows, few)) {
    // Scores and queries of all heads, and the most that keys and values of few bits take besides.
    const auto keys = static_cast<std::size_t>(kSplit + kTile);
    return aligned_to_64(static_cast<std::size_t>(heads) * r * (keys + d) * 4) + aligned_to_64(keys * 8) +
           aligned_to_64(static_cast<std::size_t>(heads) * keys * 16) + aligned_to_64(r * (keys + d) * 2) +
           aligned_to_64(kTile * d * 4) + aligned_to_64(r * 16) + 16 * 64;
  }
  return aligned_to_64(static_cast<std::size_t>(heads) * r * d * 4) * 2 + aligned_to_64(r * kRound * 4) * 2 + aligned_to_64(kRound * d * 4) * 2 +
         aligned_to_64(r * 12);
}

// Hands out parts of the scratch memory.
class Scratch {
 public:
  explicit Scratch(char* at) : at_(at) {}
  template <class N>
  N* take(std::size_t count) {
    char* part = at_;
    at_ += aligned_to_64(count * sizeof(N));
    return reinterpret_cast<N*>(part);
  }

 private:
  char* at_;
};

inline const char* slot(const Attend& task, const char* cache, int token) {
  const std::int64_t block = task.table[token >> task.block_shift];
  const int within = token & ((1 << task.block_shift) - 1);
  return cache + static_cast<std::size_t>(block) * task.block_stride +
         static_cast<std::size_t>(within) * task.slot_stride;
}

inline const char* scales_at(const Attend& task, const char* scales, int token) {
  const std::int64_t block = task.table[token >> task.block_shift];
  const int within = token & ((1 << task.block_shift) - 1);
  return scales + static_cast<std::size_t>(block) * task.scale_block_stride +
         static_cast<std::size_t>(within) * task.scale_slot_stride;
}

// Decodes a head of a token from values of few bits, or from keys that lie like these.
template <class T>
void decode_token(const Attend& task, const char* cache, const char* scales, int token, int head, typename T::Weight* to) {
  const auto place = static_cast<std::size_t>(head);
  decode_head<T>(task.format, slot(task, cache, token) + place * bytes_of_head(task.format, task.head_size, 0),
                 scales_at(task, scales, token) + place * 2 * sizeof(typename T::Weight), task.head_size, to);
}

template <class T>
void decode_key(const Attend& task, int token, int head, typename T::Weight* to) {
  if (!has_key_groups(task.format)) return decode_token<T>(task, task.keys, task.key_scales, token, head, to);
  const auto place = static_cast<std::size_t>(head);
  const std::size_t head_bytes = bytes_of_head(task.format, task.head_size, 0);
  const char* group = slot(task, task.keys, token / kKeyGroup * kKeyGroup) + place * head_bytes;
  char codes[kMaxHead];
  each_key_word(token % kKeyGroup, static_cast<int>(head_bytes / 4), [&](int word, int of_group, std::size_t byte) {
    std::memcpy(codes + word * 4, group + static_cast<std::size_t>(of_group) * task.slot_stride + byte, 4);
  });
  decode_head<T>(task.format, codes, scales_at(task, task.key_scales, token) + place * 2 * sizeof(typename T::Weight),
                 task.head_size, to);
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

// In a tree a token's ancestors are the keys before it, whatever slots they are in.
inline int position_of(const Attend& task, int token) {
  return task.depths == nullptr ? task.first_position + token : task.first_new + task.depths[token];
}
inline int slot_of(const Attend& task, int token, int key) {
  if (key < task.first_new) return key;
  return task.first_new + task.paths[token * task.path_stride + std::min(key - task.first_new, task.depths[token])];
}

// The keys that a row sees are [first, last).
inline int first_seen(const Attend& task, int token) {
  return task.window > 0 ? std::max(task.begin, position_of(task, token) + 1 - task.window) : task.begin;
}
inline int last_seen(const Attend& task, int token) { return std::min(task.end, position_of(task, token) + 1); }

constexpr float kNone = -std::numeric_limits<float>::infinity();

inline Vec scaled(const Attend& task, Vec score) {
  score = score * task.scale;
  if (task.softcap > 0) {  // cap tanh(x / cap), by exp(2 x / cap)
    const Vec power = exponential(score * (2.f / task.softcap));
    score = task.softcap * (1.f - 2.f / (power + 1.f));
  }
  return score;
}

// Scores to scaled scores, kNone for keys that are not seen; returns the largest. `count` is a multiple of WIDTH.
inline float mask(const Attend& task, int row, float* scores, int begin, int count) {
  const int token = row / task.share;
  const int first = std::clamp(first_seen(task, token) - begin, 0, count);
  const int last = std::clamp(last_seen(task, token) - begin, 0, count);
  Vec top = broadcast(kNone);
  for (int i = 0; i < count; i += WIDTH) {
    Vec score = scaled(task, load(scores + i));
    if (i < first || i + WIDTH > last) {
      for (int k = 0; k < WIDTH; ++k) {
        if (i + k < first || i + k >= last) score[k] = kNone;
      }
    }
    store(scores + i, score);
    top = larger(top, score);
  }
  return maximum(top);
}

// Scores to exp(score - top); returns their sum. `count` is a multiple of WIDTH.
inline float weigh(float* scores, int count, float top) {
  Vec total{};
  for (int i = 0; i < count; i += WIDTH) {
    const Vec score = load(scores + i);
    const Vec weight = score == broadcast(kNone) ? Vec{} : exponential(score - top);
    store(scores + i, weight);
    total += weight;
  }
  return sum(total);
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

// Turns `size` rows of as many words into columns; where vectors hold several such squares, each by itself. The shuffles are
// constants, and the rows stay in registers.
template <int size, int step = size / 2>
[[gnu::always_inline]] inline void transpose(IVec (&rows)[size]) {
  const IVec low = indices([](int i) { return (i & step) ? WIDTH + i - step : i; });
  const IVec high = indices([](int i) { return (i & step) ? WIDTH + i : i + step; });
#pragma GCC unroll 16
  for (int i = 0; i < size; ++i) {
    if (i & step) continue;
    const IVec a = rows[i], b = rows[i + step];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + step] = __builtin_shuffle(a, b, high);
  }
  if constexpr (step > 1) transpose<size, step / 2>(rows);
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

// Reads the keys or values of a task's tokens into the second-level cache: all of them, or number `part` of `parts`. Four runs
// in turn, by loads which the processor's own prefetcher follows, reach the speed of memory. One run, software prefetches, or
// the order in which `score_keys` reads reach half of it.
inline void read_ahead(const Attend& task, const char* cache, std::size_t slot_bytes, int part = 0, int parts = 1) {
  constexpr int kRun = kSplit / 4;
  const auto touch = [](const char* at) { static_cast<void>(*static_cast<const volatile char*>(at)); };
  if (slot_bytes == task.slot_stride && task.end - task.begin == kSplit && (1 << task.block_shift) >= kRun) {
    const char* runs[4];
    for (int run = 0; run < 4; ++run) runs[run] = slot(task, cache, task.begin + run * kRun);
    const int lines = kRun * static_cast<int>(slot_bytes) / 64;
    for (int line = lines * part / parts; line < lines * (part + 1) / parts; ++line) {
      for (const char* run : runs) touch(run + line * 64);
    }
    return;
  }
  for (int first = task.begin + kRun * part / parts; first < task.begin + kRun * (part + 1) / parts; ++first) {
    for (int token = first; token < task.end; token += kRun) {
      const char* at = slot(task, cache, token);
      for (std::size_t byte = 0; byte < slot_bytes; byte += 64) touch(at + byte);
    }
  }
}

// Calls work(head, begin) for rounds of so many keys from `first` on, a split of keys for all heads before the next one.
template <class F>
void each_round(const Attend& task, int first, int last, int round, std::size_t head_bytes, F work) {
  Attend split = task;
  const auto read = [&](int part, int parts) {  // the heads of a token lie side by side: memory is read in one run
    if (task.heads == 1 || split.begin >= last) return;
    read_ahead(split, task.keys, static_cast<std::size_t>(task.heads) * head_bytes, part, parts);
    read_ahead(split, task.values, static_cast<std::size_t>(task.heads) * head_bytes, part, parts);
  };
  const auto go_to = [&](int begin) {
    split.begin = begin;
    split.end = std::min(begin + kSplit, last);
  };
  go_to(first);
  read(0, 1);
  while (split.begin < last) {
    const int from = split.begin, end = split.end, parts = task.heads * ((end - from + round - 1) / round);
    go_to(end);
    int part = 0;
    for (int head = 0; head < task.heads; ++head) {
      for (int begin = from; begin < end; begin += round) {
        read(part++, parts);  // of the next split, while this one is computed
        work(head, begin);
      }
    }
  }
}

// Scores [rows][wide] to weights of the input type, in place: an input is not larger than a float.
template <class T>
void weigh_rows(const Attend& task, int rows, float* scores, int wide, float* max, float* sums) {
  for (int row = 0; row < rows; ++row, scores += wide) {
    max[row] = mask(task, row, scores, task.begin, wide);
    if (max[row] == kNone)
      std::fill_n(scores, wide, 0.f);
    else
      sums[row] = weigh(scores, wide, max[row]);
    to_input<T>(scores, nullptr, wide, scores);
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
    const int head = each / rows, row = each % rows;
    const auto* query = static_cast<const Input*>(task.query) +
                        static_cast<std::size_t>(row / task.share) * task.query_stride +
                        static_cast<std::size_t>((head * task.share + row % task.share) * size);
    T::arrange(query, size, queries + each * size);
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
    const auto* from = static_cast<const Input*>(task.query) +
                       static_cast<std::size_t>(row / task.share) * task.query_stride +
                       static_cast<std::size_t>((head * task.share + row % task.share) * size);
    std::copy_n(from, size, queries + each * inputs);
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
