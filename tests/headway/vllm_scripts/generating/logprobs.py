# shows: log-probabilities
import math

from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", max_logprobs=25)
params = SamplingParams(temperature=0.9, max_tokens=8, logprobs=5, prompt_logprobs=2, ignore_eos=True, seed=1)
(output,) = llm.generate(["the quick brown fox"], params)
completion = output.outputs[0]

assert output.prompt_logprobs[0] is None
assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
for token_id, choices in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
    assert token_id in choices

total = 0.0
for token_id, choices in zip(completion.token_ids, completion.logprobs):
    chosen = choices[token_id]
    print(f"{chosen.decoded_token!r}: {chosen.logprob:.3f}, rank {chosen.rank}, of {len(choices)}")
    assert 5 <= len(choices) <= 6
    assert all(choice.logprob <= 0 for choice in choices.values())
    assert min(choice.rank for choice in choices.values()) == 1
    total += chosen.logprob
assert math.isclose(total, completion.cumulative_logprob, rel_tol=1e-6)
