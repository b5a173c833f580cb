// GEMV and skinny GEMM over quantized weights for up to 16 rows: the time is that of reading the weight's bytes.
//
// A thread block computes tiles of PART_ROWS rows of the weight, one after the other. Its warps are side by side along K (split_k
// within the thread block): each multiplies its own slices of every row. A warp's slices pass through a ring of STAGES steps in shared memory,
// while later steps and the next tile are being copied. Further warps add the sums of a tile, finish and store it, so that the warps that
// multiply never wait for each other: there is room for the sums of two tiles.
//
// KEPT: a warp keeps its columns of x in shared memory, since all tiles need them. Otherwise they pass through the ring with the slices,
// from the L2 cache each time, whose bandwidth then is the limit if a tile has few rows.
//
// The weight is loaded before the kernel waits for its predecessor (programmatic dependent launch).

#include "warp_step.cuh"

namespace fused {

// Return the weight of a head's norm, which is float32 or half precision.
__device__ __forceinline__ float norm_at(const void* norm, int k) {
#if HEAD_NORM_FLOAT
  return static_cast<const float*>(norm)[k];
#else
  return from_half(static_cast<const u16*>(norm)[k]);
#endif
}

__device__ __forceinline__ void copy_tile(const Pointers& p, u32 to, int tile, int slice, int lane, u64 policy) {
  copy_weights(p, to, [tile](int part) { return first_row(tile * WARP_OUT, part); }, slice, lane, policy);
}

// Copy the columns of x of a slice. Rows from `rows` on become zeros.
__device__ __forceinline__ void copy_inputs(const Pointers& p, u32 to, int slice, int lane, int rows) {
#pragma unroll
  for (int i = 0; i < (HALVES * MOST_ROWS * 8 + 31) / 32; ++i) {
    const int c = i * 32 + lane, window = c / (MOST_ROWS * 8), m = c / 8 % MOST_ROWS;
    if (HALVES * MOST_ROWS * 8 % 32 && c >= HALVES * MOST_ROWS * 8) return;
    const u32 bytes = MOST_ROWS == 1 || m < rows ? 16 : 0;
    const u16* from = p.x + static_cast<u64>(bytes ? m : 0) * K + window_column(slice, window) + c % 8 * 8;
    copy_16(to + chunk_at(window, m, c % 8), from, bytes);
  }
}

struct Place {  // position of a step: the tile, and the index among the warp's slices
  int tile, step;
  __device__ __forceinline__ void advance() {
    if (++step == STEPS) {
      step = 0;
      tile += gridDim.x;
    }
  }
};

// Return 1 / sqrt(mean of squares + eps) of a row of x. squares: sums over each warp's columns [WARPS, MOST_ROWS].
__device__ __forceinline__ float norm_factor(const float* squares, int m, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += squares[warp * MOST_ROWS + m];
  return rsqrtf(sum / K + eps);
}

// thread: index among the finishing threads.
__device__ __forceinline__ void load_residual(const Pointers& p, float (&residual)[OUTPUTS], int tile, int thread, int rows) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    const int o = i * FINISHING + thread, n = tile * WARP_OUT + o % WARP_OUT, m = o / WARP_OUT;
    residual[i] = ADD && n < N && m < rows ? from_half(p.y[static_cast<u64>(m) * N + n]) : 0.0f;
  }
}

__device__ __forceinline__ void store_tile(
    const Pointers& p, const float* sums, const float* squares, float eps, const float (&residual)[OUTPUTS], int tile, int thread,
    int rows) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    const int o = i * FINISHING + thread, row = o % WARP_OUT, n = tile * WARP_OUT + row, m = o / WARP_OUT;
    if (n >= N || m >= rows) continue;
    const float up = GATED ? sum_of_warps(sums, WARP_OUT + row, m) : 0.0f;
    const float y = finish(p, sum_of_warps(sums, row, m), up, n, NORM ? norm_factor(squares, m, eps) : 1.0f);
    p.y[static_cast<u64>(m) * N + n] = to_half(ADD ? y + residual[i] : y);
  }
}

#if HEADS > 0
constexpr int TURNED = (MOST_ROWS + FINISHERS - 1) / FINISHERS;  // rows per finishing warp
constexpr int HALF_HEAD = HEAD_DIM / 2, PARTS = (HALF_HEAD + 31) / 32;

