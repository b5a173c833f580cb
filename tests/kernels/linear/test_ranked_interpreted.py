"""Two ranks on the fused operations against one rank on torch's, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_models
import plain_models
from dense_attention import DenseAttention
from engine_logits import save_random
from headway.core.contract.ranks import Ranks
from headway.core.sampling.ranked_vocabulary import join_logits
from headway.kernels.step.fused import Fused
from headway.models.layers import decoder
from headway.models.loader import load_model
from thread_ranks import on_ranks

pytestmark = pytest.mark.slow
ROWS = {**plain_models.ROWS, **hybrid_models.ROWS}
FUSED = ("deepseek_v3", "diffllama", "falcon_h1", "gemma4, as 31B", "gemma4, as E2B", "gpt2", "gpt_oss", "olmo2")


@pytest.mark.parametrize("name", FUSED)
def test_logits_equal_those_of_the_plain_path(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(ROWS[name], tmp_path)
    (expected,) = on_ranks(1, lambda ranks: logits_of(tmp_path, ranks))
    monkeypatch.setattr(decoder, "operations_for", Fused)
    for found in on_ranks(2, lambda ranks: logits_of(tmp_path, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def logits_of(folder: Path, ranks: Ranks) -> Tensor:
    model: Any = load_model(str(folder), "float32", skip_tokenizer_init=True, ranks=ranks).decoder
    attention = DenseAttention(model)
    attention.begin([(0, 4)])
    own: Tensor = model.compute_logits(model(torch.arange(5, 9), torch.arange(4), attention))
    return join_logits(own, model.vocab_size, ranks)
