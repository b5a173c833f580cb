// Vectors of floats as wide as the CPU's registers, by compiler extensions; intrinsics for everything else.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16 // outputs of a packed block
// Lanes of a register. (gcc keeps wider vectors in memory: GEMMs on a CPU with AVX2 took 20 times as long.)
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PARTS (LANES / WIDTH) // registers for a packed block's outputs
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int8_t vb __attribute__((vector_size(WIDTH), aligned(1)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH), aligned(2)));

enum { FLOAT32, BFLOAT16, FLOAT16 };

// (0 + x would cost an addition.)
#if WIDTH == 16
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#elif WIDTH == 8
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x}; }
#else
INLINE vf splat(float x) { return (vf){x, x, x, x}; }
#endif
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE float bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE float bf16_float(uint16_t x) { return bits_float((uint32_t)x << 16); }
INLINE uint16_t float_bf16(float x) { // to the nearest, ties to even
    uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float half_float(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    _Float16 h; memcpy(&h, &x, 2); return (float)h;
#endif
}
INLINE uint16_t float_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    _Float16 h = (_Float16)x; uint16_t bits; memcpy(&bits, &h, 2); return bits;
#endif
}

// (With __builtin_convertvector, gcc 12 converts bytes one at a time.)
#if WIDTH == 16
INLINE vu load_u16(const uint16_t *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf load_half(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf load_bytes(const int8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE vf load_unsigned(const int8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE vf to_floats(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
#elif WIDTH == 8
INLINE vu load_u16(const uint16_t *p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf load_half(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf load_bytes(const int8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf load_unsigned(const int8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf to_floats(vi x) { return (vf)_mm256_cvtepi32_ps((__m256i)x); }
#else
INLINE vu load_u16(const uint16_t *p) { return __builtin_convertvector(*(const vh *)p, vu); }
INLINE vf load_half(const uint16_t *p) {
    vf x;
    for (int i = 0; i < WIDTH; i++) x[i] = half_float(p[i]);
    return x;
}
INLINE vf load_bytes(const int8_t *p) { return __builtin_convertvector(*(const vb *)p, vf); }
INLINE vf load_unsigned(const int8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const vb *)p, vi) & 255, vf); }
INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }
#endif
INLINE vf load_bf16(const uint16_t *p) { return (vf)(load_u16(p) << 16); }

// Return byte `at` of each lane as its highest byte, above zeros.
INLINE vi byte_on_top(vu x, int at) {
    if (at == 3) return (vi)(x & 0xff000000u);
#if WIDTH == 16 && defined(__AVX512BW__)
    __m128i places = _mm_setr_epi8(-1, -1, -1, at, -1, -1, -1, 4 + at, -1, -1, -1, 8 + at, -1, -1, -1, 12 + at);
    return (vi)_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(places));
#elif WIDTH == 8
    __m128i places = _mm_setr_epi8(-1, -1, -1, at, -1, -1, -1, 4 + at, -1, -1, -1, 8 + at, -1, -1, -1, 12 + at);
    return (vi)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(places));
#else
    return (vi)(x << (24 - 8 * at) & 0xff000000u);
#endif
}

// Look up four columns of 4-bit values, times 2^24, in a table of 16 entries, by the low or high halves of each lane's bytes.
#if WIDTH == 16
typedef vf Table;
INLINE Table table_of(const float *entries) { return load(entries) * splat(0x1p24f); }
INLINE void look_up(Table table, vu at, int high, vf *out) {
    for (int i = 0; i < 4; i++) out[i] = (vf)_mm512_permutexvar_ps((__m512i)(at >> (8 * i + 4 * high)), (__m512)table);
}
#else
typedef struct { int8_t entries[16]; } Table;
INLINE Table table_of(const float *entries) {
    Table table;
    for (int i = 0; i < 16; i++) table.entries[i] = (int8_t)entries[i];
    return table;
}
INLINE void look_up(Table table, vu at, int high, vf *out) {
    vu halves = (high ? at >> 4 : at) & 0x0f0f0f0fu;
#if WIDTH == 8
    __m128i entries = _mm_loadu_si128((const __m128i *)table.entries);
    halves = (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)halves);
#else
    uint8_t bytes[4 * WIDTH];
    memcpy(bytes, &halves, sizeof(bytes));
    for (int i = 0; i < 4 * WIDTH; i++) bytes[i] = (uint8_t)table.entries[bytes[i]];
    memcpy(&halves, bytes, sizeof(bytes));
#endif
    for (int i = 0; i < 4; i++) out[i] = to_floats(byte_on_top(halves, i));
}
#endif

INLINE float sum(vf x) {
#if WIDTH == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif WIDTH == 8
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
#endif
}
INLINE vf where(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf x, vf y) { return where(x > y, x, y); }

// exp to 2 units in the last place: a polynomial on [-ln 2 / 2, ln 2 / 2], times a power of two (Cephes, S. Moshier). Keeps a NaN.
INLINE vf exponential(vf x) {
    vf held = where(x > splat(88.0f), splat(88.0f), where(x < splat(-87.0f), splat(-87.0f), x));
    vf shifted = held * splat(1.44269504088896341f) + splat(12582912.0f); // 1.5 * 2^23: the integer is in the low bits
    vi power = (vi)shifted - (vi)splat(12582912.0f);
    vf n = shifted - splat(12582912.0f);
    vf r = held - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f) * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    vf y = (vf)((vi)(p * r * r + r + splat(1.0f)) + (power << 23));
    return where(x == x, y, x);
}

INLINE float load_one(const void *p, int type, long at) {
    if (type == FLOAT32) return ((const float *)p)[at];
    uint16_t x = ((const uint16_t *)p)[at];
    return type == BFLOAT16 ? bf16_float(x) : half_float(x);
}
INLINE void store_one(void *p, int type, long at, float x) {
    if (type == FLOAT32) ((float *)p)[at] = x;
    else ((uint16_t *)p)[at] = type == BFLOAT16 ? float_bf16(x) : float_half(x);
}
INLINE vf load_any(const void *p, int type, long at) {
    if (type == FLOAT32) return load((const float *)p + at);
    const uint16_t *halves = (const uint16_t *)p + at;
    return type == BFLOAT16 ? load_bf16(halves) : load_half(halves);
}
INLINE void store_any(void *p, int type, long at, vf x) {
    if (type == FLOAT32) { store((float *)p + at, x); return; }
    uint16_t *halves = (uint16_t *)p + at;
#if WIDTH == 16
    if (type == FLOAT16) { _mm256_storeu_si256((__m256i *)halves, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); return; }
#elif WIDTH == 8
    if (type == FLOAT16) { _mm_storeu_si128((__m128i *)halves, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); return; }
#endif
#if defined(__AVX512BF16__)
    if (type == BFLOAT16) { __m256bh y = _mm512_cvtneps_pbh((__m512)x); memcpy(halves, &y, 32); return; }
#endif
    for (int i = 0; i < WIDTH; i++) halves[i] = type == BFLOAT16 ? float_bf16(x[i]) : float_half(x[i]);
}
