// The MLP of up to 8 rows in one launch: y += W_down a + bias, where a = activation(W_gate n(x)) * W_up n(x), or without a gate
// a = activation(W_up n(x)), and n is an RMSNorm or nothing. Weights in half precision: the time is that of reading their bytes,
// which depend on nothing, so that one launch asks for those of both products before it waits for x.
//
// Grid: BLOCKS, one block of threads on a multiprocessor, which computes tiles of TILE columns of a, and then of y. All blocks
// meet once, when all of a is stored (meet_grid). Of WARPS warps that multiply, each has its own slices along K of every tile. The
// slices of the block's tiles, of the first product and then of the second, are one sequence of steps, which runs through a ring of
// STAGES steps in shared memory: copies of the second product's weights are under way while the first ends and the grid meets. Two
// further warps add the sums of a tile, finish and store it, as those of few_rows.cu do.
//
// The matrix units take x as their first operand [16, 16] and W^T [16, 8] as the second. A sum over K may have any order: what a
// thread gives of a row of W are 16 bytes that lie together, which it has copied itself, so that a step waits for the thread's own
// copies and for no barrier. The columns of x that belong to them stay in the thread's registers for all tiles of a product.

#include "activate.cuh"
#include "columns.cuh"

namespace fused {

constexpr int WARPS = 16;
constexpr int TILE = 8;        // rows of W that the matrix units take
constexpr int MOST_ROWS = 8;   // of x
constexpr int FINISHING = 64;  // threads, one for each number of a tile
constexpr int THREADS = WARPS * 32 + FINISHING;
constexpr int STEP_BYTES = 1024;
constexpr int SUMS_BYTES = WARPS * FINISHING * 2 * 4;  // of one tile, gate and up; two are kept
constexpr int SQUARES_BYTES = WARPS * MOST_ROWS * 4;
constexpr u64 LONGEST_WAIT = 10'000'000'000;  // nanoseconds until a grid that does not meet fails
static_assert(FINISHING == TILE * MOST_ROWS);

// One of the two products. A step of a warp are two pieces, 32 columns of 8 rows of W each: PAIRED: of gate's rows, and of the rows
// of up that these multiply, so that both sums lie in one thread; else neighbouring columns of the same rows.
template <int DEPTH, int WIDTH, bool GATES>
struct Product {
  static constexpr bool PAIRED = GATES;
  static constexpr int COLUMNS = DEPTH, OUT = WIDTH, TILES = OUT / TILE;
  static constexpr int SLICE = PAIRED ? 32 : 64, SLICES = COLUMNS / SLICE;
  static constexpr int STEPS = (SLICES + WARPS - 1) / WARPS;                 // of a warp in a tile
  static constexpr int BLOCK_STEPS = (TILES + BLOCKS - 1) / BLOCKS * STEPS;  // in all, of the block that has most
  static constexpr int QUADS = PAIRED ? STEPS : 2 * STEPS;                   // of x, 8 columns each, in a thread
  static_assert(COLUMNS % SLICE == 0 && OUT % TILE == 0);

