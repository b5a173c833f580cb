// Half precision in pairs, as tensor cores take it: bfloat16, or float16 (HALF_TYPE 1).
#pragma once

#include "ptx.cuh"

namespace fused {

#if HALF_TYPE == 1
#define PAIR_TYPE "f16x2"
#define ELEMENT_TYPE "f16"
constexpr u32 ONES = 0x3c003c00;
#else
#define PAIR_TYPE "bf16x2"
#define ELEMENT_TYPE "bf16"
constexpr u32 ONES = 0x3f803f80;
#endif

__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn." PAIR_TYPE " %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) { return fma_pair(a, b, 0x80008000); }

// Return {low, high}, each rounded to nearest.
__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 out;
  asm("cvt.rn." PAIR_TYPE ".f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ __forceinline__ u16 to_half(float value) {
  u16 out;
  asm("cvt.rn." ELEMENT_TYPE ".f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

__device__ __forceinline__ float from_float16(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

__device__ __forceinline__ float from_half(u16 bits) {
#if HALF_TYPE == 1
  return from_float16(bits);
#else
  return from_bfloat16(bits);
#endif
}

__device__ __forceinline__ float low_of(u32 pair) { return from_half(static_cast<u16>(pair)); }
__device__ __forceinline__ float high_of(u32 pair) { return from_half(static_cast<u16>(pair >> 16)); }

// sums [16, 8] += a [16, 16] b [16, 8] on tensor cores, each thread with its fragments (PTX ISA, "mma.m16n8k16").
__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT_TYPE "." ELEMENT_TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fused
