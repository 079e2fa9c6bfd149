// Keys and values of the cache that are of few bits. For `kernels_impl.h` alone, which says what it is compiled for.
//
// A head of a token is codes, a scale and a zero point. A number is scale * (code - zero), as LMDeploy's `quant_policy` 8 and 4
// have it (lmdeploy/pytorch/kernels/cuda/fill_kv_cache.py). Codes of 4 bits lie in pairs: byte i holds number i in its low half
// and number size / 2 + i in its high half. Floats of 8 bits (e4m3) have a scale alone.
//
// Codes of keys of 4 and 8 bits lie in groups of kKeyGroup tokens, so that a vector holds the same numbers of all keys of a
// group. The words of 4 bytes of a head, [tokens][words], are [words][tokens] in the group's slots, one slot after the other.
#pragma once

#include "products_impl.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace sage::cpu::NAMESPACE {

constexpr float kLargestFloat8 = 448.f;
constexpr int kFloat8Exponent = (127 - kFloat8Bias) << 23;  // between those of a float and of a float of 8 bits

typedef std::uint8_t Bytes __attribute__((vector_size(WIDTH)));

// Calls work(word, slot of the group, byte of the head) for each word of a key, whose number in its group is `token`.
template <class F>
void each_key_word(int token, int words, const F& work) {
  for (int word = 0; word < words; ++word) {
    const int at = word * kKeyGroup + token, slot = at / words;
    work(word, slot, static_cast<std::size_t>(at - slot * words) * 4);
  }
}

inline std::size_t bytes_of_head(Format format, int size, std::size_t plain) {
  const auto numbers = static_cast<std::size_t>(size);
  return format == Format::kPlain ? numbers * plain : format == Format::kLevels4 ? numbers / 2 : numbers;
}

inline Vec nearest(Vec x) {
  const Vec magic = broadcast(12582912.f);
  return x + magic - magic;
}

template <class T>
void store_numbers(typename T::Weight* to, Vec numbers) {
  if constexpr (T::kWeights == Type::kFloat32) {
    store(to, numbers);
  } else {
#ifdef DOT_BF16
    const __m256bh narrowed = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(numbers));
    std::memcpy(to, &narrowed, sizeof(narrowed));
#else
    typedef std::uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
    const IVec bits = as_bits(numbers), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Narrow narrowed = __builtin_convertvector(rounded >> 16, Narrow);
    std::memcpy(to, &narrowed, sizeof(narrowed));
#endif
  }
}

// Adjacent numbers of WIDTH keys to a tile of `multiply`, at the first one's place.
template <class T>
void store_pair(typename T::Weight* to, Vec first, Vec second) {
  if constexpr (T::kWeights == Type::kFloat32) {
    store(to, first);
    store(to + kTile, second);
  } else {
    const auto rounded = [](Vec number) {
      const IVec bits = as_bits(number);
      return bits + 0x7fff + ((bits >> 16) & 1);
    };
    const IVec pair = ((rounded(first) >> 16) & 0xffff) | (rounded(second) & static_cast<std::int32_t>(0xffff0000));
    std::memcpy(to, &pair, sizeof(pair));
  }
}

// Codes, one in each lane, to numbers without their scale and zero point.
template <Format format>
Vec number_of_code(IVec code) {
  if constexpr (format != Format::kFloat8) {
    return __builtin_convertvector(code, Vec);
  } else {
    // The bits of a float that is 2^120 times less; those of one without an exponent, too.
    return as_float(((code << 24) >> 4) & static_cast<std::int32_t>(0x87f00000)) * 0x1p120f;
  }
}

// Numbers to the nearest code, ties to even.
template <Format format>
IVec code_of(Vec number, float zero) {
  if constexpr (format != Format::kFloat8) {
    const Vec top = broadcast(format == Format::kLevels4 ? 15.f : 255.f), moved = nearest(number + zero);
    const Vec low = moved > Vec{} ? moved : Vec{};
    return __builtin_convertvector(low < top ? low : top, IVec);
  } else {
    const IVec sign = as_bits(number) & static_cast<std::int32_t>(0x80000000);
    Vec size = as_float(as_bits(number) ^ sign);
    size = size < kLargestFloat8 ? size : broadcast(kLargestFloat8);
    const IVec bits = as_bits(size), normal = (bits + 0x7ffff + ((bits >> 20) & 1) - kFloat8Exponent) >> 20;
    const IVec small = __builtin_convertvector(nearest(size * 0x1p9f), IVec);
    return (size < 0x1p-6f ? small : normal) | ((sign >> 24) & 0x80);
  }
}

inline IVec bytes_at(const char* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<IVec>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<IVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, IVec);
#endif
}

