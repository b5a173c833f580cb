"""Changes to logits that depend on the tokens before: penalties, and words that must not be completed."""

from __future__ import annotations

import torch
from torch import Tensor

ANY_TOKEN = -1
"""Fills up the beginnings of bad words of unequal lengths: it agrees with every token."""


def penalize(logits: Tensor, tokens: Tensor, lens: Tensor, prompt_lens: Tensor, penalties: Tensor) -> Tensor:
    """Apply the three penalties, as vLLM and OpenAI define them; the first is transformers' too.

    logits: float32 [rows, columns], the last column being nobody's; tokens: int64 [rows, length], of which a row's first `lens`
    are its prompt and output, and the first `prompt_lens` of these its prompt. penalties: float32 [rows, 3], repetition, presence
    and frequency. A row without penalties, 1, 0 and 0, keeps its bits.
    """
    rows, columns = logits.shape
    places = torch.arange(tokens.shape[1], device=logits.device)
    inside = places < lens[:, None]
    nobody = columns - 1
    known = torch.where(inside, tokens, nobody)
    seen = torch.zeros(rows, columns, dtype=torch.bool, device=logits.device).scatter_(1, known, True)
    written = torch.where(places >= prompt_lens[:, None], known, nobody)
    ones = torch.ones((), device=logits.device).expand_as(written)
    counts = torch.zeros_like(logits).scatter_add_(1, written, ones)  # whole numbers: no order of adding changes them
    repetition, presence, frequency = (column[:, None] for column in penalties.unbind(1))
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def forbid_words(
    logits: Tensor, tokens: Tensor, lens: Tensor, prompt_lens: Tensor, beginnings: Tensor, endings: Tensor
) -> Tensor:
    """Set the last token of every word whose other tokens the output ends with to -inf.

    logits, tokens, lens, prompt_lens: see `penalize`. beginnings: int64 [rows, words, length], of each word the tokens before its
    last, the last of them first, then ANY_TOKEN. endings: int64 [rows, words]; nobody's column where a row has fewer words.
    """
    back = torch.arange(1, beginnings.shape[2] + 1, device=logits.device)
    places = lens[:, None] - back
    output = places >= prompt_lens[:, None]
    before = torch.where(output, tokens.gather(1, places.clamp_min(0)), ANY_TOKEN - 1)
    complete = ((beginnings == before[:, None]) | (beginnings == ANY_TOKEN)).all(-1)
    return logits.scatter_add(1, endings, torch.where(complete, -torch.inf, 0.0))


def bias(logits: Tensor, lens: Tensor, ids: Tensor, values: Tensor, until: Tensor) -> Tensor:
    """Add values to the logits of tokens, each as long as a row has fewer tokens than `until` says.

    ids, int64, values, float32, and until, int64: [rows, entries]; nobody's column where a row has fewer entries.
    """
    return logits.scatter_add(1, ids, torch.where(lens[:, None] < until, values, 0.0))


def allow_only(logits: Tensor, ids: Tensor) -> Tensor:
    """Set all but these tokens to -inf. ids: int64 [rows, entries]; nobody's column where a row has fewer entries."""
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)
    return logits.masked_fill(~allowed, -torch.inf)


def allow_bits(logits: Tensor, bits: Tensor) -> Tensor:
    """Set tokens whose bit is 0 to -inf. bits: int32 [rows, words], token t being bit t % 32 of word t / 32; others are 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()
    kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    width = min(kept.shape[1], allowed.shape[1])
    kept[:, :width] = allowed[:, :width]
    return logits.masked_fill(~kept, -torch.inf)
