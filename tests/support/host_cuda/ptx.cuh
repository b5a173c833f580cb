// In place of models/fused/csrc/ptx.cuh: what its instructions do, on the host.
#pragma once

#include <map>

#include "host.h"

namespace fused {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const char*>(pointer) - dynamic_shared); }
inline u64 read_once() { return 0; }
inline void copy_16_once(u32 to, const void* from, u64) { host::copy(to, from, 16, 16); }
inline void copy_16_once(u32 to, const void* from, u32 bytes, u64) { host::copy(to, from, bytes, 16); }
inline void copy_16(u32 to, const void* from, u32 bytes) { host::copy(to, from, bytes, 16); }
inline void copy_4(u32 to, const void* from, u32 bytes) { host::copy(to, from, bytes, 4); }
inline void copies_commit() {
  host::groups[host::current].push_back(host::begun[host::current]);
  host::begun[host::current].clear();
}
template <int most>
void copies_wait() {
  host::arrive(most);
}

struct Quad {
  u32 part[4];
};
struct Floats {
  float part[4];
};
template <typename T>
T load_shared(u32 from) {
  T value;
  std::memcpy(&value, host::shared(from, sizeof(T)), sizeof(T));
  return value;
}
inline Quad load_quad(u32 from) {
  Quad quad;
  std::memcpy(&quad, host::shared(from, 16), 16);
  return quad;
}
inline Floats load_floats(u32 from) {
  Floats four;
  std::memcpy(&four, host::shared(from, 16), 16);
  return four;
}
inline Quad load_constant_quad(const void* from) {
  Quad quad;
  host::check(from, 16);
  std::memcpy(&quad, from, 16);
  return quad;
}
template <typename T>
T load_stored(const T* from) {
  host::check(from, sizeof(T));
  return *from;
}
inline int add_arrivals(int* to, int count) {
  host::check(to, 4);
  return (*to += count) - count;
}

template <typename T>
void store_shared(u32 to, T value) {
  std::memcpy(host::shared(to, sizeof(T)), &value, sizeof(T));
}

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

  void ask(const Bulk& copy) {
    asked += copy.bytes;
    if (host::early) {
      copy.arrive();
    } else {
      copies.push_back(copy);
    }
  }
};
inline std::map<u32, Awaited> awaited;

struct Barrier {
  u16 expected, missing;
  u32 phase;
};
inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(host::shared(address, 8)); }
inline void barrier_init(u32 barrier, u32 arrivals) {
  barrier_at(barrier) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0};
  awaited[barrier] = {};
}
inline void end_phase(u32 barrier) {
  Barrier& at = barrier_at(barrier);
  Awaited& wait = awaited[barrier];
  if (wait.asked > wait.expected) host::fail("more bytes are copied than a barrier expects");
  if (at.missing || wait.asked != wait.expected) return;
  for (const Bulk& copy : wait.copies) copy.arrive();
  wait = {}, at.missing = at.expected, ++at.phase;
}
inline void barrier_arrive(u32 barrier) {
  --barrier_at(barrier).missing;
  if (!awaited[barrier].expected) end_phase(barrier);
}
inline void barrier_expect(u32 barrier, u32 bytes) {
  awaited[barrier].expected += bytes;
  barrier_arrive(barrier);
}
inline void barriers_ready() {}
inline void barrier_wait(u32 barrier, u32 parity) {
  while ((barrier_at(barrier).phase & 1) == parity) {
    if (awaited[barrier].expected) end_phase(barrier);
    if ((barrier_at(barrier).phase & 1) == parity) host::let_others_run();
  }
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) host::fail("a copy in bulk that is not of whole 16 bytes");
  host::check(from, bytes);
  awaited[barrier].ask({host::shared(to, 16), static_cast<const char*>(from), bytes});
}

// What a tensor map says, in place of the driver's form.
struct alignas(64) TensorMap {
  const char* start;
  u64 rows, row_bytes;
  u32 box_rows, box_bytes;
};
inline void copy_rows(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64) {
  if (map.box_rows > 256) host::fail("a box of more than 256 rows");
  host::shared(to, 128);
  for (u32 i = 0; i < map.box_rows; ++i) {
    const u64 at = row + i, left = column < map.row_bytes ? std::min<u64>(map.row_bytes - column, map.box_bytes) : 0;
    char* const target = host::shared(to + i * map.box_bytes, 16);
    if (at < map.rows && left) {
      const char* const from = map.start + at * map.row_bytes + column;
      host::check(from, left);
      awaited[barrier].ask({target, from, static_cast<u32>(left)});
    }
    const u32 copied = at < map.rows ? left : 0;
    if (copied < map.box_bytes) awaited[barrier].ask({target + copied, nullptr, map.box_bytes - copied});
  }
}

inline void cluster_wait() { host::wait_for_cluster(); }
inline Floats load_floats_of_block(u32 from, int block) {
  Floats four;
  host::shared(from, 16);
  std::memcpy(&four, host::memories[block].data() + from, 16);
  return four;
}
template <int count>
void take_registers() {}
template <int count>
void give_registers() {}
inline void named_sync(int id, int threads) { host::meet(host::of_name[blockIdx.y][id], threads); }
inline void launch_dependents() {}
inline void wait_for_earlier() {}

inline u32 permute(u32 low, u32 high, u32 selector) {
  const u64 both = static_cast<u64>(high) << 32 | low;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<u32>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline u32 and_or(u32 a, u32 mask, u32 c) { return (a & mask) | c; }

}  // namespace fused
