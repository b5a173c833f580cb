// FP8 GEMM: x and weights are both e4m3. The tensor cores of compute capability 9.0a read them from shared memory unchanged, so no
// instructions are spent on unpacking.
//
// round_rows, an earlier launch, norms x and rounds it: the largest magnitude of a row, or with block scales of each 128 columns of a
// row, becomes 448. It stores x in the tensor cores' order, so that a step's rows are one copy, and so are their scales.
//
// As in shared_rows.cu, the warps of a thread block are side by side along the rows of W, TILES parts of 16 each; four warps multiply
// together: W [64, 32] times x^T [32, MOST_ROWS]. One more warp copies 128 columns of W and of x at a time into a ring of STAGES steps,
// and exits. Beyond MOST_ROWS rows, adjacent thread blocks multiply the same rows of W, which are in the L2 cache then. A cluster of
// SPLITS thread blocks splits a sum over K (split_k).
//
// The tensor cores' FP8 accumulator keeps about 14 bits of the largest sum: too few for a long row. So they add up 128 columns, and
// threads add those sums in float32, multiplied by x's and W's block scales if any. Four warps add while four others multiply. Of two
// parts, one is added while the other is multiplied, unless their sums take too many registers (FULL).

#include "cluster_sums.cuh"
#include "norm.cuh"
#include "wgmma.cuh"

namespace fused {

constexpr int STEP_COLUMNS = 128;                                       // bytes of a row of W, and of x, per step
constexpr int ROW_STEPS = K / STEP_COLUMNS;
constexpr int STEPS = (ROW_STEPS + SPLITS - 1) / SPLITS;
constexpr int BUFFERS = FULL ? 1 : TILES;                               // parts of a step whose sums have registers
constexpr int INPUT_SCALES = BY_BLOCK ? MOST_ROWS * 4 : 0;              // bytes of x's scales per step
constexpr int EACH = (K / 8 + ARRANGING - 1) / ARRANGING;               // groups of eight columns of a row that a thread rounds
static_assert(WEIGHT == FP8 && ROW == K && K % STEP_COLUMNS == 0 && WARPS % 4 == 0 && TILES <= 2);
static_assert(BY_ROW || (SCALE_ROWS == STEP_COLUMNS && SCALE_SPAN == STEP_COLUMNS));

// Rows of 128 bytes, with 16-byte chunks swizzled among eight rows; see Ring.
struct Layout {
  static constexpr int inputs = MOST_ROWS * STEP_COLUMNS, slices = 1, bytes = BLOCK_ROWS * STEP_COLUMNS;
};

// Rows with padding to complete windows. round_rows stores windows of MOST_ROWS rows and 128 columns contiguously, and scales [groups,
// padded rows].
__device__ __forceinline__ int padded(int rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS; }

// x: rounded, MOST_ROWS rows. scales: x's scales of these rows in the first group; stride: between groups. row: first row of W; GATED: of
// the gate. input_scales: address in shared memory, for each stage. See fill.
struct Copier {
  const TensorMap& map;
  const Ring<Layout> ring;
  const u8* const x;
  const float* const scales;
  const int stride, row;
  const u32 input_scales;
  const u64 policy = read_once();

  __device__ __forceinline__ void weights(int step, int stage) const {
    const u32 full = ring.full + 8 * stage;
    barrier_expect(full, Layout::inputs + INPUT_SCALES + Layout::bytes);
#pragma unroll
    for (int part = 0; part < (GATED ? 2 : 1); ++part) {
      copy_rows(ring.slice(stage, 0) + part * (OUT * STEP_COLUMNS), map, step * STEP_COLUMNS, row + part * N, full, policy);
    }
  }

  __device__ __forceinline__ void inputs(int step, int stage) const {
    const u32 full = ring.full + 8 * stage;
    copy_bulk(ring.inputs(stage), x + static_cast<u64>(step) * Layout::inputs, Layout::inputs, full);
    if (BY_BLOCK) {
      copy_bulk(input_scales + stage * INPUT_SCALES, scales + static_cast<u64>(step) * stride, INPUT_SCALES, full);
    }
  }
};

// BY_BLOCK: W's scales of a warp's parts, loaded a step ahead.
struct Scales {
  const float* from[TILES];
  float next[TILES];

