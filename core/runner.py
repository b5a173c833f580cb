"""Runs one scheduled step: inputs, metadata, model, sampling."""

from __future__ import annotations

import torch

from headway.core.attention import PagedAttention
from headway.core.metadata import AttentionMetadata, Phase
from headway.core.model import Model
from headway.core.sampler import sample
from headway.core.scheduler import Scheduled
from headway.core.selector import Selector


class Runner:
    """The device side of the engine; it knows sequences only as token ids, lengths and blocks."""

    def __init__(self, model: Model, attention: PagedAttention, selector: Selector, block_size: int) -> None:
        self._model = model
        self._attention = attention
        self._selector = selector
        self._block_size = block_size
        self._device = attention.specs[0].device

    @torch.inference_mode()
    def run(self, step: list[Scheduled]) -> list[int]:
        """Run a step; returns the next token of each share that samples, in order."""
        token_ids: list[int] = []
        positions: list[int] = []
        for share in step:
            first, last = share.seq.num_computed, share.seq.num_computed + share.num_new_tokens
            token_ids += share.seq.token_ids[first:last]
            positions += range(first, last)
        metadata = AttentionMetadata.build(
            [share.num_new_tokens for share in step],
            [share.seq.num_computed for share in step],
            [share.seq.blocks for share in step],
            self._block_size,
            self._device,
        )
        prefill = metadata.prefill.phase if metadata.prefill else Phase.PREFILL
        self._attention.begin(metadata, self._selector.backends_for(prefill), self._selector.backends_for(Phase.DECODE))
        hidden = self._model(
            torch.tensor(token_ids, device=self._device), torch.tensor(positions, device=self._device), self._attention
        )
        sampling = [row for row, share in enumerate(step) if share.samples]
        if not sampling:
            return []
        last_tokens = (metadata.query_start_loc_cpu[1:][sampling] - 1).to(self._device)
        logits = self._model.compute_logits(hidden[last_tokens])
        seqs = [step[row].seq for row in sampling]
        tokens: list[int] = sample(logits, [seq.params for seq in seqs], [seq.generator for seq in seqs]).tolist()
        return tokens
