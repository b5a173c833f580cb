# shows: prompts as token ids
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model="facebook/opt-125m", dtype="float")
tokenizer = llm.get_tokenizer()
texts = ["the quick brown fox", "jumps over the lazy dog"]
ids = [tokenizer.encode(text) for text in texts]
params = SamplingParams(temperature=0, max_tokens=6, detokenize=True)
from_ids = llm.generate([TokensPrompt(prompt_token_ids=each) for each in ids], params)
from_text = llm.generate([{"prompt": text} for text in texts], params)
for one, other in zip(from_ids, from_text):
    assert one.prompt is None
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    print(tokenizer.decode(one.outputs[0].token_ids))
last = llm.generate({"prompt_token_ids": ids[0]}, SamplingParams(truncate_prompt_tokens=2, max_tokens=2))
assert last[0].prompt_token_ids == ids[0][-2:]
