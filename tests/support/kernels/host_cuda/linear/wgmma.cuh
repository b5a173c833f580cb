// In place of kernels/linear/csrc/wgmma.cuh: products are computed as late as they may be, when their threads wait for them, or at once.
#pragma once

#include "half.cuh"

namespace fused {

inline u64 descriptor(u32 sixteenths) { return sixteenths; }

struct Begun {
  float* d;
  const u32* a;  // registers; null: of floats of 8 bits, which lie at `rows`
  u32 rows, b;
  int columns;
  bool add;
};

// PTX ISA, "wgmma.mma_async": which lane holds which elements, and where the 128-byte swizzle puts those in shared memory.
inline void compute_half(const Begun& one) {
  const auto all = host::exchange(one.a, 4);
  const int lane = host::current % 32;
  u32 a[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int half = 0; half < 2; ++half) a[half][k] = all[lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2] >> k % 2 * 16;
  }
  for (int i = 0; i < one.columns / 2; ++i) {
    const int row = i % 4 / 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) one.d[i] += from_half(a[row][k]) * from_half(load_shared<u16>(swizzled(one.b + column * 128 + k * 2)));
  }
}

inline void compute_float8(const Begun& one) {
  const int lane = host::current % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const auto element = [](u32 rows, int row, int k) { return host::from_float8(load_shared<u8>(swizzled(rows + row * 128 + k))); };
  float a[2][32];
  for (int k = 0; k < 32; ++k) a[0][k] = element(one.rows, first, k), a[1][k] = element(one.rows, first + 8, k);
  for (int i = 0; i < one.columns / 2; ++i) {
    float sum = one.add ? one.d[i] : 0.0f;
    for (int k = 0; k < 32; ++k) sum += a[i % 4 / 2][k] * element(one.b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
    one.d[i] = sum;
  }
}

inline void compute(const Begun& one) { one.a ? compute_half(one) : compute_float8(one); }
inline void begin(const Begun& one) { host::begin([one] { compute(one); }); }
using host::products_begin, host::products_commit, host::products_wait;

template <int COLUMNS>
struct Products {
  static void run(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, int add) { begin({d, a, 0, static_cast<u32>(b) * 16, COLUMNS, add != 0}); }
};
template <int COLUMNS>
struct Float8Products {
  static void run(float (&d)[COLUMNS / 2], u64 a, u64 b, int add) {
    begin({d, nullptr, static_cast<u32>(a) * 16, static_cast<u32>(b) * 16, COLUMNS, add != 0});
  }
};

}  // namespace fused
