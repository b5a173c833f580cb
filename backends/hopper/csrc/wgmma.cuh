// wgmma for each number of columns that the attention kernel uses: d [64, COLUMNS] += a [64, 16] b [16, COLUMNS], float32 accumulators.
//
// Operands in shared memory are in panels of 64 columns (128 bytes per row) with the 128-byte swizzle; `descriptor` encodes their location.
// PTX ISA 8.0, "wgmma.mma_async" and "Matrix descriptor format".
#pragma once

#include "ptx.cuh"

#if HALF_IS_BF16
#define HALF_NAME "bf16"
#else
#define HALF_NAME "f16"
#endif

namespace hopper {

// Return two elements converted from float32.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." HALF_NAME "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// operand: result of `operand` in shape.cuh.
__device__ __forceinline__ u64 descriptor(u32 operand, u32 bytes) {
  constexpr u32 SWIZZLE_128 = 1u << 30, ROW_GROUP = 1024 >> 4;  // eight rows of 128 bytes
  u64 both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(operand + (bytes >> 4)), "n"(SWIZZLE_128 | ROW_GROUP));
  return both;
}

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R2 R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define R3 R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define R4 R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R5 R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define R6 R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define R7 R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define R8 R7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define R9 R8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define R10 R9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define R11 R10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define R12 R11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define R13 R12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define R14 R13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define R15 R14 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define D0(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define D1(d) D0(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define D2(d) D1(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define D3(d) D2(d), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define D4(d) D3(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define D5(d) D4(d), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define D6(d) D5(d), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define D7(d) D6(d), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define D8(d) D7(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define D9(d) D8(d), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define D10(d) D9(d), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define D11(d) D10(d), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define D12(d) D11(d), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define D13(d) D12(d), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define D14(d) D13(d), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define D15(d) D14(d), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <int COLUMNS>
struct Products;

// LAST: COLUMNS / 16 - 1, the last group of eight accumulators. A0 to A3, DESC, ADD: operand numbers after the accumulators.
#define PRODUCTS(COLUMNS, LAST, N0, N1, N2, N3, N4, N5)                                                                  \
  template <>                                                                                                            \
  struct Products<COLUMNS> {                                                                                             \
    /* a, b: rows of 64 elements that are summed over. add: false clears d first. */                                     \
    static __device__ __forceinline__ void rows(float (&d)[COLUMNS / 2], u64 a, u64 b, int add) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " N2 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF_NAME "." HALF_NAME " {" R##LAST "}, "     \
                   N0 ", " N1 ", p, 1, 1, 0, 0;\n}\n"                                                                    \
                   : D##LAST(d)                                                                                          \
                   : "l"(a), "l"(b), "r"(add));                                                                          \
    }                                                                                                                    \
    /* a in registers; the rows of b are summed over. */                                                                 \
    static __device__ __forceinline__ void columns(float (&d)[COLUMNS / 2], const u32* a, u64 b, int add) {              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " N5 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF_NAME "." HALF_NAME " {" R##LAST "}, {"    \
                   N0 ", " N1 ", " N2 ", " N3 "}, " N4 ", p, 1, 1, 1;\n}\n"                                              \
                   : D##LAST(d)                                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                      \
    }                                                                                                                    \
  };

PRODUCTS(64, 3, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCTS(80, 4, "%40", "%41", "%42", "%43", "%44", "%45")
PRODUCTS(96, 5, "%48", "%49", "%50", "%51", "%52", "%53")
PRODUCTS(112, 6, "%56", "%57", "%58", "%59", "%60", "%61")
PRODUCTS(128, 7, "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCTS(192, 11, "%96", "%97", "%98", "%99", "%100", "%101")
PRODUCTS(256, 15, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace hopper
