"""Changes of a model's logits before sampling, as required by sampling parameters, for those rows of a batch that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.kernel import upload
from headway.core.sampling.filtering import NO_FILTER, TokenFilter, keep_above, keep_top
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import OF_HISTORY, Need, scale_of

ANY_TOKEN = -1
"""Padding value in the beginnings of bad words. It matches every token."""


def penalize(logits: Tensor, tokens: Tensor, lens: Tensor, prompt_lens: Tensor, penalties: Tensor) -> Tensor:
    """Return logits with the three penalties of vLLM and OpenAI applied. The repetition penalty is the same as in transformers.

    logits: float32 [rows, columns], whose last column is not a token.
    tokens: int64 [rows, length]. The first `lens` tokens of a row are its prompt and output, and the first `prompt_lens` tokens
    are its prompt.
    penalties: float32 [rows, 3]: repetition, presence and frequency. Rows with penalties 1, 0 and 0 stay bitwise the same.
    """
    rows, columns = logits.shape
    positions = torch.arange(tokens.shape[1], device=logits.device)
    inside = positions < lens[:, None]
    no_token = columns - 1
    known = torch.where(inside, tokens, no_token)
    seen = torch.zeros(rows, columns, dtype=torch.bool, device=logits.device).scatter_(1, known, True)
    written = torch.where(positions >= prompt_lens[:, None], known, no_token)
    ones = torch.ones((), device=logits.device).expand_as(written)
    counts = torch.zeros_like(logits).scatter_add_(1, written, ones)  # integers, so that the order of additions does not matter
    repetition, presence, frequency = (column[:, None] for column in penalties.unbind(1))
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def forbid_words(
    logits: Tensor, tokens: Tensor, lens: Tensor, prompt_lens: Tensor, beginnings: Tensor, endings: Tensor
) -> Tensor:
    """Return logits with -inf for the last token of every bad word whose other tokens are at the end of the output.

    logits, tokens, lens, prompt_lens: see `penalize`.
    beginnings: int64 [rows, words, length]: each word's tokens before the last, in reverse order, padded with ANY_TOKEN.
    endings: int64 [rows, words]: last token of each word, padded with the index of the last column.
    """
    back = torch.arange(1, beginnings.shape[2] + 1, device=logits.device)
    positions = lens[:, None] - back
    output = positions >= prompt_lens[:, None]
    before = torch.where(output, tokens.gather(1, positions.clamp_min(0)), ANY_TOKEN - 1)
    complete = ((beginnings == before[:, None]) | (beginnings == ANY_TOKEN)).all(-1)
    return logits.scatter_add(1, endings, torch.where(complete, -torch.inf, 0.0))


def bias(logits: Tensor, lens: Tensor, ids: Tensor, values: Tensor, until: Tensor) -> Tensor:
    """Return logits with values added to some tokens while a row has fewer tokens than `until`.

    ids (int64), values (float32), until (int64): [rows, entries]. ids are padded with the index of the last column.
    """
    return logits.scatter_add(1, ids, torch.where(lens[:, None] < until, values, 0.0))


def allow_only(logits: Tensor, ids: Tensor) -> Tensor:
    """Return logits with -inf for all tokens except `ids`. ids: int64 [rows, entries], padded with the index of the last
    column."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)
    return logits.masked_fill(~allowed, -torch.inf)


def allow_bits(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits with -inf for tokens whose bit is 0. bits: int32 [rows, words]. Token t is bit t % 32 of word t // 32."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()
    retained = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    width = min(retained.shape[1], allowed.shape[1])
    retained[:, :width] = allowed[:, :width]
    return logits.masked_fill(~retained, -torch.inf)


class RowTable:
    """Tensor [rows, ...] with one list per row, which grows as rows and longer lists are added. Positions after the end of a list
    contain `fill`."""

    def __init__(self, fill: float, dtype: torch.dtype, device: torch.device, dimensions: int = 1) -> None:
        """dimensions: number of dimensions of a row's entry. 1 means a list, 2 a list of lists."""
        self._fill = fill
        self.tensor = torch.full((0,) * (dimensions + 1), fill, dtype=dtype, device=device)
        """Tensor of all rows. When the table grows, it is replaced by a new tensor."""

    def set(self, row: int, values: Sequence[float] | Sequence[Sequence[float]]) -> None:
        """Replace the list in a row."""
        if self.tensor.ndim == 2:
            listed = torch.tensor(values, dtype=self.tensor.dtype)
        else:
            lists = [torch.tensor(each, dtype=self.tensor.dtype) for each in values]
            listed = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=self._fill)
        self.reserve(row + 1, *listed.shape)
        entry = self.tensor[row]
        entry.fill_(self._fill)
        entry[tuple(slice(size) for size in listed.shape)] = upload(listed, entry.device)

    def reserve(self, *shape: int) -> None:
        """Grow the table to at least this shape. A dimension that is too small grows to at least twice its size."""
        old = self.tensor
        if all(have >= want for have, want in zip(old.shape, shape, strict=True)):
            return
        grown = [have if have >= want else max(want, 2 * have) for have, want in zip(old.shape, shape, strict=True)]
        self.tensor = torch.full(grown, self._fill, dtype=old.dtype, device=old.device)
        self.tensor[tuple(slice(size) for size in old.shape)] = old


