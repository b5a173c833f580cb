# shows: many prompts in one call
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", max_num_seqs=16, max_num_batched_tokens=256, enable_chunked_prefill=True)
prompts = [f"the {'fox ' * (number % 7)}number" for number in range(60)]
params = [SamplingParams(temperature=0.7, max_tokens=1 + number % 9, seed=number, ignore_eos=True) for number in range(60)]
outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=None)
assert [output.prompt for output in outputs] == prompts
assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + number % 9 for number in range(60)]
assert all(output.finished for output in outputs)
print(sum(len(output.outputs[0].token_ids) for output in outputs), "tokens")
