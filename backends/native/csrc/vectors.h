// Vectors of 16 floats in the compiler's own terms, which become AVX-512, AVX2 or NEON; intrinsics where those terms have no word.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef int8_t v16b __attribute__((vector_size(16), aligned(1)));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2)));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; } // (0 + x would be an addition)
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

INLINE vf load_bf16(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const v16h *)p, vu) << 16); }
INLINE vf load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vf x;
    for (int i = 0; i < LANES; i++) x[i] = half_float(p[i]);
    return x;
#endif
}
// (By __builtin_convertvector gcc 12 takes bytes one at a time.)
INLINE vf load_bytes(const int8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const v16b *)p, vf);
#endif
}
INLINE vf load_unsigned(const int8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return __builtin_convertvector((vi)(__builtin_convertvector(*(const v16b *)p, vi) & 255), vf);
#endif
}

// Entries of a table of 16, by the low four bits of each lane.
INLINE vf look_up(vf table, vi at) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)at, (__m512)table);
#else
    float entries[LANES];
    store(entries, table);
    vf x;
    for (int i = 0; i < LANES; i++) x[i] = entries[at[i] & 15];
    return x;
#endif
}

INLINE float sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}
INLINE vf where(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf x, vf y) { return where(x > y, x, y); }

// exp to 2 units in the last place: a polynomial on [-ln 2 / 2, ln 2 / 2], times a power of two (Cephes, S. Moshier). A NaN stays.
INLINE vf exponential(vf x) {
    vf held = where(x > splat(88.0f), splat(88.0f), where(x < splat(-87.0f), splat(-87.0f), x));
    vf shifted = held * splat(1.44269504088896341f) + splat(12582912.0f); // 1.5 * 2^23: the integer lies in the low bits
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
#if defined(__AVX512F__)
    if (type == FLOAT16) { _mm256_storeu_si256((__m256i *)halves, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); return; }
#endif
#if defined(__AVX512BF16__)
    if (type == BFLOAT16) { __m256bh y = _mm512_cvtneps_pbh((__m512)x); memcpy(halves, &y, 32); return; }
#endif
    for (int i = 0; i < LANES; i++) halves[i] = type == BFLOAT16 ? float_bf16(x[i]) : float_half(x[i]);
}
