// Paged decode on the vllm_5d layout: v1 (one thread block per sequence and kv head) and v2 (context in partitions, then
// `reduce_partitions`), after vLLM's PagedAttention kernels (Kwon et al. 2023). Unlike those, K and V are read once for all query heads of
// a
// kv head, and each warp has its own pipeline of tiles: warps synchronise only once, at the end.
//
// The two kernels of v2 overlap (programmatic dependent launch): the second waits before it first reads the first one's output.
//
// Compiled per set of -D: TYPE (q and out), KV_TYPE (cache), HEAD_DIM, BLOCK_SIZE, STAGES (tiles in flight per warp).
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
constexpr int SUM_PITCH = HEAD_DIM + 8;  // floats between rows that are merged in shared memory: neighbours meet other banks
constexpr int TILE_BYTES = TILE * HEAD_DIM * sizeof(KV_TYPE);  // of the key, and of the value

static_assert(ROWS * SUM_PITCH * 4 <= STAGES * 2 * TILE_BYTES, "the merged sums use the stages' memory");

// One partition's range of a sequence's tiles. The number of partitions is fixed by the host; their size follows from the sequence's length
// on the device, so a captured graph is correct for any length.
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

// The query rows of a thread block. token: the sequence's first token.
__device__ __forceinline__ Rows rows_of(const int* query_start_loc, const int* seq_lens, int kv_heads, int group, int seq,
                                        int item, int& token) {
  token = query_start_loc[seq];
  return Rows{item / kv_heads * ROWS, group, query_start_loc[seq + 1] - token, seq_lens[seq], item % kv_heads * group};
}

// Physical blocks of a warp's tiles, two per tile if blocks are half a tile. Lane i holds the blocks of tile i of 32, and the next 32 are
// already being loaded, so that no tile waits for the table.
struct Lookup {
  const int* table;
  int last_tile, last_block, step, lane;
  int first, second, next_first, next_second;

  __device__ Lookup(const int* table_, const Rows& rows, const Range& range, int tile, int warps)
      : table(table_), last_tile(range.end - 1), last_block((rows.kv_len - 1) / BLOCK_SIZE), step(warps), lane(threadIdx.x % 32) {
    find(tile + lane * step);
  }
  __device__ void find(int tile) {  // past the end: the last one again
    const int at = min(tile, last_tile) * TILE / BLOCK_SIZE;
    next_first = table[at];
    next_second = BLOCK_SIZE < TILE ? table[min(at + 1, last_block)] : next_first;
  }
  // Blocks of tile number `count`. Call for 0, 1, 2, ...
  __device__ void operator()(int count, int tile, int& one, int& two) {
    if (count % 32 == 0) {
      first = next_first, second = next_second;
      find(tile + (32 + lane) * step);
    }
    one = __shfl_sync(~0u, first, count % 32);
    two = BLOCK_SIZE < TILE ? __shfl_sync(~0u, second, count % 32) : one;
  }
};

// Start copying a tile's key and value to shared memory; adjacent lanes copy adjacent chunks.
__device__ __forceinline__ void fetch(const KV_TYPE* key, const KV_TYPE* value, int kv_heads, u32 staged, int block, int second,
                                      int tile, int kv_head, int lane) {
  const int first_slot = tile * TILE % BLOCK_SIZE;
  const long long runs[2] = {run_offset(block, kv_head, kv_heads, HEAD_DIM, BLOCK_SIZE),
                             run_offset(second, kv_head, kv_heads, HEAD_DIM, BLOCK_SIZE)};
  constexpr int PIECES = HEAD_DIM / X, CHUNKS = TILE / X;
  static_assert(BLOCK_SIZE >= X && BLOCK_SIZE % 8 == 0 && HEAD_DIM % 16 == 0, "not a shape of these kernels");
#pragma unroll
  for (int i = lane; i < PIECES * TILE; i += 32) {
    const int slot = first_slot + i % TILE;
    const long long run = BLOCK_SIZE < TILE && slot >= BLOCK_SIZE ? runs[1] : runs[0];
    copy_async(staged + staged_key(i / TILE, i % TILE),
               key + run + key_offset(BLOCK_SIZE < TILE ? slot % BLOCK_SIZE : slot, i / TILE * X, BLOCK_SIZE, X));
  }
#pragma unroll
  for (int i = lane; i < HEAD_DIM * CHUNKS; i += 32) {
    const int slot = first_slot + i % CHUNKS * X;
    const long long run = BLOCK_SIZE < TILE && slot >= BLOCK_SIZE ? runs[1] : runs[0];
    copy_async(staged + TILE_BYTES + staged_value(i / CHUNKS, i % CHUNKS, X),
               value + run + value_offset(BLOCK_SIZE < TILE ? slot % BLOCK_SIZE : slot, i / CHUNKS, BLOCK_SIZE));
  }
}

