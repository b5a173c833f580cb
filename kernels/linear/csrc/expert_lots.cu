// Grouped GEMM (grouped_gemm, MoE) over quantized experts, in tiles ("lots") of up to MOST_ROWS rows of one expert. The experts' weights are
// contiguous. As in shared_rows.cu, warps are side by side along the rows of W and share x: no warp has its own sum over K or copy of x.
//
// Four launches: arrange_lots finds the tiles, writes them to a table, and permutes the rows of their tokens into the order of pairs.cuh.
// The first GEMM (GATHER) stores its activated rows in that order for the second, whose rows are sorted by expert. add_slots sums the
// rows of each token in the order of its slots: the same bits in every run, whatever the other tokens are.
//
// Thread blocks loop over all output tiles of all lots, and the thread that copies runs ahead to the next one. Adjacent thread blocks
// have the same output tile of consecutive lots, so that lots of one expert find its weight in the L2 cache. If GATED, a part of 16 rows
// has 8 of the gate and 8 of the other half: a thread has both sums of an output, and warps wait for each other only at the ring.
//
// Copies of W are boxes of BOX rows, none of which extends beyond an expert. Columns beyond a row's end are zeros, in W and in x.
//
// The table exists before the first GEMM starts, so the second one loads weights before it waits for the first.

#include "lots.cuh"
#if MOST_ROWS <= 16
#include "ring_mma.cuh"
#else
#include "ring_wgmma.cuh"
#endif

namespace fused {

constexpr int STEPS = (SLICES + STEP_SLICES - 1) / STEP_SLICES;
constexpr int THREADS = MULTIPLYING + 32;
constexpr int TILES_OF_OUT = (N + OUT - 1) / OUT;
constexpr int PIECES = GATED ? 2 : 1;                                 // row ranges of a tile in W, of OUT rows each
constexpr int ROW_PLACES = MOST_ROWS * WINDOW;                        // elements of a window of a lot
constexpr int LOT_PLACES = STEPS * 2 * ROW_PLACES;                    // elements of a lot's x
constexpr int PIECE_SCALES = BY_GROUP ? (GROUPS * OUT * SCALE_SIZE + 127) / 128 * 128 : 0;  // bytes
constexpr int PIECE_ZEROS = ZEROS ? (GROUPS * OUT + 127) / 128 * 128 : 0;
static_assert(OUT % BOX == 0 && N % BOX == 0);

// Layout of a slice in shared memory; see Ring.
struct Layout : PairsLayout {
  static constexpr int part = 16 / PIECES, group = OUT, scales = BLOCK_ROWS * SLICE, zeros = scales + PIECES * PIECE_SCALES;
  static constexpr int bytes = zeros + PIECES * PIECE_ZEROS, below = GATED ? OUT * SLICE : 8 * SLICE;
  static constexpr int below_scales = GATED ? PIECE_SCALES : 8 * SCALE_SIZE, below_zeros = GATED ? PIECE_ZEROS : 8;
};

// Output of arrange_lots for the other kernels.
struct Table {
  u32 count;
  u32 lots[MOST_LOTS + 1];    // first position of each lot in the lower half, its expert in the upper; the last entry is the end
  u32 place_of[MOST_PAIRS];   // position of each pair of token and slot
};

struct Lot {
  int expert, place, rows;

  __device__ __forceinline__ Lot(const u32* lots, int number) {
    expert = lots[number] >> 16, place = lots[number] & 0xffff, rows = (lots[number + 1] & 0xffff) - place;
  }
};

// An output tile of a lot, and the iteration of a thread block over them.
struct Item {
  int tile, lot, lots, whole, rest;

  __device__ __forceinline__ explicit Item(int count) : lots(count) {
    tile = blockIdx.x / count, lot = blockIdx.x % count, whole = gridDim.x / count, rest = gridDim.x % count;
  }
  __device__ __forceinline__ bool is_there() const { return tile < TILES_OF_OUT; }
  __device__ __forceinline__ void advance() {
    lot += rest, tile += whole;
    if (lot >= lots) lot -= lots, ++tile;
  }
};

// --- the thread that copies ---

struct Cursor {
  Item item;
  int step = 0;

