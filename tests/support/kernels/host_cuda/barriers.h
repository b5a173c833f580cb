// Barriers in shared memory that count arrivals, and the bytes of copies that one thread has asked for.
#pragma once

#include <functional>
#include <map>

#include "host.h"

namespace host {

using u32 = uint32_t;

// Copies by one thread that a barrier counts. They arrive as late as they may, when threads wait for them; or as early.
struct Bulk {
  char* to;
  const char* from;  // null: zeros
  u32 bytes;

  void arrive() const { from ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes); }
};
struct Awaited {
  u32 expected = 0, asked = 0;  // bytes
  std::vector<Bulk> copies;
  Waiting waiting;

  void ask(const Bulk& copy) {
    asked += copy.bytes;
    if (early) {
      copy.arrive();
    } else {
      copies.push_back(copy);
    }
    waiting.wake();
  }
};
inline std::map<const char*, Awaited> awaited;

struct Barrier {
  uint16_t expected, missing;
  u32 phase;
};
inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(shared(address, 8)); }
inline Awaited& awaited_at(u32 address) { return awaited[shared(address, 8)]; }

// While it lives, addresses are those of another block.
struct InBlock {
  const int before = current;
  explicit InBlock(int block) { current = block * threads; }
  ~InBlock() { current = before; }
};

inline void barrier_init(u32 barrier, u32 arrivals) {
  barrier_at(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
  awaited_at(barrier) = {};
}
// Another block's copies may be asked for before this one says how many bytes it expects.
inline void end_phase(u32 barrier) {
  Barrier& at = barrier_at(barrier);
  Awaited& wait = awaited_at(barrier);
  if (at.missing) return;
  if (wait.asked > wait.expected) fail("more bytes are copied than a barrier expects");
  if (wait.asked != wait.expected) return;
  for (const Bulk& copy : wait.copies) copy.arrive();
  wait.waiting.wake();
  wait = {}, at.missing = at.expected, ++at.phase;
}
inline void barrier_arrive(u32 barrier) {
  if (!barrier_at(barrier).missing) fail("more arrive at a barrier than it counts");
  --barrier_at(barrier).missing;
  awaited_at(barrier).waiting.wake();
  if (!awaited_at(barrier).expected) end_phase(barrier);
}
inline void barrier_expect(u32 barrier, u32 bytes) {
  awaited_at(barrier).expected += bytes;
  barrier_arrive(barrier);
}
inline bool barrier_passed(u32 barrier, u32 parity) {
  if ((barrier_at(barrier).phase & 1) == parity && awaited_at(barrier).expected) end_phase(barrier);
  return (barrier_at(barrier).phase & 1) != parity;
}
inline void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) awaited_at(barrier).waiting.wait();
}

// Products of warpgroups are computed as late as they may be, when their threads wait for them, or at once.
using Product = std::function<void()>;
inline std::vector<Product> begun_products[MOST_THREADS];
inline std::vector<std::vector<Product>> product_groups[MOST_THREADS];
inline void begin(const Product& product) {
  if (at_once) {
    product();
  } else {
    begun_products[current].push_back(product);
  }
}
inline void products_begin() {}
inline void products_commit() {
  product_groups[current].push_back(begun_products[current]);
  begun_products[current].clear();
}
template <int PENDING>
void products_wait() {
  auto& mine = product_groups[current];
  while (static_cast<int>(mine.size()) > PENDING) {
    for (const Product& product : mine.front()) product();
    mine.erase(mine.begin());
  }
  __syncwarp();  // the products of all lanes are done
}

// Where the swizzle of 128 bytes puts a piece of 16.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline void named_sync(int id, int threads) { meet(of_name[own_block()][id], threads); }
inline void launch_dependents() {}
inline void wait_for_earlier() {}
template <int COUNT>
void give_registers() {}
template <int COUNT>
void take_registers() {}
template <int COUNT>
void pin(float (&)[COUNT]) {}

}  // namespace host
