# shows: a file of prompts to a file of answers, in a chat template applied by hand
import json
from pathlib import Path

from vllm import LLM, SamplingParams

Path("in.jsonl").write_text("\n".join(json.dumps({"id": number, "text": f"the fox number {number}"}) for number in range(5)))
rows = [json.loads(line) for line in Path("in.jsonl").read_text().splitlines()]
llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_model_len=200, enable_prefix_caching=True, enable_lora=False)
tokenizer = llm.get_tokenizer()
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": row["text"]}], tokenize=False, add_generation_prompt=True)
    for row in rows
]
outputs = llm.generate(prompts, SamplingParams(temperature=0.6, top_p=0.9, max_tokens=10, repetition_penalty=1.05))
with open("out.jsonl", "w") as file:
    for row, output in zip(rows, outputs):
        file.write(json.dumps({**row, "answer": output.outputs[0].text}) + "\n")
print(Path("out.jsonl").read_text())
