// The second product of quantised experts for a single token: y += the sum over its slots of weight * (W_e x[slot] + bias).
//
// expert_rows.cu takes a token's experts one after the other, and its warps add what they have after each. Here they do so once, at
// the end. The slices of a tile's rows, those of one slot's expert behind those of the slot before, are divided evenly among the
// warps: each has a run of them, of one expert or of neighbours, and adds in its registers what the experts give, times the routing
// weights. A tile is the work of a block of threads, or of a cluster of SHARING, where whole tiles would leave some multiprocessors
// with much less to do than others. The sums of warps are added in their order: the same bits in every run.
//
// Which experts there are is known before the first product begins. So all codes that the rings have room for are asked for while
// it runs, and x when it has ended.

#include "routed.cuh"
#include "warp_step.cuh"

namespace fused {

static_assert(MOST_ROWS == 1 && SLOTS < 32 && !GATED);
static_assert(WARP_OUT <= WARPS * 32 && SHARING <= WARPS);  // a thread finishes a row; others' sums have room behind a block's own

constexpr int UNITS = SLOTS * SLICES;                // slices of a tile, those of all slots
constexpr int RUN = (UNITS + ALONG - 1) / ALONG;     // of a warp, at most
constexpr int CHUNKS = HALVES * 8;                   // of 8 columns of x, that are multiplied by a slice
constexpr int LOADS = (STAGES * CHUNKS + 31) / 32;   // of a lane: x for the slices that are asked for at the beginning
constexpr u32 ALL_LANES = 0xffffffff;

// The token's slots, one in each lane of a warp.
struct Slots {
  u32 expert = 0;
  float weight = 0.0f;

  __device__ __forceinline__ Slots(const Routed& routed, int lane) {
    if (lane < SLOTS) expert = routed.expert_of(lane), weight = routed.weight_of(lane);
  }
  // The first row in W of the expert of a slot.
  __device__ __forceinline__ u32 first_row_of(int slot) const { return __shfl_sync(ALL_LANES, expert, slot) * N; }
  __device__ __forceinline__ float weight_of(int slot) const { return __shfl_sync(ALL_LANES, weight, slot); }
};

// Where in x 8 of the columns lie that are multiplied by a slice, which are zeros beyond its end: null.
__device__ __forceinline__ const u16* columns_at(const Pointers& p, int slot, int slice, int chunk) {
  const int column = window_column(slice, chunk / 8) + chunk % 8 * 8;
  return REST == 0 || column < K ? p.x + slot * K + column : nullptr;
}

// Where they lie in shared memory, behind the slice at `stage`.
__device__ __forceinline__ u32 inputs_at(u32 stage, int chunk) { return stage + SLICE_BYTES + chunk_at(chunk / 8, 0, chunk % 8); }

// Where a warp's copies are in its run, which ends before `last`.
struct Cursor {
  int unit, last, slot, slice;
  u32 expert_row;

  __device__ __forceinline__ Cursor(const Slots& slots, int first, int last)
      : unit(first), last(last), slot(first / SLICES), slice(first % SLICES), expert_row(slots.first_row_of(slot)) {}
  __device__ __forceinline__ bool is_there() const { return unit < last; }
  __device__ __forceinline__ void advance(const Slots& slots) {
    ++unit;
    if (++slice == SLICES) slice = 0, expert_row = slots.first_row_of(++slot);
  }
  __device__ __forceinline__ void copy_codes(const Pointers& p, u32 stage, int lane, u64 policy) const {
    const int row = expert_row, out = blockIdx.x * WARP_OUT;
    copy_weights(p, stage, [row, out](int part) { return row + first_row(out, part); }, slice, lane, policy);
  }
  __device__ __forceinline__ void copy_inputs(const Pointers& p, u32 stage, int lane) const {
    if (lane >= CHUNKS) return;
    const u16* const from = columns_at(p, slot, slice, lane);
    copy_16(inputs_at(stage, lane), from ? from : p.x, from ? 16 : 0);
  }
};

// Bring x for the first slices of a run to shared memory. By no copies as the codes are: these are waited for in the order in which
// they were asked for, and x would be there with the last of the codes only.
__device__ __forceinline__ void load_first_inputs(const Pointers& p, u32 ring, int first, int last, int lane) {
  Quad x[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int chunk = i * 32 + lane, unit = first + chunk / CHUNKS;
    const u16* const from = unit < last ? columns_at(p, unit / SLICES, unit % SLICES, chunk % CHUNKS) : nullptr;
    x[i] = from ? load_stored_quad(from) : Quad{};
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk < STAGES * CHUNKS) store_quad(inputs_at(ring + chunk / CHUNKS * STEP_BYTES, chunk % CHUNKS), x[i]);
  }
}

// What the sums over an expert's rows are multiplied by and what is added to them, of the two rows of each part that a lane has.
struct Outer {
  float weight, scale[TILES][2], bias[TILES][2];