// Elements of a head that a lane rotates (RoPE), for each of its warp's rows. All are loaded before the first use: separate waits would
// dominate the time.
struct Turning {
  u16 low[TURNED][PARTS], high[TURNED][PARTS];
  float cos[TURNED][PARTS], sin[TURNED][PARTS];

  __device__ __forceinline__ void read(const Pointers& p, int head, int warp, int lane, int rows) {
#pragma unroll
    for (int i = 0; i < TURNED; ++i) {
      const int m = min(warp + i * FINISHERS, rows - 1);
      const u16* y = p.y + static_cast<u64>(m) * N + head * HEAD_DIM;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int h = min(part * 32 + lane, HALF_HEAD - 1);
        low[i][part] = load_stored(y + h), high[i][part] = load_stored(y + HALF_HEAD + h);
        cos[i][part] = p.cos[m * HALF_HEAD + h], sin[i][part] = p.sin[m * HALF_HEAD + h];
      }
    }
  }

  // Norm and rotate one row.
  __device__ __forceinline__ void turn(u16* y, const void* norm, int i, int lane, float eps) const {
    float scale = 1.0f;
    if (QK_NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const float a = from_half(low[i][part]), b = from_half(high[i][part]);
        squares += part * 32 + lane < HALF_HEAD ? a * a + b * b : 0.0f;
      }
#pragma unroll
      for (int distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(0xffffffff, squares, distance);
      scale = rsqrtf(squares / HEAD_DIM + eps);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int h = part * 32 + lane;
      if (h >= HALF_HEAD) continue;
      float a = from_half(low[i][part]), b = from_half(high[i][part]);
      if (QK_NORM) a *= scale * norm_at(norm, h), b *= scale * norm_at(norm, HALF_HEAD + h);
      y[h] = to_half(a * cos[i][part] - b * sin[i][part]);
      y[HALF_HEAD + h] = to_half(b * cos[i][part] + a * sin[i][part]);
    }
  }
};

// Norm and rotate the heads of q and k that this tile completes, in all rows of y. shared: one int. thread: index among the finishing
// threads.
__device__ __forceinline__ void turn_heads(const Pointers& p, int* shared, int tile, int thread, int rows, float eps) {
  const int begin = tile * WARP_OUT, end = min(begin + WARP_OUT, N);
  const int warp = thread / 32, lane = thread % 32;
  for (int head = begin / HEAD_DIM; head < HEADS + KV_HEADS && head * HEAD_DIM < end; ++head) {
    const int count = min(end, (head + 1) * HEAD_DIM) - max(begin, head * HEAD_DIM);
    named_sync(1, FINISHING);  // all of this tile is stored; the arrival count releases it
    if (thread == 0) *shared = add_arrivals(p.arrivals + head, count);
    named_sync(1, FINISHING);
    if (*shared + count < HEAD_DIM) continue;
    if (thread == 0) p.arrivals[head] = 0;
    Turning turning;
    turning.read(p, head, warp, lane, rows);
#pragma unroll
    for (int i = 0; i < TURNED; ++i) {
      const int m = warp + i * FINISHERS;
      if (m < rows) turning.turn(p.y + static_cast<u64>(m) * N + head * HEAD_DIM, head < HEADS ? p.q_norm : p.k_norm, i, lane, eps);
    }
  }
}
#endif

// --- the two kinds of warps ---

constexpr int HEADER = 128;  // bytes of shared memory: four barriers, and what HEADS needs

struct Shared {
  u32 rings;          // [WARPS, STAGES, STEP_BYTES]
  u32 inputs;         // KEPT: [WARPS, STEPS, INPUT_BYTES]
  float* sums;        // [2, WARPS, MOST_ROWS, SUM_ROW]
  float* squares;     // [WARPS, MOST_ROWS]
  int* arrived;
  u32 full, empty;    // two barriers of 8 bytes each: a tile's sums are ready, and have been read
};

__device__ __forceinline__ void store_squares(float* mine, float (&squares)[BLOCKS], int lane) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    squares[block] += __shfl_xor_sync(0xffffffff, squares[block], 1);
    squares[block] += __shfl_xor_sync(0xffffffff, squares[block], 2);
    const int m = block * 8 + lane / 4;
    if (lane % 4 == 0 && m < MOST_ROWS) mine[m] = squares[block];
  }
}

