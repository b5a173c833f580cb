// wgmma: four warps multiply d [64, COLUMNS] += a [64, 16] b [16, COLUMNS], a out of their registers, b out of shared memory, where
// the rows of b^T have 128 bytes, with the 128-byte swizzle (PTX ISA 8.0, "wgmma.mma_async" and "Matrix descriptor format").
#pragma once

#include "half.cuh"

namespace fused {

// sixteenths: the address, in 16 bytes.
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

// Keep sums where they are: the compiler does not see that they change until the products are done.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define R0 "%0, %1, %2, %3"
#define R1 R0 ", %4, %5, %6, %7"
#define R2 R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R3 R2 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D0(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define D1(d) D0(d), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define D2(d) \
  D1(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define D3(d)                                                                                                              \
  D2(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),          \
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

template <int COLUMNS>
struct Products;

// NUMBERS: the names of d's registers; N0 to N5: the numbers of the operands that follow. add: false clears d first.
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
  };

PRODUCTS(8, 0, "%4", "%5", "%6", "%7", "%8", "%9")
PRODUCTS(16, 1, "%8", "%9", "%10", "%11", "%12", "%13")
PRODUCTS(32, 2, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCTS(64, 3, "%32", "%33", "%34", "%35", "%36", "%37")

}  // namespace fused
