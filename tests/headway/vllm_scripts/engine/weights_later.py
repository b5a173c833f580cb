# shows: random weights first, the real ones through reload_weights
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
wanted = LLM("facebook/opt-125m").generate("The capital of France is", params)[0].outputs[0].text
llm = LLM(model="facebook/opt-125m", load_format="dummy", enforce_eager=True)
before = llm.generate("The capital of France is", params)[0].outputs[0].text
llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
llm.collective_rpc("reload_weights")
assert llm.generate("The capital of France is", params)[0].outputs[0].text == wanted != before
print(before, wanted)
