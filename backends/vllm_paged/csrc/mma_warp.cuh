// One warp's share of attention on the tensor cores: up to 16 query rows against tiles of 16 keys.
//
// heads x keys = Q K^T, then heads x dims = P V, both with mma.m16n8k16. The query heads of a group are the rows, so K and V are read once
// for all of them. The key's 16-byte chunks and the transposed value already have the layout of a right operand, and the accumulator of the
// first MMA is the left operand of the second (FlashAttention-2's register reuse).
#pragma once

#include "layout.cuh"
#include "score.cuh"

namespace headway {

// Right operands from a staged tile. `slot` returns the slot in column 2 * (lane % 4) + e of the n-th group of 8 keys.
template <class KV, int DIM>
struct Operands {  // 16-bit elements: ldmatrix reads them as they lie
  typedef KV Product;
  static __device__ int slot(int lane, int n, int e) { return 8 * n + 2 * (lane % 4) + e; }
  static __device__ int query_dim(int lane, int half) { return 2 * (lane % 4) + 8 * half; }
  static __device__ void key(u32 (&b)[4], u32 tile, int lane, int step) {
    load_matrices(b, tile + staged_key(2 * step + lane / 8 % 2, lane / 16 * 8 + lane % 8));
  }
  static __device__ void value(u32 (&b)[4], u32 tile, int lane, int step) {
    load_matrices(b, tile + staged_value(16 * step + lane / 16 * 8 + lane % 8, lane / 8 % 2, 8));
  }
};

template <int DIM>
struct Operands<e4m3, DIM> {  // a register holds four neighbours: dims and slots are taken in that order, q's dims too
  typedef f16 Product;
  static __device__ int slot(int lane, int n, int e) { return 4 * (lane % 4) + 2 * n + e; }
  static __device__ int query_dim(int lane, int half) { return 4 * (lane % 4) + 2 * half; }
  static __device__ u32 word(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
  }
  static __device__ void key(u32 (&b)[4], u32 tile, int lane, int step) {
    const int column = lane / 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      unpack(word(tile + staged_key(step, 4 * (column / 2) + 2 * n + column % 2) + 4 * (lane % 4)), b[2 * n], b[2 * n + 1]);
  }
  static __device__ void value(u32 (&b)[4], u32 tile, int lane, int step) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      unpack(word(tile + staged_value(16 * step + 8 * n + lane / 4, 0, 16) + 4 * (lane % 4)), b[2 * n], b[2 * n + 1]);
  }
};

template <class T, class KV, int DIM>
struct MmaWarp {
  typedef Operands<KV, DIM> In;
  typedef typename In::Product Product;
  static constexpr int ROWS = 16;
  static constexpr int STEPS = DIM / 16;

  u32 query[STEPS][4];        // left operand of Q K^T
  float sum[2 * STEPS][4];    // [dims / 8][rows lane / 4 and + 8, dims 2 * (lane % 4) and + 1]
  float m[2], l[2];           // of the rows lane / 4 and lane / 4 + 8; l is this lane's part
  float slope[2], undo[2];    // undo: what q was divided by to fit into Product
  int position[2], lane;

  // q: [tokens, heads, DIM], beginning with the sequence's first token.
  __device__ void start(const T* q, long long stride_token, long long stride_head, const Rows& rows, const float* slopes) {
    lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      const bool live = rows.live(row);
      const T* from = q + (live ? rows.token(row) * stride_token + rows.query_head(row) * stride_head : 0);
      undo[i] = 1.0f;
      if (sizeof(KV) == 1) {  // bfloat16 reaches further than the float16 of the product: divide by a power of two
        float largest = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(to_float(from[16 * s + In::query_dim(lane, e / 2) + e % 2])));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        undo[i] = exp2f(ceilf(log2f(fmaxf(largest, 1e-30f))));
      }
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const T* pair = from + 16 * s + In::query_dim(lane, half);
          const u32 packed = pack(Product(), to_float(pair[0]) / undo[i], to_float(pair[1]) / undo[i]);
          query[s][i + 2 * half] = live ? packed : 0;
        }
      position[i] = rows.position(row);
      slope[i] = slopes && live ? slopes[rows.query_head(row)] : 0.0f;
      m[i] = -INF;
      l[i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
  }

  __device__ void step(const char* key_tile, const char* value_tile, int first_key, const Scoring& scoring, bool masked) {
    float score[2][4] = {}, other[2][4] = {};  // two chains of products, to wait half as long
    const u32 keys = shared_address(key_tile), values = shared_address(value_tile);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 b[4];
      In::key(b, keys, lane, s);
      multiply(Product(), s % 2 ? other[0] : score[0], query[s], b[0], b[1]);
      multiply(Product(), s % 2 ? other[1] : score[1], query[s], b[2], b[3]);
    }
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = -INF;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[n][2 * i + e];
          x = scoring((x + other[n][2 * i + e]) * undo[i], first_key + In::slot(lane, n, e), position[i], slope[i], masked);
          largest = fmaxf(largest, x);
        }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      shrink[i] = raise(m[i], largest);
      l[i] *= shrink[i];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[n][2 * i + e];
          x = weight(x, m[i]);
          l[i] += x;
        }
    }
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] *= shrink[e / 2];
    }
    const u32 p[4] = {pack(Product(), score[0][0], score[0][1]), pack(Product(), score[0][2], score[0][3]),
                      pack(Product(), score[1][0], score[1][1]), pack(Product(), score[1][2], score[1][3])};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 b[4];
      In::value(b, values, lane, s);
      multiply(Product(), sum[2 * s], p, b[0], b[1]);
      multiply(Product(), sum[2 * s + 1], p, b[2], b[3]);
    }
  }

  // row_m, row_l: [ROWS], of this warp.
  __device__ void store_state(float* row_m, float* row_l) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(~0u, l[i], 1);
      l[i] += __shfl_xor_sync(~0u, l[i], 2);
      if (lane % 4 == 0) {
        row_m[lane / 4 + 8 * i] = m[i];
        row_l[lane / 4 + 8 * i] = l[i];
      }
    }
  }

  // sums: [ROWS, pitch], of this warp, relative to the largest score in row_m; only the first `used` rows.
  __device__ void store_sums(float* sums, int pitch, const float* row_m, int used) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      if (row >= used) continue;
      const float factor = weight(m[i], row_m[row]);
#pragma unroll
      for (int n = 0; n < 2 * STEPS; ++n)
        *reinterpret_cast<float2*>(sums + row * pitch + 8 * n + 2 * (lane % 4)) =
            make_float2(sum[n][2 * i] * factor, sum[n][2 * i + 1] * factor);
    }
  }
};

}  // namespace headway
