// Epilogue of a split-K GEMM: the sums of a thread block, or of a cluster that splits K, meet in shared memory, and each thread block
// finishes its share of y.
#pragma once

#include "ring.cuh"

namespace fused {

constexpr int SUM_ROW = BLOCK_ROWS + 4;  // floats: threads of a warp store to different banks
constexpr bool FULL = TILES * MOST_ROWS > 128;  // sums leave too few registers, unless other warps give up some of theirs
constexpr int THREADS = MULTIPLYING + (FULL ? 128 : 32);

// part: index of the 16 rows within the thread block.
__device__ __forceinline__ void store_sums(const float (&sums)[MOST_ROWS / 2], u32 to, int part, int lane) {
#pragma unroll
  for (int block = 0; block < MOST_ROWS / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = part * 16 + lane / 4 + i / 2 * 8, column = block * 8 + lane % 4 * 2 + i % 2;
      store_shared(to + (column * SUM_ROW + at) * 4, sums[4 * block + i]);
    }
  }
}

// Wait until the sums of all thread blocks of the cluster are stored.
__device__ __forceinline__ void wait_for_sums() {
  if (SPLITS > 1) {
    cluster_wait();
  } else {
    named_sync(1, MULTIPLYING);
  }
}

// Return the sums of four adjacent rows of W, added over the cluster (split-K).
__device__ __forceinline__ Floats sums_of_blocks(u32 sums, int row, int m) {
  const u32 from = sums + (m * SUM_ROW + row) * 4;
  if (SPLITS == 1) return load_floats(from);
  Floats total = {};
#pragma unroll
  for (int block = 0; block < SPLITS; ++block) {
    const Floats own = load_floats_of_block(from, block);
#pragma unroll
    for (int i = 0; i < 4; ++i) total.part[i] += own.part[i];
  }
  return total;
}

// Finish sums and store them to y [n, n + 4). factor: norm factor of the row of x.
__device__ __forceinline__ void store_four(const Pointers& p, const Floats& sums, const Floats& up, int n, u16* to, float factor) {
  uint2& pairs = *reinterpret_cast<uint2*>(to);
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = finish(p, sums.part[i], up.part[i], n + i, factor);
  if (ADD) {
    const uint2 before = pairs;
    y[0] += low_of(before.x), y[1] += high_of(before.x), y[2] += low_of(before.y), y[3] += high_of(before.y);
  }
  pairs = make_uint2(to_pair(y[0], y[1]), to_pair(y[2], y[3]));
}

// A tile of y: its first row of W, and its rows of x.
struct Tile {
  int row, first, rows;

  // Grid (tiles times blocks of MOST_ROWS rows): adjacent thread blocks have the same rows of W.
  __device__ __forceinline__ explicit Tile(int all_rows) {
    const int row_blocks = (all_rows + MOST_ROWS - 1) / MOST_ROWS;
    row = blockIdx.x / row_blocks * OUT, first = blockIdx.x % row_blocks * MOST_ROWS;
    rows = min(MOST_ROWS, all_rows - first);
  }
};

// Store a thread block's share of a tile, from the sums of its cluster. factor_of: returns the norm factor of a row of x.
template <typename Factor>
__device__ __forceinline__ void store_tile(const Pointers& p, const Tile& tile, u32 sums, int split, const Factor& factor_of) {
#pragma unroll 2
  for (int o = split * MULTIPLYING + threadIdx.x; o < OUT / 4 * tile.rows; o += SPLITS * MULTIPLYING) {
    const int at = o % (OUT / 4) * 4, n = tile.row + at, m = o / (OUT / 4);
    if (n >= N) continue;
    const Floats sum = sums_of_blocks(sums, at, m), up = GATED ? sums_of_blocks(sums, OUT + at, m) : Floats{};
    store_four(p, sum, up, n, p.y + static_cast<u64>(tile.first + m) * N + n, factor_of(tile.first + m));
  }
}

// Finish a tile after all warps have read the ring's last stage. start: address of the ring. factor_of: see store_tile.
template <typename Factor>
__device__ __forceinline__ void finish_tile(
    const Pointers& p, const float (&sums)[TILES][MOST_ROWS / 2], const Tile& tile, u32 start, int split, int warp, int lane,
    const Factor& factor_of) {
  named_sync(1, MULTIPLYING);
#pragma unroll
  for (int i = 0; i < TILES; ++i) store_sums(sums[i], start, i * WARPS + warp, lane);
  wait_for_sums();
  store_tile(p, tile, start, split, factor_of);
  if (SPLITS > 1) cluster_wait();  // a thread block's shared memory must exist until all have read it
}

// Find the first row of W of each of a warp's parts, clamped to N; GATED: half of the parts are of the gate.
__device__ __forceinline__ void find_rows(int (&rows)[TILES], int first, int warp) {
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int part = i * WARPS + warp;
    const bool up = GATED && part >= PARTS / 2;
    rows[i] = min(first + part * 16 - (up ? OUT : 0), N - 16) + (up ? N : 0);
  }
}

}  // namespace fused
