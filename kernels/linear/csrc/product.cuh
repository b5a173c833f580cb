// GEMM over a quantized weight by one warp: TILES parts of 16 rows of W, in slices of 64 bytes of each row, times the same columns of x.
//
// The tensor cores take W as the first operand [16, 16] and x^T [16, 8] as the second. The order of a sum over K is free, so a thread
// contributes 16 contiguous bytes of a row, which it has copied itself, and the columns of x that belong to them.
#pragma once

#include "unpack.cuh"

#ifndef EXPERTS  // experts whose weights are contiguous
#define EXPERTS 1
#endif

namespace fused {

constexpr int SLICE = 64;
constexpr int SLICES = (ROW + SLICE - 1) / SLICE;
constexpr int REST = ROW % SLICE;  // bytes of the last slice if it is incomplete; the rest is zeros, in W and in x
constexpr int BLOCKS = MOST_ROWS <= 8 ? 1 : MOST_ROWS / 8;
constexpr int GROUPS = SCALE_SPAN < SLICE ? SLICE / SCALE_SPAN : 1;  // groups per slice
constexpr bool BY_ROW = SCALE_SPAN >= ROW && SCALE_ROWS == 1;        // one scale per row, applied at the end
constexpr bool BY_BLOCK = !BY_ROW && SCALE_ROWS > 1;                 // one scale per 16 rows or more
constexpr bool BY_GROUP = !BY_ROW && !BY_BLOCK;
constexpr bool SHORT = BY_GROUP && GROUPS > 1;                       // several scales per slice: values are scaled, not sums
#ifdef SCALED_CODES
constexpr bool ON_CODES = !BY_ROW;  // all values are scaled, as in a weight that is dequantized to half precision
#else
constexpr bool ON_CODES = SHORT;
#endif
constexpr bool ON_SUMS = !BY_ROW && !ON_CODES;                       // a slice's sums are scaled before they are added

constexpr int WIDTH = GATED ? 2 * N : N;                             // rows of W per expert
constexpr int PART_ROWS = 16 * TILES;
constexpr int CODE_BYTES = TILES * 1024;
constexpr int SCALE_BYTES = BY_ROW ? 0 : BY_BLOCK ? (TILES * 4 + 15) / 16 * 16 : GROUPS * PART_ROWS * SCALE_SIZE;
constexpr int ZERO_BYTES = ZEROS ? GROUPS * PART_ROWS : 0;
constexpr int SLICE_BYTES = CODE_BYTES + SCALE_BYTES + ZERO_BYTES;  // bytes per slice of the weight in shared memory
constexpr int WINDOW = 64;                                          // contiguous columns of x there, 128 bytes of a row

struct Pointers {
  const u16* x;        // [rows, K]
  const u8* weight;    // [N, ROW]; GATED: [2 N, ROW], gate over up
  const u8* scales;    // BY_ROW: float32 [rows of W]; BY_BLOCK: float32 [rows of W / SCALE_ROWS, K / ..]; else [K / .., rows of W]
  const u8* zeros;     // uint8, [K / .., rows of W]
  const void* norm;    // [K], weight of the RMSNorm of x
  const u16* bias;     // [rows of W]
  u16* y;              // [rows, N], written; ADD: added to
  const float* cos;    // [rows, HEAD_DIM / 2]
  const float* sin;
  const void* q_norm;  // [HEAD_DIM]
  const void* k_norm;
  int* arrivals;       // [HEADS + KV_HEADS], zero between launches
};

// Return the first of the 16 columns of x that belong to 16 bytes of a row.
__device__ __forceinline__ int column_of(int byte, int half) {
  if (HALVES == 1) return byte;
  return byte / HALF * (2 * HALF) + half * HALF + byte % HALF;
}

// Return whether a row has this group; only the last slice may lack some.
__device__ __forceinline__ bool is_group(int group) { return REST == 0 || group < ROW / SCALE_SPAN; }

// Copy a slice of W with its scales and zeros. first_row: returns the first row of W of each part.
template <typename FirstRow>
__device__ __forceinline__ void copy_weights(const Pointers& p, u32 to, FirstRow first_row, int slice, int lane, u64 policy) {
  const u32 bytes = REST && slice == SLICES - 1 && lane % 4 * 16 >= REST ? 0 : 16;
  const u64 at = static_cast<u64>(slice) * SLICE + (bytes ? lane % 4 * 16 : 0);
#pragma unroll
  for (int part = 0; part < TILES; ++part) {
    const u8* row = p.weight + static_cast<u64>(first_row(part) + lane / 4) * ROW + at;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 target = to + part * 1024 + i * 512 + lane * 16;
      REST ? copy_16_once(target, row + 8ull * i * ROW, bytes, policy) : copy_16_once(target, row + 8ull * i * ROW, policy);
    }
  }
  if constexpr (BY_BLOCK) {
    if (lane < TILES) {
      const int place = first_row(lane) / SCALE_ROWS * (ROW / SCALE_SPAN) + slice * SLICE / SCALE_SPAN;
      copy_4(to + CODE_BYTES + lane * 4, p.scales + 4ull * place, 4);
    }
  } else if constexpr (BY_GROUP) {
    constexpr u64 rows = static_cast<u64>(EXPERTS) * WIDTH;
    const int group = slice * SLICE / SCALE_SPAN;
#pragma unroll
    for (int c = lane; c < GROUPS * TILES * SCALE_SIZE; c += 32) {
      const int own = group + c / (TILES * SCALE_SIZE);
      const u64 place = (is_group(own) ? own : group) * rows + first_row(c / SCALE_SIZE % TILES);
      copy_16(to + CODE_BYTES + c * 16, p.scales + place * SCALE_SIZE + c % SCALE_SIZE * 16, is_group(own) ? 16 : 0);
    }
    if (ZEROS) {
#pragma unroll
      for (int c = lane; c < GROUPS * TILES; c += 32) {
        const int own = group + c / TILES;
        const u64 place = (is_group(own) ? own : group) * rows + first_row(c % TILES);
        copy_16(to + CODE_BYTES + SCALE_BYTES + c * 16, p.zeros + place, is_group(own) ? 16 : 0);
      }
    }
  }
}

