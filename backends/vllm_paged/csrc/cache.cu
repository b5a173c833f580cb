// Cache writer and block copies for the vllm_5d layout.
//
// Compiled per set of -D: TYPE (k and v), KV_TYPE (cache), HEAD_DIM, BLOCK_SIZE.
#include "layout.cuh"
#include "types.cuh"

namespace headway {

constexpr int X = 16 / sizeof(KV_TYPE);
constexpr int PER_VECTOR = 16 / sizeof(TYPE);
constexpr int PAD = 16 / sizeof(TYPE);  // a row more than a multiple of 128 bytes long, so that columns are read from many banks
constexpr int PITCH = HEAD_DIM + PAD;

template <class T>
__device__ __forceinline__ void store(T& to, T x, float) {
  to = x;
}
template <class T>
__device__ __forceinline__ void store(e4m3& to, T x, float scale) {
  from_float(to, __fdiv_rn(to_float(x), scale));
}

union Vector {
  uint4 whole;
  KV_TYPE element[X];
};

}  // namespace headway

using namespace headway;

// Grid (kv_heads, cdiv(num_tokens, TILE)). Rows of TILE tokens are loaded along the head, transposed in shared memory, and stored along the
// slots. 16 bytes of a key are X dims of one slot. 16 bytes of a value are X slots of one dim if X consecutive tokens go to X consecutive
// slots
// that begin at a multiple of X; otherwise (such as a decode token) a value's elements are stored one by one.
extern "C" __global__ void __launch_bounds__(256) reshape_and_cache(
    const TYPE* new_k,  // [num_tokens, kv_heads, HEAD_DIM], the rows of a head contiguous and aligned to 16 bytes
    const TYPE* new_v, KV_TYPE* key, KV_TYPE* value,
    const long long* slot_mapping,  // [num_tokens]; -1: skipped
    long long k_stride_token, long long k_stride_head, long long v_stride_token, long long v_stride_head, int num_tokens,
    int kv_heads, float k_scale, float v_scale) {
  __shared__ __align__(16) TYPE k[TILE][PITCH], v[TILE][PITCH];
  __shared__ long long slots[TILE];
  __shared__ bool together[TILE];  // whether X tokens from here on go to one chunk of a value's row
  __shared__ bool scattered;       // whether any token is outside such chunks
  const int head = blockIdx.x, first = blockIdx.y * TILE, tokens = min(TILE, num_tokens - first);
  if (threadIdx.x < 32) {
    const int t = threadIdx.x;
    const long long slot = t < tokens ? slot_mapping[first + t] : -1;
    const long long start = __shfl_sync(~0u, slot, t / X * X);
    const u32 joined = __ballot_sync(~0u, start >= 0 && start % X == 0 && slot == start + t % X);
    constexpr u32 ALL = (1u << X) - 1;
    const bool whole = BLOCK_SIZE % X == 0 && (joined >> t / X * X & ALL) == ALL;
    if (t < TILE) slots[t] = slot, together[t] = whole;
    scattered = __any_sync(~0u, slot >= 0 && !whole);
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < tokens * (HEAD_DIM / PER_VECTOR); i += blockDim.x) {
    const int t = i / (HEAD_DIM / PER_VECTOR), d = i % (HEAD_DIM / PER_VECTOR) * PER_VECTOR;
    const uint4 from_k = __ldcs(reinterpret_cast<const uint4*>(new_k + (first + t) * k_stride_token + head * k_stride_head + d));
    const uint4 from_v = __ldcs(reinterpret_cast<const uint4*>(new_v + (first + t) * v_stride_token + head * v_stride_head + d));
    *reinterpret_cast<uint4*>(&k[t][d]) = from_k;
    *reinterpret_cast<uint4*>(&v[t][d]) = from_v;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE * (HEAD_DIM / X); i += blockDim.x) {
    const int t = i % TILE, d = i / TILE * X;
    const long long slot = slots[t];
    if (slot < 0) continue;
    Vector piece;
#pragma unroll
    for (int e = 0; e < X; ++e) store(piece.element[e], k[t][d + e], k_scale);
    KV_TYPE* run = key + run_offset(slot / BLOCK_SIZE, head, kv_heads, HEAD_DIM, BLOCK_SIZE);
    *reinterpret_cast<uint4*>(run + key_offset(slot % BLOCK_SIZE, d, BLOCK_SIZE, X)) = piece.whole;
  }
  constexpr int CHUNKS = TILE / X;
#pragma unroll 1
  for (int i = threadIdx.x; i < CHUNKS * HEAD_DIM; i += blockDim.x) {
    const int t = i % CHUNKS * X, d = i / CHUNKS;
    if (!together[t]) continue;
    Vector chunk;
#pragma unroll
    for (int e = 0; e < X; ++e) store(chunk.element[e], v[t + e][d], v_scale);
    KV_TYPE* run = value + run_offset(slots[t] / BLOCK_SIZE, head, kv_heads, HEAD_DIM, BLOCK_SIZE);
    *reinterpret_cast<uint4*>(run + value_offset(slots[t] % BLOCK_SIZE, d, BLOCK_SIZE)) = chunk.whole;
  }
  if (!scattered) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * HEAD_DIM; i += blockDim.x) {
    const int t = i / HEAD_DIM, d = i % HEAD_DIM;
    const long long slot = slots[t];
    if (slot < 0 || together[t / X * X]) continue;
    KV_TYPE* run = value + run_offset(slot / BLOCK_SIZE, head, kv_heads, HEAD_DIM, BLOCK_SIZE);
    store(run[value_offset(slot % BLOCK_SIZE, d, BLOCK_SIZE)], v[t][d], v_scale);
  }
}
