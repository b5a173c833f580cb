"""Loading of pooling models: network, head, tokenizer and maximum text length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.kernels.linear.choice import builtin_kernels
from headway.kernels.step.config import ACTIVATE
from headway.models.checkpoints.checkpoint import architectures_of, check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.stored import Quantization
from headway.models.checkpoints.tokenizer import read_transformers_tokenizer
from headway.models.checkpoints.weights import DummyWeights, Weights, WeightSource
from headway.models.config import DecoderConfig
from headway.models.encoders.encoder import Encoder, EncoderConfig, EncoderTensors
from headway.models.encoders.families import ENCODERS, EncoderFamily, read_encoder_config
from headway.models.encoders.pooling.detect import PoolingTask
from headway.models.encoders.pooling.heads import (
    TORCH_ACTIVATIONS,
    Activation,
    DenseLayer,
    DenseModule,
    EmbeddingHead,
    PooledModel,
    PoolingHead,
    ScoringHead,
    SentenceModules,
    YesNoHead,
    read_sentence_modules,
    same,
)
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadOptions, check_load_options, chosen_dtype, config_of, reads_expert_weight

log = logging.getLogger("headway")


@dataclass(frozen=True)
class ScorePrompt:
    """Prompt of a reranker in three parts, tokenized separately as in the model's reference code."""

    prefix: str
    body: str
    """Template with the placeholders {instruction}, {query} and {document}."""
    suffix: str
    instruction: str
    """Default instruction, as in the authors' reference code."""

    def encode(self, tokenizer: Any, query: str, document: str, most: int | None) -> list[int]:
        """Return the token ids of the prompt. most: maximum number of tokens; if necessary, the body is truncated. None means no
        limit."""
        body = _filled(self.body.replace("{instruction}", self.instruction), query, document)
        ends = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (self.prefix, self.suffix)]
        ids = list(tokenizer(body, add_special_tokens=False)["input_ids"])
        if most is not None:
            ids = ids[: max(most - len(ends[0]) - len(ends[1]), 0)]
        return [*ends[0], *ids, *ends[1]]


def _filled(body: str, query: str, document: str) -> str:
    """Insert the query and document into the template; braces in these texts are not interpreted."""
    before, _, rest = body.partition("{query}")
    between, _, after = rest.partition("{document}")
    return f"{before}{query}{between}{document}{after}"


