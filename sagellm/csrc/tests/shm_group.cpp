// Groups over shared memory, with threads as ranks: messages through rings and from heaps, meetings, what breaks a group.
// Threads wait for what happened, never for a while; the only clock is the group's own deadline.

#include "sagellm/shm_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "expect.h"

namespace {

using sage::CommError;
using sage::CommFault;
using sage::ShmGroup;
using Bytes = std::vector<std::uint8_t>;

double in(double seconds) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() + seconds;
}
double soon() { return in(0.05); }
double late() { return in(60); }

// Runs a group, one thread a rank, with a ring of one page.
void run(std::uint32_t world_size, const std::function<void(ShmGroup&, std::uint32_t)>& body, double spin_s = 0) {
  const auto segment = sage::ShmSegment::create(world_size, sage::ShmSizes{4096, 4096, 1 << 20});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      ShmGroup group(segment, rank, sage::ShmOptions{1024, spin_s});
      group.join(late());
      body(group, rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

template <typename Call>
CommFault fault_of(Call call, const char* words = "") {
  try {
    call();
  } catch (const CommError& error) {
    if (std::strstr(error.what(), words) == nullptr) std::fprintf(stderr, "said: %s\n", error.what());
    EXPECT(std::strstr(error.what(), words) != nullptr);
    return error.fault();
  }
  std::fprintf(stderr, "no error\n");
  std::abort();
}

Bytes pattern(std::size_t num_bytes, std::uint32_t seed) {
  Bytes out(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) out[i] = static_cast<std::uint8_t>(i * 31 + seed * 17 + (i >> 8));
  return out;
}

const std::array<std::size_t, 9> kLengths{0, 1, 127, 128, 768, 769, 4096, 5000, 40'000};

void messages_arrive_in_order_between_all_pairs() {
  for (const double spin_s : {0.0, 20e-6}) {
    run(3, [](ShmGroup& group, std::uint32_t rank) {
      std::vector<std::thread> threads;
      for (std::uint32_t other = 0; other < 3; ++other) {
        if (other == rank) continue;
        threads.emplace_back([&, other] {
          for (std::uint32_t i = 0; i < 60; ++i) {
            const Bytes bytes = pattern(kLengths[i % kLengths.size()], rank * 100 + i);
            group.send(other, bytes.data(), bytes.size(), "bytes", late());
          }
        });
        threads.emplace_back([&, other] {
          for (std::uint32_t i = 0; i < 60; ++i) {
            Bytes bytes(kLengths[i % kLengths.size()]);
            group.recv(other, bytes.data(), bytes.size(), "bytes", late());
            EXPECT(bytes == pattern(bytes.size(), other * 100 + i));
          }
        });
      }
      for (auto& thread : threads) thread.join();
    }, spin_s);
  }
}

void what_lies_in_the_heap_is_read_there() {
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    constexpr std::size_t kLength = 100'000;
    for (std::uint32_t i = 0; i < 20; ++i) {
      if (rank == 0) {
        const std::size_t place = group.heap().allocate(kLength);
        EXPECT(place != sage::ShmHeap::npos);
        const Bytes bytes = pattern(kLength, i);
        std::memcpy(group.heap_data() + place, bytes.data(), kLength);
        group.send(1, group.heap_data() + place, kLength, "bytes", late());
        std::memset(group.heap_data() + place, 0, kLength);  // it has been read when `send` returns
        group.heap().release(place, kLength);
      } else {
        Bytes bytes(kLength);
        group.recv(0, bytes.data(), kLength, "bytes", late());
        EXPECT(bytes == pattern(kLength, i));
      }
    }
  });
}

void what_was_written_before_a_meeting_is_seen_after_it() {
  run(3, [](ShmGroup& group, std::uint32_t rank) {
    for (std::uint32_t i = 0; i < 200; ++i) {
      std::uint8_t* const half = group.staging() + (i % 2) * 4096;
      half[rank * 2 * 4096] = static_cast<std::uint8_t>(i + rank);
      if (!planted("race")) group.meet("count", late());
      for (std::uint32_t other = 0; other < 3; ++other) {
        EXPECT(half[other * 2 * 4096] == static_cast<std::uint8_t>(i + other) || planted("race"));
      }
    }
  });
}

// Number i that a rank gives to a sum.
float number(std::uint32_t rank, std::size_t i, std::uint32_t round) {
  return static_cast<float>((i * 7919 + rank * 104'729 + round * 1'299'709) % 100'003) / 7.0F - 5000.F;
}

std::vector<float> numbers(std::size_t count, std::uint32_t rank, std::uint32_t round) {
  std::vector<float> own(count);
  for (std::size_t i = 0; i < count; ++i) own[i] = number(rank, i, round);
  return own;
}

// In the order of the ranks.
std::vector<float> sums(std::size_t count, std::uint32_t world_size, std::uint32_t round) {
  std::vector<float> sum = numbers(count, 0, round);
  for (std::uint32_t rank = 1; rank < world_size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += number(rank, i, round);
  }
  return sum;
}

const std::array<std::size_t, 8> kCounts{0, 1, 255, 257, 1024, 1025, 4096, 10'000};

void sums_have_the_bits_of_the_ranks_order() {
  for (const std::uint32_t world_size : {2U, 3U, 4U}) {
    run(world_size, [=](ShmGroup& group, std::uint32_t rank) {
      for (std::uint32_t round = 0; round < 80; ++round) {
        const std::size_t count = kCounts[round % kCounts.size()];
        if (round % 3 == 0) group.meet("pause", late());
        std::vector<float> own = numbers(count, rank, round);
        if (planted("order") && rank == 1 && count > 0) own[0] += 1.F;
        if (round % 16 == rank) std::this_thread::yield();
        group.add_up(own.data(), count, sage::ShmNumber::kFloat32, "sum", late());
        EXPECT(own == sums(count, world_size, round));
      }
    });
  }
}

void sums_of_bfloat16_are_rounded_once() {
  run(3, [](ShmGroup& group, std::uint32_t rank) {
    // 1 and twice 2^-8: half a step of bfloat16 is lost if the sums are rounded one by one.
    std::vector<std::uint16_t> own(3000, rank == 0 ? 0x3F80 : 0x3B80);
    group.add_up(own.data(), own.size(), sage::ShmNumber::kBFloat16, "sum", late());
    EXPECT((own == std::vector<std::uint16_t>(3000, 0x3F81)));
  });
}

// Sums of one and of two calls, and gatherings, one after the other: no rank reads what another has written over.
void collectives_of_all_sorts_follow_each_other() {
  for (const std::uint32_t world_size : {2U, 3U}) {
    run(world_size, [=](ShmGroup& group, std::uint32_t rank) {
      const auto type = sage::ShmNumber::kFloat32;
      for (std::uint32_t round = 0; round < 300; ++round) {
        const std::size_t count = 1 + round * 131 % group.most_to_begin(type);
        if ((round + rank) % 5 == 0) std::this_thread::yield();
        switch (round % 3) {
          case 0: {
            std::vector<float> one = numbers(count, rank, round), two = numbers(100, rank, round + 1);
            group.begin_sum(one.data(), count, type, "piece", late());
            group.begin_sum(two.data(), 100, type, "piece", late());
            EXPECT(one == numbers(count, rank, round));
            group.end_sum(late());
            EXPECT(one == sums(count, world_size, round));
            group.end_sum(late());
            EXPECT(two == sums(100, world_size, round + 1));
            group.meet("pause", late());
            break;
          }
          case 1: {
            const std::size_t rows = 1 + round % 4, columns = 1 + round * 37 % 5000, part = columns / world_size + 1;
            std::vector<float> all(rows * columns, -1.F);
            for (std::size_t row = 0; row < rows; ++row) {
              for (std::size_t i = rank * part; i < std::min(columns, (rank + 1) * part); ++i) {
                all[row * columns + i] = number(0, row * columns + i, round);
              }
            }
            group.gather_columns(all.data(), rows, columns, part, "columns", late());
            EXPECT(all == numbers(rows * columns, 0, round));
            break;
          }
          default: {
            const Bytes own = pattern(count, rank + round);
            Bytes all(count * world_size);
            group.gather(own.data(), count, all.data(), "bytes", late());
            for (std::uint32_t other = 0; other < world_size; ++other) {
              const auto begin = all.begin() + static_cast<std::ptrdiff_t>(other * count);
              EXPECT(Bytes(begin, begin + static_cast<std::ptrdiff_t>(count)) == pattern(count, other + round));
            }
          }
        }
      }
    });
  }
}

// A rank that leaves a sum out, or adds up something else, is found by all: none gets a wrong sum.
void ranks_that_go_other_ways_are_found() {
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    std::vector<float> own(100, 1.F);
    const auto sum = [&](const char* label) {
      group.add_up(own.data(), own.size(), sage::ShmNumber::kFloat32, label, late());
    };
    EXPECT(fault_of([&] { sum(rank == 0 ? "sum of attention" : "sum of the feed-forward part"); }, "called sum of") ==
           CommFault::kOther);
  });
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    std::vector<float> own(100, 1.F);
    const auto sum = [&] { group.add_up(own.data(), own.size(), sage::ShmNumber::kFloat32, "sum", late()); };
    const auto end = [&] { group.meet("end", late()); };
    sum();
    EXPECT((rank == 0 ? fault_of(sum, "called") : fault_of(end, "called")) == CommFault::kOther);
  });
}

