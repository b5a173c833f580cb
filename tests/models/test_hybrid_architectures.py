"""Every architecture with a state, against transformers: a prompt at once, one cut into chunks, and steps of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_attention import DenseAttention
from engine_logits import save_random
from headway.models.families import FAMILIES
from headway.models.loader import load_model
from hybrid_models import ROWS, VOCAB
from transformers_release import needs

STEPS = 20
WHOLE, CUT = 29, 37
"""Tokens of two prompts."""
CHUNKS = (2, 16, 1, 18)
"""How the second is cut: a chunk of fewer tokens than a convolution remembers, and one of a single token."""


@pytest.mark.parametrize("name", ROWS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    reference = save_random(ROWS[name], tmp_path)
    model = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length + STEPS,), generator=generator) for length in (WHOLE, CUT)]
    with torch.inference_mode():
        found = [torch.cat(rows) for rows in zip(*packed(model, texts), strict=True)]
        for text, logits in zip(texts, found, strict=True):
            expected = reference(text[None]).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def packed(model: Any, texts: list[Tensor]) -> Any:
    """Logits of both texts, step by step: the first prompt whole beside chunks of the second, then single tokens of both."""
    attention, done = DenseAttention(model), [0, 0]
    lengths = [(WHOLE, CHUNKS[0]), *((1, chunk) for chunk in CHUNKS[1:])]
    lengths += [(1, 1)] * (STEPS - len(CHUNKS) + 1) + [(0, 1)] * (len(CHUNKS) - 1)
    for counts in lengths:
        places = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
        ids = torch.cat([text[place] for text, place in zip(texts, places, strict=True)])
        attention.begin([(seq, count) for seq, count in enumerate(counts) if count])
        logits = model.compute_logits(model(ids, torch.cat(places), attention))
        yield logits.split(list(counts))
        done = [start + count for start, count in zip(done, counts, strict=True)]
    assert done == [len(text) for text in texts]
