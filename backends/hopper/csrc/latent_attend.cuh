// The two MMA warpgroups. One computes the scores and weights of a key tile, and multiplies the first 256 columns of its values. The other
// gets the weights and multiplies the other 256 columns: accumulators of 64 rows x 512 columns do not fit one warpgroup's registers.
#pragma once


#include "latent_store.cuh"

namespace hopper {

template <int PART>
__device__ __forceinline__ void score_part(float (&scores)[KEYS / 2], u32 rows, u32 keys, u32 full, u32 parity) {
  barrier_wait(full + 8 * PART, parity);
#pragma unroll
  for (int i = 0; i < 4 * panels_of(PART); ++i) {
    const u32 at = (first_panel(PART) + i / 4) * PANEL_BYTES + i % 4 * 32;
    Products<KEYS>::rows(scores, descriptor(rows, at), descriptor(keys, at), PART != FIRST_PART || i > 0);
  }
}

// Compute the scores of a tile, part by part as they arrive.
__device__ __forceinline__ void score_products(float (&scores)[KEYS / 2], u32 base, const Ring<STAGES>& ring) {
  const u32 rows = operand(base + LatentLayout::q, 0), keys = operand(tile_at(base, ring.index), 0);
  const u32 full = full_at(base, ring.index, 0);
  if constexpr (!APART) score_part<FIRST_PART>(scores, rows, keys, full, ring.parity);
  score_part<0>(scores, rows, keys, full, ring.parity);
  if (APART) products_commit();
  score_part<1>(scores, rows, keys, full, ring.parity);
  products_commit();
}

// acc += weights x values, for a warpgroup's columns.
__device__ __forceinline__ void value_products(float (&sums)[HALF_COLUMNS / 2], const u32 (&weights)[KEYS / 4], u32 tile, int half) {
  const u32 values = operand(tile + (VALUE_PART + half) * (HALF_PANELS * PANEL_BYTES), PANEL_BYTES);
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) Products<HALF_COLUMNS>::columns(sums, weights + 4 * i, descriptor(values, i * (16 * 128)), 1);
  products_commit();
}

// Zero the rows of values after the sequence's end: a weight of zero does not cancel NaN.
__device__ __forceinline__ void clear_values(u32 tile, int present, int half, int thread) {
#pragma unroll 1
  for (int i = present * (HALF_PANELS * 8) + thread; i < KEYS * (HALF_PANELS * 8); i += 128) {
    const int row = i / (HALF_PANELS * 8), chunk = i % (HALF_PANELS * 8);
    store_zeros(tile + ((VALUE_PART + half) * HALF_PANELS + chunk / 8) * PANEL_BYTES + row * 128 + chunk % 8 * 16);
  }
  fence_async();
  named_sync(ALONE + half, 128);
}

__device__ __forceinline__ void rescale(float (&sums)[HALF_COLUMNS / 2], const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < HALF_COLUMNS / 2; ++i) sums[i] *= keep[i / 2 % 2];
}

// Data that a thread of the scoring warpgroup passes to the thread of the other warpgroup with the same rows.
struct Told {
  u32 words;  // of this thread

  __device__ __forceinline__ void tell(const u32 (&weights)[KEYS / 4], const float (&keep)[2]) const {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) store_word(words + (2 + i) * 512, weights[i]);
    tell(keep);
  }
  __device__ __forceinline__ void tell(const float (&pair)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_word(words + r * 512, __float_as_uint(pair[r]));
    named_arrive(TOLD, 256);
  }
  __device__ __forceinline__ void tell(const Softmax& softmax) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_word(words + (2 + r) * 512, __float_as_uint(softmax.most[r]));
    tell(softmax.sum);
  }
  __device__ __forceinline__ void hear(float (&pair)[2]) const {
    named_sync(TOLD, 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) pair[r] = __uint_as_float(load_word(words + r * 512));
  }
  __device__ __forceinline__ void hear(u32 (&weights)[KEYS / 4], float (&keep)[2]) const {
    hear(keep);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = load_word(words + (2 + i) * 512);
    named_arrive(HEARD, 256);
  }
  __device__ __forceinline__ void hear(Softmax& softmax) const {
    hear(softmax.sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.most[r] = __uint_as_float(load_word(words + (2 + r) * 512));
  }
};

// Wait for the scores, and with APART release the key's first half before. LATER: groups of MMAs begun after them.
template <int LATER>
__device__ __forceinline__ void wait_for_scores(float (&scores)[KEYS / 2], u32 base, int stage, bool leads) {
  if (APART) {
    products_wait<LATER + 1>();
    if (leads) let_go(base, stage, 0);
  }
  products_wait<LATER>();
  pin(scores);
}

