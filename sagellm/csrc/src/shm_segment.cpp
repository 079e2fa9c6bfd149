#include "sagellm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "shm_layout.h"

namespace sage {

namespace {

std::string system_text() { return std::string(": ") + std::strerror(errno); }

ShmHeader& header_of(std::uint8_t* data) { return *reinterpret_cast<ShmHeader*>(data); }

ShmSizes rounded(const ShmSizes& sizes) {
  ShmSizes out{kShmPage, ShmLayout::up(sizes.staging), ShmLayout::up(sizes.heap)};
  while (out.ring < sizes.ring) out.ring *= 2;
  return out;
}

}  // namespace

ShmSegment::ShmSegment(int fd, std::size_t num_bytes) : fd_(fd), num_bytes_(num_bytes) {
  void* const data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    const std::string why = system_text();
    release_fd();
    throw CommError(CommFault::kOther, "cannot map " + std::to_string(num_bytes) + " shared bytes" + why);
  }
  data_ = static_cast<std::uint8_t*>(data);
  madvise(data_, num_bytes, MADV_HUGEPAGE);  // where the machine gives such pages to shared memory at all
}

ShmSegment::~ShmSegment() {
  release_fd();
  munmap(data_, num_bytes_);
}

void ShmSegment::release_fd() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::shared_ptr<ShmSegment> ShmSegment::create(std::uint32_t world_size, const ShmSizes& sizes) {
  const ShmSizes whole = rounded(sizes);
  const std::size_t num_bytes = ShmLayout(nullptr, world_size, whole).num_bytes();
  const int fd = memfd_create("sagellm", MFD_CLOEXEC);
  if (fd < 0) throw CommError(CommFault::kOther, "no shared memory" + system_text());
  if (ftruncate(fd, static_cast<off_t>(num_bytes)) != 0) {
    const std::string why = system_text();
    ::close(fd);
    throw CommError(CommFault::kOther, "no " + std::to_string(num_bytes) + " bytes of shared memory" + why);
  }
  const std::shared_ptr<ShmSegment> segment(new ShmSegment(fd, num_bytes));
  ShmHeader& header = header_of(segment->data_);  // all else is right as zeros
  header.world_size = world_size;
  header.sizes = whole;
  if (getrandom(&header.token, sizeof header.token, 0) != sizeof header.token) {
    throw CommError(CommFault::kOther, "no random bytes" + system_text());
  }
  header.magic = kShmMagic;
  return segment;
}

std::shared_ptr<ShmSegment> ShmSegment::open(int pid, int fd, std::uint64_t token) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) {
    const CommFault fault = errno == ENOENT ? CommFault::kPeer : CommFault::kOther;
    throw CommError(fault, "cannot open the shared memory of process " + std::to_string(pid) + system_text() +
                               "; all ranks are processes of one user, on one host, that start together.");
  }
  struct stat status {};
  if (fstat(own, &status) != 0 || static_cast<std::size_t>(status.st_size) < sizeof(ShmHeader)) {
    ::close(own);
    throw CommError(CommFault::kOther, path + " is no shared memory of a group; are all ranks on one host?");
  }
  std::shared_ptr<ShmSegment> segment(new ShmSegment(own, static_cast<std::size_t>(status.st_size)));
  const ShmHeader& header = header_of(segment->data_);
  if (header.magic != kShmMagic || header.token != token ||
      ShmLayout(nullptr, header.world_size, header.sizes).num_bytes() != segment->num_bytes_) {
    throw CommError(CommFault::kOther, path + " is the memory of another group or version; are all ranks on one host?");
  }
  segment->release_fd();
  return segment;
}

std::uint64_t ShmSegment::token() const noexcept { return header_of(data_).token; }
std::uint32_t ShmSegment::world_size() const noexcept { return header_of(data_).world_size; }
ShmSizes ShmSegment::sizes() const noexcept { return header_of(data_).sizes; }

}  // namespace sage
