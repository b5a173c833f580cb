# shows: speculative decoding with a draft model, and its metrics
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
plain = LLM("facebook/opt-125m").generate("The future of AI is", params)[0].outputs[0].text
llm = LLM("facebook/opt-125m", speculative_config={"model": "facebook/opt-125m", "num_speculative_tokens": 5})
output = llm.generate("The future of AI is", params)[0]
counts = {metric.name: metric.value for metric in llm.get_metrics()}
assert output.outputs[0].text == plain
print(output.outputs[0].text, counts["vllm:spec_decode_num_accepted_tokens"])
