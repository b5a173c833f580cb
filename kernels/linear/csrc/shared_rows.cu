// Split-K (split_k) GEMM over quantized weights for tens to hundreds of rows: tensor core time matters, and x is too large for each warp to read
// its own.
//
// The warps of a thread block are side by side along the rows of W, TILES parts of 16 each. Four warps multiply together (wgmma, compute
// capability 9.0a): W [64, 16] from registers, unpacked and scaled there during the previous wgmma, times x^T [16, MOST_ROWS] from shared
// memory. One more warp copies 128 columns of W and of x at a time into a ring of STAGES steps in shared memory, and exits. Beyond
// MOST_ROWS rows, adjacent thread blocks multiply the same rows of W, which are in the L2 cache then.
//
// arrange_rows permutes x into the order of ring_wgmma.cuh once, after its norm, so that a step's columns are one copy.
//
// The thread blocks of a cluster split a sum over K (split-K): their sums meet through the cluster's shared memory, and each thread block
// finishes its share of y. GATED: half of the warps have rows of the gate, the others rows of up.

#include "cluster_sums.cuh"
#include "norm.cuh"
#include "ring_wgmma.cuh"

namespace fused {

constexpr int STEPS = (SLICES / STEP_SLICES + SPLITS - 1) / SPLITS;
constexpr int GROUP_ROWS = BY_GROUP ? BLOCK_ROWS : 0;  // rows whose scales and zeros are copied for each group
constexpr int BLOCK_SCALES = GROUPS * GROUP_ROWS * SCALE_SIZE, BLOCK_ZEROS = ZEROS ? GROUPS * GROUP_ROWS : 0;

// Layout of a slice in shared memory; see Ring.
struct Layout : PairsLayout {
  static constexpr int part = 16, group = BLOCK_ROWS, scales = BLOCK_ROWS * SLICE, zeros = scales + BLOCK_SCALES;
  static constexpr int bytes = zeros + BLOCK_ZEROS, below = 8 * SLICE, below_scales = 8 * SCALE_SIZE, below_zeros = 8;
};

// x: permuted, MOST_ROWS rows. row: first row of W; GATED: of the gate. See fill.
struct Copier {
  const Pointers& p;
  const TensorMap& map;
  const Ring<Layout> ring;
  const u16* const x;
  const int row;
  const u64 policy = read_once();

  __device__ __forceinline__ void weights(int step, int stage) const {
    constexpr int rows_of_w = GATED ? 2 * N : N, parts = GATED ? 2 : 1;
    const u32 full = ring.full + 8 * stage, rows = min(OUT, N - row);
    barrier_expect(full, INPUT_BYTES + STEP_SLICES * (BLOCK_ROWS * SLICE + (BLOCK_SCALES + BLOCK_ZEROS) / OUT * rows));
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const int slice = step * STEP_SLICES + i;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        copy_rows(ring.slice(stage, i) + part * (OUT * SLICE), map, slice * SLICE, row + part * N, full, policy);
#pragma unroll
        for (int group = 0; group < (BY_GROUP ? GROUPS : 0); ++group) {
          const u32 to = ring.slice(stage, i) + BLOCK_ROWS * SLICE, place = group * BLOCK_ROWS + part * OUT;
          const u64 from = static_cast<u64>(slice * SLICE / SCALE_SPAN + group) * rows_of_w + row + part * N;
          copy_bulk(to + place * SCALE_SIZE, p.scales + from * SCALE_SIZE, rows * SCALE_SIZE, full);
          if (ZEROS) copy_bulk(to + BLOCK_SCALES + place, p.zeros + from, rows, full);
        }
      }
    }
  }

  __device__ __forceinline__ void inputs(int step, int stage) const {
    copy_bulk(ring.inputs(stage), x + static_cast<u64>(step) * (INPUT_BYTES / 2), INPUT_BYTES, ring.full + 8 * stage);
  }
};

// BY_BLOCK: scales for all rows of a part, loaded a step ahead. rows: first row of W of each part.
struct Scales {
  const Pointers& p;
  const int (&rows)[TILES];
  float next[STEP_SLICES][TILES];

