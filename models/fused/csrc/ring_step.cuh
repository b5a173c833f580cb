// What the warps of shared_rows.cu and expert_lots.cu do, which lie side by side along the rows of W: a ring of steps in shared memory
// that one thread fills, and a step's products, of codes in registers and of columns of x where they lie (wgmma).
//
// Which columns of x the matrix units meet with which codes follows from the places of x in shared memory, so that a thread's codes
// are 16 bytes that lie together: thread t of four holds, of 16 places along K, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and its codes are of
// 16 columns that lie together, four of them in each word. Rows of 128 bytes are in windows of MOST_ROWS, with the 128-byte swizzle.
#pragma once

#define SCALED_CODES  // in product.cuh
#include "product.cuh"
#include "wgmma.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;                        // of a step: 128 columns of x, in two windows
constexpr int MULTIPLYING = WARPS * 32;
constexpr int PARTS = WARPS * TILES, BLOCK_ROWS = PARTS * 16;  // of W
constexpr int OUT = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;       // of y
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
constexpr int ARRANGING = 256;                                 // threads of what arranges a row of x
constexpr int WORDS = 4;                                       // of codes that are multiplied at once, 16 columns of x each
constexpr int BUFFERS = 2;                                     // batches whose codes are in registers: one is multiplied
static_assert(STEP_SLICES * HALVES == 2);

// Layout: of a slice of W in shared memory. bytes: of it; scales, zeros: where they begin; part: rows from one part to the next; group:
// places of scales from one group to the next; below, below_scales, below_zeros: bytes from a thread's first row of a part to its second.
template <typename Layout>
struct Ring {
  static constexpr int STEP_BYTES = (INPUT_BYTES + STEP_SLICES * Layout::bytes + 1023) / 1024 * 1024;  // as the swizzle repeats

  u32 start, full, empty;  // of stages: where they lie, and two barriers each: whether they are there, and whether they have been read

  __device__ __forceinline__ u32 inputs(int stage) const { return start + stage * STEP_BYTES; }
  __device__ __forceinline__ u32 slice(int stage, int i) const { return inputs(stage) + INPUT_BYTES + i * Layout::bytes; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, WARPS);
    }
    barriers_ready();
  }
};

// Where in a ring its reader or its writer is: the stage, and the parity of the stage's round.
struct Place {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Steps {
  int first, end;
};

// sums += products of a warp's parts. scales: BY_BLOCK: of the slices of a step, pair(i, tile, below); advance(step, i, tile) asks for
// those of the step after it. Returns the stage of the last step, which is not told to be read.
template <typename Layout, typename Scales>
__device__ __forceinline__ int multiply(
    float (&sums)[TILES][MOST_ROWS / 2], const Ring<Layout>& ring, Place& at, Scales& scales, Steps steps, int warp, int lane) {
  // Among groups and rows. Computed inside of the loop, it has the compiler wait for every product (CUDA 13.0).
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
          if (batch == 1 && step > steps.first && lane == 0) barrier_arrive(ring.empty + 8 * before);  // that step is multiplied
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
  return before;
}

// Of a row, a number and the one PAIR_STEP behind it.
__device__ __forceinline__ u32 pair_at(const u16* from) {
  return PAIR_STEP == 1 ? *reinterpret_cast<const u32*>(from) : from[0] | static_cast<u32>(from[PAIR_STEP]) << 16;
}

// The column of x that the first number of a thread, of four, in 16 bytes of a window's row is; the second is PAIR_STEP behind it.
__device__ __forceinline__ int arranged_column(int window, int chunk, int thread) {
  const int slice = window / HALVES, half = window % HALVES;
  return column_of(slice * SLICE + thread * 16, half) + chunk / 2 * 4 + chunk % 2 * (3 - PAIR_STEP);
}

}  // namespace fused
