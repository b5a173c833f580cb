// Moving whole blocks, of any layout whose outermost axis is the block.
namespace headway {

struct Moves {
  const uint4* from[2];  // key, value; in device memory, or in pinned host memory, which a GPU reads and writes in place
  uint4* to[2];
  const long long* pairs;    // [num_pairs, 2]: source and destination block
  long long vectors;         // 16-byte vectors a block has
};

}  // namespace headway

// Grid (num_pairs, parts of a block, key or value). No block may be both a source and a destination.
extern "C" __global__ void __launch_bounds__(256) copy_blocks(const __grid_constant__ headway::Moves a) {
  const long long* pair = a.pairs + 2 * blockIdx.x;
  const uint4* from = a.from[blockIdx.z] + pair[0] * a.vectors;
  uint4* to = a.to[blockIdx.z] + pair[1] * a.vectors;
  const long long step = (long long)gridDim.y * blockDim.x;
  for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x; i < a.vectors; i += step) to[i] = from[i];
}
