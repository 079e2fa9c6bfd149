#include "sagellm/shm_group.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "shm_layout.h"
#include "shm_wait.h"

namespace sage {

namespace {

constexpr double kCauseSeconds = 1.0;  // for somebody to write down what broke the group
constexpr std::uint64_t kOwnPlaceBytes = 16 << 10;  // what is smaller is copied twice sooner than the sender has waited

std::uint64_t whole_pieces(std::uint64_t num_bytes) { return (num_bytes + kPieceAlign - 1) / kPieceAlign * kPieceAlign; }

std::string rank_text(std::uint32_t rank) { return "rank " + std::to_string(rank); }

// Clock ticks since boot, field 22 of proc(5)'s stat; 0 if there is no such process.
std::uint64_t start_time_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;
  return std::stoull(field);
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return static_cast<int>(syscall(434, pid, 0));
#endif
}

void write_label(char (&target)[kShmLabel], std::string_view label) {
  std::memset(target, 0, kShmLabel);
  std::memcpy(target, label.data(), std::min(label.size(), kShmLabel - 1));
}

bool is_label(const char (&written)[kShmLabel], std::string_view label) {
  const std::size_t length = std::min(label.size(), kShmLabel - 1);
  return std::memcmp(written, label.data(), length) == 0 && written[length] == '\0';
}

std::string label_text(const char (&written)[kShmLabel]) { return std::string(written, strnlen(written, kShmLabel)); }

}  // namespace

ShmGroup::ShmGroup(std::shared_ptr<ShmSegment> segment, std::uint32_t rank, const ShmOptions& options)
    : segment_(std::move(segment)),
      layout_(new ShmLayout(segment_->data(), segment_->world_size(), segment_->sizes())),
      rank_(rank),
      world_size_(segment_->world_size()),
      sizes_(segment_->sizes()),
      options_(options),
      heap_(std::make_shared<ShmHeap>(sizes_.heap)),
      pidfds_(world_size_, -1) {
  if (rank >= world_size_) throw CommError(CommFault::kOther, rank_text(rank) + " is not of this group.");
  options_.chunk_bytes = std::clamp<std::size_t>(whole_pieces(options_.chunk_bytes), 2 * kPieceAlign, sizes_.ring / 2);
}

ShmGroup::~ShmGroup() {
  close();
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
}

std::uint8_t* ShmGroup::staging() const noexcept { return layout_->staging(); }
std::uint8_t* ShmGroup::heap_data() const noexcept { return layout_->heap(rank_); }

void ShmGroup::join(double deadline) {
  ShmRank& own = layout_->rank(rank_);
  own.pid = getpid();
  own.start_time = start_time_of(own.pid);
  ShmState expected = ShmState::kAbsent;
  if (!own.state.compare_exchange_strong(expected, ShmState::kPresent)) {
    throw CommError(CommFault::kOther, rank_text(rank_) + " has joined already; give each process a rank of its own.");
  }
  has_joined_ = true;
  ShmEvent& meeting = layout_->header().meeting;
  shm_notify(meeting);
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const ShmRank& other = layout_->rank(rank);
    const auto has_come = [&] { return other.state.load() != ShmState::kAbsent; };
    wait(meeting, deadline, "start", has_come, [&](std::uint32_t each) {
      return layout_->rank(each).state.load() == ShmState::kAbsent || pidfds_[each] >= 0;
    });
    watch(rank);
  }
}

// ---- messages

void ShmGroup::send(std::uint32_t to, const void* data, std::size_t num_bytes, std::string_view label, double deadline) {
  const std::uint64_t position = post(to, data, num_bytes, label, deadline);
  if (position != 0) wait_read(to, position, deadline);
}

void ShmGroup::wait_read(std::uint32_t to, std::uint64_t position, double deadline) {
  ShmLane& lane = layout_->lane(rank_, to);
  const auto has_read = [&] { return lane.tail.load() >= position; };
  wait(lane.read, deadline, "send", has_read, [to](std::uint32_t rank) { return rank == to; });
}

