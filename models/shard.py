"""Sharding of a decoder over ranks (tensor parallelism; Shoeybi et al. 2019, arXiv 1909.08053).

The first linear layers of a part are sharded by rows: query and KV heads, MLP columns, heads and channels of a state. The last
linear layer of a part is sharded by columns, with one all-reduce per part. The residual stream and its norms are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.errors import ConfigError
from headway.core.contract.state import CONV, MAMBA1
from headway.kernels.experts.weights import ExpertsShard
from headway.kernels.experts.weights import needs as needs_of_experts
from headway.kernels.linear.axes import Axis, Division
from headway.models.config import DecoderConfig, LayerConfig, StateConfig


class ModelShard:
    """Axes of a model's tensors as sharded for one rank, and the configuration of this rank's shard."""

    def __init__(self, config: DecoderConfig, rank: int = 0, size: int = 1, by_expert: bool = True) -> None:
        """Check that the model's sizes divide among the ranks; no tensors are read. by_expert: see `check_divides`.

        :raises ConfigError: if a size does not divide; the error names the nearest numbers of ranks that work.
        """
        check_divides(config, size, by_expert)
        self._config = config
        self._division = Division(rank, size)
        self._by_expert = by_expert

    @cached_property
    def heads(self) -> Axis:
        """Axis of the query heads. With differential attention, the rank holds both heads of its pairs."""
        return self._halves(self._division.even, self._config.num_heads)

    @cached_property
    def kv_heads(self) -> Axis:
        """Axis of the KV heads; with more ranks than KV heads, several ranks store the same head."""
        return self._halves(self._division.repeated, self._config.num_kv_heads)

    def _halves(self, divide: Callable[[int], Axis], count: int) -> Axis:
        """Return the shard of `count` heads. With differential attention, the rank holds the same part of both halves."""
        return divide(count // 2) + divide(count // 2) if self._config.differential else divide(count)

    @cached_property
    def inner(self) -> Axis:
        """Axis of the columns of a dense MLP's down projection."""
        return self._division.even(self._config.intermediate_size)

    @cached_property
    def vocabulary(self) -> VocabularyShard:
        """Shard of the rows of the embedding and the output head."""
        return VocabularyShard(self._config.vocab_size, self._division)

    @cached_property
    def experts(self) -> ExpertsShard:
        """Shard of the MoE layers' experts."""
        assert self._config.experts is not None
        return ExpertsShard(self._config.experts, self._division)

    @cached_property
    def state(self) -> StateShard:
        """Shard of the recurrent parts."""
        assert self._config.state is not None
        return StateShard(self._config.state, self._division)

    @cached_property
    def own(self) -> DecoderConfig:
        """Configuration of this rank's shard. The hidden size and the vocabulary size are not sharded."""
        config, dense = self._config, any(layer.mlp == "dense" for layer in self._config.layers)
        attends = any(layer.attention for layer in config.layers)
        return replace(
            config,
            layers=tuple(self._own_sizes(layer) for layer in config.layers),
            num_heads=self.heads.size if attends else config.num_heads,
            num_kv_heads=self.kv_heads.size if attends and config.latent is None else config.num_kv_heads,
            intermediate_size=self.inner.size if dense else config.intermediate_size,
            experts=None if config.experts is None else self.experts.own,
            state=None if config.state is None else self.state.own,
        )

    def of_layer(self, index: int) -> ModelShard:
        """Return the shard of a model whose layers all have the sizes of this model's layer at `index`."""
        config, division = self._config.of_layer(self._config.layers[index]), self._division
        return self if config is self._config else ModelShard(config, division.rank, division.size, self._by_expert)

    def _own_sizes(self, layer: LayerConfig) -> LayerConfig:
        """Return a layer whose own sizes are those of this rank's shard."""
        kv_heads, inner = layer.num_kv_heads, layer.intermediate_size
        kv_heads = None if kv_heads is None else self._division.repeated(kv_heads).size
        return replace(layer, num_kv_heads=kv_heads, intermediate_size=None if inner is None else self._division.even(inner).size)

    def once(self, tensor: Tensor | None) -> Tensor | None:
        """Return the tensor on rank 0 and None on other ranks, for a term that an all-reduce must include only once."""
        return tensor if self._division.rank == 0 else None


