// GEMM over quantized weights on a CPU: integer sums if the CPU has instructions that multiply and add several at once, else float sums.
//
// A CPU with AVX-512 VNNI handles 32 16-bit or 64 8-bit numbers per instruction. For that, x is rounded to 16 bits (error about 2e-5) or
// to 8 bits (X_BITS; 0 means floats on any CPU), in groups of 32 columns, scaled by the largest magnitude, as llama.cpp rounds to 8 bits
// (Q8_0 in ggml-quants.c). Integer sums are exact; everything else is in float32.
#pragma once
#include "panels.h"

#ifndef X_BITS
#define X_BITS 16
#endif
#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__)
#undef X_BITS
#define X_BITS 0
#endif
#define ROUNDED 32 // columns of x that are rounded together
#define SUMMED 32 // columns of x per sum; the sums follow the columns. With a minimum m, weights have one m per group of this many columns
#define SUPERBLOCK 256 // columns
#define MOST_CODED 8 // rows up to which values are dequantized on the fly; above, a packed block is dequantized once to floats

// Load d and m of a group, for a register of outputs from `at` on. scales: the block's numbers for the group; supers: for its superblock.
INLINE void group_scale(int scheme, const uint8_t *scales, const uint16_t *supers, int at, vf *d, vf *m) {
    *m = (vf){};
    if (scheme == SCALE_D) {
        *d = load_half((const uint16_t *)scales + at);
    } else if (scheme == SCALE_DM) {
        *d = load_half((const uint16_t *)scales + at);
        *m = load_half((const uint16_t *)scales + LANES + at);
    } else if (scheme == SCALE_SUPER) {
        *d = load_half(supers + at) * load_bytes((const int8_t *)scales + at);
    } else {
        *d = load_half(supers + at) * load_unsigned((const int8_t *)scales + at);
        *m = load_half(supers + LANES + at) * load_unsigned((const int8_t *)scales + LANES + at);
    }
}

// Return the bytes of a group's numbers.
INLINE long group_bytes(int scheme) {
    return scheme == SCALE_D ? 2 * LANES : scheme == SCALE_DM ? 4 * LANES : scheme == SCALE_SUPER ? LANES : 2 * LANES;
}

#if X_BITS
#define X_MOST ((1 << (X_BITS - 1)) - 1)
#define QUAD (X_BITS / 8) // words per four columns of x
// A group of columns of M rows of x, as the kernels read it. For each row: the step, the step times the sum of the rounded values, -128
// times that sum (weights have 128 added), and -128 times the sums of each half. Then the values, four columns of each row in turn: as
// bytes, or in 16 bits the first and third of each row, then the second and fourth.
typedef struct { const float *step, *total; const int32_t *offset; const uint32_t *codes; __m512i table; } RoundedGroup;
#define ROUNDED_BYTES(M) ((long)(5 + ROUNDED / 4 * QUAD) * (M) * 4)

INLINE RoundedGroup rounded_group(const void *packed, long number, int M) {
    const uint8_t *at = (const uint8_t *)packed + number * ROUNDED_BYTES(M);
    const float *floats = (const float *)at;
    return (RoundedGroup){floats, floats + M, (const int32_t *)(floats + 2 * M), (const uint32_t *)(floats + 5 * M), {}};
}

// Round a group of one row. low, high: its columns.
INLINE void round_group(vf low, vf high, int row, int M, void *packed, long number) {
    RoundedGroup group = rounded_group(packed, number, M);
    __m512i sign = _mm512_set1_epi32(0x7fffffff);
    // As integers, so that a NaN is the largest and is kept. (In a group so small that the factor could be infinite, all values become
    // zero.)
    __m512i most = _mm512_max_epi32(_mm512_and_si512((__m512i)low, sign), _mm512_and_si512((__m512i)high, sign));
    float largest = bits_float((uint32_t)_mm512_reduce_max_epi32(most));
    vf factor = splat(largest > 1e-30f ? X_MOST / largest : 0.0f);
    __m512i codes[2] = {_mm512_cvtps_epi32((__m512)(low * factor)), _mm512_cvtps_epi32((__m512)(high * factor))};
    int32_t sums[2] = {_mm512_reduce_add_epi32(codes[0]), _mm512_reduce_add_epi32(codes[1])};
    float *step = (float *)group.step, *total = (float *)group.total;
    int32_t *offset = (int32_t *)group.offset;
    step[row] = largest / X_MOST;
    total[row] = step[row] * (float)(sums[0] + sums[1]);
    offset[row] = -128 * (sums[0] + sums[1]);
    offset[M + row] = -128 * sums[0];
    offset[2 * M + row] = -128 * sums[1];
    uint32_t words[ROUNDED / 4 * QUAD];
    for (int i = 0; i < 2; i++) {
#if X_BITS == 8
        _mm_storeu_si128((__m128i *)(words + 4 * i), _mm512_cvtepi32_epi8(codes[i]));
#else
        __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
        _mm256_storeu_si256((__m256i *)(words + 8 * i), _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(codes[i]), order));
#endif
    }
    for (int i = 0; i < ROUNDED / 4 * QUAD; i++) ((uint32_t *)group.codes)[i * M + row] = words[i];
}

