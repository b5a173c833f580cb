// Products of a few rows over weights in panels: 16 outputs side by side, column after column, so that a panel is one stream.
//
// Kernels take columns k0 up to k1 (0: sums begin there; else they go on from `out`), M rows of x, packed column after column (M numbers of a column, then the next), and P panels; M and P are constants,
// and the M x P sums stay in registers. The order of each sum is that of the columns, whatever M and P are.
#pragma once
#include "vectors.h"

// float32: float [k][16]. half: float16 [k][16]. pairs: bfloat16 [k / 2][16][2]. codes4: uint32 [k / 8][16], column i of 8 in bits
// 4 i. codes8: int8 [k][16].
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
    const float *table; // what 16 codes stand for
    int64_t n, k;
    int64_t panel_bytes, scale_bytes, super_bytes; // of one panel
    int32_t form, scale, group, superblock; // columns
} Weight;

#define MOST_PANELS 4
#if defined(__AVX512F__)
#define MOST_ROWS 12
#else
#define MOST_ROWS 4
#endif
#define MOST_CODED 8 // rows up to which codes are turned into numbers on the way; above, once into a panel of floats

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

// d and m of a group of one panel. at: the group; column: its first.
INLINE void group_scale(const Weight *weight, long panel, long at, long column, vf *d, vf *m) {
    const uint8_t *scales = weight->scales + panel * weight->scale_bytes;
    *m = (vf){};
    if (weight->scale == SCALE_D) {
        *d = load_half((const uint16_t *)scales + at * LANES);
    } else if (weight->scale == SCALE_DM) {
        *d = load_half((const uint16_t *)scales + at * 2 * LANES);
        *m = load_half((const uint16_t *)scales + (at * 2 + 1) * LANES);
    } else {
        const uint16_t *supers = (const uint16_t *)((const uint8_t *)weight->supers + panel * weight->super_bytes);
        long of = column / weight->superblock;
        if (weight->scale == SCALE_SUPER) {
            *d = load_half(supers + of * LANES) * load_bytes((const int8_t *)scales + at * LANES);
        } else {
            *d = load_half(supers + of * 2 * LANES) * load_unsigned((const int8_t *)scales + at * 2 * LANES);
            *m = load_half(supers + (of * 2 + 1) * LANES) * load_unsigned((const int8_t *)scales + (at * 2 + 1) * LANES);
        }
    }
}

INLINE void coded_panels(int four, int M, int P, const Weight *weight, long first, long k0, long k1, const float *x, vf *out) {
    vf sums[MOST_ROWS * MOST_PANELS], table = {};
    if (four) table = load(weight->table);
    UNROLL for (int i = 0; i < M * P; i++) sums[i] = k0 ? out[i] : (vf){};
    for (long column = k0, at = k0 / weight->group; column < k1; column += weight->group, at++) {
        vf d[MOST_PANELS], m[MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) group_scale(weight, first + p, at, column, d + p, m + p);
        for (long k = column; k < column + weight->group; k += 8) {
            vi codes[MOST_PANELS];
            const uint8_t *bytes[MOST_PANELS];
            UNROLL for (int p = 0; p < P; p++) {
                bytes[p] = weight->panels + (first + p) * weight->panel_bytes + k * (four ? 8 : 16);
                if (four) codes[p] = *(const vi *)bytes[p];
            }
            UNROLL for (int i = 0; i < 8; i++) {
                vf w[MOST_PANELS];
                UNROLL for (int p = 0; p < P; p++) {
                    vf code = four ? look_up(table, (vi)((vu)codes[p] >> (4 * i))) : load_bytes((const int8_t *)bytes[p] + i * LANES);
                    w[p] = code * d[p] + m[p];
                }
                add_columns(M, P, sums, w, x + (k + i) * M);
            }
        }
    }
    UNROLL for (int i = 0; i < M * P; i++) out[i] = sums[i];
}

// A panel of codes as one of floats, [k][16].
static void expand_panel(const Weight *weight, long panel, float *out) {
    vf table = {};
    if (weight->form == PANEL_CODES4) table = load(weight->table);
    const uint8_t *bytes = weight->panels + panel * weight->panel_bytes;
    for (long column = 0, at = 0; column < weight->k; column += weight->group, at++) {
        vf d, m;
        group_scale(weight, panel, at, column, &d, &m);
        for (long k = column; k < column + weight->group; k++) {
            vf code;
            if (weight->form == PANEL_CODES4) code = look_up(table, (vi)(*(const vu *)(bytes + k / 8 * 64) >> (int)(4 * (k % 8))));
            else code = load_bytes((const int8_t *)bytes + k * LANES);
            store(out + k * LANES, code * d + m);
        }
    }
}

#define FORMS(M, P)                                                                                                                 \
    switch (weight->form) {                                                                                                         \
    case PANEL_FLOAT32: float32_panels(M, P, weight, first, k0, k1, (const float *)x, out); return;                                         \
    case PANEL_HALF: half_panels(M, P, weight, first, k0, k1, (const float *)x, out); return;                                               \
    case PANEL_PAIRS: pair_panels(M, P, weight, first, k0, k1, x, out); return;                                                             \
    case PANEL_CODES4: if (M <= MOST_CODED) coded_panels(1, M, P, weight, first, k0, k1, (const float *)x, out); return;                    \
    default: if (M <= MOST_CODED) coded_panels(0, M, P, weight, first, k0, k1, (const float *)x, out); return;                              \
    }
#define KERNEL(M, P) static void rows_##M##_panels_##P(const Weight *weight, long first, long k0, long k1, const void *x, vf *out) { FORMS(M, P) }
KERNEL(1, 4) KERNEL(1, 1) KERNEL(2, 2) KERNEL(2, 1) KERNEL(4, 1)
#if defined(__AVX512F__)
KERNEL(4, 4) KERNEL(8, 2) KERNEL(8, 1) KERNEL(12, 2) KERNEL(12, 1)
#endif

typedef void Run(const Weight *weight, long first, long k0, long k1, const void *x, vf *out);
typedef struct { int rows, panels; Run *many, *one; } Kernel;
static const Kernel KERNELS[] = {
    {1, 4, rows_1_panels_4, rows_1_panels_1},
    {2, 2, rows_2_panels_2, rows_2_panels_1},
#if defined(__AVX512F__)
    {4, 4, rows_4_panels_4, rows_4_panels_1},
    {8, 2, rows_8_panels_2, rows_8_panels_1},
    {12, 2, rows_12_panels_2, rows_12_panels_1},
#else
    {4, 1, rows_4_panels_1, rows_4_panels_1},
#endif
};
#define NUM_KERNELS ((int)(sizeof(KERNELS) / sizeof(KERNELS[0])))

// The kernel for so many rows: the smallest that takes them at once; of more, the one that leaves the fewest rows of zeros.
static const Kernel *kernel_for(long rows) {
    const Kernel *best = KERNELS + NUM_KERNELS - 1;
    if (rows <= best->rows) {
        for (int i = 0; i < NUM_KERNELS; i++) if (KERNELS[i].rows >= rows) return KERNELS + i;
    }
    for (int i = NUM_KERNELS - 1; i >= 0 && 2 * KERNELS[i].rows > best->rows; i--) {
        long own = (rows + KERNELS[i].rows - 1) / KERNELS[i].rows * KERNELS[i].rows, least = (rows + best->rows - 1) / best->rows * best->rows;
        if (own < least) best = KERNELS + i;
    }
    return best;
}
