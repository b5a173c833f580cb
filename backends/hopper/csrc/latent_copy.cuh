// The producer warps: the first copies queries, once. Each copies its parts of the keys and values, tile by tile.
#pragma once

#include "latent.cuh"

namespace hopper {

__device__ __forceinline__ void copy_latents(u32 base, const TensorMap& query_map, const TensorMap& key_map, const TensorMap& value_map,
                                             const Given& arguments, const Work& work, int warp, int lane) {
  if (warp == 0 && lane == 0) {
    barrier_expect(base + LatentLayout::q_full, K_PANELS * work.rows * 128);
#pragma unroll 1
    for (int panel = 0; panel < K_PANELS; ++panel) {
      copy_box(base + LatentLayout::q + panel * PANEL_BYTES, query_map, panel * PANEL, APART ? 0 : work.first_head, work.head, work.packed_token,
               base + LatentLayout::q_full);
    }
  }
  __syncwarp();
  // Of each part, this thread block copies every CLUSTER-th 64-column panel, to all thread blocks of the cluster.
  const int box = lane % BOXES, place = lane / BOXES * CLUSTER + (CLUSTER > 1 ? blockIdx.y : 0);
  const int* blocks = arguments.block_table + work.seq * arguments.table_row;
  // Block numbers are loaded one tile ahead to hide memory latency.
  const auto block_of = [&](int tile) {
    const int slot = tile * KEYS + box * BOX;
    return PAGED && tile < work.last && slot < work.kv_len ? blocks[slot / (PAGED ? BLOCK_SIZE : 1)] : 0;
  };
  Ring<STAGES> ring;
  int block = block_of(work.first);
#pragma unroll 1
  for (int tile = work.first; tile < work.last; ++tile) {
    const int below = block_of(tile + 1);
    const int key = tile * KEYS, slot = key + box * BOX, boxes = PAGED ? min(BOXES, (work.kv_len - key + BOX - 1) / BOX) : BOXES;
    const int row = PAGED ? slot % (PAGED ? BLOCK_SIZE : 1) : work.token_start + slot;
    // In the order in which the previous tile's parts are read and released.
#pragma unroll 1
    for (int i = warp; i < PARTS; i += COPY_WARPS) {
      const int part = (FIRST_PART + i) % PARTS, panel = first_panel(part) + place;
      const bool is_value = APART && part >= VALUE_PART;
      const TensorMap& map = is_value ? value_map : key_map;
      const int column = (panel - (is_value ? K_PANELS : 0)) * PANEL;
      const u32 barrier = full_at(base, ring.index, part);
      barrier_wait(empty_at(base, ring.index, part), ring.parity ^ 1);
      if (lane == 0) barrier_expect(barrier, boxes * panels_of(part) * BOX * 128);
      __syncwarp();
      if (box < boxes && place < panels_of(part)) {
        const u32 to = tile_at(base, ring.index) + panel * PANEL_BYTES + box * (BOX * 128);
        if (CLUSTER == 1) {
          copy_box(to, map, column, row, work.head, block, barrier);
        } else {
          copy_box_to(to, map, column, row, work.head, block, barrier, (1 << CLUSTER) - 1);
        }
      }
      __syncwarp();
    }
    block = below;
    ring.advance();
  }
}

}  // namespace hopper
