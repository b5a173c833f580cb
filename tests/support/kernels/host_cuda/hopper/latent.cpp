// latent.cu as a function of the host.
#define BLOCK_SHIFT 24
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

extern "C" int run(const void* queries, const void* keys, const void* values, const void* arguments, int clusters, int cluster_blocks,
                   int threads, int shared_bytes, int order) {
  if (threads != hopper::LATENT_THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, hopper::LATENT_THREADS);
  static hopper::TensorMap query_map, key_map, value_map;
  static hopper::Given given;
  std::memcpy(&query_map, queries, sizeof query_map), std::memcpy(&key_map, keys, sizeof key_map);
  std::memcpy(&value_map, values, sizeof value_map);
  std::memcpy(&given, arguments, sizeof given);
  return host::run(+[] { latent(query_map, key_map, value_map, given); }, clusters, cluster_blocks, threads, shared_bytes, order, true);
}
