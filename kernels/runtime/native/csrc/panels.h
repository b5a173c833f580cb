// GEMM of a few rows over weights in packed blocks ("panels"): 16 outputs side by side, column after column, so that a block is one
// stream.
//
// Kernels process columns k0 up to k1 (0 starts the sums; else they continue from `out`), M rows of x, packed column by column (M numbers
// per column), and P packed blocks. M and P are constants, so the sums, [M][P][PARTS] registers, stay in registers. The order of each sum
// is that of the columns, whatever M and P are.
#pragma once
#include "vectors.h"

// float32: float [k][16]. half: float16 [k][16]. pairs: bfloat16 [k / 2][16][2]. codes4: bytes [k / 8][16][4], with the first four of 8
// columns in the low halves. codes8: bytes [k / 4][16][4], each value with 128 added. codes5, codes6: groups of 32 columns, each with the
// low 4 bits of its values like codes4, then the higher bits, [8 quads of columns][1 or 2][16][4]; values are not negative.
enum { PANEL_FLOAT32, PANEL_HALF, PANEL_PAIRS, PANEL_CODES4, PANEL_CODES5, PANEL_CODES6, PANEL_CODES8 };
// Scales of groups of columns, 16 numbers per block and group: float16 d; d and m; int8 s times float16 d of a superblock; uint8 s and m,
// times d and m of a superblock. A weight is its integer * d + m; 4-bit values with an m are used without a table.
enum { SCALE_NONE, SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM };

typedef struct Weight {
    const struct Weight *next; // following outputs in another format; NULL means none
    const uint8_t *panels;
    const uint8_t *scales; // scales of groups
    const uint16_t *supers; // scales of superblocks
    const float *bias;
    const uint8_t *table; // integers of the 16 4-bit values, with 128 added
    int64_t n, k;
    int64_t panel_bytes, scale_bytes, super_bytes; // bytes per packed block
    int32_t form, scale, group, superblock; // columns
} Weight;

INLINE int is_coded(const Weight *weight) { return weight->form >= PANEL_CODES4; }

#define MOST_PANELS 4
#if WIDTH == 16
#define MOST_ROWS 12
#elif WIDTH == 8
#define MOST_ROWS 6
#else
#define MOST_ROWS 4
#endif
#define MOST_PARTS (MOST_PANELS * PARTS) // registers per column
#define MOST_SUMS (MOST_ROWS * MOST_PARTS)

#define UNROLL _Pragma("GCC unroll 16")
#if WIDTH == 16
#define UNROLL_COLUMNS
#else
#define UNROLL_COLUMNS _Pragma("GCC unroll 4") // few additions per column
#endif

// Return the prefetch distance in bytes: the same position in the next P blocks, or less if these are long. Sums of several rows fill the
// CPU's reorder window, so that its own loads do not run far enough ahead.
INLINE long ahead(int P, const Weight *weight) { long next = P * weight->panel_bytes; return next < 65536 ? next : 65536; }
INLINE void fetch(int M, const void *p) { if (M >= 2) __builtin_prefetch(p, 0, 2); }

// Loop over P blocks: `v` counts their registers, and `at` is the register's first output in block `p`.
#define EACH_PART(P) UNROLL for (int p = 0; p < (P); p++) UNROLL for (int h = 0, v = p * PARTS, at = 0; h < PARTS; h++, v++, at += WIDTH)

// sums: [M][V]; w: V registers of one column; x: its M rows.
INLINE void add_columns(int M, int V, vf *sums, const vf *w, const float *x) {
    UNROLL for (int r = 0; r < M; r++) UNROLL for (int v = 0; v < V; v++) sums[r * V + v] += w[v] * splat(x[r]);
}

INLINE void begin_sums(int count, long k0, const vf *out, vf *sums) { UNROLL for (int i = 0; i < count; i++) sums[i] = k0 ? out[i] : (vf){}; }

INLINE void float32_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const float *x, vf *out) {
    vf sums[MOST_SUMS];
    const float *panel[MOST_PANELS];
    UNROLL for (int p = 0; p < P; p++) panel[p] = (const float *)(weight->panels + (first + p) * weight->panel_bytes);
    begin_sums(M * P * PARTS, k0, out, sums);
    long next = ahead(P, weight);
    UNROLL_COLUMNS for (long k = k0; k < k1; k++) {
        vf w[MOST_PARTS];
        EACH_PART(P) {
            w[v] = load(panel[p] + k * LANES + at);
            if (h == 0) fetch(M, (const uint8_t *)(panel[p] + k * LANES) + next);
        }
        add_columns(M, P * PARTS, sums, w, x + k * M);
    }
    UNROLL for (int i = 0; i < M * P * PARTS; i++) out[i] = sums[i];
}

INLINE void half_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const float *x, vf *out) {
    vf sums[MOST_SUMS];
    begin_sums(M * P * PARTS, k0, out, sums);
    const uint16_t *panel = (const uint16_t *)(weight->panels + first * weight->panel_bytes);
    for (long k = k0; k < k1; k++) {
        vf w[MOST_PARTS];
        EACH_PART(P) w[v] = load_half(panel + (p * weight->panel_bytes / 2) + k * LANES + at);
        add_columns(M, P * PARTS, sums, w, x + k * M);
    }
    UNROLL for (int i = 0; i < M * P * PARTS; i++) out[i] = sums[i];
}

// x: pairs of bfloat16 as uint32 if the CPU multiplies those, else floats.
INLINE void pair_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const void *x, vf *out) {
    vf sums[MOST_SUMS];
    begin_sums(M * P * PARTS, k0, out, sums);
    const uint8_t *panel = weight->panels + first * weight->panel_bytes;
    long next = ahead(P, weight);
    for (long pair = k0 / 2; pair < k1 / 2; pair++) {
        vu w[MOST_PARTS];
        EACH_PART(P) {
            const uint8_t *both = panel + p * weight->panel_bytes + pair * 64;
            w[v] = *(const vu *)(both + 4 * at);
            if (h == 0) fetch(M, both + next);
        }
#if defined(__AVX512BF16__)
        const uint32_t *both = (const uint32_t *)x + pair * M;
        UNROLL for (int r = 0; r < M; r++) {
            __m512i rows = _mm512_set1_epi32((int)both[r]);
            UNROLL for (int p = 0; p < P; p++)
                sums[r * P + p] = (vf)_mm512_dpbf16_ps((__m512)sums[r * P + p], (__m512bh)w[p], (__m512bh)rows);
        }
#else
        vf low[MOST_PARTS], high[MOST_PARTS];
        UNROLL for (int v = 0; v < P * PARTS; v++) { low[v] = (vf)(w[v] << 16); high[v] = (vf)(w[v] & 0xffff0000u); }
        add_columns(M, P * PARTS, sums, low, (const float *)x + 2 * pair * M);
        add_columns(M, P * PARTS, sums, high, (const float *)x + (2 * pair + 1) * M);
#endif
    }
    UNROLL for (int i = 0; i < M * P * PARTS; i++) out[i] = sums[i];
}