void what_differs_is_refused_by_all() {
  run(3, [](ShmGroup& group, std::uint32_t rank) {
    const std::string label = rank == 1 ? "max" : "min";
    for (int i = 0; i < 2; ++i) EXPECT(fault_of([&] { group.meet(label, late()); }, "called m") == CommFault::kOther);
  });
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    const std::uint32_t other = 1 - rank;
    std::uint8_t bytes[8] = {};
    if (rank == 0) group.send(other, bytes, 8, "eight", late());
    const auto call = [&] { group.recv(other, bytes, 4, "four", late()); };
    EXPECT(fault_of(call, "rank 0 sent eight, rank 1 receives four") == CommFault::kOther);
  });
}

void a_deadline_breaks_the_group_for_all() {
  run(3, [](ShmGroup& group, std::uint32_t rank) {
    std::uint8_t byte = 0;
    const std::uint32_t other = (rank + 1) % 3;
    const auto first = [&] { group.recv(other, &byte, 1, "byte", rank == 1 ? soon() : late()); };
    EXPECT(fault_of(first, "receive of rank 1 did not end before its deadline: it waited for rank 2") == CommFault::kTimeout);
    EXPECT(fault_of([&] { group.meet("x", late()); }, "receive of rank 1") == CommFault::kTimeout);
    const Bytes bytes(100'000);
    EXPECT(fault_of([&] { group.send(other, bytes.data(), bytes.size(), "x", late()); }) == CommFault::kTimeout);
  });
}

void full_rings_and_unread_heaps_have_deadlines() {
  for (const bool is_in_heap : {false, true}) {
    run(2, [=](ShmGroup& group, std::uint32_t rank) {
      if (rank == 1) {
        EXPECT(fault_of([&] { group.meet("x", late()); }, "send of rank 0") == CommFault::kTimeout);
        return;
      }
      const Bytes own(100'000);
      const std::uint8_t* const bytes = is_in_heap ? group.heap_data() : own.data();
      EXPECT(fault_of([&] { group.send(1, bytes, own.size(), "x", soon()); }, "waited for rank 1") == CommFault::kTimeout);
    });
  }
}

void who_leaves_is_missed() {
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    std::uint8_t byte = static_cast<std::uint8_t>(rank);
    if (rank == 1) {
      group.send(0, &byte, 1, "byte", late());
      group.close();
      EXPECT(fault_of([&] { group.meet("x", late()); }, "closed") == CommFault::kOther);
      return;
    }
    group.recv(1, &byte, 1, "byte", late());  // sent before it left
    EXPECT(byte == 1);
    EXPECT(fault_of([&] { group.recv(1, &byte, 1, "byte", late()); }, "rank 1 has gone") == CommFault::kPeer);
    EXPECT(fault_of([&] { group.meet("x", late()); }, "rank 1 has gone") == CommFault::kPeer);
  });
}

