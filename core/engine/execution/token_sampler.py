"""Sampling of a step's tokens, and scoring of prompts whose log-probabilities are requested."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.kernel import upload
from headway.core.contract.model import Model
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.step import StartedRow, StepInput
from headway.core.engine.execution.host_rows import HostRows, PromptScores
from headway.core.sampling.filtering import NO_FILTER, TokenFilter
from headway.core.sampling.logits_shaper import LogitsShaper, Shaped
from headway.core.sampling.logprobs import Scores
from headway.core.sampling.ranked_vocabulary import vocabulary_of
from headway.core.sampling.sampler import (
    FILTERING,
    NO_TOKEN_LEFT,
    NOT_A_TOKEN,
    OF_HISTORY,
    ON_HOST,
    REASONS,
    SHAPING,
    ChangingRows,
    Draws,
    Need,
    SamplingOps,
    Vocabulary,
    keys_of,
    need_of,
    reasons_of,
    scale_of,
)


def positions_of(step: StepInput) -> NDArray[numpy.int64]:
    """Return int64 [num_tokens]: position of every new token in its sequence."""
    if step.num_tokens == step.num_seqs:
        return step.context_lens.astype(numpy.int64)
    starts = numpy.cumsum(step.query_lens, dtype=numpy.int64) - step.query_lens
    positions: NDArray[numpy.int64] = numpy.arange(step.num_tokens) + numpy.repeat(step.context_lens - starts, step.query_lens)
    return positions


def logit_indices(step: StepInput) -> NDArray[numpy.int64]:
    """Return the int64 indices of the new tokens whose logits are sampled: the last new token of each sampling sequence or, with
    k drafts, its last k + 1 new tokens."""
    if step.continues:
        return numpy.arange(step.num_seqs)
    counts = numpy.where(step.samples, step.num_draft_tokens + 1, 0)
    ends = numpy.cumsum(step.query_lens, dtype=numpy.int64)
    if not step.num_draft_tokens.any():
        last: NDArray[numpy.int64] = ends[step.samples] - 1
        return last
    indices: NDArray[numpy.int64] = numpy.repeat(ends - numpy.cumsum(counts), counts)
    return indices + numpy.arange(len(indices))


def sampled_at(step: StepInput) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Return int32 arrays with the row and the position of every sampled token."""
    if step.continues:
        return step.rows, step.context_lens + 1
    indices = logit_indices(step)
    rows = numpy.repeat(step.rows, step.query_lens)[indices]
    return rows, (positions_of(step)[indices] + 1).astype(numpy.int32)


def drafts_by_row(step: StepInput) -> dict[int, list[int]]:
    """Return a map from row to the draft tokens of the row that a step verifies."""
    ends, counts = numpy.cumsum(step.query_lens), step.num_draft_tokens
    return {
        int(step.rows[index]): step.token_ids[ends[index] - counts[index] : ends[index]].tolist()
        for index in numpy.flatnonzero(counts)
        if step.samples[index]
    }


@dataclass(frozen=True, slots=True)
class Chosen:
    """The sampled tokens of a step on the device, and information on how they were sampled."""

    tokens: Tensor
    """int64 [rows of logits]: the sampled tokens."""
    after_model: tuple[str, ...] = ()
    """Request parameters that were applied after the model, kernel by kernel, for some rows."""
    waited_for: tuple[str, ...] = ()
    """Request parameters that needed the previous step's tokens on the host, for some rows."""
    wait_seconds: float = 0.0
    """Seconds for which the host waited for the previous step's tokens."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Error text of a sequence, keyed by its row of logits."""
    scores: Scores | None = None
    """Log-probabilities of the rows whose requests ask for them. None if no such rows exist."""
    scored: Sequence[tuple[int, int]] = ()
    """For each scored row: index of the row of logits, and requested number of most likely tokens."""


