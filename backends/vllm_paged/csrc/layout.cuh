// Addresses of elements in the vllm_5d cache. Plain integer arithmetic, so that a host compiler can test it.
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

// Number of keys that a warp processes at a time: the rows of one MMA.
constexpr int TILE = 16;

// First element of one head in one block: head_dim * block_size contiguous elements, in key and in value.
HEADWAY_BOTH long long run_offset(long long block, int head, int kv_heads, int head_dim, int block_size) {
  return (block * kv_heads + head) * head_dim * block_size;
}

// Offset of element `dim` of the key in `slot`, within the head's elements.
HEADWAY_BOTH int key_offset(int slot, int dim, int block_size, int x) { return (dim / x * block_size + slot) * x + dim % x; }

// Offset of element `dim` of the value in `slot`, within the head's elements.
HEADWAY_BOTH int value_offset(int slot, int dim, int block_size) { return dim * block_size + slot; }

// A tile of TILE slots is staged as 16-byte chunks: [head_dim / x, TILE] of the key, [head_dim, TILE / x] of the value.
// Eight chunks that a warp reads together are TILE / x apart in a value tile and would hit the same shared memory banks; a row's chunks are
// therefore swizzled by the row number.
HEADWAY_BOTH int staged_key(int piece, int slot) { return (piece * TILE + slot) * 16; }
HEADWAY_BOTH int staged_value(int dim, int chunk, int x) {
  const int chunks = TILE / x;
  return (dim * chunks + (chunk ^ (dim * chunks / 8 % chunks))) * 16;
}

}  // namespace headway