// Return sum plus the products of four columns. w: 16 outputs; x: a row, whose words are M apart.
INLINE __m512i add_quad(__m512i sum, __m512i w, const uint32_t *x, int M) {
#if X_BITS == 8
    (void)M;
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32((int)x[0]));
#else
    sum = _mm512_dpwssd_epi32(sum, _mm512_and_si512(w, _mm512_set1_epi16(255)), _mm512_set1_epi32((int)x[0]));
    return _mm512_dpwssd_epi32(sum, _mm512_srli_epi16(w, 8), _mm512_set1_epi32((int)x[M]));
#endif
}

// Addresses at which P packed blocks are read.
typedef struct { const uint8_t *codes[MOST_PANELS], *scales[MOST_PANELS]; const uint16_t *supers[MOST_PANELS]; } Places;

// Add sums over N columns (16 or 32) under one scale, from quarter `from` of a group of x on. bits: of a value.
INLINE void add_group(int bits, int N, int from, int scheme, int M, int P, const Places *at, const RoundedGroup *x, long next, vf *sums) {
    __m512i codes[MOST_ROWS * MOST_PANELS], low = _mm512_set1_epi8(15), table = x->table;
    int quads = bits < 8 ? 2 : 1, has_m = scheme == SCALE_DM || scheme == SCALE_SUPER_DM, numbers = bits < 8 && has_m;
    int planes = bits == 5 || bits == 6 ? bits - 4 : 0, less = planes ? 8 - bits : 0; // codes5 and codes6 have 16 or 32 added, not 128
    const int32_t *offset = x->offset + (N == ROUNDED ? 0 : from ? 2 * M : M);
    UNROLL for (int r = 0; r < M; r++) UNROLL for (int p = 0; p < P; p++) codes[r * P + p] = _mm512_set1_epi32(numbers ? 0 : offset[r] >> less);
    UNROLL for (int i = 0; i < planes; i++) UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(at->codes[p] + 256 + 64 * i + next, 0, 2);
    UNROLL for (int i = 0; i < N / 4; i += quads) {
        __m512i w[2][MOST_PANELS];
        UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *place = at->codes[p] + (from + i) / quads * 64;
            w[0][p] = _mm512_loadu_si512(place);
            __builtin_prefetch(place + next, 0, 2);
            if (bits == 8) continue;
            w[1][p] = _mm512_and_si512(_mm512_srli_epi16(w[0][p], 4), low);
            w[0][p] = _mm512_and_si512(w[0][p], low);
            for (int j = 0; j < 2; j++) {
                const __mmask64 *high = (const __mmask64 *)(at->codes[p] + 256) + (from + i + j) * planes;
                for (int h = 0; h < planes; h++) w[j][p] = _mm512_mask_add_epi8(w[j][p], high[h], w[j][p], _mm512_set1_epi8(16 << h));
                if (!planes && !numbers) w[j][p] = _mm512_shuffle_epi8(table, w[j][p]);
            }
        }
        UNROLL for (int j = 0; j < quads; j++) UNROLL for (int r = 0; r < M; r++) {
            const uint32_t *row = x->codes + (from + i + j) * QUAD * M + r;
            UNROLL for (int p = 0; p < P; p++) codes[r * P + p] = add_quad(codes[r * P + p], w[j][p], row, M);
        }
    }
    UNROLL for (int p = 0; p < P; p++) {
        vf d, m;
        group_scale(scheme, at->scales[p] + (from ? group_bytes(scheme) : 0), at->supers[p], 0, &d, &m);
        UNROLL for (int r = 0; r < M; r++) {
            sums[r * P + p] += (vf)_mm512_cvtepi32_ps(codes[r * P + p]) * (splat(x->step[r]) * d);
            if (has_m) sums[r * P + p] += m * splat(x->total[r]);
        }
    }
}

