# shows: several completions of a prompt
from vllm import LLM, RequestOutput, SamplingParams

llm = LLM(model="facebook/opt-125m", block_size=16)
prompt = "the quick brown fox jumps over the lazy dog, and the dog jumps over the fox"
outputs: list[RequestOutput] = llm.generate([prompt, "bar"], SamplingParams(n=4, temperature=1.5, max_tokens=10, seed=7))
for output in outputs:
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    for completion in output.outputs:
        print(f"{completion.index}: {completion.text!r} ({completion.finish_reason}, {completion.stop_reason})")

(best,) = llm.generate([prompt], SamplingParams(n=2, best_of=6, temperature=1.5, max_tokens=10, logprobs=0, ignore_eos=True))
assert len(best.outputs) == 2
assert best.outputs[0].cumulative_logprob >= best.outputs[1].cumulative_logprob
