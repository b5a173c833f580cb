# shows: the tokenizer of another model, generation_config=vllm
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", generation_config="vllm")
assert llm.get_default_sampling_params() == SamplingParams()
outputs = llm.chat([{"role": "user", "content": "the fox"}], SamplingParams(temperature=0, max_tokens=5))
print(outputs[0].outputs[0].text)
assert llm.llm_engine.model_config.tokenizer == "Qwen/Qwen2.5-0.5B-Instruct"