std::uint64_t ShmGroup::post(std::uint32_t to, const void* data, std::size_t num_bytes, std::string_view label,
                             double deadline) {
  check();
  ShmLane& lane = layout_->lane(rank_, to);
  std::uint8_t* const ring = layout_->ring(rank_, to);
  std::uint64_t at = lane.head.load(std::memory_order_relaxed);
  const auto wait_for_room = [&](std::uint64_t num_new) {
    if (at + num_new > sizes_.ring) wait_read(to, at + num_new - sizes_.ring, deadline);
  };
  const auto publish = [&](std::uint64_t num_new) {
    at += num_new;
    lane.head.store(at);
    shm_notify(lane.written);
  };

  ShmMessage message{num_bytes, kInRing, {}};
  write_label(message.label, label);
  if (is_read_in_place(data, num_bytes)) {
    message.offset = static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(data) - heap_data());
    wait_for_room(sizeof message);
    put(ring, at, &message, sizeof message);
    publish(sizeof message);
    return at;
  }
  // As much as fits goes together with the message, so that a small one is published once.
  const auto* from = static_cast<const std::uint8_t*>(data);
  std::size_t piece = std::min(num_bytes, options_.chunk_bytes - sizeof message);
  wait_for_room(sizeof message + whole_pieces(piece));
  put(ring, at, &message, sizeof message);
  put(ring, at + sizeof message, from, piece);
  publish(sizeof message + whole_pieces(piece));
  for (std::size_t done = piece; done < num_bytes; done += piece) {
    piece = std::min(num_bytes - done, options_.chunk_bytes);
    wait_for_room(whole_pieces(piece));
    put(ring, at, from + done, piece);
    publish(whole_pieces(piece));
  }
  return 0;
}

void ShmGroup::recv(std::uint32_t from, void* data, std::size_t num_bytes, std::string_view label, double deadline) {
  check();
  ShmLane& lane = layout_->lane(from, rank_);
  const std::uint64_t at = lane.tail.load(std::memory_order_relaxed);
  const auto has_begun = [&] { return lane.head.load() >= at + sizeof(ShmMessage); };
  wait(lane.written, deadline, "receive", has_begun, [from](std::uint32_t rank) { return rank == from; });
  ShmMessage message;
  take(layout_->ring(from, rank_), at, &message, sizeof message);
  if (message.num_bytes != num_bytes || !is_label(message.label, label)) {
    fail_and_throw(CommFault::kOther, rank_text(from) + " sent " + label_text(message.label) + ", " + rank_text(rank_) +
                                          " receives " + std::string(label) + "; give tensors that are alike.");
  }
  if (message.offset == kInRing) {
    take_payload(from, lane, data, num_bytes, deadline);
    return;
  }
  if (message.offset > sizes_.heap || num_bytes > sizes_.heap - message.offset) {
    fail_and_throw(CommFault::kOther, rank_text(from) + " named a place outside of its heap.");
  }
  std::memcpy(data, layout_->heap(from) + message.offset, num_bytes);
  // A sender that gave up or left may have written there meanwhile; one that was killed has not.
  if (layout_->rank(from).state.load() == ShmState::kClosed) {
    fail_and_throw(CommFault::kPeer, rank_text(from) + " has left while its message was read; make a new group.");
  }
  check();
  lane.tail.store(at + sizeof message);
  shm_notify(lane.read);
}

void ShmGroup::take_payload(std::uint32_t from, ShmLane& lane, void* data, std::size_t num_bytes, double deadline) {
  const std::uint8_t* const ring = layout_->ring(from, rank_);
  std::uint64_t at = lane.tail.load(std::memory_order_relaxed) + sizeof(ShmMessage);
  for (std::size_t done = 0; done < num_bytes;) {
    const std::size_t wanted = std::min(num_bytes - done, options_.chunk_bytes);
    const auto has_more = [&] { return lane.head.load() > at; };
    wait(lane.written, deadline, "receive", has_more, [from](std::uint32_t rank) { return rank == from; });
    const std::size_t piece = std::min<std::size_t>(wanted, lane.head.load() - at);
    take(ring, at, static_cast<std::uint8_t*>(data) + done, piece);
    done += piece;
    at += whole_pieces(piece);
    if (done < num_bytes) {
      lane.tail.store(at);
      shm_notify(lane.read);
    }
  }
  lane.tail.store(at);
  shm_notify(lane.read);
}

