// GEMM over a ring's steps by each warp separately (mma), for up to 16 rows of x. There tensor cores are as fast with mma as with wgmma
// or faster: no warp waits for others, and no instructions are spent on descriptors.
#pragma once

#include "pairs.cuh"

namespace fused {

constexpr int SWIZZLE = 1;  // bits of a row's index that are XORed into the index of a 16-byte chunk, so that rows use other banks

// A chunk of a row of x has four pairs of one thread. pair_of: pair i of a chunk; chunk_of, number_of: position of a pair.
__device__ __forceinline__ Pair pair_of(int chunk, int i) { return {chunk / 2, chunk % 2 * 2 + i / 2, i % 2}; }
__device__ __forceinline__ int chunk_of(Pair pair) { return pair.thread * 2 + pair.word / 2; }
__device__ __forceinline__ int number_of(Pair pair) { return pair.word % 2 * 2 + pair.second; }

// Load a warp's quantized values of one slice of W, for all its parts. BY_BLOCK: scales has their scales, and loads those of the next
// step.
template <typename Layout, typename Scales>
__device__ __forceinline__ void read_codes(Codes (&codes)[TILES], u32 slice, Scales& scales, int step, int i, int warp, int lane) {
  const int place = (SHORT ? lane % 4 * 16 / SCALE_SPAN : 0) * Layout::group + warp * Layout::part + lane / 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const u32 part = tile * WARPS * Layout::part;
    const u32 scales_at = slice + Layout::scales + (place + part) * SCALE_SIZE, zeros_at = slice + Layout::zeros + place + part;
    codes[tile] = Codes(slice + (part + warp * Layout::part) * SLICE + lane * 16, scales_at, zeros_at, Layout::below,
                        Layout::below_scales, Layout::below_zeros);
    if constexpr (BY_BLOCK) {
      codes[tile].scale[0] = scales.pair(i, tile, 0), codes[tile].scale[1] = scales.pair(i, tile, 1);
      scales.advance(step, i, tile);
    }
  }
}

// sums += products of a warp's parts. Like ring_wgmma.cuh, but all steps are released as read. A slice's values are loaded while the
// previous slice is multiplied; otherwise each warp would wait for shared memory at the start of every slice.
template <typename Layout, typename Scales>
__device__ __forceinline__ void multiply(
    float (&sums)[TILES][MOST_ROWS / 2], const Ring<Layout>& ring, Place& at, Scales& scales, Steps steps, int warp, int lane) {
  if (steps.first >= steps.end) return;
  Codes next[TILES];
  barrier_wait(ring.full + 8 * at.stage, at.parity);
  read_codes<Layout>(next, ring.slice(at.stage, 0), scales, steps.first, 0, warp, lane);
#pragma unroll 1
  for (int step = steps.first; step < steps.end; ++step) {
    const u32 row = ring.inputs(at.stage) + lane / 4 * 128, empty = ring.empty + 8 * at.stage;
    Place behind = at;
    behind.advance();
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      Quad x[2][HALVES][BLOCKS];
#pragma unroll
      for (int n = 0; n < 2 * HALVES * BLOCKS; ++n) {
        const int words = n % 2, half = n / 2 % HALVES, block = n / 2 / HALVES;
        const u32 chunk = (lane % 4 * 2 + words) ^ (lane / 4 & SWIZZLE);
        x[words][half][block] = load_quad(row + ((i * HALVES + half) * MOST_ROWS + block * 8) * 128 + chunk * 16);
      }
      Codes codes[TILES];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) codes[tile] = next[tile];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int n = 0; n < 4 * HALVES; ++n) {
          const int word = n % 4, half = n / 4;
          if (tile == TILES - 1 && n == 2 * HALVES) {
            if (i + 1 < STEP_SLICES) {
              read_codes<Layout>(next, ring.slice(at.stage, i + 1), scales, step, i + 1, warp, lane);
            } else if (step + 1 < steps.end) {
              barrier_wait(ring.full + 8 * behind.stage, behind.parity);
              read_codes<Layout>(next, ring.slice(behind.stage, 0), scales, step + 1, 0, warp, lane);
            }
          }
          u32 a[4];
          half ? codes[tile].unpack<HALVES - 1>(a, word) : codes[tile].unpack<0>(a, word);
#pragma unroll
          for (int block = 0; block < BLOCKS; ++block) {
            const Quad& columns = x[word / 2][half][block];
            float(&four)[4] = reinterpret_cast<float(&)[4]>(sums[tile][block * 4]);
            multiply_add(four, a, columns.part[word % 2 * 2], columns.part[word % 2 * 2 + 1]);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
    at = behind;
  }
}

}  // namespace fused
