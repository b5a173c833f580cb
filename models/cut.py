"""How a decoder is divided among ranks (tensor parallelism; Shoeybi et al. 2019, arXiv 1909.08053).

First products of a part are cut by rows: heads of queries, keys and values, columns of an MLP, heads and channels of a state. The
last is cut by columns, and its results are summed over ranks, once a part. The residual stream and its norms are every rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.errors import ConfigError
from headway.core.contract.state import CONV, MAMBA1
from headway.kernels.experts.weights import ExpertsShard
from headway.kernels.experts.weights import needs as needs_of_experts
from headway.kernels.linear.axes import Axis, Division
from headway.models.config import DecoderConfig, StateConfig


class ModelCut:
    """The axes of a model's tensors as one rank holds them, and the configuration of what it computes."""

    def __init__(self, config: DecoderConfig, rank: int = 0, size: int = 1, by_expert: bool = True) -> None:
        """Take sizes alone: nothing is read before they are known to divide. by_expert: see `check_divides`.

        :raises ConfigError: they do not, with the numbers of ranks nearest to this one that would suit them.
        """
        check_divides(config, size, by_expert)
        self._config = config
        self._division = Division(rank, size)

    @cached_property
    def heads(self) -> Axis:
        """Heads of queries."""
        return self._division.even(self._config.num_heads)

    @cached_property
    def kv_heads(self) -> Axis:
        """Heads of keys and values: one lies on several ranks where these outnumber them."""
        return self._division.repeated(self._config.num_kv_heads)

    @cached_property
    def inner(self) -> Axis:
        """Columns of a dense MLP's last product."""
        return self._division.even(self._config.intermediate_size)

    @cached_property
    def vocabulary(self) -> VocabularyCut:
        """Rows of the embedding and of the output head."""
        return VocabularyCut(self._config.vocab_size, self._division)

    @cached_property
    def experts(self) -> ExpertsShard:
        """The layers of experts."""
        assert self._config.experts is not None
        return ExpertsShard(self._config.experts, self._division)

    @cached_property
    def state(self) -> StateCut:
        """The parts with a state."""
        assert self._config.state is not None
        return StateCut(self._config.state, self._division)

    @cached_property
    def own(self) -> DecoderConfig:
        """The configuration of what the rank computes; hidden size and vocabulary are the model's."""
        config, dense = self._config, any(layer.mlp == "dense" for layer in self._config.layers)
        attends = any(layer.attention for layer in config.layers)
        return replace(
            config,
            num_heads=self.heads.size if attends else config.num_heads,
            num_kv_heads=self.kv_heads.size if attends and config.latent is None else config.num_kv_heads,
            intermediate_size=self.inner.size if dense else config.intermediate_size,
            experts=None if config.experts is None else self.experts.own,
            state=None if config.state is None else self.state.own,
        )

    def once(self, tensor: Tensor | None) -> Tensor | None:
        """Return what is added to a sum over ranks: rank 0's, and None on the others."""
        return tensor if self._division.rank == 0 else None


