// Code shared by both kinds of warp: query rows, and the transformation of q.k to a score.
#pragma once

#include "types.cuh"

namespace headway {

// A query row is a (token, head) pair; row r of a sequence is token r / group, head r % group.
struct Rows {
  int first;      // of this block's rows
  int group;      // query heads a kv head
  int query_len;  // new tokens of the sequence
  int kv_len;     // its keys, the new ones included
  int head;       // first query head of the group

  __device__ int used(int rows) const { return min(rows, query_len * group - first); }
  __device__ bool live(int row) const { return first + row < query_len * group; }
  __device__ int token(int row) const { return (first + row) / group; }
  __device__ int query_head(int row) const { return head + (first + row) % group; }
  __device__ int position(int row) const { return kv_len - query_len + token(row); }
};

// In base 2: the host multiplies all parameters by log2(e).
struct Scoring {
  float scale;     // log2(e) * scale; scale / softcap where there is a soft-cap
  float cap;       // log2(e) * softcap; 0: none
  int window;      // keys that a query may see, itself included; 0: all
  bool has_slopes;  // whether ALiBi's slopes count

  __device__ float operator()(float product, int key, int position, float slope, bool masked) const {
    float score = product * scale;
    if (cap > 0.0f) score = cap * tanhf(score);
    if (has_slopes) score -= slope * float(position - key);
    if (masked && (key > position || (window > 0 && key <= position - window))) score = -INF;
    return score;
  }
};

// Online softmax (Milakov and Gimelshein 2018): takes the largest score of a tile, returns the factor for earlier sums.
__device__ __forceinline__ float raise(float& m, float largest) {
  const float before = m;
  m = fmaxf(m, largest);
  return m == -INF ? 1.0f : exp2_fast(before - m);
}
// exp2(score - m), or 0 if no key has been seen yet.
__device__ __forceinline__ float weight(float score, float m) { return m == -INF ? 0.0f : exp2_fast(score - m); }

}  // namespace headway
