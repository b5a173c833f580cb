// wgmma: four warps compute d [64, COLUMNS] += a [64, 16] b [16, COLUMNS] in half precision, with a in registers and b in shared memory;
// or in FP8, a [64, 32] and b [32, COLUMNS], both in shared memory. There, rows of a and of b^T have 128 bytes, with the 128-byte swizzle
// (PTX ISA 8.0, "wgmma.mma_async" and "Matrix descriptor format").
#pragma once

#include "half.cuh"

namespace fused {

// sixteenths: address in units of 16 bytes.
__device__ __forceinline__ u64 descriptor(u32 sixteenths) {
  constexpr u32 SWIZZLE_128 = 1u << 30, ROW_GROUP = 1024 >> 4;  // eight rows of 128 bytes
  u64 both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(sixteenths), "n"(SWIZZLE_128 | ROW_GROUP));
  return both;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until all but the last `most` groups are done.
template <int most>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(most) : "memory");
}

// Keep sums in their registers: the compiler does not know that they change until the wgmmas are done.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define R0 "%0, %1, %2, %3"
#define R1 R0 ", %4, %5, %6, %7"
#define R2 R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R3 R2 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R4                                                                                                                 \
  R3 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
     "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define D0(d) FOUR(d, 0)
#define D1(d) EIGHT(d, 0)
#define D2(d) D1(d), EIGHT(d, 8)
#define D3(d) D2(d), EIGHT(d, 16), EIGHT(d, 24)
#define D4(d) D3(d), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56)

template <int COLUMNS>
struct Products;
template <int COLUMNS>
struct Float8Products;

// NUMBERS: names of d's registers; N0 to N5: numbers of the following operands. add: 0 means that d is overwritten.
#define PRODUCTS(COLUMNS, NUMBERS, N0, N1, N2, N3, N4, N5)                                                               \
  template <>                                                                                                            \
  struct Products<COLUMNS> {                                                                                             \
    static __device__ __forceinline__ void run(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, int add) {             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " N5 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT_TYPE "." ELEMENT_TYPE                 \
                   " {" R##NUMBERS "}, {" N0 ", " N1 ", " N2 ", " N3 "}, " N4 ", p, 1, 1, 0;\n}\n"                       \
                   : D##NUMBERS(d)                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                      \
    }                                                                                                                    \
  };                                                                                                                     \
  template <>                                                                                                            \
  struct Float8Products<COLUMNS> {                                                                                       \
    static __device__ __forceinline__ void run(float (&d)[COLUMNS / 2], u64 a, u64 b, int add) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " N2 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3"                                      \
                   " {" R##NUMBERS "}, " N0 ", " N1 ", p, 1, 1;\n}\n"                                                    \
                   : D##NUMBERS(d)                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                          \
    }                                                                                                                    \
  };

PRODUCTS(8, 0, "%4", "%5", "%6", "%7", "%8", "%9")
PRODUCTS(16, 1, "%8", "%9", "%10", "%11", "%12", "%13")
PRODUCTS(32, 2, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCTS(64, 3, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCTS(128, 4, "%64", "%65", "%66", "%67", "%68", "%69")

}  // namespace fused
