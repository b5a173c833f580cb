"""Tiny models of transformers that embed, score or reward, saved with a tokenizer, and what transformers computes with them."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import normalize

LONGEST = 64
_SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
_PLACES = {"max_position_embeddings": LONGEST}
_WINDOW = {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "norm_bias": True, "attention_bias": True}
_AFTER_PADDING = {"max_position_embeddings": LONGEST + 1, "type_vocab_size": 1}
EMBEDDERS: dict[str, tuple[Any, Any, str]] = {
    "bert": (transformers.BertModel, transformers.BertConfig(**_SIZES, **_IDS, **_PLACES), "cls"),
    "roberta": (transformers.RobertaModel, transformers.RobertaConfig(**_SIZES, **_IDS, **_AFTER_PADDING), "cls"),
    "xlm-roberta": (transformers.XLMRobertaModel, transformers.XLMRobertaConfig(**_SIZES, **_IDS, **_AFTER_PADDING), "cls"),
    "modernbert": (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(**_SIZES, **_IDS, **_PLACES, local_attention=16),
        "cls",
    ),
    "modernbert, biases": (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(**_SIZES, **_IDS, **_PLACES, **_WINDOW, mlp_bias=True),
        "cls",
    ),
    "embeddinggemma": (
        transformers.Gemma3TextModel,
        transformers.Gemma3TextConfig(
            **_SIZES, **_IDS, **_PLACES, **_HEADS, sliding_window=16, query_pre_attn_scalar=16, use_bidirectional_attention=True
        ),
        "mean",
    ),
    "qwen3-embedding": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_SIZES, **_IDS, **_PLACES, **_HEADS), "last"),
}
"""Class, configuration, and how a text is pooled where no file says so."""
_ONE = {"num_labels": 1}
SCORERS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertForSequenceClassification, transformers.BertConfig(**_SIZES, **_IDS, **_PLACES, **_ONE)),
    "xlm-roberta": (
        transformers.XLMRobertaForSequenceClassification,
        transformers.XLMRobertaConfig(**_SIZES, **_IDS, **_AFTER_PADDING, **_ONE),
    ),
    "modernbert": (
        transformers.ModernBertForSequenceClassification,
        transformers.ModernBertConfig(**_SIZES, **_IDS, **_PLACES, **_WINDOW, **_ONE),
    ),
    "modernbert, mean": (
        transformers.ModernBertForSequenceClassification,
        transformers.ModernBertConfig(
            **_SIZES, **_IDS, **_PLACES, **_ONE, local_attention=16, classifier_pooling="mean", classifier_bias=True
        ),
    ),
    "qwen3": (
        transformers.Qwen3ForSequenceClassification,
        transformers.Qwen3Config(**_SIZES, **_IDS, **_PLACES, **_HEADS, **_ONE),
    ),
}
TEXTS = (
    "a",
    "the quick brown fox",
    "lazy dogs and 17 jumps over the quick brown fox, and more",
    "the quick",
    "jumps",
    "0123456789 abc, brown brown brown dog",
    "the quick brown fox",
)
"""Texts of 3 to some 60 tokens, two of them equal."""


def save(kind: Any, config: Any, folder: Path, decoder: bool = False) -> Any:
    """Save a model with random weights, spread enough that every part of it decides, and a tokenizer. Returns the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, float(parameter.ndim == 1 and name.endswith("weight")), 0.4)
    model.save_pretrained(folder)
    save_tokenizer(folder, decoder)
    return model


