// A ring of steps in shared memory that one thread fills, for warps that lie side by side along the rows of W and share the columns of x;
// and where in it numbers of x lie.
//
// Which columns of x the matrix units meet with which codes follows from the places of x in shared memory, so that a thread's codes
// are 16 bytes that lie together: thread t of four holds, of 16 places along K, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and its codes are of
// 16 columns that lie together, four of them in each word. Rows of 128 bytes are in windows of MOST_ROWS. What multiplies says where in
// a row a pair of numbers lies (ring_mma.cuh, ring_wgmma.cuh).
#pragma once

#include "product.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;                        // of a step: 128 columns of x, in two windows
constexpr int MULTIPLYING = WARPS * 32;
constexpr int PARTS = WARPS * TILES, BLOCK_ROWS = PARTS * 16;  // of W
constexpr int OUT = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;       // of y
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
constexpr int ARRANGING = 256;                                 // threads of what arranges a row of x
static_assert(STEP_SLICES * HALVES == 2);

// Layout: of a slice of W in shared memory. bytes: of it; scales, zeros: where they begin; part: rows from one part to the next; group:
// places of scales from one group to the next; below, below_scales, below_zeros: bytes from a thread's first row of a part to its second.
template <typename Layout>
struct Ring {
  static constexpr int STEP_BYTES = (INPUT_BYTES + STEP_SLICES * Layout::bytes + 1023) / 1024 * 1024;  // as wgmma's swizzle repeats

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

// Of a pair of numbers in 16 codes: the thread of four that has the codes, their word, and which of its two pairs they are.
struct Pair {
  int thread, word, second;
};

// Of a row, a number and the one PAIR_STEP behind it.
__device__ __forceinline__ u32 pair_at(const u16* from) {
  return PAIR_STEP == 1 ? *reinterpret_cast<const u32*>(from) : from[0] | static_cast<u32>(from[PAIR_STEP]) << 16;
}

// The column of x that a pair begins with.
__device__ __forceinline__ int column_of(int window, Pair pair) {
  return column_of(window / HALVES * SLICE + pair.thread * 16, window % HALVES) + pair.word * 4 + pair.second * (3 - PAIR_STEP);
}

}  // namespace fused