_FOREVER = 2**62


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows of a step whose logits change; the arrays are in host memory."""

    at: NDArray[numpy.int64]
    """int64 [shaped]: index of the row among the step's rows of logits."""
    rows: NDArray[numpy.int64]
    """int64 [shaped]: the sequence's row in the executor's buffers."""
    lens: NDArray[numpy.int64]
    """int64 [shaped]: number of tokens before the sampled token, which is also the sampled token's position."""
    needs: NDArray[numpy.int32]
    """int32 [shaped]: `Need` flags."""

    def having(self, need: int) -> NDArray[numpy.int64]:
        """Return the indices of the rows with any of these needs."""
        return numpy.flatnonzero(self.needs & need)


class LogitsShaper:
    """Applies sampling parameters to logits. The parameters and the needed token histories of each row are on the device.

    Sampled tokens are recorded on the device without passing through the host, so a step may be launched before the previous step
    is read. The changes are applied in vLLM's order: grammar mask, allowed tokens, bad words, logit_bias and min_tokens, logits
    processors, penalties, temperature, top_k and top_p, min_p. The result of a row does not depend, bit for bit, on other rows.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._numbers = RowTable(0.0, torch.float32, device)
        """Numbers of each row: repetition, presence and frequency penalty, 1 / temperature, and the `TokenFilter` fields except
        its scale."""
        self._prompt_lens = RowTable(0, torch.int64, device)
        self._tokens = RowTable(0, torch.int32, device)
        self._bias = (
            RowTable(vocab_size, torch.int64, device),
            RowTable(0.0, torch.float32, device),
            RowTable(0, torch.int64, device),
        )
        self._allowed = RowTable(vocab_size, torch.int64, device)
        self._beginnings = RowTable(ANY_TOKEN, torch.int64, device, dimensions=2)
        self._endings = RowTable(vocab_size, torch.int64, device)

    def start(
        self, row: int, params: SamplingParams, need: int, tokens: Sequence[int], num_prompt_tokens: int, stops: Sequence[int]
    ) -> None:
        """Set up a row for a sequence that begins with these tokens. stops: tokens that are excluded until the output has
        min_tokens tokens."""
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        scale, *filters = TokenFilter.of(params, scale_of(params) or 1.0, self._vocab_size)
        self._numbers.set(row, [*penalties, scale, *filters])
        self._prompt_lens.set(row, [num_prompt_tokens])
        if need & OF_HISTORY:
            self._tokens.set(row, tokens)
        words = params.bad_words_token_ids or ()
        if need & (Need.BIAS | Need.MIN_TOKENS):
            least = min(num_prompt_tokens + params.min_tokens, _FOREVER)
            entries = [(token, value, _FOREVER) for token, value in (params.logit_bias or {}).items()]
            entries += [(word[0], -numpy.inf, _FOREVER) for word in words if len(word) == 1]
            entries += [(token, -numpy.inf, least) for token in stops if params.min_tokens]
            for table, column in zip(self._bias, zip(*entries, strict=True) if entries else ((), (), ()), strict=True):
                table.set(row, column)
        if need & Need.ALLOWED:
            self._allowed.set(row, params.allowed_token_ids or ())
        if need & Need.BAD_WORDS:
            longer = [word for word in words if len(word) > 1]
            self._beginnings.set(row, [word[-2::-1] for word in longer])
            self._endings.set(row, [word[-1] for word in longer])

    def start_plain(self, row: int) -> None:
        """Set up a row for a sequence whose parameters do not change the logits."""
        self._numbers.set(row, [1.0, 0.0, 0.0, 1.0, *NO_FILTER[1:]])

    def note(self, rows: NDArray[numpy.int64], positions: NDArray[numpy.int64], tokens: Tensor | NDArray[numpy.int64]) -> None:
        """Record tokens at these positions of these rows. tokens: int64 [len(rows)], on the device or the host."""
        self._tokens.reserve(int(rows.max()) + 1, int(positions.max()) + 1)
        if isinstance(tokens, numpy.ndarray):
            at, to, new = upload(torch.from_numpy(numpy.stack([rows, positions, tokens])), self._device)
        else:
            at, to = upload(torch.from_numpy(numpy.stack([rows, positions])), self._device)
            new = tokens.clamp_min(0)
        self._tokens.tensor[at, to] = new.int()

    def shape(
        self,
        logits: Tensor,
        shaped: Shaped,
        bits: tuple[NDArray[numpy.int64], NDArray[numpy.int32]] | None,
        process: Callable[[Tensor], None] | None,
    ) -> Tensor:
        """Return changed logits, float32 [shaped, vocab_size]. logits: [rows, vocab_size], not modified.

        bits: indices of the masked rows of `shaped`, and their masks, int32 [masked, words], or None. process: function that
        applies logits processors in place, or None.
        """
        batch = _Batch(logits, shaped, self._device)
        at, words = (None, None) if bits is None else bits
        if at is not None and words is not None and len(at):
            masks = upload(torch.from_numpy(words), self._device)
            batch.change(at, lambda part, _: allow_bits(part, masks))
        batch.change(shaped.having(Need.ALLOWED), lambda part, to: allow_only(part, self._of(self._allowed, to)))
        batch.change(shaped.having(Need.BAD_WORDS), self._forbid)
        batch.change(
            shaped.having(Need.BIAS | Need.MIN_TOKENS),
            lambda part, to: bias(part, to.lens, *(self._of(table, to) for table in self._bias)),
        )
        if process is not None:
            process(batch.logits[:, :-1])
        batch.change(shaped.having(Need.PENALTY), self._penalize)
        numbers = self._of(self._numbers, batch.all)
        changed = batch.logits[:, :-1].mul_(numbers[:, 3:4])
        top, likely = shaped.having(Need.TOP), shaped.having(Need.MIN_P)
        batch.change(top, lambda part, to: _filtered(part, keep_top, *self._of(self._numbers, to)[:, 4:6].unbind(1)))
        batch.change(likely, lambda part, to: _filtered(part, keep_above, self._of(self._numbers, to)[:, 6]))
        return changed

    def _forbid(self, part: Tensor, to: _Rows) -> Tensor:
        prompt_lens = self._of(self._prompt_lens, to)[:, 0]
        beginnings, endings = self._of(self._beginnings, to), self._of(self._endings, to)
        return forbid_words(part, self._history(to), to.lens, prompt_lens, beginnings, endings)

    def _penalize(self, part: Tensor, to: _Rows) -> Tensor:
        prompt_lens = self._of(self._prompt_lens, to)[:, 0]
        return penalize(part, self._history(to), to.lens, prompt_lens, self._of(self._numbers, to)[:, :3])

    def _history(self, to: _Rows) -> Tensor:
        self._tokens.reserve(0, to.longest)
        return self._tokens.tensor[:, : to.longest].index_select(0, to.rows).long()

    def _of(self, table: RowTable, to: _Rows) -> Tensor:
        return table.tensor.index_select(0, to.rows)


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: Tensor
    lens: Tensor
    longest: int  # Number of tokens of the longest row, on the host


class _Batch:
    """Logits that are being changed, [shaped, vocab_size + 1]. The last column is not a token. It receives the values for padding
    entries of lists."""

    def __init__(self, logits: Tensor, shaped: Shaped, device: torch.device) -> None:
        count, vocab = len(shaped.at), logits.shape[1]
        numbers = numpy.stack([shaped.at, shaped.rows, shaped.lens])
        at, rows, lens = upload(torch.from_numpy(numbers), device)
        self.logits = torch.empty(count, vocab + 1, dtype=torch.float32, device=device)
        self.logits[:, :vocab] = logits if count == len(logits) else logits.index_select(0, at)
        self.logits[:, vocab] = 0
        self.all = _Rows(rows, lens, int(shaped.lens.max()))
        self._lens = shaped.lens
        self._device = device

    def change(self, which: NDArray[numpy.int64], how: Callable[[Tensor, _Rows], Tensor]) -> None:
        """Replace the logits of some rows with the result of a function."""
        if not len(which):
            return
        if len(which) == len(self.logits):
            self.logits.copy_(how(self.logits, self.all))
            return
        at = upload(torch.from_numpy(which), self._device)
        to = _Rows(self.all.rows.index_select(0, at), self.all.lens.index_select(0, at), int(self._lens[which].max()))
        self.logits.index_copy_(0, at, how(self.logits.index_select(0, at), to))


def _filtered(part: Tensor, keep: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """Apply a filter to all columns except the last, which is not a token."""
    return torch.cat([keep(part[:, :-1], *parameters), part[:, -1:]], dim=1)
