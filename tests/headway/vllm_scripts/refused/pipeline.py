# shows: pipeline parallelism
# refused: pipeline_parallel_size
from vllm import EngineArgs

EngineArgs(model="facebook/opt-125m", pipeline_parallel_size=2)
