// expert_lots.cu as functions of the host.
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

using fused::u16, fused::u32, fused::u64, fused::u8;

#if GATHER
extern "C" int beside(const void* x, const void* experts, void* table, void* arranged, void* between, int pairs, int,
                      const void* const* tensors, const long* sizes, int count) {
  static const u16* from;
  static const u32* chosen;
  static fused::Table* lots;
  static u16 *to, *next;
  from = static_cast<const u16*>(x), chosen = static_cast<const u32*>(experts), lots = static_cast<fused::Table*>(table);
  to = static_cast<u16*>(arranged), next = static_cast<u16*>(between);
  host::know(tensors, sizes, count);
  return host::run(+[] { arrange_lots(from, chosen, lots, to, next); }, pairs, 1, fused::ARRANGING, 0, 0);
}
#else
extern "C" int beside(const void* parts, const void* table, const void* weights, void* y, void*, int tokens, int,
                      const void* const* tensors, const long* sizes, int count) {
  static const float *from, *factors;
  static const fused::Table* lots;
  static u16* to;
  from = static_cast<const float*>(parts), factors = static_cast<const float*>(weights);
  lots = static_cast<const fused::Table*>(table), to = static_cast<u16*>(y);
  host::know(tensors, sizes, count);
  return host::run(+[] { add_slots(from, lots, factors, to); }, tokens, (N + 4 * fused::ARRANGING - 1) / (4 * fused::ARRANGING), fused::ARRANGING, 0, 0);
}
#endif

extern "C" int run(const void* pointers, const void* table, int table_words, int blocks, int threads, int shared_bytes, int order,
                   const void* const* tensors, const long* sizes, int count) {
  if (threads != fused::THREADS) return std::fprintf(stderr, "%d threads in place of %d\n", threads, fused::THREADS);
  if (table_words * 4 != sizeof(fused::Table)) return std::fprintf(stderr, "a table of %d words\n", table_words);
  if (shared_bytes != STAGES * fused::Ring<fused::Layout>::STEP_BYTES + 1024) return std::fprintf(stderr, "%d bytes\n", shared_bytes);
  static fused::Pointers p;
  static fused::TensorMap codes, scales, zeros;
  static const fused::Table* lots;
  std::memcpy(&p, pointers, sizeof p), lots = static_cast<const fused::Table*>(table);
  constexpr u64 rows = static_cast<u64>(EXPERTS) * fused::WIDTH, groups = ROW / SCALE_SPAN;
  codes = {reinterpret_cast<const char*>(p.weight), rows, ROW, BOX, fused::SLICE, 1};
  scales = {reinterpret_cast<const char*>(p.scales), groups, rows * SCALE_SIZE, fused::GROUPS, fused::OUT * SCALE_SIZE, SCALE_SIZE};
  zeros = {reinterpret_cast<const char*>(p.zeros), groups, rows, fused::GROUPS, fused::OUT, 1};
  host::know(tensors, sizes, count);
  return host::run(+[] { expert_lots(codes, scales, zeros, p, lots); }, blocks, 1, threads, shared_bytes, order);
}
