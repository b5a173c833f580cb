// Products of some tens to hundreds of rows over quantised weights: the matrix units' time counts, and x is too large for each warp
// to read its own.
//
// The warps of a block of threads lie side by side along the rows of W, TILES parts of 16 each. Four multiply together (wgmma,
// compute capability 9.0a): W [64, 16] out of their registers, unpacked and scaled there while the codes before are multiplied, times
// x^T [16, MOST_ROWS] where it lies. One more warp copies 128 columns of W and of x at a time into a ring of STAGES steps in shared
// memory, and ends. Beyond MOST_ROWS rows, neighbouring blocks of threads multiply the same rows of W, which the L2 cache then holds.
//
// Which columns of x the matrix units meet with which codes follows from the places of x in shared memory, so that a thread's codes
// are 16 bytes that lie together. arrange_rows puts x into that order once, after its norm, so that a step's columns are one copy.
//
// Several blocks, a cluster, share a sum over K: their sums meet through the cluster's shared memory, and each block finishes its
// share of y. GATED: half of the warps hold rows of the gate, the others those of what it multiplies.

#define SCALED_CODES  // in product.cuh
#include "product.cuh"
#include "wgmma.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;                   // of a step: 128 columns of x, in two windows
constexpr int STEPS = (SLICES / STEP_SLICES + SPLITS - 1) / SPLITS;
constexpr bool FULL = TILES * MOST_ROWS > 128;            // sums leave too few registers, unless other warps give some of theirs
constexpr int MULTIPLYING = WARPS * 32, THREADS = MULTIPLYING + (FULL ? 128 : 32);
constexpr int PARTS = WARPS * TILES, BLOCK_ROWS = PARTS * 16;  // of W
constexpr int OUT = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;  // of y
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
constexpr int ARRANGING = 256;                            // threads of arrange_rows
constexpr int GROUP_ROWS = BY_GROUP ? BLOCK_ROWS : 0;     // whose scales and zeros are copied for each group
constexpr int BLOCK_SCALES = GROUPS * GROUP_ROWS * SCALE_SIZE, BLOCK_ZEROS = ZEROS ? GROUPS * GROUP_ROWS : 0;
constexpr int BLOCK_BYTES = BLOCK_ROWS * SLICE + BLOCK_SCALES + BLOCK_ZEROS;  // of a slice
constexpr int STEP_BYTES = (INPUT_BYTES + STEP_SLICES * BLOCK_BYTES + 1023) / 1024 * 1024;  // as the swizzle repeats
constexpr int SUM_ROW = BLOCK_ROWS + 4;                   // floats: threads of a warp store to different banks
constexpr int WORDS = 4;                                  // of codes that are multiplied at once, 16 columns of x each
constexpr int BUFFERS = 2;                                // batches whose codes are in registers: one is multiplied
static_assert(STEP_SLICES * HALVES == 2);

// Until the sums of all blocks are stored.
__device__ __forceinline__ void wait_for_sums() {
  if (SPLITS > 1) {
    cluster_wait();
  } else {
    named_sync(1, MULTIPLYING);
  }
}

// Of four neighbouring rows of W.
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

// From sums to y [n, n + 4).
__device__ __forceinline__ void store_four(const Pointers& p, const Floats& sums, const Floats& up, int n, u16* to) {
  uint2& pairs = *reinterpret_cast<uint2*>(to);
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = finish(p, sums.part[i], up.part[i], n + i, 1.0f);
  if (ADD) {
    const uint2 before = pairs;
    y[0] += low_of(before.x), y[1] += high_of(before.x), y[2] += low_of(before.y), y[3] += high_of(before.y);
  }
  pairs = make_uint2(to_pair(y[0], y[1]), to_pair(y[2], y[3]));
}

struct Ring {
  u32 start, full, empty;  // of stages: where they lie, and two barriers each: whether they are there, and whether they have been read

  __device__ __forceinline__ u32 inputs(int stage) const { return start + stage * STEP_BYTES; }
  __device__ __forceinline__ u32 slice(int stage, int i) const { return inputs(stage) + INPUT_BYTES + i * BLOCK_BYTES; }
};

struct Steps {
  int first, end;
};

// Ask for the steps of W and x, one after the other. x: of MOST_ROWS rows, arranged. row: of W, the first; GATED: of the gate. By
// one thread.
struct Copier {
  const Pointers& p;
  const TensorMap& map;
  const Ring ring;
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

