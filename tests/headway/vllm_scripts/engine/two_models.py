# shows: two models one after the other, with vLLM's clean-up functions
import contextlib
import gc

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel


def clean_up():
    destroy_model_parallel()
    destroy_distributed_environment()
    with contextlib.suppress(AssertionError):
        torch.distributed.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()


for name in ("facebook/opt-125m", "Qwen/Qwen2.5-0.5B-Instruct"):
    llm = LLM(model=name, gpu_memory_utilization=0.4, enforce_eager=True, distributed_executor_backend="mp")
    print(llm.generate("the", SamplingParams(max_tokens=3))[0].outputs[0].text)
    del llm
    clean_up()
