// In place of backends/hopper/csrc/ptx.cuh: what its instructions do, on the host.
#pragma once

#include "barriers.h"

namespace hopper {

using u32 = unsigned int;
using u64 = unsigned long long;

// As in a GPU's cluster, the upper bits are the block's number.
inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const char*>(pointer) - dynamic_shared) | host::own_block() << BLOCK_SHIFT;
}

using host::barrier_arrive, host::barrier_expect, host::barrier_init, host::barrier_wait;
using host::give_registers, host::launch_dependents, host::named_sync, host::pin, host::swizzled, host::take_registers, host::wait_for_earlier;
inline bool barrier_passed(u32 barrier, u32 parity) {
  if (host::early) return host::barrier_passed(barrier, parity);
  return (host::barrier_at(barrier).phase & 1) != parity;  // as late as may be
}
inline void barrier_arrive_in(u32 barrier, u32 block) {
  const host::InBlock there(block);
  host::barrier_arrive(barrier);
}
inline void fence_barrier_init() {}
inline void fence_async() {}
inline void cluster_sync() { host::wait_for_cluster(); }
inline bool named_any(int id, int threads, bool own) {
  static bool any[host::MOST_BLOCKS][16];
  bool& found = any[host::own_block()][id];
  named_sync(id, threads), found |= own;
  named_sync(id, threads);
  const bool result = found;
  named_sync(id, threads), found = false;
  return result;
}
inline void named_arrive(int id, int threads) { host::of_name[host::own_block()][id].arrive(threads); }

// What a tensor map says, in place of the driver's form; axes from the innermost.
struct alignas(64) TensorMap {
  const char* start;
  u64 strides[3];  // of the other axes, in bytes
  u32 extents[4], box[4];
  u32 size, swizzle;  // of an element, and of a row that is swizzled, in bytes
};

inline void copy_box(u32 to, const TensorMap& map, int x, int y, int z, int w, u32 barrier) {
  const u32 piece = 16 / map.size;
  if (map.swizzle != 128 || map.box[0] * map.size != 128 || map.extents[0] % piece) host::fail("a box whose rows are not of 128 bytes");
  host::shared(to, 128);
  u32 at = to;
  for (int l = w; l < w + static_cast<int>(map.box[3]); ++l) {
    for (int k = z; k < z + static_cast<int>(map.box[2]); ++k) {
      for (int j = y; j < y + static_cast<int>(map.box[1]); ++j) {
        for (u32 i = x; i < x + map.box[0]; i += piece, at += 16) {
          const auto inside = [&](int axis, int place) { return place >= 0 && place < static_cast<int>(map.extents[axis]); };
          const bool there = inside(0, i) && inside(1, j) && inside(2, k) && inside(3, l);
          const char* const from = map.start + i * map.size + j * map.strides[0] + k * map.strides[1] + l * map.strides[2];
          host::awaited_at(barrier).ask({host::shared(swizzled(at), 16), there ? from : nullptr, 16});
        }
      }
    }
  }
}
inline void copy_box_to(u32 to, const TensorMap& map, int x, int y, int z, int w, u32 barrier, unsigned short blocks) {
  for (int block = 0; block < host::MOST_BLOCKS; ++block) {
    if (!(blocks >> block & 1)) continue;
    const host::InBlock there(block);
    copy_box(to, map, x, y, z, w, barrier);
  }
}
inline void prefetch_map(const TensorMap&) {}
inline void prefetch_line(const void* at) { host::check(at, 2); }

inline void store_word(u32 to, u32 word) { std::memcpy(host::shared(to, 4), &word, 4); }
inline u32 load_word(u32 from) {
  u32 word;
  std::memcpy(&word, host::shared(from, 4), 4);
  return word;
}
inline void store_zeros(u32 to) { std::memset(host::shared(to, 16), 0, 16); }

template <int COUNT>
void pin(u32 (&)[COUNT]) {}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }

}  // namespace hopper
