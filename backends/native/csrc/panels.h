// Products of a few rows over weights in panels: 16 outputs side by side, column after column, so that a panel is one stream.
//
// Kernels take columns k0 up to k1 (0: sums begin there; else they go on from `out`), M rows of x, packed column after column (M numbers of a column, then the next), and P panels; M and P are constants,
// and the M x P sums stay in registers. The order of each sum is that of the columns, whatever M and P are.
#pragma once
#include "vectors.h"

// float32: float [k][16]. half: float16 [k][16]. pairs: bfloat16 [k / 2][16][2]. codes4: bytes [k / 8][16][4], the first four of 8
// columns in their low halves. codes8: bytes [k / 4][16][4], each code with 128 added.
enum { PANEL_FLOAT32, PANEL_HALF, PANEL_PAIRS, PANEL_CODES4, PANEL_CODES8 };
// Scales of groups of columns, 16 numbers a panel and group: float16 d; d and m; int8 s by float16 d of a superblock; uint8 s and m by
// d and m of a superblock. A weight is code * d + m.
enum { SCALE_NONE, SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM };

typedef struct Weight {
    const struct Weight *next; // outputs behind these, in another form; NULL: none
    const uint8_t *panels;
    const uint8_t *scales; // of groups
    const uint16_t *supers; // of superblocks
    const float *bias;
    const uint8_t *table; // what 16 codes of 4 bits stand for, with 128 added
    int64_t n, k;
    int64_t panel_bytes, scale_bytes, super_bytes; // of one panel
    int32_t form, scale, group, superblock; // columns
} Weight;

INLINE int is_coded(const Weight *weight) { return weight->form == PANEL_CODES4 || weight->form == PANEL_CODES8; }

#define MOST_PANELS 4
#if defined(__AVX512F__)
#define MOST_ROWS 12
#else
#define MOST_ROWS 4
#endif

#define UNROLL _Pragma("GCC unroll 16")

// Bytes from what is read to what is fetched meanwhile: the same place of the next P panels, or nearer where these are long. Sums of
// several rows fill the CPU's window, so that its own reads do not run far enough ahead.
INLINE long ahead(int P, const Weight *weight) { long next = P * weight->panel_bytes; return next < 65536 ? next : 65536; }
INLINE void fetch(int M, const void *p) { if (M >= 2) __builtin_prefetch(p, 0, 2); }

INLINE void add_columns(int M, int P, vf *sums, const vf *w, const float *x) {
    UNROLL for (int r = 0; r < M; r++) UNROLL for (int p = 0; p < P; p++) sums[r * P + p] += w[p] * splat(x[r]);
}

INLINE void float32_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const float *x, vf *out) {
    vf sums[MOST_ROWS * MOST_PANELS];
    const float *panel[MOST_PANELS];
    UNROLL for (int p = 0; p < P; p++) panel[p] = (const float *)(weight->panels + (first + p) * weight->panel_bytes);
    UNROLL for (int i = 0; i < M * P; i++) sums[i] = k0 ? out[i] : (vf){};
    long next = ahead(P, weight);
    for (long k = k0; k < k1; k++) {
        vf w[MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) { w[p] = load(panel[p] + k * LANES); fetch(M, (const uint8_t *)(panel[p] + k * LANES) + next); }
        add_columns(M, P, sums, w, x + k * M);
    }
    UNROLL for (int i = 0; i < M * P; i++) out[i] = sums[i];
}

INLINE void half_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const float *x, vf *out) {
    vf sums[MOST_ROWS * MOST_PANELS];
    UNROLL for (int i = 0; i < M * P; i++) sums[i] = k0 ? out[i] : (vf){};
    const uint16_t *panel = (const uint16_t *)(weight->panels + first * weight->panel_bytes);
    for (long k = k0; k < k1; k++) {
        vf w[MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) w[p] = load_half(panel + (p * weight->panel_bytes / 2) + k * LANES);
        add_columns(M, P, sums, w, x + k * M);
    }
    UNROLL for (int i = 0; i < M * P; i++) out[i] = sums[i];
}

// x: pairs of bfloat16 as uint32 where the CPU multiplies those, floats elsewhere.
INLINE void pair_panels(int M, int P, const Weight *weight, long first, long k0, long k1, const void *x, vf *out) {
    vf sums[MOST_ROWS * MOST_PANELS];
    UNROLL for (int i = 0; i < M * P; i++) sums[i] = k0 ? out[i] : (vf){};
    const uint8_t *panel = weight->panels + first * weight->panel_bytes;
    long next = ahead(P, weight);
    for (long pair = k0 / 2; pair < k1 / 2; pair++) {
        vu w[MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *at = panel + p * weight->panel_bytes + pair * 64;
            w[p] = *(const vu *)at;
            fetch(M, at + next);
        }
#if defined(__AVX512BF16__)
        const uint32_t *both = (const uint32_t *)x + pair * M;
        UNROLL for (int r = 0; r < M; r++) {
            __m512i rows = _mm512_set1_epi32((int)both[r]);
            UNROLL for (int p = 0; p < P; p++)
                sums[r * P + p] = (vf)_mm512_dpbf16_ps((__m512)sums[r * P + p], (__m512bh)w[p], (__m512bh)rows);
        }
#else
        vf low[MOST_PANELS], high[MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) { low[p] = (vf)(w[p] << 16); high[p] = (vf)(w[p] & 0xffff0000u); }
        add_columns(M, P, sums, low, (const float *)x + 2 * pair * M);
        add_columns(M, P, sums, high, (const float *)x + (2 * pair + 1) * M);
#endif
    }
    UNROLL for (int i = 0; i < M * P; i++) out[i] = sums[i];
}
