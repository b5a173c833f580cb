"""Logits that a real engine computes or samples from, compared with transformers' for the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from tiny_engine import drain


def save_random(config: PretrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    """A model of random weights large enough that a wrong one shows, and its folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):  # norms, biases, sinks: transformers begins with ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4; all are 1 in the beginning
                number.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that last, and others that do not
                parameter.uniform_(-4, 1)
    model.save_pretrained(folder)
    return model


def observed(engine: EngineLoop, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[list[int], Tensor, int]]:
    """Greedy tokens of each prompt, the logits [tokens, vocab_size] that each was chosen from, and how many prompt tokens the
    prefix cache gave."""
    rows: dict[str, list[Tensor]] = {str(number): [] for number in range(len(prompts))}

    def keep(sampled: numpy.ndarray, logits: Tensor) -> None:
        request_of = {seq.row: seq.request_id for seq in engine.scheduler.running}
        for row, found in zip(sampled.tolist(), logits, strict=True):
            rows[request_of[row]].append(found.clone())

    engine.executor.observe(keep)
    for name, prompt in zip(rows, prompts, strict=True):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, engine.limits.checked(list(prompt), params))
    written = drain(engine)
    engine.executor.observe(None)
    ends = {name: written[name, 0] for name in rows}
    assert all(end.finish_reason == "length" for end in ends.values()), ends
    return [(ends[name].token_ids, torch.stack(found), ends[name].num_cached_tokens) for name, found in rows.items()]


def logits_by_transformers(model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits, from one pass, for the positions at which `tokens` were chosen."""
    with torch.inference_mode():
        return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def watched(engine: EngineLoop) -> Callable[[], dict[tuple[int, ...], Tensor]]:
    """Record the logits of an engine's greedy requests.

    The returned function gives them, [tokens, vocabulary], by the tokens that were chosen, and starts again. Fewer requests than
    max_num_seqs must run meanwhile, so that no row has two of them.
    """
    seen: dict[int, list[Tensor]] = defaultdict(list)

    def look(rows: NDArray[numpy.int32], logits: Tensor) -> None:
        for row, own in zip(rows.tolist(), logits.clone(), strict=True):
            seen[row].append(own)

    def take() -> dict[tuple[int, ...], Tensor]:
        found = {tuple(torch.stack(own).argmax(-1).tolist()): torch.stack(own) for own in seen.values()}
        seen.clear()
        return found

    engine.executor.observe(look)
    return take


def logits_of(reference: Any, prompt: list[int], written: list[int]) -> Tensor:
    """[len(written), vocabulary]: what transformers computes before each token, over the whole sequence at once."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([prompt + written[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]
