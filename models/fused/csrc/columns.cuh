// 8 columns of a row of x that lie together in one thread, and what an RMSNorm does to them.
#pragma once

#include "half.cuh"

namespace fused {

// The norm's weight, float32 or in half precision.
struct NormColumns {
#if NORM_FLOAT
  float weight[8];
#else
  Quad weight;
#endif
};

__device__ __forceinline__ NormColumns norm_columns(const void* norm, int column) {
#if NORM_FLOAT
  NormColumns columns;
#pragma unroll
  for (int i = 0; i < 8; ++i) columns.weight[i] = static_cast<const float*>(norm)[column + i];
  return columns;
#else
  return {load_constant_quad(static_cast<const u16*>(norm) + column)};
#endif
}

__device__ __forceinline__ void multiply_columns(Quad& x, const NormColumns& norm) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if NORM_FLOAT
    x.part[i] = to_pair(low_of(x.part[i]) * norm.weight[2 * i], high_of(x.part[i]) * norm.weight[2 * i + 1]);
#else
    x.part[i] = multiply_pair(x.part[i], norm.weight.part[i]);
#endif
  }
}

__device__ __forceinline__ float sum_of_squares(const Quad& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += low_of(x.part[i]) * low_of(x.part[i]) + high_of(x.part[i]) * high_of(x.part[i]);
  return sum;
}

}  // namespace fused
