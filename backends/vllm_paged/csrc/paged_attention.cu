// Paged decode on the vllm_5d layout: v1 (one block of threads a sequence and kv head) and v2 (the context in partitions, then
// `reduce_partitions`), after vLLM's PagedAttention kernels (Kwon et al. 2023). Unlike those, all query heads of a kv head are
// served by one read of K and V, and each warp keeps its own pipeline of tiles: warps meet only once, at the end.
//
// Compiled for one set of -D: TYPE (q and out), KV_TYPE (cache), HEAD_DIM, BLOCK_SIZE, STAGES (tiles a warp has under way).
#include "fma_warp.cuh"
#include "mma_warp.cuh"

namespace headway {

template <class T, class KV>
struct Choose {
  typedef MmaWarp<T, KV, HEAD_DIM> Warp;
};
template <>
struct Choose<float, float> {
  typedef FmaWarp<HEAD_DIM> Warp;
};
typedef Choose<TYPE, KV_TYPE>::Warp Warp;

constexpr int MAX_WARPS = 8;
constexpr int ROWS = Warp::ROWS;
constexpr int X = 16 / sizeof(KV_TYPE);
constexpr int TILE_BYTES = TILE * HEAD_DIM * sizeof(KV_TYPE);  // of the key, and of the value

struct Arguments {
  const TYPE* q;  // [num_tokens, num_heads, HEAD_DIM], rows of a head contiguous
  const KV_TYPE* key;
  const KV_TYPE* value;
  TYPE* out;
  const int* block_table;      // [num_seqs, table_stride]
  const int* seq_lens;         // [num_seqs]; 0: a padding row
  const int* query_start_loc;  // [num_seqs + 1]
  const float* slopes;         // [num_heads], log2(e) * ALiBi slope, or null
  const float* sinks;          // [num_heads], log2(e) * sink, or null
  float* partial;              // [num_seqs * items, partitions, ROWS, HEAD_DIM]; items: kv heads * row tiles
  float* state;                // [num_seqs * items, partitions, ROWS, 2]: largest score, sum of weights
  long long q_stride_token, q_stride_head, out_stride_token, out_stride_head, table_stride;
  int kv_heads, group, partitions;
  float v_scale;
  Scoring scoring;
};

// The part of a sequence's tiles that one partition has. The host fixes the number of partitions and the sequence's length their
// size, so a captured graph is right at any length.
struct Range {
  int first, end;

  __device__ Range(const Rows& rows, int window, int partition, int partitions) {
    const int start = window > 0 ? max(rows.kv_len - rows.query_len - window + 1, 0) / TILE : 0;
    const int tiles = (rows.kv_len + TILE - 1) / TILE - start;
    const int each = (tiles + partitions - 1) / partitions;
    first = start + min(partition * each, tiles);
    end = start + min((partition + 1) * each, tiles);
  }
};

__device__ __forceinline__ Rows rows_of(const Arguments& a, int seq, int item, int& token) {
  token = a.query_start_loc[seq];
  return Rows{item / a.kv_heads * ROWS, a.group, a.query_start_loc[seq + 1] - token, a.seq_lens[seq],
              item % a.kv_heads * a.group};
}

// The physical blocks of a tile: two where blocks are half a tile, the last one twice if a sequence ends in its first half.
struct Blocks {
  int first, second;