  __device__ __forceinline__ explicit Cursor(int count) : item(count) {}
  __device__ __forceinline__ bool is_there() const { return item.is_there(); }
  __device__ __forceinline__ void advance() {
    if (++step == STEPS) step = 0, item.advance();
  }
};

struct Copier {
  const TensorMap &codes, &scales, &zeros;
  const Ring<Layout> ring;
  const u16* const x;
  const u32* const lots;
  const u64 policy = read_once();

  __device__ __forceinline__ void weights(const Cursor& at, int stage) const {
    const Lot lot(lots, at.item.lot);
    const int row = lot.expert * WIDTH + at.item.tile * OUT, boxes = min(OUT, N - at.item.tile * OUT) / BOX;
    const u32 full = ring.full + 8 * stage;
    const u32 scale_bytes = BY_GROUP ? GROUPS * OUT * (SCALE_SIZE + (ZEROS ? 1 : 0)) : 0;
    barrier_expect(full, lot.rows * 256 + STEP_SLICES * PIECES * (boxes * BOX * SLICE + scale_bytes));
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const int slice = at.step * STEP_SLICES + i;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const u32 to = ring.slice(stage, i);
        const int first = row + piece * N;
#pragma unroll
        for (int box = 0; box < OUT / BOX; ++box) {
          if (box >= boxes) break;
          copy_rows(to + (piece * OUT + box * BOX) * SLICE, codes, slice * SLICE, first + box * BOX, full, policy);
        }
        if constexpr (BY_GROUP) {
          const int group = slice * SLICE / SCALE_SPAN;
          copy_rows(to + Layout::scales + piece * PIECE_SCALES, scales, first, group, full, policy);
          if (ZEROS) copy_rows(to + Layout::zeros + piece * PIECE_ZEROS, zeros, first, group, full, policy);
        }
      }
    }
  }

  // Padding rows of the lot keep old values: their sums are never read.
  __device__ __forceinline__ void inputs(const Cursor& at, int stage) const {
    const u32 bytes = Lot(lots, at.item.lot).rows * 128;
    const u16* from = x + static_cast<u64>(at.item.lot) * LOT_PLACES + at.step * (2 * ROW_PLACES);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_bulk(ring.inputs(stage) + i * (MOST_ROWS * 128), from + i * ROW_PLACES, bytes, ring.full + 8 * stage);
    }
  }

  __device__ __forceinline__ void operator()(int count) const {
    Cursor ahead(count), behind(count);
    for (int stage = 0; stage < STAGES && ahead.is_there(); ++stage, ahead.advance()) weights(ahead, stage);
    if (!GATHER) wait_for_earlier();
    for (int stage = 0; stage < STAGES && behind.is_there(); ++stage, behind.advance()) inputs(behind, stage);
#pragma unroll 1
    for (Place at; ahead.is_there(); ahead.advance(), at.advance()) {
      barrier_wait(ring.empty + 8 * at.stage, at.parity);
      weights(ahead, at.stage);
      inputs(ahead, at.stage);
    }
  }
};

// --- the warps that multiply ---

// BY_BLOCK: scales of a warp's parts, loaded a step ahead, also across items. A step's slices mostly have one scale.
struct Scales {
  static constexpr int EACH = SCALE_SPAN % (STEP_SLICES * SLICE) == 0 ? 1 : STEP_SLICES;
  const float* scales;
  int own[TILES][PIECES], following[TILES][PIECES];  // first scale of a row of blocks, for this item and for the next one
  float next[EACH][TILES][PIECES];

