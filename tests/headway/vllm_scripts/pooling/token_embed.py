# shows: one vector per token, for multi-vector search
from vllm import LLM

llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", runner="pooling", convert="embed", enforce_eager=True)
query, *documents = [
    output.outputs.data for output in llm.encode(["quick fox", "the lazy dog", "a fox"], pooling_task="token_embed")
]
for document in documents:
    print(document.shape, (query @ document.T).max(dim=1).values.sum().item())
