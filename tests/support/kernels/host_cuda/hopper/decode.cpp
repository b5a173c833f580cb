// decode.cu as a function of the host.
#define BLOCK_SHIFT 24
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

extern "C" int run(const void* arguments, int blocks, int threads, int shared_bytes, int order, const void* const* tensors,
                   const long* sizes, int count) {
  if (threads != hopper::THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, hopper::THREADS);
  static hopper::DecodeArguments given;
  std::memcpy(&given, arguments, sizeof given);
  host::know(tensors, sizes, count);
  return host::run(+[] { decode(given); }, blocks, 1, threads, shared_bytes, order);
}
