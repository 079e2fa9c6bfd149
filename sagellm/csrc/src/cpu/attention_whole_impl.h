// Attention in whole numbers over keys and values of few bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// A query, and the weights of the values, are rounded to 15 bits. That is more exact than bfloat16, so the error is that of the
// cache. With AVX-512 an instruction (vpdpbusd) adds up four products of codes without sign and of whole numbers of 8 bits, so
// numbers are in two halves of 8 bits. With AVX2 one (vpmaddwd) adds up two products of 16 bits: codes are widened.
#pragma once

#include "attention_impl.h"

namespace sage::cpu::NAMESPACE {

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define WHOLE_NUMBERS

constexpr int kLowBits = 7;                // of the lower half
constexpr float kWhole = 127 << kLowBits;  // the largest whole number
constexpr int kWholePart = WIDTH * 4;      // numbers of a head that are computed together
constexpr int kWholeRows = 3;              // rows whose sums lie in registers
constexpr int kMaxWhole = 512;             // numbers of a head: sums of more might exceed 31 bits

inline IVec broadcast_word(const std::int8_t* from) {
  std::int32_t word;
  std::memcpy(&word, from, 4);
  return IVec{} + word;
}

// 2^x for x from -0.5 to 0.5: Taylor's series.
inline Vec power_of_part(Vec x) {
  Vec power = x * 1.5403530e-4f + 1.3333558e-3f;
  power = power * x + 9.6181291e-3f;
  power = power * x + 5.5504109e-2f;
  power = power * x + 2.4022651e-1f;
  power = power * x + 6.9314718e-1f;
  power = power * x + 1.f;
  return power;
}

inline IVec low_codes(IVec pairs) { return pairs & 0x0f0f0f0f; }
inline IVec high_codes(IVec pairs) { return (pairs >> 4) & 0x0f0f0f0f; }

#ifdef __AVX512VNNI__

// Codes, four in a lane.
using Codes = IVec;
inline Codes codes_of(IVec words) { return words; }

inline IVec add_codes(IVec total, Codes codes, const std::int8_t* numbers) {
  return reinterpret_cast<IVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(broadcast_word(numbers))));
}

// Sums of codes times whole numbers: of their halves.
struct Products {
  IVec of_high{}, of_low{};

  void add(Codes codes, const std::int8_t* high, const std::int8_t* low) {
    of_high = add_codes(of_high, codes, high);
    of_low = add_codes(of_low, codes, low);
  }
  Vec numbers() const { return __builtin_convertvector((of_high << kLowBits) + of_low, Vec); }
};

inline void store_codes(std::int8_t* to, IVec numbers) {
  typedef std::int8_t Narrow __attribute__((vector_size(WIDTH)));
  const Narrow narrow_numbers = __builtin_convertvector(numbers, Narrow);
  std::memcpy(to, &narrow_numbers, sizeof(narrow_numbers));
}

inline __m256i half_at(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m512i joined(__m256i low, __m256i high) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1);
}

// WIDTH whole numbers to halves.
inline void store_whole(IVec whole, std::int8_t* high, std::int8_t* low) {
  const IVec half = (whole + (1 << (kLowBits - 1))) >> kLowBits;
  store_codes(high, half);
  store_codes(low, whole - (half << kLowBits));
}

// 2^x for x up to 0, within 3e-7 of it; 0 for -infinity.
inline Vec power_of_two(Vec x) {
  const auto number = reinterpret_cast<__m512>(x);
  const __mmask16 is_seen = _mm512_cmp_ps_mask(number, _mm512_set1_ps(kNone), _CMP_NEQ_OQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(is_seen, number, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec rest = reinterpret_cast<Vec>(_mm512_maskz_sub_ps(is_seen, number, whole));
  const Vec power = power_of_part(rest);
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(is_seen, reinterpret_cast<__m512>(power), whole));
}

#else

// Codes of 16 bits: those of the even places of each word of four, and those of the odd ones.
struct Codes {
  IVec even, odd;
};
inline Codes codes_of(IVec words) { return {words & 0x00ff00ff, (words >> 8) & 0x00ff00ff}; }

inline IVec multiply_codes(IVec codes, const std::int8_t* numbers) {
  return reinterpret_cast<IVec>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(broadcast_word(numbers))));
}

