// Operations of a decoder step between attentions, one parallel region each: norm, GEMM, and fused operations after it.
#include <omp.h>
#include <stdlib.h>
#include "kernels.h"

enum { NO_ACTIVATION, SILU, GELU_TANH, RELU, RELU2 };
enum { STORE, ADD, GATED };

typedef struct {
    const float *weight; // times sqrt(size); NULL means no norm
    double least; // size * eps: x * weight / sqrt(|x|^2 + least)
} Norm;

// out = activation(norm(x) W^T + b), or added to out, or the activation of the first half of its columns times the second. With a
// head_dim, the columns are those of q, k and v, and the heads of q and k are normed and rotated (RoPE).
typedef struct {
    const Weight *weight;
    const void *x; // [rows, k], row stride ldx
    void *out; // [rows, n or n / 2], row stride ldo
    const void *cos, *sin; // [rows, head_dim] in the type of x; NULL means no RoPE
    int64_t rows, ldx, ldo;
    int64_t head_dim, q_heads, heads; // heads: heads of q and k
    Norm norm, q_norm, k_norm; // q_norm, k_norm: over each head
    int32_t type, mode, activation;
} Product;

static __thread uint8_t *scratch;
static __thread size_t scratch_size;

// Return memory of the calling thread that is kept for its next call.
static uint8_t *room(size_t bytes) {
    if (bytes > scratch_size) {
        free(scratch);
        scratch_size = bytes + bytes / 4;
        if (posix_memalign((void **)&scratch, 64, scratch_size)) { scratch = NULL; scratch_size = 0; }
    }
    return scratch;
}

INLINE float norm_factor(const void *x, int type, long at, long size, float least) {
    vf squares = {};
    long i = 0;
    for (; i + WIDTH <= size; i += WIDTH) { vf v = load_any(x, type, at + i); squares += v * v; }
    float total = sum(squares);
    for (; i < size; i++) { float v = load_one(x, type, at + i); total += v * v; }
    return 1.0f / sqrtf(total + least);
}

// Layouts of packed x: column by column (for quantized weights, followed by sums of groups of columns), pairs of bfloat16 columns, or
// groups of columns rounded to integers.
enum { IN_FLOATS, IN_SUMMED_FLOATS, IN_PAIRS, IN_GROUPS };
INLINE int packing_for(const Weight *w) {
    if (is_coded(w)) return X_BITS ? IN_GROUPS : IN_SUMMED_FLOATS;
#if defined(__AVX512BF16__)
    if (w->form == PANEL_PAIRS) return IN_PAIRS;
#endif
    return IN_FLOATS;
}

// Return the bytes of a block of M rows.
INLINE long packed_bytes(int packing, int M, long k) {
#if X_BITS
    if (packing == IN_GROUPS) return k / ROUNDED * ROUNDED_BYTES(M);
#endif
    long totals = packing == IN_SUMMED_FLOATS ? k / SUMMED * 4 * M : 0;
    return k * M * (packing == IN_PAIRS ? 2 : 4) + totals;
}

// Return a register's columns of a row, normed with a factor. n: number of valid columns.
INLINE vf normed(const void *x, int type, long at, long column, int n, Norm norm, float factor) {
    vf v = {};
    if (n == WIDTH) {
        v = load_any(x, type, at + column);
        return norm.weight ? v * splat(factor) * load(norm.weight + column) : v;
    }
    for (int j = 0; j < n; j++) v[j] = load_one(x, type, at + column + j) * factor * (norm.weight ? norm.weight[column + j] : 1.0f);
    return v;
}