// Let the next kernel start, and wait for the previous one, if launches overlap.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace headway

using namespace headway;

// Grid (kv heads * row tiles, partitions, num_seqs), thread blocks of 1 .. MAX_WARPS warps, 2 * TILE_BYTES * STAGES bytes per warp.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS) paged_attention(
    const TYPE* q,  // [num_tokens, num_heads, HEAD_DIM], rows of a head contiguous
    long long q_stride_token, long long q_stride_head, const KV_TYPE* key, const KV_TYPE* value,
    TYPE* out,  // as q
    long long out_stride_token, long long out_stride_head,
    const int* block_table,  // [num_seqs, table_stride]
    long long table_stride,
    const int* seq_lens,         // [num_seqs]; 0: a padding row
    const int* query_start_loc,  // [num_seqs + 1]
    const float* slopes,         // [num_heads], log2(e) * ALiBi slope, or null
    const float* sinks,          // [num_heads], log2(e) * sink, or null
    float* partial,              // [num_seqs * items, partitions, ROWS, HEAD_DIM]; items: kv heads * row tiles
    float* state,                // [num_seqs * items, partitions, ROWS, 2]: largest score, sum of weights
    int kv_heads, int group, int partitions, float v_scale, float scale, float cap, int window) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float state_m[MAX_WARPS][ROWS], state_l[MAX_WARPS][ROWS], row_m[ROWS], row_l[ROWS];
  release_next();
  const int seq = blockIdx.z, item = blockIdx.x, partition = blockIdx.y, kv_head = item % kv_heads;
  const int warps = blockDim.x / 32, warp_id = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Scoring scoring{scale, cap, window, slopes != nullptr};
  int token;
  const Rows rows = rows_of(query_start_loc, seq_lens, kv_heads, group, seq, item, token);
  const Range range(rows, window, partition, partitions);
  const int used = rows.used(ROWS);
  if (range.first >= range.end || used <= 0) return;  // also every padding row

  // The warp's tiles: first + warp, + warps, ..., so that the warps together read adjacent slots of large blocks.
  const int first_tile = range.first + warp_id;
  char* stages = shared + warp_id * STAGES * 2 * TILE_BYTES;
  Lookup lookup(block_table + seq * table_stride, rows, range, first_tile, warps);
  int ahead = 0;  // tiles of this warp whose copies were started
  auto fetch_next = [&](int stage) {
    const int tile = first_tile + ahead * warps;
    int block, second;
    lookup(ahead, tile, block, second);
    const u32 staged = shared_address(stages) + stage * 2 * TILE_BYTES;
    if (tile < range.end) fetch(key, value, kv_heads, staged, block, second, tile, kv_head, lane);
    commit_copies();  // an empty group where nothing is left, so that the count below stays right
    ++ahead;
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch_next(stage);
  Warp warp;
  warp.start(q + token * q_stride_token, q_stride_token, q_stride_head, rows, slopes);
  int stage = 0;
  for (int tile = first_tile; tile < range.end; tile += warps) {
    wait_copies<STAGES - 2>();
    __syncwarp();  // everybody's chunks are there, and everybody has left the stage that is filled next
    fetch_next(stage == 0 ? STAGES - 1 : stage - 1);
    const int first_key = tile * TILE;
    const bool hidden = window > 0 && first_key <= rows.kv_len - 1 - window;
    const char* staged = stages + stage * 2 * TILE_BYTES;
    warp.step(staged, staged + TILE_BYTES, first_key, scoring, hidden || first_key + TILE - 1 > rows.kv_len - rows.query_len);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  wait_copies<0>();

  warp.store_state(state_m[warp_id], state_l[warp_id]);
  __syncthreads();  // from here on the stages are free
  const bool whole = partitions == 1;
  if (threadIdx.x < used) {
    const int row = threadIdx.x;
    const float sink = whole && sinks ? sinks[rows.query_head(row)] : -INF;
    float m = sink, l = 0.0f;
    for (int w = 0; w < warps; ++w) m = fmaxf(m, state_m[w][row]);
    for (int w = 0; w < warps; ++w) l += state_l[w][row] * weight(state_m[w][row], m);
    row_m[row] = m;
    row_l[row] = l + weight(sink, m);
  }
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);  // [warps, ROWS, SUM_PITCH]
  warp.store_sums(sums + warp_id * ROWS * SUM_PITCH, SUM_PITCH, row_m, used);
  __syncthreads();
  const long long part = (long long)(seq * gridDim.x + item) * partitions + partition;
  for (int i = threadIdx.x; i < used * HEAD_DIM; i += blockDim.x) {
    const int row = i / HEAD_DIM, dim = i % HEAD_DIM;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += sums[(w * ROWS + row) * SUM_PITCH + dim];
    if (whole) {
      TYPE* row_out = out + (token + rows.token(row)) * out_stride_token + rows.query_head(row) * out_stride_head;
      from_float(row_out[dim], sum / row_l[row] * v_scale);
    } else {
      partial[part * ROWS * HEAD_DIM + i] = sum;
      if (dim == 0) {
        state[(part * ROWS + row) * 2] = row_m[row];
        state[(part * ROWS + row) * 2 + 1] = row_l[row];
      }
    }
  }
}

