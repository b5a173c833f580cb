// Products of quantised experts over lots of up to MOST_ROWS rows of one expert, whose weights lie one after the other: as shared_rows.cu,
// by warps that lie side by side along the rows of W and share x, so that neither a sum over K nor a copy of x is a warp's own.
//
// Three launches before the sum: arrange_lots finds the lots, writes them to a table, and puts the rows of their tokens into the order of
// pairs.cuh; the first product (GATHER) writes its activated rows in that order for the second, whose rows lie in the order of experts.
// add_slots sums those of each token, in the order of its slots: the same bits in every run, whatever the other tokens are.
//
// Blocks of threads take turns at all tiles of all lots, and the thread that copies runs ahead from one to the next. Neighbours have the
// same tile of lots that follow one another, so that lots of one expert find its weight in the L2 cache. A part of 16 rows is of 8 of the
// gate and 8 of the other half where GATED: a thread has both sums of an output, and no warp waits for another but at the ring.
//
// Copies of W are boxes of BOX rows, of which none reaches beyond an expert's; columns beyond a row's end are zeros, of W and of x.
//
// The table is there before the first product begins, and so the second asks for weights before it waits for it.

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
constexpr int PIECES = GATED ? 2 : 1;                                 // of a tile's rows in W, of OUT rows each
constexpr int ROW_PLACES = MOST_ROWS * WINDOW;                        // numbers of a window of a lot
constexpr int LOT_PLACES = STEPS * 2 * ROW_PLACES;                    // of x of a lot
constexpr int PIECE_SCALES = BY_GROUP ? (GROUPS * OUT * SCALE_SIZE + 127) / 128 * 128 : 0;  // bytes
constexpr int PIECE_ZEROS = ZEROS ? (GROUPS * OUT + 127) / 128 * 128 : 0;
static_assert(OUT % BOX == 0 && N % BOX == 0);

// Of a slice in shared memory; see Ring.
struct Layout : PairsLayout {
  static constexpr int part = 16 / PIECES, group = OUT, scales = BLOCK_ROWS * SLICE, zeros = scales + PIECES * PIECE_SCALES;
  static constexpr int bytes = zeros + PIECES * PIECE_ZEROS, below = GATED ? OUT * SLICE : 8 * SLICE;
  static constexpr int below_scales = GATED ? PIECE_SCALES : 8 * SCALE_SIZE, below_zeros = GATED ? PIECE_ZEROS : 8;
};

// What arrange_lots tells the others.
struct Table {
  u32 count;
  u32 lots[MOST_LOTS + 1];    // the first place of each in the lower half, its expert in the upper; the last: where the others end
  u32 place_of[MOST_PAIRS];   // of each pair of token and slot
};

struct Lot {
  int expert, place, rows;

  __device__ __forceinline__ Lot(const u32* lots, int number) {
    expert = lots[number] >> 16, place = lots[number] & 0xffff, rows = (lots[number + 1] & 0xffff) - place;
  }
};

// A tile of a lot, and the way from one to the next that a block of threads takes.
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

  // Rows that the lot does not have keep what lies there: nobody reads their sums.
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

// BY_BLOCK, of a warp's parts, asked for a step ahead, beyond the end of an item, too. A step's slices mostly have one scale.
struct Scales {
  static constexpr int EACH = SCALE_SPAN % (STEP_SLICES * SLICE) == 0 ? 1 : STEP_SLICES;
  const float* scales;
  int own[TILES][PIECES], following[TILES][PIECES];  // where those of a row of blocks begin: of this item, and of the one after it
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
  // Once, before the first item.
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

// What a thread's sums are multiplied by and added to: found before they are there, unless they leave too few registers.
struct Outputs {
  static constexpr bool EARLY = MOST_ROWS <= 16;
  int n[TILES];  // of y, the first; not GATED: the other is 8 behind it
  float scale[TILES][2], bias[TILES][2];

  __device__ __forceinline__ void find(const Pointers& p, const Lot& lot, int tile_of_out, int warp, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      n[tile] = tile_of_out * OUT + (tile * WARPS + warp) * Layout::part + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool there = n[tile] < N;  // parts end with N
        const int at = lot.expert * WIDTH + n[tile] + i * (GATED ? N : 8);
        scale[tile][i] = BY_ROW && there ? reinterpret_cast<const float*>(p.scales)[at] : 1.0f;
        bias[tile][i] = BIAS && there ? from_half(p.bias[at]) : 0.0f;
      }
    }
  }
};

#if GATHER
// Where a column of the next product's x lies in row 0 of a lot, but for the swizzle; and the chunk of its window that it lies in.
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

  // Of up to MOST_ROWS rows of the lot that lie 1 behind the other.
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
// Find the lots; put the row of each pair's token where the first product looks for it, and zeros where rows of x of either product have
// no columns. x: [tokens, K]. experts: [pairs]. between: of the second product's x. Grid (pairs).
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
// y += the sum over each token's slots of weight * what the expert gave. parts: [pairs, N], in the order of experts. Four columns of a
// thread. Grid (tokens, columns / (4 ARRANGING)).
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

// GATHER: between = activation(W_e x + bias), gated where GATED, in the order of the next product's x. Else parts = W_e x + bias, float32
// [pairs, N] in the order of experts. Sums in float32. x: arranged. codes: of bytes [rows of all experts, ROW], in boxes of BOX rows and
// SLICE bytes; scales, zeros: BY_GROUP, of [groups, rows of all experts], in boxes of GROUPS and OUT. Grid: any number of blocks.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) expert_lots(
    const __grid_constant__ fused::TensorMap codes, const __grid_constant__ fused::TensorMap scales,
    const __grid_constant__ fused::TensorMap zeros, const fused::Pointers p, const fused::Table* table) {
  using namespace fused;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ u32 lots[MOST_LOTS + 1];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the compiler is to know that warps are whole
  const u32 start = (shared_address(dynamic) + 1023) / 1024 * 1024;
  const Ring<Layout> ring = {start, shared_address(barriers), shared_address(barriers + STAGES)};
  if (threadIdx.x == MULTIPLYING) ring.init();
  if (GATHER) wait_for_earlier();
  launch_dependents();  // not before: the second product reads the table before it waits
  const int count = load_stored(&table->count);
  for (int lot = threadIdx.x; lot <= count; lot += THREADS) lots[lot] = load_stored(table->lots + lot);
  __syncthreads();
  if (warp < WARPS) {
    multiply_items(p, lots, ring, count, warp, lane);
  } else if (lane == 0) {
    Copier{codes, scales, zeros, ring, p.x, lots}(count);
  }
}