void close_ends_what_waits() {
  run(2, [](ShmGroup& group, std::uint32_t rank) {
    if (rank == 1) {
      std::uint8_t byte = 0;
      group.recv(0, &byte, 1, "go", late());
      return;
    }
    std::thread waiting([&] {
      std::uint8_t byte = 0;
      EXPECT(fault_of([&] { group.recv(1, &byte, 1, "byte", late()); }) != CommFault::kTimeout);
    });
    std::uint8_t byte = 0;
    group.send(1, &byte, 1, "go", late());
    group.close();
    waiting.join();
  });
}

void ranks_join_once_and_in_time() {
  const auto segment = sage::ShmSegment::create(2, sage::ShmSizes{4096, 4096, 4096});
  ShmGroup group(segment, 0, {});
  EXPECT(fault_of([&] { group.join(soon()); }, "waited for rank 1") == CommFault::kTimeout);
  ShmGroup twice(segment, 0, {});
  EXPECT(fault_of([&] { twice.join(soon()); }, "joined already") == CommFault::kOther);
  EXPECT(fault_of([&] { ShmGroup beyond(segment, 2, {}); }, "not of this group") == CommFault::kOther);
}

void segments_are_opened_by_who_knows_them() {
  const auto segment = sage::ShmSegment::create(2, sage::ShmSizes{5000, 1, 1});
  EXPECT(segment->sizes().ring == 8192 && segment->sizes().heap == 4096);
  const auto other = sage::ShmSegment::open(getpid(), segment->fd(), segment->token());
  other->data()[4096] = 9;
  EXPECT(segment->data()[4096] == 9);
  EXPECT(fault_of([&] { sage::ShmSegment::open(getpid(), segment->fd(), segment->token() + 1); }) == CommFault::kOther);
  const int fd = segment->fd();
  segment->release_fd();
  EXPECT(fault_of([&] { sage::ShmSegment::open(getpid(), fd, segment->token()); }) == CommFault::kPeer);
}

