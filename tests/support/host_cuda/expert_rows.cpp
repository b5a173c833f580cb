// expert_rows.cu as a function of the host.
#include "host.h"
#define dynamic dynamic_shared
#include "kernel.cu"

extern "C" int run(const void* pointers, const void* routed, int tokens, int blocks, int threads, int shared_bytes, int order,
                   const void* const* tensors, const long* sizes, int count) {
  static fused::Pointers p;
  static fused::Routed r;
  static int number;
  std::memcpy(&p, pointers, sizeof p), std::memcpy(&r, routed, sizeof r), number = tokens;
  host::tensors = count;
  for (int i = 0; i < count; ++i) host::lows[i] = static_cast<const char*>(tensors[i]), host::highs[i] = host::lows[i] + sizes[i];
  return host::run(+[] { expert_rows(p, r, number); }, blocks, threads, shared_bytes, order);
}