  static __device__ __forceinline__ bool has(int step, int warp) { return SLICES % WARPS == 0 || step * WARPS + warp < SLICES; }
  // The first of a thread's columns.
  static __device__ __forceinline__ int column(int step, int piece, int warp, int lane) {
    return (step * WARPS + warp) * SLICE + (PAIRED ? 0 : piece * 32) + lane % 4 * 8;
  }
  static __device__ __forceinline__ int row(int tile, int piece, int lane) {
    return tile * TILE + lane / 4 + (PAIRED ? piece * OUT : 0);
  }
};
using Up = Product<K, INNER, GATED>;
using Down = Product<INNER, N, false>;
// Threads among which the compiler divides a multiprocessor's registers. Where 64 for each suffice, a block leaves almost half of
// them to blocks of the launches before and after it.
constexpr int REGISTER_SHARES = Up::QUADS <= 6 && Down::QUADS <= 6 ? 1024 : THREADS;

struct MlpPointers {
  const u16* x;          // [rows, K]
  const void* norm;      // [K], of the RMSNorm (NORM_WEIGHT)
  const u16* up;         // [INNER, K]; GATED: [2 INNER, K], gate over up
  const u16* up_bias;    // [rows of up] (UP_BIAS)
  u16* inner;            // [rows, INNER], a: written, and read by all blocks
  const u16* down;       // [N, INNER]
  const u16* down_bias;  // [N] (DOWN_BIAS)
  u16* y;                // [rows, N], added to; may be x
  int* arrivals;         // of blocks; a multiple of 2^31 between launches
};

struct Shared {
  u32 ring;         // of the warp: [STAGES, STEP_BYTES]
  u32 sums;         // [2, SUMS_BYTES]
  u32 squares;      // float32 [WARPS, MOST_ROWS], sums of x's
  u32 full, empty;  // two barriers each, of 8 bytes: whether a tile's sums are there, and whether they have been read
  u32 met;          // a barrier: whether the grid has met
};

// Arrive at a barrier, one thread for the warp.
__device__ __forceinline__ void arrive_as_warp(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

// The block's first tile of the second product: tiles are dealt out to the blocks as if they followed those of the first.
__device__ __forceinline__ int first_down() {
  const int tile = static_cast<int>(blockIdx.x) - Up::TILES % BLOCKS;
  return tile < 0 ? tile + BLOCKS : tile;
}

// --- the ring ---

template <typename P>
__device__ __forceinline__ void copy_step(const u16* weight, u32 to, int tile, int step, int warp, int lane, u64 policy) {
  if (!P::has(step, warp)) return;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const u64 row = P::row(tile, piece, lane);
    copy_16_once(to + piece * 512, weight + row * P::COLUMNS + P::column(step, piece, warp, lane), policy);
  }
}

// Whether a block may have more steps than the ring; else nothing is left to be asked for once it is full.
constexpr bool REFILLED = Up::BLOCK_STEPS + Down::BLOCK_STEPS > STAGES;

// A warp's steps in their order.
struct Ring {
  const MlpPointers& p;
  const int warp, lane;
  const u64 policy = read_once();
  const u32 start;  // of the thread's bytes
  u32 stage = 0;    // of the step that is multiplied next, and, when that has been, of the step that is copied next
  int tile, step = 0;
  bool down = false;  // tile, step: of what is copied next

  __device__ __forceinline__ Ring(const MlpPointers& p, u32 ring, int warp, int lane)
      : p(p), warp(warp), lane(lane), start(ring + lane * 16), tile(blockIdx.x) {
    settle();
  }
  __device__ __forceinline__ void settle() {
    if (!down && tile >= Up::TILES) down = true, tile = first_down();
  }
  // Ask for the next step's weights, in a group that is empty where there is none.
  __device__ __forceinline__ void copy() {
    const u32 to = start + stage * STEP_BYTES;
    if (!down) {
      copy_step<Up>(p.up, to, tile, step, warp, lane, policy);
    } else if (tile < Down::TILES) {
      copy_step<Down>(p.down, to, tile, step, warp, lane, policy);
    }
    pass();
    if (++step == (down ? Down::STEPS : Up::STEPS)) {
      step = 0, tile += BLOCKS;
      settle();
    }
  }
  __device__ __forceinline__ void pass() {
    copies_commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

// --- the warps that multiply ---

// A thread's columns of a row of x; zeros where there is no such row or slice.
template <typename P>
__device__ __forceinline__ void load_columns(Quad (&x)[P::QUADS], const u16* from, int warp, int lane, int rows) {
#pragma unroll
  for (int i = 0; i < P::QUADS; ++i) {
    const int step = P::PAIRED ? i : i / 2, piece = P::PAIRED ? 0 : i % 2;
    x[i] = {};
    if (lane / 4 < rows && P::has(step, warp)) {
      x[i] = load_stored_quad(from + static_cast<u64>(lane / 4) * P::COLUMNS + P::column(step, piece, warp, lane));
    }
  }
}

// The first operand has 16 rows, and x at most 8: rows 8 to 15 are the same rows of x in other columns. A thread's four words are
// two of each half, and each half meets its own two words of W in a product, whose other half is of no use.
template <typename P>
__device__ __forceinline__ void arrange_columns(Quad (&x)[P::QUADS]) {
#pragma unroll
  for (int i = 0; i < P::QUADS; ++i) {
    const u32 second = x[i].part[1];
    x[i].part[1] = x[i].part[2], x[i].part[2] = second;
  }
}

// Multiply the block's tiles. count: of tiles before.
template <typename P>
__device__ __forceinline__ int multiply_tiles(
    const Shared& shared, Ring& ring, const Quad (&x)[P::QUADS], int first, int count, int warp, int lane) {
#pragma unroll 1
  for (int tile = first; tile < P::TILES; tile += BLOCKS, ++count) {
    float sums[2][2][4] = {};  // of a piece, of a pair of words
#pragma unroll
    for (int step = 0; step < P::STEPS; ++step) {
      copies_wait<STAGES - 1>();
      if (P::has(step, warp)) {
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
          const Quad w = load_quad(ring.start + ring.stage * STEP_BYTES + piece * 512);
          const Quad& columns = x[P::PAIRED ? step : 2 * step + piece];
          multiply_add(sums[piece][0], columns.part, w.part[0], w.part[1]);
          multiply_add(sums[piece][1], columns.part, w.part[2], w.part[3]);
        }
      }
      REFILLED ? ring.copy() : ring.pass();
    }
    const int buffer = count % 2;
    if (count >= 2) barrier_wait(shared.empty + 8 * buffer, (count / 2 - 1) % 2);
    const u32 to = shared.sums + buffer * SUMS_BYTES;  // thread by thread, two numbers of a row of x each
    float of[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i / 2][i % 2] = sums[i / 2][0][i % 2] + sums[i / 2][1][2 + i % 2];
    if (P::PAIRED) {
      store_floats(to + (warp * 32 + lane) * 16, {of[0][0], of[1][0], of[0][1], of[1][1]});
    } else {
      store_two(to + (warp * 32 + lane) * 8, make_float2(of[0][0] + of[1][0], of[0][1] + of[1][1]));
    }
    arrive_as_warp(shared.full + 8 * buffer, lane);
  }
  return count;
}

__device__ __forceinline__ void store_squares(const Shared& shared, const Quad (&x)[Up::QUADS], int warp, int lane) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < Up::QUADS; ++i) squares += sum_of_squares(x[i]);
  squares += __shfl_xor_sync(0xffffffff, squares, 1);
  squares += __shfl_xor_sync(0xffffffff, squares, 2);
  if (lane % 4 == 0) store_shared(shared.squares + (warp * MOST_ROWS + lane / 4) * 4, squares);
}