// Sums of codes times whole numbers.
struct Products {
  IVec all{};

  void add(const Codes& codes, const std::int8_t* even, const std::int8_t* odd) {
    all += multiply_codes(codes.even, even) + multiply_codes(codes.odd, odd);
  }
  Vec numbers() const { return __builtin_convertvector(all, Vec); }
};

// WIDTH whole numbers, of 16 bits each, to those of the even places of each four and those of the odd ones.
inline void store_whole(IVec whole, std::int8_t* even, std::int8_t* odd) {
  const IVec first = __builtin_shuffle(whole, IVec{0, 4, 1, 5, 0, 4, 1, 5}),
             second = __builtin_shuffle(whole, IVec{2, 6, 3, 7, 2, 6, 3, 7});
  const IVec words = (first & 0xffff) | (second << 16);
  std::memcpy(even, &words, 8);
  std::memcpy(odd, reinterpret_cast<const char*>(&words) + 8, 8);
}

// 2^x for x up to 0, within 3e-7 of it; 0 below -126.
inline Vec power_of_two(Vec x) {
  const IVec is_large = x >= -126.f;
  const Vec kept = is_large ? x : Vec{}, whole = nearest(kept), rest = kept - whole;
  const Vec power = power_of_part(rest);
  const IVec exponent = __builtin_convertvector(whole, IVec) << 23;
  return as_float((as_bits(power) + exponent) & is_large);
}

#endif

