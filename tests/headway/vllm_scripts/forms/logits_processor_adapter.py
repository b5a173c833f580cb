# shows: a v1 logits processor that wraps one for each request
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class PerRequest:
    def __init__(self, target_token: int):
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


class Wrapped(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target is None:
            return None
        if not isinstance(target, int):
            logger.warning("target_token is no int")
            return None
        return PerRequest(target)


llm = LLM(model="facebook/opt-125m", logits_processors=[Wrapped])
targeted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={"target_token": 70})
params = [targeted, SamplingParams(max_tokens=4)]
outputs = llm.generate(["the quick", "the lazy"], params)
print([output.outputs[0].token_ids for output in outputs])
assert outputs[0].outputs[0].token_ids == [70] * 4
