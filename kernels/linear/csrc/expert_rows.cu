// Skinny grouped_gemm (MoE) over quantized experts with few tokens each: the warps of few_rows.cu, over tiles ("lots") of one expert's rows.
//
// The first GEMM (GATHER) reads the rows of tokens and stores activated rows by pair of token and slot. Its thread blocks loop over all
// output tiles of all lots. Adjacent thread blocks have the same output tile of consecutive lots, so that lots of one expert find its
// weight in the L2 cache. The second GEMM reads these rows. A thread block computes one output tile for all lots, one after the other,
// and adds the results to every token's part of the tile in shared memory: in the order of experts, the same bits in every run.
//
// The experts are known before the first GEMM starts, so the second one loads weights before it waits for the first.

#include "lots.cuh"
#include "warp_step.cuh"

namespace fused {

constexpr int OUT_TILES = (N + WARP_OUT - 1) / WARP_OUT;
constexpr int LANE_ROWS = MOST_ROWS == 1 ? 1 : MOST_ROWS / 4;                // rows of x whose columns a lane copies
constexpr int TOTALS = GATHER ? 0 : (MOST_TOKENS * WARP_OUT + 3) / 4 * 4;    // floats: a tile of y for every token

struct Shared {
  u32 rings;        // [WARPS, STAGES, STEP_BYTES]
  float* sums;      // [2, WARPS, MOST_ROWS, SUM_ROW]
  float* totals;    // [MOST_TOKENS, WARP_OUT], not GATHER
  Lots* lots;
  u32 full, empty;  // two barriers of 8 bytes each: a tile's sums are ready, and have been read
};

// An output tile of a lot, and the iteration of a thread block over them.
struct Item {
  int tile, lot, lots;

  __device__ __forceinline__ explicit Item(int count) : lots(count) {
    tile = GATHER ? blockIdx.x / count : blockIdx.x;
    lot = GATHER ? blockIdx.x % count : 0;
  }
  __device__ __forceinline__ bool is_there() const { return tile < OUT_TILES; }
  // whole, rest: quotient and remainder of gridDim.x / lots.
  __device__ __forceinline__ void advance(int whole, int rest) {
    lot += GATHER ? rest : 1;
    if (GATHER) tile += whole;
    if (lot >= lots) lot -= lots, tile += GATHER ? 1 : gridDim.x;
  }
};

// Position of a warp's copies: the step, and the lot's rows of x; -1 means none.
struct Cursor {
  Item item;
  int step, whole, rest, first;
  int rows[LANE_ROWS];

  __device__ __forceinline__ Cursor(const Lots& lots, int lane) : item(lots.count), step(0) {
    whole = gridDim.x / lots.count, rest = gridDim.x % lots.count;
    find(lots, lane);
  }
  __device__ __forceinline__ void find(const Lots& lots, int lane) {
    if (!item.is_there()) return;
    first = lots.experts[item.lot] * WIDTH;
    const int place = lots.places[item.lot], count = lots.places[item.lot + 1] - place;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
      const int m = MOST_ROWS == 1 ? 0 : i * 4 + lane / 8;
      rows[i] = m < count ? lots.pairs[place + m] / (GATHER ? SLOTS : 1) : -1;
    }
  }
  __device__ __forceinline__ void advance(const Lots& lots, int lane) {
    if (++step < STEPS) return;
    step = 0;
    item.advance(whole, rest);
    find(lots, lane);
  }
  // A warp handles every WARPS-th slice of the weight.
  __device__ __forceinline__ int slice(int warp) const { return step * WARPS + warp; }
  __device__ __forceinline__ bool is_there(int warp) const {
    return item.is_there() && (SLICES % WARPS == 0 || slice(warp) < SLICES);
  }

