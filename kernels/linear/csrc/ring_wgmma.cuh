// GEMM over a ring's steps by wgmma: four warps multiply together. One batch of values is multiplied from registers while the next one is
// unpacked.
#pragma once

#include "pairs.cuh"
#include "wgmma.cuh"

namespace fused {

constexpr int WORDS = 4;    // words of values that are multiplied at once, 16 columns of x each
constexpr int BUFFERS = 2;  // batches of values in registers, one of which is being multiplied
constexpr int SWIZZLE = 7;  // bits of a row's index that are XORed into the index of a 16-byte chunk

// A chunk of a row of x has one pair of each thread. pair_of: pair i of a chunk; chunk_of, number_of: position of a pair.
__device__ __forceinline__ Pair pair_of(int chunk, int i) { return {i, chunk / 2, chunk % 2}; }
__device__ __forceinline__ int chunk_of(Pair pair) { return pair.word * 2 + pair.second; }
__device__ __forceinline__ int number_of(Pair pair) { return pair.thread; }

// sums += products of a warp's parts, by wgmma. scales (BY_BLOCK): pair(i, tile, below) returns the scales of a step's slices, and
// advance(step, i, tile) loads those of the next step. Steps are released when read.
template <typename Layout, typename Scales>
__device__ __forceinline__ void multiply(
    float (&sums)[TILES][MOST_ROWS / 2], const Ring<Layout>& ring, Place& at, Scales& scales, Steps steps, int warp, int lane) {
  // Position among groups and rows. If computed inside the loop, the compiler waits for every wgmma (CUDA 13.0).
  const int place = (SHORT ? lane % 4 * 16 / SCALE_SPAN : 0) * Layout::group + warp * Layout::part + lane / 4;
  u32 a[BUFFERS][WORDS][4];
  int before = 0;
#pragma unroll 1
  for (int step = steps.first; step < steps.end; ++step) {
    barrier_wait(ring.full + 8 * at.stage, at.parity);
    const u32 x = ring.inputs(at.stage) / 16;
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const u32 slice = ring.slice(at.stage, i), part = tile * WARPS * Layout::part;
        const u32 scales_at = slice + Layout::scales + (place + part) * SCALE_SIZE, zeros_at = slice + Layout::zeros + place + part;
        Codes codes(slice + (part + warp * Layout::part) * SLICE + lane * 16, scales_at, zeros_at, Layout::below,
                    Layout::below_scales, Layout::below_zeros);
        if constexpr (BY_BLOCK) {
          codes.scale[0] = scales.pair(i, tile, 0), codes.scale[1] = scales.pair(i, tile, 1);
          scales.advance(step, i, tile);
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int batch = (i * TILES + tile) * HALVES + half, columns = i * HALVES + half;
          u32(&words)[WORDS][4] = a[batch % BUFFERS];
          products_wait<BUFFERS - 1>();
          if (batch == 1 && step > steps.first && lane == 0) barrier_arrive(ring.empty + 8 * before);  // all of that step is multiplied
#pragma unroll
          for (int word = 0; word < WORDS; ++word) {
            half ? codes.unpack<HALVES - 1>(words[word], word) : codes.unpack<0>(words[word], word);
          }
          products_begin();
#pragma unroll
          for (int word = 0; word < WORDS; ++word) {
            const u64 there = descriptor(x + (columns * (MOST_ROWS * 128) + word * 32) / 16);
            Products<MOST_ROWS>::run(sums[tile], words[word], there, 1);
          }
          products_commit();
        }
      }
    }
    before = at.stage;
    at.advance();
  }
  products_wait<0>();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) pin(sums[tile]);
  if (lane == 0) barrier_arrive(ring.empty + 8 * before);
}

}  // namespace fused