// Norm and pack columns k0 up to k1 of a block of M rows of x; zeros for missing rows.
static void pack_block(const Product *p, long block, long k0, long k1, int packing, int M, uint8_t *packed) {
    const void *x = p->x;
    long ldx = p->ldx, rows = p->rows, k = p->weight->k;
    int type = p->type;
    Norm norm = p->norm;
    uint8_t *own = packed + block * packed_bytes(packing, M, k);
    float *floats = (float *)own, factors[MOST_ROWS];
    long first = block * M;
    for (int r = 0; r < M; r++) factors[r] = norm.weight && first + r < rows ? norm_factor(x, type, (first + r) * ldx, k, (float)norm.least) : 1.0f;
#if X_BITS
    if (packing == IN_GROUPS) {
        for (long i = k0; i < k1; i += ROUNDED) for (int r = 0; r < M; r++) {
            vf low = {}, high = {};
            if (first + r < rows) {
                low = normed(x, type, (first + r) * ldx, i, WIDTH, norm, factors[r]);
                high = normed(x, type, (first + r) * ldx, i + WIDTH, WIDTH, norm, factors[r]);
            }
            round_group(low, high, r, M, own, i / ROUNDED);
        }
        return;
    }
#endif
    float *totals = packing == IN_SUMMED_FLOATS ? floats + k * M : NULL;
    for (long group = k0 / SUMMED; totals && group < k1 / SUMMED; group++) memset(totals + group * M, 0, 4 * M);
    for (long i = k0; i < k1; i += WIDTH) {
        int n = k1 - i < WIDTH ? (int)(k1 - i) : WIDTH;
        float values[MOST_ROWS][WIDTH];
        uint16_t rounded[MOST_ROWS][WIDTH];
        for (int r = 0; r < M; r++) {
            vf v = first + r < rows ? normed(x, type, (first + r) * ldx, i, n, norm, factors[r]) : (vf){};
            if (totals) totals[i / SUMMED * M + r] += sum(v);
            if (packing == IN_PAIRS) store_any(rounded[r], BFLOAT16, 0, v); else store(values[r], v);
        }
        if (packing == IN_PAIRS) {
            for (int j = 0; j < n; j += 2) for (int r = 0; r < M; r++) memcpy((uint16_t *)own + (i + j) * M + 2 * r, rounded[r] + j, 4);
        } else {
            for (int j = 0; j < n; j++) for (int r = 0; r < M; r++) floats[(i + j) * M + r] = values[r][j];
        }
    }
}

INLINE vf activated(vf x, int activation) {
    if (activation == SILU) return x / (splat(1.0f) + exponential(-x));
    if (activation == GELU_TANH)
        return x / (splat(1.0f) + exponential(splat(-1.5957691216057308f) * (x + splat(0.044715f) * x * x * x)));
    if (activation == RELU || activation == RELU2) {
        vf y = larger(x, (vf){});
        return activation == RELU ? y : y * y;
    }
    return x;
}

// Finish sums of a register of outputs from `column` on, and store them. part: M sums, `apart` from one another.
INLINE void finish(const Product *p, long column, long row, int M, const vf *part, const vf *gate, int apart) {
    const Weight *w = p->weight;
    long half = w->n / 2, limit = p->mode == GATED ? half : w->n;
    long n = limit - column < WIDTH ? limit - column : WIDTH;
    for (int r = 0; r < M && row + r < p->rows; r++) {
        vf y = part[r * apart];
        long at = (row + r) * p->ldo + column;
        if (p->mode == GATED) {
            vf g = gate[r * apart];
            if (w->bias) { g += load(w->bias + column); y += load(w->bias + half + column); }
            y = activated(g, p->activation) * y;
        } else {
            if (w->bias) y += load(w->bias + column);
            y = activated(y, p->activation);
        }
        if (n == WIDTH) {
            if (p->mode == ADD) y += load_any(p->out, p->type, at);
            store_any(p->out, p->type, at, y);
        } else {
            for (long i = 0; i < n; i++) store_one(p->out, p->type, at + i, y[i] + (p->mode == ADD ? load_one(p->out, p->type, at + i) : 0.0f));
        }
    }
}

#define HELD_BLOCKS 8 // blocks of rows whose sums are held during the loop over columns
#define PACKED_ALONE 4 // rows up to which each thread packs x by itself
#define PIECE 64      // columns that one thread packs
#define CHUNK 256     // columns of a packed block that several blocks of rows read while it is cached

