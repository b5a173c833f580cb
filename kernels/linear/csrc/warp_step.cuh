// Parts of few_rows.cu and expert_rows.cu for one warp: its slices of x in shared memory, and one step of its GEMM.
#pragma once

#include "product.cuh"

namespace fused {

constexpr int WARP_OUT = GATED ? 8 * TILES : 16 * TILES;  // rows of y per tile; GATED: from twice as many rows of W
constexpr int INPUT_BYTES = HALVES * MOST_ROWS * 128;     // bytes of x for the columns of a slice
constexpr int STEP_BYTES = SLICE_BYTES + (KEPT ? 0 : INPUT_BYTES);  // KEPT: x is not in the ring
constexpr int STEPS = (SLICES + WARPS - 1) / WARPS;       // slices per warp and tile
constexpr int SUM_ROW = PART_ROWS + 4;                    // floats: threads of a warp store to different banks
constexpr int SUMS = WARPS * MOST_ROWS * SUM_ROW;         // floats of one tile; there is room for two
constexpr int FINISHERS = MOST_ROWS == 1 ? 1 : 4;         // warps that finish tiles
constexpr int FINISHING = FINISHERS * 32;
constexpr int THREADS = WARPS * 32 + FINISHING;
constexpr int OUTPUTS = (WARP_OUT * MOST_ROWS + FINISHING - 1) / FINISHING;  // outputs per thread

// Return the first row of W of a part. out: the tile's first row of y. Tiles may extend beyond N, but no part does.
__device__ __forceinline__ int first_row(int out, int part) {
  constexpr int parts = GATED ? TILES / 2 : TILES;
  const int row = min(out + part % parts * 16, N - 16);
  return part < parts ? row : N + row;
}

// --- x in shared memory ---

// Return the first column of one of the HALVES windows of a slice.
__device__ __forceinline__ int window_column(int slice, int window) {
  if (HALVES == 1 || HALF >= SLICE) return column_of(slice * SLICE, window);
  return slice * (HALVES * SLICE) + window * WINDOW;
}

// Return the offset of 8 columns of x in a window of MOST_ROWS rows. Threads of a warp that read two adjacent rows at once use different
// banks.
__device__ __forceinline__ u32 chunk_at(int window, int m, int chunk) {
  return (window * MOST_ROWS + m) * 128 + (chunk ^ (m & 1)) * 16;
}

// Load 8 columns of a row of x, for the words 2 `words` and 2 `words` + 1 of a thread's 16 bytes.
__device__ __forceinline__ Quad load_columns(u32 x, int block, int half, int words, int lane) {
  if (MOST_ROWS == 1 && lane >= 4) return {};
  int window = half, chunk = lane % 4 * 2;
  if (HALVES == 2 && HALF < SLICE) {
    const int column = column_of(lane % 4 * 16, half);
    window = column / WINDOW, chunk = column % WINDOW / 8;
  }
  return load_quad(x + chunk_at(window, MOST_ROWS == 1 ? 0 : block * 8 + lane / 4, chunk + words));
}

__device__ __forceinline__ void multiply_columns(Quad& x, const void* norm, int column) {
#if NORM_FLOAT
  const float* weight = static_cast<const float*>(norm) + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.part[i] = to_pair(low_of(x.part[i]) * weight[2 * i], high_of(x.part[i]) * weight[2 * i + 1]);
#else
  const Quad weight = load_constant_quad(static_cast<const u16*>(norm) + column);
#pragma unroll
  for (int i = 0; i < 4; ++i) x.part[i] = multiply_pair(x.part[i], weight.part[i]);
#endif
}

// Regroup columns for pairs of values: of four columns, the first and third, and the second and fourth.
__device__ __forceinline__ void pair_columns(Quad& x) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 first = x.part[i], second = x.part[i + 1];
    x.part[i] = permute(first, second, 0x5410), x.part[i + 1] = permute(first, second, 0x7632);
  }
}

// Unpack two words of each row of a part: [16, 32] of W, for 32 columns of x.
template <int half>
__device__ __forceinline__ void unpack_words(u32 (&a)[2][4], const Codes& codes, int words) {
  codes.unpack<half>(a[0], 2 * words);
  codes.unpack<half>(a[1], 2 * words + 1);
}

__device__ __forceinline__ float sum_of_squares(const Quad& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += low_of(x.part[i]) * low_of(x.part[i]) + high_of(x.part[i]) * high_of(x.part[i]);
  return sum;
}

// --- multiplication and sums ---

// from, inputs: addresses of the slice and its columns of x. squares: sums of squares of the thread's rows of x, updated if `first`.
__device__ __forceinline__ void multiply_step(
    const Pointers& p, float (&sums)[TILES][BLOCKS][4], float (&squares)[BLOCKS], bool first, u32 from, u32 inputs, int slice,
    int lane) {
  Quad x[2][HALVES][BLOCKS];
#pragma unroll
  for (int words = 0; words < 2; ++words) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        Quad& columns = x[words][half][block];
        columns = load_columns(inputs, block, half, words, lane);
        if (NORM && first) squares[block] += sum_of_squares(columns);
        if (NORM) multiply_columns(columns, p.norm, column_of(slice * SLICE + lane % 4 * 16, half) + 8 * words);
        if (PAIR_STEP == 2) pair_columns(columns);
      }
    }
  }
#pragma unroll
  for (int part = 0; part < TILES; ++part) {
    const Codes codes(from, part, lane);
    float products[2][BLOCKS][4] = {};  // two accumulators, so that one need not wait for the other
    if (!ON_SUMS) {
#pragma unroll
      for (int i = 0; i < BLOCKS * 4; ++i) products[0][i / 4][i % 4] = sums[part][i / 4][i % 4];
    }
#pragma unroll
    for (int words = 0; words < 2; ++words) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        u32 a[2][4];
        half ? unpack_words<1>(a, codes, words) : unpack_words<0>(a, codes, words);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          const Quad& columns = x[words][half][block];
          multiply_add(products[0][block], a[0], columns.part[0], columns.part[1]);
          multiply_add(products[1][block], a[1], columns.part[2], columns.part[3]);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[0][block][i] += products[1][block][i];
      if (ON_SUMS) {
        add_scaled(sums[part][block], products[0][block], from, part, lane);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[part][block][i] = products[0][block][i];
      }
    }
  }
}

__device__ __forceinline__ void store_sums(float* mine, const float (&sums)[TILES][BLOCKS][4], int lane) {
#pragma unroll
  for (int part = 0; part < TILES; ++part) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = part * 16 + lane / 4 + i / 2 * 8, column = block * 8 + lane % 4 * 2 + i % 2;
        if (column < MOST_ROWS) mine[column * SUM_ROW + row] = sums[part][block][i];
      }
    }
  }
}

__device__ __forceinline__ float sum_of_warps(const float* sums, int row, int m) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += sums[(warp * MOST_ROWS + m) * SUM_ROW + row];
  return sum;
}

}  // namespace fused
