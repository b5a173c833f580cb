# shows: speculative decoding with suffixes
from vllm import LLM, SamplingParams

config = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 24}
llm = LLM("facebook/opt-125m", speculative_config=config, enable_chunked_prefill=True, max_num_batched_tokens=256)
for round in range(2):
    outputs = llm.generate(["the quick brown fox"] * 2, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    print(round, outputs[0].outputs[0].text)
assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
