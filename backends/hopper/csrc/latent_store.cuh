// After the last tile: the accumulators are stored, as the output or as a partial result.
#pragma once

#include "latent.cuh"

namespace hopper {

#if APART
__device__ __forceinline__ void store_half(const Given& arguments, const Work& work, Softmax& softmax, float (&sums)[HALF_COLUMNS / 2],
                                           int half, int thread) {
  finish(arguments, work, (CLUSTER > 1 ? blockIdx.y * 2 : 0) + half, thread, softmax, sums);
}
#else
// 256 columns of the rows. total: each row's sum of weights.
__device__ __forceinline__ void store_columns(const Given& arguments, const Work& work, float (&sums)[HALF_COLUMNS / 2],
                                              const float (&total)[2], int half, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r, token = row / HEADS, head = work.first_head + row % HEADS;
    const bool present = row < USED && work.first_token + token <= work.last_token;
    const float share = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
    if (work.whole) {
      Half* to = static_cast<Half*>(arguments.out) + (work.packed_token + token) * arguments.out_token + head * arguments.out_head;
#pragma unroll
      for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
        const auto word = [&](int i) { return pack(sums[4 * (j + i) + 2 * r] * share, sums[4 * (j + i) + 2 * r + 1] * share); };
        const uint4 piece = exchange(word(0), word(1), word(2), word(3), lane);
        if (present) *reinterpret_cast<uint4*>(to + half * HALF_COLUMNS + 8 * (j + lane % 4)) = piece;
      }
    } else if (present) {
      float* to = arguments.partials + (work.slot + row) * V_HEAD_DIM + half * HALF_COLUMNS + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sums[4 * j + 2 * r] * share, sums[4 * j + 2 * r + 1] * share);
      }
    }
  }
}

// The logarithm of each row's sum, stored by the first of the row's four threads.
__device__ __forceinline__ void store_lse(const Given& arguments, const Work& work, const Softmax& softmax, const float (&total)[2],
                                          int thread) {
  constexpr float LN2 = 0.6931471805599453f;
  const int lane = thread % 32;
  if (lane % 4) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r, token = row / HEADS;
    if (row >= USED || work.first_token + token > work.last_token) continue;
    const float lse = total[r] > 0.0f ? softmax.most[r] * arguments.scale + log2_approx(total[r]) : NEVER;
    if (!work.whole) {
      arguments.partial_lse[work.slot + row] = lse;
    } else if (arguments.lse != nullptr) {
      arguments.lse[(work.first_head + row % HEADS) * arguments.lse_head + work.packed_token + token] = lse * LN2;
    }
  }
}

// Store 256 columns of the rows, and with the first of them the sums.
__device__ __forceinline__ void store_half(const Given& arguments, const Work& work, const Softmax& softmax, float (&sums)[HALF_COLUMNS / 2],
                                           int half, int thread) {
  float total[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) total[r] = row_sum(softmax.sum[r]);
  if (half == 0) store_lse(arguments, work, softmax, total, thread);
  store_columns(arguments, work, sums, total, half, thread);
}

// For a chunk in which these rows see no key: weight zero, and finite accumulators.
__device__ __forceinline__ void store_nothing(const Given& arguments, const Work& work, int half, int thread) {
  float sums[HALF_COLUMNS / 2] = {};
  store_half(arguments, work, Softmax(), sums, half, thread);
}
#endif

}  // namespace hopper
