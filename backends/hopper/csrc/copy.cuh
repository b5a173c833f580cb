// The producer warpgroup: one warp takes items from the queue and copies keys, one copies values, one copies queries.
#pragma once

#include "shape.cuh"

namespace hopper {

// Copies tiles of keys or of values; each lane copies one box of BOX slots x 64 elements. Keys and values have separate warps, because a
// warp issues its boxes one after the other, which for small blocks takes longer than the MMAs.
template <int PANELS>
struct TileCopy {
  static_assert(BOXES * PANELS <= 32, "a lane for each box");
  static constexpr u32 BYTES = KEYS * PANELS * 128;
  const TensorMap& map;
  u32 buffers, full, empty;  // of the ring
  int lane;
  Ring<STAGES> ring;

  // Block that contains a lane's box of a tile, loaded one tile ahead to hide memory latency.
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

// Prefetches the items to L2: each program some lines, with one lane for each.
__device__ __forceinline__ void prefetch_items(const Arguments& arguments, int lane) {
  const long long line = (blockIdx.x + static_cast<long long>(gridDim.x) * lane) * 128;
  if (line < arguments.num_items * 4ll * ITEM_INTS) prefetch_line(reinterpret_cast<const char*>(arguments.items) + line);
}

// Takes items, the longest first, until the queue is empty, publishes them to the other warps, and copies their keys. Each program begins
// with the item that has its own index.
__device__ __forceinline__ void copy_keys(u32 base, const TensorMap& map, const Arguments& arguments, int lane) {
  // A lane's word of an item. The last lane's is the kv head, negative after the end of the queue.
  const auto fetch = [&](int index) {
    if (index >= arguments.num_items) return lane == ITEM_INTS - 1 ? -1 : 0;
    return lane < ITEM_INTS ? reinterpret_cast<const int*>(arguments.items + index)[lane] : 0;
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
    if (lane < ITEM_INTS) store_word(at, word);
    __syncwarp();
    if (lane == 0) barrier_arrive(base + Layout::item_full + 8 * shown.index);
    shown.advance();
    if (item.head < 0) break;
    // The next item is taken when this one is nearly copied: taken earlier, a program with a long item would take another long one.
    const int asking = min(item.last - 1, item.first + 1);
    int next = 0, block = copy.block(arguments, item, item.last - 1);
#pragma unroll 1
    for (int tile = item.last - 1; tile >= item.first; --tile) {
      const int below = copy.block(arguments, item, tile - 1);
      if (tile == asking && lane == 0) next = atomicAdd(arguments.queue, 1) + gridDim.x;
      copy.start(item, tile, block);
      block = below;
    }
    word = fetch(__shfl_sync(~0u, next, 0));
  }
  // The last program to finish resets the queue.
  if (lane == 0) {
    __threadfence();
    if (atomicAdd(arguments.queue + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      arguments.queue[0] = 0;
      arguments.queue[1] = 0;
    }
  }
}

// Waits for the next item, and releases its buffer after reading. warp_leads: one thread per warp.
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

// Copies each item's queries: all heads that share the kv head, of all tokens to which its rows belong. Tokens of the next sequence may be
// included; their rows are computed but not stored.
__device__ __forceinline__ void copy_queries(u32 base, const TensorMap& map, const Arguments& arguments, int lane) {
  Ring<2> shown;
  Ring<QUERY_STAGES> q;
  while (true) {
    const Item item = next_item(base, shown, lane == 0);
    if (item.head < 0) break;
    barrier_wait(base + Layout::q_empty + 8 * q.index, q.parity ^ 1);
    if (lane == 0) {
      const u32 to = base + Layout::q + q.index * Q_BYTES, barrier = base + Layout::q_full + 8 * q.index;
      const int first = Rows(arguments, item).first;
      barrier_expect(barrier, arguments.tokens * arguments.group * K_PANELS * 128);
#pragma unroll
      for (int panel = 0; panel < K_PANELS; ++panel) {
        copy_box(to + panel * (QUERY_ROWS * 128), map, panel * PANEL, 0, item.head, item.token_start + first, barrier);
      }
    }
    __syncwarp();
    q.advance();
  }
}

}  // namespace hopper
