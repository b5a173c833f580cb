# shows: LLM.encode and LLM.score with an embedding model
from vllm import LLM, PoolingParams, PoolingRequestOutput

llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", runner="pooling", convert="embed", max_model_len=100)
outputs = llm.encode(["the quick", "brown fox"], PoolingParams(), pooling_task="embed")
for output in outputs:
    assert isinstance(output, PoolingRequestOutput)
    print(output.outputs.data.shape)
scores = llm.score("the quick", ["the lazy dog", "the quick"])
print([output.outputs.score for output in scores])
assert scores[1].outputs.score > scores[0].outputs.score
