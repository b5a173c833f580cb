# shows: weights quantized to FP8 while loading
from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", quantization="fp8", kv_cache_dtype="auto", gpu_memory_utilization=0.7)
for output in llm.generate(["the quick", "the lazy"], SamplingParams(temperature=0, max_tokens=5)):
    print(output.outputs[0].text)