// Multiply packed blocks from `first` up to `last`, for all rows. floats: room for 2 * MOST_PANELS dequantized blocks.
static void multiply(const Product *p, const Kernel *kernel, const uint8_t *packed, long first, long last, float *floats) {
    const Weight *w = p->weight;
    int M = kernel->rows;
    long blocks = (p->rows + M - 1) / M, half = p->mode == GATED ? w->n / 2 / LANES : 0;
    long block_bytes = packed_bytes(packing_for(w), M, w->k);
#if X_BITS
    int expands = 0;
    (void)floats;
#else
    int expands = expanded_floats(w, p->rows) != 0;
#endif
    Weight expanded = *w;
    if (expands) {
        expanded.form = PANEL_FLOAT32;
        expanded.panels = (const uint8_t *)floats;
        expanded.panel_bytes = w->k * LANES * 4;
    }
    for (long panel = first; panel < last;) {
        int P = last - panel >= kernel->panels ? kernel->panels : 1;
        Run *run = P == kernel->panels ? kernel->many : kernel->one;
#if !X_BITS
        for (int i = 0; i < P && expands; i++) {
            expand_panel(w, panel + i, floats + i * w->k * LANES);
            if (half) expand_panel(w, half + panel + i, floats + (P + i) * w->k * LANES);
        }
#endif
        const Weight *read = expands ? &expanded : w;
        long gate = expands ? 0 : panel, up = half ? (expands ? P : half + panel) : gate;
        for (long from = 0; from < blocks; from += HELD_BLOCKS) {
            long to = from + HELD_BLOCKS < blocks ? from + HELD_BLOCKS : blocks, step = to - from > 1 ? CHUNK : w->k;
            vf sums[HELD_BLOCKS][MOST_SUMS], gates[HELD_BLOCKS][MOST_SUMS];
            for (long k0 = 0; k0 < w->k; k0 += step) {
                long k1 = k0 + step < w->k ? k0 + step : w->k;
                for (long block = from; block < to; block++) run(read, up, k0, k1, packed + block * block_bytes, sums[block - from]);
                if (!half) continue;
                for (long block = from; block < to; block++) run(read, gate, k0, k1, packed + block * block_bytes, gates[block - from]);
            }
            for (long block = from; block < to; block++) {
                for (int i = 0; i < P * PARTS; i++)
                    finish(p, panel * LANES + i * WIDTH, block * M, M, sums[block - from] + i, gates[block - from] + i, P * PARTS);
            }
        }
        panel += P;
    }
}

// Norm and rotate a head in place (RoPE).
static void turn_head(const Product *p, long row, long head) {
    void *out = p->out;
    int type = p->type;
    long at = row * p->ldo + head * p->head_dim, dim = p->head_dim, half = dim / 2;
    Norm norm = head < p->q_heads ? p->q_norm : p->k_norm;
    float factor = norm.weight ? norm_factor(out, type, at, dim, (float)norm.least) : 1.0f;
    long i = 0;
    for (; i + WIDTH <= half; i += WIDTH) {
        vf a = load_any(out, type, at + i), b = load_any(out, type, at + half + i);
        if (norm.weight) { a = a * splat(factor) * load(norm.weight + i); b = b * splat(factor) * load(norm.weight + half + i); }
        if (p->cos) {
            long c = row * dim + i;
            vf turned = a * load_any(p->cos, type, c) + b * load_any(p->sin, type, c);
            b = b * load_any(p->cos, type, c + half) + a * load_any(p->sin, type, c + half);
            a = turned;
        }
        store_any(out, type, at + i, a);
        store_any(out, type, at + half + i, b);
    }
    for (; i < half; i++) {
        float a = load_one(out, type, at + i), b = load_one(out, type, at + half + i);
        if (norm.weight) { a *= factor * norm.weight[i]; b *= factor * norm.weight[half + i]; }
        if (p->cos) {
            long c = row * dim + i;
            float turned = a * load_one(p->cos, type, c) + b * load_one(p->sin, type, c);
            b = b * load_one(p->cos, type, c + half) + a * load_one(p->sin, type, c + half);
            a = turned;
        }
        store_one(out, type, at + i, a);
        store_one(out, type, at + half + i, b);
    }
}

