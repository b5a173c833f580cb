// Compile-time constants of a variant, shared memory layout of a thread block, and kernel arguments.
//
// Constants set on the compiler's command line: HALF_IS_BF16, HEAD_DIM, V_HEAD_DIM, GROUPS (MMA warpgroups), KEYS (per tile), STAGES (tiles
// of keys, and of values), QUERY_STAGES (tiles of queries), QUERY_PADDING (rows of shared memory after a tile of queries), BOX (slots per copy),
// BLOCK_SIZE (slots per block; 0 means this step's own keys), TURNS, SOFTCAP, WINDOW, SHARED_BYTES (dynamic shared memory of the launch).
#pragma once

#include "wgmma.cuh"

namespace hopper {

constexpr int PANEL = 64;  // elements of a row of 128 bytes
constexpr int ROWS = 64 * GROUPS, QUERY_ROWS = ROWS + QUERY_PADDING;
constexpr int K_PANELS = (HEAD_DIM + PANEL - 1) / PANEL, V_PANELS = (V_HEAD_DIM + PANEL - 1) / PANEL;
constexpr u32 Q_BYTES = QUERY_ROWS * K_PANELS * 128;
constexpr u32 K_BYTES = KEYS * K_PANELS * 128, V_BYTES = KEYS * V_PANELS * 128;
constexpr int BOXES = KEYS / BOX;
constexpr int HALVES = V_HEAD_DIM > 256 ? 2 : 1, COLUMNS = V_HEAD_DIM / HALVES;  // of the value, each of another warpgroup
static_assert(KEYS % 16 == 0 && KEYS % BOX == 0 && BOX % 8 == 0 && HEAD_DIM % 16 == 0 && V_HEAD_DIM % 16 == 0, "whole products");
static_assert(QUERY_PADDING % 8 == 0, "panels begin where the swizzle pattern does");

// Location of an MMA operand: the low half of its matrix descriptor, which changes between MMAs.
//
// leading: bytes from one panel to the next, for an operand that is reduced over rows (the value); otherwise ignored.
// In a cluster, address bits above the descriptor's 18 are the thread block's number.
__device__ __forceinline__ u32 operand(u32 address, u32 leading) { return (leading >> 4) << 16 | (address & 0x3ffff) >> 4; }

// One warpgroup copies, the others run MMAs. Registers per thread are divided so that the SM's 65,536 suffice.
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COPY_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int PRODUCT_REGISTERS = GROUPS == 3 ? 160 : 232;
constexpr bool PAGED = BLOCK_SIZE > 0;

// A unit of work: a tile of query rows and the key tiles [first, last) that it attends to.
//
// A row is one query head of one token. Heads that share a kv head are adjacent, so keys are read once for all of them. A tile may begin and
// end within a token; if shared memory has no space for the rest of that token, a tile holds complete tokens and its last rows are idle.
struct Item {
  int token_start;  // packed token of the sequence's first query
  int query_len;
  int kv_len;
  int seq;      // row of the block table
  int tile;     // its rows: tile * Arguments::rows and on
  int first;    // tiles of keys
  int last;
  int splits;   // programs that share the rows; 1: nobody does
  int split;    // which of them this is
  int partial;  // number of the first split's partial result, and of the counter that those programs share
  int head;     // the kv head; negative after the last item
};
constexpr int ITEM_INTS = sizeof(Item) / 4;

struct Arguments {
  void* out;
  float* lse;  // [heads, tokens], or null
  const Item* items;
  const int* block_table;
  const float* sinks;  // [heads], times log2(e), or null
  float* partials;
  int* tickets;  // of split tiles; all zero before and after
  int* queue;    // two counters, zero before and after: items handed out, programs that have ended
  long long out_token, out_head, lse_head, table_row;  // strides in elements
  int num_items;
  int group;   // query heads of a kv head
  int rows;    // of a tile of queries: ROWS, or those of complete tokens
  int tokens;  // that are copied for a tile
  int window;
  float scale;  // of scores, to the base-2 domain; with SOFTCAP: of what tanh gives
  float inner;  // with SOFTCAP: of scores before tanh
};

// The rows of an item: its first row is head `skipped` of token `first`, its last one belongs to token `last`.
struct Rows {
  int first, skipped, last;
  __device__ __forceinline__ Rows(const Arguments& arguments, const Item& item) {
    const int row = item.tile * arguments.rows;
    first = row / arguments.group;
    skipped = row - first * arguments.group;
    last = min((row + arguments.rows - 1) / arguments.group, item.query_len - 1);
  }
};

// Byte offsets in shared memory, from a multiple of 1,024.
struct Layout {
  static constexpr u32 q = 0;
  static constexpr u32 k = q + QUERY_STAGES * Q_BYTES;
  static constexpr u32 v = k + STAGES * K_BYTES;
  static constexpr u32 items = v + STAGES * V_BYTES;
  static constexpr u32 barriers = items + 2 * sizeof(Item);
  static constexpr u32 q_full = barriers, q_empty = q_full + QUERY_STAGES * 8;
  static constexpr u32 item_full = q_empty + QUERY_STAGES * 8, item_empty = item_full + 2 * 8;
  static constexpr u32 k_full = item_empty + 2 * 8, k_empty = k_full + STAGES * 8;
  static constexpr u32 v_full = k_empty + STAGES * 8, v_empty = v_full + STAGES * 8;
  static constexpr u32 bytes = v_empty + STAGES * 8;
};

// Element type of queries, keys, values and output.
struct Half {
  unsigned short bits;
};

// An item, as published by the copying warp.
__device__ __forceinline__ Item read_item(u32 at) {
  int words[ITEM_INTS];
#pragma unroll
  for (int i = 0; i < ITEM_INTS; ++i) words[i] = load_word(at + 4 * i);
  return *reinterpret_cast<const Item*>(words);
}

// A position in a ring of buffers, and the parity of its phase.
template <int SIZE>
struct Ring {
  int index = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == SIZE) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Named barriers; 0 is used by __syncthreads.
constexpr int TURN = 1;   // one for each warpgroup that multiplies: its turn at the tensor cores
constexpr int ALONE = 4;  // one for each: its own threads

}  // namespace hopper