__device__ __forceinline__ void multiply(const Pointers& p, const Shared& shared, int warp, int lane, int rows, int tiles) {
  const u64 policy = read_once();
  const u32 ring = shared.rings + warp * (STAGES * STEP_BYTES);
  // Address of the inputs of a step in a stage of the ring.
  const auto inputs_at = [&](int step, u32 stage) {
    return KEPT ? shared.inputs + (warp * STEPS + step) * INPUT_BYTES : ring + stage * STEP_BYTES + SLICE_BYTES;
  };
  const auto needs_inputs = [](int tile) { return !KEPT || tile == static_cast<int>(blockIdx.x); };
  Place ahead = {static_cast<int>(blockIdx.x), 0};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    const int slice = ahead.step * WARPS + warp;
    if (ahead.tile < tiles && slice < SLICES) copy_tile(p, ring + stage * STEP_BYTES, ahead.tile, slice, lane, policy);
    ahead.advance();
  }
  wait_for_earlier();
  Place place = {static_cast<int>(blockIdx.x), 0};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    const int slice = place.step * WARPS + warp;
    if (place.tile < tiles && slice < SLICES && needs_inputs(place.tile)) {
      copy_inputs(p, inputs_at(place.step, stage), slice, lane, rows);
    }
    copies_commit();
    place.advance();
  }
  u32 stage = 0, free_stage = STAGES - 1;
  int count = 0;  // tiles so far
  float squares[BLOCKS] = {};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++count) {
    float sums[TILES][BLOCKS][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copies_wait<STAGES - 2>();
      __syncwarp();
      const int slice = step * WARPS + warp, next = ahead.step * WARPS + warp;
      if (SLICES % WARPS == 0 || slice < SLICES) {
        multiply_step(p, sums, squares, count == 0, ring + stage * STEP_BYTES, inputs_at(step, stage), slice, lane);
      }
      __syncwarp();
      if (ahead.tile < tiles && (SLICES % WARPS == 0 || next < SLICES)) {
        copy_tile(p, ring + free_stage * STEP_BYTES, ahead.tile, next, lane, policy);
        if (needs_inputs(ahead.tile)) copy_inputs(p, inputs_at(ahead.step, free_stage), next, lane, rows);
      }
      copies_commit();
      ahead.advance();
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
    }
    const int buffer = count % 2;
    if (count >= 2) barrier_wait(shared.empty + 8 * buffer, (count / 2 - 1) % 2);
    store_sums(shared.sums + buffer * SUMS + warp * MOST_ROWS * SUM_ROW, sums, lane);
    if (NORM && count == 0) store_squares(shared.squares + warp * MOST_ROWS, squares, lane);
    barrier_arrive(shared.full + 8 * buffer);
  }
}

__device__ __forceinline__ void finish_tiles(
    const Pointers& p, const Shared& shared, int thread, float eps, float head_eps, int rows, int tiles) {
  wait_for_earlier();
  int count = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++count) {
    const int buffer = count % 2;
    float residual[OUTPUTS];
    load_residual(p, residual, tile, thread, rows);
    barrier_wait(shared.full + 8 * buffer, count / 2 % 2);
    store_tile(p, shared.sums + buffer * SUMS, shared.squares, eps, residual, tile, thread, rows);
    barrier_arrive(shared.empty + 8 * buffer);
#if HEADS > 0
    turn_heads(p, shared.arrived, tile, thread, rows, head_eps);
#endif
  }
}

}  // namespace fused

// y = W norm(x) + bias, optionally activated, gated, or added to y. Sums in float32. Grid: any number of thread blocks.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) few_rows(
    const fused::Pointers p, const float eps, const float head_eps, const int rows, const int tiles) {
  using namespace fused;
  extern __shared__ __align__(128) char dynamic[];
  constexpr int rings = WARPS * STAGES * STEP_BYTES, inputs = KEPT ? WARPS * STEPS * INPUT_BYTES : 0;
  const u32 start = shared_address(dynamic), ring = start + HEADER;
  float* const sums = reinterpret_cast<float*>(dynamic + HEADER + rings + inputs);
  const Shared shared = {ring, ring + rings, sums, sums + 2 * SUMS, reinterpret_cast<int*>(dynamic + 32), start, start + 16};
  launch_dependents();
  if (threadIdx.x < 4) barrier_init(start + 8 * threadIdx.x, threadIdx.x < 2 ? WARPS * 32 : FINISHING);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < WARPS) {
    multiply(p, shared, warp, threadIdx.x % 32, rows, tiles);
  } else {
    finish_tiles(p, shared, threadIdx.x - WARPS * 32, eps, head_eps, rows, tiles);
  }
}