class VocabularyShard:
    """Part of the vocabulary on one rank. Every rank has the same number of tokens, except that the last ranks may have fewer."""

    def __init__(self, size: int, division: Division) -> None:
        """size: vocabulary size of the model."""
        self.axis = division.uneven(size)
        """Axis of the vocabulary rows that this rank reads from the checkpoint."""
        self._rows = -(-size // division.size)
        self._divided = division.size > 1

    @property
    def tokens(self) -> range | None:
        """Token ids of this rank. None means the whole vocabulary."""
        held = self.axis.held[0] if self.axis.held else range(0)
        return held if self._divided else None

    @property
    def missing(self) -> int:
        """Number of padding rows in this rank's output head."""
        return self._rows - self.axis.size

    def table(self, own: Tensor) -> Tensor:
        """Return this rank's embedding padded with zeros; with several ranks, the last row is used for tokens of other ranks."""
        return _with_rows(own, self._rows + 1 if self._divided else self._rows)

    def head(self, own: Tensor) -> Tensor:
        """Return this rank's output head, or the embedding that serves as the head, padded to the common number of rows."""
        return _with_rows(own, self._rows)


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the matrix padded with zeros or truncated to this number of rows."""
    missing = rows - len(tensor)
    return tensor if missing == 0 else tensor[:rows] if missing < 0 else pad(tensor, (0, 0, 0, missing))


class StateShard:
    """Shard of the heads or channels of recurrent parts. If the heads of several ranks share q and k (`mamba2`: B and C), these
    ranks replicate q and k."""

    def __init__(self, config: StateConfig, division: Division) -> None:
        self._spec = config.spec
        spec = config.spec
        self.heads = division.even(spec.num_heads)
        """Axis of the state's heads, or of its channels for `mamba1`."""
        self.key_heads = division.repeated(spec.num_key_heads) if spec.recurrent else Axis.all(0)
        self.out = self.values if spec.recurrent else division.even(spec.conv_channels)
        """Axis of the output channels of the recurrence or convolution."""
        heads, key_heads = self.heads.size, self.key_heads.size
        own = replace(spec, num_heads=heads, num_key_heads=key_heads, conv_channels=self._conv_channels)
        self.own = replace(config, spec=own, norm_size=min(config.norm_size, self.out.size))
        """Configuration of this rank's shard."""
        self.norms = self.out.whole // (config.norm_size or self.out.whole)
        """Number of separately normalized groups in the unsharded output."""
        self.norms_are_shared = config.norm_size > self.out.size
        """True if a normalized group spans several ranks."""

    @property
    def keys(self) -> Axis:
        """Axis of the elements of q, and also of k, as sharded over ranks."""
        return self.key_heads * self._spec.key_dim

    @property
    def values(self) -> Axis:
        """Axis of the elements of v, as sharded over ranks."""
        return self.heads * self._spec.value_dim

    @property
    def low_rank(self) -> Axis:
        """Inner axis of low-rank projections (`kda`), replicated on every rank."""
        return Axis.all(self._spec.value_dim)

    @property
    def _conv_channels(self) -> int:
        """Number of channels of this rank's convolution; 0 without a convolution. If the part has a recurrence, these channels
        are the recurrence's inputs."""
        if not self._spec.conv_channels or self._spec.kind in (CONV, MAMBA1):
            return self.out.size if self._spec.conv_channels else 0
        return 2 * self.keys.size + self.values.size


_MOST = 1024
"""Largest number of ranks that an error message proposes."""


def check_divides(config: DecoderConfig, size: int, by_expert: bool = True) -> None:
    """Check that a model's sizes divide among `size` ranks.

    by_expert: True if experts may be sharded by expert, which GPU kernels do not support.

    :raises ConfigError: if a size does not divide; the error lists such sizes and the nearest numbers of ranks that work.
    """
    needs = [*_needs(config, size, by_expert)]
    if needs:
        fitting = [other for other in range(1, _MOST + 1) if not [*_needs(config, other, by_expert)]]
        near = [*[other for other in fitting if other < size][-1:], *[other for other in fitting if other > size][:1]]
        hint = f"nearest that {'works' if len(near) == 1 else 'work'}: {' and '.join(map(str, near))}"
        raise ConfigError("tensor_parallel_size", ", ".join(needs), size, hint)


def _needs(config: DecoderConfig, size: int, by_expert: bool) -> Iterator[str]:
    """Yield a description of each requirement that this number of ranks does not meet."""
    even: dict[str, set[int]] = {}
    either: dict[str, set[int]] = {}
    if any(layer.attention for layer in config.layers):
        size_of, of = (2, "pairs of ") if config.differential else (1, "")
        even[f"{of}attention heads"] = {config.num_heads // size_of}
        if config.latent is None:
            kv_heads = {config.of_layer(layer).num_kv_heads for layer in config.layers if layer.attention}
            either[f"{of}key-value heads"] = {count // size_of for count in kv_heads}
    if any(layer.mlp == "dense" for layer in config.layers):
        even["columns of the MLP"] = {config.of_layer(layer).intermediate_size for layer in config.layers if layer.mlp == "dense"}
    if (state := config.state) is not None:
        if state.spec.kind == CONV:
            even["channels of the convolution"] = {state.spec.conv_channels}
        else:
            even["heads of the state"] = {state.spec.num_heads}
            either["key heads of the state"] = {state.spec.num_key_heads}
    for name, counts in even.items():
        for count in sorted(counts):
            if count % size:
                yield f"a divisor of the {count} {name}"
    for name, counts in either.items():
        for count in sorted(counts):
            if count % size and size % count:
                yield f"a divisor or a multiple of the {count} {name}"
    if config.experts is not None:
        yield from needs_of_experts(config.experts, size, by_expert)