  __device__ __forceinline__ Scales(const Pointers& pointers, const int (&rows_of_w)[TILES], int step) : p(pointers), rows(rows_of_w) {
    if constexpr (BY_BLOCK) {
#pragma unroll
      for (int i = 0; i < STEP_SLICES * TILES; ++i) advance(step - 1, i / TILES, i % TILES);
    }
  }
  __device__ __forceinline__ u32 pair(int i, int tile, int) const { return to_pair(next[i][tile], next[i][tile]); }
  __device__ __forceinline__ void advance(int step, int i, int tile) {
    const int slice = min((step + 1) * STEP_SLICES + i, SLICES - 1);
    const int place = rows[tile] / SCALE_ROWS * (ROW / SCALE_SPAN) + slice * SLICE / SCALE_SPAN;
    next[i][tile] = reinterpret_cast<const float*>(p.scales)[place] * (WIDE ? 1.0f : CODE_FACTOR);
  }
};

}  // namespace fused

// Permute a row of x, normed, into the tensor cores' order; a step has two windows. A window of MOST_ROWS rows is contiguous.
// Grid (rows, thread blocks per row; 1 if normed).
extern "C" __global__ void __launch_bounds__(fused::ARRANGING) arrange_rows(
    const fused::u16* x, const void* norm, fused::u16* arranged, const float eps) {
  using namespace fused;
  const int m = blockIdx.x;
  x += static_cast<u64>(m) * K;
  launch_dependents();
  wait_for_earlier();
#if NORM
  float own = 0.0f;
  for (int k = threadIdx.x * 8; k < K; k += ARRANGING * 8) {
    const Quad columns = load_constant_quad(x + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) own += squares(columns.part[i]);
  }
  const float factor = norm_factor(own, eps);
#endif
  for (int place = blockIdx.y * ARRANGING + threadIdx.x; place < K / 8; place += gridDim.y * ARRANGING) {
    const int window = place / 8, chunk = place % 8;
    u32 columns[4];
#pragma unroll
    for (int thread = 0; thread < 4; ++thread) {
      const int column = column_of(window, pair_of(chunk, thread));
      columns[thread] = pair_at(x + column);
#if NORM
      const float2 pair = normed(columns[thread], norm, column, factor);
      columns[thread] = to_pair(pair.x, pair.y);
#endif
    }
    const u64 first = static_cast<u64>(m / MOST_ROWS) * (K / WINDOW) + window;
    u16* to = arranged + (first * MOST_ROWS + m % MOST_ROWS) * WINDOW + (chunk ^ (m & 7)) * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(columns[0], columns[1], columns[2], columns[3]);
  }
}

// y = W x + bias, optionally activated, gated, or added to y, with x permuted by arrange_rows. Sums in float32. map: W's bytes, in boxes
// of OUT rows and SLICE bytes. Grid (tiles times blocks of MOST_ROWS rows, SPLITS), one cluster per tile; adjacent clusters have the same
// tile.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) shared_rows(
    const __grid_constant__ fused::TensorMap map, const fused::Pointers p, const int all_rows) {
  using namespace fused;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // shows the compiler that the value is the same for the whole warp
  const int split = blockIdx.y;
  const Tile tile(all_rows);
  const u32 start = (shared_address(dynamic) + 1023) / 1024 * 1024;
  const Ring<Layout> ring = {start, shared_address(barriers), shared_address(barriers + STAGES)};
  const Steps steps = {split * STEPS, min((split + 1) * STEPS, SLICES / STEP_SLICES)};

  launch_dependents();
  if (threadIdx.x == MULTIPLYING) ring.init();
  __syncthreads();
  if (warp >= WARPS) {
    if (FULL) give_registers<40>();
    if (threadIdx.x == MULTIPLYING) fill(ring, Copier{p, map, ring, p.x + static_cast<u64>(tile.first) * K, tile.row}, steps);
    return;
  }
  if (FULL) take_registers<224>();
  float sums[TILES][MOST_ROWS / 2] = {};
  int rows_of_w[TILES];
  find_rows(rows_of_w, tile.row, warp);
  Scales scales(p, rows_of_w, steps.first);
  Place at;
  multiply(sums, ring, at, scales, steps, warp, lane);
  finish_tile(p, sums, tile, start, split, warp, lane, [](int) { return 1.0f; });
}
