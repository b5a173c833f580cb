// Attention over a latent cache: one row a token is the key of all query heads and, its first 512 elements, the value of all.
//
// A block of threads takes 64 query rows (heads of a token, or of neighbouring tokens) and one run of keys of their sequence. One warp copies;
// one warpgroup scores all 576 elements of a tile of keys, and two multiply its values, 256 columns each: the sums of 64 rows by 512 columns
// are too many for the registers of one (FlashMLA and FlashAttention-3 divide them so). A tile is copied once, for key and value, in three
// parts, each let go of as soon as it is read for the last time.
//
// Constants given by the compiler's command line, beside those of shape.cuh: HEADS and TOKENS (query heads and tokens of a tile).
#include "softmax.cuh"

namespace hopper {

static_assert(HEAD_DIM == 576 && V_HEAD_DIM == 512 && KEYS == 64 && GROUPS == 1 && STAGES == 2 && PAGED, "what follows is written for");

constexpr u32 PANEL_BYTES = 64 * 128;
constexpr int USED = HEADS * TOKENS;  // rows of a tile
constexpr int HALF_PANELS = 4, HALF_COLUMNS = 256;
constexpr int PARTS = 3;  // of a tile: the values of the first warpgroup, those of the second, and the rest of the key
constexpr int WORDS = KEYS / 4 + 2;  // that a thread of the scoring warpgroup tells its partner: weights, and what to multiply sums by
static_assert(USED <= 64 && BOXES * HALF_PANELS <= 32, "a row for each query, a lane for each box");

struct LatentArguments {
  void* out;
  float* lse;         // [heads, tokens], or null
  const int* table;   // [sequences, blocks]
  const int* chunks;  // [chunks, 8], see triton/chunk_kernel.py
  float* partials;    // [chunks, tiles, 64, 512], divided by their sums
  float* partial_lse; // [chunks, tiles, 64], to the base 2
  long long out_token, out_head, lse_head, table_row;  // strides in elements
  int group;   // query heads
  float scale; // of scores, to the base-2 domain
};

// Where things lie in shared memory, in bytes from a multiple of 1,024.
struct LatentLayout {
  static constexpr u32 q = 0;
  static constexpr u32 k = q + K_PANELS * PANEL_BYTES;
  static constexpr u32 words = k + STAGES * K_PANELS * PANEL_BYTES;
  static constexpr u32 barriers = words + WORDS * 128 * 4;
  static constexpr u32 q_full = barriers, full = q_full + 8, empty = full + STAGES * PARTS * 8;
  static constexpr u32 bytes = empty + STAGES * PARTS * 8;
};
static_assert(LatentLayout::bytes + 1023 <= SHARED_BYTES, "what the host asks for");

// Named barriers between the two warpgroups that multiply.
constexpr int TOLD = 7, HEARD = 8;

// What a block of threads works on.
struct Work {
  int seq, kv_len, query_len;
  int first_token, last_token;  // of the sequence's query
  int packed_token;             // the packed token of first_token
  int first_head;
  int first, last;              // tiles of keys
  bool whole;                   // there is no other chunk
  int before;                   // keys of the context
};

__device__ __forceinline__ u32 full_at(u32 base, int index, int part) { return base + LatentLayout::full + 8 * (index * PARTS + part); }
__device__ __forceinline__ u32 empty_at(u32 base, int index, int part) { return base + LatentLayout::empty + 8 * (index * PARTS + part); }
__device__ __forceinline__ u32 tile_at(u32 base, int index) { return base + LatentLayout::k + index * (K_PANELS * PANEL_BYTES); }

// --- the warp that copies ---

__device__ __forceinline__ void copy(u32 base, const TensorMap& query_map, const TensorMap& key_map, const LatentArguments& arguments,
                                     const Work& work, int lane) {
  if (lane == 0) {
    barrier_expect(base + LatentLayout::q_full, K_PANELS * USED * 128);
    for (int panel = 0; panel < K_PANELS; ++panel) {
      copy_box(base + LatentLayout::q + panel * PANEL_BYTES, query_map, panel * PANEL, work.first_head, 0, work.packed_token,
               base + LatentLayout::q_full);
    }
  }
  __syncwarp();
  const int box = lane % BOXES, place = lane / BOXES;
  const int* blocks = arguments.table + work.seq * arguments.table_row;
  // Block numbers are asked for one tile ahead, since they come from memory.
  const auto block_of = [&](int tile) {
    const int slot = tile * KEYS + box * BOX;
    return tile < work.last && slot < work.kv_len ? blocks[slot / BLOCK_SIZE] : 0;
  };
  Ring<STAGES> ring;
  int block = block_of(work.first);
#pragma unroll 1
  for (int tile = work.first; tile < work.last; ++tile) {
    const int below = block_of(tile + 1);
    const int key = tile * KEYS, boxes = min(BOXES, (work.kv_len - key + BOX - 1) / BOX);
#pragma unroll 1
    for (int part = PARTS - 1; part >= 0; --part) {
      const int first_panel = part * HALF_PANELS, panels = part == PARTS - 1 ? K_PANELS - first_panel : HALF_PANELS;
      const u32 barrier = full_at(base, ring.index, part);
      barrier_wait(empty_at(base, ring.index, part), ring.parity ^ 1);
      if (lane == 0) barrier_expect(barrier, boxes * panels * BOX * 128);
      __syncwarp();
      if (box < boxes && place < panels) {
        const int panel = first_panel + place, slot = key + box * BOX;
        copy_box(tile_at(base, ring.index) + panel * PANEL_BYTES + box * (BOX * 128), key_map, panel * PANEL, slot % BLOCK_SIZE, 0, block,
                 barrier);
      }
    }
    block = below;
    ring.advance();
  }
}

// --- the warpgroups that multiply ---

template <int PART>
__device__ __forceinline__ void score_part(float (&scores)[KEYS / 2], u32 rows, u32 keys, u32 full, u32 parity) {
  constexpr int FIRST = PART * HALF_PANELS, PANELS = PART == PARTS - 1 ? K_PANELS - FIRST : HALF_PANELS;
  barrier_wait(full + 8 * PART, parity);
  products_begin();
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) {
    const u32 at = (FIRST + i / 4) * PANEL_BYTES + i % 4 * 32;
    Products<KEYS>::rows(scores, descriptor(rows, at), descriptor(keys, at), PART < PARTS - 1 || i > 0);
  }
  products_commit();
}

