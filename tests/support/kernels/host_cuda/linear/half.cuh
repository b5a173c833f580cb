// In place of kernels/linear/csrc/half.cuh: half precision, and the matrix units, on the host.
#pragma once

#include "ptx.cuh"

namespace fused {

using host::from_bfloat16, host::from_float16;

#if HALF_TYPE == 1
constexpr u32 ONES = 0x3c003c00;
inline float from_half(u16 bits) { return from_float16(bits); }
inline u16 to_half(float value) { return host::to_float16(value); }
#else
constexpr u32 ONES = 0x3f803f80;
inline float from_half(u16 bits) { return from_bfloat16(bits); }
inline u16 to_half(float value) { return host::to_bfloat16(value); }
#endif

inline float low_of(u32 pair) { return from_half(static_cast<u16>(pair)); }
inline float high_of(u32 pair) { return from_half(static_cast<u16>(pair >> 16)); }
inline u32 to_pair(float low, float high) { return static_cast<u32>(to_half(high)) << 16 | to_half(low); }
inline u32 fma_pair(u32 a, u32 b, u32 c) {
  return to_pair(low_of(a) * low_of(b) + low_of(c), high_of(a) * high_of(b) + high_of(c));
}
inline u32 multiply_pair(u32 a, u32 b) { return fma_pair(a, b, 0x80008000); }

// PTX ISA, "mma.m16n8k16": which lane holds which elements.
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto all = host::exchange(own, 6);
  const int lane = host::current % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 left = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = all[column * 4 + k % 8 / 2][4 + k / 8];
      sums[i] += from_half(left >> k % 2 * 16) * from_half(right >> k % 2 * 16);
    }
  }
}

}  // namespace fused
