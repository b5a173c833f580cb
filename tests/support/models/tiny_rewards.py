"""Tiny models that say something of each token, saved with a tokenizer that knows the end of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tiny_encoders import LONGEST, save

STEP = "<extra_0>"
_SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLACES = {"max_position_embeddings": LONGEST}
_ROPE = {"num_key_value_heads": 2}


class Qwen2ForRewardModel(transformers.Qwen2PreTrainedModel):
    """The architecture of Qwen2.5-Math-RM, whose code comes with its checkpoint: two products behind each state."""

    labels = 1

    def __init__(self, config: transformers.Qwen2Config) -> None:
        super().__init__(config)
        self.model = transformers.Qwen2Model(config)
        size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, self.labels))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Any:
        return type("Output", (), {"logits": self.score(self.model(input_ids).last_hidden_state)})


class Qwen2ForProcessRewardModel(Qwen2ForRewardModel):
    """That of Qwen2.5-Math-PRM: logits of a bad and of a good step."""

    labels = 2


QWEN2 = transformers.Qwen2Config(**_SIZES, **_IDS, **_PLACES, **_ROPE)
REWARDING: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertForTokenClassification, transformers.BertConfig(**_SIZES, **_IDS, **_PLACES, num_labels=5)),
    "bert, one label": (
        transformers.BertForTokenClassification,
        transformers.BertConfig(**_SIZES, **_IDS, **_PLACES, num_labels=1),
    ),
    "xlm-roberta": (
        transformers.XLMRobertaForTokenClassification,
        transformers.XLMRobertaConfig(**_SIZES, **_IDS, max_position_embeddings=LONGEST + 1, type_vocab_size=1, num_labels=3),
    ),
    "modernbert": (
        transformers.ModernBertForTokenClassification,
        transformers.ModernBertConfig(**_SIZES, **_IDS, **_PLACES, local_attention=16, norm_bias=True, num_labels=4),
    ),
    "qwen3": (
        transformers.Qwen3ForTokenClassification,
        transformers.Qwen3Config(**_SIZES, **_IDS, **_PLACES, **_ROPE, head_dim=16, num_labels=3),
    ),
    "reward": (Qwen2ForRewardModel, QWEN2),
    "process reward": (Qwen2ForProcessRewardModel, QWEN2),
}


def rewarding(name: str, folder: Path) -> Any:
    """Save one of REWARDING."""
    kind, config = REWARDING[name]
    model = save(kind, config, folder, decoder=config.model_type.startswith("qwen"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [STEP]})
    assert len(tokenizer) <= config.vocab_size
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }} {{ each.content }}<extra_0>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return model


def logits(model: Any, ids: Sequence[int]) -> Tensor:
    """transformers' logits of each token [tokens, labels]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]
