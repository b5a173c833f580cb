"""The result file of `headway bench serve`, schema `headway.serve/1`, and the statistics in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.hosting.profiling import StepsProfile


class Spread(BaseModel):
    """Mean and percentiles of a time, in milliseconds, over requests or over tokens."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """None: there are no values."""
        if not seconds:
            return None
        values = sorted(1e3 * each for each in seconds)
        return cls(
            mean=sum(values) / len(values), p50=quantile(values, 0.5), p95=quantile(values, 0.95), p99=quantile(values, 0.99)
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of rising values, by linear interpolation."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class ServeCell(BaseModel):
    """One mode at one rate."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["online", "offline", "naive"]
    """Requests that arrive by a clock; all at once; one after the other."""
    rate: float | None
    """Requests a second that arrive, in mode online."""
    burstiness: float | None
    """Shape of the gamma distribution of gaps, in mode online; 1 is Poisson."""
    completed: int
    failed: int
    errors: dict[str, int]
    """Why requests failed, and how many."""
    seconds: float
    """From the first request to the last token."""
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that the server found in its cache; 0 where it does not tell."""
    time_to_first_token_ms: Spread | None
    time_per_output_token_ms: Spread | None
    """Each request's mean time per token after the first."""
    inter_token_latency_ms: Spread | None
    """From each event with text to the next."""
    end_to_end_ms: Spread | None
    lateness_ms: Spread | None
    """How much later than planned requests were sent: what the client could not keep up with."""
    goodput: float | None
    """Requests a second that kept every limit; None where there are none."""
    good_share: float | None
    """Requests that kept every limit, as a share of all."""
    profile: StepsProfile | None = None
    """Where the time of the server's steps went, with --profile."""

    @property
    def label(self) -> str:
        """The server's name in tables and pictures."""
        return self.mode if self.rate is None else f"{self.rate:g}/s"


class ServeReport(ResultFile):
    """One run against one server."""

    schema_: Literal["headway.serve/1"] = Field(default="headway.serve/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """UTC, ISO 8601."""
    busy: str = ""
    """What other processes took of the client's CPU when the run began or ended."""
    url: str
    model: str
    endpoint: str
    load: dict[str, str]
    """What was sent, in words."""
    limits_ms: dict[str, float]
    """What goodput asks for: ttft, tpot, e2e -> milliseconds."""
    cells: list[ServeCell]
