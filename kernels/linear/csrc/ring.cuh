// A ring of steps in shared memory that one thread fills, for warps that are side by side along the rows of W and share columns of x. x
// is in windows of MOST_ROWS rows of 128 bytes.
#pragma once

#define SCALED_CODES  // read by product.cuh
#include "product.cuh"

namespace fused {

constexpr int MULTIPLYING = WARPS * 32;
constexpr int PARTS = WARPS * TILES, BLOCK_ROWS = PARTS * 16;  // rows of W
constexpr int OUT = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS;       // columns of y
constexpr int ARRANGING = 256;                                 // threads of the kernel that permutes a row of x

// Return an element of a row, and the one PAIR_STEP after it.
__device__ __forceinline__ u32 pair_at(const u16* from) {
  return PAIR_STEP == 1 ? *reinterpret_cast<const u32*>(from) : from[0] | static_cast<u32>(from[PAIR_STEP]) << 16;
}

// Layout: layout of a step in shared memory. inputs: bytes of x, stored before W; slices: slices of W; bytes: bytes per slice.
template <typename Layout>
struct Ring {
  static constexpr int STEP_BYTES = (Layout::inputs + Layout::slices * Layout::bytes + 1023) / 1024 * 1024;  // rounded up to the period of wgmma's swizzle

  u32 start, full, empty;  // addresses of the stages and of two barriers per stage: the stage is filled, and has been read

  __device__ __forceinline__ u32 inputs(int stage) const { return start + stage * STEP_BYTES; }
  __device__ __forceinline__ u32 slice(int stage, int i) const { return inputs(stage) + Layout::inputs + i * Layout::bytes; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, WARPS);
    }
    barriers_ready();
  }
};

// Position of a reader or writer in a ring: the stage, and the parity of its round.
struct Place {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Steps {
  int first, end;
};

// Fill a ring step by step, by one thread. copier: loads the weights of a step, and then its x, which an earlier kernel writes. The first
// STAGES steps' weights are loaded before that kernel has ended.
template <typename Layout, typename Copier>
__device__ __forceinline__ void fill(const Ring<Layout>& ring, const Copier& copier, Steps steps) {
  for (int stage = 0; stage < STAGES && steps.first + stage < steps.end; ++stage) copier.weights(steps.first + stage, stage);
  wait_for_earlier();
  for (int stage = 0; stage < STAGES && steps.first + stage < steps.end; ++stage) copier.inputs(steps.first + stage, stage);
  Place at;
#pragma unroll 1
  for (int step = steps.first + STAGES; step < steps.end; ++step, at.advance()) {
    barrier_wait(ring.empty + 8 * at.stage, at.parity);
    copier.weights(step, at.stage);
    copier.inputs(step, at.stage);
  }
}

}  // namespace fused
