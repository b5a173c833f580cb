# shows: a token classifier, as for named entities
from vllm import LLM

llm = LLM(model="names", runner="pooling", enforce_eager=True)
for output in llm.encode(["the quick", "brown fox"], pooling_task="token_classify"):
    labels = output.outputs.data.argmax(-1).tolist()
    assert len(labels) == len(output.prompt_token_ids)
    print(labels)
