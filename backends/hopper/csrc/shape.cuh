// What one compilation is for, how a block of threads is laid out, and what it is launched with.
//
// Constants given by the compiler's command line: HALF_IS_BF16, HEAD_DIM, V_HEAD_DIM, GROUPS (warpgroups that multiply), KEYS (of a
// tile), STAGES (tiles of keys, and of values), QUERY_STAGES (tiles of queries), BOX (slots that one copy takes), BLOCK_SIZE (slots of a
// block; 0: this step's own keys are read), TURNS, SOFTCAP, WINDOW, SHARED_BYTES (what the launch asks for).
#pragma once

#include "wgmma.cuh"

namespace hopper {

constexpr int PANEL = 64;  // elements of a row of 128 bytes
constexpr int ROWS = 64 * GROUPS;
constexpr int K_PANELS = (HEAD_DIM + PANEL - 1) / PANEL, V_PANELS = (V_HEAD_DIM + PANEL - 1) / PANEL;
constexpr u32 Q_BYTES = ROWS * K_PANELS * 128;
constexpr u32 K_BYTES = KEYS * K_PANELS * 128, V_BYTES = KEYS * V_PANELS * 128;
constexpr int BOXES = KEYS / BOX;
static_assert(KEYS % 16 == 0 && KEYS % BOX == 0 && BOX % 8 == 0 && HEAD_DIM % 16 == 0 && V_HEAD_DIM % 16 == 0, "whole products");

// Where an operand of a product lies: the low half of its descriptor, which changes from product to product.
//
// leading: bytes from one panel to the next, for an operand whose rows are summed over (the value); without meaning otherwise.
// In a cluster, bits of an address beyond the 18 that the descriptor has room for are the block's number.
__device__ __forceinline__ u32 operand(u32 address, u32 leading) { return (leading >> 4) << 16 | (address & 0x3ffff) >> 4; }

// One warpgroup copies, the others multiply. Registers of a thread: what a multiprocessor's 65,536 leave.
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COPY_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int PRODUCT_REGISTERS = GROUPS == 3 ? 160 : 232;
constexpr bool PAGED = BLOCK_SIZE > 0;

// The unit of work: a tile of query rows and the tiles of keys [first, last) that it attends to.
//
// A row is one query head of one token: the heads that share a kv head are neighbours, so keys are read once for all of them. A tile
// holds whole tokens; rows that are left over idle.
struct Item {
  int token_start;  // packed token of the sequence's first query
  int query_len;
  int kv_len;
  int seq;      // row of the block table
  int tile;     // its tokens: tile * Arguments::tokens and on
  int first;    // tiles of keys
  int last;
  int splits;   // programs that share the rows; 1: nobody does
  int split;    // which of them this is
  int partial;  // number of the first split's partial result, of one kv head
  int ticket;   // number of the counter that those programs share, of one kv head
  int head;     // the kv head, filled in when an item is shown; negative where there is no item any more
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
  int num_items;  // of each kv head
  int num_kv_heads;
  int section;    // kv heads whose items are taken together, so that their keys and values stay in the L2 cache
  int group;      // query heads of a kv head
  int tokens;     // of a tile of queries: ROWS / group
  int window;
  float scale;  // of scores, to the base-2 domain; with SOFTCAP: of what tanh gives
  float inner;  // with SOFTCAP: of scores before tanh
};

// Where things lie in shared memory, in bytes from a multiple of 1,024.
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

// An element of queries, keys, values and answers.
struct Half {
  unsigned short bits;
};

// An item as the copying warp shows it.
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

// Named barriers: 0 is __syncthreads'.
constexpr int TURN = 1;   // one for each warpgroup that multiplies: its turn at the tensor cores
constexpr int ALONE = 4;  // one for each: its own threads

}  // namespace hopper
