// Attention over packed sequences with keys and values in this step's tensors or in a paged cache: prefill, extend, verification.
//
// Persistent: one program per SM, each taking items (shape.cuh) from a queue. For each item, one warpgroup copies (copy.cuh) and one to
// three run MMAs (attend.cuh).
#include "attend.cuh"

using namespace hopper;

static_assert(Layout::bytes + 1023 <= SHARED_BYTES, "what the host asks for");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
              const __grid_constant__ TensorMap value_map, const __grid_constant__ Arguments arguments) {
  extern __shared__ unsigned char shared[];
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    prefetch_map(value_map);
    for (int i = 0; i < QUERY_STAGES; ++i) {
      barrier_init(base + Layout::q_full + 8 * i, 1);
      barrier_init(base + Layout::q_empty + 8 * i, 4 * GROUPS);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + Layout::item_full + 8 * i, 1);
      barrier_init(base + Layout::item_empty + 8 * i, 4 * GROUPS + 2);
    }
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(base + Layout::k_full + 8 * i, 1);
      barrier_init(base + Layout::v_full + 8 * i, 1);
      barrier_init(base + Layout::k_empty + 8 * i, 4 * GROUPS);
      barrier_init(base + Layout::v_empty + 8 * i, 4 * GROUPS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<COPY_REGISTERS>();
    if (threadIdx.x < 32) {
      copy_keys(base, key_map, arguments, threadIdx.x);
    } else if (threadIdx.x < 64) {
      copy_values(base, value_map, arguments, threadIdx.x - 32);
    } else if (threadIdx.x < 96) {
      copy_queries(base, query_map, arguments, threadIdx.x - 64);
    } else {
      prefetch_items(arguments, threadIdx.x - 96);
    }
  } else {
    take_registers<PRODUCT_REGISTERS>();
    attend(base, arguments, group - 1, threadIdx.x % 128);
  }
}
