# shows: current_platform, set_random_seed, the Ray executor option, sizes of the model
from vllm import LLM, SamplingParams
from vllm.model_executor.utils import set_random_seed
from vllm.platforms import current_platform

set_random_seed(7)
dtype = "bfloat16" if current_platform.is_cuda() else "float32"
llm = LLM("facebook/opt-125m", dtype=dtype, distributed_executor_backend="ray", gpu_memory_utilization=0.5)
config = llm.llm_engine.model_config
print(config.dtype, config.hf_config.model_type, config.max_model_len, llm.llm_engine.scheduler_config.max_num_seqs)
output = llm.generate("the quick", SamplingParams(max_tokens=4))[0]
print(output.metrics.first_token_latency, output.metrics.time_in_queue)
