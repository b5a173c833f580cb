// Split-KV decode over a paged cache: one kernel reads, merges and writes. Few query rows are bound by latency, many by key loads.
//
// Grid: chunks of keys x kv heads (x tiles of query rows). The warps of a thread block take tiles of TILE keys in turn, each through its
// own ring in shared memory, so warps wait for each other only before the final merge. Queries are the narrow operand of the MMAs: scores
// are [keys, rows] = K Q', accumulators [dim, rows] = V' P', eight rows at a time; the usual orientation would need sixteen.
//
// Before the programmatic-dependent-launch wait, the kernel does what does not depend on the previous kernel: it reads the chunk and its
// block numbers and prefetches the first keys and values to L2. Keys and values are loaded after the wait, together with the queries.
#include "warp.cuh"

namespace hopper {

struct DecodeArguments {
  const u16 *q, *key, *value;       // q [token, head, HEAD_DIM]; a cache's rows lie in one piece
  const u16 *new_k, *new_v;         // [seq, kv head, HEAD_DIM], not in the cache yet and written there; null: nothing is new
  u16* out;                         // [token, head, HEAD_DIM]
  float* sums;                      // the caller's log-sum-exp [head, token]; null: not wanted
  const int *table, *chunks;        // chunks: see chunk_kernel.CHUNK_FIELDS
  const float* sinks;               // log2(e) times a logit of each head (SINKS)
  float *partial, *partial_lse;     // [chunk, item, kept_rows, HEAD_DIM], [chunk, item, kept_rows]
  int* arrivals;                    // [chunk, item], zero between launches; null: another launch merges
  long long q_token, q_head, out_token, out_head, sums_head, new_k_token, new_k_head, new_v_token, new_v_head;
  long long k_block, k_slot, k_head, v_block, v_slot, v_head, table_seq;
  int items, kv_heads, kept_rows, window, early;  // items: kv heads times tiles of query rows; kept_rows: of a partial result
  float scale, cap;                 // of scores, in the domain of base 2; SOFTCAP: cap * tanh(scale * score)
};

constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 16;                                // keys of a warp's tile
constexpr int ROWS = 8 * ROW_BLOCKS;                    // query rows of a block of threads
constexpr int PIECES = HEAD_DIM / 8;                    // of 16 bytes of a row
constexpr int PITCH = 16 * (PIECES | 1);                // bytes from row to row: eight rows lie in different banks
constexpr int STAGE = 2 * TILE * PITCH;                 // keys, then values
constexpr int STEPS = HEAD_DIM / 16;
constexpr int SUM_ROW = HEAD_DIM + 4;                   // floats: a warp stores to different banks
constexpr int NEW_PIECES = (2 * PIECES + 31) / 32;      // of a lane
constexpr int LINES = (HEAD_DIM * 2 + 127) / 128;       // of a row in the L2 cache
constexpr int CHAINS = HEAD_DIM > 256 ? 2 : 1;          // of dependent MMAs that compute a tile's scores
#ifndef BULK
#define BULK (HEAD_DIM > 256)  // the copy engine loads rows: with cp.async, a warp would spend most of its time on addresses
#endif
#define NEVER __int_as_float(0xff800000)  // of minus infinity

struct Chunk {
  int seq, kv_len, token, query_len, start, end, first_chunk, num_chunks;

  __device__ __forceinline__ void read(const DecodeArguments& a, int number) {
    const int4* const fields = reinterpret_cast<const int4*>(a.chunks) + 2 * number;
    const int4 low = fields[0], high = fields[1];
    seq = low.x, kv_len = low.y, token = low.z, query_len = low.w;
    start = high.x * UNIT, end = high.y, first_chunk = high.z, num_chunks = high.w;
  }
};

// The tiles of one warp: index of the first one, and the blocks that hold them.
struct Tiles {
  const int* table;
  int first, count, known, blocks;  // blocks: of this lane's tile among the 32 from `known` on

