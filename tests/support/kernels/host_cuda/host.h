// Blocks of CUDA threads on one thread of the host: each thread is a coroutine that runs until it waits for others. The blocks of a
// cluster run in turn, each until all of its threads wait for the cluster or have ended, or, where they wait for each other's barriers,
// side by side; arrays that a kernel declares as shared by name are one for all blocks then, and must not be there.
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
#define __grid_constant__
using std::max;
using std::min;

struct Dim {
  unsigned x, y, z;
};
inline Dim threadIdx, blockIdx, gridDim;
#define dynamic_shared host::own_memory()

namespace host {

constexpr int MOST_BLOCKS = 8, MOST_THREADS = MOST_BLOCKS * 384;  // of a cluster
constexpr int MEMORY_BYTES = 256 * 1024;
alignas(1024) inline char memories[MOST_BLOCKS][MEMORY_BYTES];
inline ucontext_t scheduler, contexts[MOST_THREADS];
inline std::vector<char> stacks[MOST_THREADS];
inline bool done[MOST_THREADS], in_cluster_wait[MOST_THREADS];
inline bool blocked[MOST_THREADS];  // what these wait for has not changed since they looked
inline unsigned cluster_round;
inline bool early;  // whether copies that barriers count arrive as early as they may; else as late
inline bool at_once;  // whether products of warpgroups are computed when they are begun; else when they are waited for
inline int current, threads, failures;  // current: in the cluster; threads: of a block

inline int own_block() { return current / threads; }
inline char* own_memory() { return memories[own_block()]; }

inline void fail(const char* what) {
  if (!failures++) std::fprintf(stderr, "block %u, %u, thread %u: %s\n", blockIdx.x, blockIdx.y, threadIdx.x, what);
}

inline void enter(int thread) { current = thread, threadIdx.x = thread % threads, blockIdx.y = own_block(); }

inline void let_others_run() {
  const int me = current;
  swapcontext(&contexts[me], &scheduler);
  enter(me);
}

inline void wait_for_cluster() {
  in_cluster_wait[current] = true;
  for (const unsigned round = cluster_round; cluster_round == round;) let_others_run();
}

// Threads that wait for something to change; each looks anew when it has.
struct Waiting {
  std::vector<int> threads;

  void wait() {
    threads.push_back(current), blocked[current] = true;
    let_others_run();
  }
  void wake() {
    for (const int thread : threads) blocked[thread] = false;
    threads.clear();
  }
};

struct Meeting {
  int arrived = 0;
  unsigned round = 0;
  Waiting waiting;