  __device__ __forceinline__ Scales(const Pointers& p, const int (&rows)[TILES], int step) {
#pragma unroll
    for (int i = 0; i < (BY_BLOCK ? TILES : 0); ++i) {
      from[i] = reinterpret_cast<const float*>(p.scales) + rows[i] / SCALE_ROWS * ROW_STEPS;
      advance(step - 1, i);
    }
  }
  // Return the scale of a step, and load that of the next one.
  __device__ __forceinline__ float take(int step, int tile) {
    const float own = next[tile];
    advance(step, tile);
    return own;
  }

 private:
  __device__ __forceinline__ void advance(int step, int tile) { next[tile] = from[tile][min(step + 1, ROW_STEPS - 1)]; }
};

// sums of a part += a step's sums. input_scales (BY_BLOCK): x's scales, from a thread's first column on; scale: W's.
__device__ __forceinline__ void add_step(float (&sums)[MOST_ROWS / 2], const float (&step)[MOST_ROWS / 2], u32 input_scales, float scale) {
#pragma unroll
  for (int block = 0; block < MOST_ROWS / 8; ++block) {
    float factors[2];
    if constexpr (BY_BLOCK) {
      const float2 own = load_two(input_scales + block * 32);
      factors[0] = own.x * scale, factors[1] = own.y * scale;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = sums[4 * block + i];
      const float product = step[4 * block + i];
      sum = BY_BLOCK ? sum + product * factors[i % 2] : sum + product;
    }
  }
}

// w: address of the four warps' rows of W [64, 128]; x: address of x; both in units of 16 bytes.
__device__ __forceinline__ void begin_step(float (&sums)[MOST_ROWS / 2], u32 w, u32 x) {
  products_begin();
#pragma unroll
  for (int part = 0; part < STEP_COLUMNS / 32; ++part) {
    Float8Products<MOST_ROWS>::run(sums, descriptor(w + part * 2), descriptor(x + part * 2), part);
  }
  products_commit();
}

__device__ __forceinline__ void multiply(
    float (&sums)[TILES][MOST_ROWS / 2], const Ring<Layout>& ring, u32 input_scales, Scales& scales, Steps steps, int warp, int lane) {
  float products[BUFFERS][MOST_ROWS / 2] = {};
  Place at;
#pragma unroll 1
  for (int step = steps.first; step < steps.end; ++step, at.advance()) {
    barrier_wait(ring.full + 8 * at.stage, at.parity);
    const u32 x = ring.inputs(at.stage) / 16, w = ring.slice(at.stage, 0) / 16 + warp / 4 * (64 * STEP_COLUMNS / 16);
    const auto begin = [&](int tile) { begin_step(products[tile % BUFFERS], w + tile * (WARPS * 16 * STEP_COLUMNS / 16), x); };
#pragma unroll
    for (int tile = 0; tile < BUFFERS; ++tile) begin(tile);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const bool last = tile == TILES - 1;
      BUFFERS > 1 && !last ? products_wait<1>() : products_wait<0>();
      pin(products[tile % BUFFERS]);
      if (last && !BY_BLOCK && lane == 0) barrier_arrive(ring.empty + 8 * at.stage);
      const float scale = BY_BLOCK ? scales.take(step, tile) : 1.0f;
      add_step(sums[tile], products[tile % BUFFERS], input_scales + at.stage * INPUT_SCALES + lane % 4 * 8, scale);
      if (tile + BUFFERS < TILES) begin(tile + BUFFERS);
    }
    if (BY_BLOCK) {
      __syncwarp();  // all lanes have read x's scales
      if (lane == 0) barrier_arrive(ring.empty + 8 * at.stage);
    }
  }
}

// --- x ---

// A thread's columns of a row: eight at a time, at distances of ARRANGING * 8.
struct Row {
  uint4 eights[EACH];
  const void* norm;
  float factor;

  static __device__ __forceinline__ int column(int i) { return (i * ARRANGING + threadIdx.x) * 8; }

  __device__ __forceinline__ Row(const u16* x, const void* norm_weight, float eps) : norm(norm_weight) {
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      eights[i] = column(i) < K ? *reinterpret_cast<const uint4*>(x + column(i)) : make_uint4(0, 0, 0, 0);
      if (NORM) own += squares(eights[i].x) + squares(eights[i].y) + squares(eights[i].z) + squares(eights[i].w);
    }
    factor = NORM ? norm_factor(own, eps) : 1.0f;
  }
  // Return eight normed values.
  __device__ __forceinline__ void values(float (&y)[8], int i) const {
    const u32 pairs[4] = {eights[i].x, eights[i].y, eights[i].z, eights[i].w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float2 both = make_float2(low_of(pairs[pair]), high_of(pairs[pair]));
      if (NORM && column(i) < K) both = normed(pairs[pair], norm, column(i) + 2 * pair, factor);
      y[2 * pair] = both.x, y[2 * pair + 1] = both.y;
    }
  }
  __device__ __forceinline__ float largest(int i) const {
    float y[8], most = 0.0f;
    values(y, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(y[j]));
    return most;
  }
};