  __device__ __forceinline__ void begin(const DecodeArguments& a, const Chunk& chunk, int warp, int lane) {
    table = a.table + a.table_seq * chunk.seq;
    first = chunk.start + warp * TILE;
    const int all = (chunk.end - chunk.start + TILE - 1) / TILE;
    count = chunk.seq < 0 ? 0 : max(0, (all - warp + WARPS - 1) / WARPS);
    look_up(0, lane);
  }
  __device__ __forceinline__ int key(int number) const { return first + number * (WARPS * TILE); }
  __device__ __forceinline__ void look_up(int number, int lane) {
    known = number;
    blocks = number + lane < count ? table[key(number + lane) / BLOCK_SIZE] : 0;
  }
  // All lanes must call this with the same argument.
  __device__ __forceinline__ int block(int number, int lane) {
    if (number >= known + 32) look_up(number, lane);
    return __shfl_sync(~0u, blocks, number - known);
  }
};

__device__ __forceinline__ void bring_near(const DecodeArguments& a, Tiles& tiles, int kv_head, int limit, int lane) {
#pragma unroll
  for (int number = 0; number < STAGES; ++number) {
    if (number >= tiles.count) break;
    const int key = tiles.key(number), block = tiles.block(number, lane), slot = key % BLOCK_SIZE;
    for (int i = lane; i < TILE * LINES; i += 32) {
      const int row = i / LINES, line = i % LINES * 64;
      if (key + row >= limit) continue;
      prefetch_line(a.key + block * a.k_block + (slot + row) * a.k_slot + kv_head * a.k_head + line);
      prefetch_line(a.value + block * a.v_block + (slot + row) * a.v_slot + kv_head * a.v_head + line);
    }
  }
}

// Start loading a tile. Rows from `limit` on are zero-filled, since their memory may hold NaN and 0 * NaN is NaN.
__device__ __forceinline__ void copy_tile(const DecodeArguments& a, Tiles& tiles, u32 to, int number, int kv_head, int limit, int lane) {
  const int key = tiles.key(number), block = tiles.block(number, lane), slot = key % BLOCK_SIZE;
  const u16* const k = a.key + block * a.k_block + slot * a.k_slot + kv_head * a.k_head;
  const u16* const v = a.value + block * a.v_block + slot * a.v_slot + kv_head * a.v_head;
#pragma unroll
  for (int i = 0; i < (TILE * PIECES) / 32; ++i) {
    const int c = i * 32 + lane, row = c / PIECES, piece = c % PIECES;
    const u32 bytes = key + row < limit ? 16 : 0, at = to + row * PITCH + piece * 16;
    copy_16(at, bytes ? k + row * a.k_slot + piece * 8 : a.key, bytes);
    copy_16(at + TILE * PITCH, bytes ? v + row * a.v_slot + piece * 8 : a.value, bytes);
  }
}

// Let the copy engine load a tile's keys or values. Rows are zero-filled as by copy_tile.
__device__ __forceinline__ void copy_rows(const DecodeArguments& a, Tiles& tiles, u32 to, u32 barrier, int number, int kv_head, int limit,
                                          bool values, int lane) {
  const int key = tiles.key(number), block = tiles.block(number, lane), slot = key % BLOCK_SIZE + lane;
  const int rows = max(0, min(limit - key, TILE));
  if (lane == 0) barrier_expect(barrier, rows * (HEAD_DIM * 2));
  __syncwarp();
  const u32 at = to + (values * TILE + lane) * PITCH;
  if (lane < rows) {
    copy_row(at,
             values ? a.value + block * a.v_block + slot * a.v_slot + kv_head * a.v_head
                    : a.key + block * a.k_block + slot * a.k_slot + kv_head * a.k_head,
             HEAD_DIM * 2, barrier);
  } else if (lane < TILE) {
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) store_zeros(at + piece * 16);
  }
}

// Accumulators of one warp. Columns of scores and accumulators are query rows: a thread has columns 8 block + 2 (lane % 4) and the next.
struct Sums {
  float acc[STEPS][ROW_BLOCKS][4];
  float largest[ROW_BLOCKS][2], total[ROW_BLOCKS][2];  // total: of this thread's keys alone

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n) {
      largest[n][0] = largest[n][1] = NEVER, total[n][0] = total[n][1] = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[step][n][i] = 0.0f;
      }
    }
  }
};

struct Queries {
  u32 part[STEPS][ROW_BLOCKS][2];

  __device__ __forceinline__ void read(const DecodeArguments& a, const Chunk& chunk, int kv_head, int first_row, int lane) {
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n) {
      const int row = first_row + 8 * n + lane / 4;
      const bool live = row < chunk.query_len * GROUP;
      const u16* const from = a.q + (chunk.token + row / GROUP) * a.q_token + (kv_head * GROUP + row % GROUP) * a.q_head;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = 16 * step + 8 * half + lane % 4 * 2;
          part[step][n][half] = live ? *reinterpret_cast<const u32*>(from + column) : 0;
        }
      }
    }
  }
};

