#include "sagellm/shm_group.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "shm_layout.h"
#include "shm_wait.h"

namespace sage {

namespace {

// Bytes of one rank: a chunk that others read is then still in the processor's caches.
constexpr std::size_t kStagedBytes = std::size_t{128} << 10;
// Each rank sums smaller tensors for itself, which saves a meeting.
constexpr std::size_t kSharedBytes = 16 << 10;

struct BFloat16 {
  std::uint16_t bits;
};

std::size_t bytes_of(ShmNumber type) { return type == ShmNumber::kFloat32 ? sizeof(float) : sizeof(BFloat16); }

float widened(float number) { return number; }
float widened(BFloat16 number) {
  const std::uint32_t bits = std::uint32_t{number.bits} << 16U;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

void narrow(float number, float* to) { *to = number; }
void narrow(float number, BFloat16* to) {  // to the nearest, ties to even
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  to->bits = static_cast<std::uint16_t>(is_nan ? bits >> 16U | 0x40U : (bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

}  // namespace

std::size_t ShmGroup::most_to_begin(ShmNumber type) const noexcept {
  return std::min(sizes_.staging, kStagedBytes) / bytes_of(type);
}

template <typename Number>
void ShmGroup::add(Number* numbers, std::size_t half, std::size_t first, std::size_t end) const {
  if constexpr (std::is_same_v<Number, float>) {
    if (world_size_ == 2) {  // the same bits: a sum of two does not depend on their order
      const auto* const other = reinterpret_cast<const float*>(staged(1 - rank_, half));
      for (std::size_t i = first; i < end; ++i) numbers[i] += other[i];
      return;
    }
  }
  constexpr std::size_t kBlock = 256;  // numbers whose sums stay in registers and the first cache
  const auto part = [&](std::size_t rank) { return reinterpret_cast<const Number*>(staged(rank, half)); };
  for (std::size_t at = first; at < end; at += kBlock) {
    const std::size_t size = std::min(kBlock, end - at);
    float sums[kBlock];
    for (std::size_t i = 0; i < size; ++i) sums[i] = widened(part(0)[at + i]);
    for (std::size_t rank = 1; rank < world_size_; ++rank) {
      const Number* const of_rank = part(rank) + at;
      for (std::size_t i = 0; i < size; ++i) sums[i] += widened(of_rank[i]);
    }
    for (std::size_t i = 0; i < size; ++i) narrow(sums[i], numbers + at + i);
  }
}

void ShmGroup::begin_sum(void* numbers, std::size_t count, ShmNumber type, std::string_view label, double deadline) {
  const std::size_t half = next_half(deadline);
  if (count > 0) std::memcpy(staged(rank_, half), numbers, count * bytes_of(type));
  begun_.push_back({num_chunks_, arrive(label, deadline), numbers, count, type, std::string(label)});
}

void ShmGroup::end_sum(double deadline) {
  const Begun sum = std::move(begun_.front());
  begun_.pop_front();
  wait_for(sum.meeting, sum.label, deadline);
  if (sum.type == ShmNumber::kFloat32) {
    add(static_cast<float*>(sum.numbers), sum.chunk % 2, 0, sum.count);
  } else {
    add(static_cast<BFloat16*>(sum.numbers), sum.chunk % 2, 0, sum.count);
  }
  layout_->rank(rank_).num_read.store(sum.chunk);
  shm_notify(layout_->header().meeting);
}

// Each rank adds up a share, and all copy it.
template <typename Number>
void ShmGroup::add_up_in_shares(Number* numbers, std::size_t count, std::string_view label, double deadline) {
  const std::size_t half = next_half(deadline);
  const auto part = [&](std::size_t rank) { return reinterpret_cast<Number*>(staged(rank, half)); };
  const auto begin_of = [&](std::size_t rank) { return count * rank / world_size_; };
  const std::size_t first = begin_of(rank_), end = begin_of(rank_ + 1);
  std::memcpy(part(rank_), numbers, count * sizeof(Number));  // of more than none
  meet(label, deadline);
  add(numbers, half, first, end);
  std::memcpy(part(rank_) + first, numbers + first, (end - first) * sizeof(Number));
  meet(label, deadline);
  for (std::size_t rank = 0; rank < world_size_; ++rank) {
    const std::size_t begin = begin_of(rank);
    if (rank != rank_) std::memcpy(numbers + begin, part(rank) + begin, (begin_of(rank + 1) - begin) * sizeof(Number));
  }
}

void ShmGroup::add_up(void* numbers, std::size_t count, ShmNumber type, std::string_view label, double deadline) {
  const std::size_t most = most_to_begin(type);
  auto* bytes = static_cast<std::uint8_t*>(numbers);
  for (std::size_t done = 0, size = 0; done == 0 || done < count; done += std::max<std::size_t>(size, 1)) {
    size = std::min(most, count - done);
    void* const chunk = bytes + done * bytes_of(type);
    if (world_size_ == 2 || count * bytes_of(type) <= kSharedBytes) {
      begin_sum(chunk, size, type, label, deadline);
      if (done > 0) end_sum(deadline);  // of the chunk before, while the others come to this one
    } else if (type == ShmNumber::kFloat32) {
      add_up_in_shares(static_cast<float*>(chunk), size, label, deadline);
    } else {
      add_up_in_shares(static_cast<BFloat16*>(chunk), size, label, deadline);
    }
  }
  if (!begun_.empty()) end_sum(deadline);
}

void ShmGroup::gather(const void* own, std::size_t num_bytes, void* all, std::string_view label, double deadline) {
  const std::size_t most = std::min(sizes_.staging, kStagedBytes);
  const auto* from = static_cast<const std::uint8_t*>(own);
  auto* to = static_cast<std::uint8_t*>(all);
  for (std::size_t done = 0, size = 0; done == 0 || done < num_bytes; done += std::max<std::size_t>(size, 1)) {
    size = std::min(most, num_bytes - done);
    const std::size_t half = next_half(deadline);
    if (size > 0) std::memcpy(staged(rank_, half), from + done, size);
    meet(label, deadline);
    for (std::size_t rank = 0; rank < world_size_ && size > 0; ++rank) {
      std::memcpy(to + rank * num_bytes + done, staged(rank, half), size);
    }
  }
}

void ShmGroup::gather_columns(float* numbers, std::size_t rows, std::size_t columns, std::size_t part,
                              std::string_view label, double deadline) {
  const std::size_t most = most_to_begin(ShmNumber::kFloat32);
  const std::size_t wide = std::min(part, most), tall = std::max<std::size_t>(1, most / std::max<std::size_t>(1, wide));
  // Calls `copy` with the place of each row of a chunk in the numbers and in the staging of a rank, and its length.
  const auto each_row = [&](std::size_t rank, std::size_t row, std::size_t column, std::size_t half, const auto& copy) {
    const std::size_t first = rank * part + column, end = std::min({rank * part + part, first + wide, columns});
    auto* of_rank = reinterpret_cast<float*>(staged(rank, half));
    for (std::size_t i = row; first < end && i < std::min(rows, row + tall); ++i, of_rank += wide) {
      copy(numbers + i * columns + first, of_rank, (end - first) * sizeof(float));
    }
  };
  for (std::size_t row = 0; row < rows; row += tall) {
    for (std::size_t column = 0; column < part; column += wide) {
      const std::size_t half = next_half(deadline);
      each_row(rank_, row, column, half, [](float* own, float* to, std::size_t bytes) { std::memcpy(to, own, bytes); });
      meet(label, deadline);
      for (std::size_t rank = 0; rank < world_size_; ++rank) {
        if (rank == rank_) continue;
        each_row(rank, row, column, half, [](float* to, float* from, std::size_t bytes) { std::memcpy(to, from, bytes); });
      }
    }
  }
}

}  // namespace sage
