// w8a8.cu as functions of the host.
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

using fused::u16, fused::u64, fused::u8;

extern "C" int round_x(const void* x, const void* norm, void* rounded, void* scales, float eps, int rows, const void* const* tensors,
                     const long* sizes, int count) {
  static const u16* from;
  static const void* weight;
  static u8* to;
  static float *factors, epsilon;
  from = static_cast<const u16*>(x), weight = norm, to = static_cast<u8*>(rounded), factors = static_cast<float*>(scales), epsilon = eps;
  host::know(tensors, sizes, count);
  return host::run(+[] { round_rows(from, weight, to, factors, epsilon); }, rows, 1, fused::ARRANGING, 0, 0);
}

extern "C" int run(const void* pointers, const void* input_scales, long codes_rows, int rows, int clusters, int threads,
                   int shared_bytes, int order, const void* const* tensors, const long* sizes, int count) {
  if (threads != fused::THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, fused::THREADS);
  static fused::Pointers p;
  static fused::TensorMap map;
  static const float* scales;
  static int number;
  std::memcpy(&p, pointers, sizeof p), scales = static_cast<const float*>(input_scales), number = rows;
  map = {reinterpret_cast<const char*>(p.weight), static_cast<u64>(codes_rows), ROW, fused::OUT, fused::STEP_COLUMNS, 1, true};
  host::know(tensors, sizes, count);
  return host::run(+[] { w8a8(map, p, scales, number); }, clusters, SPLITS, threads, shared_bytes, order);
}
