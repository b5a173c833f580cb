// Routing for grouped GEMMs (MoE): pairs of token and slot sorted by expert, in tiles ("lots") of up to MOST_ROWS pairs of one expert.
// Each thread block finds them by itself, in shared memory, which is faster than another launch.
#pragma once

#include "ptx.cuh"

namespace fused {

constexpr int MOST_PAIRS = MOST_TOKENS * SLOTS;
constexpr int MOST_TOUCHED = MOST_PAIRS < EXPERTS ? MOST_PAIRS : EXPERTS;
constexpr int MOST_LOTS = (MOST_PAIRS + MOST_TOUCHED * (MOST_ROWS - 1)) / MOST_ROWS;

// Output of the router: the experts of each token, and their weights.
struct Routed {
  const u32* experts;    // [tokens, SLOTS]
  const float* weights;  // [tokens, SLOTS]

  // pair: token * SLOTS + slot
  __device__ __forceinline__ u32 expert_of(int pair) const { return load_stored(experts + pair); }
  __device__ __forceinline__ float weight_of(int pair) const {
    return __uint_as_float(load_stored(reinterpret_cast<const u32*>(weights) + pair));
  }
};

struct Lots {
  int count;
  float weights[GATHER ? 1 : MOST_PAIRS];  // at each position: weight of the expert's output
  u16 pairs[MOST_PAIRS];        // at each position: pair p, which is slot p % SLOTS of token p / SLOTS
  u16 places[MOST_LOTS + 1];    // start of each lot, and end of the last
  u16 experts[MOST_LOTS];       // expert of each lot
  u16 expert_of[MOST_PAIRS];    // expert of each pair
  u16 rank_of[MOST_PAIRS];      // rank of each pair: number of the expert's pairs before it
  u16 starts[EXPERTS + 1];      // position of each expert's first pair; before that is known, its number of pairs
  u16 firsts[EXPERTS + 1];      // index of each expert's first lot
};
static_assert(sizeof(Lots) <= LOTS_BYTES);

__device__ __forceinline__ u32 lots_of(u32 pairs) { return (pairs + MOST_ROWS - 1) / MOST_ROWS; }

// Count each expert's pairs, and rank each pair among them. Called by one warp.
__device__ __forceinline__ void rank_pairs(Lots& lots, int pairs, int lane) {
  for (int first = 0; first < pairs; first += 32) {
    const int pair = first + lane, expert = pair < pairs ? lots.expert_of[pair] : EXPERTS;  // EXPERTS marks lanes without a pair
    const u32 alike = __match_any_sync(0xffffffff, expert), before = alike & ((1u << lane) - 1);
    const int known = lots.starts[expert];
    __syncwarp();
    if (pair < pairs) lots.rank_of[pair] = known + __popc(before);
    if (before == 0) lots.starts[expert] = known + __popc(alike);
    __syncwarp();
  }
}

// Compute the start of each expert's pairs and lots from their counts. Called by one warp.
__device__ __forceinline__ void place_experts(Lots& lots, int lane) {
  constexpr int each = (EXPERTS + 31) / 32;
  u32 own = 0;  // pairs in the lower half, and lots in the upper half
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int expert = lane * each + i;
    if (expert < EXPERTS) own += lots.starts[expert] | lots_of(lots.starts[expert]) << 16;
  }
  u32 before = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(0xffffffff, before, distance);
    if (lane >= distance) before += other;
  }
  before -= own;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int expert = lane * each + i;
    if (expert >= EXPERTS) break;
    const u32 pairs = lots.starts[expert];
    lots.starts[expert] = before & 0xffff, lots.firsts[expert] = before >> 16;
    before += pairs | lots_of(pairs) << 16;
  }
  if (lane == 31) lots.starts[EXPERTS] = before & 0xffff, lots.firsts[EXPERTS] = lots.count = before >> 16;
}

// Find all lots. Called by all threads of a thread block.
__device__ __forceinline__ void find_lots(Lots& lots, const Routed& routed, int pairs, int threads) {
  const int thread = threadIdx.x;
#if MOST_ROWS == 1  // one token: no expert has two pairs
  for (int pair = thread; pair < pairs; pair += threads) {
    lots.experts[pair] = routed.expert_of(pair), lots.pairs[pair] = lots.places[pair] = pair;
    if (!GATHER) lots.weights[pair] = routed.weight_of(pair);
  }
  if (thread == 0) lots.count = lots.places[pairs] = pairs;
#else
  for (int pair = thread; pair < pairs; pair += threads) lots.expert_of[pair] = routed.expert_of(pair);
  for (int expert = thread; expert <= EXPERTS; expert += threads) lots.starts[expert] = 0;
  __syncthreads();
  if (thread < 32) {
    rank_pairs(lots, pairs, thread);
    place_experts(lots, thread);
  }
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += threads) {
    const int place = lots.starts[lots.expert_of[pair]] + lots.rank_of[pair];
    lots.pairs[place] = pair;
    if (!GATHER) lots.weights[place] = routed.weight_of(pair);
  }
  for (int expert = thread; expert < EXPERTS; expert += threads) {
    const int first = lots.firsts[expert];
    for (int lot = first; lot < lots.firsts[expert + 1]; ++lot) {
      lots.experts[lot] = expert, lots.places[lot] = lots.starts[expert] + (lot - first) * MOST_ROWS;
    }
  }
  if (thread == 0) lots.places[lots.count] = pairs;
#endif
  __syncthreads();
}

}  // namespace fused