inline void store_bytes(char* to, IVec codes) {
  const Bytes bytes = __builtin_convertvector(codes, Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

// work(from) for WIDTH numbers at a time; the last ones again with others before them, so that none lie outside.
template <class F>
void each_vector(int count, const F& work) {
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) work(i);
  if (i < count) work(count - WIDTH);
}

template <class T, Format format>
void decode_head_of(const char* codes, float scale, float zero, int size, typename T::Weight* to) {
  const int count = format == Format::kLevels4 ? size / 2 : size;
  const auto number_at = [&](IVec code) { return (number_of_code<format>(code) - zero) * scale; };
  if (count < WIDTH) {  // no vector fits
    typename T::Weight numbers[WIDTH];
    for (int i = 0; i < count; ++i) {
      const IVec byte = IVec{} + static_cast<std::uint8_t>(codes[i]);
      store_numbers<T>(numbers, number_at(format == Format::kLevels4 ? byte & 15 : byte));
      to[i] = numbers[0];
      if (format != Format::kLevels4) continue;
      store_numbers<T>(numbers, number_at(byte >> 4));
      to[count + i] = numbers[0];
    }
    return;
  }
  each_vector(count, [&](int i) {
    const IVec bytes = bytes_at(codes + i);
    store_numbers<T>(to + i, number_at(format == Format::kLevels4 ? bytes & 15 : bytes));
    if constexpr (format == Format::kLevels4) store_numbers<T>(to + count + i, number_at(bytes >> 4));
  });
}

// A head's numbers in the kernels' type. `scales`: its scale and its zero point.
template <class T>
void decode_head(Format format, const char* codes, const char* scales, int size, typename T::Weight* to) {
  typename T::Weight pair[2];
  std::memcpy(pair, scales, sizeof(pair));
  const auto decode = format == Format::kLevels4   ? decode_head_of<T, Format::kLevels4>
                      : format == Format::kLevels8 ? decode_head_of<T, Format::kLevels8>
                                                   : decode_head_of<T, Format::kFloat8>;
  decode(codes, T::to_float(pair[0]), T::to_float(pair[1]), size, to);
}

template <class T>
typename T::Weight rounded_weight(float value) {
  if constexpr (T::kWeights == Type::kFloat32)
    return value;
  else
    return narrow(value);
}

template <class T, Format format>
void encode_head_of(const float* from, int size, char* codes, typename T::Weight (&scales)[2]) {
  // Zero is among the numbers, so that a zero point is a code, which every type holds exactly.
  float low = 0, high = 0;
  for (int i = 0; i < size; ++i) {
    low = std::min(low, from[i]);
    high = std::max(high, from[i]);
  }
  if constexpr (format == Format::kFloat8)
    scales[0] = rounded_weight<T>(std::max(high, -low) / kLargestFloat8);
  else
    scales[0] = rounded_weight<T>((high - low) / (format == Format::kLevels4 ? 15.f : 255.f));
  const float scale = T::to_float(scales[0]), by = scale > 0 ? 1.f / scale : 0.f;
  const float zero = format == Format::kFloat8 ? 0.f : std::nearbyint(-low * by);
  scales[1] = rounded_weight<T>(zero);
  const int count = format == Format::kLevels4 ? size / 2 : size;
  if (count < WIDTH) {  // no vector fits
    for (int i = 0; i < count; ++i) {
      IVec code = code_of<format>(broadcast(from[i] * by), zero);
      if constexpr (format == Format::kLevels4) code |= code_of<format>(broadcast(from[count + i] * by), zero) << 4;
      codes[i] = static_cast<char>(code[0]);
    }
    return;
  }
  each_vector(count, [&](int i) {
    IVec code = code_of<format>(load(from + i) * by, zero);
    if constexpr (format == Format::kLevels4) code |= code_of<format>(load(from + count + i) * by, zero) << 4;
    store_bytes(codes + i, code);
  });
}

// Heads [count][size] of a token to scales and zero points [count][2], and to codes. `key_of_group`: the token's number in its
// group, of whose first token `codes` are; -1: codes lie one after the other.
template <class T>
void encode_heads(const float* from, int count, int size, Format format, int key_of_group, std::size_t slot_stride, char* codes,
                  char* scales) {
  const auto encode = format == Format::kLevels4   ? encode_head_of<T, Format::kLevels4>
                      : format == Format::kLevels8 ? encode_head_of<T, Format::kLevels8>
                                                   : encode_head_of<T, Format::kFloat8>;
  const std::size_t head_bytes = bytes_of_head(format, size, 0);
  char row[kMaxHead];
  for (int head = 0; head < count; ++head, from += size, codes += head_bytes) {
    typename T::Weight pair[2];
    encode(from, size, key_of_group < 0 ? codes : row, pair);
    std::memcpy(scales + static_cast<std::size_t>(head) * sizeof(pair), pair, sizeof(pair));
    if (key_of_group < 0) continue;
    each_key_word(key_of_group, static_cast<int>(head_bytes / 4), [&](int word, int slot, std::size_t byte) {
      std::memcpy(codes + static_cast<std::size_t>(slot) * slot_stride + byte, row + word * 4, 4);
    });
  }
}

}  // namespace sage::cpu::NAMESPACE
