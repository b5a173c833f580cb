// Where the elements of the vllm_5d cache lie. Plain integer arithmetic, so that a host compiler can test it.
//
// key   [num_blocks, num_kv_heads, head_dim / x, block_size, x], x = 16 bytes / element size
// value [num_blocks, num_kv_heads, head_dim, block_size]
#pragma once

#ifdef __CUDACC__
#define HEADWAY_BOTH __host__ __device__ __forceinline__
#else
#define HEADWAY_BOTH inline
#endif

namespace headway {

// Keys a warp works on at a time: the rows of one tensor-core product.
constexpr int TILE = 16;

// First element of what one head keeps in one block: head_dim * block_size elements in one piece, in key and in value alike.
HEADWAY_BOTH long long run_offset(long long block, int head, int kv_heads, int head_dim, int block_size) {
  return (block * kv_heads + head) * head_dim * block_size;
}

// Within the run: the element `dim` of the key in `slot`.
HEADWAY_BOTH int key_offset(int slot, int dim, int block_size, int x) { return (dim / x * block_size + slot) * x + dim % x; }

// Within the run: the element `dim` of the value in `slot`.
HEADWAY_BOTH int value_offset(int slot, int dim, int block_size) { return dim * block_size + slot; }

// A tile of TILE slots is staged as 16-byte chunks: of the key [head_dim / x, TILE], of the value [head_dim, TILE / x].
// Eight chunks that a warp reads together lie TILE / x apart in a value's tile, which would meet the same banks of shared
// memory; a row's chunks therefore change places with the row number.
HEADWAY_BOTH int staged_key(int piece, int slot) { return (piece * TILE + slot) * 16; }
HEADWAY_BOTH int staged_value(int dim, int chunk, int x) {
  const int chunks = TILE / x;
  return (dim * chunks + (chunk ^ (dim * chunks / 8 % chunks))) * 16;
}

}  // namespace headway
