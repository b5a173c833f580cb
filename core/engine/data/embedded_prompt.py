"""A prompt whose tokens are given as rows of embeddings."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headway.core.contract.errors import PromptError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, for an error."""
    return str(dtype).removeprefix("torch.")


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
        if not isinstance(given, Tensor) or given.is_nested:
            got = "a nested tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise PromptError("prompt_embeds", "a torch.Tensor [num_tokens, hidden_size]", got)
        rows = given.detach()
        rows = rows[0] if rows.dim() == 3 and rows.shape[0] == 1 else rows
        if rows.dim() != 2 or rows.dtype not in _DTYPES or rows.layout != torch.strided or rows.is_meta:
            kind = "" if rows.layout == torch.strided else f", {str(rows.layout).removeprefix('torch.')}"
            got = f"{list(given.shape)} of {_name(rows.dtype)}{kind}{' without elements (meta)' if rows.is_meta else ''}"
            need = f"a dense tensor [num_tokens, hidden_size] of {', '.join(map(_name, _DTYPES))}"
            raise PromptError("prompt_embeds", need, got)
        made = cls([0] * rows.shape[0])
        made.rows = rows.to("cpu", copy=True).contiguous()
        made.digest = hashlib.blake2b(made.rows.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return made
