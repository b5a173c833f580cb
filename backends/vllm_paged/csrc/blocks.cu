// Copies of whole blocks, in any layout whose outermost axis is the block.
// Grid (num_pairs, parts per block, key or value). No block may be both a source and a destination.
extern "C" __global__ void __launch_bounds__(256) copy_blocks(
    const uint4* from_key,  // in device memory, or in pinned host memory, which a GPU reads and writes in place
    const uint4* from_value, uint4* to_key, uint4* to_value,
    const long long* pairs,  // [num_pairs, 2]: source and destination block
    long long vectors) {     // 16-byte vectors that a block has
  const long long* pair = pairs + 2 * blockIdx.x;
  const uint4* from = (blockIdx.z ? from_value : from_key) + pair[0] * vectors;
  uint4* to = (blockIdx.z ? to_value : to_key) + pair[1] * vectors;
  const long long step = (long long)gridDim.y * blockDim.x;
  for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x; i < vectors; i += step) to[i] = from[i];
}
