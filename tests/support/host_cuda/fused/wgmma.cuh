// In place of models/fused/csrc/wgmma.cuh: products are computed as late as they may be, when their threads wait for them.
#pragma once

#include "half.cuh"

namespace fused {

inline u64 descriptor(u32 sixteenths) { return sixteenths; }

struct Begun {
  float* d;
  const u32* a;
  u32 b;
  int columns;
};
inline std::vector<Begun> begun_products[host::MOST_THREADS];
inline std::vector<std::vector<Begun>> product_groups[host::MOST_THREADS];

// PTX ISA, "wgmma.mma_async": which lane holds which elements, and where the 128-byte swizzle puts those of b.
inline void compute(const Begun& one) {
  const auto all = host::exchange(one.a, 4);
  const int lane = host::current % 32;
  u32 a[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int half = 0; half < 2; ++half) a[half][k] = all[lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2] >> k % 2 * 16;
  }
  for (int i = 0; i < one.columns / 2; ++i) {
    const int row = i % 4 / 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 address = one.b + column * 128 + k * 2;
      one.d[i] += from_half(a[row][k]) * from_half(load_shared<u16>(address ^ (address >> 7 & 7) << 4));
    }
  }
}

inline void products_begin() {}
inline void products_commit() {
  product_groups[host::current].push_back(begun_products[host::current]);
  begun_products[host::current].clear();
}
template <int most>
void products_wait() {
  auto& mine = product_groups[host::current];
  while (static_cast<int>(mine.size()) > most) {
    for (const Begun& one : mine.front()) compute(one);
    mine.erase(mine.begin());
  }
  __syncwarp();  // the products of all lanes are done
}
template <int count>
void pin(float (&)[count]) {}

template <int COLUMNS>
struct Products {
  static void run(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, int) {
    begun_products[host::current].push_back({d, a, static_cast<u32>(b) * 16, COLUMNS});
  }
};

}  // namespace fused
