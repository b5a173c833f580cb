// mlp_rows.cu as a function of the host.
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

extern "C" int run(const void* pointers, float eps, int rows, int blocks, int threads, int shared_bytes, int order,
                   const void* const* tensors, const long* sizes, int count) {
  if (threads != fused::THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, fused::THREADS);
  if (blocks != BLOCKS) return std::fprintf(stderr, "%d blocks in place of %d\n", blocks, BLOCKS);
  static fused::MlpPointers p;
  static float epsilon;
  static int number;
  std::memcpy(&p, pointers, sizeof p), epsilon = eps, number = rows;
  host::know(tensors, sizes, count);
  return host::run_meeting(+[] { mlp_rows(p, epsilon, number); }, blocks, threads, shared_bytes, order);
}