  __device__ __forceinline__ void find(int (&places)[TILES][PIECES], const u32* lots, const Item& item, int warp) {
    if (!item.is_there()) return;
    const int base = Lot(lots, item.lot).expert * WIDTH;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int n = min(item.tile * OUT + (tile * WARPS + warp) * Layout::part, N - Layout::part);
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) places[tile][piece] = (base + piece * N + n) / SCALE_ROWS * (ROW / SCALE_SPAN);
    }
  }
  // Call once, before the first item.
  __device__ __forceinline__ void start(const Pointers& p, const u32* lots, const Item& item, int warp) {
    if constexpr (BY_BLOCK) {
      scales = reinterpret_cast<const float*>(p.scales);
      find(own, lots, item, warp);
#pragma unroll
      for (int i = 0; i < STEP_SLICES * TILES; ++i) advance(-1, i / TILES, i % TILES);
    }
  }
  __device__ __forceinline__ void prepare(const u32* lots, const Item& item, int warp) {
    if constexpr (BY_BLOCK) find(following, lots, item, warp);
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < (BY_BLOCK ? TILES * PIECES : 0); ++i) own[i / PIECES][i % PIECES] = following[i / PIECES][i % PIECES];
  }
  __device__ __forceinline__ u32 pair(int i, int tile, int below) const {
    const float scale = next[i % EACH][tile][below % PIECES];
    return to_pair(scale, scale);
  }
  __device__ __forceinline__ void advance(int step, int i, int tile) {
    if (i < STEP_SLICES - EACH) return;  // another slice needs it
    const bool last = step + 1 == STEPS;
    const int slice = last ? i % EACH : min((step + 1) * STEP_SLICES + i % EACH, SLICES - 1);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const int place = (last ? following[tile][piece] : own[tile][piece]) + slice * SLICE / SCALE_SPAN;
      next[i % EACH][tile][piece] = scales[place] * (WIDE ? 1.0f : CODE_FACTOR);
    }
  }
};

// Factors and addends of a thread's sums, loaded before the sums are ready unless they leave too few registers.
struct Outputs {
  static constexpr bool EARLY = MOST_ROWS <= 16;
  int n[TILES];  // first column of y; if not GATED, the other one is n + 8
  float scale[TILES][2], bias[TILES][2];

  __device__ __forceinline__ void find(const Pointers& p, const Lot& lot, int tile_of_out, int warp, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      n[tile] = tile_of_out * OUT + (tile * WARPS + warp) * Layout::part + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool there = n[tile] < N;  // parts end at N
        const int at = lot.expert * WIDTH + n[tile] + i * (GATED ? N : 8);
        scale[tile][i] = BY_ROW && there ? reinterpret_cast<const float*>(p.scales)[at] : 1.0f;
        bias[tile][i] = BIAS && there ? from_half(p.bias[at]) : 0.0f;
      }
    }
  }
};

#if GATHER
// Position of a column of the next GEMM's x in row 0 of a lot, before the swizzle, and the chunk of its window.
struct NextColumn {
  int place, chunk;

  __device__ __forceinline__ explicit NextColumn(int n) {
    const int byte = NEXT_HALVES == 1 ? n : n / (2 * NEXT_HALF) * NEXT_HALF + n % NEXT_HALF;
    const int window = byte / SLICE * NEXT_HALVES + (NEXT_HALVES == 1 ? 0 : n / NEXT_HALF % 2);
    const int second = NEXT_PAIR_STEP == 1 ? byte % 4 / 2 : byte % 2, upper = NEXT_PAIR_STEP == 1 ? byte % 2 : byte % 4 / 2;
    const Pair pair = {byte % SLICE / 16, byte % 16 / 4, second};
    chunk = chunk_of(pair), place = window * ROW_PLACES + number_of(pair) * 2 + upper;
  }
};
constexpr int NEXT_LOT_PLACES = (NEXT_ROW + NEXT_STEP - 1) / NEXT_STEP * 2 * ROW_PLACES;
#endif

struct Target {
  const Pointers& p;
  const Lot& lot;
  const int number;

