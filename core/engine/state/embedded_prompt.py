"""A prompt whose tokens are given as rows of embeddings."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headway.core.contract.errors import PromptError


class EmbeddedPrompt(list[int]):
    """Token ids that are all 0, and stand for rows that the model takes in place of its embedding's.

    So lengths, chunks and pages are counted as for any prompt.
    """

    rows: Tensor
    """[num_tokens, hidden_size], on the host."""
    digest: bytes
    """Tells these rows from others: keys and values in the cache are shared by prompts of equal rows alone."""

    @classmethod
    def of(cls, given: object) -> EmbeddedPrompt:
        """Take rows [num_tokens, hidden_size], or one batch of them.

        :raises PromptError: anything else.
        """
        if not isinstance(given, Tensor):
            raise PromptError("prompt_embeds", "a torch.Tensor [num_tokens, hidden_size]", f"a {type(given).__name__}")
        rows = given.detach()
        rows = rows[0] if rows.dim() == 3 and rows.shape[0] == 1 else rows
        if rows.dim() != 2 or not rows.is_floating_point() or rows.layout != torch.strided:
            got = f"{list(given.shape)} of {str(given.dtype).removeprefix('torch.')}"
            raise PromptError("prompt_embeds", "a dense tensor [num_tokens, hidden_size] of floating point", got)
        made = cls([0] * rows.shape[0])
        made.rows = rows.to("cpu", copy=True).contiguous()
        made.digest = hashlib.blake2b(made.rows.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return made
