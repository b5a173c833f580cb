# shows: speculative decoding with n-grams, and its metrics
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

llm = LLM(
    model="facebook/opt-125m",
    speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    disable_log_stats=False,
)
outputs = llm.generate(["the fox the fox the fox the", "over and over and over"], SamplingParams(temperature=0, max_tokens=40))
for output in outputs:
    print(output.outputs[0].text)

counts = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
for metric in llm.get_metrics():
    assert not isinstance(metric, Vector)
    if metric.name in counts:
        assert isinstance(metric, Counter)
        counts[metric.name] += metric.value
drafts = counts["vllm:spec_decode_num_drafts"]
print("mean acceptance length:", 1 + counts["vllm:spec_decode_num_accepted_tokens"] / drafts if drafts else 1)
assert len(counts) == 3