// Scores of a tile, part by part as they arrive: in the order in which the parts of the tile before were let go of.
__device__ __forceinline__ void score_products(float (&scores)[KEYS / 2], u32 base, const Ring<STAGES>& ring) {
  const u32 rows = operand(base + LatentLayout::q, 0), keys = operand(tile_at(base, ring.index), 0);
  const u32 full = full_at(base, ring.index, 0);
  score_part<2>(scores, rows, keys, full, ring.parity);
  score_part<1>(scores, rows, keys, full, ring.parity);
  score_part<0>(scores, rows, keys, full, ring.parity);
}

// sums += weights times the values of this warpgroup's columns.
__device__ __forceinline__ void value_products(float (&sums)[HALF_COLUMNS / 2], const u32 (&weights)[KEYS / 4], u32 tile, int half) {
  const u32 values = operand(tile + half * (HALF_PANELS * PANEL_BYTES), PANEL_BYTES);
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) {
    Products<HALF_COLUMNS>::columns(sums, weights + 4 * i, descriptor(values, i * (16 * 128)), 1);
  }
  products_commit();
}

// Rows of values behind the sequence's end become zero: a weight of zero does not silence a NaN there.
__device__ __forceinline__ void clear_values(u32 tile, int present, int half, int thread) {
#pragma unroll 1
  for (int i = present * (HALF_PANELS * 8) + thread; i < KEYS * (HALF_PANELS * 8); i += 128) {
    const int row = i / (HALF_PANELS * 8), chunk = i % (HALF_PANELS * 8);
    store_zeros(tile + (half * HALF_PANELS + chunk / 8) * PANEL_BYTES + row * 128 + chunk % 8 * 16);
  }
  fence_async();
  named_sync(ALONE + half, 128);
}

__device__ __forceinline__ void store_word(u32 at, u32 word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }
__device__ __forceinline__ u32 load_word(u32 at) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

__device__ __forceinline__ void rescale(float (&sums)[HALF_COLUMNS / 2], const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < HALF_COLUMNS / 2; ++i) sums[i] *= keep[i / 2 % 2];
}

// Divide and store 256 columns of the rows. total: of each row's weights.
__device__ __forceinline__ void store(const LatentArguments& arguments, const Work& work, const float (&sums)[HALF_COLUMNS / 2],
                                      const float (&total)[2], int half, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r, column = half * HALF_COLUMNS + 2 * (lane % 4);
    const int token = row / HEADS, head = work.first_head + row % HEADS;
    if (row >= USED || work.first_token + token > work.last_token) continue;
    const float share = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
    if (work.whole) {
      Half* to = static_cast<Half*>(arguments.out) + (work.packed_token + token) * arguments.out_token + head * arguments.out_head + column;
#pragma unroll
      for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
        *reinterpret_cast<u32*>(to + 8 * j) = pack(sums[4 * j + 2 * r] * share, sums[4 * j + 2 * r + 1] * share);
      }
    } else {
      const long long part = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * 64 + row;
      float* to = arguments.partials + part * V_HEAD_DIM + column;
#pragma unroll
      for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sums[4 * j + 2 * r] * share, sums[4 * j + 2 * r + 1] * share);
      }
    }
  }
}

