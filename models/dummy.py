"""Random weights of any configuration, made on the device: a model's speed without its checkpoint."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

STD = 0.02
"""Standard deviation of the weights, the usual `initializer_range`: logits stay finite in half precision."""


class DummyWeights:
    """A checkpoint that holds whatever is asked for: normal weights from a fixed seed, norms of one.

    Equal on every start on one kind of device, because tensors are drawn in the order in which they are taken.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0, unit: Container[str] = ()) -> None:
        """unit: names of tensors that are drawn with a standard deviation of 1, such as the embedding of a mixture of experts:

        so what a token is stays the larger part of the residual stream, and a random router tells tokens apart.
        """
        self.dtype, self.device = dtype, device
        self._unit = unit
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False  # nothing beyond what the configuration implies, so tied embeddings stay tied

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one tensor."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        std = 1.0 if name in self._unit else STD
        return tensor.fill_(1) if is_norm else tensor.normal_(0, std, generator=self._generator)

    def take_merged(self, sizes: Mapping[str, int], *rest: int) -> Tensor:
        """Draw all rows at once."""
        return self.take(next(iter(sizes)), (sum(sizes.values()), *rest))

    def take_into(self, target: Tensor, name: str) -> None:
        """Draw one tensor in place."""
        target.copy_(self.take(name, tuple(target.shape)))

    def take_number(self, name: str) -> float:
        """No scale is drawn."""
        return 1.0

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Nothing can be left over."""
