// Values of 512 elements: the work of a thread block, and its shared memory layout.
//
// MLA: a cached row of 576 elements is the key of all query heads; its first 512 elements are their value. Plain heads of 512 (APART) have
// rows of their own for values. A thread block takes 64 query rows (heads of one token, or all heads of consecutive tokens) and a run of
// their sequence's keys. A tile of 64 keys is copied in parts of four panels, with MLA for key and value at once; each part's buffer is
// released after its last read. The CLUSTER thread blocks whose rows see the same keys (other heads of a token with MLA, else the next
// tokens) run together, and each copies a share of every tile to all of them.
//
// Compile-time constants in addition to those of shape.cuh: CLUSTER and, for MLA, HEADS and TOKENS (of a tile of query rows).
#pragma once

#include "finish.cuh"

namespace hopper {

constexpr u32 PANEL_BYTES = 64 * 128;
#define APART (HEAD_DIM == V_HEAD_DIM)  // values have rows of their own
#if APART
constexpr int USED = 64;
#else
constexpr int USED = HEADS * TOKENS;  // rows of a tile
#endif
constexpr int HALF_PANELS = 4, HALF_COLUMNS = HALF_PANELS * PANEL;
constexpr int TILE_PANELS = APART ? K_PANELS + V_PANELS : K_PANELS;
// Parts of a tile. MLA: values of the first warpgroup, values of the second, columns that only keys have. APART: keys in two parts, values in two.
constexpr int PARTS = (TILE_PANELS + HALF_PANELS - 1) / HALF_PANELS;
constexpr int VALUE_PART = APART ? K_PANELS / HALF_PANELS : 0, FIRST_PART = APART ? 0 : PARTS - 1;  // the first that is copied and read
constexpr int COPY_WARPS = APART ? PARTS : 1;
constexpr int MULTIPLIERS = 2, LATENT_THREADS = 128 * (MULTIPLIERS + 1);
constexpr int LATENT_COPY_REGISTERS = 40, LATENT_PRODUCT_REGISTERS = 232;
constexpr int WORDS = KEYS / 4 + 2;  // that a thread tells its partner of a tile: weights, and what to multiply the sums by
static_assert(V_HEAD_DIM == 512 && (APART || HEAD_DIM == 576 && PAGED) && KEYS == 64 && GROUPS == 2 * CLUSTER, "what this is written for");
static_assert(USED <= 64 && BOXES * HALF_PANELS <= 32 && CLUSTER <= HALF_PANELS, "a row for each query, a lane for each box");

#if APART
using Given = Arguments;
#else
struct LatentArguments {
  void* out;
  float* lse;          // [heads, tokens], or null
  const int* block_table;  // [sequences, blocks]
  const int* chunks;   // [chunks, 8], as triton/chunk_kernel.py makes them; a tile of keys there is one here
  float* partials;     // [chunks, tiles, partial_rows, 512], divided by their sums
  float* partial_lse;  // [chunks, tiles, partial_rows], to the base 2
  long long out_token, out_head, lse_head, table_row;  // strides in elements
  int heads;         // of a token
  int tiles;         // of query rows of each sequence; a multiple of CLUSTER
  int partial_rows;  // of a tile
  float scale;       // of scores, to the base-2 domain
};
using Given = LatentArguments;
#endif

// Byte offsets from a multiple of 1,024.
struct LatentLayout {
  static constexpr u32 q = 0;
  static constexpr u32 k = q + K_PANELS * PANEL_BYTES;
  static constexpr u32 words = k + STAGES * TILE_PANELS * PANEL_BYTES;
  static constexpr u32 q_full = words + WORDS * 128 * 4;
  static constexpr u32 full = q_full + 8, empty = full + STAGES * PARTS * 8;
  static constexpr u32 bytes = empty + STAGES * PARTS * 8;
};
static_assert(LatentLayout::bytes + 1023 <= SHARED_BYTES, "what the host asks for");

// Named barriers between the two MMA warpgroups.
constexpr int TOLD = 7, HEARD = 8;

__device__ __forceinline__ constexpr int first_panel(int part) { return part * HALF_PANELS; }
__device__ __forceinline__ constexpr int panels_of(int part) { return part == PARTS - 1 ? TILE_PANELS - first_panel(part) : HALF_PANELS; }
__device__ __forceinline__ u32 full_at(u32 base, int stage, int part) { return base + LatentLayout::full + 8 * (stage * PARTS + part); }
__device__ __forceinline__ u32 empty_at(u32 base, int stage, int part) { return base + LatentLayout::empty + 8 * (stage * PARTS + part); }
__device__ __forceinline__ u32 tile_at(u32 base, int stage) { return base + LatentLayout::k + stage * (TILE_PANELS * PANEL_BYTES); }

// One thread of each warp signals to all thread blocks that copy into this one that its warp has finished reading a part of a tile.
__device__ __forceinline__ void let_go(u32 base, int stage, int part) {
  if (CLUSTER == 1) {
    barrier_arrive(empty_at(base, stage, part));
  } else {
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) barrier_arrive_in(empty_at(base, stage, part), block);
  }
}

#if APART
// Thread blocks of a cluster work on the same keys, and on consecutive tokens.
struct Work : Item {
  int first_token, last_token;  // of the sequence's query; the first may lie behind the last
  int packed_token;             // the packed token of first_token
  int rows, group, first_head, window;  // rows: that are copied
  float inner;
  int before;                   // keys of the context

  __device__ __forceinline__ bool read(const Arguments& arguments) {
    static_cast<Item&>(*this) = arguments.items[blockIdx.x];
    first_head = head, group = arguments.group, rows = arguments.rows, window = arguments.window, inner = arguments.inner;
    tile = tile * CLUSTER + (CLUSTER > 1 ? blockIdx.y : 0);
    const Rows tokens(arguments, *this);
    first_token = tokens.first, last_token = tokens.last;
    packed_token = token_start + first_token;
    before = kv_len - query_len;
    return true;
  }
};
#else
// Thread blocks of a cluster work on the same tokens and keys, and differ only in heads.
struct Work {
  static constexpr int rows = USED, group = HEADS, head = 0, token_start = 0, window = 0;  // group: query heads of a token in a tile
  static constexpr float inner = 0.0f;
  int seq, kv_len;
  int first_token, last_token;  // of the sequence's query
  int packed_token;             // the packed token of first_token
  int first_head;
  int before;                   // keys of the context
  int first, last;              // tiles of keys
  bool whole;                   // no other block has keys of these rows
  long long slot;               // number of the tile's first row among partial results

  // Return whether there is any work.
  __device__ __forceinline__ bool read(const Given& arguments) {
    const int groups = arguments.tiles / CLUSTER, number = blockIdx.x / groups;
    const int tile = blockIdx.x % groups * CLUSTER + (CLUSTER > 1 ? blockIdx.y : 0), parts = arguments.heads / HEADS;
    const int* chunk = arguments.chunks + 8 * number;
    const int query_len = chunk[3];
    seq = chunk[0], kv_len = chunk[1];
    first_token = tile / parts * TOKENS;
    if (seq < 0 || first_token >= query_len) return false;
    last_token = min(first_token + TOKENS, query_len) - 1;
    packed_token = chunk[2] + first_token;
    first_head = tile % parts * HEADS;
    before = kv_len - query_len;
    first = chunk[4], last = (min(chunk[5], before + last_token + 1) + KEYS - 1) / KEYS;
    whole = chunk[7] == 1;
    slot = (static_cast<long long>(number) * arguments.tiles + tile) * arguments.partial_rows;
    return true;
  }
};
#endif

}  // namespace hopper
