// Fragments that wgmma leaves, exchanged among the threads of a row so that they can be stored in pieces of 16 bytes.
#pragma once

#include "ptx.cuh"

namespace hopper {

// The four threads of a row exchange pieces, so that each stores 16 bytes: 4 x 4 words change places across and down.
__device__ __forceinline__ uint4 exchange(u32 a, u32 b, u32 c, u32 d, int lane) {
  const bool upper = lane & 2, odd = lane & 1;
  const u32 a2 = __shfl_xor_sync(~0u, upper ? a : c, 2), b2 = __shfl_xor_sync(~0u, upper ? b : d, 2);
  const u32 w0 = upper ? a2 : a, w1 = upper ? b2 : b, w2 = upper ? c : a2, w3 = upper ? d : b2;
  const u32 x = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), y = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  return odd ? make_uint4(x, w1, y, w3) : make_uint4(w0, x, w2, y);
}

}  // namespace hopper