// Compute the weights of TILE keys from `key` on, in base 2 (the scale includes log2(e)), and rescale the accumulators for them.
__device__ __forceinline__ void weigh(const DecodeArguments& a, const Chunk& chunk, const Queries& queries, Sums& sums,
                                      u32 (&weights)[ROW_BLOCKS][2], u32 from, int key, int first_row, int lane) {
  float parts[CHAINS][ROW_BLOCKS][4] = {};
  float(&scores)[ROW_BLOCKS][4] = parts[0];
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const Matrices k = load_matrices(from + lane % 16 * PITCH + (2 * step + lane / 16) * 16);
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n) {
      multiply_add(parts[step % CHAINS][n], k, queries.part[step][n][0], queries.part[step][n][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < ROW_BLOCKS; ++n) {
    if (CHAINS == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] += parts[CHAINS - 1][n][i];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = first_row + 8 * n + lane % 4 * 2 + j;
      const int position = chunk.kv_len - chunk.query_len + row / GROUP;
      float largest = sums.largest[n][j];
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        const int own = key + lane / 4 + (i / 2) * 8;
        float score = scores[n][i] * a.scale;
        if (SOFTCAP) score = a.cap * tanh_approx(score);
        const bool seen = own <= position && own < chunk.end && (!WINDOW || own > position - a.window);
        scores[n][i] = seen ? score : NEVER;
        largest = fmaxf(largest, scores[n][i]);
      }
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      const float base = largest == NEVER ? 0.0f : largest, shrink = exp2_approx(sums.largest[n][j] - base);
      sums.largest[n][j] = largest, sums.total[n][j] *= shrink;
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        scores[n][i] = exp2_approx(scores[n][i] - base);
        sums.total[n][j] += scores[n][i];
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) sums.acc[step][n][j] *= shrink, sums.acc[step][n][2 + j] *= shrink;
    }
    weights[n][0] = turned(to_pair(scores[n][0], scores[n][1]));  // [keys, rows] becomes [rows, keys], as the product wants it
    weights[n][1] = turned(to_pair(scores[n][2], scores[n][3]));
  }
}

// Add the values of a tile times their weights.
__device__ __forceinline__ void fold(Sums& sums, const u32 (&weights)[ROW_BLOCKS][2], u32 from, int lane) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int row = lane / 16 * 8 + lane % 8, piece = 2 * step + lane / 8 % 2;
    const Matrices v = load_turned(from + (TILE + row) * PITCH + piece * 16);
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; ++n) multiply_add(sums.acc[step][n], v, weights[n][0], weights[n][1]);
  }
}

// A sequence's new key and value: one 16-byte chunk of either per lane.
struct NewRow {
  uint4 piece[NEW_PIECES];

  __device__ __forceinline__ void read(const DecodeArguments& a, const Chunk& chunk, int kv_head, int lane) {
#pragma unroll
    for (int i = 0; i < NEW_PIECES; ++i) {
      const int c = i * 32 + lane;
      const u16* const from = c < PIECES ? a.new_k + chunk.seq * a.new_k_token + kv_head * a.new_k_head + c * 8
                                         : a.new_v + chunk.seq * a.new_v_token + kv_head * a.new_v_head + (c - PIECES) * 8;
      if (c < 2 * PIECES) piece[i] = *reinterpret_cast<const uint4*>(from);
    }
  }
  // Write it to a tile in shared memory, and to the cache.
  __device__ __forceinline__ void store(const DecodeArguments& a, u32 tile, int block, int slot, int kv_head, int lane) const {
#pragma unroll
    for (int i = 0; i < NEW_PIECES; ++i) {
      const int c = i * 32 + lane;
      if (c >= 2 * PIECES) continue;
      const bool is_key = c < PIECES;
      const int at = is_key ? c : c - PIECES;
      store_quad(tile + (slot % TILE + (is_key ? 0 : TILE)) * PITCH + at * 16, piece[i]);
      const u16* const row = is_key ? a.key + block * a.k_block + slot * a.k_slot + kv_head * a.k_head
                                    : a.value + block * a.v_block + slot * a.v_slot + kv_head * a.v_head;
      *reinterpret_cast<uint4*>(const_cast<u16*>(row) + at * 8) = piece[i];
    }
  }
};

// Results to merge over the warps of a thread block, and then over a sequence's thread blocks; in shared memory, reusing the rings.
struct Shared {
  float (*acc)[ROWS][SUM_ROW];  // [WARPS]
  float (*largest)[ROWS];       // [WARPS]
  float (*total)[ROWS];         // [WARPS]
  int* last;
};

