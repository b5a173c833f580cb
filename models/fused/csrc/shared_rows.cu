// Products of up to 64 rows over quantised weights: the matrix units' time begins to count, and x is too large for each warp to read
// its own.
//
// The warps of a block of threads lie side by side along the rows of W, 16 each, and share the columns of x, which run through a
// ring in shared memory as the slices of W do; one barrier a step. Four warps multiply together (wgmma, compute capability 9.0a):
// W [64, 16] out of their registers, unpacked there, times x^T [16, MOST_ROWS] where it lies. Which columns of x the matrix units
// meet with which codes follows from the places of x in shared memory, so that a thread's codes are 16 bytes that lie together.
//
// Several blocks, a cluster, share a sum over K: their sums meet through the cluster's shared memory, and each block finishes its
// share of y. GATED: half of the warps hold rows of the gate, the others those of what it multiplies.

#include "product.cuh"
#include "wgmma.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;                   // of a step: 128 columns of x, in two windows
constexpr int STEPS = (SLICES / STEP_SLICES + SPLITS - 1) / SPLITS;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_ROWS = WARPS * 16;                    // of W
constexpr int OUT = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;  // of y
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
constexpr int STEP_BYTES = (INPUT_BYTES + WARPS * STEP_SLICES * SLICE_BYTES + 1023) / 1024 * 1024;  // as the swizzle repeats
constexpr int SUM_ROW = BLOCK_ROWS + 4;                   // floats: threads of a warp store to different banks
constexpr bool DIRECT = BY_ROW || SHORT;                  // products need no scale: they are sums
static_assert(TILES == 1);

__device__ __forceinline__ void cluster_sync() {
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// What lies at an address of this block's shared memory, in that of another block of the cluster.
__device__ __forceinline__ float load_of_block(u32 from, int block) {
  float value;
#if SPLITS > 1
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#else
  value = load_shared<float>(from);
#endif
  return value;
}

__device__ __forceinline__ float sum_of_blocks(u32 sums, int row, int m) {
  float sum = 0.0f;
#pragma unroll
  for (int block = 0; block < SPLITS; ++block) sum += load_of_block(sums + (m * SUM_ROW + row) * 4, block);
  return sum;
}

// Ask for 128 columns of x, the rows from `rows` on as zeros. A thread copies two columns of a row. They go where the matrix units
// look for the operand that is met by the same thread's codes: thread t of four holds, of 16 places along K, 2 t, 2 t + 1, 2 t + 8
// and 2 t + 9, and its codes are of 16 columns that lie together, four of them in each word.
__device__ __forceinline__ void copy_inputs(const Pointers& p, u32 to, int step, int warp, int lane, int rows) {
  const int word = lane / 8, thread = lane % 4, pair = lane % 8 / 4;
#pragma unroll
  for (int window = 0; window < 2; ++window) {
    const int slice = HALVES == 1 ? 2 * step + window : step;
    const int column = column_of(slice * SLICE + thread * 16, HALVES == 1 ? 0 : window) + word * 4 + pair * 2;
#pragma unroll
    for (int i = 0; i < (MOST_ROWS + WARPS - 1) / WARPS; ++i) {
      const int m = i * WARPS + warp;
      const u32 bytes = m < rows ? 4 : 0, row = to + (window * MOST_ROWS + m) * 128;
      copy_4(row + ((lane / 4) ^ (m & 7)) * 16 + lane % 4 * 4, p.x + static_cast<u64>(bytes ? m : 0) * K + column, bytes);
    }
  }
}

// Sums += the products of a warp's slice. x: where its first window lies.
__device__ __forceinline__ void multiply_slice(float (&sums)[MOST_ROWS / 2], u32 from, u32 x, int lane) {
  const Codes codes(from, 0, lane);
  u32 a[HALVES][4][4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    codes.unpack<0>(a[0][word], word);
#if !BYTES
    codes.unpack<1>(a[1][word], word);
#endif
  }
  float scaled[DIRECT ? 1 : MOST_ROWS / 2];
  float(&products)[MOST_ROWS / 2] = reinterpret_cast<float(&)[MOST_ROWS / 2]>(DIRECT ? sums[0] : scaled[0]);
  pin(products);
  products_begin();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      Products<MOST_ROWS>::run(products, a[half][word], descriptor(x + half * (MOST_ROWS * 128) + word * 32), DIRECT || half || word);
    }
  }
  products_commit();
  products_wait();
  pin(products);
  if (DIRECT) return;
