"""Demand on a fleet: lengths, arrival rate and latency limits, and the requests that one replica receives."""

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
"""Routing policies. round-robin: each request goes to the next replica. prefix-aware: requests with the same prefix go to the
same replica."""
_LEAST_MEASURED = 16
_MOST_TOKENS = 30_000  # output tokens for which a simulation measures latencies; at least _LEAST_MEASURED requests


@dataclass(frozen=True)
class LatencyLimits:
    """Maximum latencies in milliseconds. None means no limit."""

    first_token_ms: float | None = None
    per_token_ms: float | None = None
    percentile: float = 95.0
    """Percentage of requests that must meet the limits."""


@dataclass(frozen=True)
class Demand:
    """Demand on a fleet: requests of one kind."""

    input_len: int
    output_len: int
    rate: float | None = None
    """Arrival rate in requests per second for the whole fleet. None means the maximum rate that the fleet can serve."""
    limits: LatencyLimits = LatencyLimits()
    prefix_len: int = 0
    """Length of the prompts' common prefix in tokens, such as a system prompt."""
    num_prefixes: int = 1
    """Number of different prefixes, all equally frequent."""
    routing: Routing = "round-robin"
    seed: int = 0
    given: tuple[SimulatedRequest, ...] = ()
    """Requests with explicit arrival times, used instead of a Poisson process. `input_len` and `output_len` are then the maximum
    lengths of these requests, and `rate` is their mean arrival rate."""

    @classmethod
    def of_file(cls, path: Path, limits: LatencyLimits, routing: Routing = "round-robin") -> Demand:
        """Read a demand from a file with lines {"arrival": seconds, "input_len": tokens, "output_len": tokens}.

        :raises ConfigError: if the file cannot be read, a line is invalid, or all requests arrive at the same time.
        """
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
        """:raises ConfigError: if a number is out of range."""
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
        """Upper bound on the length of a request, prompt plus output, in tokens."""
        return self.input_len + self.output_len

    @property
    def mean_output_len(self) -> float:
        """Mean number of output tokens per request."""
        return sum(each.output_len for each in self.given) / len(self.given) if self.given else self.output_len

    def full_load(self, concurrency: int) -> tuple[list[SimulatedRequest], range]:
        """Return requests for a replica that always runs `concurrency` of them, and the indices of the requests to measure.

        The first `concurrency` requests have different amounts of output left, so that the replica starts in its steady state:
        later requests arrive one by one instead of all at once. Requests with the most output left come first, so that no request
        ends, and is followed by a measured request, before all of them have started.
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
        """Return the first `count` requests that one replica receives. If the requests come from a file, return every
        `replicas`-th of them.

        All replicas are equal, so one represents all. Round-robin routing sends every `replicas`-th request of a Poisson process
        to a replica, so the gaps between arrivals are gamma-distributed. Prefix-aware routing sends all requests with the same
        prefix to one replica, whose arrivals are again a Poisson process.
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
        """Return the number of different prefixes that one replica receives."""
        return self.num_prefixes if self.routing == "round-robin" else -(-self.num_prefixes // replicas)

    def _request(self, arrival: float, number: int, replicas: int) -> SimulatedRequest:
        beginning = number % self.beginnings_of(replicas) if self.prefix_len else -1
        return SimulatedRequest(arrival, self.input_len, self.output_len, beginning, self.prefix_len)