  __device__ __forceinline__ void copy_codes(const Pointers& p, u32 to, int warp, int lane, u64 policy) const {
    const int base = first, out = item.tile * WARP_OUT;
    copy_weights(p, to, [base, out](int part) { return base + first_row(out, part); }, slice(warp), lane, policy);
  }
  // Copy the columns of x of a slice. Padding rows of the lot keep old values: their sums are never read.
  __device__ __forceinline__ void copy_inputs(const Pointers& p, u32 to, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < (HALVES * MOST_ROWS * 8 + 31) / 32; ++i) {
      const int c = i * 32 + lane, window = c / (MOST_ROWS * 8), m = c / 8 % MOST_ROWS, row = rows[i % LANE_ROWS];
      if (HALVES * MOST_ROWS * 8 % 32 && c >= HALVES * MOST_ROWS * 8) return;
      if (row < 0) continue;
      const int column = window_column(slice(warp), window) + c % 8 * 8;
      const bool inside = REST == 0 || column < K;
      copy_16(to + chunk_at(window, m, c % 8), p.x + static_cast<u64>(row) * K + (inside ? column : 0), inside ? 16 : 0);
    }
  }
};

__device__ __forceinline__ void multiply(const Pointers& p, const Shared& shared, int warp, int lane) {
  const Lots& lots = *shared.lots;
  const u64 policy = read_once();
  const u32 ring = shared.rings + warp * (STAGES * STEP_BYTES);
  Cursor ahead(lots, lane);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (ahead.is_there(warp)) ahead.copy_codes(p, ring + stage * STEP_BYTES, warp, lane, policy);
    ahead.advance(lots, lane);
  }
  if (!GATHER) wait_for_earlier();
  Cursor inputs(lots, lane);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (inputs.is_there(warp)) inputs.copy_inputs(p, ring + stage * STEP_BYTES + SLICE_BYTES, warp, lane);
    copies_commit();
    inputs.advance(lots, lane);
  }
  u32 stage = 0, free_stage = STAGES - 1;
  int count = 0;  // items so far
  float squares[BLOCKS];
  for (Item item(lots.count); item.is_there(); item.advance(ahead.whole, ahead.rest), ++count) {
    float sums[TILES][BLOCKS][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copies_wait<STAGES - 2>();
      __syncwarp();
      const int slice = step * WARPS + warp;
      if (SLICES % WARPS == 0 || slice < SLICES) {
        const u32 from = ring + stage * STEP_BYTES;
        multiply_step(p, sums, squares, false, from, from + SLICE_BYTES, slice, lane);
      }
      __syncwarp();
      if (ahead.is_there(warp)) {
        ahead.copy_codes(p, ring + free_stage * STEP_BYTES, warp, lane, policy);
        ahead.copy_inputs(p, ring + free_stage * STEP_BYTES + SLICE_BYTES, warp, lane);
      }
      copies_commit();
      ahead.advance(lots, lane);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
    }
    const int buffer = count % 2;
    if (count >= 2) barrier_wait(shared.empty + 8 * buffer, (count / 2 - 1) % 2);
    store_sums(shared.sums + buffer * SUMS + warp * MOST_ROWS * SUM_ROW, sums, lane);
    barrier_arrive(shared.full + 8 * buffer);
  }
}

// --- the warps that finish ---

// One element of an item's output: its position in the sums, its factor and its addend.
struct Output {
  bool there;
  int row, m, pair;
  float scale[GATED ? 2 : 1], bias[GATED ? 2 : 1], weight;

  __device__ __forceinline__ void find(const Pointers& p, const Lots& lots, const Item& item, int o) {
    const int place = lots.places[item.lot], n = item.tile * WARP_OUT + o % WARP_OUT;
    row = o % WARP_OUT, m = o / WARP_OUT;
    there = n < N && m < lots.places[item.lot + 1] - place;
    pair = there ? lots.pairs[place + m] : 0;
    weight = there && !GATHER ? lots.weights[place + m] : 1.0f;
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); ++half) {
      const int at = lots.experts[item.lot] * WIDTH + half * N + n;
      scale[half] = BY_ROW && there ? reinterpret_cast<const float*>(p.scales)[at] : 1.0f;
      bias[half] = BIAS && there ? from_half(p.bias[at]) : 0.0f;
    }
  }

  __device__ __forceinline__ float finished(const float* sums) const {
    const float y = sum_of_warps(sums, row, m) * scale[0] + bias[0];
#if GATED
    return gate(y, sum_of_warps(sums, WARP_OUT + row, m) * scale[1] + bias[1]);
#else
    return activate(y) * weight;
#endif
  }
};

