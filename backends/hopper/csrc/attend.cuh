// An MMA warpgroup: processes 64 query rows of each item against its keys, from the last tile to the first.
//
// It overlaps work as FlashAttention-3 does (Shah et al. 2024): the next tile's scores are computed while this tile's weights are
// multiplied
// with its values, and warpgroups alternate, so that one uses the tensor cores while another computes exponentials.
#pragma once

#include "copy.cuh"
#include "finish.cuh"

namespace hopper {

// q, k: start of the warpgroup's 64 query rows and of the key tile.
__device__ __forceinline__ void score_products(float (&scores)[KEYS / 2], u32 q, u32 k) {
  const u32 rows = operand(q, 0), keys = operand(k, 0);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i) {
    const u32 panel = i / 4, within = i % 4 * 32;
    Products<KEYS>::rows(scores, descriptor(rows, panel * (QUERY_ROWS * 128) + within), descriptor(keys, panel * (KEYS * 128) + within), i);
  }
  products_commit();
}

__device__ __forceinline__ void value_products(float (&sums)[V_HEAD_DIM / 2], const u32 (&weights)[KEYS / 4], u32 v, int add) {
  const u32 values = operand(v, KEYS * 128);
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) {
    Products<V_HEAD_DIM>::columns(sums, weights + 4 * i, descriptor(values, i * (16 * 128)), i == 0 ? add : 1);
  }
  products_commit();
}

// Zero rows [present, KEYS) of a value tile: a weight of zero does not cancel NaN.
__device__ __forceinline__ void clear_values(u32 v, int present, int group, int thread) {
#pragma unroll 1
  for (int i = present * V_PANELS * 8 + thread; i < KEYS * V_PANELS * 8; i += 128) {
    const int row = i / (V_PANELS * 8), chunk = i % (V_PANELS * 8);
    store_zeros(v + (chunk / 8) * (KEYS * 128) + row * 128 + (chunk & 7) * 16);
  }
  fence_async();
  named_sync(ALONE + group, 128);
}

__device__ __forceinline__ void take_turn(int group) {
  if (TURNS) named_sync(TURN + group, 256);
}
__device__ __forceinline__ void pass_turn(int group) {
  if (TURNS) named_arrive(TURN + (group + 1 == GROUPS ? 0 : group + 1), 256);
}

__device__ __forceinline__ void attend(u32 base, const Arguments& arguments, int group, int thread) {
  const int lane = thread % 32, row = 64 * group + thread / 32 * 16 + lane / 4;
  const bool leads = lane == 0;
  Ring<2> shown;
  Ring<QUERY_STAGES> q;
  Ring<STAGES> k, v;
  if (TURNS && group == 0) named_arrive(TURN, 256);
  while (true) {
    const Item item = next_item(base, shown, leads);
    if (item.head < 0) break;

    const int before = item.kv_len - item.query_len;  // keys of the context
    const Rows rows(arguments, item);
    const Sight sight(before, rows.first, rows.last, rows.skipped + row, arguments.group, arguments.window);

    float scores[KEYS / 2], sums[V_HEAD_DIM / 2], keep[2];
    u32 weights[KEYS / 4];
    Softmax softmax;
    const auto wait_for_values = [&](int tile) {
      barrier_wait(base + Layout::v_full + 8 * v.index, v.parity);
      const int present = item.kv_len - tile * KEYS;
      if (present < KEYS) clear_values(base + Layout::v + v.index * V_BYTES, present, group, thread);
    };

    const u32 q_rows = base + Layout::q + q.index * Q_BYTES + (group * 64 + rows.skipped) * 128;
    barrier_wait(base + Layout::q_full + 8 * q.index, q.parity);
    barrier_wait(base + Layout::k_full + 8 * k.index, k.parity);
    pin(scores);
    products_begin();
    score_products(scores, q_rows, base + Layout::k + k.index * K_BYTES);
    products_wait<0>();
    pin(scores);
    if (leads) barrier_arrive(base + Layout::k_empty + 8 * k.index);
    k.advance();
    weigh(softmax, sight, scores, item.last - 1, lane, arguments.scale, arguments.inner, keep);
    pack_weights(scores, weights);
    int add = 0;
#pragma unroll 1
    for (int tile = item.last - 1; tile > item.first; --tile) {
      barrier_wait(base + Layout::k_full + 8 * k.index, k.parity);
      take_turn(group);
      pin(scores);
      pin(sums);
      pin(weights);
      products_begin();
      score_products(scores, q_rows, base + Layout::k + k.index * K_BYTES);
      wait_for_values(tile);
      value_products(sums, weights, base + Layout::v + v.index * V_BYTES, add);
      pass_turn(group);
      products_wait<1>();
      pin(scores);
      if (leads) barrier_arrive(base + Layout::k_empty + 8 * k.index);
      k.advance();
      const bool rescale = weigh(softmax, sight, scores, tile - 1, lane, arguments.scale, arguments.inner, keep);
      products_wait<0>();
      pin(sums);
      pin(weights);
      if (leads) barrier_arrive(base + Layout::v_empty + 8 * v.index);
      v.advance();
      pack_weights(scores, weights);
      if (rescale) {
#pragma unroll
        for (int i = 0; i < V_HEAD_DIM / 2; ++i) sums[i] *= keep[i / 2 % 2];
      }
      add = 1;
    }
    // The queries are not read any more.
    if (leads) barrier_arrive(base + Layout::q_empty + 8 * q.index);
    q.advance();
    wait_for_values(item.first);
    pin(sums);
    pin(weights);
    products_begin();
    value_products(sums, weights, base + Layout::v + v.index * V_BYTES, add);
    products_wait<0>();
    pin(sums);
    pin(weights);
    if (leads) barrier_arrive(base + Layout::v_empty + 8 * v.index);
    v.advance();
    finish(arguments, item, group, thread, softmax, sums);
  }
}

}  // namespace hopper