__device__ __forceinline__ void share(const Shared& shared, Sums& sums, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < ROW_BLOCKS; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = 8 * n + lane % 4 * 2 + j;
      float total = sums.total[n][j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
      if (lane < 4) shared.largest[warp][row] = sums.largest[n][j], shared.total[warp][row] = total;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        shared.acc[warp][row][16 * step + lane / 4] = sums.acc[step][n][j];
        shared.acc[warp][row][16 * step + lane / 4 + 8] = sums.acc[step][n][2 + j];
      }
    }
  }
}

struct Merged {
  float4 acc;
  float largest, total;

  __device__ __forceinline__ void clear() { acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f), largest = NEVER, total = 0.0f; }
  __device__ __forceinline__ void add(float4 other, float other_largest, float other_total) {
    const float now = fmaxf(largest, other_largest), base = now == NEVER ? 0.0f : now;
    const float mine = exp2_approx(largest - base), theirs = exp2_approx(other_largest - base);
    acc.x = acc.x * mine + other.x * theirs, acc.y = acc.y * mine + other.y * theirs;
    acc.z = acc.z * mine + other.z * theirs, acc.w = acc.w * mine + other.w * theirs;
    total = total * mine + other_total * theirs, largest = now;
  }
  __device__ __forceinline__ float4 mean() const {
    const float by = total > 0.0f ? 1.0f / total : 0.0f;
    return make_float4(acc.x * by, acc.y * by, acc.z * by, acc.w * by);
  }
  __device__ __forceinline__ float lse() const { return total > 0.0f ? largest + log2_approx(total) : NEVER; }
};

// Write four elements of a query row. column: index of the group of four.
__device__ __forceinline__ void finish(const DecodeArguments& a, const Chunk& chunk, Merged merged, int kv_head, int row, int column) {
  if (row >= chunk.query_len * GROUP) return;
  const int head = kv_head * GROUP + row % GROUP, token = chunk.token + row / GROUP;
  if (SINKS) merged.add(make_float4(0.0f, 0.0f, 0.0f, 0.0f), a.sinks[head], 1.0f);
  if (a.sums != nullptr && column == 0) a.sums[head * a.sums_head + token] = 0.6931471805599453f * merged.lse();
  const float4 y = merged.mean();
  u32* const to = reinterpret_cast<u32*>(a.out + token * a.out_token + head * a.out_head + 4 * column);
  to[0] = to_pair(y.x, y.y), to[1] = to_pair(y.z, y.w);
}

__device__ __forceinline__ void merge_warps(
    const DecodeArguments& a, const Chunk& chunk, const Shared& shared, int number, int item, int kv_head, int first_row) {
  for (int v = threadIdx.x; v < ROWS * (HEAD_DIM / 4); v += THREADS) {
    const int row = v / (HEAD_DIM / 4), column = v % (HEAD_DIM / 4);
    if (row >= a.kept_rows) break;
    Merged merged;
    merged.clear();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float4 acc = reinterpret_cast<const float4*>(shared.acc[warp][row])[column];
      merged.add(acc, shared.largest[warp][row], shared.total[warp][row]);
    }
    if (chunk.num_chunks == 1) {
      finish(a, chunk, merged, kv_head, first_row + row, column);
      continue;
    }
    const long long slot = (static_cast<long long>(number) * a.items + item) * a.kept_rows + row;
    reinterpret_cast<float4*>(a.partial + slot * HEAD_DIM)[column] = merged.mean();
    if (column == 0) a.partial_lse[slot] = merged.lse();
  }
}

// Merge the partial results of a sequence's thread blocks, PARTS at a time so that their loads overlap.
__device__ __forceinline__ void merge_chunks(const DecodeArguments& a, const Chunk& chunk, int item, int kv_head, int first_row) {
  constexpr int PARTS = 8;
  for (int v = threadIdx.x; v < ROWS * (HEAD_DIM / 4); v += THREADS) {
    const int row = v / (HEAD_DIM / 4), column = v % (HEAD_DIM / 4);
    if (row >= a.kept_rows) break;
    Merged merged;
    merged.clear();
    for (int part = 0; part < chunk.num_chunks; part += PARTS) {
      float4 acc[PARTS];
      float lse[PARTS];
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const int own = chunk.first_chunk + min(part + i, chunk.num_chunks - 1);
        const long long slot = (static_cast<long long>(own) * a.items + item) * a.kept_rows + row;
        acc[i] = load_stored(reinterpret_cast<const float4*>(a.partial + slot * HEAD_DIM) + column);
        lse[i] = load_stored(a.partial_lse + slot);
      }
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        if (part + i < chunk.num_chunks) merged.add(acc[i], lse[i], 1.0f);
      }
    }
    finish(a, chunk, merged, kv_head, first_row + row, column);
  }
}

}  // namespace hopper

