# shows: a sequence classifier: probabilities of labels
from vllm import LLM, ClassificationRequestOutput

llm = LLM(model="classifier", runner="pooling", enforce_eager=True)
outputs = llm.classify(["the quick", "the lazy"])
for output in outputs:
    assert isinstance(output, ClassificationRequestOutput)
    probs = output.outputs.probs
    print(f"{[round(each, 3) for each in probs]} (size={len(probs)}, classes={output.outputs.num_classes})")
    assert abs(sum(probs) - 1) < 1e-5