// Multiply groups of N columns of one scheme.
INLINE void coded_groups(int bits, int N, int scheme, int M, int P, const Weight *weight, long first, long k0, long k1, const void *packed,
                         vf *out) {
    vf sums[MOST_ROWS * MOST_PANELS];
    Places at;
    RoundedGroup x = rounded_group(packed, k0 / ROUNDED, M);
    long next = ahead(P, weight), bytes = 64 * bits, supers = scheme == SCALE_SUPER ? LANES : 2 * LANES;
    x.table = (__m512i){};
    if (bits == 4) x.table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)weight->table));
    UNROLL for (int p = 0; p < P; p++) {
        long panel = first + p;
        at.codes[p] = weight->panels + panel * weight->panel_bytes + k0 / ROUNDED * bytes;
        at.scales[p] = weight->scales + panel * weight->scale_bytes + k0 / N * group_bytes(scheme);
        at.supers[p] = (const uint16_t *)((const uint8_t *)weight->supers + panel * weight->super_bytes);
        if (scheme >= SCALE_SUPER) at.supers[p] += k0 / SUPERBLOCK * supers;
    }
    UNROLL for (int i = 0; i < M * P; i++) sums[i] = k0 ? out[i] : (vf){};
    for (long column = k0; column < k1; column += ROUNDED) {
        add_group(bits, N, 0, scheme, M, P, &at, &x, next, sums);
        if (N < ROUNDED) add_group(bits, N, N / 4, scheme, M, P, &at, &x, next, sums);
        UNROLL for (int p = 0; p < P; p++) {
            at.codes[p] += bytes;
            at.scales[p] += ROUNDED / N * group_bytes(scheme);
            if (scheme >= SCALE_SUPER && (column + ROUNDED) % SUPERBLOCK == 0) at.supers[p] += supers;
        }
        x.step = (const float *)((const uint8_t *)x.step + ROUNDED_BYTES(M));
        x.total = (const float *)((const uint8_t *)x.total + ROUNDED_BYTES(M));
        x.offset = (const int32_t *)((const uint8_t *)x.offset + ROUNDED_BYTES(M));
        x.codes = (const uint32_t *)((const uint8_t *)x.codes + ROUNDED_BYTES(M));
    }
    UNROLL for (int i = 0; i < M * P; i++) out[i] = sums[i];
}
#else
#define CODES_UNIT 0x1p-24f // factor of a value (a group's sums have room for x up to 1e29)

INLINE Table code_table(const Weight *weight) {
    float entries[16] = {0};
    for (int i = 0; i < 16 && weight->table; i++) entries[i] = (float)weight->table[i] - 128.0f;
    return table_of(entries);
}

// Unpack four columns for a register's outputs, as numbers times 2^24: of 8-bit values, or of eight 4-bit values (low halves first).
INLINE void four_columns(int four, int high, Table table, vu held, vf *out) {
    if (four) look_up(table, held, high, out);
    else UNROLL for (int i = 0; i < 4; i++) out[i] = to_floats(byte_on_top(held ^ 0x80808080u, i));
}

// Return the address of a group's scales. (M rows of sums over one group are scaled at once, so that a value costs only its conversion.)
INLINE const uint8_t *scales_at(const Weight *weight, int scheme, int N, long panel, long column) {
    return weight->scales + panel * weight->scale_bytes + column / N * group_bytes(scheme);
}
INLINE const uint16_t *supers_at(const Weight *weight, int scheme, long panel, long column) {
    if (scheme < SCALE_SUPER) return NULL;
    const uint16_t *supers = (const uint16_t *)((const uint8_t *)weight->supers + panel * weight->super_bytes);
    return supers + column / SUPERBLOCK * (scheme == SCALE_SUPER ? LANES : 2 * LANES);
}

// w: four columns for a register's outputs; x: [4][M]; sums: M rows, V apart.
INLINE void add_four(const vf *w, int M, int V, const float *x, vf *sums) {
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int r = 0; r < M; r++) sums[r * V] += w[i] * splat(x[i * M + r]);
}

