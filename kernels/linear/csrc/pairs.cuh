// Positions of x in a ring, for quantized values that are unpacked into registers.
//
// The order of x in shared memory determines which columns of x the tensor cores multiply with which values. It is chosen so that a
// thread's values are 16 contiguous bytes. Of 16 positions along K, thread t of four holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; its values
// are from 16 contiguous columns, four in each word. ring_mma.cuh and ring_wgmma.cuh define where in a row a pair of elements is.
#pragma once

#include "ring.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;  // slices per step: 128 columns of x, in two windows
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
static_assert(STEP_SLICES * HALVES == 2);

// Layout of a slice of W in shared memory. scales, zeros: offsets; part: rows between parts; group: scales between groups; below,
// below_scales, below_zeros: bytes from a thread's first row of a part to its second.
struct PairsLayout {
  static constexpr int inputs = INPUT_BYTES, slices = STEP_SLICES;
};

// Identifies a pair among 16 values: the thread (of four) that has them, their word, and which of its two pairs.
struct Pair {
  int thread, word, second;
};

// Return the column of x of a pair's first element.
__device__ __forceinline__ int column_of(int window, Pair pair) {
  return column_of(window / HALVES * SLICE + pair.thread * 16, window % HALVES) + pair.word * 4 + pair.second * (3 - PAIR_STEP);
}

}  // namespace fused
