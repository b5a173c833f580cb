# shows: priority scheduling
from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", scheduling_policy="priority", max_num_seqs=2, swap_space=4, max_seq_len_to_capture=8192)
outputs = llm.generate(["the quick", "the lazy", "the fox"], SamplingParams(max_tokens=5), priority=[2, 1, 0])
print([output.outputs[0].text for output in outputs])
assert len(outputs) == 3