// Grid (kv heads * row tiles, rows in use of a tile, num_seqs), HEAD_DIM threads: out = sum of parts, each scaled.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) reduce_partitions(
    TYPE* out, long long out_stride_token, long long out_stride_head, const int* seq_lens, const int* query_start_loc,
    const float* sinks, const float* partials, const float* states, int kv_heads, int group, int partitions, float v_scale,
    int window) {
  constexpr int BATCH = 8;  // partitions read together
  const int seq = blockIdx.z, item = blockIdx.x, row = blockIdx.y, dim = threadIdx.x;
  int token;
  const Rows rows = rows_of(query_start_loc, seq_lens, kv_heads, group, seq, item, token);
  if (rows.kv_len == 0 || row >= rows.used(ROWS)) return;
  const Range whole(rows, window, 0, 1), first(rows, window, 0, partitions);
  const int each = first.end - first.first, filled = (whole.end - whole.first + each - 1) / each;
  const long long start = (long long)(seq * gridDim.x + item) * partitions;
  const float* state = states + (start * ROWS + row) * 2;
  const float* part = partials + (start * ROWS + row) * HEAD_DIM + dim;
  float m = sinks ? sinks[rows.query_head(row)] : -INF, l = sinks ? 1.0f : 0.0f, sum = 0.0f;
  await_previous();
  for (int p = 0; p < filled; p += BATCH) {
    float part_m[BATCH], part_l[BATCH], part_sum[BATCH], largest = -INF;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const bool there = p + i < filled;
      part_m[i] = there ? state[(p + i) * ROWS * 2] : -INF;
      part_l[i] = there ? state[(p + i) * ROWS * 2 + 1] : 0.0f;
      part_sum[i] = there ? part[(p + i) * ROWS * HEAD_DIM] : 0.0f;
      largest = fmaxf(largest, part_m[i]);
    }
    const float shrink = raise(m, largest);
    l *= shrink, sum *= shrink;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      l += part_l[i] * weight(part_m[i], m);
      sum += part_sum[i] * weight(part_m[i], m);
    }
  }
  TYPE* row_out = out + (token + rows.token(row)) * out_stride_token + rows.query_head(row) * out_stride_head;
  from_float(row_out[dim], sum / l * v_scale);
}