  // unit: the first that a warp has of the expert. The bias is added by the warp that has the expert's first slice.
  __device__ __forceinline__ Outer(const Pointers& p, const Slots& slots, int unit, int lane) {
    const int slot = unit / SLICES, row = slots.first_row_of(slot);
    weight = slots.weight_of(slot);
#pragma unroll
    for (int part = 0; part < TILES; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = row + first_row(blockIdx.x * WARP_OUT, part) + lane / 4 + 8 * i;
        scale[part][i] = BY_ROW ? reinterpret_cast<const float*>(p.scales)[at] : 1.0f;
        bias[part][i] = BIAS && unit % SLICES == 0 ? from_half(p.bias[at]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void add(float (&totals)[TILES][BLOCKS][4], const float (&sums)[TILES][BLOCKS][4]) const {
#pragma unroll
    for (int part = 0; part < TILES; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[part][0][i] += weight * (sums[part][0][i] * scale[part][i / 2] + bias[part][i / 2]);
    }
  }
};

// A warp's run: what its slices give of a tile of y. ring: of the warp, [STAGES, STEP_BYTES]. number: of the warps that share a tile.
__device__ __forceinline__ void multiply(
    const Pointers& p, const Routed& routed, float (&totals)[TILES][BLOCKS][4], u32 ring, int number, int lane) {
  const Slots slots(routed, lane);
  const u64 policy = read_once();
  const int first = number * UNITS / ALONG, last = (number + 1) * UNITS / ALONG;
  Cursor ahead(slots, first, last);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    if (ahead.is_there()) {
      ahead.copy_codes(p, ring + stage * STEP_BYTES, lane, policy);
      ahead.advance(slots);
    }
    copies_commit();
  }
  Outer outer(p, slots, first, lane);
  wait_for_earlier();
  load_first_inputs(p, ring, first, last, lane);
  u32 stage = ring;
  float squares[BLOCKS];
  for (int unit = first; unit < last;) {
    float sums[TILES][BLOCKS][4] = {};
    const int end = min(last, (unit / SLICES + 1) * SLICES);  // of this expert's
#pragma unroll 1
    for (; unit < end; ++unit) {
      copies_wait<STAGES - 1>();
      __syncwarp();
      multiply_step(p, sums, squares, false, stage, stage + SLICE_BYTES, 0, lane);
      if (STAGES < RUN) {
        __syncwarp();
        if (ahead.is_there()) {
          ahead.copy_codes(p, stage, lane, policy);
          ahead.copy_inputs(p, stage, lane);
          ahead.advance(slots);
        }
      }
      copies_commit();
      stage = stage + STEP_BYTES == ring + STAGES * STEP_BYTES ? ring : stage + STEP_BYTES;
    }
    outer.add(totals, sums);
    if (unit < last) outer = Outer(p, slots, unit, lane);
  }
}

// What the other blocks of a cluster have of a row, in the first. sum: this block's. gifts: where theirs lie there, [SHARING, WARP_OUT].
__device__ __forceinline__ float sum_of_others(float sum, float* gifts, int row) {
  cluster_await();  // until all blocks have begun
  if (row < WARP_OUT && blockIdx.y) store_of_block(shared_address(gifts + blockIdx.y * WARP_OUT + row), 0, sum);
  cluster_wait();
  float others = 0.0f;
#pragma unroll
  for (int block = 1; block < SHARING; ++block) {
    if (row < WARP_OUT && blockIdx.y == 0) others += gifts[block * WARP_OUT + row];
  }
  return others;
}

}  // namespace fused

// y: [N]. x: [SLOTS, K]. Sums in float32. Grid: the tiles of y; blocks of threads that share one. tokens: 1.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) expert_token(
    const fused::Pointers p, const fused::Routed routed, const int tokens) {
  using namespace fused;
  extern __shared__ __align__(128) char dynamic[];
  float* const sums = reinterpret_cast<float*>(dynamic + WARPS * STAGES * STEP_BYTES);  // [WARPS, SUM_ROW]
  launch_dependents();
  if (SHARING > 1) cluster_arrive();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float totals[TILES][BLOCKS][4] = {};
  multiply(p, routed, totals, shared_address(dynamic) + warp * (STAGES * STEP_BYTES), blockIdx.y * WARPS + warp, lane);
  store_sums(sums + warp * SUM_ROW, totals, lane);
  const int row = threadIdx.x, n = blockIdx.x * WARP_OUT + row;
  const bool is_stored = row < WARP_OUT && n < N && blockIdx.y == 0;
  const float before = is_stored ? from_half(p.y[n]) : 0.0f;
  __syncthreads();
  float sum = row < WARP_OUT ? sum_of_warps(sums, row, 0) : 0.0f;
  if (SHARING > 1) sum += sum_of_others(sum, sums + SUMS, row);
  if (is_stored) p.y[n] = to_half(before + sum);
}