QWEN3_RERANKER = ScorePrompt(
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""Prompt from the model card of Qwen/Qwen3-Reranker-0.6B."""


_STEP = "<extra_0>"  # End of a step, from the model card of Qwen/Qwen2.5-Math-PRM-7B
_NO_HEAD = "no language-model head"  # Not in any checkpoint, so that the head is tied to the embedding


@dataclass(frozen=True)
class LoadedPoolingModel:
    """A model loaded for pooling: its network, tokenizer and limits."""

    name: str
    folder: Path
    task: PoolingTask
    network: PooledModel
    implementation: str
    tokenizer: Any
    """transformers tokenizer. None if its loading is skipped; inputs must then be token ids."""
    max_length: int
    dimensions: Sequence[int] | None
    """Lengths to which embeddings may be truncated (Kusupati et al. 2022). Empty means any length; None means no truncation."""
    score_prompt: ScorePrompt | None = None
    """Template around a query and a document. None means that the tokenizer joins them as a pair."""
    labels: Sequence[str] = ()
    """Names of a classifier's labels, if config.json states them."""
    step_token_id: int | None = None
    """Id of the token that ends a step, for models that rate steps. None means that each token is rated."""


@dataclass(frozen=True)
class _Source:
    """Model folder and the options for reading its tensors."""

    folder: Path
    dtype: torch.dtype
    device: torch.device
    dummy: bool
    quantization: Quantization | None
    options: LoadOptions

    def weights(self, folder: Path | None = None) -> WeightSource:
        """Return the source of the model's tensors. folder: subfolder with unquantized tensors, read instead of the model's
        folder."""
        if self.dummy:
            return DummyWeights(self.dtype, self.device)
        if folder is not None:
            return Weights(folder, self.dtype, self.device)
        kernels = self.options.kernels or builtin_kernels(self.device)
        supports = partial(kernels.reads, dtype=self.dtype)
        supports_experts = partial(reads_expert_weight, dtype=self.dtype, device=self.device, options=self.options.experts)
        return Weights(self.folder, self.dtype, self.device, (), self.quantization, supports, supports_experts)


def load_pooling_model(
    folder: Path,
    task: PoolingTask,
    *,
    name: str = "",
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    skip_tokenizer_init: bool = False,
    options: LoadOptions | None = None,
) -> LoadedPoolingModel:
    """Load a pooling model from its folder. Arguments are as for `load_model`; only `options.kernels` and `.experts` are used.

    :raises ModelError: if the model is unsupported.
    :raises ConfigError: if an option is invalid, or a kernel that the user selected supports none of the layers.
    """
    options = options or LoadOptions()
    check_load_options(dtype, load_format)
    stated = check_folder(folder, generates=False)
    config = config_of(folder, stated)
    modules = read_sentence_modules(folder) if task == "embed" else None
    device = torch.device(device)
    dummy = load_format == "dummy"
    quantization = None if dummy else read_quantization(folder, stated)
    source = _Source(folder, chosen_dtype(dtype, config, device), device, dummy, quantization, options)
    tokenizer = None if skip_tokenizer_init else read_transformers_tokenizer(folder)
    read = _read_encoder if config.model_type in ENCODERS else _read_decoder
    with torch.inference_mode():
        network, longest, prompt = read(config, stated, task, modules, source, tokenizer)
    if options.kernels is not None:
        options.kernels.check_named(network.linear_choices)
    options.experts.check()
    kind = "encoder" if config.model_type in ENCODERS else "decoder"
    log.info("model: %s, computed by Headway's %s", folder, kind)
    return LoadedPoolingModel(
        name=name or str(folder),
        folder=folder,
        task=task,
        network=network,
        implementation=f"Headway's {kind}",
        tokenizer=tokenizer,
        max_length=min(longest, (modules and modules.max_seq_length) or longest),
        dimensions=_dimensions(stated) if task == "embed" else None,
        score_prompt=prompt,
        labels=_labels(stated),
        step_token_id=_step_token(stated, tokenizer) if task == "reward" else None,
    )


def _step_token(stated: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the id of the token at which a process reward model rates a step; None if the model rates every token."""
    if not any(name.endswith("ForProcessRewardModel") for name in architectures_of(stated)):
        return None
    if tokenizer is None:
        raise ModelError(
            f"reward: a model that rewards steps needs its tokenizer for {_STEP}, which skip_tokenizer_init leaves out"
        )
    token = tokenizer.convert_tokens_to_ids(_STEP)
    if token is None or token == tokenizer.unk_token_id:
        log.info("reward: rewarding each token, because the tokenizer has no end-of-step token %s", _STEP)
        return None
    return int(token)


def _labels(stated: Mapping[str, Any]) -> list[str]:
    named = stated.get("id2label")
    return [str(named[str(number)]) for number in range(len(named)) if str(number) in named] if isinstance(named, dict) else []


_Read = tuple[PooledModel, int, ScorePrompt | None]


def _read_encoder(
    config: Any, stated: Any, task: PoolingTask, modules: SentenceModules | None, source: _Source, tokenizer: Any
) -> _Read:
    family = ENCODERS[config.model_type]
    _check_architecture(stated, family.architecture(task), task)
    read, weights = read_encoder_config(config), source.weights()
    body, ignored = Encoder(read, weights, source.options.kernels), family.ignored
    head: PoolingHead
    if task == "score":
        head, ignored = _classifier(config, read, family, weights), ()
    elif task == "reward":
        head = _classifier(config, read, family, weights, of_tokens=True)
    else:
        head = _embedding_head(modules, "cls", read.hidden_size, source)
    weights.finish(ignored)
    return PooledModel(body, head, causal=False), read.max_position_embeddings, None


def _read_decoder(
    config: Any, stated: Any, task: PoolingTask, modules: SentenceModules | None, source: _Source, tokenizer: Any
) -> _Read:
    """Return a decoder that embeds (Qwen3-Embedding, EmbeddingGemma), scores or rewards, with its text length and prompt."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(each.base for each in ENCODERS.values())
        got = ", ".join(architectures_of(stated)) or config.model_type
        raise ModelError(f"model architecture: needs one of {known}, or a decoder that Headway computes, got {got}")
    stem = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if task == "reward":
        others = {f"{stem}ForProcessRewardModel", f"{stem}ForTokenClassification"}
        _check_architecture(stated, f"{stem}ForRewardModel", task, others)
    else:
        others = {f"{stem}Model", f"{stem}TextModel", f"{stem}ForSequenceClassification"}
        _check_architecture(stated, family.architecture, task, others)
    both_ways = bool(getattr(config, "use_bidirectional_attention", False))
    read, weights = read_decoder_config(config), source.weights()
    if read.latent is not None:
        raise ModelError(f"model architecture: {task} needs heads of keys and values, got latent attention")
    classifies = any(name.endswith("ForSequenceClassification") for name in architectures_of(stated))
    head: PoolingHead | None = None
    prompt = None
    if task == "reward":
        head = _token_head(config, stated, read, weights)
    elif task == "score":
        head, prompt = _decoder_scores(config, read, classifies, weights, tokenizer)
    names = replace(read.names, head=_NO_HEAD, ignored=(*read.names.ignored, f"{read.names.head}.weight"))
    tied, options = replace(read, names=names, tie_word_embeddings=True), source.options
    body = Decoder(tied, weights, kernels=options.kernels, experts=options.experts)
    if head is None:
        kind = "mean" if both_ways else "last"
        head = (
            _embedding_head(modules, kind, read.hidden_size, source) if prompt is None else _yes_no(body.embed.table, tokenizer)
        )
    return PooledModel(body, head, causal=not both_ways), read.max_position_embeddings, prompt


def _check_architecture(stated: Any, wanted: str, task: PoolingTask, others: Collection[str] = ()) -> None:
    named = architectures_of(stated)
    if named and not set(named) & {wanted, *others}:
        raise ModelError(
            f"model architecture: {task} needs {wanted} for model_type {stated['model_type']}, got {', '.join(named)}"
        )


def _embedding_head(modules: SentenceModules | None, default: Any, hidden_size: int, source: _Source) -> EmbeddingHead:
    """Return the embedding head that sentence-transformers' files define. Without these files, use vLLM's default pooling and
    normalization."""
    if modules is None:
        return EmbeddingHead(default, hidden_size)
    layers, size = [], hidden_size
    for module in modules.dense:
        if module.in_features != size:
            raise ModelError(f"{module.folder / 'config.json'}: needs in_features={size}, got {module.in_features}")
        layers.append(_dense(module, source.weights(module.folder)))
        size = module.out_features
    return EmbeddingHead(modules.pooling, hidden_size, layers, modules.normalize)


def _dense(module: DenseModule, weights: WeightSource) -> DenseLayer:
    activation = _activation(module.activation, str(module.folder / "config.json"))
    weight = weights.take("linear.weight", (module.out_features, module.in_features)).float()
    bias = weights.take("linear.bias", (module.out_features,)).float() if module.bias else None
    weights.finish()
    return DenseLayer(weight, bias, activation)


def _activation(name: str, where: str) -> Activation:
    if name not in TORCH_ACTIVATIONS:
        raise ModelError(f"{where}: needs an activation of {', '.join(TORCH_ACTIVATIONS)}, got {name}")
    return TORCH_ACTIVATIONS[name]


def _classifier(
    config: Any, read: EncoderConfig, family: EncoderFamily, weights: WeightSource, of_tokens: bool = False
) -> ScoringHead:
    names, size = family.token_head if of_tokens else family.head, read.hidden_size
    activation = family.head_activation(config)
    dense = None
    if names.dense is not None:
        act = torch.tanh if activation == "tanh" else ACTIVATE[activation]  # type: ignore[index]
        dense = _product(names.dense, (size, size), family.head_bias(config), act, weights)
    norm = None if names.norm is None else EncoderTensors(read, weights).norm(names.norm)
    out = _score_layer(config, names.out, size, True, weights)
    return ScoringHead("all" if of_tokens else family.head_pooling(config), out, dense, norm)


def _token_head(config: Any, stated: Any, read: DecoderConfig, weights: WeightSource) -> ScoringHead:
    """Return the head of a decoder that rates tokens: two linear layers (reward models, step probabilities) or one layer."""
    named, size = architectures_of(stated), read.hidden_size
    if any(name.endswith("ForTokenClassification") for name in named):
        return ScoringHead("all", _score_layer(config, "score", size, True, weights))
    labels, act = (2, partial(torch.softmax, dim=-1)) if any("Process" in name for name in named) else (1, same)
    dense = _product("score.0", (size, size), True, torch.relu, weights)
    return ScoringHead("all", _product("score.2", (labels, size), True, act, weights), dense)


def _product(module: str, shape: tuple[int, int], bias: bool, activation: Activation, weights: WeightSource) -> DenseLayer:
    """Return a linear layer in float32. shape: (out_features, in_features)."""
    weight = weights.take(f"{module}.weight", shape).float()
    return DenseLayer(weight, weights.take(f"{module}.bias", shape[:1]).float() if bias else None, activation)


def _score_layer(config: Any, module: str, size: int, bias: bool, weights: WeightSource) -> DenseLayer:
    """Return the output layer, with one logit per label and an activation that gives scores or probabilities."""
    labels = config.num_labels
    activation = _score_activation(config) if labels == 1 else _label_activation(config)
    return _product(module, (labels, size), bias, activation, weights)


def _label_activation(config: Any) -> Activation:
    """Return the activation for several labels: softmax, unless problem_type in config.json requires a different one."""
    kinds: dict[str | None, Activation] = {"regression": same, "multi_label_classification": torch.sigmoid}
    return kinds.get(getattr(config, "problem_type", None), partial(torch.softmax, dim=-1))


def _score_activation(config: Any) -> Activation:
    """Return the activation that sentence-transformers' CrossEncoder wrote into config.json, else the sigmoid."""
    stated = getattr(config, "sentence_transformers", None)
    name = stated.get("activation_fn") if isinstance(stated, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    return torch.sigmoid if name is None else _activation(str(name).rpartition(".")[2], "activation_fn in config.json")


def _decoder_scores(
    config: Any, read: DecoderConfig, classifies: bool, weights: WeightSource, tokenizer: Any
) -> tuple[PoolingHead | None, ScorePrompt | None]:
    """Return the head and the prompt of a decoder that scores. The head is None if it must be made from rows of the embedding,
    because the checkpoint has no language-model head."""
    if classifies:
        return ScoringHead("last", _score_layer(config, "score", read.hidden_size, False, weights)), None
    if config.model_type != "qwen3":
        need = "a sequence classifier, or Qwen3-Reranker (Qwen3ForCausalLM)"
        raise ModelError(f"model architecture: score needs {need}, got {', '.join(config.architectures or [config.model_type])}")
    if tokenizer is None:
        raise ModelError("score: a model that answers yes or no needs its tokenizer, which skip_tokenizer_init leaves out")
    name = f"{read.names.head}.weight"
    if name not in weights:
        return None, QWEN3_RERANKER
    return _yes_no(weights.take(name, (read.vocab_size, read.hidden_size)), tokenizer), QWEN3_RERANKER


def _yes_no(rows: Tensor, tokenizer: Any) -> YesNoHead:
    """Return the yes/no head, made from two rows of the language-model head. rows: [vocab_size, hidden_size], the whole
    language-model head."""
    ids = tokenizer.convert_tokens_to_ids(["yes", "no"])
    if None in ids or tokenizer.unk_token_id in ids or max(ids) >= len(rows):
        raise ModelError("score: the tokenizer needs the tokens yes and no, and has not both")
    return YesNoHead(rows[ids])


def _dimensions(stated: Any) -> Sequence[int] | None:
    """Return the lengths to which embeddings may be truncated, from the config.json keys that vLLM reads; None if no key is
    set."""
    listed = stated.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(isinstance(each, int) and each > 0 for each in listed) and listed:
        return listed
    return () if stated.get("is_matryoshka") is True else None
