# shows: every field of the outputs, and options without effect
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
times = outputs[0].metrics
print(times.scheduled_ts - times.queued_ts, times.first_token_ts - times.scheduled_ts, times.last_token_ts - times.first_token_ts)
print(outputs[0].encoder_prompt, outputs[0].multi_modal_placeholders, outputs[0].kv_transfer_params)
llm.reset_prefix_cache()
