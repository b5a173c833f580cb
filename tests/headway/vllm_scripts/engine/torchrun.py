# shows: one process started by torchrun (external_launcher)
from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", tensor_parallel_size=1, distributed_executor_backend="external_launcher", seed=1)
for output in llm.generate(["Hello, my name is", "The capital of France is"], SamplingParams(max_tokens=8)):
    print(f"{output.prompt!r} {output.outputs[0].text!r}")
