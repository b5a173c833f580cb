# shows: sleep and wake_up at levels 1 and 2, also by parts
from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", enable_sleep_mode=True)
params = SamplingParams(temperature=0, max_tokens=8)
before = llm.generate("The capital of France is", params)[0].outputs[0].text
llm.sleep(level=1)
llm.wake_up()
assert llm.generate("The capital of France is", params)[0].outputs[0].text == before
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
llm.collective_rpc("reload_weights")
llm.wake_up(tags=["kv_cache"])
assert llm.generate("The capital of France is", params)[0].outputs[0].text == before
print(before)
