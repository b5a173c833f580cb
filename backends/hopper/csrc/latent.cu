// MLA over a paged latent cache: decode, verification and short extends of DeepSeek's absorbed layers.
//
// Grid (clusters: chunks of keys x tiles of query rows / CLUSTER, CLUSTER). One warp copies. One warpgroup computes the scores over all 576
// elements of a key tile and multiplies half of its values; the other warpgroup multiplies the other half (as FlashMLA and
// FlashAttention-3).
#include "latent_attend.cuh"
#include "latent_copy.cuh"

using namespace hopper;

extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
           const __grid_constant__ TensorMap value_map, const __grid_constant__ Given arguments) {
  extern __shared__ __align__(1024) char dynamic[];
  const u32 base = (shared_address(dynamic) + 1023) & ~1023u;
  // Equal in all threads of a warp, so that the compiler sees warp-uniform branches.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    if (APART) prefetch_map(value_map);
    barrier_init(base + LatentLayout::q_full, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      for (int part = 0; part < PARTS; ++part) {
        barrier_init(full_at(base, stage, part), 1);
        barrier_init(empty_at(base, stage, part), 4 * CLUSTER);  // a warpgroup of each block reads a part last
      }
    }
    fence_barrier_init();
  }
  wait_for_earlier();
  Work work;
  if (!work.read(arguments)) return;
#if !APART
  if (work.first >= work.last) {
    if (group > 0) store_nothing(arguments, work, group - 1, thread);
    return;
  }
#endif
  if (USED < 64) {  // rows that no query fills
    for (int i = USED * 8 + thread; i < 64 * 8; i += 128) {
      for (int panel = group; panel < K_PANELS; panel += 3) store_zeros(base + LatentLayout::q + panel * PANEL_BYTES + i * 16);
    }
    fence_async();
  }
  if (CLUSTER == 1) {
    __syncthreads();
  } else {
    cluster_sync();  // no block copies into another, or arrives at its barriers, before they are there
  }
  if (group == 0) {
    give_registers<LATENT_COPY_REGISTERS>();
    if (thread / 32 < COPY_WARPS) copy_latents(base, query_map, key_map, value_map, arguments, work, thread / 32, thread % 32);
  } else {
    take_registers<LATENT_PRODUCT_REGISTERS>();
    if (group == 1) {
      score_and_multiply(base, arguments, work, thread);
    } else {
      multiply_told(base, arguments, work, thread);
    }
  }
  if (CLUSTER > 1) {
    __syncwarp();
    cluster_sync();  // no block ends while another may arrive at its barriers
  }
}