// Returns 1 if memory is exhausted.
int headway_product(const Product *p) {
    const Weight *w = p->weight;
    const Kernel *kernel = kernel_for(w, p->rows);
    int M = kernel->rows, threads = omp_get_max_threads(), packing = packing_for(w);
    long held = (p->rows + M - 1) / M * M;
    size_t packed_size = (held / M * packed_bytes(packing, M, w->k) + 127) / 64 * 64, floats = 0;
#if !X_BITS
    for (const Weight *part = w; part; part = part->next) floats += expanded_floats(part, p->rows);
#endif
    uint8_t *memory = room(threads * (packed_size + floats * 4));
    if (!memory) return 1;
#pragma omp parallel num_threads(threads)
    {
        long me = omp_get_thread_num(), all = omp_get_num_threads();
        int alone = p->rows <= PACKED_ALONE; // faster than waiting for the others
        uint8_t *mine = memory + (alone ? me * packed_size : 0);
        // Chunks of columns, so that no two threads write to one cache line.
        long pieces = (w->k + PIECE - 1) / PIECE, total = held / M * pieces, last = alone ? total : total * (me + 1) / all;
        for (long piece = alone ? 0 : total * me / all; piece < last;) {
            long block = piece / pieces, end = (block + 1) * pieces < last ? (block + 1) * pieces : last;
            long k1 = (end - block * pieces) * PIECE;
            pack_block(p, block, piece % pieces * PIECE, k1 < w->k ? k1 : w->k, packing, M, mine);
            piece = end;
        }
        if (!alone) {
#pragma omp barrier
        }
        long column = 0, size = p->type == FLOAT32 ? 4 : 2;
        for (const Weight *part = w; part; column += part->n, part = part->next) {
            Product own = *p;
            own.weight = part;
            own.out = (uint8_t *)p->out + column * size;
            long panels = (p->mode == GATED ? part->n / 2 : part->n + LANES - 1) / LANES;
            float *room = (float *)(memory + threads * packed_size) + me * floats;
            multiply(&own, kernel, mine, panels * me / all, panels * (me + 1) / all, room);
        }
        if (p->head_dim) {
#pragma omp barrier
            long items = p->rows * p->heads;
            for (long item = items * me / all; item < items * (me + 1) / all; item++) {
                turn_head(p, item / p->heads, item % p->heads);
            }
        }
    }
    return 0;
}

typedef struct {
    const void *x; // [rows, size], row stride ldx
    void *out; // contiguous
    int64_t rows, ldx, size;
    Norm norm;
    int32_t type, adds;
} NormRows;

// Store RMSNorm of rows in out, or add it to out.
int headway_norm(const NormRows *n) {
    const float *weight = n->norm.weight;
    long size = n->size, type = n->type;
#pragma omp parallel for if (n->rows * size > 16384)
    for (long r = 0; r < n->rows; r++) {
        float factor = norm_factor(n->x, type, r * n->ldx, size, (float)n->norm.least);
        long i = 0;
        for (; i + WIDTH <= size; i += WIDTH) {
            vf y = load_any(n->x, type, r * n->ldx + i) * splat(factor) * load(weight + i);
            store_any(n->out, type, r * size + i, n->adds ? y + load_any(n->out, type, r * size + i) : y);
        }
        for (; i < size; i++) {
            float y = load_one(n->x, type, r * n->ldx + i) * factor * weight[i];
            store_one(n->out, type, r * size + i, n->adds ? y + load_one(n->out, type, r * size + i) : y);
        }
    }
    return 0;
}

int headway_decode(const void *decode);

typedef struct { int64_t kind; const void *of; } Call;
enum { CALL_PRODUCT, CALL_NORM, CALL_DECODE };

// Make calls one after the other. Returns 1 if memory is exhausted.
int headway_repeat(const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const void *of = calls[i].of;
        int failed = calls[i].kind == CALL_PRODUCT ? headway_product(of) : calls[i].kind == CALL_NORM ? headway_norm(of) : headway_decode(of);
        if (failed) return failed;
    }
    return 0;
}

// Return the bits to which GEMMs over quantized weights round x; 0 means no rounding.
int headway_x_bits(void) { return X_BITS; }