void ShmGroup::put(std::uint8_t* ring, std::uint64_t at, const void* data, std::size_t num_bytes) const {
  if (num_bytes == 0) return;  // of nothing the pointer may be null
  const std::size_t place = at & (sizes_.ring - 1), first = std::min(num_bytes, sizes_.ring - place);
  std::memcpy(ring + place, data, first);
  std::memcpy(ring, static_cast<const std::uint8_t*>(data) + first, num_bytes - first);
}

void ShmGroup::take(const std::uint8_t* ring, std::uint64_t at, void* data, std::size_t num_bytes) const {
  if (num_bytes == 0) return;
  const std::size_t place = at & (sizes_.ring - 1), first = std::min(num_bytes, sizes_.ring - place);
  std::memcpy(data, ring + place, first);
  std::memcpy(static_cast<std::uint8_t*>(data) + first, ring, num_bytes - first);
}

bool ShmGroup::can_post_at_once(std::uint32_t to, const void* data, std::size_t num_bytes) const noexcept {
  const ShmLane& lane = layout_->lane(rank_, to);
  return is_read_in_place(data, num_bytes) && lane.head.load() - lane.tail.load() + sizeof(ShmMessage) <= sizes_.ring;
}

bool ShmGroup::is_read_in_place(const void* data, std::size_t num_bytes) const noexcept {
  const auto from = reinterpret_cast<std::uintptr_t>(data), heap = reinterpret_cast<std::uintptr_t>(heap_data());
  return num_bytes >= kOwnPlaceBytes && from >= heap && from - heap <= sizes_.heap && num_bytes <= sizes_.heap - (from - heap);
}

// ---- meetings

void ShmGroup::meet(std::string_view label, double deadline) { wait_for(arrive(label, deadline), label, deadline); }

std::uint64_t ShmGroup::arrive(std::string_view label, double deadline) {
  check();
  ShmRank& own = layout_->rank(rank_);
  const std::uint64_t number = ++num_meetings_;
  // Labels have two places: all must have gone on from the meeting before the last.
  for (std::uint32_t rank = 0; rank < world_size_ && number > 2; ++rank) {
    const auto lacks = [&](std::uint32_t each) { return layout_->rank(each).num_passed.load() < number - 2; };
    wait(layout_->header().meeting, deadline, label, [&] { return !lacks(rank); }, lacks);
  }
  write_label(own.labels[number % 2], label);
  own.num_meetings.store(number);
  shm_notify(layout_->header().meeting);
  return number;
}

void ShmGroup::wait_for(std::uint64_t meeting, std::string_view label, double deadline) {
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const ShmRank& other = layout_->rank(rank);
    const auto has_come = [&] { return other.num_meetings.load() >= meeting; };
    wait(layout_->header().meeting, deadline, label, has_come, [&](std::uint32_t each) {
      return layout_->rank(each).num_meetings.load() < meeting;
    });
    if (!is_label(other.labels[meeting % 2], label)) {
      fail_and_throw(CommFault::kOther, rank_text(rank) + " called " + label_text(other.labels[meeting % 2]) + ", " +
                                            rank_text(rank_) + " called " + std::string(label) +
                                            "; make the same call on every rank, with tensors that are alike.");
    }
  }
  layout_->rank(rank_).num_passed.store(meeting);
  shm_notify(layout_->header().meeting);
}

std::size_t ShmGroup::next_half(double deadline) {
  const std::uint64_t number = ++num_chunks_;
  ShmEvent& meeting = layout_->header().meeting;
  layout_->rank(rank_).num_read.store((begun_.empty() ? number : begun_.front().chunk) - 1);
  shm_notify(meeting);
  for (std::uint32_t rank = 0; rank < world_size_ && number > 2; ++rank) {
    const auto lacks = [&](std::uint32_t each) { return layout_->rank(each).num_read.load() < number - 2; };
    wait(meeting, deadline, "the staging", [&] { return !lacks(rank); }, lacks);
  }
  return number % 2;
}

// ---- waiting

template <typename Ready>
bool ShmGroup::spin(Ready ready) const {
  if (ready()) return true;
  for (const double end = shm_now() + options_.spin_s; shm_now() < end;) {
    for (int i = 0; i < 16; ++i) {
      shm_pause();
      if (ready()) return true;
    }
    sched_yield();  // the one that is waited for may have been given the same processor
  }
  return false;
}