class VocabularyCut:
    """Tokens of one rank: equally many on each, but for the last ones."""

    def __init__(self, size: int, division: Division) -> None:
        """size: tokens of the model."""
        self.axis = division.uneven(size)
        """Rows that the rank reads."""
        self._rows = -(-size // division.size)
        self._divided = division.size > 1

    @property
    def tokens(self) -> range | None:
        """Ids of the rank's tokens; None: it has all."""
        held = self.axis.held[0] if self.axis.held else range(0)
        return held if self._divided else None

    @property
    def missing(self) -> int:
        """Rows of the rank's head that are no token's."""
        return self._rows - self.axis.size

    def table(self, own: Tensor) -> Tensor:
        """Return the rank's embedding with rows of zeros behind it, of which the last stands for the tokens of other ranks."""
        return _with_rows(own, self._rows + 1 if self._divided else self._rows)

    def head(self, own: Tensor) -> Tensor:
        """Return the rank's output head, or its embedding as one, with as many rows as every other rank's."""
        return _with_rows(own, self._rows)


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """A matrix of so many rows, those that it lacks being zeros; itself where it has as many."""
    missing = rows - len(tensor)
    return tensor if missing == 0 else tensor[:rows] if missing < 0 else pad(tensor, (0, 0, 0, missing))


class StateCut:
    """Heads or channels of the parts with a state; q and k (B and C of `mamba2`) lie on all ranks that share their heads."""

    def __init__(self, config: StateConfig, division: Division) -> None:
        self._spec = config.spec
        spec = config.spec
        self.heads = division.even(spec.num_heads)
        """Heads of the state; `mamba1` has a channel in their place."""
        self.key_heads = division.repeated(spec.num_key_heads) if spec.recurrent else Axis.all(0)
        self.out = self.values if spec.recurrent else division.even(spec.conv_channels)
        """Channels of the output."""
        heads, key_heads = self.heads.size, self.key_heads.size
        own = replace(spec, num_heads=heads, num_key_heads=key_heads, conv_channels=self._conv_channels)
        self.own = replace(config, spec=own, norm_size=min(config.norm_size, self.out.size))
        """The rank's part."""
        self.norms = self.out.whole // (config.norm_size or self.out.whole)
        """Groups of the output that are normed by themselves."""
        self.norms_are_shared = config.norm_size > self.out.size
        """Whether each of them lies on several ranks."""

    @property
    def keys(self) -> Axis:
        """Elements of q, and of k."""
        return self.key_heads * self._spec.key_dim

    @property
    def values(self) -> Axis:
        """Elements of v."""
        return self.heads * self._spec.value_dim

    @property
    def low_rank(self) -> Axis:
        """Elements between two products of low rank (`kda`), which every rank has."""
        return Axis.all(self._spec.value_dim)

    @property
    def _conv_channels(self) -> int:
        """Channels of the rank's convolution: of a recurrence, what that reads."""
        if not self._spec.conv_channels or self._spec.kind in (CONV, MAMBA1):
            return self.out.size if self._spec.conv_channels else 0
        return 2 * self.keys.size + self.values.size


_MOST = 1024
"""Ranks up to which numbers of them are proposed."""


def check_divides(config: DecoderConfig, size: int, by_expert: bool = True) -> None:
    """Check that a model's sizes divide among so many ranks.

    by_expert: whether experts may be divided by expert, which the kernels of a GPU do not compute.

    :raises ConfigError: they do not; the error has all of their numbers, and which numbers of ranks would do.
    """
    needs = [*_needs(config, size, by_expert)]
    if needs:
        fitting = [other for other in range(1, _MOST + 1) if not [*_needs(config, other, by_expert)]]
        near = [*[other for other in fitting if other < size][-1:], *[other for other in fitting if other > size][:1]]
        hint = f"nearest that {'works' if len(near) == 1 else 'work'}: {' and '.join(map(str, near))}"
        raise ConfigError("tensor_parallel_size", ", ".join(needs), size, hint)


def _needs(config: DecoderConfig, size: int, by_expert: bool) -> Iterator[str]:
    """What a number of ranks would have to be, where it is not."""
    even, either = {}, {}
    if any(layer.attention for layer in config.layers):
        even["attention heads"] = config.num_heads
        if config.latent is None:
            either["key-value heads"] = config.num_kv_heads
    if any(layer.mlp == "dense" for layer in config.layers):
        even["columns of the MLP"] = config.intermediate_size
    if (state := config.state) is not None:
        if state.spec.kind == CONV:
            even["channels of the convolution"] = state.spec.conv_channels
        else:
            even["heads of the state"] = state.spec.num_heads
            either["key heads of the state"] = state.spec.num_key_heads
    for name, count in even.items():
        if count % size:
            yield f"a divisor of the {count} {name}"
    for name, count in either.items():
        if count % size and size % count:
            yield f"a divisor or a multiple of the {count} {name}"
    if config.experts is not None:
        yield from needs_of_experts(config.experts, size, by_expert)
