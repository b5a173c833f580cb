# shows: all sampling parameters
from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", seed=3, gpu_memory_utilization=0.5, swap_space=0)
tokenizer = llm.get_tokenizer()
fox = tokenizer.encode("fox")[0]
settings = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
    "random": SamplingParams(temperature=1.2, top_p=0.9, top_k=40, min_p=0.02, seed=42, max_tokens=12),
    "penalised": SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=12, ignore_eos=True
    ),
    "biased": SamplingParams(temperature=0, logit_bias={fox: 100.0}, max_tokens=12, ignore_eos=True),
    "allowed": SamplingParams(allowed_token_ids=[fox, fox + 1], max_tokens=12, ignore_eos=True),
    "forbidden": SamplingParams(bad_words=["fox", "lazy dog"], max_tokens=12),
    "longer": SamplingParams(min_tokens=12, max_tokens=20),
}
outputs = {name: llm.generate("the quick", params)[0].outputs[0] for name, params in settings.items()}
for name, completion in outputs.items():
    print(name, repr(completion.text), completion.finish_reason)
assert set(outputs["biased"].token_ids) == {fox}
assert set(outputs["allowed"].token_ids) <= {fox, fox + 1}
assert "fox" not in outputs["forbidden"].text
assert len(outputs["longer"].token_ids) >= 12
assert llm.generate("the quick", settings["random"])[0].outputs[0].text == outputs["random"].text