template <typename Ready, typename Missing>
void ShmGroup::wait(ShmEvent& event, double deadline, std::string_view what, Ready ready, Missing missing) {
  if (spin(ready)) return;
  for (;;) {
    check();
    if (shm_wait(event, std::min(deadline - shm_now(), 0.05), ready)) return;
    check();
    for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
      if (rank == rank_ || !missing(rank) || !has_gone(rank)) continue;
      if (ready()) return;  // it did its part before it went
      fail_and_throw(CommFault::kPeer, rank_text(rank) + " has gone, and " + rank_text(rank_) + " waited for it in " +
                                           std::string(what) + "; make a new group.");
    }
    if (shm_now() >= deadline) {
      std::string ranks;
      for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
        if (rank != rank_ && missing(rank)) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      }
      if (ready()) return;
      fail_and_throw(CommFault::kTimeout, std::string(what) + " of " + rank_text(rank_) + " did not end before its deadline: " +
                                              "it waited for rank " + ranks + "; make a new group.");
    }
    if (idle_) idle_();
  }
}

void ShmGroup::check() const {
  if (is_closed_.load()) throw CommError(CommFault::kOther, "this group is closed; make a new one.");
  ShmCause& cause = layout_->header().cause;
  if (cause.phase.load() == 0) return;
  // The process that writes the cause may have lost its core meanwhile, or have been killed.
  for (const double end = shm_now() + kCauseSeconds; cause.phase.load() != 2;) {
    if (shm_now() >= end) throw CommError(CommFault::kOther, "the group is broken; make a new one.");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  throw CommError(cause.fault, std::string(cause.text, strnlen(cause.text, sizeof cause.text)));
}

void ShmGroup::fail(CommFault fault, const std::string& text) noexcept {
  ShmCause& cause = layout_->header().cause;
  std::uint32_t expected = 0;
  if (!cause.phase.compare_exchange_strong(expected, 1)) return;
  cause.fault = fault;
  const std::size_t length = std::min(text.size(), sizeof cause.text - 1);
  std::memcpy(cause.text, text.data(), length);
  cause.text[length] = '\0';
  cause.phase.store(2);
  wake_all();
}

void ShmGroup::fail_and_throw(CommFault fault, const std::string& text) {
  fail(fault, text);
  check();
  throw CommError(fault, text);
}

void ShmGroup::close() noexcept {
  if (is_closed_.exchange(true)) return;
  ShmRank& own = layout_->rank(rank_);
  if (!has_joined_ || own.pid != getpid()) return;  // a fork of the rank is not the rank
  own.state.store(ShmState::kClosed);
  wake_all();
}

void ShmGroup::wake_all() noexcept {
  for (std::uint32_t from = 0; from < world_size_; ++from) {
    for (std::uint32_t to = 0; to < world_size_; ++to) {
      shm_notify(layout_->lane(from, to).written);
      shm_notify(layout_->lane(from, to).read);
    }
  }
  shm_notify(layout_->header().meeting);
}

// ---- who still lives

void ShmGroup::watch(std::uint32_t rank) {
  const ShmRank& other = layout_->rank(rank);
  pidfds_[rank] = open_pidfd(other.pid);
  const int error = errno;
  if (pidfds_[rank] >= 0 && start_time_of(other.pid) == other.start_time) return;
  if (pidfds_[rank] >= 0 || error == ESRCH) {
    if (other.state.load() == ShmState::kClosed) return;  // which the first wait for it tells
    fail_and_throw(CommFault::kPeer, rank_text(rank) + " has gone before all ranks were there.");
  }
  fail_and_throw(CommFault::kOther, std::string("cannot watch process ") + std::to_string(other.pid) + ": " +
                                        std::strerror(error) + "; this needs Linux 5.3 and one PID namespace.");
}

bool ShmGroup::has_gone(std::uint32_t rank) const {
  if (layout_->rank(rank).state.load() == ShmState::kClosed) return true;
  if (pidfds_[rank] < 0) return false;  // not there yet
  pollfd entry{pidfds_[rank], POLLIN, 0};
  return poll(&entry, 1, 0) > 0;  // readable once it has ended, though its parent may not have asked for it
}

}  // namespace sage
