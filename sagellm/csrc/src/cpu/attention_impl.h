// Parts that all ways of attention over blocks of keys and values share. For `kernels_impl.h` alone, which says what it is
// compiled for.
#pragma once

#include "cached_impl.h"

namespace sage::cpu::NAMESPACE {

// From so many query rows on, keys are packed as weights are, and multiplied in the same way.
constexpr int kManyRows = 16;

inline std::size_t aligned_to_64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool is_few(int rows, bool few) { return few && rows < kManyRows; }

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

// Query of a row, [tokens][share], of key head `head` of the task.
template <class N>
const N* query_of(const Attend& task, int head, int row) {
  return static_cast<const N*>(task.query) + static_cast<std::size_t>(row / task.share) * task.query_stride +
         static_cast<std::size_t>((head * task.share + row % task.share) * task.head_size);
}

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

}  // namespace sage::cpu::NAMESPACE