  __device__ __forceinline__ void operator()(Steps steps) const {
    for (int stage = 0; stage < STAGES && steps.first + stage < steps.end; ++stage) weights(steps.first + stage, stage);
    wait_for_earlier();
    for (int stage = 0; stage < STAGES && steps.first + stage < steps.end; ++stage) inputs(steps.first + stage, stage);
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int step = steps.first + STAGES; step < steps.end; ++step) {
      barrier_wait(ring.empty + 8 * stage, parity);
      weights(step, stage);
      inputs(step, stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
};

#if SCALE_SPAN < ROW && SCALE_ROWS > 1
// Of a slice, for all rows of a warp. row: of W.
__device__ __forceinline__ float block_scale(const Pointers& p, int row, int slice) {
  const int place = row / SCALE_ROWS * (ROW / SCALE_SPAN) + min(slice, SLICES - 1) * SLICE / SCALE_SPAN;
  return reinterpret_cast<const float*>(p.scales)[place] * (WIDE ? 1.0f : CODE_FACTOR);
}
#endif

// sums += products of a warp's parts. rows: of W, the first of each part.
__device__ __forceinline__ void multiply(const Pointers& p, float (&sums)[TILES][MOST_ROWS / 2], const Ring& ring, Steps steps, int warp,
                                         int lane, const int (&rows)[TILES]) {
  // Among groups and rows. Computed inside of the loop, it has the compiler wait for every product (CUDA 13.0).
  const int place = (SHORT ? lane % 4 * 16 / SCALE_SPAN : 0) * BLOCK_ROWS + warp * 16 + lane / 4;
  u32 a[BUFFERS][WORDS][4];
  int stage = 0, before = STAGES - 1;
  u32 parity = 0;
#if SCALE_SPAN < ROW && SCALE_ROWS > 1
  float scales[STEP_SLICES][TILES];  // asked for a step ahead
#pragma unroll
  for (int i = 0; i < STEP_SLICES * TILES; ++i) {
    scales[i / TILES][i % TILES] = block_scale(p, rows[i % TILES], steps.first * STEP_SLICES + i / TILES);
  }
#endif
#pragma unroll 1
  for (int step = steps.first; step < steps.end; ++step) {
    barrier_wait(ring.full + 8 * stage, parity);
    const u32 x = ring.inputs(stage) / 16;
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const u32 slice = ring.slice(stage, i), behind = slice + BLOCK_ROWS * SLICE, part = tile * WARPS;
        const u32 scales_at = behind + (place + part * 16) * SCALE_SIZE, zeros_at = behind + BLOCK_SCALES + place + part * 16;
        Codes codes(slice + (part + warp) * 1024 + lane * 16, scales_at, zeros_at);
#if SCALE_SPAN < ROW && SCALE_ROWS > 1
        codes.scale[0] = codes.scale[1] = to_pair(scales[i][tile], scales[i][tile]);
        scales[i][tile] = block_scale(p, rows[tile], (step + 1) * STEP_SLICES + i);
#endif
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int batch = (i * TILES + tile) * HALVES + half, columns = i * HALVES + half;
          u32(&words)[WORDS][4] = a[batch % BUFFERS];
          products_wait<BUFFERS - 1>();
          if (batch == 1 && step > steps.first && lane == 0) barrier_arrive(ring.empty + 8 * before);  // that step is multiplied
#pragma unroll
          for (int word = 0; word < WORDS; ++word) {
            half ? codes.unpack<HALVES - 1>(words[word], word) : codes.unpack<0>(words[word], word);
          }
          products_begin();
#pragma unroll
          for (int word = 0; word < WORDS; ++word) {
            const u64 there = descriptor(x + (columns * (MOST_ROWS * 128) + word * 32) / 16);
            Products<MOST_ROWS>::run(sums[tile], words[word], there, 1);
          }
          products_commit();
        }
      }
    }
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  products_wait<0>();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) pin(sums[tile]);
}

// part: of the block's.
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

// Of a row, a number and the one PAIR_STEP behind it.
__device__ __forceinline__ u32 pair_at(const u16* from) {
  return PAIR_STEP == 1 ? *reinterpret_cast<const u32*>(from) : from[0] | static_cast<u32>(from[PAIR_STEP]) << 16;
}

#if NORM
// 1 / sqrt(mean of squares + eps) of a row of x.
__device__ __forceinline__ float norm_factor(const u16* x, float eps) {
  __shared__ float squares[ARRANGING / 32];
  float sum = 0.0f;
  for (int k = threadIdx.x * 8; k < K; k += ARRANGING * 8) {
    const Quad columns = load_constant_quad(x + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = low_of(columns.part[i]), high = high_of(columns.part[i]);
      sum += low * low + high * high;
    }
  }
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < ARRANGING / 32; ++warp) sum += squares[warp];
  return rsqrtf(sum / K + eps);
}

// column: of the first of the pair.
__device__ __forceinline__ u32 normed(u32 columns, const void* norm, int column, float factor) {
#if NORM_FLOAT
  const float* weight = static_cast<const float*>(norm) + column;
  return to_pair(low_of(columns) * factor * weight[0], high_of(columns) * factor * weight[PAIR_STEP]);
#else
  const u32 weight = pair_at(static_cast<const u16*>(norm) + column);
  return to_pair(low_of(columns) * factor * low_of(weight), high_of(columns) * factor * high_of(weight));
#endif
}
#endif

}  // namespace fused

