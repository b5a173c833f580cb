// In place of models/fused/csrc/ptx.cuh: what its instructions do, on the host.
#pragma once

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
inline Quad load_constant_quad(const void* from) {
  Quad quad;
  host::check(from, 16);
  std::memcpy(&quad, from, 16);
  return quad;
}
inline u32 load_stored(const u32* from) {
  host::check(from, 4);
  return *from;
}

struct Barrier {
  u16 expected, missing;
  u32 phase;
};
inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(host::shared(address, 8)); }
inline void barrier_init(u32 barrier, u32 arrivals) {
  barrier_at(barrier) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0};
}
inline void barrier_arrive(u32 barrier) {
  Barrier& at = barrier_at(barrier);
  if (--at.missing == 0) at.missing = at.expected, ++at.phase;
}
inline void barrier_wait(u32 barrier, u32 parity) {
  while ((barrier_at(barrier).phase & 1) == parity) host::let_others_run();
}
inline void named_sync(int id, int threads) { host::meet(host::of_name[id], threads); }
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