// x, normed but for the factor of a row.
__device__ __forceinline__ void load_normed(
    const MlpPointers& p, const Shared& shared, Quad (&x)[Up::QUADS], int warp, int lane, int rows) {
#if NORM_WEIGHT
  NormColumns norm[Up::QUADS];
#pragma unroll
  for (int i = 0; i < Up::QUADS; ++i) {
    const int step = Up::PAIRED ? i : i / 2, piece = Up::PAIRED ? 0 : i % 2;
    norm[i] = norm_columns(p.norm, Up::has(step, warp) ? Up::column(step, piece, warp, lane) : 0);
  }
#endif
  wait_for_earlier();
  load_columns<Up>(x, p.x, warp, lane, rows);
  if (NORM) store_squares(shared, x, warp, lane);
#if NORM_WEIGHT
#pragma unroll
  for (int i = 0; i < Up::QUADS; ++i) multiply_columns(x[i], norm[i]);
#endif
  arrange_columns<Up>(x);
}

__device__ __forceinline__ void multiply(const MlpPointers& p, const Shared& shared, int warp, int lane, int rows) {
  Ring ring(p, shared.ring, warp, lane);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) ring.copy();
  int count;
  {
    Quad x[Up::QUADS];
    load_normed(p, shared, x, warp, lane, rows);
    count = multiply_tiles<Up>(shared, ring, x, blockIdx.x, 0, warp, lane);
  }
  barrier_wait(shared.met, 0);
  launch_dependents();
  const int first = first_down();
  if (first >= Down::TILES) return;
  Quad inner[Down::QUADS];
  load_columns<Down>(inner, p.inner, warp, lane, rows);
  arrange_columns<Down>(inner);
  multiply_tiles<Down>(shared, ring, inner, first, count, warp, lane);
}

// --- the warps that finish ---

// Wait until all blocks of the grid have come here: by one thread, when all threads of the block have stored what others will read.
//
// The counter only grows, each time by 2^31 in all, whatever the number of blocks: its top bit changes when the last has come, and
// nothing is ever reset. No launch meets before the one before it has ended (wait_for_earlier), so that the bit changes once.
//
// All blocks come: there are at most as many as multiprocessors, and one fits on each beside anything that ends by itself. Kernels
// before this one end without it; those after it on the stream start when every block has met or ended (launch_dependents). Two
// grids that meet, side by side on two streams, may keep each other from starting whole, which only LONGEST_WAIT ends.
__device__ __forceinline__ void meet_grid(int* arrivals) {
  const u32 own = blockIdx.x ? 1 : 0x80000000u - (BLOCKS - 1);
  const u32 before = add_arrivals(arrivals, static_cast<int>(own));
  u32 now = before + own;
  u64 begin = 0;
  for (u32 looked = 1; !((now ^ before) >> 31); ++looked) {
    now = load_arrivals(arrivals);
    if (looked % 1024) continue;  // the clock is asked seldom
    const u64 time = nanoseconds();
    if (!begin) begin = time;
    if (time - begin > LONGEST_WAIT) trap();
  }
}

