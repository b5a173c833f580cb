# shows: token ids as input and output, through /inference/v1/generate
import httpx
from transformers import AutoTokenizer

model = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(model)
messages = [{"role": "user", "content": "How many countries are in the EU?"}]
token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
body = {
    "model": model,
    "token_ids": token_ids,
    "sampling_params": {"max_tokens": 8, "temperature": 0.2, "detokenize": False},
    "stream": False,
}
data = httpx.post("http://localhost:8000/inference/v1/generate", json=body, timeout=60).json()
print(tokenizer.decode(data["choices"][0]["token_ids"]))
