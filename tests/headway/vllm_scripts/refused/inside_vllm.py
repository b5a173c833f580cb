# shows: a layer of vLLM's own code
# refused: docs/models.md says which models run
from vllm.model_executor.layers.linear import ColumnParallelLinear

ColumnParallelLinear(4, 4)