// 1 / sqrt(mean of squares + eps) of a row of x.
__device__ __forceinline__ float norm_factor(const Shared& shared, int m, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += load_shared<float>(shared.squares + (warp * MOST_ROWS + m) * 4);
  return rsqrtf(sum / K + eps);
}

// A thread's number of a tile, over all warps: the gate's, if there is one, and up's; else the sum and nothing.
template <bool PAIRED>
__device__ __forceinline__ float2 sum_of_warps(const Shared& shared, int buffer, int thread) {
  const u32 from = shared.sums + buffer * SUMS_BYTES;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    if (PAIRED) {
      const float2 both = load_two(from + (warp * FINISHING + thread) * 8);
      sum.x += both.x, sum.y += both.y;
    } else {
      sum.x += load_shared<float>(from + (warp * FINISHING + thread) * 4);
    }
  }
  return sum;
}

__device__ __forceinline__ int finish_up(const MlpPointers& p, const Shared& shared, int thread, float eps, int rows) {
  const int m = thread / TILE;
  int count = 0;
  float factor = 1.0f;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < Up::TILES; tile += BLOCKS, ++count) {
    const int n = tile * TILE + thread % TILE, buffer = count % 2;
    const float bias = UP_BIAS ? from_half(p.up_bias[n]) : 0.0f;
    const float second_bias = UP_BIAS && GATED ? from_half(p.up_bias[INNER + n]) : 0.0f;
    barrier_wait(shared.full + 8 * buffer, count / 2 % 2);
    if (NORM && count == 0) factor = norm_factor(shared, m, eps);
    const float2 sum = sum_of_warps<GATED>(shared, buffer, thread);
    arrive_as_warp(shared.empty + 8 * buffer, thread % 32);
    float a = activate(sum.x * factor + bias);
    if (GATED) a *= sum.y * factor + second_bias;
    if (m < rows) p.inner[static_cast<u64>(m) * INNER + n] = to_half(a);
  }
  return count;
}

__device__ __forceinline__ void finish_down(const MlpPointers& p, const Shared& shared, int thread, int rows, int count) {
  const int m = thread / TILE;
#pragma unroll 1
  for (int tile = first_down(); tile < Down::TILES; tile += BLOCKS, ++count) {
    const int n = tile * TILE + thread % TILE, buffer = count % 2;
    u16* const y = p.y + static_cast<u64>(m) * N + n;
    float residual = m < rows ? from_half(load_stored(y)) : 0.0f;
    if (DOWN_BIAS) residual += from_half(p.down_bias[n]);
    barrier_wait(shared.full + 8 * buffer, count / 2 % 2);
    const float2 sum = sum_of_warps<false>(shared, buffer, thread);
    arrive_as_warp(shared.empty + 8 * buffer, thread % 32);
    if (m < rows) *y = to_half(sum.x + residual);
  }
}

__device__ __forceinline__ void finish(const MlpPointers& p, const Shared& shared, int thread, float eps, int rows) {
  wait_for_earlier();
  const int count = finish_up(p, shared, thread, eps, rows);
  named_sync(1, FINISHING);  // all of the block's a is stored; the next line releases it
  if (thread == 0) {
    meet_grid(p.arrivals);
    barrier_arrive(shared.met);
  }
  barrier_wait(shared.met, 0);
  launch_dependents();
  finish_down(p, shared, thread, rows, count);
}

}  // namespace fused

// Sums in float32; a is rounded to half precision. Grid: BLOCKS, at most as many as there are multiprocessors.
extern "C" __global__ void __launch_bounds__(fused::REGISTER_SHARES, 1)
    mlp_rows(const fused::MlpPointers p, const float eps, const int rows) {
  using namespace fused;
  extern __shared__ __align__(128) char dynamic[];
  const int warp = threadIdx.x / 32;
  const u32 start = shared_address(dynamic), sums = start + WARPS * STAGES * STEP_BYTES, squares = sums + 2 * SUMS_BYTES;
  const u32 barriers = squares + SQUARES_BYTES;
  const Shared shared = {start + warp * (STAGES * STEP_BYTES), sums, squares, barriers, barriers + 16, barriers + 32};
  if (threadIdx.x < 5) barrier_init(barriers + 8 * threadIdx.x, threadIdx.x < 2 ? WARPS : threadIdx.x < 4 ? FINISHING / 32 : 1);
  __syncthreads();
  if (warp < WARPS) {
    multiply(p, shared, warp, threadIdx.x % 32, rows);
  } else {
    finish(p, shared, threadIdx.x - WARPS * 32, eps, rows);
  }
}