// Move a tile of every token between y and shared memory. thread: index among the finishing threads; elements per thread are fixed.
template <typename Move>
__device__ __forceinline__ void move_totals(const Shared& shared, int tile, int tokens, int thread, Move move) {
  for (int o = thread; o < tokens * WARP_OUT; o += FINISHING) {
    const int n = tile * WARP_OUT + o % WARP_OUT;
    if (n < N) move(static_cast<u64>(o / WARP_OUT) * N + n, shared.totals[o]);
  }
}

__device__ __forceinline__ void finish_items(const Pointers& p, const Shared& shared, int thread, int tokens) {
  const Lots& lots = *shared.lots;
  const int whole = gridDim.x / lots.count, rest = gridDim.x % lots.count;
  if (!GATHER) wait_for_earlier();
  int count = 0;
  for (Item item(lots.count); item.is_there(); item.advance(whole, rest), ++count) {
    const int buffer = count % 2;
    if (!GATHER) {
      if (item.lot == 0) {
        move_totals(shared, item.tile, tokens, thread, [&](u64 at, float& total) { total = from_half(p.y[at]); });
      }
      named_sync(1, FINISHING);  // the totals include the previous lots
    }
    Output outputs[OUTPUTS];  // loaded before the sums are ready
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) outputs[i].find(p, lots, item, i * FINISHING + thread);
    barrier_wait(shared.full + 8 * buffer, count / 2 % 2);
    float y[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) y[i] = outputs[i].there ? outputs[i].finished(shared.sums + buffer * SUMS) : 0.0f;
    barrier_arrive(shared.empty + 8 * buffer);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      const Output& output = outputs[i];
      if (!output.there) continue;
      if (GATHER) {
        p.y[static_cast<u64>(output.pair) * N + item.tile * WARP_OUT + output.row] = to_half(y[i]);
      } else {
        shared.totals[output.pair / SLOTS * WARP_OUT + output.row] += y[i];
      }
    }
    if (!GATHER && item.lot == lots.count - 1) {
      named_sync(1, FINISHING);
      move_totals(shared, item.tile, tokens, thread, [&](u64 at, float& total) { p.y[at] = to_half(total); });
    }
  }
}

}  // namespace fused

// GATHER: y[pair] = activation(W_e x[token] + bias), or gated. Else y[token] += the sum over its slots of weight * (W_e x[pair] + bias).
// Sums in float32. tokens: up to MOST_TOKENS. Grid: any number of thread blocks.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) expert_rows(
    const fused::Pointers p, const fused::Routed routed, const int tokens) {
  using namespace fused;
  extern __shared__ __align__(128) char dynamic[];
  __shared__ __align__(8) u64 barriers[4];
  float* const sums = reinterpret_cast<float*>(dynamic + WARPS * STAGES * STEP_BYTES);
  float* const totals = sums + 2 * SUMS;
  const u32 full = shared_address(barriers);
  const Shared shared = {shared_address(dynamic), sums, totals, reinterpret_cast<Lots*>(totals + TOTALS), full, full + 16};
  if (GATHER) wait_for_earlier();
  launch_dependents();  // not earlier: the second GEMM reads the experts before it waits
  if (threadIdx.x < 4) barrier_init(full + 8 * threadIdx.x, threadIdx.x < 2 ? WARPS * 32 : FINISHING);
  find_lots(*shared.lots, routed, tokens * SLOTS, THREADS);
  const int warp = threadIdx.x / 32;
  if (warp < WARPS) {
    multiply(p, shared, warp, threadIdx.x % 32);
  } else {
    finish_items(p, shared, threadIdx.x - WARPS * 32, tokens);
  }
}