// --- multiplying ---

__device__ __forceinline__ float float_scale(u32 from) {
#if SCALE_SIZE == 4
  return load_shared<float>(from);
#elif SCALE_FLOAT16
  return from_float16(load_shared<u16>(from));
#else
  return from_bfloat16(load_shared<u16>(from));
#endif
}

// Return the scale of a row, in both halves of a pair.
__device__ __forceinline__ u32 pair_scale(u32 from) {
#if WEIGHT == MXFP4
  return scale_of(load_byte(from));
#else
  const float scale = float_scale(from) * (WEIGHT == FP8 && !WIDE ? CODE_FACTOR : 1.0f);
  return to_pair(scale, scale);
#endif
}

// A thread's quantized values of one part: 16 bytes of a row and of the row 8 below it, with the rows' scales and zeros.
struct Codes {
  Quad row[2];
  u32 offset[2];
  u32 scale[2];

  Codes() = default;

  // from: address of the slice in shared memory, in the layout of copy_weights.
  __device__ __forceinline__ Codes(u32 from, int part, int lane)
      : Codes(from + part * 1024 + lane * 16, from + CODE_BYTES + row_of(part, lane) * SCALE_SIZE,
              from + CODE_BYTES + SCALE_BYTES + row_of(part, lane)) {}

