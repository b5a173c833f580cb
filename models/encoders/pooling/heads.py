"""From the hidden states of a batch to one row for each text, or for each token: pooling, and what comes behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, relu, silu

from headway.kernels.step.operations import Norm
from headway.models.encoders.pooling.sentence import PoolingType

Activation = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """The argument, as it is."""
    return x


TORCH_ACTIVATIONS: dict[str, Activation] = {
    "Identity": same,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
}
"""Activations by the name of torch's class, as sentence-transformers writes them into its files."""


def pooled(hidden: Tensor, starts: Tensor, kind: PoolingType | Literal["all"]) -> Tensor:
    """Pool the states of each text: float32 [texts, hidden_size], or [num_tokens, hidden_size] where all are wanted.

    hidden: [num_tokens, hidden_size]; starts: int64 [texts + 1], each text's first token and the end of the last.
    """
    if kind == "all":
        return hidden.float()
    if kind == "cls":
        return hidden.index_select(0, starts[:-1]).float()
    if kind == "last":
        return hidden.index_select(0, starts[1:] - 1).float()
    return torch.segment_reduce(hidden.float(), "mean", offsets=starts, axis=0)


class PoolingHead(Protocol):
    """What makes rows of hidden states."""

    @property
    def size(self) -> int:
        """Elements of a row."""

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [texts, size], or [num_tokens, size] where each token gets a row. Others as those of `pooled`."""


@dataclass(frozen=True)
class DenseLayer:
    """A product in float32 with its activation; few rows take part, so precision costs nothing."""

    weight: Tensor
    """float32 [out_features, in_features]"""
    bias: Tensor | None
    activation: Activation = same

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in_features]."""
        return self.activation(linear(x, self.weight, self.bias))


@dataclass(frozen=True)
class EmbeddingHead:
    """Pooling, products if any, and the norm."""

    pooling: PoolingType
    hidden_size: int
    layers: Sequence[DenseLayer] = ()
    normalize: bool = True

    @property
    def size(self) -> int:
        """Elements of an embedding."""
        return int(self.layers[-1].weight.shape[0]) if self.layers else self.hidden_size

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """See PoolingHead."""
        x = pooled(hidden, starts, "all" if each_token else self.pooling)
        for layer in self.layers:
            x = layer(x)
        return normalize(x, dim=-1) if self.normalize else x


@dataclass(frozen=True)
class ScoringHead:
    """Pooling, products if any, and a logit for each label with their activation."""

    pooling: PoolingType | Literal["all"]
    """all: each token is classified."""
    out: DenseLayer
    """To the logits, and the activation that makes scores or probabilities of them."""
    dense: DenseLayer | None = None
    norm: Norm | None = None
    """Behind `dense`."""

    @property
    def size(self) -> int:
        """Labels: 1 where a pair of texts is scored."""
        return int(self.out.weight.shape[0])

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """See PoolingHead; `pooling` says whether each token gets a row."""
        x = pooled(hidden, starts, self.pooling)
        if self.dense is not None:
            x = self.dense(x)
        if self.norm is not None:
            bias = None if self.norm.bias is None else self.norm.bias.float()
            x = layer_norm(x, self.norm.weight.shape, self.norm.weight.float(), bias, self.norm.eps)
        return self.out(x)


class YesNoHead:
    """The probability of "yes" beside "no" as the next token (Qwen3-Reranker)."""

    size = 1

    def __init__(self, rows: Tensor) -> None:
        """rows: [2, hidden_size], the rows of the language-model head for yes and no."""
        self._difference = (rows[0].float() - rows[1].float())[None]

    def __call__(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """See PoolingHead: softmax over two logits is the sigmoid of their difference. A text has one row."""
        return torch.sigmoid(linear(pooled(hidden, starts, "last"), self._difference))