void heaps_are_whole_again() {
  sage::ShmHeap heap(64 * 100);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < 100; ++i) places.push_back(heap.allocate(1 + i % 64));
  EXPECT((std::set<std::size_t>(places.begin(), places.end()).size() == 100) && heap.num_free() == 0);
  EXPECT(heap.allocate(1) == sage::ShmHeap::npos && heap.allocate(~std::size_t{0}) == sage::ShmHeap::npos);
  for (std::size_t step = 0; step < 100; ++step) {
    const std::size_t i = step * 37 % 100;  // each once
    heap.release(places[i], 1 + i % 64);
  }
  EXPECT(heap.allocate(64 * 100) == 0);
}

}  // namespace

int main() {
  messages_arrive_in_order_between_all_pairs();
  what_lies_in_the_heap_is_read_there();
  what_was_written_before_a_meeting_is_seen_after_it();
  sums_have_the_bits_of_the_ranks_order();
  sums_of_bfloat16_are_rounded_once();
  collectives_of_all_sorts_follow_each_other();
  ranks_that_go_other_ways_are_found();
  what_differs_is_refused_by_all();
  a_deadline_breaks_the_group_for_all();
  full_rings_and_unread_heaps_have_deadlines();
  who_leaves_is_missed();
  close_ends_what_waits();
  ranks_join_once_and_in_time();
  segments_are_opened_by_who_knows_them();
  heaps_are_whole_again();
  std::puts("shm_group: passed");
}
