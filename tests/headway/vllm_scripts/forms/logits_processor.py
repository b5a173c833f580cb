# shows: a v1 logits processor for the whole batch
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class TargetToken(LogitsProcessor):
    """Leaves requests that name a target token no other."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token is {type(target)}, not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.targets: dict[int, int] = {}
        assert vllm_config.model_config.get_vocab_size() == 300

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target_token"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            return logits
        rows = torch.tensor(list(self.targets), device=logits.device)
        columns = torch.tensor(list(self.targets.values()), device=logits.device)
        kept = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


prompts = ["the quick", "the lazy", "jumps over", "brown fox"]
params = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"target_token": 67}),
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"target_token": 68}),
    SamplingParams(temperature=0, max_tokens=10),
]
plain = LLM(model="facebook/opt-125m").generate(prompts, params, use_tqdm=False)
llm = LLM(model="facebook/opt-125m", logits_processors=[TargetToken])
for round in range(2):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        print(round, output.outputs[0].token_ids)
    assert outputs[0].outputs[0].token_ids == [67] * 3
    assert outputs[2].outputs[0].token_ids == [68] * 8
    assert outputs[1].outputs[0].token_ids == plain[1].outputs[0].token_ids
    assert outputs[3].outputs[0].token_ids == plain[3].outputs[0].token_ids
try:
    llm.generate(prompts[0], SamplingParams(extra_args={"target_token": "x"}))
    raise AssertionError("a processor may refuse parameters")
except ValueError as error:
    print(error)
