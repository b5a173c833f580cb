// In place of backends/hopper/csrc/warp.cuh: what its instructions do, on the host.
#pragma once

#include "ptx.cuh"

namespace hopper {

using u16 = unsigned short;

inline float warp_float(u16 bits) { return HALF_IS_BF16 ? host::from_bfloat16(bits) : host::from_float16(bits); }
inline u16 warp_half(float value) { return HALF_IS_BF16 ? host::to_bfloat16(value) : host::to_float16(value); }

inline void copy_16(u32 to, const void* from, u32 bytes) { host::copy(to, from, bytes, 16); }
inline void copy_row(u32 to, const void* from, u32 bytes, u32 barrier) {
  for (u32 i = 0; i < bytes; i += 16) host::awaited_at(barrier).ask({host::shared(to + i, 16), static_cast<const char*>(from) + i, 16});
}
using host::copies_commit, host::copies_wait, host::load_stored;
inline int add_arrival(int* to) {
  host::check(to, 4);
  return (*to)++;
}

struct Matrices {
  u32 part[4];
};

// Of lane's thread, the two elements of each of four matrices whose rows the lanes name.
inline Matrices matrices_of(u32 from, bool turned) {
  const auto rows = host::exchange(&from, 1);
  const int lane = host::current % 32;
  Matrices four;
  for (int i = 0; i < 4; ++i) {
    u16 pair[2];
    for (int j = 0; j < 2; ++j) {
      const int row = turned ? lane % 4 * 2 + j : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + j;
      std::memcpy(&pair[j], host::shared(rows[8 * i + row][0], 16) + 2 * column, 2);
    }
    four.part[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
  }
  return four;
}
inline Matrices load_matrices(u32 from) { return matrices_of(from, false); }
inline Matrices load_turned(u32 from) { return matrices_of(from, true); }
inline u32 turned(u32 part) {
  const auto all = host::exchange(&part, 1);
  const int lane = host::current % 32;
  u32 pair[2];
  for (int j = 0; j < 2; ++j) {
    const int row = lane % 4 * 2 + j, column = lane / 4;  // of the matrix that was given
    pair[j] = all[row * 4 + column / 2][0] >> column % 2 * 16 & 0xffff;
  }
  return pair[0] | pair[1] << 16;
}

inline void multiply_add(float (&sums)[4], const Matrices& a, u32 b0, u32 b1) {
  const u32 own[6] = {a.part[0], a.part[1], a.part[2], a.part[3], b0, b1};
  const auto all = host::exchange(own, 6);
  const int lane = host::current % 32;
  const auto element = [&](int of, int word, int half) { return warp_float(all[of][word] >> 16 * half & 0xffff); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float left = element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2);
      sums[i] += left * element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
  }
}

inline u32 to_pair(float low, float high) { return warp_half(low) | static_cast<u32>(warp_half(high)) << 16; }
inline void store_quad(u32 to, uint4 four) { std::memcpy(host::shared(to, 16), &four, 16); }

}  // namespace hopper