// The logarithm of each row's sum, by the first of the four threads that hold the row.
__device__ __forceinline__ void store_lse(const LatentArguments& arguments, const Work& work, const Softmax& softmax, const float (&total)[2],
                                          int thread) {
  const int lane = thread % 32;
  if (lane % 4) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * r, token = row / HEADS;
    if (row >= USED || work.first_token + token > work.last_token) continue;
    const float lse = total[r] > 0.0f ? softmax.most[r] * arguments.scale + log2_approx(total[r]) : NEVER;
    if (!work.whole) {
      arguments.partial_lse[(static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * 64 + row] = lse;
    } else if (arguments.lse != nullptr) {
      arguments.lse[(work.first_head + row % HEADS) * arguments.lse_head + work.packed_token + token] = lse * 0.6931471805599453f;
    }
  }
}

// The warpgroup that scores, and multiplies the first 256 columns of values. The scores of the next tile are computed while the weights of
// this one multiply its values (Shah et al. 2024).
__device__ __forceinline__ void score_and_multiply(u32 base, const LatentArguments& arguments, const Work& work, int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const bool leads = lane == 0;
  Sight sight;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sight.high[r] = work.before + min(work.first_token + (row + 8 * r) / HEADS, work.last_token) + 1;
    sight.low[r] = 0;
  }
  const int clear = (work.before + work.first_token + 1) / KEYS;  // tiles below need no mask

  float scores[KEYS / 2], sums[HALF_COLUMNS / 2] = {}, keep[2];
  u32 weights[KEYS / 4];
  Softmax softmax;
  Ring<STAGES> k, v;
  const auto weigh = [&](int tile) {
    if (tile >= clear) {
      sight.mask(scores, tile * KEYS + 2 * (lane % 4));
      return softmax.template update<true>(scores, arguments.scale, keep);
    }
    return softmax.template update<false>(scores, arguments.scale, keep);
  };
  // The scores are read: nobody needs the key's last part any more, and this warpgroup not the second.
  const auto let_go_of_keys = [&]() {
    if (leads) {
      barrier_arrive(empty_at(base, k.index, 1));
      barrier_arrive(empty_at(base, k.index, 2));
    }
    k.advance();
  };
  const u32 words = base + LatentLayout::words + 4 * thread;
  const auto tell = [&](bool first) {
    if (!first) named_sync(HEARD, 256);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) store_word(words + i * 512, weights[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) store_word(words + (KEYS / 4 + r) * 512, __float_as_uint(keep[r]));
    named_arrive(TOLD, 256);
  };
  const auto let_go_of_values = [&]() {
    if (leads) barrier_arrive(empty_at(base, v.index, 0));
    v.advance();
  };

  barrier_wait(base + LatentLayout::q_full, 0);
  pin(scores);
  score_products(scores, base, k);
  products_wait<0>();
  pin(scores);
  let_go_of_keys();
  weigh(work.first);
  pack_weights(scores, weights);
  tell(true);
#pragma unroll 1
  for (int tile = work.first; tile < work.last - 1; ++tile) {
    pin(scores);
    pin(sums);
    pin(weights);
    score_products(scores, base, k);
    value_products(sums, weights, tile_at(base, v.index), 0);
    products_wait<1>();
    pin(scores);
    let_go_of_keys();
    const bool grows = weigh(tile + 1);
    products_wait<0>();
    pin(sums);
    pin(weights);
    let_go_of_values();
    pack_weights(scores, weights);
    tell(false);
    if (grows) rescale(sums, keep);
  }
  const int present = work.kv_len - (work.last - 1) * KEYS;  // only a sequence's last tile has fewer keys
  if (present < KEYS) clear_values(tile_at(base, v.index), present, 0, thread);
  pin(sums);
  pin(weights);
  products_begin();
  value_products(sums, weights, tile_at(base, v.index), 0);
  float total[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) total[r] = row_sum(softmax.sum[r]);
  named_sync(HEARD, 256);
