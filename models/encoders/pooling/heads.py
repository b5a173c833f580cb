"""Pooling models: pooling of hidden states to one row per text or token, as configured by sentence-transformers' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, relu, silu

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.kernels.experts.bound import ExpertsKind
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.step.operations import Norm
from headway.models.encoders.encoder import Encoder
from headway.models.layers.decoder import Decoder

PoolingType = Literal["cls", "mean", "last"]
"""Pooled hidden state of a text: the first token's (cls), the mean over all tokens, or the last token's."""

_MODES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Current sentence-transformers name of each pooling switch in 1_Pooling/config.json."""


@dataclass(frozen=True)
class DenseModule:
    """Settings of a linear layer after pooling, from sentence-transformers' files."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """Name of the activation's class in torch.nn, such as Identity or Tanh."""


@dataclass(frozen=True)
class SentenceModules:
    """sentence-transformers modules that follow the transformer."""

    pooling: PoolingType
    dense: tuple[DenseModule, ...]
    normalize: bool
    max_seq_length: int | None
    """Maximum length of a text in tokens. None if the files do not state the length."""


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Read modules.json and the files that it names; None if modules.json does not exist.

    :raises ModelError: if a file is unreadable or a module is unsupported.
    """
    if not (folder / "modules.json").is_file():
        return None
    listed = _read(folder / "modules.json", list)
    pooling: PoolingType | None = None
    dense: list[DenseModule] = []
    normalize = False
    for number, module in enumerate(listed):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelError(f"model {folder}: modules.json needs objects with a type, got {shown(module)}")
        kind, path = module["type"].rpartition(".")[2], _inside(folder, module.get("path", ""))
        if number == 0 and (kind != "Transformer" or path != folder):
            got = f"{kind} in {path.name}" if path != folder else kind
            raise ModelError(f"model {folder}: modules.json needs a Transformer in the folder itself at first, got {got}")
        if kind == "Pooling" and pooling is None:
            pooling = _pooling_of(_read(path / "config.json", dict), path)
        elif kind == "Dense" and pooling is not None:
            dense.append(_dense_of(_read(path / "config.json", dict), path))
        elif kind == "Normalize" and number == len(listed) - 1:
            normalize = True
        elif number and kind != "Dropout":
            need = "Transformer, Pooling, Dense and Normalize in this order"
            raise ModelError(f"model {folder}: modules.json: needs {need}, got {kind} as number {number}")
    if pooling is None:
        raise ModelError(f"model {folder}: modules.json names no Pooling, so that a text would have a vector for each token")
    return SentenceModules(pooling, tuple(dense), normalize, _max_seq_length(folder))


def _max_seq_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    value = _read(path, dict).get("max_seq_length") if path.is_file() else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ModelError(f"model {folder}: {path.name} needs a max_seq_length of at least 1, got {shown(value)}")
    return value


def _pooling_of(config: dict[str, Any], folder: Path) -> PoolingType:
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for switch, mode in _OLD_MODES.items() if config.get(switch)]
    else:
        modes = [str(each) for each in named] if isinstance(named, list | tuple) else [str(named)]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{folder / 'config.json'}: needs one pooling mode of {', '.join(_MODES)}, got {', '.join(modes) or 'none'}"
        )
    return _MODES[modes[0]]


def _dense_of(config: dict[str, Any], folder: Path) -> DenseModule:
    sizes: list[Any] = [config.get(name) for name in ("in_features", "out_features")]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ModelError(f"{folder / 'config.json'}: needs in_features and out_features of at least 1, got {shown(sizes)}")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    return DenseModule(folder, sizes[0], sizes[1], bool(config.get("bias", True)), activation)


def _inside(folder: Path, path: object) -> Path:
    if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ModelError(f"model {folder}: modules.json needs paths in its folder, got {shown(path)}")
    return folder / path


def _read(path: Path, kind: type) -> Any:
    try:
        read = parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: it is not a valid JSON file ({error})") from error
    if not isinstance(read, kind):
        raise ModelError(f"{path} cannot be used: it needs a JSON {'list' if kind is list else 'object'}, got {shown(read)}")
    return read


Activation = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Return the argument unchanged."""
    return x


TORCH_ACTIVATIONS: dict[str, Activation] = {
    "Identity": same,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
}
"""Activations keyed by the name of the torch class, which sentence-transformers' files state."""