// Vectors of bytes, and of pairs of bytes, in turn, in each 16 bytes.
#ifdef __AVX512VNNI__
#define UNPACK(how, a, b) \
  reinterpret_cast<IVec>(_mm512_unpack##how(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)))
#else
#define UNPACK(how, a, b) \
  reinterpret_cast<IVec>(_mm256_unpack##how(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)))
#endif
inline IVec low_bytes(IVec a, IVec b) { return UNPACK(lo_epi8, a, b); }
inline IVec high_bytes(IVec a, IVec b) { return UNPACK(hi_epi8, a, b); }
inline IVec low_pairs(IVec a, IVec b) { return UNPACK(lo_epi16, a, b); }
inline IVec high_pairs(IVec a, IVec b) { return UNPACK(hi_epi16, a, b); }
#undef UNPACK

// Whole numbers of rows, times `units`, in two parts as `store_whole` cuts them.
struct Whole {
  std::int8_t *high, *low;  // [rows][stride]
  std::size_t stride;
  float *units, *sums;  // [rows]; the sum of the whole numbers

  std::int8_t* high_of(int row) const { return high + static_cast<std::size_t>(row) * stride; }
  std::int8_t* low_of(int row) const { return low + static_cast<std::size_t>(row) * stride; }

  // `count` is a multiple of WIDTH.
  void round(int row, const float* from, int count) const {
    Vec sizes{};
    for (int i = 0; i < count; i += WIDTH) sizes = larger(sizes, as_float(as_bits(load(from + i)) & 0x7fffffff));
    const float top = maximum(sizes), by = top > 1e-30f ? kWhole / top : 0.f;
    Vec total{};
    for (int i = 0; i < count; i += WIDTH) {
      const Vec numbers = nearest(load(from + i) * by);
      put(row, i, numbers);
      total += numbers;
    }
    units[row] = by == 0.f ? 0.f : top / kWhole;
    sums[row] = sum(total);
  }

  // Weights exp(score - top), each times the scale of its value, of which `largest_scale` is the largest. `sums` has the whole
  // numbers times the zero points. Returns the sum of the weights.
  float weigh(int row, const float* scores, int count, float top, const float* scales, float largest_scale,
              const float* zeros) const {
    constexpr float kLog2E = 1.44269504f;
    const float by = largest_scale > 1e-30f ? kWhole / largest_scale : 0.f;
    Vec total{}, of_zeros{};
    for (int i = 0; i < count; i += WIDTH) {
      const Vec score = load(scores + i);
      const Vec weight = power_of_two((score - top) * kLog2E);
      const Vec numbers = nearest(weight * (load(scales + i) * by));
      put(row, i, numbers);
      total += weight;
      of_zeros += numbers * load(zeros + i);
    }
    units[row] = by == 0.f ? 0.f : largest_scale / kWhole;
    sums[row] = sum(of_zeros);
    return sum(total);
  }

  void put(int row, int i, Vec numbers) const {
    store_whole(__builtin_convertvector(numbers, IVec), high_of(row) + i, low_of(row) + i);
  }
};

inline bool takes_whole(const Attend& task) {
  if (task.head_size > kMaxWhole) return false;
  if (task.format == Format::kLevels8) return task.head_size % kWholePart == 0;
  return task.format == Format::kLevels4 && (task.head_size == 64 || task.head_size % (2 * kWholePart) == 0);
}

// Scales and zero points of all heads of tokens [begin, end), [heads][wide] of each, 0 beyond the end.
inline void read_scales(const Attend& task, const char* scales, float* to, float* zeros, int wide) {
  const int heads = task.heads, count = task.end - task.begin;
  const auto put = [&](int i, int head, IVec pairs) {
    store(to + head * wide + i, low_half(pairs));
    store(zeros + head * wide + i, high_half(pairs));
  };
  // WIDTH tokens of a block lie in a run of `heads` vectors.
  const bool is_run = static_cast<std::size_t>(heads) * 4 == task.scale_slot_stride && (1 << task.block_shift) >= WIDTH;
  const IVec lanes = indices([](int i) { return i; });
  for (int i = 0; i < wide; i += WIDTH) {
    if (is_run && i + WIDTH <= count) {
      const char* at = scales_at(task, scales, task.begin + i);
      for (int head = 0; head < heads; ++head) {
        const IVec place = lanes * heads + head, vector = place / WIDTH;
#ifdef __AVX512VNNI__
        __m512i pairs = _mm512_setzero_si512();
        for (int v = 0; v < heads; ++v) {
          const __mmask16 is_here = _mm512_cmpeq_epi32_mask(reinterpret_cast<__m512i>(vector), _mm512_set1_epi32(v));
          pairs = _mm512_mask_permutexvar_epi32(pairs, is_here, reinterpret_cast<__m512i>(place),
                                                reinterpret_cast<__m512i>(load_words(at + v * WIDTH * 4)));
        }
#else
        IVec pairs{};
        for (int v = 0; v < heads; ++v) {
          const IVec here = __builtin_shuffle(load_words(at + v * WIDTH * 4), place);
          pairs = vector == v ? here : pairs;
        }
#endif
        put(i, head, reinterpret_cast<IVec>(pairs));
      }
      continue;
    }
    for (int head = 0; head < heads; ++head) {
      IVec pairs{};
      for (int j = 0; j < WIDTH && i + j < count; ++j) {
        std::int32_t pair;
        std::memcpy(&pair, scales_at(task, scales, task.begin + i + j) + static_cast<std::size_t>(head) * 4, 4);
        pairs[j] = pair;
      }
      put(i, head, pairs);
    }
  }
}

// Scores of kKeyGroup keys for `rows` queries from `row` on, to scores[row][0..kKeyGroup). The keys' slots lie at `places`.
template <Format format, int rows>
void score_whole(const char* keys, const std::size_t* places, const Whole& queries, int row, int size, const float* scales,
                 const float* zeros, float* scores, int wide) {
  constexpr int kVectorsOfKeys = kKeyGroup / WIDTH;
  Products products[rows][kVectorsOfKeys];
  const int head_words = size / (format == Format::kLevels4 ? 8 : 4);
  int place = 0, at = 0;  // a slot, and the word in it
  for (int word = 0; word < head_words; ++word) {
    IVec words[kVectorsOfKeys];
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsOfKeys; ++v, at += WIDTH) {
      for (; at >= head_words; at -= head_words) ++place;
#ifdef __AVX512VNNI__
      if (head_words < WIDTH)  // half a vector a slot
        words[v] = reinterpret_cast<IVec>(joined(half_at(keys + places[place]), half_at(keys + places[place + 1])));
      else
#endif
        words[v] = load_words(keys + places[place] + at * 4);
    }
    for (int part = 0; part < (format == Format::kLevels4 ? 2 : 1); ++part) {
      const int number = part * (size / 2) + 4 * word;
      Codes codes[kVectorsOfKeys];
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsOfKeys; ++v) {
        codes[v] = codes_of(format != Format::kLevels4 ? words[v] : part == 0 ? low_codes(words[v]) : high_codes(words[v]));
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsOfKeys; ++v) {
          products[r][v].add(codes[v], queries.high_of(row + r) + number, queries.low_of(row + r) + number);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectorsOfKeys; ++v) {
      const Vec of_row = products[r][v].numbers() - load(zeros + v * WIDTH) * queries.sums[row + r];
      store(scores + (row + r) * wide + v * WIDTH, of_row * load(scales + v * WIDTH) * queries.units[row + r]);
    }
  }
}

// Codes [part, part + kWholePart) of a head of a token, in order.
template <Format format>
IVec codes_at(const char* head, int part, int size) {
  if constexpr (format == Format::kLevels8) {
    return load_words(head + part);
  } else {
#ifdef __AVX512VNNI__
    if (size == kWholePart) {
      const __m256i pairs = half_at(head);
      return low_codes(reinterpret_cast<IVec>(joined(pairs, _mm256_srli_epi16(pairs, 4))));
    }
#endif
    const int half = size / 2;
    const IVec pairs = load_words(head + part % half);
    return part < half ? low_codes(pairs) : high_codes(pairs);
  }
}

// out[row] = weights[row] . values, kWholePart numbers of a head, for `rows` rows from `row` on. A token lies at its place.
template <Format format, int rows>
void add_whole(const char* values, const std::size_t* places, int count, const Whole& weights, int row, int part, int size,
               float* out) {
  Products products[rows][4];
  for (int i = 0; i < count; i += 4) {
    IVec of_token[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {  // whatever lies beyond the last token has no weight
      of_token[t] = codes_at<format>(values + places[i + t], part, size);
    }
    const IVec first_low = low_bytes(of_token[0], of_token[1]), first_high = high_bytes(of_token[0], of_token[1]),
               second_low = low_bytes(of_token[2], of_token[3]), second_high = high_bytes(of_token[2], of_token[3]);
    // Four tokens of a number side by side. Each vector has 4 of 16 numbers.
    const Codes groups[4] = {codes_of(low_pairs(first_low, second_low)), codes_of(high_pairs(first_low, second_low)),
                             codes_of(low_pairs(first_high, second_high)), codes_of(high_pairs(first_high, second_high))};
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        products[r][v].add(groups[v], weights.high_of(row + r) + i, weights.low_of(row + r) + i);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < 4; ++v) {
      const Vec numbers = (products[r][v].numbers() - weights.sums[row + r]) * weights.units[row + r];
      for (int lane = 0; lane < WIDTH / 4; ++lane) {
        std::memcpy(out + (row + r) * size + part + lane * 16 + v * 4,
                    reinterpret_cast<const char*>(&numbers) + lane * 16, 16);
      }
    }
  }
}

template <class T, Format format>
void attend_whole(const Attend& task, float* out, float* max, float* sums, char* scratch) {
  const int rows = task.tokens * task.share, size = task.head_size, count = task.end - task.begin;
  const int wide = padded(count, kKeyGroup);
  const auto r_count = static_cast<std::size_t>(rows), w_count = static_cast<std::size_t>(wide),
             s_count = static_cast<std::size_t>(size);
  const std::size_t head_bytes = bytes_of_head(format, size, 0);
  Scratch parts(scratch);
  const auto h_count = static_cast<std::size_t>(task.heads);
  auto* scores = parts.take<float>(r_count * w_count);
  auto *scales = parts.take<float>(h_count * w_count), *zeros = parts.take<float>(h_count * w_count),
       *value_scales = parts.take<float>(h_count * w_count), *value_zeros = parts.take<float>(h_count * w_count);
  auto* places = parts.take<std::size_t>(w_count);  // of the tokens in the cache
  auto* numbers = parts.take<float>(s_count);
  const auto whole_rows = [&](std::size_t stride) {
    const std::size_t all = r_count * stride;
    return Whole{parts.take<std::int8_t>(all), parts.take<std::int8_t>(all), stride, parts.take<float>(r_count),
                 parts.take<float>(r_count)};
  };
  const Whole queries = whole_rows(s_count), weights = whole_rows(w_count);
  const auto each_group = [&](auto&& work) {  // of rows, as even as can be
    for (int row = 0; row < rows;) {
      const int left = rows - row, groups = (left + kWholeRows - 1) / kWholeRows, here = (left + groups - 1) / groups;
      work(row, here);
      row += here;
    }
  };
  const bool is_seen = first_seen(task, 0) < task.end;  // else the window has passed these keys
  if (is_seen) {
    // Their lines arrive while the keys are read.
    const int step = std::max(1, 64 / static_cast<int>(task.scale_slot_stride));
    for (int token = task.begin; token < task.end; token += step) {
      __builtin_prefetch(scales_at(task, task.key_scales, token));
      __builtin_prefetch(scales_at(task, task.value_scales, token));
    }
    read_ahead(task, task.keys, static_cast<std::size_t>(task.heads) * head_bytes);
    read_ahead(task, task.values, static_cast<std::size_t>(task.heads) * head_bytes);
    read_scales(task, task.key_scales, scales, zeros, wide);
    read_scales(task, task.value_scales, value_scales, value_zeros, wide);
    for (int i = 0; i < wide; i += kKeyGroup) {  // to the end of the last group, which its block has
      const char* first = slot(task, task.keys, task.begin + i);
      for (int j = 0; j < kKeyGroup; ++j) {
        places[i + j] = static_cast<std::size_t>(first - task.keys) + static_cast<std::size_t>(j) * task.slot_stride;
      }
    }
  }
  const char *keys = task.keys, *values = task.values;
  const std::size_t result = task.result_stride;
  for (int head = 0; head < task.heads; ++head, out += result, max += result, sums += result, scales += wide, zeros += wide,
           value_scales += wide, value_zeros += wide, keys += head_bytes, values += head_bytes) {
    std::fill_n(out, rows * size, 0.f);
    std::fill_n(max, rows, kNone);
    std::fill_n(sums, rows, 0.f);
    if (!is_seen) continue;
    for (int row = 0; row < rows; ++row) {
      const auto* query = query_of<typename T::Input>(task, head, row);
      for (int i = 0; i < size; ++i) numbers[i] = T::to_float(query[i]);
      queries.round(row, numbers, size);
    }
    for (int i = 0; i < wide; i += kKeyGroup) {
      each_group([&](int row, int here) {
        const auto score = here == 3 ? score_whole<format, 3> : here == 2 ? score_whole<format, 2> : score_whole<format, 1>;
        score(keys, places + i, queries, row, size, scales + i, zeros + i, scores + i, wide);
      });
    }
    const float largest_of_all = largest(value_scales, count);
    for (int row = 0; row < rows; ++row) {
      float* of_row = scores + row * wide;
      const float top = max[row] = mask(task, row, of_row, task.begin, wide);
      if (top == kNone) std::fill_n(of_row, wide, kNone);
      // Scales that the row does not see must not matter.
      const int token = row / task.share, first = std::max(first_seen(task, token) - task.begin, 0);
      const int num_seen = std::max(last_seen(task, token) - task.begin - first, 0);
      const float largest_scale = num_seen == count ? largest_of_all : largest(value_scales + first, num_seen);
      sums[row] = weights.weigh(row, of_row, wide, top == kNone ? 0.f : top, value_scales, largest_scale, value_zeros);
    }
    for (int part = 0; part < size; part += kWholePart) {
      each_group([&](int row, int here) {
        const auto add = here == 3 ? add_whole<format, 3> : here == 2 ? add_whole<format, 2> : add_whole<format, 1>;
        add(values, places, count, weights, row, part, size, out);
      });
    }
  }
}

#endif

}  // namespace sage::cpu::NAMESPACE
