// What the router hands on: which experts a token passes, and what it gives to each.
#pragma once

#include "ptx.cuh"

namespace fused {

struct Routed {
  const u32* experts;    // [tokens, SLOTS]
  const float* weights;  // [tokens, SLOTS]

  // pair: token * SLOTS + slot
  __device__ __forceinline__ u32 expert_of(int pair) const { return load_stored(experts + pair); }
  __device__ __forceinline__ float weight_of(int pair) const {
    return __uint_as_float(load_stored(reinterpret_cast<const u32*>(weights) + pair));
  }
};

}  // namespace fused