def save_tokenizer(folder: Path, decoder: bool) -> None:
    """Token types distinguish pairs of texts; a decoder ends a text only with its end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<cls>", "<sep>", "yes", "no", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([string.printable], trainer)
    ends = [("<cls>", 1), ("<sep>", 2)]
    single, pair = ("$A <sep>", "$A $B <sep>") if decoder else ("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", model_input_names=names[:1] + names[2:] if decoder else names
    ).save_pretrained(folder)


def embedder(name: str, folder: Path) -> Any:
    kind, config, _ = EMBEDDERS[name]
    return save(kind, config, folder, decoder=name == "qwen3-embedding")


def scorer(name: str, folder: Path) -> Any:
    return save(*SCORERS[name], folder, decoder=name == "qwen3")


def classifier(folder: Path, num_labels: int) -> Any:
    kind, config = SCORERS["bert"]
    return save(kind, config.__class__(**{**config.to_dict(), "num_labels": num_labels}), folder)


def states(model: Any, ids: Sequence[int]) -> Tensor:
    """transformers' last hidden states of one text [tokens, hidden_size]."""
    body = getattr(model, "model", model) if isinstance(model, transformers.Qwen3ForCausalLM) else model
    with torch.no_grad():
        return body(torch.tensor([ids])).last_hidden_state[0]


def vector(model: Any, ids: Sequence[int], pooling: str) -> Tensor:
    """One text's embedding, of length 1."""
    found = states(model, ids)
    return normalize({"cls": found[0], "last": found[-1], "mean": found.mean(0)}[pooling], dim=-1)


def score(model: Any, folder: Path, query: str, document: str) -> float:
    """The sigmoid of a classifier's logit."""
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(query, document, return_tensors="pt")
    if not isinstance(model, transformers.BertForSequenceClassification):
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        return float(model(**inputs).logits[0, 0].sigmoid())


def write_modules(folder: Path, pooling: dict[str, Any], dense: Sequence[tuple[int, int, str]] = (), normal: bool = True) -> list:
    """Files of sentence-transformers; dense: (in_features, out_features, class of torch.nn). Returns weight and bias of each."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *(["Normalize"] if normal else [])]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / paths[1] / "config.json").write_text(json.dumps(pooling))
    made = []
    for path, (size, out, activation) in zip(paths[2:], dense, strict=False):
        weight, bias = torch.randn(out, size) * 0.3, torch.randn(out)
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / path / "model.safetensors")
        config = {"in_features": size, "out_features": out, "bias": True, "activation_function": f"torch.nn.modules.{activation}"}
        (folder / path / "config.json").write_text(json.dumps(config))
        made.append((weight, bias))
    return made


STEP = "<extra_0>"
_SHORT = {**_SIZES, "num_hidden_layers": 2}
_ROPE = {"num_key_value_heads": 2}


class Qwen2ForRewardModel(transformers.Qwen2PreTrainedModel):
    """The architecture of Qwen2.5-Math-RM, whose code is in its checkpoint: two linear layers after each hidden state."""

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


QWEN2 = transformers.Qwen2Config(**_SHORT, **_IDS, **_PLACES, **_ROPE)
REWARDING: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertForTokenClassification, transformers.BertConfig(**_SHORT, **_IDS, **_PLACES, num_labels=5)),
    "bert, one label": (
        transformers.BertForTokenClassification,
        transformers.BertConfig(**_SHORT, **_IDS, **_PLACES, num_labels=1),
    ),
    "xlm-roberta": (
        transformers.XLMRobertaForTokenClassification,
        transformers.XLMRobertaConfig(**_SHORT, **_IDS, max_position_embeddings=LONGEST + 1, type_vocab_size=1, num_labels=3),
    ),
    "modernbert": (
        transformers.ModernBertForTokenClassification,
        transformers.ModernBertConfig(**_SHORT, **_IDS, **_PLACES, local_attention=16, norm_bias=True, num_labels=4),
    ),
    "qwen3": (
        transformers.Qwen3ForTokenClassification,
        transformers.Qwen3Config(**_SHORT, **_IDS, **_PLACES, **_ROPE, head_dim=16, num_labels=3),
    ),
    "reward": (Qwen2ForRewardModel, QWEN2),
    "process reward": (Qwen2ForProcessRewardModel, QWEN2),
}


def rewarding(name: str, folder: Path) -> Any:
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
