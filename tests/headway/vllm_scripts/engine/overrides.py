# shows: overrides of config.json (YaRN), revision, download_dir
from vllm import LLM, SamplingParams

rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
hf_overrides = {"rope_parameters": rope, "max_position_embeddings": 2048}
model = "Qwen/Qwen2.5-0.5B-Instruct"
llm = LLM(model=model, hf_overrides=hf_overrides, max_model_len=1024, revision="main", download_dir="./hub")
outputs = llm.generate("the quick " * 200, SamplingParams(temperature=0, max_tokens=4))
print(len(outputs[0].prompt_token_ids), outputs[0].outputs[0].text)
assert len(outputs[0].prompt_token_ids) > 512