#pragma unroll
  for (int r = 0; r < 2; ++r) store_word(words + r * 512, __float_as_uint(total[r]));
  named_arrive(TOLD, 256);
  store_lse(arguments, work, softmax, total, thread);
  products_wait<0>();
  pin(sums);
  pin(weights);
  store(arguments, work, sums, total, 0, thread);
}

// The warpgroup that multiplies the other 256 columns by what it is told: each of its threads holds the rows of its partner.
__device__ __forceinline__ void multiply_told(u32 base, const LatentArguments& arguments, const Work& work, int thread) {
  const u32 words = base + LatentLayout::words + 4 * thread;
  float sums[HALF_COLUMNS / 2] = {}, keep[2], total[2];
  u32 weights[KEYS / 4];
  Ring<STAGES> v;
#pragma unroll 1
  for (int tile = work.first; tile < work.last; ++tile) {
    named_sync(TOLD, 256);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = load_word(words + i * 512);
#pragma unroll
    for (int r = 0; r < 2; ++r) keep[r] = __uint_as_float(load_word(words + (KEYS / 4 + r) * 512));
    named_arrive(HEARD, 256);
    if (__any_sync(~0u, keep[0] != 1.0f || keep[1] != 1.0f)) rescale(sums, keep);
    barrier_wait(full_at(base, v.index, 1), v.parity);
    const u32 at = tile_at(base, v.index);
    if (work.kv_len - tile * KEYS < KEYS) clear_values(at, work.kv_len - tile * KEYS, 1, thread);
    pin(sums);
    pin(weights);
    products_begin();
    value_products(sums, weights, at, 1);
    products_wait<0>();
    pin(sums);
    pin(weights);
    if (thread % 32 == 0) barrier_arrive(empty_at(base, v.index, 1));
    v.advance();
  }
  named_sync(TOLD, 256);
#pragma unroll
  for (int r = 0; r < 2; ++r) total[r] = __uint_as_float(load_word(words + r * 512));
  store(arguments, work, sums, total, 1, thread);
}

// A chunk of which these rows see nothing: no weight, and sums that are numbers.
__device__ __forceinline__ void store_nothing(const LatentArguments& arguments, const Work& work, int half, int thread) {
  const float sums[HALF_COLUMNS / 2] = {}, total[2] = {};
  if (half == 0) store_lse(arguments, work, Softmax(), total, thread);
  store(arguments, work, sums, total, half, thread);
}

}  // namespace hopper

using namespace hopper;

// Grid (tiles of a sequence's query rows, chunks).
extern "C" __global__ void __launch_bounds__(384, 1)
    latent(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
           const __grid_constant__ LatentArguments arguments) {
  extern __shared__ unsigned char shared[];
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const int* chunk = arguments.chunks + 8 * blockIdx.y;
  const int heads_tiles = arguments.group / HEADS;
  Work work;
  work.seq = chunk[0];
  work.kv_len = chunk[1];
  work.query_len = chunk[3];
  work.first_token = blockIdx.x / heads_tiles * TOKENS;
  if (work.seq < 0 || work.first_token >= work.query_len) return;
  work.last_token = min(work.first_token + TOKENS, work.query_len) - 1;
  work.packed_token = chunk[2] + work.first_token;
  work.first_head = blockIdx.x % heads_tiles * HEADS;
  work.before = work.kv_len - work.query_len;
  work.first = chunk[4];
  work.last = (min(chunk[5], work.before + work.last_token + 1) + KEYS - 1) / KEYS;
  work.whole = chunk[7] == 1;
  // The same in all threads of a warp, as the compiler must know where warps part.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  if (work.first >= work.last) {
    if (group > 0) store_nothing(arguments, work, group - 1, thread);
    return;
  }
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    barrier_init(base + LatentLayout::q_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      for (int part = 0; part < PARTS; ++part) {
        barrier_init(full_at(base, i, part), 1);
        barrier_init(empty_at(base, i, part), part == 1 ? 8 : 4);  // the second part is read by both warpgroups
      }
    }
    fence_barrier_init();
  }
  if (USED < 64) {  // rows of queries that no box fills
    for (int i = USED * 8 + threadIdx.x % 128; i < 64 * 8; i += 128) {
      for (int panel = group; panel < K_PANELS; panel += 3) store_zeros(base + LatentLayout::q + panel * PANEL_BYTES + i * 16);
    }
    fence_async();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<COPY_REGISTERS>();
    if (threadIdx.x < 32) copy(base, query_map, key_map, arguments, work, threadIdx.x);
  } else {
    take_registers<PRODUCT_REGISTERS>();
    if (group == 1) {
      score_and_multiply(base, arguments, work, thread);
    } else {
      multiply_told(base, arguments, work, thread);
    }
  }
}
