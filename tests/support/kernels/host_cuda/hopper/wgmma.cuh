// In place of backends/hopper/csrc/wgmma.cuh: products are computed as late as they may be, when their threads wait for them, or at once.
#pragma once

#include "ptx.cuh"

namespace hopper {

#if HALF_IS_BF16
inline float from_half(uint16_t bits) { return host::from_bfloat16(bits); }
inline u32 pack(float low, float high) { return static_cast<u32>(host::to_bfloat16(high)) << 16 | host::to_bfloat16(low); }
#else
inline float from_half(uint16_t bits) { return host::from_float16(bits); }
inline u32 pack(float low, float high) { return static_cast<u32>(host::to_float16(high)) << 16 | host::to_float16(low); }
#endif

// PTX ISA, "Matrix descriptor format", with the 128-byte swizzle: the address and two distances, in 16 bytes.
inline u64 descriptor(u32 operand, u32 bytes) { return 1ull << 62 | 64ull << 32 | (operand + (bytes >> 4)); }

struct Operand {
  u32 address, leading, stride;

  explicit Operand(u64 descriptor)
      : address((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) host::fail("an operand without the swizzle of 128 bytes");
  }
  // Element k of a row whose elements are summed over: eight rows lie together, 128 bytes each.
  float in_row(int row, int k) const { return at(address + row / 8 * stride + row % 8 * 128 + k * 2); }
  // Element `column` of row k, where rows are summed over: 64 columns lie together, and `leading` bytes on the next 64.
  float in_column(int k, int column) const { return at(address + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2); }

 private:
  static float at(u32 place) {
    uint16_t bits;
    std::memcpy(&bits, host::own_memory() + swizzled(place), 2);
    return from_half(bits);
  }
};

struct Begun {
  float* d;
  const u32* registers;  // of a; null: it lies in shared memory
  u64 a, b;
  int columns;
  bool add;
};

// PTX ISA, "wgmma.mma_async": which lane holds which elements.
inline void compute(const Begun& one) {
  const int lane = host::current % 32, first = host::current / 32 % 4 * 16 + lane / 4;
  float a[2][16];
  if (one.registers) {
    const auto all = host::exchange(one.registers, 4);
    for (int k = 0; k < 16; ++k) {
      for (int half = 0; half < 2; ++half) {
        a[half][k] = from_half(static_cast<uint16_t>(all[lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2] >> k % 2 * 16));
      }
    }
  } else {
    const Operand rows(one.a);
    for (int k = 0; k < 16; ++k) a[0][k] = rows.in_row(first, k), a[1][k] = rows.in_row(first + 8, k);
  }
  const Operand b(one.b);
  for (int j = 0; j < one.columns / 4; ++j) {
    const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
    float low = 0.0f, high = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float right = one.registers ? b.in_column(k, column) : b.in_row(column, k);
      low += a[0][k] * right, high += a[1][k] * right;
    }
    float* const d = one.d + j / 2 * 4 + j % 2;
    d[0] = one.add ? d[0] + low : low, d[2] = one.add ? d[2] + high : high;
  }
}

inline void begin(const Begun& one) { host::begin([one] { compute(one); }); }
using host::products_begin, host::products_commit, host::products_wait;

template <int COLUMNS>
struct Products {
  static void rows(float (&d)[COLUMNS / 2], u64 a, u64 b, int add) { begin({d, nullptr, a, b, COLUMNS, add != 0}); }
  static void columns(float (&d)[COLUMNS / 2], const u32* a, u64 b, int add) { begin({d, a, 0, b, COLUMNS, add != 0}); }
};

}  // namespace hopper