  // Store up to MOST_ROWS rows of the lot.
  __device__ __forceinline__ void store(int n, const float (&y)[MOST_ROWS / 4], int lane) const {
#if GATHER
    const NextColumn column(n);
    u16* const to = p.y + static_cast<u64>(number) * NEXT_LOT_PLACES + column.place;
#else
    float* const to = reinterpret_cast<float*>(p.y) + static_cast<u64>(lot.place) * N + n;
#endif
#pragma unroll
    for (int i = 0; i < MOST_ROWS / 4; ++i) {
      const int m = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (m >= lot.rows) continue;
#if GATHER
      to[m * WINDOW + (column.chunk ^ (m & SWIZZLE)) * 8] = to_half(y[i]);
#else
      to[static_cast<u64>(m) * N] = y[i];
#endif
    }
  }
};

__device__ __forceinline__ void store_outputs(
    const Target& target, const Outputs& outputs, const float (&sums)[TILES][MOST_ROWS / 2], int lane) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (outputs.n[tile] >= N) continue;
    float y[2][MOST_ROWS / 4];
#pragma unroll
    for (int i = 0; i < MOST_ROWS / 4; ++i) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        y[below][i] = sums[tile][i / 2 * 4 + below * 2 + i % 2] * outputs.scale[tile][below] + outputs.bias[tile][below];
      }
      if (GATED) {
        y[0][i] = gate(y[0][i], y[1][i]);
      } else {
        y[0][i] = activate(y[0][i]), y[1][i] = activate(y[1][i]);
      }
    }
    target.store(outputs.n[tile], y[0], lane);
    if (!GATED) target.store(outputs.n[tile] + 8, y[1], lane);
  }
}

__device__ __forceinline__ void multiply_items(const Pointers& p, const u32* lots, const Ring<Layout>& ring, int count, int warp, int lane) {
  Item item(count);
  Scales scales;
  scales.start(p, lots, item, warp);
  Place at;
#pragma unroll 1
  while (item.is_there()) {
    const Lot lot(lots, item.lot);
    const int number = item.lot, tile = item.tile;
    Outputs outputs;
    if (Outputs::EARLY) outputs.find(p, lot, tile, warp, lane);
    item.advance();
    scales.prepare(lots, item, warp);
    float sums[TILES][MOST_ROWS / 2] = {};
    multiply(sums, ring, at, scales, {0, STEPS}, warp, lane);
    scales.finish();
    if (!Outputs::EARLY) outputs.find(p, lot, tile, warp, lane);
    store_outputs({p, lot, number}, outputs, sums, lane);
  }
}

}  // namespace fused

