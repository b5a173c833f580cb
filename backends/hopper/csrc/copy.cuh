// The warpgroup that copies: one warp takes items from the queue and copies keys and values, three copy queries.
#pragma once

#include "shape.cuh"

namespace hopper {

// One tile of keys or of values, by all lanes of a warp: lane by lane one box of BOX slots and 64 elements.
template <int PANELS>
__device__ __forceinline__ void copy_tile(u32 to, u32 barrier, const TensorMap& map, const Arguments& arguments, const Item& item,
                                          int tile, int head, int lane) {
  const int key = tile * KEYS;
  const int boxes = PAGED ? min(BOXES, (item.kv_len - key + BOX - 1) / BOX) : BOXES;
  if (lane == 0) barrier_expect(barrier, boxes * PANELS * BOX * 128);
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < BOXES * PANELS; i += 32) {
    const int box = i % BOXES, panel = i / BOXES;
    if (box >= boxes) continue;
    const u32 place = to + panel * (KEYS * 128) + box * (BOX * 128);
    int slot = key + box * BOX, block = 0;
    if (PAGED) {
      block = arguments.block_table[item.seq * arguments.table_row + slot / arguments.block_size];
      slot %= arguments.block_size;
    } else {
      slot += item.token_start;
    }
    copy_box(place, map, panel * PANEL, slot, head, block, barrier);
  }
}

// Takes items one by one, the longest first, until there are none; each program begins with the one of its own number.
__device__ __forceinline__ void copy_keys_and_values(u32 base, const TensorMap& key_map, const TensorMap& value_map,
                                                     const Arguments& arguments, int lane) {
  const int total = arguments.num_items * arguments.num_kv_heads;
  Ring<2> shown;
  Ring<STAGES> k, v;
  int index = blockIdx.x;
  while (true) {
    int next = 0;
    if (lane == 0 && index < total) next = atomicAdd(arguments.queue, 1) + gridDim.x;
    // Show the item to the other warps; one without rows ends them.
    Item item;
    const int head = index < total ? index / arguments.num_items : 0;
    int word = 0;
    if (lane < ITEM_INTS && index < total) {
      word = reinterpret_cast<const int*>(arguments.items + (index - head * arguments.num_items))[lane];
    }
    if (lane == ITEM_INTS - 1) word = index < total ? head : -1;
#pragma unroll
    for (int i = 0; i < ITEM_INTS; ++i) reinterpret_cast<int*>(&item)[i] = __shfl_sync(~0u, word, i);
    barrier_wait(base + Layout::item_empty + 8 * shown.index, shown.parity ^ 1);
    if (lane < ITEM_INTS) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)) + 4 * lane), "r"(word)
                   : "memory");
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(base + Layout::item_full + 8 * shown.index);
    shown.advance();
    if (index >= total) break;

    const auto copy_k = [&](int tile) {
      barrier_wait(base + Layout::k_empty + 8 * k.index, k.parity ^ 1);
      copy_tile<K_PANELS>(base + Layout::k + k.index * K_BYTES, base + Layout::k_full + 8 * k.index, key_map, arguments, item, tile,
                          head, lane);
      k.advance();
    };
    const auto copy_v = [&](int tile) {
      barrier_wait(base + Layout::v_empty + 8 * v.index, v.parity ^ 1);
      copy_tile<V_PANELS>(base + Layout::v + v.index * V_BYTES, base + Layout::v_full + 8 * v.index, value_map, arguments, item,
                          tile, head, lane);
      v.advance();
    };
    copy_k(item.last - 1);
#pragma unroll 1
    for (int tile = item.last - 1; tile > item.first; --tile) {
      copy_k(tile - 1);
      copy_v(tile);
    }
    copy_v(item.first);
    index = __shfl_sync(~0u, next, 0);
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
template <typename Half>
__device__ __forceinline__ void copy_queries(u32 base, const Arguments& arguments, int thread) {
  constexpr int CHUNKS = HEAD_DIM / 8, PADDED = K_PANELS * 8;  // 16-byte pieces of a row; what is past its end is zero
  Ring<2> shown;
  Ring<1> q;
  while (true) {
    barrier_wait(base + Layout::item_full + 8 * shown.index, shown.parity);
    int words[ITEM_INTS];
#pragma unroll
    for (int i = 0; i < ITEM_INTS; ++i) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i]) : "r"(base + Layout::items + shown.index * static_cast<u32>(sizeof(Item)) + 4 * i) : "memory");
    }
    const Item& item = *reinterpret_cast<const Item*>(words);
    const int head = words[ITEM_INTS - 1];
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(base + Layout::item_empty + 8 * shown.index);
    shown.advance();
    if (head < 0) break;
    barrier_wait(base + Layout::q_empty, q.parity ^ 1);
    const Half* from = static_cast<const Half*>(arguments.q) + item.token_start * arguments.q_token +
                       static_cast<long long>(head) * arguments.group * arguments.q_head;
#pragma unroll 4
    for (int i = thread; i < ROWS * PADDED; i += 32 * QUERY_WARPS) {
      const int row = i / PADDED, chunk = i % PADDED;
      const int place = item.tile * ROWS + row, token = place / arguments.group;
      const bool present = token < item.query_len && chunk < CHUNKS;
      const Half* source = from;
      if (present) source += token * arguments.q_token + (place - token * arguments.group) * arguments.q_head + chunk * 8;
      const u32 to = base + Layout::q + (chunk / 8) * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
      copy_16(to, source, present);
    }
    wait_copies();
    fence_async();
    barrier_arrive(base + Layout::q_full);
    q.advance();
  }
}

}  // namespace hopper
