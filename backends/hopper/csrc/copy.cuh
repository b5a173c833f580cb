// The warpgroup that copies: one warp takes items from the queue and copies keys and values, three copy queries.
#pragma once

#include "shape.cuh"

namespace hopper {

// Copies tiles of keys and values, lane by lane one box of BOX slots and 64 elements.
static_assert(BOXES * (K_PANELS > V_PANELS ? K_PANELS : V_PANELS) <= 32, "a lane for each box");

struct TileCopy {
  const Arguments& arguments;
  const Item& item;
  int head, lane;

  // Which block a lane's box of a tile lies in: asked for one tile ahead, since the answer comes from memory.
  __device__ __forceinline__ int block(int tile) const {
    const int slot = tile * KEYS + lane % BOXES * BOX;
    if (!PAGED || tile < item.first || slot >= item.kv_len) return 0;
    return arguments.block_table[item.seq * arguments.table_row + slot / arguments.block_size];
  }

  template <int PANELS>
  __device__ __forceinline__ void start(u32 to, u32 barrier, const TensorMap& map, int tile, int block) const {
    const int key = tile * KEYS, box = lane % BOXES, panel = lane / BOXES;
    const int boxes = PAGED ? min(BOXES, (item.kv_len - key + BOX - 1) / BOX) : BOXES;
    if (lane == 0) barrier_expect(barrier, boxes * PANELS * BOX * 128);
    __syncwarp();
    if (box >= boxes || panel >= PANELS) return;
    const int slot = key + box * BOX;
    copy_box(to + panel * (KEYS * 128) + box * (BOX * 128), map, panel * PANEL, PAGED ? slot % arguments.block_size : item.token_start + slot,
             head, block, barrier);
  }
};

// Where an item of the queue lies: sections of kv heads one after the other, in each the longest items first, head by head.
__device__ __forceinline__ int item_of(const Arguments& arguments, int index, int& head) {
  const int whole = arguments.num_items * arguments.section, first = index / whole * arguments.section;
  const int heads = min(arguments.section, arguments.num_kv_heads - first), within = index % whole;
  head = first + within % heads;
  return within / heads;
}

// Takes items one by one, the longest first, until there are none; each program begins with the one of its own number.
__device__ __forceinline__ void copy_keys_and_values(u32 base, const TensorMap& key_map, const TensorMap& value_map,
                                                     const Arguments& arguments, int lane) {
  const int total = arguments.num_items * arguments.num_kv_heads;
  // A lane's word of an item; the last lane's is the kv head, negative behind the end.
  const auto fetch = [&](int index) {
    if (index >= total) return lane == ITEM_INTS - 1 ? -1 : 0;
    int head;
    const int place = item_of(arguments, index, head);
    if (lane == ITEM_INTS - 1) return head;
    return lane < ITEM_INTS ? reinterpret_cast<const int*>(arguments.items + place)[lane] : 0;
  };
  Ring<2> shown;
  Ring<STAGES> k, v;
  int word = fetch(blockIdx.x);
  while (true) {
    Item item;
#pragma unroll
    for (int i = 0; i < ITEM_INTS; ++i) reinterpret_cast<int*>(&item)[i] = __shfl_sync(~0u, word, i);
    const int head = item.head;
    barrier_wait(base + Layout::item_empty + 8 * shown.index, shown.parity ^ 1);
    const u32 at = base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)) + 4 * lane;
    if (lane < ITEM_INTS) asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(base + Layout::item_full + 8 * shown.index);
    shown.advance();
    if (head < 0) break;

    const TileCopy copy{arguments, item, head, lane};
    const auto copy_k = [&](int tile, int block) {
      barrier_wait(base + Layout::k_empty + 8 * k.index, k.parity ^ 1);
      copy.start<K_PANELS>(base + Layout::k + k.index * K_BYTES, base + Layout::k_full + 8 * k.index, key_map, tile, block);
      k.advance();
    };
    const auto copy_v = [&](int tile, int block) {
      barrier_wait(base + Layout::v_empty + 8 * v.index, v.parity ^ 1);
      copy.start<V_PANELS>(base + Layout::v + v.index * V_BYTES, base + Layout::v_full + 8 * v.index, value_map, tile, block);
      v.advance();
    };
    int next = 0;
    if (lane == 0) next = atomicAdd(arguments.queue, 1) + gridDim.x;
    int block = copy.block(item.last - 1), below = copy.block(item.last - 2);
    copy_k(item.last - 1, block);
    word = fetch(__shfl_sync(~0u, next, 0));
#pragma unroll 1
    for (int tile = item.last - 1; tile > item.first; --tile) {
      const int further = copy.block(tile - 2);
      copy_k(tile - 1, below);
      copy_v(tile, block);
      block = below;
      below = further;
    }
    copy_v(item.first, block);
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

// The queries of each item, as rows of the tile; rows past the sequence's end are zero.
__device__ __forceinline__ void copy_queries(u32 base, const Arguments& arguments, int thread) {
  constexpr int CHUNKS = HEAD_DIM / 8, PADDED = K_PANELS * 8;  // 16-byte pieces of a row; what is past its end is zero
  Ring<2> shown;
  Ring<QUERY_STAGES> q;
  while (true) {
    barrier_wait(base + Layout::item_full + 8 * shown.index, shown.parity);
    const Item item = read_item(base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)));
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(base + Layout::item_empty + 8 * shown.index);
    shown.advance();
    if (item.head < 0) break;
    barrier_wait(base + Layout::q_empty + 8 * q.index, q.parity ^ 1);
    const Half* from = static_cast<const Half*>(arguments.q) + item.token_start * arguments.q_token +
                       static_cast<long long>(item.head) * arguments.group * arguments.q_head;
    const u32 to = base + Layout::q + q.index * Q_BYTES;
#pragma unroll 4
    for (int i = thread; i < ROWS * PADDED; i += 32 * QUERY_WARPS) {
      const int row = i / PADDED, chunk = i % PADDED;
      const int place = item.tile * ROWS + row, token = token_of(arguments, place);
      const bool present = token < item.query_len && chunk < CHUNKS;
      const Half* source = from;
      if (present) source += token * arguments.q_token + (place - token * arguments.group) * arguments.q_head + chunk * 8;
      copy_16(to + (chunk / 8) * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), source, present);
    }
    wait_copies();
    fence_async();
    barrier_arrive(base + Layout::q_full + 8 * q.index);
    q.advance();
  }
}

}  // namespace hopper