// A row of x, normed, where the matrix units look for the operand that is met by the same thread's codes: thread t of four holds, of
// 16 places along K, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and its codes are of 16 columns that lie together, four of them in each
// word. Rows of 128 bytes in windows of MOST_ROWS, with the 128-byte swizzle; two windows are of a step. All windows of MOST_ROWS
// rows lie together. Grid (rows).
extern "C" __global__ void __launch_bounds__(fused::ARRANGING) arrange_rows(
    const fused::u16* x, const void* norm, fused::u16* arranged, const float eps) {
  using namespace fused;
  const int m = blockIdx.x;
  x += static_cast<u64>(m) * K;
  launch_dependents();
  wait_for_earlier();
#if NORM
  const float factor = norm_factor(x, eps);
#endif
  for (int place = threadIdx.x; place < K / 8; place += ARRANGING) {
    const int window = place / 8, chunk = place % 8;
    u32 columns[4];
#pragma unroll
    for (int thread = 0; thread < 4; ++thread) {
      const int slice = HALVES == 1 ? window : window / 2, half = HALVES == 1 ? 0 : window % 2;
      const int column = column_of(slice * SLICE + thread * 16, half) + chunk / 2 * 4 + chunk % 2 * (3 - PAIR_STEP);
      columns[thread] = pair_at(x + column);
#if NORM
      columns[thread] = normed(columns[thread], norm, column, factor);
#endif
    }
    const u64 first = static_cast<u64>(m / MOST_ROWS) * (K / WINDOW) + window;
    u16* to = arranged + (first * MOST_ROWS + m % MOST_ROWS) * WINDOW + (chunk ^ (m & 7)) * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(columns[0], columns[1], columns[2], columns[3]);
  }
}

// y = W x + bias, then activated, activation(gate) * up, or added to y, of x that arrange_rows arranged. Sums in float32. map: of W's
// bytes, in boxes of OUT rows and SLICE bytes. Grid (tiles times blocks of MOST_ROWS rows, SPLITS), a cluster each; neighbours have
// the same tile.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) shared_rows(
    const __grid_constant__ fused::TensorMap map, const fused::Pointers p, const int all_rows) {
  using namespace fused;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the compiler is to know that warps are whole
  const int row_blocks = (all_rows + MOST_ROWS - 1) / MOST_ROWS, split = blockIdx.y, tile = blockIdx.x / row_blocks * OUT;
  const int first = blockIdx.x % row_blocks * MOST_ROWS, rows = min(MOST_ROWS, all_rows - first);  // of x
  const u32 start = (shared_address(dynamic) + 1023) / 1024 * 1024;
  const Ring ring = {start, shared_address(barriers), shared_address(barriers + STAGES)};
  const Steps steps = {split * STEPS, min((split + 1) * STEPS, SLICES / STEP_SLICES)};

  launch_dependents();
  if (threadIdx.x == MULTIPLYING) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(ring.full + 8 * stage, 1);
      barrier_init(ring.empty + 8 * stage, WARPS);
    }
    barriers_ready();
  }
  __syncthreads();
  if (warp >= WARPS) {
    if (FULL) give_registers<40>();
    if (threadIdx.x == MULTIPLYING) Copier{p, map, ring, p.x + static_cast<u64>(first) * K, tile}(steps);
    return;
  }
  if (FULL) take_registers<224>();
  float sums[TILES][MOST_ROWS / 2] = {};
  int rows_of_w[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int part = i * WARPS + warp;
    const bool up = GATED && part >= PARTS / 2;
    rows_of_w[i] = min(tile + part * 16 - (up ? OUT : 0), N - 16) + (up ? N : 0);
  }
  multiply(p, sums, ring, steps, warp, lane, rows_of_w);
  named_sync(1, MULTIPLYING);  // the ring is free
#pragma unroll
  for (int i = 0; i < TILES; ++i) store_sums(sums[i], start, i * WARPS + warp, lane);
  wait_for_sums();
#pragma unroll 2
  for (int o = split * MULTIPLYING + threadIdx.x; o < OUT / 4 * rows; o += SPLITS * MULTIPLYING) {
    const int at = o % (OUT / 4) * 4, n = tile + at, m = o / (OUT / 4);
    if (n >= N) continue;
    const Floats sum = sums_of_blocks(start, at, m), up = GATED ? sums_of_blocks(start, OUT + at, m) : Floats{};
    store_four(p, sum, up, n, p.y + static_cast<u64>(first + m) * N + n);
  }
  if (SPLITS > 1) cluster_wait();  // a block's shared memory must be there until all have read it
}
