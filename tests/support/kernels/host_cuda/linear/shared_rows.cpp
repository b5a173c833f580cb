// shared_rows.cu as functions of the host.
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

extern "C" int arrange(const void* x, const void* norm, void* arranged, float eps, int rows, const void* const* tensors,
                       const long* sizes, int count) {
  static const fused::u16* from;
  static const void* weight;
  static fused::u16* to;
  static float epsilon;
  from = static_cast<const fused::u16*>(x), weight = norm, to = static_cast<fused::u16*>(arranged), epsilon = eps;
  host::know(tensors, sizes, count);
  return host::run(+[] { arrange_rows(from, weight, to, epsilon); }, rows, NORM ? 1 : 2, fused::ARRANGING, 0, 0);
}

extern "C" int run(const void* pointers, const void* codes, long codes_rows, int rows, int clusters, int threads, int shared_bytes, int order,
                   const void* const* tensors, const long* sizes, int count) {
  if (threads != fused::THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, fused::THREADS);
  static fused::Pointers p;
  static fused::TensorMap map;
  static int number;
  std::memcpy(&p, pointers, sizeof p), number = rows;
  map = {static_cast<const char*>(codes), static_cast<fused::u64>(codes_rows), ROW, fused::OUT, fused::SLICE};
  host::know(tensors, sizes, count);
  return host::run(+[] { shared_rows(map, p, number); }, clusters, SPLITS, threads, shared_bytes, order);
}
