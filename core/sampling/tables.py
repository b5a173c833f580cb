"""What the device keeps for each row of a batch: lists of numbers of unequal lengths, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.contract.transfer import upload


class RowTable:
    """A tensor [rows, ...] that grows as rows and their lists do; what lies past the end of a list is `fill`."""

    def __init__(self, fill: float, dtype: torch.dtype, device: torch.device, dimensions: int = 1) -> None:
        """dimensions: of a row's list; 2 is a list of lists."""
        self._fill = fill
        self._tensor = torch.full((0,) * (dimensions + 1), fill, dtype=dtype, device=device)

    @property
    def tensor(self) -> Tensor:
        """All of it; another object after it has grown."""
        return self._tensor

    def set(self, row: int, values: Sequence[float] | Sequence[Sequence[float]]) -> None:
        """Replace a row's list."""
        if self._tensor.ndim == 2:
            listed = torch.tensor(values, dtype=self._tensor.dtype)
        else:
            lists = [torch.tensor(each, dtype=self._tensor.dtype) for each in values]
            listed = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=self._fill)
        self.reserve(row + 1, *listed.shape)
        place = self._tensor[row]
        place.fill_(self._fill)
        place[tuple(slice(size) for size in listed.shape)] = upload(listed, place.device)

    def reserve(self, *shape: int) -> None:
        """Grow to at least this shape, to twice of what is there where it must."""
        old = self._tensor
        if all(have >= want for have, want in zip(old.shape, shape, strict=True)):
            return
        grown = [have if have >= want else max(want, 2 * have) for have, want in zip(old.shape, shape, strict=True)]
        self._tensor = torch.full(grown, self._fill, dtype=old.dtype, device=old.device)
        self._tensor[tuple(slice(size) for size in old.shape)] = old
