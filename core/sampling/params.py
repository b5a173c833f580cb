"""How one request wants its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.contract.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's. Checked when made: a bad value raises ConfigError and never reaches the engine."""

    n: int = 1
    """Completions of the prompt."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1 or 0: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one."""
    seed: int | None = None
    """Makes the request's tokens repeatable whatever else runs beside it; None: drawn from the engine's seed."""
    stop: tuple[str, ...] | list[str] | str | None = None
    """Texts that end the completion; they are cut off."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end the completion, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens."""
    max_tokens: int = 16

    def __post_init__(self) -> None:
        self._need("stop", isinstance(self.stop, (str, tuple, list, type(None))), "a text or a list of texts")
        self._need("stop_token_ids", isinstance(self.stop_token_ids, (tuple, list, type(None))), "a list of token ids")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._need("n", _whole(self.n) and self.n >= 1, "a whole number of at least 1")
        self._need("temperature", _number(self.temperature) and self.temperature >= 0, "a number of at least 0", "0 is greedy")
        self._need("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1", "1 keeps every token")
        self._need("top_k", _whole(self.top_k) and self.top_k >= -1, "a whole number of at least -1", "-1 keeps every token")
        self._need("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1")
        self._need("max_tokens", _whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of at least 1")
        self._need("seed", self.seed is None or is_seed(self.seed), SEED_RANGE)
        self._need("stop", all(isinstance(text, str) and text for text in self.stop or ()), "texts that are not empty")
        self._need("stop_token_ids", all(_whole(token) for token in self.stop_token_ids), "token ids")

    def _need(self, name: str, ok: bool, need: str, hint: str = "") -> None:
        if not ok:
            raise ConfigError(name, need, repr(getattr(self, name)), hint)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


SEED_RANGE = "a whole number from -2**63 to 2**63 - 1"
"""Leaves room for the numbers added for the other completions of a prompt."""


def is_seed(value: object) -> bool:
    """Whether torch's generators take it."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
