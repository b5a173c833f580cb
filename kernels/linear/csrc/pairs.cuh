// Where in a ring numbers of x lie, for codes that are unpacked into registers.
//
// Which columns of x the matrix units meet with which codes follows from the places of x in shared memory, so that a thread's codes
// are 16 bytes that lie together: thread t of four holds, of 16 places along K, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and its codes are of
// 16 columns that lie together, four of them in each word. What multiplies says where in a row a pair of numbers lies (ring_mma.cuh,
// ring_wgmma.cuh).
#pragma once

#include "ring.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;  // of a step: 128 columns of x, in two windows
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
static_assert(STEP_SLICES * HALVES == 2);

// Of a slice of W in shared memory: scales, zeros: where they begin; part: rows from one part to the next; group: places of scales from
// one group to the next; below, below_scales, below_zeros: bytes from a thread's first row of a part to its second.
struct PairsLayout {
  static constexpr int inputs = INPUT_BYTES, slices = STEP_SLICES;
};

// Of a pair of numbers in 16 codes: the thread of four that has the codes, their word, and which of its two pairs they are.
struct Pair {
  int thread, word, second;
};

// The column of x that a pair begins with.
__device__ __forceinline__ int column_of(int window, Pair pair) {
  return column_of(window / HALVES * SLICE + pair.thread * 16, window % HALVES) + pair.word * 4 + pair.second * (3 - PAIR_STEP);
}

}  // namespace fused
