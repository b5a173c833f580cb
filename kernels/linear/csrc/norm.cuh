// Row reductions for a thread block of ARRANGING threads, and the RMSNorm before a GEMM.
#pragma once

#include "ring.cuh"

namespace fused {

// Return the sum, or the maximum, over all threads.
template <bool LARGEST>
__device__ __forceinline__ float of_row(float own) {
  __shared__ float warps[ARRANGING / 32];
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, own, distance);
    own = LARGEST ? fmaxf(own, other) : own + other;
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
  __syncthreads();
  float all = warps[0];
#pragma unroll
  for (int warp = 1; warp < ARRANGING / 32; ++warp) all = LARGEST ? fmaxf(all, warps[warp]) : all + warps[warp];
  return all;
}

__device__ __forceinline__ float squares(u32 pair) {
  const float low = low_of(pair), high = high_of(pair);
  return low * low + high * high;
}

// Return 1 / sqrt(mean of squares + eps) of a row of x. squares: sum over the thread's columns.
__device__ __forceinline__ float norm_factor(float squares, float eps) { return rsqrtf(of_row<false>(squares) / K + eps); }

// Return a pair of a row's elements, normed. column: column of the first.
__device__ __forceinline__ float2 normed(u32 pair, const void* norm, int column, float factor) {
#if NORM_FLOAT
  const float* weight = static_cast<const float*>(norm) + column;
  return make_float2(low_of(pair) * factor * weight[0], high_of(pair) * factor * weight[PAIR_STEP]);
#else
  const u32 weight = pair_at(static_cast<const u16*>(norm) + column);
  return make_float2(low_of(pair) * factor * low_of(weight), high_of(pair) * factor * high_of(weight));
#endif
}

}  // namespace fused
