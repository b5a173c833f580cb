# shows: prompt embeddings as base64 of torch.save
# server: --enable-prompt-embeds
import base64
import io

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
name = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
chat = [{"role": "user", "content": "What is a cache?"}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).input_ids
buffer = io.BytesIO()
torch.save(model.get_input_embeddings()(ids).squeeze(0), buffer)
buffer.seek(0)
encoded = base64.b64encode(buffer.read()).decode("utf-8")
completion = client.completions.create(
    model=name, prompt="", max_tokens=5, temperature=0.0, extra_body={"prompt_embeds": encoded}
)
print(completion.choices[0].text)
