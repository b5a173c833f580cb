"""What is asked of a fleet: lengths, a rate of arrivals or none, limits on latencies; and the requests that one replica sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy

from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.plan.simulation import SimulatedRequest

Routing = Literal["round-robin", "prefix-aware"]
ROUTINGS: Final[tuple[Routing, ...]] = ("round-robin", "prefix-aware")
"""round-robin: each replica takes its turn. prefix-aware: requests that begin alike go to one replica."""
_LEAST_MEASURED = 16
_MOST_TOKENS = 30_000  # Output tokens for which a simulation measures latencies; at least as many requests as _LEAST_MEASURED


@dataclass(frozen=True)
class LatencyLimits:
    """What a request may wait, in milliseconds; None: any time."""

    first_token_ms: float | None = None
    per_token_ms: float | None = None
    percentile: float = 95.0
    """Per cent of the requests that must stay within the limits."""


@dataclass(frozen=True)
class Demand:
    """Requests of one kind."""

    input_len: int
    output_len: int
    rate: float | None = None
    """Requests a second of the whole fleet, by a Poisson process; None: as many as the fleet can serve."""
    limits: LatencyLimits = LatencyLimits()
    prefix_len: int = 0
    """Tokens with which prompts begin alike, as those of one system prompt do."""
    num_prefixes: int = 1
    """How many such beginnings there are, all equally frequent."""
    routing: Routing = "round-robin"
    seed: int = 0
    given: tuple[SimulatedRequest, ...] = ()
    """Requests with times of arrival of their own, in place of a Poisson process; lengths and rate above are then theirs."""

    @classmethod
    def of_file(cls, path: Path, limits: LatencyLimits, routing: Routing = "round-robin") -> Demand:
        """Read JSON lines {"arrival": seconds, "input_len": tokens, "output_len": tokens}. :raises ConfigError: a bad line."""
        need = '{"arrival": seconds, "input_len": tokens, "output_len": tokens} in each line'
        try:
            lines = [line for line in read_text(path).splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--arrivals", need, f"{path}: {error}") from error
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                read = parse_json(line, "--arrivals", dict)
                request = SimulatedRequest(float(read["arrival"]), int(read["input_len"]), int(read["output_len"]))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ConfigError("--arrivals", need, f"{path}, line {number}: {shown(line)}") from error
            if not (math.isfinite(request.arrival) and request.input_len > 0 and request.output_len > 0):
                raise ConfigError(
                    "--arrivals", "finite times, and lengths of at least 1", f"{path}, line {number}: {shown(line)}"
                )
            found.append(request)
        found.sort(key=lambda request: request.arrival)
        if len(found) < 2 or found[0].arrival == found[-1].arrival:
            raise ConfigError("--arrivals", "two requests at different times", f"{path}: {len(found)} requests")
        rate = (len(found) - 1) / (found[-1].arrival - found[0].arrival)
        input_len, output_len = max(each.input_len for each in found), max(each.output_len for each in found)
        return cls(input_len, output_len, rate, limits, routing=routing, given=tuple(found))

    def __post_init__(self) -> None:
        """:raises ConfigError: a number that cannot be."""
        for option, value, least in (
            ("--input-len", self.input_len, 1),
            ("--output-len", self.output_len, 1),
            ("--prefix-len", self.prefix_len, 0),
            ("--prefixes", self.num_prefixes, 1),
        ):
            if value < least:
                raise ConfigError(option, f"a whole number of at least {least}", value)
        if self.prefix_len >= self.input_len:
            raise ConfigError("--prefix-len", f"less than --input-len {self.input_len}", self.prefix_len)
        limits = self.limits
        named = {"--rate": self.rate, "--first-token": limits.first_token_ms, "--time-per-token": limits.per_token_ms}
        for option, number in named.items():
            if number is not None and not (math.isfinite(number) and number > 0):
                raise ConfigError(option, "a number above 0", number)
        if self.routing not in ROUTINGS:
            raise ConfigError("--routing", " or ".join(ROUTINGS), repr(self.routing))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self.input_len + self.output_len

    @property
    def mean_output_len(self) -> float:
        """Tokens that are written for a request."""
        return sum(each.output_len for each in self.given) / len(self.given) if self.given else self.output_len

    def full_load(self, concurrency: int) -> tuple[list[SimulatedRequest], range]:
        """Requests for one replica that always serves this many, and the numbers of those to be measured.

        The first ones stand for requests at every stage of their output, so that the replica is in its steady state from the
        beginning: later ones follow one by one, as they do in life, and not all at once. Those with most left come first, so that
        none ends, and is followed by one to be measured, before all of them have begun.
        """
        window = max(_LEAST_MEASURED, min(concurrency, _MOST_TOKENS // self.output_len))
        begun = []
        for number in range(concurrency):
            left = math.ceil(self.output_len * (concurrency - number) / concurrency)
            begun.append(replace(self._request(0.0, number, 1), input_len=self.max_model_len - left, output_len=left))
        count = window + concurrency
        later = [*self.given[:count]] or [self._request(0.0, number, 1) for number in range(count)]
        window = min(window, len(later))
        return begun + later, range(concurrency, concurrency + window)

    def arrivals(self, replicas: int, count: int) -> list[SimulatedRequest]:
        """The first `count` requests that one replica of a fleet sees; of those of a file, all.

        All replicas are alike, so one stands for thousands. Round-robin hands every `replicas`-th request of a Poisson process
        on, which makes the gaps gamma-distributed; prefix-aware routing keeps each beginning on one replica, whose arrivals are a
        Poisson process again.
        """
        assert self.rate is not None
        if self.given:
            return list(self.given[::replicas])
        draw = numpy.random.default_rng(self.seed)
        shape = replicas if self.routing == "round-robin" else 1
        scale = 1 / self.rate if self.routing == "round-robin" else replicas / self.rate
        times = numpy.cumsum(draw.gamma(shape, scale, count))
        which = draw.integers(0, self.beginnings_of(replicas), count)
        return [self._request(float(time), int(one), replicas) for time, one in zip(times, which, strict=True)]

    def beginnings_of(self, replicas: int) -> int:
        """Beginnings that one replica sees."""
        return self.num_prefixes if self.routing == "round-robin" else -(-self.num_prefixes // replicas)

    def _request(self, arrival: float, number: int, replicas: int) -> SimulatedRequest:
        beginning = number % self.beginnings_of(replicas) if self.prefix_len else -1
        return SimulatedRequest(arrival, self.input_len, self.output_len, beginning, self.prefix_len)
