"""Speculation with a draft model: a smaller model of the same vocabulary guesses what the larger one verifies.

After Leviathan et al. 2023 (arXiv 2211.17192), with greedy drafts. The draft runs on an engine of its own, whose prefix cache
holds what it has read of every sequence: a guess computes the tokens that have come since the last one, and then its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headway.engine_args import EngineArgs
    from headway.models.loader import LoadedModel

_SHARE = 0.1
"""Share of a GPU's free memory that the draft's cache takes."""


class DraftModel:
    """A `Proposer` that asks an engine, for all sequences of a step at once."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine

    def begin(self, num_prompt_tokens: int) -> DraftedSequence:
        """See Proposer."""
        return DraftedSequence(self)

    def propose_batch(self, sequences: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Guess for several sequences: at most so many tokens of each. A sequence that is too long for the draft gets none."""
        engine, found = self._engine, [list[int]() for _ in sequences]
        longest = engine.limits.max_model_len
        for number, (token_ids, count) in enumerate(zip(sequences, most, strict=True)):
            count = min(count, longest - len(token_ids) - 1)
            if count > 0:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                engine.add_request(str(number), CheckedRequest(token_ids, params))
        try:
            while engine.has_unfinished:
                for delta in engine.step():
                    found[int(delta.request_id)] += delta.new_token_ids
        except BaseException:  # an interrupt
            engine.abort_all()
            raise
        return found


class DraftedSequence:
    """See SequenceProposer."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """See SequenceProposer."""
        return self._model.propose_batch([token_ids], [most])[0]

    def finish(self, token_ids: Sequence[int]) -> None:
        """See SequenceProposer; the draft's prefix cache forgets the sequence in its own time."""


def draft_args(args: EngineArgs, device: torch.device) -> EngineArgs:
    """The options of the draft's engine, out of those of the engine that verifies. device: where both run."""
    assert args.speculative_model is not None
    memory = args.kv_cache_memory
    if memory is None and device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    return dataclasses.replace(
        args,
        model=args.speculative_model,
        speculative_model=None,
        tokenizer=None,
        skip_tokenizer_init=True,
        hf_overrides=None,
        quantization=None,
        kv_cache_memory=memory,
        kv_offload_size=None,
        kv_offload_dir=None,
        max_model_len=None,
        enable_prefix_caching=True,
        enable_prompt_embeds=False,
        enable_lora=False,
        logits_processors=(),
        log_stats_interval=None,
        scheduling_policy="fcfs",
    )


def proposer_of(engine: EngineLoop, draft: LoadedModel, target: LoadedModel) -> DraftModel:
    """What guesses tokens for a model. engine: the draft's.

    :raises ConfigError: the draft has another vocabulary.
    """
    size, own = target.decoder.vocab_size, draft.decoder.vocab_size
    if own != size:
        need = f"a model with the vocabulary of {target.name}, {size} tokens"
        raise ConfigError("speculative_model", need, f"{draft.name} with {own}")
    return DraftModel(engine)