// The MMAs for the next tile's scores directly follow those for this tile's values. While the softmax runs, the other warpgroup uses the
// tensor cores (Shah et al. 2024).
__device__ __forceinline__ void score_and_multiply(u32 base, const Given& arguments, const Work& work, int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const bool leads = lane == 0;
  const Sight sight(work.before, work.first_token, work.last_token, row, work.group, work.window);
  float scores[KEYS / 2], sums[HALF_COLUMNS / 2] = {}, keep[2];
  u32 weights[KEYS / 4];
  Softmax softmax;
  Ring<STAGES> k, v;  // tiles to be scored, and to be multiplied
  const Told partner{base + LatentLayout::words + 4 * thread};
  const auto weigh_tile = [&](int tile) {
    if (leads) let_go(base, k.index, APART ? 1 : FIRST_PART);
    k.advance();
    return weigh(softmax, sight, scores, tile, lane, arguments.scale, work.inner, keep);
  };
  const auto tell_weights = [&](int tile) {
    pack_weights(scores, weights);
    if (tile > work.first) named_sync(HEARD, 256);
    partner.tell(weights, keep);
  };
  const auto wait_for_values = [&]() {
    if (APART) barrier_wait(full_at(base, v.index, VALUE_PART), v.parity);
  };
  const auto let_go_of_values = [&]() {
    if (leads) let_go(base, v.index, VALUE_PART);
    v.advance();
  };

  barrier_wait(base + LatentLayout::q_full, 0);
  pin(scores);
  products_begin();
  score_products(scores, base, k);
  wait_for_scores<0>(scores, base, k.index, leads);
  weigh_tile(work.first);
  tell_weights(work.first);
#pragma unroll 1
  for (int tile = work.first + 1; tile < work.last; ++tile) {
    pin(scores);
    pin(sums);
    pin(weights);
    products_begin();
    bool grows;
    if (APART) {  // scores first: the values may still be on their way
      score_products(scores, base, k);
      wait_for_values();
      value_products(sums, weights, tile_at(base, v.index), 0);
      wait_for_scores<1>(scores, base, k.index, leads);
      grows = weigh_tile(tile);
      products_wait<0>();
      let_go_of_values();
    } else {
      wait_for_values();
      value_products(sums, weights, tile_at(base, v.index), 0);
      // If the next tile is late, memory is the bottleneck: release the value buffers before waiting, so that copies never pause.
      const bool late = !__shfl_sync(~0u, static_cast<int>(barrier_passed(full_at(base, k.index, 1), k.parity)), 0);
      if (late) {
        products_wait<0>();
        let_go_of_values();
      }
      score_products(scores, base, k);
      if (!late) {
        products_wait<APART ? 2 : 1>();
        let_go_of_values();
      }
      wait_for_scores<0>(scores, base, k.index, leads);
    }
    pin(sums);
    pin(weights);
    if (!APART) grows = weigh_tile(tile);
    tell_weights(tile);
    if (grows) rescale(sums, keep);
  }
  wait_for_values();
  const int present = work.kv_len - (work.last - 1) * KEYS;  // only a sequence's last tile has fewer keys
  if (present < KEYS) clear_values(tile_at(base, v.index), present, 0, thread);
  pin(sums);
  pin(weights);
  products_begin();
  value_products(sums, weights, tile_at(base, v.index), 0);
  named_sync(HEARD, 256);
  partner.tell(softmax);
  products_wait<0>();
  pin(sums);
  pin(weights);
  launch_dependents();
  store_half(arguments, work, softmax, sums, 0, thread);
}

// The other 256 columns. Scores are complete before their weights are passed on, so only this warpgroup releases its part of a tile.
__device__ __forceinline__ void multiply_told(u32 base, const Given& arguments, const Work& work, int thread) {
  const Told partner{base + LatentLayout::words + 4 * thread};
  float sums[HALF_COLUMNS / 2] = {}, keep[2];
  u32 weights[KEYS / 4];
  Ring<STAGES> v;
#pragma unroll 1
  for (int tile = work.first; tile < work.last; ++tile) {
    partner.hear(weights, keep);
    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f)) rescale(sums, keep);
    barrier_wait(full_at(base, v.index, VALUE_PART + 1), v.parity);
    const u32 at = tile_at(base, v.index);
    if (work.kv_len - tile * KEYS < KEYS) clear_values(at, work.kv_len - tile * KEYS, 1, thread);
    pin(sums);
    pin(weights);
    products_begin();
    value_products(sums, weights, at, 1);
    products_wait<0>();
    pin(sums);
    pin(weights);
    if (thread % 32 == 0) let_go(base, v.index, VALUE_PART + 1);
    v.advance();
  }
  Softmax softmax;
  partner.hear(softmax);
  launch_dependents();
  store_half(arguments, work, softmax, sums, 1, thread);
}

}  // namespace hopper
