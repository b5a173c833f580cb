// Products of up to 64 rows over quantised weights: the matrix units' time begins to count, and x is too large for each warp to read
// its own.
//
// The warps of a block of threads lie side by side along the rows of W, PART_ROWS each, and share the columns of x, which run through
// a ring in shared memory as the slices of W do; one barrier a step. Several blocks, a cluster, share a sum over K: their sums meet
// through the cluster's shared memory, and each block finishes its share of y.

#include "product.cuh"

namespace fused {

constexpr int STEP_SLICES = 2 / HALVES;                   // of a step: 128 columns of x
constexpr int STEPS = (SLICES / STEP_SLICES + SPLITS - 1) / SPLITS;
constexpr int THREADS = WARPS * 32;
constexpr int OUT = WARPS * WARP_OUT;
constexpr int INPUT_BYTES = 2 * MOST_ROWS * 128;
constexpr int STEP_BYTES = INPUT_BYTES + WARPS * STEP_SLICES * SLICE_BYTES;
constexpr int SUM_ROW = WARPS * PART_ROWS + 4;            // floats: threads of a warp store to different banks

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

__device__ __forceinline__ void multiply_slice(float (&sums)[TILES][BLOCKS][4], u32 from, u32 x, int window, int lane) {
  Codes codes[TILES] = {Codes(from, 0, lane)
#if TILES > 1
                            , Codes(from, 1, lane)
#endif
  };
  float products[TILES][BLOCKS][4] = {};
#pragma unroll
  for (int words = 0; words < 2; ++words) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      u32 a[TILES][2][4];
#pragma unroll
      for (int part = 0; part < TILES; ++part) {
        half ? unpack_words<1>(a[part], codes[part], words) : unpack_words<0>(a[part], codes[part], words);
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const Quad columns = load_columns(x, window, block, half, words, lane);
#pragma unroll
        for (int part = 0; part < TILES; ++part) {
          float(&to)[4] = BY_ROW || SHORT ? sums[part][block] : products[part][block];
          multiply_add(to, a[part][0], columns.part[0], columns.part[1]);
          multiply_add(to, a[part][1], columns.part[2], columns.part[3]);
        }
      }
    }
  }
  if (BY_ROW || SHORT) return;
#pragma unroll
  for (int part = 0; part < TILES; ++part) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) add_scaled(sums[part][block], products[part][block], from, part, lane);
  }
}

}  // namespace fused

// y = W x + bias, then activated, activation(gate) * up, or added to y. Sums in float32. Grid (tiles, SPLITS), a cluster each.
extern "C" __global__ void __launch_bounds__(fused::THREADS, RESIDENT) shared_rows(
    const fused::Pointers p, const float, const float, const int rows, const int) {
  using namespace fused;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.y;
  const u64 policy = read_once();
  const u32 ring = shared_address(shared);
  const int tile = blockIdx.x * OUT, out = tile + warp * WARP_OUT;
  const int first = split * STEPS, end = min(first + STEPS, SLICES / STEP_SLICES);

  const auto copy_step_weights = [&](int step, int stage) {
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const u32 to = ring + stage * STEP_BYTES + INPUT_BYTES + (warp * STEP_SLICES + i) * SLICE_BYTES;
      copy_weights(p, to, out, step * STEP_SLICES + i, lane, policy);
    }
  };
  const auto copy_step_inputs = [&](int step, int stage) {
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      copy_inputs<THREADS>(p, ring + stage * STEP_BYTES, step * STEP_SLICES + i, i, threadIdx.x, rows);
    }
  };

  launch_dependents();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (first + stage < end) copy_step_weights(first + stage, stage);
  }
  wait_for_earlier();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (first + stage < end) copy_step_inputs(first + stage, stage);
    copies_commit();
  }

  float sums[TILES][BLOCKS][4] = {};
  int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
  for (int step = first; step < end; ++step) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // what others copied is there, and they have read what the next copies overwrite
    if (step + STAGES - 1 < end) {
      copy_step_weights(step + STAGES - 1, free_stage);
      copy_step_inputs(step + STAGES - 1, free_stage);
    }
    copies_commit();
#pragma unroll
    for (int i = 0; i < STEP_SLICES; ++i) {
      const u32 from = ring + stage * STEP_BYTES;
      multiply_slice(sums, from + INPUT_BYTES + (warp * STEP_SLICES + i) * SLICE_BYTES, from, i, lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
  }
  copies_wait<0>();
  __syncthreads();  // the ring is free

  float* const mine = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int part = 0; part < TILES; ++part) {
    // Gates of all warps first, then what they multiply.
    const int parts = GATED ? TILES / 2 : TILES, top = warp * WARP_OUT + part % parts * 16 + (part < parts ? 0 : OUT);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = top + lane / 4 + i / 2 * 8, column = block * 8 + lane % 4 * 2 + i % 2;
        mine[column * SUM_ROW + row] = sums[part][block][i];
      }
    }
  }
  cluster_sync();
  for (int o = split * THREADS + threadIdx.x; o < OUT * rows; o += SPLITS * THREADS) {
    const int row = o % OUT, n = tile + row, m = o / OUT;
    if (n >= N) continue;
    const float up = GATED ? sum_of_blocks(ring, OUT + row, m) : 0.0f;
    const float y = finish(p, sum_of_blocks(ring, row, m), up, n, 1.0f);
    u16* const at = p.y + static_cast<u64>(m) * N + n;
    *at = to_half(ADD ? y + from_half(*at) : y);
  }
#if SPLITS > 1
  cluster_sync();  // a block's shared memory must be there until all have read it
#endif
}
