// Masks and online softmax (Milakov and Gimelshein 2018, as in FlashAttention) on wgmma accumulator fragments: a thread holds columns
// 8 j + 2 (lane % 4) and the next one, of rows lane / 4 and lane / 4 + 8.
#pragma once

#include "shape.cuh"

namespace hopper {

#define NEVER __int_as_float(0xff800000)  // minus infinity

// Reductions over the four threads that hold a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct Softmax {
  float most[2] = {NEVER, NEVER};  // what the scores of each row are reduced by, before scaling: near the maximum
  float sum[2] = {0.0f, 0.0f};     // of this thread's columns

  // Replace scores by weights in place. keep[r]: factor for row r's accumulators so far.
  // Returns, per warp, whether any keep differs from 1. A maximum that grows by less than a factor of 2^8 is not updated, since float32
  // accumulators have enough range (as in FlashAttention-4). MASKED: rows may have no visible key in this tile.
  template <bool MASKED>
  __device__ __forceinline__ bool update(float (&scores)[KEYS / 2], float scale, float (&keep)[2]) {
    float shift[2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < KEYS / 8; ++j) high = fmaxf(high, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      high = fmaxf(most[r], row_max(high));
      const bool grown = !((high - most[r]) * scale <= 8.0f);
      high = grown ? high : most[r];
      shift[r] = (MASKED && high == NEVER) ? 0.0f : high * scale;
      keep[r] = exp2_approx(most[r] * scale - shift[r]);
      most[r] = high;
      grows |= grown;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * r + e];
          score = exp2_approx(fmaf(score, scale, -shift[r]));
          total[e] += score;
        }
      }
      sum[r] = sum[r] * keep[r] + (total[0] + total[1]);
    }
    return __any_sync(~0u, grows);
  }
};

// A thread's rows, and the range of keys [low, high) that each sees.
struct Sight {
  int high[2], low[2];
  int clear, inside;  // tiles between them need no mask: every row of the tile of queries sees all of their keys

  // before: number of keys in the context. first_token, last_token: the query tile's tokens. row: the thread's first row in the tile.
  __device__ __forceinline__ Sight(int before, int first_token, int last_token, int row, int group, int window) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      high[r] = before + min(first_token + (row + 8 * r) / group, last_token) + 1;
      low[r] = WINDOW ? high[r] - window : 0;
    }
    clear = (before + first_token + 1) / KEYS;
    inside = WINDOW ? (max(before + last_token + 1 - window, 0) + KEYS - 1) / KEYS : 0;
  }

  // Set scores of keys outside the range to NEVER. key: the thread's first key in the tile.
  __device__ __forceinline__ void mask(float (&scores)[KEYS / 2], int key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int above = high[r] - key, below = low[r] - key;
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool seen = 8 * j + e < above && (!WINDOW || 8 * j + e >= below);
          if (!seen) scores[4 * j + 2 * r + e] = NEVER;
        }
      }
    }
  }
};

// Replace a tile's scores by weights. Returns as Softmax::update does. inner: with SOFTCAP, of scores before tanh.
__device__ __forceinline__ bool weigh(Softmax& softmax, const Sight& sight, float (&scores)[KEYS / 2], int tile, int lane, float scale,
                                      float inner, float (&keep)[2]) {
#if SOFTCAP
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) scores[i] = tanh_approx(scores[i] * inner);
#endif
  if (tile < sight.clear && tile >= sight.inside) return softmax.template update<WINDOW>(scores, scale, keep);
  sight.mask(scores, tile * KEYS + 2 * (lane % 4));
  return softmax.template update<true>(scores, scale, keep);
}

__device__ __forceinline__ void pack_weights(const float (&weights)[KEYS / 2], u32 (&packed)[KEYS / 4]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) packed[i] = pack(weights[2 * i], weights[2 * i + 1]);
}

// Transpose wgmma fragments among the four threads of a row (4 x 4 words), so that each thread stores 16 bytes.
__device__ __forceinline__ uint4 exchange(u32 a, u32 b, u32 c, u32 d, int lane) {
  const bool upper = lane & 2, odd = lane & 1;
  const u32 a2 = __shfl_xor_sync(~0u, upper ? a : c, 2), b2 = __shfl_xor_sync(~0u, upper ? b : d, 2);
  const u32 w0 = upper ? a2 : a, w1 = upper ? b2 : b, w2 = upper ? c : a2, w3 = upper ? d : b2;
  const u32 x = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), y = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  return odd ? make_uint4(x, w1, y, w3) : make_uint4(w0, x, w2, y);
}

}  // namespace hopper
