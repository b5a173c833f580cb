// In place of kernels/linear/csrc/ptx.cuh: what its instructions do, on the host.
#pragma once

#include "barriers.h"

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
using host::copies_commit, host::copies_wait, host::load_stored;

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
inline u32 load_byte(u32 from) { return load_shared<u8>(from); }
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
inline float2 load_two(u32 from) {
  float2 two;
  std::memcpy(&two, host::shared(from, 8), 8);
  return two;
}
inline Quad load_constant_quad(const void* from) {
  Quad quad;
  host::check(from, 16);
  std::memcpy(&quad, from, 16);
  return quad;
}
inline int add_arrivals(int* to, int count) {
  host::check(to, 4);
  return (*to += count) - count;
}

template <typename T>
void store_shared(u32 to, T value) {
  std::memcpy(host::shared(to, sizeof(T)), &value, sizeof(T));
}

using host::barrier_arrive, host::barrier_expect, host::barrier_init, host::barrier_wait;
using host::give_registers, host::launch_dependents, host::named_sync, host::pin, host::swizzled, host::take_registers, host::wait_for_earlier;
inline void barriers_ready() {}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) host::fail("a copy in bulk that is not of whole 16 bytes");
  host::check(from, bytes);
  host::awaited_at(barrier).ask({host::shared(to, 16), static_cast<const char*>(from), bytes});
}

// What a tensor map says, in place of the driver's form.
struct alignas(64) TensorMap {
  const char* start;
  u64 rows, row_bytes;
  u32 box_rows, box_bytes, element = 1;  // element: bytes of what columns count
  bool swizzled = false;                 // by 128 bytes, in 16-byte chunks
};
inline void copy_rows(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64) {
  if (map.box_rows > 256) host::fail("a box of more than 256 rows");
  host::shared(to, map.swizzled ? 1024 : 128);
  column *= map.element;
  const u32 piece = map.swizzled ? 16 : map.box_bytes;  // that stays together
  for (u32 i = 0; i < map.box_rows; ++i) {
    const u64 at = row + i, left = column < map.row_bytes ? std::min<u64>(map.row_bytes - column, map.box_bytes) : 0;
    for (u32 byte = 0; byte < map.box_bytes; byte += piece) {
      const u32 place = to + i * map.box_bytes + byte;
      char* const target = host::shared(map.swizzled ? swizzled(place) : place, 16);
      const u32 copied = at < map.rows && byte < left ? std::min<u32>(left - byte, piece) : 0;
      if (copied) {
        const char* const from = map.start + at * map.row_bytes + column + byte;
        host::check(from, copied);
        host::awaited_at(barrier).ask({target, from, copied});
      }
      if (copied < piece) host::awaited_at(barrier).ask({target + copied, nullptr, piece - copied});
    }
  }
}

inline void cluster_wait() { host::wait_for_cluster(); }
inline Floats load_floats_of_block(u32 from, int block) {
  Floats four;
  host::shared(from, 16);
  std::memcpy(&four, host::memories[block] + from, 16);
  return four;
}

inline u16 to_float8_pair(float low, float high) { return host::to_float8(low) | host::to_float8(high) << 8; }
inline u32 permute(u32 low, u32 high, u32 selector) {
  const u64 both = static_cast<u64>(high) << 32 | low;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<u32>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline u32 and_or(u32 a, u32 mask, u32 c) { return (a & mask) | c; }

}  // namespace fused
