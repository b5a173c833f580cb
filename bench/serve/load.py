"""Load for a server: lengths, shared prefixes, conversations and arrival times."""

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
    """Number of tokens in a prompt, without the shared prefix."""
    output_len: int
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}" + (f":{self.weight:g}" if self.weight != 1 else "")


def parse_mix(text: str) -> list[Length]:
    """Return request kinds from a text such as "512/128" or "128/64:3,4096/256:1": input and output tokens, and a weight.
    :raises ConfigError: if the text has a different format.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)/(\d+)(?::(\d+(?:\.\d+)?))?\s*", part)
        if match is None or not int(match[1]) or not int(match[2]) or (match[3] is not None and not float(match[3])):
            raise ConfigError("--mix", "tokens in and out with a weight, such as 512/128 or 128/64:3,4096/256:1", repr(text))
        found.append(Length(int(match[1]), int(match[2]), float(match[3] or 1)))
    return found


def limits_of(text: str | None) -> dict[str, float]:
    """Return limit name -> milliseconds from a text such as "ttft:200,tpot:20"; empty if there is no text.
    :raises ConfigError: if the text has a different format.
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
    """A set of conversations. A single request is a conversation with one turn."""

    num_requests: int
    """Number of conversations."""
    mix: Sequence[Length]
    shared_prefix: int = 0
    """Length in tokens of a system prompt before every conversation."""
    num_prefixes: int = 1
    """Number of different system prompts, drawn uniformly."""
    turns: int = 1
    """Number of user messages per conversation; each prompt contains the earlier messages and answers."""
    vocab_size: int = 10000
    """Exclusive upper bound of the prompts' token ids."""
    seed: int = 0


@dataclass
class ClientConversation:
    """One client's messages as token ids (or as words, each about one token)."""

    prefix: list[int]
    messages: list[list[int]]
    output_len: int


def conversations(load: Load) -> list[ClientConversation]:
    """Return the load's conversations, which depend only on the fields of `load`."""
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
    """Return a text with the same number of words as token ids."""
    return " ".join(_WORDS[each % len(_WORDS)] for each in ids)


def arrivals(count: int, rate: float, burstiness: float, seed: int = 0) -> list[float]:
    """Return arrival times in seconds from the start, on average `rate` per second.

    The gaps follow a gamma distribution with shape `burstiness`, as in vLLM's benchmark. 1 is a Poisson process; smaller values
    are burstier and larger values steadier. rate: infinity sends all requests at once. The gaps are scaled so that the last
    arrival matches the rate exactly.
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