  // codes, scales, zeros: addresses for the first row. below...: offsets in bytes to the second row.
  __device__ __forceinline__ Codes(
      u32 codes, u32 scales, u32 zeros, u32 below = 512, u32 below_scales = 8 * SCALE_SIZE, u32 below_zeros = 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = load_quad(codes + i * below);
#if WEIGHT == INT4
      offset[i] = offset_of(ZEROS ? load_byte(zeros + i * below_zeros) : 8);
#endif
      if (ON_CODES && BY_GROUP) scale[i] = pair_scale(scales + i * below_scales);
    }
  }

  static __device__ __forceinline__ int row_of(int part, int lane) {
    return (SHORT ? lane % 4 * 16 / SCALE_SPAN : 0) * PART_ROWS + part * 16 + lane / 4;
  }

  // Dequantize one word of each row to the first operand.
  template <int half>
  __device__ __forceinline__ void unpack(u32 (&a)[4], int word) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if WEIGHT == FP8
      const u32 factor = ON_CODES && !WIDE ? scale[i] : to_pair(CODE_FACTOR, CODE_FACTOR);
      a[i] = codes<0>(row[i].part[word], factor), a[2 + i] = codes<1>(row[i].part[word], factor);
      if (ON_CODES && WIDE) a[i] = multiply_pair(a[i], scale[i]), a[2 + i] = multiply_pair(a[2 + i], scale[i]);
#elif WEIGHT == INT8
      a[i] = codes<0>(row[i].part[word]), a[2 + i] = codes<1>(row[i].part[word]);
#elif WEIGHT == INT4
      const u32 bytes = nibbles<half>(row[i].part[word]);
      a[i] = codes<0>(bytes, offset[i]), a[2 + i] = codes<1>(bytes, offset[i]);
      if (ON_CODES) a[i] = multiply_pair(a[i], scale[i]), a[2 + i] = multiply_pair(a[2 + i], scale[i]);
#else
      a[i] = codes<half, 0>(row[i].part[word], scale[i]), a[2 + i] = codes<half, 1>(row[i].part[word], scale[i]);
#endif
    }
  }
};

// from: address of the slice in shared memory.
__device__ __forceinline__ void add_scaled(float* sums, const float* products, u32 from, int part, int lane) {
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 place = from + CODE_BYTES;
    scale[i] = BY_BLOCK ? load_shared<float>(place + part * 4) : float_scale(place + (part * 16 + lane / 4 + 8 * i) * SCALE_SIZE);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += products[i] * scale[i / 2];
}

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1  // SiLU
  return x / (1.0f + __expf(-x));
#elif ACTIVATION == 2  // GELU, exact
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#elif ACTIVATION == 3  // GELU by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u)
  return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 4  // ReLU
  return fmaxf(x, 0.0f);
#elif ACTIVATION == 5  // ReLU squared; keeps a NaN
  return x > 0.0f ? x * x : x == x ? 0.0f : x;
#elif ACTIVATION == 6  // x * sigmoid(ALPHA x)
  return x / (1.0f + __expf(-(ALPHA) * x));
#else
  return x;
#endif
}

#if GATED && LIMITED  // experts with limits: by comparisons, which keep a NaN
__device__ __forceinline__ float gate(float y, float up) {
  y = y > LIMIT ? LIMIT : y;
  return activate(y) * ((up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up) + 1.0f);
}
#else
__device__ __forceinline__ float gate(float y, float up) { return activate(y) * up; }
#endif

// Return the output for sums of row n of W, and if GATED of row N + n. factor: factor of the norm.
__device__ __forceinline__ float finish(const Pointers& p, float sum, float up, int n, float factor) {
  if (BY_ROW) sum *= reinterpret_cast<const float*>(p.scales)[n];
  float y = sum * factor;
  if (BIAS) y += from_half(p.bias[n]);
  if (!GATED) return activate(y);
  if (BY_ROW) up *= reinterpret_cast<const float*>(p.scales)[N + n];
  up *= factor;
  if (BIAS) up += from_half(p.bias[N + n]);
  return gate(y, up);
}

}  // namespace fused
