# shows: prompt_token_ids as a keyword, trust_remote_code
from vllm import LLM, SamplingParams

llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", trust_remote_code=True, tensor_parallel_size=1, max_model_len=256)
tokenizer = llm.get_tokenizer()
messages = [[{"role": "user", "content": text}] for text in ("hello", "jumps")]
texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in messages]
ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
params = SamplingParams(temperature=0.7, max_tokens=8, stop_token_ids=[tokenizer.eos_token_id], use_beam_search=False, best_of=1)
outputs = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
assert [output.prompt_token_ids for output in outputs] == ids
by_text = llm.generate(texts, params)
print(by_text[0].outputs[0].text)
