// PTX instructions for copies, MMAs and counters of one warp (PTX ISA 7.8: "cp.async", "ldmatrix", "movmatrix", "mma.m16n8k16"),
// one function per instruction.
#pragma once

#include "ptx.cuh"

namespace hopper {

using u16 = unsigned short;

#if HALF_IS_BF16
#define WARP_ELEMENT "bf16"
#else
#define WARP_ELEMENT "f16"
#endif

// --- global memory ---

// Copy 16 bytes to shared memory. bytes: 16, or 0 to write zeros without reading.
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Let the copy engine copy to shared memory; the barrier counts the bytes. All arguments are multiples of 16, except the barrier.
__device__ __forceinline__ void copy_row(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the latest MOST groups of this thread have arrived.
template <int MOST>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}

// Load what other SMs have stored, bypassing this SM's L1 cache.
__device__ __forceinline__ float4 load_stored(const float4* from) {
  float4 four;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(from)
               : "memory");
  return four;
}
__device__ __forceinline__ float load_stored(const float* from) {
  float one;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(one) : "l"(from) : "memory");
  return one;
}

// Count an arrival with acquire-release semantics. Returns the number of earlier arrivals.
__device__ __forceinline__ int add_arrival(int* to) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
  return before;
}

// --- MMA operands of a warp ---

struct Matrices {
  u32 part[4];
};

// Load four matrices of 8 rows of 16 bytes. Lane 8 i + r has the address of row r of matrix i.
__device__ __forceinline__ Matrices load_matrices(u32 from) {
  Matrices four;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.part[0]), "=r"(four.part[1]), "=r"(four.part[2]), "=r"(four.part[3])
               : "r"(from)
               : "memory");
  return four;
}
// Load four matrices and transpose each.
__device__ __forceinline__ Matrices load_turned(u32 from) {
  Matrices four;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.part[0]), "=r"(four.part[1]), "=r"(four.part[2]), "=r"(four.part[3])
               : "r"(from)
               : "memory");
  return four;
}
// Transpose an 8 x 8 matrix in registers.
__device__ __forceinline__ u32 turned(u32 part) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(part));
  return out;
}

// sums [16, 8] += a [16, 16] b [16, 8], each thread with its parts.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Matrices& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." WARP_ELEMENT "." WARP_ELEMENT
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1));
}

// --- numbers ---

// Return {low, high} in half precision, rounded to nearest.
__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 out;
  asm("cvt.rn." WARP_ELEMENT "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// --- shared memory, by address ---

__device__ __forceinline__ void store_quad(u32 to, uint4 four) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w) : "memory");
}

}  // namespace hopper
