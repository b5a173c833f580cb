// The work list of a step whose lengths only the device knows: decode and verification, planned anew before each replay of a graph.
//
// One block of threads. A unit is a tile of query rows of one sequence; those with many keys are cut, so that all items together are a
// few for each program. No item is much longer than another, so their order does not matter.
#include "item.cuh"

using hopper::Item;

constexpr int THREADS = 1024, WARPS = THREADS / 32;

// Splits of a unit of so many tiles of keys: the last program to arrive reads all partial results, each in about the time of a tile.
__device__ int most_splits(int length) { return max(static_cast<int>(1.4f * sqrtf(static_cast<float>(length))), 1); }

struct Step {
  const int* seq_lens;
  const int* query_start_loc;
  int units_of_seq, tokens, keys, window;

  // The tiles of keys [first, last) of a unit; none where its sequence is padding or has fewer tokens.
  __device__ Item unit(int number) const {
    Item item = {};
    item.seq = number / units_of_seq;
    item.tile = number % units_of_seq;
    item.kv_len = seq_lens[item.seq];
    item.token_start = query_start_loc[item.seq];
    item.query_len = query_start_loc[item.seq + 1] - item.token_start;
    const int token = item.tile * tokens, before = item.kv_len - item.query_len;
    if (item.kv_len <= 0 || token >= item.query_len) return item;
    const int sees = before + min(token + tokens, item.query_len);
    item.last = (sees + keys - 1) / keys;
    if (window > 0) item.first = max(before + token + 1 - window, 0) / keys;
    return item;
  }
};

// Sums over the block of threads of `value` in the threads before this one; `total`: of all.
__device__ int3 scan(int3 value, int3& total) {
  __shared__ int3 of_warp[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto within = [&](int x) {
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += other;
    }
    return x;
  };
  const int3 up_to = {within(value.x), within(value.y), within(value.z)};
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) of_warp[warp] = up_to;
  __syncthreads();
  int3 before = {up_to.x - value.x, up_to.y - value.y, up_to.z - value.z};
  total = {0, 0, 0};
  for (int i = 0; i < WARPS; ++i) {
    const int3 sum = of_warp[i];
    if (i < warp) before = {before.x + sum.x, before.y + sum.y, before.z + sum.z};
    total = {total.x + sum.x, total.y + sum.y, total.z + sum.z};
  }
  return before;
}

// programs: that run at a time; waves: items that each of them shall have about.
extern "C" __global__ void __launch_bounds__(THREADS)
    cut(Item* items, int* count, const int* seq_lens, const int* query_start_loc, int num_seqs, int units_of_seq, int tokens, int keys,
        int window, int heads, int programs, int waves) {
  const Step step{seq_lens, query_start_loc, units_of_seq, tokens, keys, window};
  const int units = num_seqs * units_of_seq;
  int3 all;
  int work = 0;
  for (int number = threadIdx.x; number < units; number += THREADS) {
    const Item item = step.unit(number);
    work += item.last - item.first;
  }
  scan({work, 0, 0}, all);
  const long long tiles = static_cast<long long>(all.x) * heads;
  const int each = static_cast<int>((tiles + programs - 1) / programs);
  const int run = max(max((each + waves - 1) / waves, min(each, 4)), 1);

  int3 done = {0, 0, 0};  // items, partial results, tickets
  for (int first = 0; first < units; first += THREADS) {
    const int number = first + threadIdx.x;
    Item item = {};
    if (number < units) item = step.unit(number);
    const int length = item.last - item.first;
    const int splits = length == 0 ? 0 : min((length + run - 1) / run, most_splits(length));
    const bool shared = splits > 1;
    const int3 before = scan({splits, shared ? splits : 0, shared ? 1 : 0}, all);
    const int from = item.first;
    item.splits = splits;
    item.partial = done.y + before.y;
    item.ticket = done.z + before.z;
    for (int split = 0; split < splits; ++split) {
      item.split = split;
      item.first = from + static_cast<int>(static_cast<long long>(length) * split / splits);
      item.last = from + static_cast<int>(static_cast<long long>(length) * (split + 1) / splits);
      items[done.x + before.x + split] = item;
    }
    done = {done.x + all.x, done.y + all.y, done.z + all.z};
  }
  if (threadIdx.x == 0) *count = done.x;
}
