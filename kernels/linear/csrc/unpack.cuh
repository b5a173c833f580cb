// Dequantize: exact conversion of quantized values to half precision, two at a time. A pair is from bytes 2 pair and 2 pair + 1 of a
// word, or for MXFP4 from bytes pair and pair + 2; for 4-bit values, from the lower or the upper halves of these bytes.
#pragma once

#include "half.cuh"

#define FP8 0
#define INT4 1
#define MXFP4 2
#define INT8 3

namespace fused {

constexpr int HALVES = WEIGHT == FP8 || WEIGHT == INT8 ? 1 : 2;  // values per byte
constexpr int PAIR_STEP = WEIGHT == MXFP4 ? 2 : 1;               // columns from the first of a pair to the second

// Factor for e4m3 values whose bits were moved into half precision, where their exponents are too small.
#if HALF_TYPE == 1
constexpr float CODE_FACTOR = 256.0f;
#else
constexpr float CODE_FACTOR = 0x1p120f;
#endif

// Return the 4-bit values of a word, one per byte.
template <int half>
__device__ __forceinline__ u32 nibbles(u32 word) {
  return (half ? word >> 4 : word) & 0x0f0f0f0f;
}

#if WEIGHT == FP8
// Convert e4m3 without NaN. factor: CODE_FACTOR in both halves, times a scale if it fits (not WIDE).
template <int pair>
__device__ __forceinline__ u32 codes(u32 word, u32 factor) {
  const u32 high = permute(word, 0, pair ? 0x3424 : 0x1404);
#if HALF_TYPE == 1
  return multiply_pair(and_or(high, 0x80008000, (high >> 1) & 0x3f803f80), factor);
#else
  return multiply_pair(and_or(high, 0x80008000, (high >> 4) & 0x07f007f0), factor);
#endif
}
#elif WEIGHT == INT8
// Convert integers from -128 to 127. Their lower seven bits become the last bits of 128 in bfloat16, or of 1,024 in float16, which is
// subtracted. For a negative number, 128 more is subtracted: its sign bit turns -128 into -256, or -1,024 into -1,152.
template <int pair>
__device__ __forceinline__ u32 codes(u32 word) {
  const u32 both = permute(word, 0, pair ? 0x4342 : 0x4140);
#if HALF_TYPE == 1
  return fma_pair(and_or(both, 0x007f007f, 0x64006400), ONES, and_or(both, 0x00800080, 0xe400e400));
#else
  return fma_pair(and_or(both, 0x007f007f, 0x43004300), ONES, and_or(both, 0x00800080, 0xc300c300));
#endif
}
#elif WEIGHT == INT4
// Convert 4-bit integers: they become the last bits of 128 in bfloat16, or of 1,024 in float16. offset: minus that, and minus the zero
// point.
template <int pair>
__device__ __forceinline__ u32 codes(u32 bytes, u32 offset) {
#if HALF_TYPE == 1
  return fma_pair(permute(bytes, 0x64646464, pair ? 0x4342 : 0x4140), ONES, offset);
#else
  return fma_pair(permute(bytes, 0x43434343, pair ? 0x4342 : 0x4140), ONES, offset);
#endif
}

__device__ __forceinline__ u32 offset_of(u32 zero) {
#if HALF_TYPE == 1
  const u32 bits = 0xe400 + zero;
#else
  const u32 bits = 0xc300 + zero;
#endif
  return bits << 16 | bits;
}
#else
// Convert e2m1 to bfloat16, times a scale. The exponent is too small by 126; the scale includes this, unless some scale is too large for
// it (WIDE). One multiplication shifts sign and other bits to their positions in both halves of the word. Adjacent bytes would have to be
// moved first, by the pipe that is busiest.
template <int half, int pair>
__device__ __forceinline__ u32 codes(u32 word, u32 scale) {
  const u32 both = (pair ? word >> 8 : word) & (half ? 0x00f000f0 : 0x000f000f);
  const u32 small = both * (half ? (1 << 8) + (1 << 2) : (1 << 12) + (1 << 6)) & 0x81c081c0;
  return multiply_pair(WIDE ? multiply_pair(small, 0x7e807e80) : small, scale);
}

// Return 2 ** (exponent - 127), or 2 ** 126 times that for exponents up to 128. The smallest one needs a subnormal.
__device__ __forceinline__ u32 scale_of(u32 exponent) {
  if (!WIDE) return exponent * 0x00800080 + 0x3f003f00;  // both halves at once
  const u32 bits = exponent ? exponent << 7 : 0x40;
  return bits << 16 | bits;
}
#endif

}  // namespace fused