using namespace hopper;

extern "C" __global__ void __launch_bounds__(hopper::THREADS) decode(const __grid_constant__ DecodeArguments a) {
  extern __shared__ __align__(128) char dynamic[];
  const int item = blockIdx.x % a.items, number = blockIdx.x / a.items, kv_head = item % a.kv_heads;
  const int first_row = item / a.kv_heads * ROWS;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (a.early) launch_dependents();
  Chunk chunk;
  chunk.read(a, number);
  Tiles tiles;
  tiles.begin(a, chunk, warp, lane);
  const int at = chunk.kv_len - 1;  // of the newest key
  const bool brings = a.new_k != nullptr && chunk.end == chunk.kv_len && chunk.seq >= 0;
  const int limit = brings ? at : chunk.end;
  bring_near(a, tiles, kv_head, limit, lane);
  wait_for_earlier();
  if (chunk.seq < 0 || first_row >= chunk.query_len * GROUP) return;

  const u32 ring = shared_address(dynamic) + warp * (STAGES * STAGE);
  // Two barriers of each tile in the rings: its keys and its values have arrived.
  const u32 barriers = shared_address(dynamic) + WARPS * STAGES * STAGE + warp * (STAGES * 16);
  if (BULK) {
    if (lane < 2 * STAGES) barrier_init(barriers + 8 * lane, 1);
    fence_barrier_init();
    __syncwarp();
  }
  const auto load = [&](int number, int stage, bool values) {
    if (number >= tiles.count) return;
    if (BULK) copy_rows(a, tiles, ring + stage * STAGE, barriers + 16 * stage + 8 * values, number, kv_head, limit, values, lane);
    else if (values) copy_tile(a, tiles, ring + stage * STAGE, number, kv_head, limit, lane);
  };
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    load(stage, stage, false);
    load(stage, stage, true);
    if (!BULK) copies_commit();
  }
  const int new_tile = (at - chunk.start) / TILE, mine = brings && new_tile % WARPS == warp ? new_tile / WARPS : -1;
  NewRow fresh;
  if (mine >= 0) fresh.read(a, chunk, kv_head, lane);
  Queries queries;
  queries.read(a, chunk, kv_head, first_row, lane);
  Sums sums;
  sums.clear();
  int stage = 0;
  u32 parity = 0, weights[ROW_BLOCKS][2];
#pragma unroll 1
  for (int i = 0; i < tiles.count; ++i) {
    const u32 tile = ring + stage * STAGE, full = barriers + 16 * stage;
    if (BULK) barrier_wait(full, parity);
    else copies_wait<STAGES - 1>();
    __syncwarp();
    if (i == mine) {
      if (BULK) barrier_wait(full + 8, parity);
      fresh.store(a, tile, tiles.block(i, lane), at % BLOCK_SIZE, kv_head, lane);
      __syncwarp();
    }
    weigh(a, chunk, queries, sums, weights, tile, tiles.key(i), first_row, lane);
    if (BULK) {
      __syncwarp();  // all have read the keys
      load(i + STAGES, stage, false);
      barrier_wait(full + 8, parity);
    }
    fold(sums, weights, tile, lane);
    __syncwarp();  // all have read the tile
    load(i + STAGES, stage, true);
    if (!BULK) copies_commit();
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __syncthreads();  // no ring is read any more
  float* const floats = reinterpret_cast<float*>(dynamic);
  Shared shared;
  shared.acc = reinterpret_cast<float(*)[ROWS][SUM_ROW]>(floats);
  shared.largest = reinterpret_cast<float(*)[ROWS]>(floats + WARPS * ROWS * SUM_ROW);
  shared.total = shared.largest + WARPS;
  shared.last = reinterpret_cast<int*>(shared.total + WARPS);
  share(shared, sums, warp, lane);
  __syncthreads();
  merge_warps(a, chunk, shared, number, item, kv_head, first_row);
  if (chunk.num_chunks == 1 || a.arrivals == nullptr) return;
  __syncthreads();  // all of the chunk is stored; counting releases it
  if (threadIdx.x == 0) {
    int* const arrivals = a.arrivals + chunk.first_chunk * a.items + item;
    const bool last = add_arrival(arrivals) == chunk.num_chunks - 1;
    if (last) *arrivals = 0;
    *shared.last = last;
  }
  __syncthreads();
  if (*shared.last) merge_chunks(a, chunk, item, kv_head, first_row);
}
