"""The seam between the engine's loop and what runs its steps: one process, or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import HeadwayError
from headway.core.engine.data.adapters import AdapterReader
from headway.core.engine.data.page_mover import PageMover
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateSlots
from headway.core.engine.data.step import Sampled, StepInput
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import Gathers
from headway.core.select.selection import Selection
from headway.core.select.selector import Selector

WEIGHTS, CACHE = "weights", "kv_cache"
"""What of an executor sleeps and wakes; vLLM's words."""


class ExecutorLostError(HeadwayError):
    """No step can run any more; the text says which rank failed, in which step, and why."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold."""

    pool: PoolSize
    max_num_seqs: int
    """Sequences that may run at once; each has a row in the executor's buffers."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    states: StateSlots | None = None
    """Slots of the layers with a state; None: the model has none."""


class InFlight(Protocol):
    """A step that has been launched."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends that serve the step."""

    @property
    def graph(self) -> bool:
        """Whether the step is the replay of one CUDA graph."""

    @property
    def piecewise(self) -> bool:
        """Whether the step is replays of several graphs with attention launched between them."""

    @property
    def no_graph(self) -> str:
        """Why the step is not one graph, where graphs are in use; else empty."""

    @property
    def compiled(self) -> tuple[str, ...]:
        """Kernels that had to be compiled for the step."""

    @property
    def after_model(self) -> tuple[str, ...]:
        """Features of requests that were served after the model or its graph, kernel by kernel."""

    @property
    def waited_for(self) -> tuple[str, ...]:
        """Features of requests that need the tokens of the step before on the host, so that launching waited for them."""

    @property
    def wait_seconds(self) -> float:
        """Seconds that launching waited for the step before."""

    @property
    def gathers(self) -> Gathers | None:
        """What ranks have put together to choose tokens; None where there is one."""

    @property
    def first_nan(self) -> str | None:
        """What made the first NaN, where HEADWAY_DEBUG=1 looks for it."""

    def wait(self) -> Sampled:
        """Wait for the step's tokens; may be called again. A kernel's fault is raised here at the latest."""


class Executor(Protocol):
    """Runs steps in the order in which they are launched."""

    @property
    def capacity(self) -> Capacity:
        """Pages, rows and tokens that fit."""

    @property
    def mover(self) -> PageMover | None:
        """Copies pages to memory beyond the pool and back; None: there is no such memory."""

    @property
    def adapters(self) -> AdapterReader | None:
        """Reads adapters and keeps them in host memory; None: the model has no slots for any."""

    @property
    def selector(self) -> Selector:
        """Chooses the backend of every step and phase."""

    @property
    def selection(self) -> Selection:
        """Which backend serves which phase, over which layout and block size."""

    def capture(self) -> None:
        """Prepare what makes steps fast, such as CUDA graphs; then the engine is ready."""

    def attention_us(self, num_seqs: int, query_len: int, kv_len: int) -> float:
        """Microseconds of the attention of a decode step with the fastest backend, by the crossover table; infinite without one.

        query_len: new tokens of each sequence. kv_len: cached and new tokens of each.
        """

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """Show every step's logits to `look`: rows that sample, int32 [rows], and logits [rows, vocab_size] on the device.

        The next step overwrites the logits. None: show them no more.
        """

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Begin what a request needs before its first step, such as its grammar; None: nothing.

        A failure of the future ends the request; a request that ends before cancels the future.

        :raises ConfigError: the parameters name something that this process has not.
        """

    def launch(self, step: StepInput) -> InFlight:
        """Start a step. Whatever a backend raises comes through; what the step says about its rows holds even then."""

    def sleep(self, lost: Sequence[Tensor]) -> None:
        """Give the memory of weights and cache back, between two steps; none may be launched until both have been woken.

        lost: weights that are zero when they have woken, and are read anew then; the others lie in the host's memory meanwhile.

        :raises ConfigError: this executor cannot.
        """

    def wake(self, part: str) -> None:
        """Allocate the memory of WEIGHTS or of the CACHE again, which is empty then."""

    def failed(self, error: Exception) -> None:
        """Told of what a step has raised, at its launch or at the wait for it. Where this returns, other steps may run.

        :raises ExecutorLostError: none can.
        """

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """Call a bound method when no step can run any more, in another thread and perhaps while none runs."""

    def shutdown(self) -> None:
        """End what runs beside this process; no step may be launched afterwards."""
