// After an item's last tile: divide and store the accumulators or, with split keys, write a partial result, merged by the last program.
#pragma once

#include "softmax.cuh"

namespace hopper {

// Per thread of a warpgroup: its accumulators, then the maximum and the sum of its two rows.
constexpr int PARTIAL_FLOATS = 128 * (COLUMNS / 2 + 4);

// Divide, and store the existing rows. softmax.sum: sums over complete rows.
__device__ __forceinline__ void store(const Arguments& arguments, const Item& item, int row, int lane, const Softmax& softmax,
                                      float (&sums)[COLUMNS / 2], int column) {
  constexpr float LN2 = 0.6931471805599453f;
  const Rows rows(arguments, item);
  Half* to[2];
  bool present[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int place = rows.skipped + row + 8 * r, within = place / arguments.group, token = rows.first + within;
    const int query_head = item.head * arguments.group + place - within * arguments.group;
    present[r] = row + 8 * r < arguments.rows && token <= rows.last;
    const float shift = softmax.most[r] == NEVER ? 0.0f : softmax.most[r] * arguments.scale;
    float sum = softmax.sum[r];
    if (arguments.sinks != nullptr) sum += exp2_approx(arguments.sinks[query_head] - shift);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      sums[4 * j + 2 * r] *= inverse;
      sums[4 * j + 2 * r + 1] *= inverse;
    }
    to[r] = static_cast<Half*>(arguments.out) + (item.token_start + token) * arguments.out_token + query_head * arguments.out_head + column;
    if (arguments.lse != nullptr && present[r] && lane % 4 == 0 && column == 0) {
      arguments.lse[query_head * arguments.lse_head + item.token_start + token] = sum > 0.0f ? (shift + log2_approx(sum)) * LN2 : NEVER;
    }
  }
  constexpr int COLUMN_GROUPS = COLUMNS / 8, WHOLE = COLUMN_GROUPS / 4 * 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < WHOLE; j += 4) {
      const auto word = [&](int i) { return pack(sums[4 * (j + i) + 2 * r], sums[4 * (j + i) + 2 * r + 1]); };
      const uint4 piece = exchange(word(0), word(1), word(2), word(3), lane);
      if (present[r]) *reinterpret_cast<uint4*>(to[r] + 8 * (j + lane % 4)) = piece;
    }
#pragma unroll
    for (int j = WHOLE; j < COLUMN_GROUPS; ++j) {
      if (present[r]) *reinterpret_cast<u32*>(to[r] + 8 * j + 2 * (lane % 4)) = pack(sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1]);
    }
  }
}

// Write this split's accumulators. The last of the item's splits to arrive adds all of them, always in the same order.
// Returns whether this warpgroup is the last; it then holds the result.
__device__ __forceinline__ bool merge(const Arguments& arguments, const Item& item, int group, int thread, Softmax& softmax,
                                      float (&sums)[COLUMNS / 2]) {
  const auto place = [&](int split) {
    const long long number = static_cast<long long>(item.partial + split) * GROUPS + group;
    return reinterpret_cast<float4*>(arguments.partials + number * PARTIAL_FLOATS) + thread;
  };
  float4* mine = place(item.split);
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; ++i) __stcg(mine + 128 * i, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  __stcg(mine + 128 * (COLUMNS / 8), make_float4(softmax.most[0], softmax.most[1], softmax.sum[0], softmax.sum[1]));
  __threadfence();
  const int barrier = ALONE + threadIdx.x / 128 - 1;
  named_sync(barrier, 128);
  int* ticket = arguments.tickets + item.partial * GROUPS + group;
  if (!named_any(barrier, 128, thread == 0 && atomicAdd(ticket, 1) == item.splits - 1)) return false;
  __threadfence();
  if (thread == 0) *ticket = 0;
  softmax = Softmax();
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int split = 0; split < item.splits; ++split) {
    const float4* from = place(split);
    const float4 state = __ldcg(from + 128 * (COLUMNS / 8));
    float old[2], add[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = r ? state.y : state.x, high = fmaxf(softmax.most[r], other);
      const float shift = high == NEVER ? 0.0f : high * arguments.scale;
      old[r] = exp2_approx(softmax.most[r] * arguments.scale - shift);
      add[r] = exp2_approx(other * arguments.scale - shift);
      softmax.sum[r] = softmax.sum[r] * old[r] + (r ? state.w : state.z) * add[r];
      softmax.most[r] = high;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
      const float4 piece = __ldcg(from + 128 * i);
      sums[4 * i] = sums[4 * i] * old[0] + piece.x * add[0];
      sums[4 * i + 1] = sums[4 * i + 1] * old[0] + piece.y * add[0];
      sums[4 * i + 2] = sums[4 * i + 2] * old[1] + piece.z * add[1];
      sums[4 * i + 3] = sums[4 * i + 3] * old[1] + piece.w * add[1];
    }
  }
  return true;
}

__device__ __forceinline__ void finish(const Arguments& arguments, const Item& item, int group, int thread, Softmax& softmax,
                                       float (&sums)[COLUMNS / 2]) {
  const int lane = thread % 32, row = (HALVES == 1 ? 64 * group : 0) + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) softmax.sum[r] = row_sum(softmax.sum[r]);
  if (item.splits > 1 && !merge(arguments, item, group, thread, softmax, sums)) return;
  store(arguments, item, row, lane, softmax, sums, group % HALVES * COLUMNS);
}

}  // namespace hopper
