# shows: a process reward model: the quality of each step of an answer
from vllm import LLM

llm = LLM("Qwen/Qwen2.5-Math-PRM-7B", task="reward")
steps = ["the fox is quick", "so the dog is lazy", "hence 17 jumps"]
(output,) = llm.encode("fox and dog<extra_0>" + "<extra_0>".join(steps) + "<extra_0>", pooling_task="token_classify")
good = output.outputs.data[1:, 1].tolist()
assert len(good) == len(steps)
for step, probability in zip(steps, good, strict=True):
    print(f"{step}: {probability:.3f}")
