// A block of CUDA threads on one thread of the host: each is a coroutine that runs until it waits for others.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
using std::max;
using std::min;

struct Dim {
  unsigned x, y, z;
};
inline Dim threadIdx, blockIdx, gridDim;
alignas(1024) inline char dynamic_shared[256 * 1024];

namespace host {

constexpr int MOST_THREADS = 1024;
inline ucontext_t scheduler, contexts[MOST_THREADS];
inline std::vector<char> stacks[MOST_THREADS];
inline bool done[MOST_THREADS];
inline int current, threads, failures;

inline void fail(const char* what) {
  if (!failures++) std::fprintf(stderr, "block %u, thread %d: %s\n", blockIdx.x, current, what);
}

inline void let_others_run() {
  const int me = current;
  swapcontext(&contexts[me], &scheduler);
  current = threadIdx.x = me;
}

struct Meeting {
  int arrived = 0;
  unsigned round = 0;
};
inline Meeting of_block, of_name[16], of_warp[MOST_THREADS / 32];

inline void meet(Meeting& meeting, int size) {
  const unsigned round = meeting.round;
  if (++meeting.arrived == size) {
    meeting.arrived = 0, ++meeting.round;
    return;
  }
  while (meeting.round == round) let_others_run();
}

// Every lane of a warp gives some words, and gets those of all lanes. Two rounds have room, so that none overwrites what others read.
inline uint32_t words[MOST_THREADS / 32][2][32][8];
inline unsigned rounds[MOST_THREADS];
using Words = uint32_t (*)[8];
inline Words exchange(const uint32_t* own, int count) {
  const int warp = current / 32, round = rounds[current]++ % 2;
  std::memcpy(words[warp][round][current % 32], own, count * 4);
  meet(of_warp[warp], 32);
  return words[warp][round];
}

// Asynchronous copies arrive as late as they may: when their thread waits for them.
struct Copy {
  char* to;
  const char* from;
  int bytes, whole;
};
inline std::vector<std::vector<Copy>> groups[MOST_THREADS];
inline std::vector<Copy> begun[MOST_THREADS];
inline const char *lows[8], *highs[8];  // the tensors that a kernel was given
inline int tensors;

inline char* shared(uint32_t address, int size) {
  char* const at = dynamic_shared + static_cast<int32_t>(address);
  if (reinterpret_cast<uintptr_t>(at) % size) fail("an address in shared memory is not aligned");
  return at;
}

inline void check(const void* from, int size) {
  const char* const at = static_cast<const char*>(from);
  for (int i = 0; i < tensors; ++i) {
    if (at >= lows[i] && at + size <= highs[i]) return;
  }
  fail("a read outside of every tensor");
}

inline void copy(uint32_t to, const void* from, int bytes, int whole) {
  if (reinterpret_cast<uintptr_t>(from) % whole) fail("a copy from an address that is not aligned");
  if (bytes) check(from, bytes);
  begun[current].push_back({shared(to, whole), static_cast<const char*>(from), bytes, whole});
}

inline void arrive(int most) {
  auto& mine = groups[current];
  while (static_cast<int>(mine.size()) > most) {
    for (const Copy& copy : mine.front()) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      std::memset(copy.to + copy.bytes, 0, copy.whole - copy.bytes);
    }
    mine.erase(mine.begin());
  }
}

// Run all blocks, one after the other. order: 0: threads in turn, 1: from the last, 2: some of them at a time.
template <typename Kernel>
int run(Kernel kernel, int blocks, int block_threads, int shared_bytes, int order) {
  static Kernel started;
  started = kernel, threads = block_threads, gridDim.x = blocks, failures = 0;
  unsigned random = 1;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    std::memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // NaN
    for (int thread = 0; thread < threads; ++thread) {
      done[thread] = false, groups[thread].clear(), begun[thread].clear(), stacks[thread].resize(1 << 16);
      getcontext(&contexts[thread]);
      contexts[thread].uc_stack.ss_sp = stacks[thread].data();
      contexts[thread].uc_stack.ss_size = stacks[thread].size();
      contexts[thread].uc_link = &scheduler;
      makecontext(&contexts[thread], +[] { const int me = current; started(); done[me] = true; }, 0);
    }
    long turns = 0;
    for (int left = threads; left;) {
      left = 0;
      if (++turns > 1000000) return fail("threads wait for each other for ever"), failures;
      for (int i = 0; i < threads; ++i) {
        const int thread = order == 1 ? threads - 1 - i : i;
        random = random * 1664525 + 1013904223;
        if (done[thread]) continue;
        if (order != 2 || random >> 30 == 0) {
          current = threadIdx.x = thread;
          swapcontext(&scheduler, &contexts[thread]);
        }
        left += !done[thread];
      }
    }
    for (int i = shared_bytes; i < static_cast<int>(sizeof dynamic_shared); ++i) {
      if (dynamic_shared[i] != '\xff') return fail("a write behind the shared memory that was asked for"), failures;
    }
  }
  return failures;
}

}  // namespace host

inline void __syncthreads() { host::meet(host::of_block, host::threads); }
inline void __syncwarp() { host::meet(host::of_warp[host::current / 32], 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const uint32_t own = value;
  const auto all = host::exchange(&own, 1);
  unsigned alike = 0;
  for (int lane = 0; lane < 32; ++lane) alike |= (all[lane][0] == own) << lane;
  return alike;
}
inline unsigned __shfl_up_sync(unsigned, unsigned own, int distance) {
  const auto all = host::exchange(&own, 1);
  const int lane = host::current % 32;
  return lane >= distance ? all[lane - distance][0] : own;
}