// Return the scale for values with this maximum. It is not zero for zeros.
__device__ __forceinline__ float scale_of_largest(float largest) { return fmaxf(largest / 448.0f, 1e-12f); }

__device__ __forceinline__ u32 rounded_four(const float* y, float scale) {
  return to_float8_pair(y[0] / scale, y[1] / scale) | static_cast<u32>(to_float8_pair(y[2] / scale, y[3] / scale)) << 16;
}

}  // namespace fused

// Round a row of x [rows, K], normed, to FP8; see `padded` for the layout of rounded and scales. Grid (rows).
extern "C" __global__ void __launch_bounds__(fused::ARRANGING) round_rows(
    const fused::u16* x, const void* norm, fused::u8* rounded, float* scales, const float eps) {
  using namespace fused;
  const int m = blockIdx.x, stride = padded(gridDim.x);
  launch_dependents();
  wait_for_earlier();
  const Row row(x + static_cast<u64>(m) * K, norm, eps);
  float scale = 0.0f;
  if (!BY_BLOCK) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) most = fmaxf(most, row.largest(i));
    scale = scale_of_largest(of_row<true>(most));
    if (threadIdx.x == 0) scales[m] = scale;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int column = Row::column(i), window = column / STEP_COLUMNS, chunk = column % STEP_COLUMNS / 16;
    if (BY_BLOCK) {
      float most = row.largest(i);
#pragma unroll
      for (int distance = 8; distance; distance /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
      scale = scale_of_largest(most);
      if (column < K && threadIdx.x % 16 == 0) scales[static_cast<u64>(window) * stride + m] = scale;
    }
    if (column >= K) continue;
    float y[8];
    row.values(y, i);
    const u64 first = static_cast<u64>(m / MOST_ROWS) * ROW_STEPS + window;
    u8* to = rounded + (first * MOST_ROWS + m % MOST_ROWS) * STEP_COLUMNS + (chunk ^ (m & 7)) * 16 + column % 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(rounded_four(y, scale), rounded_four(y + 4, scale));
  }
}

// y = W x + bias, optionally activated, gated, or added to y, with x (p.x) and its scales from round_rows. map: W's bytes, in boxes of
// OUT rows and 128 bytes, swizzled. Grid (tiles times blocks of MOST_ROWS rows, SPLITS), one cluster per tile.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) w8a8(
    const __grid_constant__ fused::TensorMap map, const fused::Pointers p, const float* input_scales, const int all_rows) {
  using namespace fused;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // shows the compiler that the value is the same for the whole warp
  const int split = blockIdx.y;
  const Tile tile(all_rows);
  const u32 start = (shared_address(dynamic) + 1023) / 1024 * 1024, scales_at = start + STAGES * Ring<Layout>::STEP_BYTES;
  const Ring<Layout> ring = {start, shared_address(barriers), shared_address(barriers + STAGES)};
  const Steps steps = {split * STEPS, min((split + 1) * STEPS, ROW_STEPS)};

  launch_dependents();
  if (threadIdx.x == MULTIPLYING) ring.init();
  __syncthreads();
  if (warp >= WARPS) {
    if (FULL) give_registers<40>();
    if (threadIdx.x == MULTIPLYING) {
      const u8* const x = reinterpret_cast<const u8*>(p.x) + static_cast<u64>(tile.first) * K;
      fill(ring, Copier{map, ring, x, input_scales + tile.first, padded(all_rows), tile.row, scales_at}, steps);
    }
    return;
  }
  if (FULL) take_registers<224>();
  float sums[TILES][MOST_ROWS / 2] = {};
  int rows[TILES];
  find_rows(rows, tile.row, warp);
  Scales scales(p, rows, steps.first);
  multiply(sums, ring, scales_at, scales, steps, warp, lane);
  finish_tile(p, sums, tile, start, split, warp, lane, [=](int m) {
    return BY_BLOCK ? 1.0f : __uint_as_float(load_stored(reinterpret_cast<const u32*>(input_scales) + m));
  });
}
