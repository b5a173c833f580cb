"""Encoder families: conversion of transformers' configurations, and module names of classifier heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headway.core.contract.errors import ModelError
from headway.models.config import BeyondDecoderError, LayerConfig
from headway.models.encoders.encoder import EncoderConfig, EncoderNames
from headway.models.encoders.pooling.detect import PoolingTask
from headway.models.families.families import ACTIVATION_NAMES
from headway.models.families.rope import read_rope


@dataclass(frozen=True)
class ClassifierNames:
    """Module names of a classifier's head: optional linear layer with activation, optional norm, and output layer."""

    out: str
    """Name of the output layer, which computes the logits and always has a bias."""
    dense: str | None = None
    """Name of the linear layer before the output layer. None means no such layer."""
    norm: str | None = None
    """Name of the norm between `dense` and `out`. None means no norm."""


@dataclass(frozen=True)
class EncoderFamily:
    """Family of encoders: transformers class, configuration reader and tensor names."""

    base: str
    """Name of the transformers class without a head, such as `BertModel`."""
    classifier: str
    read: Callable[[Any], EncoderConfig]
    head: ClassifierNames
    token_head: ClassifierNames = ClassifierNames(out="classifier")
    head_activation: Callable[[Any], str] = lambda config: "tanh"
    head_bias: Callable[[Any], bool] = lambda config: True
    head_pooling: Callable[[Any], Literal["cls", "mean"]] = lambda config: "cls"
    ignored: tuple[str, ...] = ()
    """Name suffixes of tensors that some of the family's checkpoints have and pooling does not need."""

    def architecture(self, task: PoolingTask) -> str:
        """Return the name of the transformers class for a task."""
        of_tokens = self.classifier.replace("ForSequence", "ForToken")
        return {"embed": self.base, "score": self.classifier, "reward": of_tokens}[task]


def read_encoder_config(config: Any) -> EncoderConfig:
    """Convert a configuration of a family in ENCODERS. :raises BeyondDecoderError, ModelError: if unsupported or invalid."""
    if config.hidden_size % config.num_attention_heads:
        need = f"a divisor of hidden_size={config.hidden_size}"
        raise ModelError(f"num_attention_heads: needs {need}, got {config.num_attention_heads}")
    return ENCODERS[config.model_type].read(config)


def _activation(config: Any, name: str) -> Any:
    value = getattr(config, name)
    if value not in ACTIVATION_NAMES:
        raise BeyondDecoderError(f"{name}: needs one of {', '.join(ACTIVATION_NAMES)}, got {value}")
    return ACTIVATION_NAMES[value]


def _config_of(config: Any, **options: Any) -> EncoderConfig:
    same = {name: getattr(config, name) for name in ("model_type", "vocab_size", "hidden_size", "intermediate_size")}
    return EncoderConfig(**{**same, "num_heads": config.num_attention_heads, **options})


def _bert(prefix: str, offset: Callable[[Any], int]) -> Callable[[Any], EncoderConfig]:
    """Return a configuration reader for BERT-like models, which differ in tensor prefix and position offset."""

    def read(config: Any) -> EncoderConfig:
        if config.is_decoder or config.add_cross_attention:
            raise BeyondDecoderError("is_decoder: needs false, got true")
        kind = getattr(config, "position_embedding_type", None) or "absolute"
        if kind != "absolute":
            raise BeyondDecoderError(f"position_embedding_type: needs absolute, got {kind}")
        first = offset(config)
        if config.max_position_embeddings <= first:
            raise ModelError(f"max_position_embeddings: needs more than {first}, got {config.max_position_embeddings}")
        return _config_of(
            config,
            norm_eps=config.layer_norm_eps,
            max_position_embeddings=config.max_position_embeddings - first,
            layers=(LayerConfig(rope=None),) * config.num_hidden_layers,
            names=_bert_names(prefix),
            activation=_activation(config, "hidden_act"),
            type_vocab_size=config.type_vocab_size,
            position_offset=first,
        )

    return read


def _bert_names(prefix: str) -> EncoderNames:
    return EncoderNames(
        embed=f"{prefix}.embeddings.word_embeddings",
        embed_norm=f"{prefix}.embeddings.LayerNorm",
        layer=f"{prefix}.encoder.layer.{{}}.",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
        positions=f"{prefix}.embeddings.position_embeddings",
        token_types=f"{prefix}.embeddings.token_type_embeddings",
    )


def _modernbert(config: Any) -> EncoderConfig:
    """Convert ModernBERT's configuration; a window has `local_attention` keys, half of them on each side of the query."""
    head_dim = config.hidden_size // config.num_attention_heads
    found = {kind: read_rope(config, head_dim, kind) for kind in dict.fromkeys(config.layer_types)}
    partial = next((rope.rotary_dim for rope in found.values() if rope.rotary_dim != head_dim), None)
    if partial is not None:
        raise BeyondDecoderError(f"partial_rotary_factor: needs 1 in {config.model_type}, got {partial / head_dim:g}")
    ropes = tuple(dict.fromkeys(found.values()))
    window = config.local_attention // 2 + 1
    layers = tuple(
        LayerConfig(window if kind == "sliding_attention" else None, ropes.index(found[kind])) for kind in config.layer_types
    )
    return _config_of(
        config,
        norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        layers=layers,
        names=_MODERNBERT_NAMES,
        activation=_activation(config, "hidden_activation"),
        ropes=ropes,
        norm_first=True,
        gated=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        norm_bias=config.norm_bias,
    )


_MODERNBERT_NAMES = EncoderNames(
    embed="model.embeddings.tok_embeddings",
    embed_norm="model.embeddings.norm",
    layer="model.layers.{}.",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    attention_norm="attn_norm",
    up="mlp.Wi",
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    norm="model.final_norm",
)
_POOLER = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids", "embeddings.token_type_ids")
_BERT_HEAD = ClassifierNames(out="classifier", dense="bert.pooler.dense")
_ROBERTA_HEAD = ClassifierNames(out="classifier.out_proj", dense="classifier.dense")
_MODERNBERT_HEAD = ClassifierNames(out="classifier", dense="head.dense", norm="head.norm")
_roberta = _bert("roberta", lambda config: config.pad_token_id + 1)

ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(
        "BertModel", "BertForSequenceClassification", _bert("bert", lambda config: 0), _BERT_HEAD, ignored=_POOLER
    ),
    "modernbert": EncoderFamily(
        "ModernBertModel",
        "ModernBertForSequenceClassification",
        _modernbert,
        _MODERNBERT_HEAD,
        _MODERNBERT_HEAD,
        head_activation=lambda config: _activation(config, "classifier_activation"),
        head_bias=lambda config: bool(config.classifier_bias),
        head_pooling=lambda config: config.classifier_pooling,
    ),
    "roberta": EncoderFamily("RobertaModel", "RobertaForSequenceClassification", _roberta, _ROBERTA_HEAD, ignored=_POOLER),
    "xlm-roberta": EncoderFamily(
        "XLMRobertaModel", "XLMRobertaForSequenceClassification", _roberta, _ROBERTA_HEAD, ignored=_POOLER
    ),
}
"""Encoder families keyed by model_type, for the tasks `embed`, `score` and `reward`; encoders do not generate text."""