#if GATHER
// Find the lots. Copy the row of each pair's token to the first GEMM's input, and write zeros beyond the columns of both GEMMs' inputs.
// x: [tokens, K]. experts: [pairs]. between: the second GEMM's x. Grid (pairs).
extern "C" __global__ void __launch_bounds__(fused::ARRANGING) arrange_lots(
    const fused::u16* x, const fused::u32* experts, fused::Table* table, fused::u16* arranged, fused::u16* between) {
  using namespace fused;
  __shared__ Lots lots;
  const int pair = blockIdx.x, pairs = gridDim.x;
  launch_dependents();
  wait_for_earlier();
  find_lots(lots, {experts, nullptr}, pairs, ARRANGING);
  if (pair == 0) {
    if (threadIdx.x == 0) table->count = lots.count;
    for (int lot = threadIdx.x; lot <= lots.count; lot += ARRANGING) {
      table->lots[lot] = lots.places[lot] | (lot < lots.count ? lots.experts[lot] << 16 : 0);
    }
  }
  const int expert = lots.expert_of[pair], rank = lots.rank_of[pair], m = rank % MOST_ROWS;
  const u64 lot = lots.firsts[expert] + rank / MOST_ROWS;
  if (threadIdx.x == 0) table->place_of[pair] = lots.starts[expert] + rank;
  x += static_cast<u64>(pair / SLOTS) * K;
  for (int place = threadIdx.x; place < STEPS * 2 * 8; place += ARRANGING) {
    const int window = place / 8, chunk = place % 8;
    u32 columns[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair own = pair_of(chunk, i);
      columns[i] = window / HALVES * SLICE + own.thread * 16 < ROW ? pair_at(x + column_of(window, own)) : 0;
    }
    u16* to = arranged + lot * LOT_PLACES + window * ROW_PLACES + m * WINDOW + (chunk ^ (m & SWIZZLE)) * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(columns[0], columns[1], columns[2], columns[3]);
  }
  constexpr int whole = NEXT_ROW / SLICE * NEXT_HALVES * 8, all = NEXT_LOT_PLACES / ROW_PLACES * 8;
  for (int place = whole + threadIdx.x; place < all; place += ARRANGING) {
    u16* to = between + lot * NEXT_LOT_PLACES + place / 8 * ROW_PLACES + m * WINDOW + place % 8 * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}
#else
// y += the weighted sum of the experts' outputs over each token's slots. parts: [pairs, N], sorted by expert. Four columns per thread.
// Grid (tokens, columns / (4 ARRANGING)).
extern "C" __global__ void __launch_bounds__(fused::ARRANGING) add_slots(
    const float* parts, const fused::Table* table, const float* weights, fused::u16* y) {
  using namespace fused;
  const int token = blockIdx.x, n = (blockIdx.y * ARRANGING + threadIdx.x) * 4;
  launch_dependents();
  wait_for_earlier();
  if (n >= N) return;
  uint2& pairs = *reinterpret_cast<uint2*>(y + static_cast<u64>(token) * N + n);
  float sums[4] = {low_of(pairs.x), high_of(pairs.x), low_of(pairs.y), high_of(pairs.y)};
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const int pair = token * SLOTS + slot;
    const float weight = weights[pair];
    const uint4 part = *reinterpret_cast<const uint4*>(parts + static_cast<u64>(table->place_of[pair]) * N + n);
    sums[0] += weight * __uint_as_float(part.x), sums[1] += weight * __uint_as_float(part.y);
    sums[2] += weight * __uint_as_float(part.z), sums[3] += weight * __uint_as_float(part.w);
  }
  pairs = make_uint2(to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]));
}
#endif

// GATHER: between = activation(W_e x + bias), or gated, in the order of the next GEMM's x. Else parts = W_e x + bias, float32 [pairs, N],
// sorted by expert. Sums in float32. x: permuted. codes: bytes [rows of all experts, ROW], in boxes of BOX rows and SLICE bytes. scales,
// zeros: BY_GROUP [groups, rows of all experts], in boxes of GROUPS and OUT. Grid: any number of thread blocks.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) expert_lots(
    const __grid_constant__ fused::TensorMap codes, const __grid_constant__ fused::TensorMap scales,
    const __grid_constant__ fused::TensorMap zeros, const fused::Pointers p, const fused::Table* table) {
  using namespace fused;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ u32 lots[MOST_LOTS + 1];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // shows the compiler that the value is the same for the whole warp
  const u32 start = (shared_address(dynamic) + 1023) / 1024 * 1024;
  const Ring<Layout> ring = {start, shared_address(barriers), shared_address(barriers + STAGES)};
  if (threadIdx.x == MULTIPLYING) ring.init();
  if (GATHER) wait_for_earlier();
  launch_dependents();  // not earlier: the second GEMM reads the table before it waits
  const int count = load_stored(&table->count);
  for (int lot = threadIdx.x; lot <= count; lot += THREADS) lots[lot] = load_stored(table->lots + lot);
  __syncthreads();
  if (warp < WARPS) {
    multiply_items(p, lots, ring, count, warp, lane);
  } else if (lane == 0) {
    Copier{codes, scales, zeros, ring, p.x, lots}(count);
  }
}
