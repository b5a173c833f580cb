// One warp's share of attention in float32, for which tensor cores are not precise enough: as MmaWarp, with 8 rows.
#pragma once

#include "layout.cuh"
#include "score.cuh"

namespace headway {

template <int DIM>
struct FmaWarp {
  static constexpr int ROWS = 8;
  static constexpr int DIMS = (DIM + 31) / 32;  // of the sums a lane keeps: lane, lane + 32, ...

  const float* query[ROWS];
  float sum[ROWS][DIMS];
  float m[ROWS], l[ROWS], slope[ROWS];  // alike in all lanes
  int position[ROWS], lane, rows_used;

  __device__ void start(const float* q, long long stride_token, long long stride_head, const Rows& rows, const float* slopes) {
    lane = threadIdx.x % 32;
    rows_used = 0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const bool live = rows.live(row);
      rows_used += live;
      query[row] = q + (live ? rows.token(row) * stride_token + rows.query_head(row) * stride_head : 0);
      slope[row] = slopes && live ? slopes[rows.query_head(row)] : 0.0f;
      position[row] = rows.position(row);
      m[row] = -INF;
      l[row] = 0.0f;
#pragma unroll
      for (int d = 0; d < DIMS; ++d) sum[row][d] = 0.0f;
    }
  }

  __device__ void step(const char* key_tile, const char* value_tile, int first_key, const Scoring& scoring, bool masked) {
    const int slot = lane % TILE, half = lane / TILE;  // two lanes share a key, each takes every second piece
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (row >= rows_used) continue;
      float score = 0.0f;
#pragma unroll 4
      for (int piece = half; piece < DIM / 4; piece += 2) {
        const float4 k = *reinterpret_cast<const float4*>(key_tile + staged_key(piece, slot));
        const float* q = query[row] + 4 * piece;
        score += q[0] * k.x + q[1] * k.y + q[2] * k.z + q[3] * k.w;
      }
      score += __shfl_xor_sync(~0u, score, TILE);
      score = scoring(score, first_key + slot, position[row], slope[row], masked);
      float largest = score;
#pragma unroll
      for (int step = TILE / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const float shrink = raise(m[row], largest);
      const float p = weight(score, m[row]);
      float total = p;
#pragma unroll
      for (int step = TILE / 2; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      l[row] = l[row] * shrink + total;
#pragma unroll
      for (int d = 0; d < DIMS; ++d) sum[row][d] *= shrink;
#pragma unroll
      for (int chunk = 0; chunk < TILE / 4; ++chunk) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = __shfl_sync(~0u, p, 4 * chunk + e);
#pragma unroll
        for (int d = 0; d < DIMS; ++d) {
          const int dim = lane + 32 * d;
          if (DIM % 32 && dim >= DIM) continue;
          const float4 v = *reinterpret_cast<const float4*>(value_tile + staged_value(dim, chunk, 4));
          sum[row][d] += w[0] * v.x + w[1] * v.y + w[2] * v.z + w[3] * v.w;
        }
      }
    }
  }

  __device__ void store_state(float* row_m, float* row_l) const {
    if (lane) return;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) row_m[row] = m[row], row_l[row] = l[row];
  }

  __device__ void store_sums(float* sums, int pitch, const float* row_m, int used) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (row >= used) continue;
      const float factor = weight(m[row], row_m[row]);
#pragma unroll
      for (int d = 0; d < DIMS; ++d)
        if (lane + 32 * d < DIM) sums[row * pitch + lane + 32 * d] = sum[row][d] * factor;
    }
  }
};

}  // namespace headway
