// Decode attention over a paged KV cache on a CPU: online softmax over tiles of keys, with split-KV for long contexts.
#include <omp.h>
#include <stdlib.h>
#include "vectors.h"

#define TILE 16
#define MOST_DIM 256

typedef struct {
    void *key, *value;
    int64_t key_block, key_slot, key_head, value_block, value_slot, value_head; // strides in elements; dim has stride 1
    int64_t block_size;
} Cache;

// Parameters that all layers of a kind share in a step.
typedef struct {
    const int32_t *lens, *sequences; // for each token: number of keys it sees, and its row of the table
    const int32_t *table; // row stride table_row
    const int64_t *slots; // slot for each token's k and v; -1 means not stored
    int64_t table_row, tokens, num_heads, num_kv_heads, dim, value_dim;
    int64_t window; // 0 means no window
    float scale;
    int32_t type;
} Step;

typedef struct {
    const Step *step;
    const Cache *cache;
    const void *q; // [tokens, num_heads, dim], row stride q_row
    const void *k, *v; // [tokens, num_kv_heads, dim or value_dim], stored to the slots first; NULL if the cache has them
    void *out; // [tokens, num_heads, value_dim], contiguous
    int64_t q_row, k_row, v_row;
} Decode;

typedef struct { float most, total; } Softmax;

static __thread float *partial;
static __thread size_t partial_size;

// Return a row as float32: in place, or converted from half precision into `room`.
INLINE const float *row_of(const void *base, long at, int type, long dim, float *room) {
    if (type == FLOAT32) return (const float *)base + at;
    for (long i = 0; i < dim; i += WIDTH) store(room + i, load_any(base, type, at + i));
    return room;
}

INLINE void tile_scores(int N, long dim, const float *q, const float *const *keys, int count, float *scores) {
    for (int j = 0; j < count; j++) {
        vf products = {};
        if (N) { _Pragma("GCC unroll 32") for (int i = 0; i < N; i++) products += load(q + i * WIDTH) * load(keys[j] + i * WIDTH); }
        else for (long i = 0; i < dim; i += WIDTH) products += load(q + i) * load(keys[j] + i);
        scores[j] = sum(products);
    }
}

INLINE void tile_values(int N, long dim, const float *weights, const float *const *values, int count, float shrink, float *sums) {
    if (N) {
        vf kept[MOST_DIM / WIDTH];
        _Pragma("GCC unroll 32") for (int i = 0; i < N; i++) kept[i] = load(sums + i * WIDTH) * splat(shrink);
        for (int j = 0; j < count; j++) {
            _Pragma("GCC unroll 32") for (int i = 0; i < N; i++) kept[i] += splat(weights[j]) * load(values[j] + i * WIDTH);
        }
        _Pragma("GCC unroll 32") for (int i = 0; i < N; i++) store(sums + i * WIDTH, kept[i]);
    } else {
        for (long i = 0; i < dim; i += WIDTH) {
            vf kept = load(sums + i) * splat(shrink);
            for (int j = 0; j < count; j++) kept += splat(weights[j]) * load(values[j] + i);
            store(sums + i, kept);
        }
    }
}

