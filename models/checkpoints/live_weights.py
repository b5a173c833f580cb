"""Replacement of a running decoder's weights: affected parts are rebuilt, then copied into the live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, ModelError
from headway.core.system.held_tensors import held_tensors
from headway.kernels.experts.bound import BoundExperts
from headway.kernels.linear.axes import Shape, shard_of, whole_sizes
from headway.kernels.linear.linear import Linear
from headway.models.checkpoints.weights import WeightSource

if TYPE_CHECKING:
    from headway.models.layers.decoder import Decoder


class GivenWeights(WeightSource):
    """Weight source that returns tensors passed by the caller, and reads all other tensors from a checkpoint."""

    def __init__(self, given: Mapping[str, Tensor], checkpoint: WeightSource, aliases: tuple[tuple[str, str], ...]) -> None:
        """aliases: as for `Weights`."""
        self.dtype = checkpoint.dtype
        self.device = checkpoint.device
        self._given = given
        self._checkpoint = checkpoint
        self._aliases = aliases
        self.taken: set[str] = set()
        """Names of the passed tensors that have been read."""

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def _find(self, name: str) -> Tensor | None:
        others = [name.replace(part, other, 1) for part, other in self._aliases if part in name]
        known = next((each for each in (name, name.partition(".")[2], *others) if each in self._given), None)
        if known is None:
            return None
        self.taken.add(known)
        return self._given[known]

    def take(self, name: str, shape: Shape) -> Tensor:
        """Return the passed tensor of this name if there is one, else the checkpoint's tensor.

        :raises ModelError: if the tensor's shape is not the configuration's.
        """
        return self.take_as(self.dtype, name, shape)

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        found, sizes = self._find(name), whole_sizes(shape)
        if found is None:
            return self._checkpoint.take_as(dtype, name, shape)
        if tuple(found.shape) != tuple(sizes):
            raise ModelError(f"weights: {name} needs shape {list(sizes)}, got {list(found.shape)}")
        return shard_of(found.to(self.device, dtype), shape)

    def take_number(self, name: str) -> float:
        found = self._find(name)
        return self._checkpoint.take_number(name) if found is None else float(found)

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Do nothing: `taken` shows which passed tensors are unused."""


def attention_facts(part: object) -> object:
    """Return the attention spec and KV scales given to backends, which must not change; None for a part without attention."""
    attention = getattr(part, "attention", None)
    return None if attention is None else (attention.spec, getattr(part, "kv_scales", None))


def bound_of(part: Any) -> list[Any]:
    """Return the objects that a part has bound to kernels, in order: `Linear` layers and `BoundExperts`."""
    if isinstance(part, tuple):
        return [each for each in part if isinstance(each, Linear)]
    experts = getattr(part.mlp, "compute", None)
    return [*part.linears, *([experts] if isinstance(experts, BoundExperts) else [])]


class LiveWeights:
    """Weights of a running decoder, which the caller may replace between two steps.

    A layer merges, scales and packs the tensors that it takes, so a single tensor cannot be replaced: the layer is rebuilt from
    all of its tensors. Passed tensors stay in host memory for later rebuilds.
    """

    def __init__(self, decoder: Decoder, checkpoint: Callable[..., WeightSource], dummy: bool) -> None:
        """checkpoint: function that opens the model's files; with dummy=True it returns a source of random weights.

        dummy: True if the decoder has random weights now.
        """
        self._decoder = decoder
        self._checkpoint = checkpoint
        self.dummy = dummy
        self._given: dict[str, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that `read_again` fills: the weights of all parts, excluding their operations' workspaces."""
        decoder = self._decoder
        parts = [decoder.part(index) for index in (None, *range(decoder.config.num_layers))]
        made = {
            each.untyped_storage()._cdata for each in held_tensors(decoder.operations).values() if each.layout == torch.strided
        }
        found = (each for each in held_tensors(*parts).values() if each.layout == torch.strided)
        return [each for each in found if each.untyped_storage()._cdata not in made]

    @torch.inference_mode()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace tensors, identified by checkpoint name, and return their names.

        Layers are replaced one by one. If a layer is refused, the layers before it have already been replaced.

        :raises ConfigError: if the model has no tensor of this name, or a backend has copied the tensor.
        :raises ModelError: if a tensor has a different shape.
        """
        new = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        merged = {**self._given, **new}
        source = GivenWeights(merged, self._open(), self._decoder.config.names.aliases)
        parts: dict[int | None, list[str]] = {}
        for name in new:
            parts.setdefault(self._layer_of(name), []).append(name)
        for index, names in parts.items():
            built = self._decoder.rebuilt(index, source)
            unknown = [name for name in names if name not in source.taken and not self._ignores(name)]
            if unknown:
                hint = "the names are the checkpoint's own, before anything is merged"
                raise ConfigError("load_weights", "names of the model's tensors", ", ".join(unknown[:3]), hint)
            self._copy_part(index, built)
            self._given |= {name: new[name] for name in names}
        return set(new)

    @torch.inference_mode()
    def read_again(self) -> None:
        """Reload the checkpoint's weights and forget passed tensors."""
        self._given.clear()
        source = GivenWeights({}, self._open(), self._decoder.config.names.aliases)
        for index in (None, *range(self._decoder.config.num_layers)):
            self._copy_part(index, self._decoder.rebuilt(index, source))

    def _open(self) -> WeightSource:
        return self._checkpoint(dummy=self.dummy)

    def _layer_of(self, name: str) -> int | None:
        """Return the index of the layer that a tensor belongs to; None for tensors outside the layers, such as the embedding."""
        names, count = self._decoder.config.names, self._decoder.config.num_layers
        for index in range(count):
            prefix = names.layer.format(index)
            others = [prefix.replace(part, other, 1) for part, other in names.aliases if part in prefix]
            if name.startswith((prefix, prefix.partition(".")[2] or prefix, *others)):
                return index
        return None

    def _ignores(self, name: str) -> bool:
        """Return whether a passed tensor may remain unused: a tensor that checkpoints may contain unnecessarily, or a head tied
        to the embedding."""
        names, tied = self._decoder.config.names, self._decoder.config.tie_word_embeddings
        head = tied and name.endswith(f"{names.head}.weight")
        return head or name.endswith(("rotary_emb.inv_freq", *names.ignored)) or name.startswith(names.ignored_modules)

    def _copy_part(self, index: int | None, built: object) -> None:
        """Copy the tensors of a rebuilt part into the tensors of the running part."""
        running = self._decoder.part(index)
        place = "the embedding, the norm or the head" if index is None else f"layer {index}"
        if attention_facts(running) != attention_facts(built):
            raise ConfigError(
                "load_weights", "the sinks and scales of the cache that backends were made with", f"others in {place}"
            )
        bound = [*zip(bound_of(running), bound_of(built), strict=True)]
        for one, other in bound:
            other.bind_as(one)
        old, new = held_tensors(running), held_tensors(built)
        for path, tensor in new.items():
            there = old.get(path)
            if there is None or (there.shape, there.dtype, there.layout) != (tensor.shape, tensor.dtype, tensor.layout):
                hint = "make a new LLM of the new weights"
                raise ConfigError("load_weights", "weights that are kept as the checkpoint has them", place, hint)
        for path, tensor in new.items():
            old[path].copy_(tensor)
        for one, other in bound:
            one.update(other)
