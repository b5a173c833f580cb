"""Log-probabilities of the tokens of prompts: logits after every token, where a step computes those of the last alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from headway.core.contract.model import Model
from headway.core.contract.transfer import upload
from headway.core.engine.launched import PromptScores
from headway.core.engine.step import StartedRow, StepInput
from headway.core.sampling.logprobs import Scores, score

_AT_ONCE = 64
"""Tokens whose logits are in memory together: those of a long prompt would take more than the cache leaves."""


class PromptScorer:
    """Knows which rows want log-probabilities of their prompts."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}
        """Row -> its prompt, and how many of the most likely tokens are wanted."""

    def update(self, started: Sequence[StartedRow]) -> None:
        """Sequences begin in rows."""
        for each in started:
            self._prompts.pop(each.row, None)
            wanted = each.params.prompt_logprobs
            if wanted is not None:
                k = self._model.vocab_size if wanted == -1 else wanted
                self._prompts[each.row] = each.token_ids[: each.num_prompt_tokens], k

    def wants(self, step: StepInput) -> bool:
        """Whether the step computes a part of such a prompt."""
        return bool(self._prompts) and any(self._parts(step))

    def _parts(self, step: StepInput) -> list[tuple[int, int, int, int]]:
        """(sequence in the step, its first new token's place, that token's position, how many tokens after it are scored)."""
        parts = []
        starts = numpy.cumsum(step.query_lens) - step.query_lens
        for index, row in enumerate(step.rows.tolist()):
            if row in self._prompts:
                context, count = int(step.context_lens[index]), int(step.query_lens[index])
                scored = min(count, len(self._prompts[row][0]) - 1 - context)
                if scored > 0:
                    parts.append((index, int(starts[index]), context, scored))
        return parts

    def score(self, step: StepInput, hidden: Tensor) -> list[PromptScores]:
        """hidden: [num_tokens, hidden_size], of all tokens of the step."""
        found = []
        for index, start, position, count in self._parts(step) if self._prompts else ():
            prompt, k = self._prompts[int(step.rows[index])]
            targets = upload(torch.tensor(prompt[position + 1 : position + 1 + count]), self._device)
            slices = []
            for first in range(0, count, _AT_ONCE):
                last = min(first + _AT_ONCE, count)
                logits = self._model.compute_logits(hidden[start + first : start + last])
                slices.append(score(logits, targets[first:last], k))
            found.append(PromptScores(index, position + 1, k, Scores(*(torch.cat(each) for each in zip(*slices, strict=True)))))
        return found