INLINE void coded_groups(int bits, int N, int scheme, int M, int P, const Weight *weight, long first, long k0, long k1, const float *x,
                         vf *out) {
    vf sums[MOST_SUMS];
    const float *totals = x + weight->k * M;
    Table table = code_table(weight);
    int four = bits == 4;
    begin_sums(M * P * PARTS, k0, out, sums);
    long bytes = four ? 8 : 16; // bytes per column
    for (long column = k0; column < k1; column += N) {
        vf group[MOST_SUMS];
        UNROLL for (int i = 0; i < M * P * PARTS; i++) group[i] = (vf){};
        for (long k = column; k < column + N; k += four ? 8 : 4) {
            const float *rows = x + k * M;
            EACH_PART(P) {
                vu held = *(const vu *)(weight->panels + (first + p) * weight->panel_bytes + k * bytes + 4 * at);
                vf w[4];
                four_columns(four, 0, table, held, w);
                add_four(w, M, P * PARTS, rows, group + v);
                if (!four) continue;
                four_columns(four, 1, table, held, w);
                add_four(w, M, P * PARTS, rows + 4 * M, group + v);
            }
        }
        EACH_PART(P) {
            vf d, m;
            group_scale(scheme, scales_at(weight, scheme, N, first + p, column), supers_at(weight, scheme, first + p, column), at, &d, &m);
            d *= splat(CODES_UNIT);
            UNROLL for (int r = 0; r < M; r++) {
                sums[r * P * PARTS + v] += group[r * P * PARTS + v] * d;
                if (scheme == SCALE_DM || scheme == SCALE_SUPER_DM) sums[r * P * PARTS + v] += m * splat(totals[column / SUMMED * M + r]);
            }
        }
    }
    UNROLL for (int i = 0; i < M * P * PARTS; i++) out[i] = sums[i];
}

// Return the floats needed for dequantized blocks; 0 means that none are dequantized.
INLINE size_t expanded_floats(const Weight *weight, long rows) {
    return is_coded(weight) && rows > MOST_CODED ? (size_t)2 * MOST_PANELS * weight->k * LANES : 0;
}

// Dequantize a packed block to floats [k][16].
INLINE void expand_groups(int bits, int N, int scheme, const Weight *weight, long panel, float *out) {
    Table table = code_table(weight);
    int four = bits == 4;
    const uint8_t *bytes = weight->panels + panel * weight->panel_bytes;
    for (long column = 0; column < weight->k; column += N) {
        EACH_PART(1) {
            vf d, m;
            group_scale(scheme, scales_at(weight, scheme, N, panel, column), supers_at(weight, scheme, panel, column), at, &d, &m);
            d *= splat(CODES_UNIT);
            for (long k = column; k < column + N; k += four ? 8 : 4) {
                vu held = *(const vu *)(bytes + k * (four ? 8 : 16) + 4 * at);
                float *numbers = out + k * LANES + at;
                vf w[4];
                four_columns(four, 0, table, held, w);
                UNROLL for (int i = 0; i < 4; i++) store(numbers + i * LANES, w[i] * d + m);
                if (!four) continue;
                four_columns(four, 1, table, held, w);
                UNROLL for (int i = 0; i < 4; i++) store(numbers + (4 + i) * LANES, w[i] * d + m);
            }
            (void)v;
        }
    }
}
#endif

// Schemes in .gguf files: groups of 32 columns, of 16 for Q6_K.
#define BY_SCHEME(DO, BITS, ...)                                                                  \
    if (BITS == 6) DO(BITS, 16, SCALE_SUPER, __VA_ARGS__);                                        \
    else if (weight->scale == SCALE_D) DO(BITS, 32, SCALE_D, __VA_ARGS__);                        \
    else if (X_BITS && BITS == 8) __builtin_trap(); /* packed as codes5 or codes6 */              \
    else if (weight->scale == SCALE_DM) DO(BITS, 32, SCALE_DM, __VA_ARGS__);                      \
    else if (weight->scale == SCALE_SUPER_DM) DO(BITS, 32, SCALE_SUPER_DM, __VA_ARGS__);          \
    else if (BITS == 4) DO(BITS, 32, SCALE_SUPER, __VA_ARGS__);                                   \
    else if (BITS == 8) DO(BITS, 16, SCALE_SUPER, __VA_ARGS__);

INLINE void coded_panels(int bits, int M, int P, const Weight *weight, long first, long k0, long k1, const void *x, vf *out) {
    BY_SCHEME(coded_groups, bits, M, P, weight, first, k0, k1, x, out)
}

#if !X_BITS
static void expand_panel(const Weight *weight, long panel, float *out) {
    if (weight->form == PANEL_CODES4) { BY_SCHEME(expand_groups, 4, weight, panel, out) }
    else { BY_SCHEME(expand_groups, 8, weight, panel, out) }
}
#endif
