# shows: sampling parameters that are cloned, copied and changed
from copy import deepcopy

from vllm import LLM, SamplingParams

base = SamplingParams(temperature=0.0, max_tokens=4, stop=["dog"], spaces_between_special_tokens=True)
longer = base.clone()
longer.max_tokens = 9
longer.n = 1
sampled = deepcopy(base)
sampled.temperature, sampled.seed = 0.9, 7
optional = SamplingParams.from_optional(temperature=0.3, top_p=None, max_tokens=6)
assert (base.max_tokens, longer.max_tokens, base.temperature, optional.top_p) == (4, 9, 0.0, 1.0)

llm = LLM("facebook/opt-125m", seed=0)
outputs = llm.generate(["the quick"] * 4, [base, longer, sampled, optional])
assert outputs[1].outputs[0].token_ids[:4] == outputs[0].outputs[0].token_ids
print([output.outputs[0].text for output in outputs])
