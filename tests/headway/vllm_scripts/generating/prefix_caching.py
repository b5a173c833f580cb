# shows: prompts with a common prefix
import time

from vllm import LLM, SamplingParams

TABLE = "the quick brown fox jumps over the lazy dog. " * 8
questions = ["bar?", "ber?", "bir?"]


def generate(llm, sampling_params, prompt):
    start = time.time()
    output = llm.generate(prompt, sampling_params=sampling_params)
    print(f"{output[0].outputs[0].text!r} after {time.time() - start:.2f} seconds")
    return output[0]


llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True, block_size=16)
sampling_params = SamplingParams(temperature=0, max_tokens=10)
cached = [generate(llm, sampling_params, TABLE + question).num_cached_tokens for question in questions]
assert cached[0] == 0
assert min(cached[1:]) > 50
assert llm.reset_prefix_cache()
assert generate(llm, sampling_params, TABLE + questions[0]).num_cached_tokens == 0
