// Memory that the processes of one group share: rings for messages, staging for collectives, a heap for each rank.
//
// It has no name: it is a memfd, which others open through /proc while its maker holds it, so nothing is left of it when the
// last process that maps it ends, however it ends. Untouched pages cost nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace sage {

enum class CommFault : std::uint32_t { kOther, kTimeout, kPeer };

class CommError : public std::runtime_error {
 public:
  CommError(CommFault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
  CommFault fault() const noexcept { return fault_; }

 private:
  CommFault fault_;
};

// Bytes; each is rounded up to whole pages, and the ring to a power of two.
struct ShmSizes {
  std::size_t ring = std::size_t{1} << 20;      // of each ordered pair of ranks
  std::size_t staging = std::size_t{1} << 20;   // of each rank, twice
  std::size_t heap = std::size_t{256} << 20;    // of each rank
};

class ShmSegment {
 public:
  // Throws CommError: no such memory here.
  static std::shared_ptr<ShmSegment> create(std::uint32_t world_size, const ShmSizes& sizes);
  // The memory that process `pid` holds as `fd`; `token` tells that it is that one. Throws CommError: kPeer, it has gone.
  static std::shared_ptr<ShmSegment> open(int pid, int fd, std::uint64_t token);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  int fd() const noexcept { return fd_; }
  void release_fd() noexcept;  // it cannot be opened any more; the memory stays
  std::uint64_t token() const noexcept;
  std::uint32_t world_size() const noexcept;
  ShmSizes sizes() const noexcept;
  std::uint8_t* data() const noexcept { return data_; }

 private:
  ShmSegment(int fd, std::size_t num_bytes);

  int fd_;
  std::size_t num_bytes_;
  std::uint8_t* data_;
};

}  // namespace sage
