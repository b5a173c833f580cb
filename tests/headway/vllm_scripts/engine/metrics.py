# shows: LLM.get_metrics
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model="facebook/opt-125m", disable_log_stats=False)
llm.generate(["the quick", "the lazy dog"], SamplingParams(temperature=0.8, top_p=0.95))

found = {}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
        found[metric.name] = metric.value
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram) = {metric.count}, {metric.sum}, {metric.buckets}")
assert found["vllm:generation_tokens"] > 0
