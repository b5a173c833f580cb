// The warpgroup that copies: one warp takes items from the queue and copies keys, one copies values, two copy queries.
#pragma once

#include "shape.cuh"

namespace hopper {

// Copies tiles of keys or of values, lane by lane one box of BOX slots and 64 elements. Keys and values have a warp each: a warp starts
// one box after the other, which for small blocks takes longer than the products.
template <int PANELS>
struct TileCopy {
  static_assert(BOXES * PANELS <= 32, "a lane for each box");
  static constexpr u32 BYTES = KEYS * PANELS * 128;
  const TensorMap& map;
  u32 buffers, full, empty;  // of the ring
  int lane;
  Ring<STAGES> ring;

  // Which block a lane's box of a tile lies in: asked for one tile ahead, since the answer comes from memory.
  __device__ __forceinline__ int block(const Arguments& arguments, const Item& item, int tile) const {
    const int slot = tile * KEYS + lane % BOXES * BOX;
    if (!PAGED || tile < item.first || slot >= item.kv_len) return 0;
    return arguments.block_table[item.seq * arguments.table_row + slot / (PAGED ? BLOCK_SIZE : 1)];
  }

  __device__ __forceinline__ void start(const Item& item, int tile, int block) {
    barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
    const int key = tile * KEYS, box = lane % BOXES, panel = lane / BOXES;
    const int boxes = PAGED ? min(BOXES, (item.kv_len - key + BOX - 1) / BOX) : BOXES;
    const u32 barrier = full + 8 * ring.index;
    if (lane == 0) barrier_expect(barrier, boxes * PANELS * BOX * 128);
    __syncwarp();
    if (box < boxes && panel < PANELS) {
      const int slot = key + box * BOX;
      copy_box(buffers + ring.index * BYTES + panel * (KEYS * 128) + box * (BOX * 128), map, panel * PANEL,
               PAGED ? slot % (PAGED ? BLOCK_SIZE : 1) : item.token_start + slot, item.head, block, barrier);
    }
    ring.advance();
  }
};

// Where an item of the queue lies: sections of kv heads one after the other, in each the longest items first, head by head.
__device__ __forceinline__ int item_of(const Arguments& arguments, int index, int& head) {
  const int whole = arguments.num_items * arguments.section, first = index / whole * arguments.section;
  const int heads = min(arguments.section, arguments.num_kv_heads - first), within = index % whole;
  head = first + within % heads;
  return within / heads;
}

// Takes items one by one, the longest first, until there are none, shows them to the other warps, and copies their keys. Each program
// begins with the item of its own number.
__device__ __forceinline__ void copy_keys(u32 base, const TensorMap& map, const Arguments& arguments, int lane) {
  const int total = arguments.num_items * arguments.num_kv_heads;
  // A lane's word of an item; the last lane's is the kv head, negative behind the end.
  const auto fetch = [&](int index) {
    if (index >= total) return lane == ITEM_INTS - 1 ? -1 : 0;
    int head;
    const int place = item_of(arguments, index, head);
    if (lane == ITEM_INTS - 1) return head;
    return lane < ITEM_INTS ? reinterpret_cast<const int*>(arguments.items + place)[lane] : 0;
  };
  TileCopy<K_PANELS> copy{map, base + Layout::k, base + Layout::k_full, base + Layout::k_empty, lane};
  Ring<2> shown;
  int word = fetch(blockIdx.x);
  while (true) {
    Item item;
#pragma unroll
    for (int i = 0; i < ITEM_INTS; ++i) reinterpret_cast<int*>(&item)[i] = __shfl_sync(~0u, word, i);
    barrier_wait(base + Layout::item_empty + 8 * shown.index, shown.parity ^ 1);
    const u32 at = base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)) + 4 * lane;
    if (lane < ITEM_INTS) asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(base + Layout::item_full + 8 * shown.index);
    shown.advance();
    if (item.head < 0) break;
    int next = 0;
    if (lane == 0) next = atomicAdd(arguments.queue, 1) + gridDim.x;
    int block = copy.block(arguments, item, item.last - 1);
#pragma unroll 1
    for (int tile = item.last - 1; tile >= item.first; --tile) {
      const int below = copy.block(arguments, item, tile - 1);
      copy.start(item, tile, block);
      block = below;
      if (tile == item.last - 1) word = fetch(__shfl_sync(~0u, next, 0));
    }
  }
  // The last program to end leaves the queue as it found it.
  if (lane == 0) {
    __threadfence();
    if (atomicAdd(arguments.queue + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      arguments.queue[0] = 0;
      arguments.queue[1] = 0;
    }
  }
}

// Waits for the next item, and lets go of it when it is read. warp_leads: one thread of each warp.
__device__ __forceinline__ Item next_item(u32 base, Ring<2>& shown, bool warp_leads) {
  barrier_wait(base + Layout::item_full + 8 * shown.index, shown.parity);
  const Item item = read_item(base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)));
  __syncwarp();
  if (warp_leads) barrier_arrive(base + Layout::item_empty + 8 * shown.index);
  shown.advance();
  return item;
}

__device__ __forceinline__ void copy_values(u32 base, const TensorMap& map, const Arguments& arguments, int lane) {
  TileCopy<V_PANELS> copy{map, base + Layout::v, base + Layout::v_full, base + Layout::v_empty, lane};
  Ring<2> shown;
  while (true) {
    const Item item = next_item(base, shown, lane == 0);
    if (item.head < 0) break;
    int block = copy.block(arguments, item, item.last - 1);
#pragma unroll 1
    for (int tile = item.last - 1; tile >= item.first; --tile) {
      const int below = copy.block(arguments, item, tile - 1);
      copy.start(item, tile, block);
      block = below;
    }
  }
}

// The queries of each item, as rows of the tile; rows past the sequence's end are zero.
__device__ __forceinline__ void copy_queries(u32 base, const Arguments& arguments, int thread) {
  constexpr int CHUNKS = HEAD_DIM / 8, PADDED = K_PANELS * 8;  // 16-byte pieces of a row; what is past its end is zero
  constexpr int COPIERS = 32 * QUERY_WARPS / PADDED;            // rows copied at a time
  const int chunk = thread % PADDED, first = thread / PADDED;
  Ring<2> shown;
  Ring<QUERY_STAGES> q;
  while (true) {
    const Item item = next_item(base, shown, thread % 32 == 0);
    if (item.head < 0) break;
    barrier_wait(base + Layout::q_empty + 8 * q.index, q.parity ^ 1);
    const Half* from = static_cast<const Half*>(arguments.q) + item.token_start * arguments.q_token +
                       static_cast<long long>(item.head) * arguments.group * arguments.q_head + chunk * 8;
    const u32 to = base + Layout::q + q.index * Q_BYTES + (chunk / 8) * (ROWS * 128);
    if (first < COPIERS) {
#pragma unroll 8
      for (int row = first; row < ROWS; row += COPIERS) {
        const int place = item.tile * ROWS + row, token = token_of(arguments, place);
        const bool present = token < item.query_len && chunk < CHUNKS;
        const Half* source = from;
        if (present) source += token * arguments.q_token + (place - token * arguments.group) * arguments.q_head;
        copy_16(to + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), source, present);
      }
    }
    wait_copies();
    fence_async();
    barrier_arrive(base + Layout::q_full + 8 * q.index);
    q.advance();
  }
}

}  // namespace hopper
