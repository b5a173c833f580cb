// GEMM kernels by number of rows and packed blocks, and the choice among them.
#pragma once
#include "codes.h"

// With rounded x, quantized weights need two registers for each row and block.
#define TAKES_CODES(M, P) (X_BITS ? (M) * (P) <= 12 : (M) <= MOST_CODED)
#if X_BITS // other CPUs hold values of 5 and 6 bits as bytes
#define CODED_CASES(M, P)                                                                                    \
    case PANEL_CODES5: if (TAKES_CODES(M, P)) coded_panels(5, M, P, weight, first, k0, k1, x, out); return;  \
    case PANEL_CODES6: if (TAKES_CODES(M, P)) coded_panels(6, M, P, weight, first, k0, k1, x, out); return;
#else
#define CODED_CASES(M, P)
#endif
#define FORMS(M, P)                                                                                          \
    switch (weight->form) {                                                                                  \
    case PANEL_FLOAT32: float32_panels(M, P, weight, first, k0, k1, (const float *)x, out); return;          \
    case PANEL_HALF: half_panels(M, P, weight, first, k0, k1, (const float *)x, out); return;                \
    case PANEL_PAIRS: pair_panels(M, P, weight, first, k0, k1, x, out); return;                              \
    CODED_CASES(M, P)                                                                                        \
    case PANEL_CODES4: if (TAKES_CODES(M, P)) coded_panels(4, M, P, weight, first, k0, k1, x, out); return;  \
    default: if (TAKES_CODES(M, P)) coded_panels(8, M, P, weight, first, k0, k1, x, out); return;            \
    }
#define KERNEL(M, P) static void rows_##M##_panels_##P(const Weight *weight, long first, long k0, long k1, const void *x, vf *out) { FORMS(M, P) }
KERNEL(1, 4) KERNEL(1, 1) KERNEL(2, 2) KERNEL(2, 1) KERNEL(4, 1)
#if WIDTH == 16
KERNEL(4, 4) KERNEL(8, 2) KERNEL(8, 1) KERNEL(12, 2) KERNEL(12, 1)
#elif WIDTH == 8
KERNEL(6, 1)
#endif
#if X_BITS
KERNEL(4, 2)
#endif

typedef void Run(const Weight *weight, long first, long k0, long k1, const void *x, vf *out);
typedef struct { int rows, panels; Run *many, *one; } Kernel;
static const Kernel KERNELS[] = {
    {1, 4, rows_1_panels_4, rows_1_panels_1},
    {2, 2, rows_2_panels_2, rows_2_panels_1},
#if WIDTH == 16
    {4, 4, rows_4_panels_4, rows_4_panels_1},
    {8, 2, rows_8_panels_2, rows_8_panels_1},
    {12, 2, rows_12_panels_2, rows_12_panels_1},
#else
    {4, 1, rows_4_panels_1, rows_4_panels_1},
#if WIDTH == 8
    {6, 1, rows_6_panels_1, rows_6_panels_1},
#endif
#endif
};
#define COUNT(KERNELS) ((int)(sizeof(KERNELS) / sizeof(KERNELS[0])))

// With only this many sums, the CPU waits for the latency of each addition (float or integer).
enum { FLOAT_SUMS = 8, WHOLE_SUMS = 4 };

// Return the kernel for a number of rows: the smallest that handles them at once. For more rows, the kernel with the fewest padding rows
// among those with more than `few` sums.
static const Kernel *best_of(const Kernel *kernels, int count, long rows, int few) {
    const Kernel *best = kernels + count - 1;
    if (rows <= best->rows) {
        for (int i = 0; i < count; i++) if (kernels[i].rows >= rows) return kernels + i;
    }
    for (int i = count - 1; i >= 0 && 2 * kernels[i].rows > best->rows; i--) {
        if (kernels[i].rows * kernels[i].panels * PARTS <= few) continue;
        long own = (rows + kernels[i].rows - 1) / kernels[i].rows * kernels[i].rows, least = (rows + best->rows - 1) / best->rows * best->rows;
        if (own < least) best = kernels + i;
    }
    return best;
}

#if X_BITS
static const Kernel CODED_KERNELS[] = {
    {1, 4, rows_1_panels_4, rows_1_panels_1}, {2, 2, rows_2_panels_2, rows_2_panels_1},   {4, 2, rows_4_panels_2, rows_4_panels_1},
    {8, 1, rows_8_panels_1, rows_8_panels_1}, {12, 1, rows_12_panels_1, rows_12_panels_1},
};
#endif

static const Kernel *kernel_for(const Weight *weight, long rows) {
#if X_BITS
    if (is_coded(weight)) return best_of(CODED_KERNELS, COUNT(CODED_KERNELS), rows, WHOLE_SUMS);
#else
    (void)weight;
#endif
    int count = COUNT(KERNELS);
#if WIDTH == 8
    // If weights are converted on the fly, 16 registers do not suffice for the sums of 6 rows.
    if (weight->form != PANEL_FLOAT32 && !expanded_floats(weight, rows)) count--;
#endif
    return best_of(KERNELS, count, rows, FLOAT_SUMS);
}
