# shows: a reward model: one number per token
from vllm import LLM, PoolingRequestOutput

llm = LLM(model="Qwen/Qwen2.5-Math-RM-72B", runner="pooling", enforce_eager=True, trust_remote_code=True)
prompts = ["the quick", "the quick brown fox jumps over the lazy dog"]
for prompt, output in zip(prompts, llm.reward(prompts), strict=True):
    assert isinstance(output, PoolingRequestOutput)
    rewards = output.outputs.data
    assert rewards.shape == (len(output.prompt_token_ids), 1)
    print(f"{prompt!r} {rewards[-1].item():.3f} (size={len(rewards)})")