// Update one head's softmax and sums with a tile. sums: [value_dim].
INLINE void take_tile(const Step *s, const float *q, const float *const *keys, const float *const *values, int count, Softmax *softmax,
                      float *sums) {
    float scores[TILE];
    if (s->dim == 64) tile_scores(64 / WIDTH, 64, q, keys, count, scores);
    else if (s->dim == 128) tile_scores(128 / WIDTH, 128, q, keys, count, scores);
    else if (s->dim == 256) tile_scores(256 / WIDTH, 256, q, keys, count, scores);
    else tile_scores(0, s->dim, q, keys, count, scores);
    for (int j = count; j < TILE; j++) scores[j] = -INFINITY;
    float most = softmax->most;
    for (int j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    float shrink = softmax->most == -INFINITY ? 0.0f : expf(softmax->most - most);
    vf total = {};
    for (int j = 0; j < TILE; j += WIDTH) {
        vf score = load(scores + j), weights = where(score == splat(-INFINITY), (vf){}, exponential(score - splat(most)));
        store(scores + j, weights);
        total += weights;
    }
    softmax->total = softmax->total * shrink + sum(total);
    softmax->most = most;
    if (s->value_dim == 64) tile_values(64 / WIDTH, 64, scores, values, count, shrink, sums);
    else if (s->value_dim == 128) tile_values(128 / WIDTH, 128, scores, values, count, shrink, sums);
    else if (s->value_dim == 256) tile_values(256 / WIDTH, 256, scores, values, count, shrink, sums);
    else tile_values(0, s->value_dim, scores, values, count, shrink, sums);
}

typedef struct { long key, value; } Place; // of a KV head's key and value, in elements

INLINE Place place_of(const Cache *c, const int32_t *table, long position, long kv_head) {
    long block = table[position / c->block_size], slot = position % c->block_size;
    return (Place){block * c->key_block + slot * c->key_slot + kv_head * c->key_head,
                   block * c->value_block + slot * c->value_slot + kv_head * c->value_head};
}

INLINE void fetch_row(const void *base, long at, long dim, long size) {
    for (long i = 0; i < dim * size; i += 64) __builtin_prefetch((const char *)base + at * size + i, 0, 2);
}

// Attend the heads of a KV head to keys from `first` up to `last`. sums: [group, value_dim]; softmax: [group].
static void attend(const Decode *d, long token, long kv_head, long first, long last, Softmax *softmax, float *sums) {
    const Step *s = d->step;
    const Cache *c = d->cache;
    long group = s->num_heads / s->num_kv_heads;
    float q[group * s->dim], key_room[TILE * MOST_DIM], value_room[TILE * MOST_DIM];
    for (long g = 0; g < group; g++) {
        long at = token * d->q_row + (kv_head * group + g) * s->dim;
        for (long i = 0; i < s->dim; i += WIDTH) store(q + g * s->dim + i, load_any(d->q, s->type, at + i) * splat(s->scale));
        softmax[g] = (Softmax){-INFINITY, 0};
        memset(sums + g * s->value_dim, 0, s->value_dim * sizeof(float));
    }
    const int32_t *table = s->table + s->sequences[token] * s->table_row;
    long size = s->type == FLOAT32 ? 4 : 2;
    for (long start = first; start < last; start += TILE) {
        int count = last - start < TILE ? (int)(last - start) : TILE;
        const float *keys[TILE], *values[TILE];
        for (int j = 0; j < count; j++) {
            Place own = place_of(c, table, start + j, kv_head);
            keys[j] = row_of(c->key, own.key, s->type, s->dim, key_room + j * s->dim);
            values[j] = row_of(c->value, own.value, s->type, s->value_dim, value_room + j * s->value_dim);
            if (start + j + TILE >= last) continue;
            Place next = place_of(c, table, start + j + TILE, kv_head);
            fetch_row(c->key, next.key, s->dim, size);
            fetch_row(c->value, next.value, s->value_dim, size);
        }
        for (long g = 0; g < group; g++) take_tile(s, q + g * s->dim, keys, values, count, softmax + g, sums + g * s->value_dim);
    }
}

INLINE void write_out(const Decode *d, long token, long head, const float *sums, float factor) {
    const Step *s = d->step;
    for (long i = 0; i < s->value_dim; i += WIDTH)
        store_any(d->out, s->type, (token * s->num_heads + head) * s->value_dim + i, load(sums + i) * splat(factor));
}

// Merge the splits of all heads of one KV head. parts: [count][group] of a softmax and sums.
static void merge(const Decode *d, long token, long kv_head, long count, const float *parts, long stride) {
    const Step *s = d->step;
    long group = s->num_heads / s->num_kv_heads;
    for (long g = 0; g < group; g++) {
        float most = -INFINITY, total = 0, sums[MOST_DIM] = {0};
        for (long n = 0; n < count; n++) {
            float part = parts[n * stride + 2 * g];
            most = part > most ? part : most;
        }
        for (long n = 0; n < count; n++) {
            const float *part = parts + n * stride;
            float factor = part[2 * g] == -INFINITY ? 0.0f : expf(part[2 * g] - most);
            total += part[2 * g + 1] * factor;
            const float *from = part + 2 * group + g * s->value_dim;
            for (long i = 0; i < s->value_dim; i += WIDTH) store(sums + i, load(sums + i) + load(from + i) * splat(factor));
        }
        write_out(d, token, kv_head * group + g, sums, total > 0 ? 1 / total : 0);
    }
}

#define LEAST_PART 32768 // products of q and keys per split, below which a split costs more than it saves

// Returns 1 if memory is exhausted.
int headway_decode(const Decode *d) {
    const Step *s = d->step;
    const Cache *c = d->cache;
    long group = s->num_heads / s->num_kv_heads, items = s->tokens * s->num_kv_heads, longest = 0, size = s->type == FLOAT32 ? 4 : 2;
    for (long t = 0; t < s->tokens; t++) longest = s->lens[t] > longest ? s->lens[t] : longest;
    if (s->window && longest > s->window) longest = s->window;
    long threads = omp_get_max_threads(), wanted = items ? (4 * threads + items - 1) / items : 1, most = longest * group * s->dim / LEAST_PART;
    long parts = wanted < most ? wanted : most;
    parts = parts < 1 ? 1 : parts;
    long stride = group * (2 + s->value_dim);
    size_t needed = (size_t)items * parts * stride * sizeof(float);
    if (needed > partial_size) {
        free(partial);
        partial_size = needed * 2;
        if (posix_memalign((void **)&partial, 64, partial_size)) { partial = NULL; partial_size = 0; return 1; }
    }
    float *held = partial;
#pragma omp parallel num_threads(threads)
    {
        if (d->k) {
#pragma omp for schedule(static)
            for (long item = 0; item < items; item++) {
                long t = item / s->num_kv_heads, h = item % s->num_kv_heads;
                if (s->slots[t] < 0) continue;
                long block = s->slots[t] / c->block_size, slot = s->slots[t] % c->block_size;
                memcpy((char *)c->key + (block * c->key_block + slot * c->key_slot + h * c->key_head) * size,
                       (const char *)d->k + (t * d->k_row + h * s->dim) * size, s->dim * size);
                memcpy((char *)c->value + (block * c->value_block + slot * c->value_slot + h * c->value_head) * size,
                       (const char *)d->v + (t * d->v_row + h * s->value_dim) * size, s->value_dim * size);
            }
        }
#pragma omp for schedule(dynamic)
        for (long part = 0; part < items * parts; part++) {
            long item = part / parts, n = part % parts, token = item / s->num_kv_heads, len = s->lens[token];
            long from = s->window && len > s->window ? len - s->window : 0, each = (len - from + parts - 1) / parts;
            long first = from + n * each, last = first + each < len ? first + each : len;
            float *room = held + part * stride;
            Softmax *softmax = (Softmax *)room;
            attend(d, token, item % s->num_kv_heads, first, last, softmax, room + 2 * group);
            if (parts == 1) {
                for (long g = 0; g < group; g++) {
                    float total = softmax[g].total;
                    write_out(d, token, item % s->num_kv_heads * group + g, room + 2 * group + g * s->value_dim, total > 0 ? 1 / total : 0);
                }
            }
        }
        if (parts > 1) {
#pragma omp for schedule(static)
            for (long item = 0; item < items; item++)
                merge(d, item / s->num_kv_heads, item % s->num_kv_heads, parts, held + item * parts * stride, stride);
        }
    }
    return 0;
}