class TokenSampler:
    """Sampler that applies each row's sampling parameters.

    Work that depends only on a row's parameters and on tokens known to the device is done on the device, so a step can be
    launched before the previous step's tokens are read. A grammar or a logits processor must see the previous token. The host
    then waits for this token after it has launched the model, while the device computes the model, and launches the sampler
    afterwards.

    With several ranks, every rank samples from the same values: seeds and positions are equal, and `vocabulary` gathers the
    shards of the logits. Grammars and logits processors run only on rank 0. In steps that need them, other ranks use rank 0's
    tokens.
    """

    def __init__(
        self,
        ops: SamplingOps,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        hosts: HostRows | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.vocabulary = vocabulary_of(ops, vocab_size, ranks)
        """Object that samples from the logits that the model computes."""
        self._vocab_size = vocab_size
        self._device = device
        self._hosts = hosts or HostRows(None, {})
        self._ranks = ranks
        self._shaper = LogitsShaper(vocab_size, device)
        self._seeds = numpy.zeros(max_num_seqs, dtype=numpy.uint64)
        self._scales = numpy.zeros(max_num_seqs, dtype=numpy.float32)
        self._needs = numpy.zeros(max_num_seqs, dtype=numpy.int32)
        self._filters = numpy.tile(numpy.array(NO_FILTER, dtype=numpy.float32)[:, None], max_num_seqs)
        """float32 [4, max_num_seqs]: `TokenFilter` values of each row, NO_FILTER for rows that do not filter."""
        self._served = 0 if ops.filter is None else FILTERING  # Needs that are met without changing logits
        self._least_len = numpy.zeros(max_num_seqs, dtype=numpy.int64)  # Prompt length plus min_tokens
        self._num_logprobs = numpy.zeros(max_num_seqs, dtype=numpy.int64)

    @property
    def _follows(self) -> bool:
        """True if grammars and logits processors run in a different process, on rank 0."""
        return self._ranks.rank > 0

    def update(self, started: Sequence[StartedRow]) -> None:
        """Set up rows for sequences that begin. A sequence with unusable parameters fails at its first token."""
        for each in started:
            try:
                self._start(each)
            except Exception as error:  # any error that its own parameters cause
                self._scales[each.row] = self._least_len[each.row] = self._num_logprobs[each.row] = 0
                self._needs[each.row] = Need.PROCESSOR
                self._filters[:, each.row] = NO_FILTER
                self._shaper.start_plain(each.row)  # the shaper reads the rows of failed sequences too
                if not self._follows:
                    self._hosts.refuse(each, f"sampling_params: {type(error).__name__}: {error}")

    def _start(self, each: StartedRow) -> None:
        row, params = each.row, each.params
        need = need_of(params)
        self._seeds[row], self._scales[row], self._needs[row] = each.seed % 2**64, scale_of(params), need
        self._least_len[row] = each.num_prompt_tokens + params.min_tokens
        self._num_logprobs[row] = self._vocab_size if params.logprobs == -1 else params.logprobs or 0
        self._filters[:, row] = TokenFilter.of(params, scale_of(params), self._vocab_size) if need & FILTERING else NO_FILTER
        if need & SHAPING & ~self._served:
            self._shaper.start(row, params, need, each.token_ids, each.num_prompt_tokens, each.stop_token_ids)
        if not self._follows:
            self._hosts.start(each, bool(need & ON_HOST))

    def draws(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> Draws:
        """Return the draws for a graph at these positions. If a row's logits are changed after the graph, its draw is greedy,
        which costs less."""
        scales, filters = self._scales[rows], None
        needs = self._needs_at(rows, positions)
        if needs.any():
            changed, filtered = needs & SHAPING & ~self._served, needs & self._served
            scales[(changed | filtered) != 0] = 0
            filtered[changed != 0] = 0
            if filtered.any():
                filters = self._filters[:, rows]
                filters[0, filtered == 0] = 0
        drawn = filters is not None or scales.any()
        return Draws(scales, self._keys(rows, positions) if drawn else numpy.zeros(len(rows), dtype=numpy.int64), filters)

    def plain(self, rows: NDArray[numpy.int32]) -> bool:
        """Return whether tokens of these rows are drawn from the logits without any other processing."""
        return not (self._needs[rows] & ~self._served).any()

    def _needs_at(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> NDArray[numpy.int32]:
        """Return int32 [rows]: the `Need` flags of rows when tokens at these positions are sampled."""
        needs = self._needs[rows]
        if needs.any():
            needs[positions >= self._least_len[rows]] &= ~Need.MIN_TOKENS
        return needs

    def _keys(self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32]) -> NDArray[numpy.int64]:
        return keys_of(self._seeds[rows], positions).view(numpy.int64)

    def note_drafts(self, step: StepInput) -> None:
        """Record a step's drafts for rows whose penalties or bad words depend on them. Rejected drafts are overwritten later."""
        ends = numpy.cumsum(step.query_lens)
        for index in numpy.flatnonzero(step.num_draft_tokens):
            row, count = int(step.rows[index]), int(step.num_draft_tokens[index])
            if self._needs[row] & OF_HISTORY:
                last = int(step.context_lens[index] + step.query_lens[index])
                rows = numpy.full(count, row, dtype=numpy.int64)
                self._shaper.note(rows, numpy.arange(last - count, last), step.token_ids[ends[index] - count : ends[index]])

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        best: Tensor | None = None,
        drawn: bool = False,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Chosen:
        """Choose a token for each row of logits, [rows, vocab_size] or a rank's shard of it.

        rows, positions: the executor's row and the position of each new token. best: tokens that a graph has chosen, or None.
        drawn: True if the graph used `draws`, False if it sampled greedily. drafts: row -> drafts to verify; a row with drafts
        appears several times in the logits.
        """
        needs = self._needs_at(rows, positions) & ~self._served
        tokens = best if drawn and best is not None else self.vocabulary.sample(logits, self.draws(rows, positions), best=best)
        if not needs.any():
            return Chosen(tokens)
        at = numpy.flatnonzero(needs & SHAPING)
        needed = int(numpy.bitwise_or.reduce(needs))
        waited, errors = 0.0, dict[int, str]()
        if len(at):
            shaped = Shaped(at, rows[at].astype(numpy.int64), positions[at].astype(numpy.int64), needs[at])
            changing = self.vocabulary.changing(logits, ChangingRows(at, shaped.needs, self._filters, shaped.rows))
            changed, waited, errors = self._shape(changing, shaped, drafts or {})
            tokens = self._choose(changed, tokens, shaped)
            if needed & ON_HOST:
                tokens = self._ranks.broadcast(tokens)
        noted = numpy.flatnonzero(needs & OF_HISTORY)
        if len(noted):
            some = tokens if len(noted) == len(tokens) else tokens.index_select(0, self._up(noted))
            self._shaper.note(rows[noted].astype(numpy.int64), positions[noted].astype(numpy.int64), some)
        scores, scored = self._score(logits, tokens, rows, needs)
        return Chosen(
            tokens,
            after_model=reasons_of(needed & ~Need.PROMPT_LOGPROBS),
            waited_for=reasons_of(needed & ON_HOST),
            wait_seconds=waited,
            errors={int(at[row]): why for row, why in errors.items()},
            scores=scores,
            scored=scored,
        )

    def _shape(self, logits: Tensor, shaped: Shaped, drafts: Mapping[int, Sequence[int]]) -> tuple[Tensor, float, dict[int, str]]:
        """Return the changed logits, the seconds for which the host waited, and a map from row of logits to error text."""
        hosted = shaped.having(ON_HOST)
        if not len(hosted) or self._follows:
            return self._shaper.shape(logits, shaped, None, None), 0.0, {}
        began = time.perf_counter()
        self._hosts.catch_up()
        waited = time.perf_counter() - began
        rows, lens = shaped.rows[hosted].tolist(), shaped.lens[hosted].tolist()
        masked, masks = self._hosts.masks(rows, lens, drafts)
        errors: dict[int, str] = {}

        def process(changing: Tensor) -> None:
            own = changing if len(hosted) == len(changing) else changing.index_select(0, self._up(hosted))
            failed = self._hosts.process(rows, lens, drafts, own)
            if own is not changing:
                changing.index_copy_(0, self._up(hosted), own)
            errors.update({int(hosted[number]): why for number, why in failed.items()})

        bits = None if masks is None else (hosted[masked], masks)
        return self._shaper.shape(logits, shaped, bits, process), waited, errors

    def _choose(self, changed: Tensor, tokens: Tensor, shaped: Shaped) -> Tensor:
        """Return the tokens, with newly sampled tokens for rows whose logits have changed."""
        scales = (self._scales[shaped.rows] > 0).astype(numpy.float32)  # the logits are divided by the temperature already
        filters = self._filters[:, shaped.rows] if self._served else None
        if filters is not None and filters[0].any():
            filters[0] = filters[0] > 0
            scales[filters[0] > 0] = 0
        else:
            filters = None
        keys = self._keys(shaped.rows.astype(numpy.int32), shaped.lens.astype(numpy.int32))
        chosen = self.vocabulary.sample_changed(changed, Draws(scales, keys, filters))
        chosen = torch.where(changed.amax(-1) == -torch.inf, NO_TOKEN_LEFT, chosen)
        some = len(shaped.at) < len(tokens)
        at = self._up(shaped.at) if some else None
        before = tokens if at is None else tokens.index_select(0, at)
        chosen = torch.where(before == NOT_A_TOKEN, NOT_A_TOKEN, chosen)  # a mask may have hidden the NaN
        return chosen if at is None else tokens.index_copy(0, at, chosen)

    def _score(
        self, logits: Tensor, tokens: Tensor, rows: NDArray[numpy.int32], needs: NDArray[numpy.int32]
    ) -> tuple[Scores | None, list[tuple[int, int]]]:
        at = numpy.flatnonzero(needs & Need.LOGPROBS)
        if not len(at):
            return None, []
        wanted = self._num_logprobs[rows[at]]
        if len(at) < len(logits):
            index = self._up(at)
            logits, tokens = logits.index_select(0, index), tokens.index_select(0, index)
        scores = self.vocabulary.score(logits, tokens, int(wanted.max()), REASONS[Need.LOGPROBS])
        return scores, list(zip(at.tolist(), wanted.tolist(), strict=True))

    def _up(self, numbers: NDArray[numpy.int64]) -> Tensor:
        return upload(torch.from_numpy(numbers), self._device)


_AT_ONCE = 64  # Tokens whose logits are in memory together: a long prompt's would exceed the memory left besides the cache


class PromptScorer:
    """Scores prompt tokens, for rows whose requests ask for the log-probabilities of the prompt."""

    def __init__(self, model: Model, vocabulary: Vocabulary, device: torch.device) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._device = device
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}  # Each row's prompt, and its number of log-probabilities

    def update(self, started: Sequence[StartedRow]) -> None:
        """Set up rows for sequences that begin."""
        for each in started:
            self._prompts.pop(each.row, None)
            wanted = each.params.prompt_logprobs
            if wanted is not None:
                k = self._model.vocab_size if wanted == -1 else wanted
                self._prompts[each.row] = each.token_ids[: each.num_prompt_tokens], k

    def wants(self, step: StepInput) -> bool:
        """Return whether a step computes part of a prompt whose log-probabilities are requested."""
        return bool(self._prompts) and any(self._parts(step))

    def _parts(self, step: StepInput) -> list[tuple[int, int, int, int]]:
        """Return prompt parts to score: (index of the sequence in the step, index of the part's first new token, its position,
        number of tokens to score)."""
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
        """Score the parts of prompts in a step. hidden: [num_tokens, hidden_size], hidden states of all tokens of the step."""
        found = []
        for index, start, position, count in self._parts(step) if self._prompts else ():
            prompt, k = self._prompts[int(step.rows[index])]
            targets = upload(torch.tensor(prompt[position + 1 : position + 1 + count]), self._device)
            slices = []
            for first in range(0, count, _AT_ONCE):
                last = min(first + _AT_ONCE, count)
                logits = self._model.compute_logits(hidden[start + first : start + last])
                slices.append(self._vocabulary.score(logits, targets[first:last], k, REASONS[Need.PROMPT_LOGPROBS]))
            found.append(PromptScores(index, position + 1, k, Scores(*(torch.cat(each) for each in zip(*slices, strict=True)))))
        return found