  __device__ void find(const int* table, int tile, int last_block) {
    const int at = tile * TILE / BLOCK_SIZE;
    first = table[min(at, last_block)];
    second = BLOCK_SIZE < TILE ? table[min(at + 1, last_block)] : first;
  }
};

// Start copying a tile's key and value to shared memory; the lanes of a warp take neighbouring chunks.
__device__ __forceinline__ void fetch(const Arguments& a, u32 staged, const Blocks& blocks, int tile, int kv_head, int lane) {
  const int first_slot = tile * TILE % BLOCK_SIZE;
  const long long runs[2] = {run_offset(blocks.first, kv_head, a.kv_heads, HEAD_DIM, BLOCK_SIZE),
                             run_offset(blocks.second, kv_head, a.kv_heads, HEAD_DIM, BLOCK_SIZE)};
  constexpr int PIECES = HEAD_DIM / X, CHUNKS = TILE / X;
  static_assert(BLOCK_SIZE >= X && BLOCK_SIZE % 8 == 0 && HEAD_DIM % 16 == 0, "not a shape of these kernels");
#pragma unroll
  for (int i = lane; i < PIECES * TILE; i += 32) {
    const int slot = first_slot + i % TILE;
    const long long run = BLOCK_SIZE < TILE && slot >= BLOCK_SIZE ? runs[1] : runs[0];
    copy_async(staged + staged_key(i / TILE, i % TILE),
               a.key + run + key_offset(BLOCK_SIZE < TILE ? slot % BLOCK_SIZE : slot, i / TILE * X, BLOCK_SIZE, X));
  }
#pragma unroll
  for (int i = lane; i < HEAD_DIM * CHUNKS; i += 32) {
    const int slot = first_slot + i % CHUNKS * X;
    const long long run = BLOCK_SIZE < TILE && slot >= BLOCK_SIZE ? runs[1] : runs[0];
    copy_async(staged + TILE_BYTES + staged_value(i / CHUNKS, i % CHUNKS, X),
               a.value + run + value_offset(BLOCK_SIZE < TILE ? slot % BLOCK_SIZE : slot, i / CHUNKS, BLOCK_SIZE));
  }
}

// The warp's tiles: first + warp, + warps, ... so that the warps together read neighbouring slots of large blocks.
__device__ __forceinline__ void walk(const Arguments& a, Warp& warp, const Rows& rows, const Range& range, const int* table,
                                     int kv_head, char* stages) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32, last_block = (rows.kv_len - 1) / BLOCK_SIZE;
  const int first = range.first + threadIdx.x / 32, first_position = rows.kv_len - rows.query_len;
  int ahead = first;
  Blocks blocks;  // of the tile `ahead`, looked up one turn before they are needed
  blocks.find(table, min(ahead, range.end - 1), last_block);
  auto fetch_next = [&](int stage) {
    if (ahead < range.end) fetch(a, shared_address(stages) + stage * 2 * TILE_BYTES, blocks, ahead, kv_head, lane);
    commit_copies();  // an empty group where nothing is left, so that the count below stays right
    ahead += warps;
    blocks.find(table, min(ahead, range.end - 1), last_block);
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch_next(stage);
  int stage = 0;
  for (int tile = first; tile < range.end; tile += warps) {
    wait_copies<STAGES - 2>();
    __syncwarp();  // everybody's chunks are there, and everybody has left the stage that is filled next
    fetch_next(stage == 0 ? STAGES - 1 : stage - 1);
    const int key = tile * TILE;
    const bool hidden = a.scoring.window > 0 && key <= rows.kv_len - 1 - a.scoring.window;
    const char* staged = stages + stage * 2 * TILE_BYTES;
    warp.step(staged, staged + TILE_BYTES, key, a.scoring, hidden || key + TILE - 1 > first_position);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  wait_copies<0>();
}

}  // namespace headway

using namespace headway;

// Grid (kv heads * row tiles, partitions, num_seqs), blocks of 1 .. MAX_WARPS warps, 2 * TILE_BYTES * STAGES bytes a warp.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS) paged_attention(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float state_m[MAX_WARPS][ROWS], state_l[MAX_WARPS][ROWS], row_m[ROWS], row_l[ROWS];
  const int seq = blockIdx.z, item = blockIdx.x, partition = blockIdx.y;
  const int warps = blockDim.x / 32, warp_id = threadIdx.x / 32;
  int token;
  const Rows rows = rows_of(a, seq, item, token);
  const Range range(rows, a.scoring.window, partition, a.partitions);
  if (range.first >= range.end || !rows.live(0)) return;  // also every padding row

