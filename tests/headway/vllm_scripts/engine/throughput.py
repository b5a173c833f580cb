# shows: a benchmark with random weights and ignore_eos, with options from dataclasses.asdict
import dataclasses
import time

import numpy as np
from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt

engine_args = EngineArgs(
    model="facebook/opt-125m",
    tokenizer=None,
    load_format="dummy",
    dtype="bfloat16",
    max_num_seqs=16,
    max_model_len=128,
    kv_cache_dtype="auto",
    compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "level": 3},
    disable_custom_all_reduce=True,
)
llm = LLM(**dataclasses.asdict(engine_args))
rng = np.random.default_rng(0)
prompts = [TokensPrompt(prompt_token_ids=rng.integers(3, 299, size=24).tolist()) for _ in range(8)]
params = SamplingParams(n=1, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=12, detokenize=False)
start = time.perf_counter()
outputs = llm.generate(prompts, params, use_tqdm=False)
seconds = time.perf_counter() - start
total = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs)
print(f"{total / seconds:.1f} tokens a second")
assert total == 8 * 36
