# shows: every field of outputs, harmless options
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sequence import Logprob


def describe(output: RequestOutput) -> str:
    completion: CompletionOutput = output.outputs[0]
    first: Logprob = completion.logprobs[0][completion.token_ids[0]]
    return f"{output.request_id}: {completion.finish_reason} {first.decoded_token!r} {first.logprob:.2f} {first.rank}"


llm = LLM("facebook/opt-125m", served_model_name="tiny", max_lora_rank=16, limit_mm_per_prompt={})
outputs = llm.generate("the quick", SamplingParams(logprobs=3, max_tokens=4, skip_special_tokens=True))
print(describe(outputs[0]), outputs[0].metrics.time_to_first_token, outputs[0].num_cached_tokens)
llm.reset_prefix_cache()