  Warp warp;
  warp.start(a.q + token * a.q_stride_token, a.q_stride_token, a.q_stride_head, rows, a.slopes);
  walk(a, warp, rows, range, a.block_table + seq * a.table_stride, item % a.kv_heads, shared + warp_id * STAGES * 2 * TILE_BYTES);

  warp.store_state(state_m[warp_id], state_l[warp_id]);
  __syncthreads();  // from here on the stages are free
  const bool whole = a.partitions == 1;
  if (threadIdx.x < ROWS && rows.live(threadIdx.x)) {
    const int row = threadIdx.x;
    const float sink = whole && a.sinks ? a.sinks[rows.query_head(row)] : -INF;
    float m = sink, l = 0.0f;
    for (int w = 0; w < warps; ++w) m = fmaxf(m, state_m[w][row]);
    for (int w = 0; w < warps; ++w) l += state_l[w][row] * weight(state_m[w][row], m);
    row_m[row] = m;
    row_l[row] = l + weight(sink, m);
  }
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);  // [warps, ROWS, HEAD_DIM]
  warp.store_sums(sums + warp_id * ROWS * HEAD_DIM, row_m);
  __syncthreads();
  const long long part = (long long)(seq * gridDim.x + item) * a.partitions + partition;
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += blockDim.x) {
    const int row = i / HEAD_DIM, dim = i % HEAD_DIM;
    if (!rows.live(row)) break;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[w * ROWS * HEAD_DIM + i];
    if (whole) {
      TYPE* out = a.out + (token + rows.token(row)) * a.out_stride_token + rows.query_head(row) * a.out_stride_head;
      from_float(out[dim], sum / row_l[row] * a.v_scale);
    } else {
      a.partial[part * ROWS * HEAD_DIM + i] = sum;
      if (dim == 0) {
        a.state[(part * ROWS + row) * 2] = row_m[row];
        a.state[(part * ROWS + row) * 2 + 1] = row_l[row];
      }
    }
  }
}

// Grid (kv heads * row tiles, rows in use of a tile, num_seqs), HEAD_DIM threads: out = sum of parts, each at its own scale.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) reduce_partitions(const __grid_constant__ Arguments a) {
  const int seq = blockIdx.z, item = blockIdx.x, row = blockIdx.y, dim = threadIdx.x;
  int token;
  const Rows rows = rows_of(a, seq, item, token);
  if (rows.kv_len == 0 || !rows.live(row)) return;
  const int start = a.scoring.window > 0 ? max(rows.kv_len - rows.query_len - a.scoring.window + 1, 0) / TILE : 0;
  const int tiles = (rows.kv_len + TILE - 1) / TILE - start, each = (tiles + a.partitions - 1) / a.partitions;
  const int used = (tiles + each - 1) / each;
  const long long first = (long long)(seq * gridDim.x + item) * a.partitions;
  const float* state = a.state + (first * ROWS + row) * 2;
  const float* part = a.partial + (first * ROWS + row) * HEAD_DIM + dim;
  const float sink = a.sinks ? a.sinks[rows.query_head(row)] : -INF;
  float m = sink;
#pragma unroll 8
  for (int p = 0; p < used; ++p) m = fmaxf(m, state[p * ROWS * 2]);
  float l = weight(sink, m), sum = 0.0f;
#pragma unroll 8
  for (int p = 0; p < used; ++p) {
    const float w = weight(state[p * ROWS * 2], m);
    l += w * state[p * ROWS * 2 + 1];
    sum += w * part[p * ROWS * HEAD_DIM];
  }
  TYPE* out = a.out + (token + rows.token(row)) * a.out_stride_token + rows.query_head(row) * a.out_stride_head;
  from_float(out[dim], sum / l * a.v_scale);
}
