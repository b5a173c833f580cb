"""What is sent to a server, and when: lengths, shared beginnings, conversations, and arrivals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headway.core.contract.errors import ConfigError

_WORDS = ("time", "people", "way", "water", "word", "day", "part", "number", "sound", "place", "year", "work", "back", "line")
_LIMITS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Length:
    """One kind of request of a mix."""

    input_len: int
    """Tokens of a prompt's own part."""
    output_len: int
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}" + (f":{self.weight:g}" if self.weight != 1 else "")


def parse_mix(text: str) -> list[Length]:
    """Kinds of requests from a text such as "512/128" or "128/64:3,4096/256:1": tokens in and out, and a weight.

    :raises ConfigError: a text of another form.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)/(\d+)(?::(\d+(?:\.\d+)?))?\s*", part)
        if match is None or not int(match[1]) or not int(match[2]) or (match[3] is not None and not float(match[3])):
            raise ConfigError("--mix", "tokens in and out with a weight, such as 512/128 or 128/64:3,4096/256:1", repr(text))
        found.append(Length(int(match[1]), int(match[2]), float(match[3] or 1)))
    return found


def limits_of(text: str | None) -> dict[str, float]:
    """The milliseconds that a good request keeps, from a text such as "ttft:200,tpot:20"; empty where there is none.

    :raises ConfigError: a text of another form.
    """
    limits: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.strip().partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in _LIMITS or not 0 < limits[name] < math.inf:
            raise ConfigError("--goodput", "limits in ms such as ttft:200,tpot:20,e2e:5000", repr(text))
    return limits


@dataclass(frozen=True)
class Load:
    """A set of conversations; a request without a second turn is a conversation of one."""

    num_requests: int
    """Conversations."""
    mix: Sequence[Length]
    shared_prefix: int = 0
    """Tokens of a system prompt that comes before every conversation."""
    num_prefixes: int = 1
    """Different system prompts, drawn evenly."""
    turns: int = 1
    """Messages of each conversation; the answers so far come before the next."""
    vocab_size: int = 10000
    """Token ids of prompts lie below it."""
    seed: int = 0


@dataclass
class ClientConversation:
    """One client's messages, as token ids (and as words, which are about as many tokens)."""

    prefix: list[int]
    messages: list[list[int]]
    output_len: int


def conversations(load: Load) -> list[ClientConversation]:
    """The same ones every time."""
    draw = Random(load.seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(load.vocab_size // 100, load.vocab_size) for _ in range(count)]

    prefixes = [ids(load.shared_prefix) for _ in range(load.num_prefixes)]
    kinds = draw.choices(list(load.mix), [each.weight for each in load.mix], k=load.num_requests)
    return [
        ClientConversation(draw.choice(prefixes), [ids(kind.input_len) for _ in range(load.turns)], kind.output_len)
        for kind in kinds
    ]


def words(ids: Sequence[int]) -> str:
    """A text of as many words."""
    return " ".join(_WORDS[each % len(_WORDS)] for each in ids)


def arrivals(count: int, rate: float, burstiness: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests arrive, on average `rate` of them a second.

    The gaps are drawn from a gamma distribution whose shape is `burstiness`, as in vLLM's benchmark: 1 is a Poisson process, less
    is burstier, more is steadier. rate: infinity sends all at once. The gaps are scaled so that the last arrival is due where
    the rate puts it, whatever was drawn.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    scale = count / rate / at
    return [time * scale for time in times]
