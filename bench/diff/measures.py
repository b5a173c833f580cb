"""What is counted while two sides run: relative errors, and how far apart their next tokens are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.bench.diff.results import Error, Flip, size

MAX_FLIPS = 20
"""Flipped tokens that are told one by one; all are counted."""


class RelativeErrors:
    """||a - b|| / ||b|| of each layer and head over all tokens added, in float64, summed where the tensors are."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, layer: int, a: Tensor, b: Tensor) -> None:
        """a, b: [num_tokens, heads, dim]."""
        a, b = a.double(), b.double()
        sums = torch.stack([(a - b).square().sum((0, 2)), b.square().sum((0, 2))])  # [2, heads]
        self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums

    def layers(self) -> list[int]:
        """Layers that were added."""
        return sorted(self._sums)

    def heads(self, layer: int) -> list[Error]:
        """One error per head."""
        return [_relative(*pair) for pair in self._sums[layer].T.tolist()]

    def whole(self, layer: int) -> Error:
        """The relative error of all heads together."""
        return _relative(*self._sums[layer].sum(1).tolist())


class NextTokens:
    """Greedy tokens and distributions of two sides' logits, position by position."""

    def __init__(self) -> None:
        self.positions = 0
        self.flipped = 0
        self.flips: list[Flip] = []
        self.logits = RelativeErrors()
        self._kl_sum = 0.0
        self._kl_max = 0.0

    def add(self, a: Tensor, b: Tensor, places: list[tuple[int, int]]) -> None:
        """a, b: logits [rows, vocab_size]; places: prompt and position of each row."""
        self.logits.add(0, a[:, None], b[:, None])
        a, b = a.double(), b.double()
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl = (log_a.exp() * (log_a - log_b)).sum(-1).clamp_min(0)  # rounding may leave it a hair below
        self.positions += len(places)
        self._kl_sum += float(kl.sum())
        largest = float(kl.max())
        self._kl_max = largest if math.isnan(largest) else max(self._kl_max, largest)
        tokens_a, tokens_b = a.argmax(-1), b.argmax(-1)
        rows = (tokens_a != tokens_b).nonzero().flatten().tolist()
        self.flipped += len(rows)
        for row in rows[: MAX_FLIPS - len(self.flips)]:
            token_a, token_b = int(tokens_a[row]), int(tokens_b[row])
            gap = _number(float(b[row, token_b] - b[row, token_a]))
            prompt, position = places[row]
            near = _number(float(kl[row]))
            self.flips.append(Flip(prompt=prompt, position=position, token_a=token_a, token_b=token_b, gap=gap, kl=near))

    @property
    def flip_rate(self) -> float:
        """Share of the positions."""
        return self.flipped / self.positions

    @property
    def kl_mean(self) -> Error:
        """Nats a position."""
        return _number(self._kl_sum / self.positions)

    @property
    def kl_max(self) -> Error:
        """Nats at the worst position."""
        return _number(self._kl_max) if self.kl_mean is not None else None


def first_beyond(errors: list[Error], tolerance: float) -> int | None:
    """The first index whose error is larger than the tolerance, or no number."""
    return next((index for index, error in enumerate(errors) if size(error) > tolerance), None)


def _relative(difference: float, expected: float) -> Error:
    """From sums of squares; nothing differs where both are zero, and against zero nothing else has a number."""
    if difference == 0:
        return 0.0
    return _number(math.sqrt(difference / expected)) if expected else None


def _number(value: float) -> Error:
    return value if math.isfinite(value) else None
