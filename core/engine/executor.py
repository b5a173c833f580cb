"""The seam between the engine's loop and whatever runs its steps: one process today."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from headway.core.engine.offload.mover import PageMover
from headway.core.engine.pool import PoolSize
from headway.core.engine.step import Sampled, StepInput
from headway.core.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold."""

    pool: PoolSize
    max_num_seqs: int
    """Rows: sequences that may run at once."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""


class InFlight(Protocol):
    """A step that has been launched."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends that serve it."""

    @property
    def graph(self) -> bool:
        """Whether it is the replay of one CUDA graph."""

    @property
    def piecewise(self) -> bool:
        """Whether it is graphs' replays with attention launched between them."""

    @property
    def no_graph(self) -> str:
        """Where graphs are in use and this step is not one graph, why; else empty."""

    @property
    def compiled(self) -> tuple[str, ...]:
        """Kernels that had to be compiled for it."""

    @property
    def after_model(self) -> tuple[str, ...]:
        """What requests asked for that was done after the model or its graph, kernel by kernel."""

    @property
    def waited_for(self) -> tuple[str, ...]:
        """What requests asked for that needs the tokens of the step before on the host, so that launching waited for them."""

    @property
    def wait_seconds(self) -> float:
        """How long it waited."""

    @property
    def first_nan(self) -> str | None:
        """With HEADWAY_DEBUG=1: what made the first NaN."""

    def wait(self) -> Sampled:
        """Its tokens; waits for the device. May be called again. A fault of a kernel is raised here at the latest."""


class Executor(Protocol):
    """Runs steps in the order in which it is given them."""

    @property
    def capacity(self) -> Capacity:
        """What it can hold."""

    @property
    def mover(self) -> PageMover | None:
        """Copies pages to memory beyond the pool and back; None: there is none."""

    def capture(self) -> None:
        """Prepare what makes steps fast, such as CUDA graphs; after it the engine is ready."""

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Begin what a request needs before its first step, such as its grammar; None: nothing. A failure ends the request.

        :raises ConfigError: what it asks for is not there.
        """

    def launch(self, step: StepInput) -> InFlight:
        """Start a step. Whatever a backend raises comes through; what the step told of its rows holds even then."""