def pooled(hidden: Tensor, starts: Tensor, kind: PoolingType | Literal["all"]) -> Tensor:
    """Return pooled hidden states: float32 [texts, hidden_size], or [num_tokens, hidden_size] for `all`.

    hidden: [num_tokens, hidden_size]. starts: int64 [texts + 1], index of each text's first token, then num_tokens.
    """
    if kind == "all":
        return hidden.float()
    if kind == "cls":
        return hidden.index_select(0, starts[:-1]).float()
    if kind == "last":
        return hidden.index_select(0, starts[1:] - 1).float()
    return torch.segment_reduce(hidden.float(), "mean", offsets=starts, axis=0)


@dataclass(frozen=True)
class DenseLayer:
    """Linear layer in float32, followed by an activation. Its inputs have few rows, so float32 costs little time."""

    weight: Tensor
    """float32 [out_features, in_features]: weight of the layer."""
    bias: Tensor | None
    activation: Activation = same

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [rows, out_features]. x: float32 [rows, in_features]."""
        return self.activation(linear(x, self.weight, self.bias))


@dataclass(frozen=True)
class EmbeddingHead:
    """Head of embedding models: pooling, optional linear layers, and optional normalization."""

    pooling: PoolingType
    hidden_size: int
    layers: Sequence[DenseLayer] = ()
    normalize: bool = True

    @property
    def size(self) -> int:
        """Number of elements of an embedding."""
        return int(self.layers[-1].weight.shape[0]) if self.layers else self.hidden_size

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [texts, size], or [num_tokens, size] if `each_token`. hidden, starts: as for `pooled`."""
        x = pooled(hidden, starts, "all" if each_token else self.pooling)
        for layer in self.layers:
            x = layer(x)
        return normalize(x, dim=-1) if self.normalize else x


@dataclass(frozen=True)
class ScoringHead:
    """Head of scoring models: pooling, an optional linear layer, and one activated logit per label."""

    pooling: PoolingType | Literal["all"]
    """Kind of pooling; `all` classifies each token."""
    out: DenseLayer
    """Output layer to the logits, with the activation that gives scores or probabilities."""
    dense: DenseLayer | None = None
    norm: Norm | None = None
    """Norm after `dense`."""

    @property
    def size(self) -> int:
        """Number of labels; 1 for models that score pairs of texts."""
        return int(self.out.weight.shape[0])

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [rows, size], with one row per text, or per token if `pooling` is `all`. hidden, starts: as for
        `pooled`."""
        x = pooled(hidden, starts, self.pooling)
        if self.dense is not None:
            x = self.dense(x)
        if self.norm is not None:
            bias = None if self.norm.bias is None else self.norm.bias.float()
            x = layer_norm(x, self.norm.weight.shape, self.norm.weight.float(), bias, self.norm.eps)
        return self.out(x)


class YesNoHead:
    """Head of Qwen3-Reranker: the probability of "yes" against "no" as the next token."""

    size = 1

    def __init__(self, rows: Tensor) -> None:
        """rows: [2, hidden_size], rows of the language-model head for the tokens yes and no."""
        self._difference = (rows[0].float() - rows[1].float())[None]

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [texts, 1]. The softmax over two logits is the sigmoid of their difference."""
        return torch.sigmoid(linear(pooled(hidden, starts, "last"), self._difference))


PoolingHead = EmbeddingHead | ScoringHead | YesNoHead
"""Head that converts hidden states to one result row per text or token."""


class PooledModel:
    """A network with a pooling head; implements `core.pooling.engine.PooledNetwork`."""

    def __init__(self, body: Encoder | Decoder, head: PoolingHead, causal: bool) -> None:
        """causal: True if attention is causal, False if it is bidirectional, as in encoders."""
        self._body = body
        self.head = head
        self.attention_specs: Sequence[AttentionSpec] = [
            replace(spec, dense=True, causal=causal) for spec in body.attention_specs
        ]

    @property
    def size(self) -> int:
        """Number of result elements per text or token."""
        return self.head.size

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; all token ids are smaller."""
        return self._body.config.vocab_size

    @property
    def linear_choices(self) -> list[LinearChoice]:
        """Kinds of linear layers whose kernel is chosen by measurement. The heads' float32 layers always use torch."""
        return self._body.operations.linear_choices(self._body.products)

    @property
    def expert_kinds(self) -> Sequence[ExpertsKind]:
        """Kinds of MoE layers that have several kernels."""
        return self._body.expert_kinds

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention, token_types: Tensor | None = None) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. input_ids, positions, token_types: int64 [num_tokens]."""
        if isinstance(self._body, Encoder):
            return self._body(input_ids, positions, attention, token_types)
        return self._body(input_ids, positions, attention)

    def pool(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return the head's float32 result rows for hidden states. Arguments are as in `PooledNetwork.pool`."""
        return self.head(hidden, starts, each_token)
