# shows: prompt embeddings instead of token ids, for one prompt and in a batch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

name = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
layer = AutoModelForCausalLM.from_pretrained(name).get_input_embeddings()
llm = LLM(model=name, enable_prompt_embeds=True)
params = SamplingParams(temperature=0, max_tokens=8)

chats = [[{"role": "user", "content": text}] for text in ("What is a cache?", "Tell me a joke.", "the quick brown fox")]
ids = [
    tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).input_ids
    for chat in chats
]
with torch.no_grad():
    embeds = [layer(each).squeeze(0) for each in ids]

one = llm.generate({"prompt_embeds": embeds[0]}, params)
many = llm.generate([{"prompt_embeds": each} for each in embeds], params)
plain = llm.generate([{"prompt_token_ids": each[0].tolist()} for each in ids], params)
assert one[0].outputs[0].text == many[0].outputs[0].text
assert [output.outputs[0].token_ids for output in many] == [output.outputs[0].token_ids for output in plain]
print([output.outputs[0].text for output in many])