  // Arrive without waiting.
  void arrive(int size) {
    if (++arrived == size) arrived = 0, ++round, waiting.wake();
  }
};
inline Meeting of_block[MOST_BLOCKS], of_name[MOST_BLOCKS][16], of_warp[MOST_THREADS / 32];

inline void meet(Meeting& meeting, int size) {
  const unsigned round = meeting.round;
  meeting.arrive(size);
  while (meeting.round == round) meeting.waiting.wait();
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
inline const char *lows[12], *highs[12];  // the tensors that a kernel was given
inline int tensors;

#ifdef BLOCK_SHIFT  // from which bit on an address is the number of a cluster's block
inline int offset_of(uint32_t address) { return address & ((1u << BLOCK_SHIFT) - 1); }
#else
inline int offset_of(uint32_t address) { return static_cast<int32_t>(address); }
#endif

inline char* shared(uint32_t address, int size) {
  char* const at = dynamic_shared + offset_of(address);
  if (reinterpret_cast<uintptr_t>(at) % size) fail("an address in shared memory is not aligned");
  return at;
}

inline void know(const void* const* given, const long* sizes, int count) {
  tensors = count;
  for (int i = 0; i < count; ++i) lows[i] = static_cast<const char*>(given[i]), highs[i] = lows[i] + sizes[i];
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

// Whether none of these threads can run on, though some have not ended.
inline bool stuck(int begin, int end) {
  bool waiting = false;
  for (int thread = begin; thread < end; ++thread) {
    if (done[thread]) continue;
    if (!blocked[thread]) return false;
    waiting = true;
  }
  return waiting;
}

// Run the threads of a block of the cluster until all wait for the cluster or have ended. order: 0: in turn, 1: from the last, 2: some
// of them at a time. once: each a single time. Returns how many could run on.
inline int run_block(int block, int order, bool once) {
  static unsigned random = 1;
  int running = threads;
  for (long turns = 0; running && !(once && turns); ++turns) {
    if (turns > 1000000 || !once && stuck(block * threads, (block + 1) * threads)) {
      return fail("threads wait for each other for ever"), 0;
    }
    running = 0;
    for (int i = 0; i < threads; ++i) {
      const int thread = block * threads + (order == 1 ? threads - 1 - i : i);
      random = random * 1664525 + 1013904223;
      if (done[thread] || in_cluster_wait[thread]) continue;
      if (!blocked[thread] && (order != 2 || random >> 30 == 0)) {
        enter(thread);
        swapcontext(&scheduler, &contexts[thread]);
      }
      running += !done[thread] && !in_cluster_wait[thread];
    }
  }
  return running;
}

// Run all clusters, one after the other, of so many blocks each. order: as above; 1: besides, copies that barriers count arrive at once;
// 2: products are computed at once. together: the blocks of a cluster run side by side.
template <typename Kernel>
int run(Kernel kernel, int clusters, int cluster_blocks, int block_threads, int shared_bytes, int order, bool together = false) {
  static Kernel started;
  started = kernel, threads = block_threads, gridDim.x = clusters, gridDim.y = cluster_blocks, failures = 0;
  early = order == 1, at_once = order == 2;
  const int all = cluster_blocks * threads;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    blockIdx.x = cluster;
    std::memset(memories, '\xff', sizeof memories[0] * cluster_blocks);  // NaN
    for (int thread = 0; thread < all; ++thread) {
      done[thread] = in_cluster_wait[thread] = blocked[thread] = false;
      groups[thread].clear(), begun[thread].clear(), stacks[thread].resize(1 << 16);
      getcontext(&contexts[thread]);
      contexts[thread].uc_stack.ss_sp = stacks[thread].data();
      contexts[thread].uc_stack.ss_size = stacks[thread].size();
      contexts[thread].uc_link = &scheduler;
      makecontext(&contexts[thread], +[] { const int me = current; started(); done[me] = true; }, 0);
    }
    for (long turns = 0; !failures && std::count(done, done + all, false); ++turns) {
      if (turns > 1000000 || stuck(0, all)) fail("blocks wait for each other for ever");
      int running = 0;
      for (int block = 0; block < cluster_blocks; ++block) running += run_block(block, order, together);
      if (!running) std::fill(in_cluster_wait, in_cluster_wait + all, false), ++cluster_round;
    }
    for (int block = 0; block < cluster_blocks && !failures; ++block) {
      for (int i = shared_bytes; i < MEMORY_BYTES; ++i) {
        if (memories[block][i] != '\xff') return fail("a write behind the shared memory that was asked for"), failures;
      }
      for (const Meeting& meeting : of_name[block]) {
        if (meeting.arrived) return fail("threads still wait at a barrier when all have ended"), failures;
      }
    }
    if (failures) return failures;
  }
  return failures;
}

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline float from_float16(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint16_t to_float16(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
// Floats e4m3: no infinity; the largest is 448.
inline float from_float8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float size = (bits & 0x7f) == 0x7f ? NAN : std::ldexp(exponent ? 8.0f + fraction : fraction, std::max(exponent, 1) - 10);
  return bits & 0x80 ? -size : size;
}
// To the nearest, to an even fraction where two are as near; at most the largest.
inline uint8_t to_float8(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (value != value) return 0x7f;
  const float size = std::min(std::fabs(value), 448.0f);
  const int exponent = std::max(size > 0.0f ? std::ilogb(size) : -6, -6);
  const int eighths = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of a power of two; 16: of the next
  return sign | (eighths < 8 ? eighths : (exponent + 6) * 8 + eighths);
}

}  // namespace host

inline void __syncthreads() { host::meet(host::of_block[host::own_block()], host::threads); }
inline void __syncwarp() { host::meet(host::of_warp[host::current / 32], 32); }
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* from) { return *from; }
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
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
template <typename T>
T of_lane(T own, int lane) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &own, 4);
  const auto all = host::exchange(&bits, 1);
  T value;
  std::memcpy(&value, &all[lane][0], 4);
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T own, int lane) {
  return of_lane(own, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T own, int distance) {
  return of_lane(own, host::current % 32 ^ distance);
}
inline bool __any_sync(unsigned, bool own) {
  const uint32_t word = own;
  const auto all = host::exchange(&word, 1);
  return std::any_of(all, all + 32, [](const uint32_t* lane) { return lane[0]; });
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
struct uint4 {
  unsigned x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
