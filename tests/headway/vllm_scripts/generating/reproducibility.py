# shows: equal seeds, equal texts
import os
import random

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

seed = 42
random.seed(seed)
llm = LLM(model="facebook/opt-125m", seed=seed)
params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
first = llm.generate(["the quick", "the lazy"], params)
again = llm.generate(["the quick", "the lazy"], params)
print(first[0].outputs[0].text)
assert [each.outputs[0].token_ids for each in first] == [each.outputs[0].token_ids for each in again]
