"""A case's inputs, which all contenders share: checked after each, so that the one that changed them is blamed, and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from headway.testing.cases import Case


class InputsChangedError(RuntimeError):
    """A contender wrote to what it may only read. The inputs have been restored."""


class Inputs:
    """Remembers what a case holds. A contender may write to its output, and the new tokens where they are already."""

    def __init__(self, case: Case, rebuild: Callable[[], Case]) -> None:
        """rebuild: makes the same case again, in other memory; called only to restore a case that was changed."""
        self._case = case
        self._rebuild = rebuild
        self._kept = {name: tensor.clone() for name, tensor in _small(case)}
        self._sums = {name: _bits(tensor) for name, tensor in _large(case)}

    def check(self, with_cache: bool = True) -> None:
        """Compare the inputs with what they were. with_cache: False leaves the cache out, which takes as long as reading it.

        :raises InputsChangedError: they differ; the message names them, and they have been restored.
        """
        changed = [name for name, tensor in _small(self._case) if not torch.equal(tensor, self._kept[name])]
        if with_cache:
            changed += [name for name, tensor in _large(self._case) if _bits(tensor) != self._sums[name]]
        if changed:
            self._restore()
            raise InputsChangedError(f"it changed its inputs, of which a backend may write `out` alone: {', '.join(changed)}")

    def _restore(self) -> None:
        for name, tensor in _small(self._case):
            tensor.copy_(self._kept[name])
        if any(_bits(tensor) != self._sums[name] for name, tensor in _large(self._case)):
            for (_, tensor), (_, was) in zip(_large(self._case), _large(self._rebuild()), strict=True):
                tensor.copy_(was)


def _small(case: Case) -> Iterator[tuple[str, Tensor]]:
    """What is cheap to keep a copy of: this step's q, k and v, and the metadata."""
    yield from (("q", case.q), ("k", case.k), ("v", case.v))
    for field in fields(case.metadata):
        value = getattr(case.metadata, field.name)
        if isinstance(value, Tensor):
            yield f"metadata.{field.name}", value


def _large(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The cache, of which only a sum is kept."""
    for name, tensor in case.cache.tensors.items():
        yield f"cache.{name}", tensor


def _bits(tensor: Tensor) -> int:
    """The sum of a tensor's bits as whole numbers, modulo 2**64: differs when an element does, NaN included."""
    flat = tensor.reshape(-1)
    wide = flat.numel() * flat.element_size() % 4 == 0
    return int(flat.view(torch.int32 if wide else torch.uint8).sum(dtype=torch.int64))