#pragma unroll
  for (int block = 0; block < MOST_ROWS / 8; ++block) add_scaled(sums + 4 * block, products + 4 * block, from, 0, lane);
}

}  // namespace fused

// y = W x + bias, then activated, activation(gate) * up, or added to y. Sums in float32. Grid (tiles, SPLITS), a cluster each.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) shared_rows(
    const fused::Pointers p, const float, const float, const int rows, const int) {
  using namespace fused;
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.y;
  const u64 policy = read_once();
  const u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  const int tile = blockIdx.x * OUT, place = GATED ? warp % (WARPS / 2) : warp;
  const int row = min(tile + place * 16, N - 16);  // blocks may reach beyond N, but no warp does
  const auto first_row = [=](int) { return GATED && warp >= WARPS / 2 ? N + row : row; };
  const int first = split * STEPS, end = min(first + STEPS, SLICES / STEP_SLICES);

  const auto copy_codes = [&](int step, int stage) {
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const u32 to = ring + stage * STEP_BYTES + INPUT_BYTES + (warp * STEP_SLICES + i) * SLICE_BYTES;
      copy_weights(p, to, first_row, step * STEP_SLICES + i, lane, policy);
    }
  };

  launch_dependents();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (first + stage < end) copy_codes(first + stage, stage);
  }
  wait_for_earlier();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (first + stage < end) copy_inputs(p, ring + stage * STEP_BYTES, first + stage, warp, lane, rows);
    copies_commit();
  }

  float sums[MOST_ROWS / 2] = {};
  int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
  for (int step = first; step < end; ++step) {
    copies_wait<STAGES - 2>();
    fence_async();    // what this thread copied is for the matrix units to read
    __syncthreads();  // what others copied is there, and they have read what the next copies overwrite
    if (step + STAGES - 1 < end) {
      copy_codes(step + STAGES - 1, free_stage);
      copy_inputs(p, ring + free_stage * STEP_BYTES, step + STAGES - 1, warp, lane, rows);
    }
    copies_commit();
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const u32 from = ring + stage * STEP_BYTES;
      const u32 codes = from + INPUT_BYTES + (warp * STEP_SLICES + i) * SLICE_BYTES;
      multiply_slice(sums, codes, from + i * (MOST_ROWS * 128), lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
  }
  copies_wait<0>();
  __syncthreads();  // the ring is free

#pragma unroll
  for (int block = 0; block < MOST_ROWS / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = warp * 16 + lane / 4 + i / 2 * 8, column = block * 8 + lane % 4 * 2 + i % 2;
      store_shared(ring + (column * SUM_ROW + at) * 4, sums[4 * block + i]);
    }
  }
  cluster_sync();
  for (int o = split * THREADS + threadIdx.x; o < OUT * rows; o += SPLITS * THREADS) {
    const int at = o % OUT, n = tile + at, m = o / OUT;
    if (n >= N) continue;
    const float up = GATED ? sum_of_blocks(ring, OUT + at, m) : 0.0f;
    const float y = finish(p, sum_of_blocks(ring, at, m), up, n, 1.0f);
    u16* const to = p.y + static_cast<u64>(m) * N + n;
    *to = to_half(ADD ? y + from_half(*to) : y);
  }
#if SPLITS > 1
  cluster_sync();  // a block's shared memory must be there until all have read it
#endif
}
