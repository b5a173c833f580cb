// Wrappers for PTX instructions without a C++ equivalent (PTX ISA 7.0 for compute capability 8.0, 7.8 for those of 9.0). One function per
// instruction, and nothing else.
#pragma once

namespace fused {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// --- copies to shared memory, by one thread, in groups ---

// Return the cache policy for data that is read once and need not stay in the L2 cache.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_16_once(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

// bytes: 16, or 0 to write zeros without reading.
__device__ __forceinline__ void copy_16_once(u32 to, const void* from, u32 bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}

// bytes: 16, or 0 to write zeros without reading.
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// bytes: 4, or 0 to write zeros without reading.
__device__ __forceinline__ void copy_4(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last `most` groups have arrived.
template <int most>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(most) : "memory");
}

// --- shared memory ---

struct Quad {
  u32 part[4];
};

struct Floats {
  float part[4];
};

__device__ __forceinline__ Floats load_floats(u32 from) {
  Floats four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.part[0]), "=f"(four.part[1]), "=f"(four.part[2]), "=f"(four.part[3])
               : "r"(from)
               : "memory");
  return four;
}

__device__ __forceinline__ Quad load_quad(u32 from) {
  Quad quad;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.part[0]), "=r"(quad.part[1]), "=r"(quad.part[2]), "=r"(quad.part[3])
               : "r"(from)
               : "memory");
  return quad;
}

template <typename T>
__device__ __forceinline__ T load_shared(u32 from) {
  T value;
  if constexpr (sizeof(T) == 4) {
    u32 bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
    value = __builtin_bit_cast(T, bits);
  } else {
    u16 bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from) : "memory");
    value = __builtin_bit_cast(T, bits);
  }
  return value;
}

__device__ __forceinline__ float2 load_two(u32 from) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from) : "memory");
  return two;
}

__device__ __forceinline__ u32 load_byte(u32 from) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// --- global memory ---

__device__ __forceinline__ Quad load_constant_quad(const void* from) {
  Quad quad;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(quad.part[0]), "=r"(quad.part[1]), "=r"(quad.part[2]), "=r"(quad.part[3])
      : "l"(from));
  return quad;
}

// Load bypassing this SM's L1 cache, which may lack what other thread blocks stored.
__device__ __forceinline__ u16 load_stored(const u16* from) {
  u16 value;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ u32 load_stored(const u32* from) {
  u32 value;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ int add_arrivals(int* to, int count) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(count) : "memory");
  return before;
}

// --- barriers ---

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrive, and make the phase wait for this number of copied bytes too.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}

// Make the barriers visible to asynchronous copies.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Output of cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  char opaque[128];
};

// Copy a box of rows from `row` and columns from `column` on, by one thread. Missing elements are zeros.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<u64>(&map)), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Copy contiguous memory, by one thread. The barrier counts its bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// Wait until the phase of this parity has ended. try_wait suspends the thread for a while; older GPUs poll with test_wait.
#if __CUDA_ARCH__ >= 900
#define BARRIER_TEST "mbarrier.try_wait"
#else
#define BARRIER_TEST "mbarrier.test_wait"
#endif
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\n" BARRIER_TEST ".parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// Synchronise this number of threads on a named barrier.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- registers, moved among the warps of a thread block (compute capability 9.0a), called by four warps ---

template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// --- thread block clusters ---

// Wait for all threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Load from another thread block of the cluster, at the same address of its shared memory.
__device__ __forceinline__ Floats load_floats_of_block(u32 from, int block) {
  u32 there;
  Floats four;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.part[0]), "=f"(four.part[1]), "=f"(four.part[2]), "=f"(four.part[3])
               : "r"(there)
               : "memory");
  return four;
}

// --- programmatic dependent launch ---

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- numbers ---

#if __CUDA_ARCH__ >= 890
// {low, high} in FP8 (e4m3), each rounded to nearest, at most 448.
__device__ __forceinline__ u16 to_float8_pair(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
#endif

__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// (a & mask) | c
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 c) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(c));
  return out;
}

}  // namespace fused
