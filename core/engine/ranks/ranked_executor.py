"""The executor of several ranks: hands each step to the others and runs it on rank 0, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.local_executor import LocalExecutor
from headway.core.engine.ranks.rank_messages import encode
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.sampling.params import SamplingParams


class RankedExecutor:
    """An `Executor` of which this process runs rank 0. All ranks get equal steps in equal order, and sample equal tokens.

    A step that fails on one rank leaves the others in the middle of it: it is the engine's last.
    """

    mover = None
    """Blocks beyond the pool are refused where the options are checked."""

    def __init__(self, local: LocalExecutor, processes: RankProcesses) -> None:
        """local: rank 0's. processes: the other ranks, which have joined."""
        self._local = local
        self._processes = processes
        self._shows_logits = False
        self.capacity = local.capacity
        self.selector = local.selector
        self.selection = local.selection
        self.adapters = local.adapters

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and above."""
        return self._processes.pids

    def capture(self) -> None:
        """See `Executor`; waits until all ranks are ready."""
        self._local.capture()
        self._processes.wait_ready(self._local.facts)

    def attention_us(self, num_seqs: int, query_len: int, kv_len: int) -> float:
        """See `Executor`; of rank 0's heads."""
        return self._local.attention_us(num_seqs, query_len, kv_len)

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """See `Executor`; all ranks put the logits of every step together, and rank 0 shows them."""
        self._shows_logits = look is not None
        self._local.observe(look)

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """See `Executor`; rank 0 alone compiles forms and calls logits processors."""
        return self._local.prepare(params)

    def launch(self, step: StepInput) -> Launched:
        """See `Executor`.

        :raises ExecutorLostError: a rank is lost, or this one has failed.
        """
        if self._shows_logits:
            step = replace(step, shows_logits=True)
        progress = self._processes.progress
        self._processes.send(encode(step))
        progress.begin_step()
        try:
            launched = self._local.launch(step)
        except Exception as error:
            self._processes.fail(error)
        except BaseException as error:  # a second Ctrl-C: the others wait in the middle of the step
            with suppress(ExecutorLostError):
                self._processes.fail(error)
            raise
        progress.end_step()
        launched.check = self._processes.check
        return launched

    def sleep(self, lost: Sequence[Tensor]) -> None:
        """See `Executor`: several ranks do not sleep."""
        size = len(self._processes.pids) + 1
        raise ConfigError("sleep", "tensor_parallel_size=1", size, "del llm frees the devices' memory")

    def wake(self, part: str) -> None:
        """See `Executor`; there is nothing to wake."""

    def failed(self, error: Exception) -> None:
        """See `Executor`: every failure is the last."""
        self._processes.fail(error)

    def call_when_lost(self, tell: Callable[[ExecutorLostError], None]) -> None:
        """See `Executor`."""
        self._processes.call_when_lost(tell)

    def shutdown(self) -> None:
        """See `Executor`: ends the other ranks."""
        self._processes.end()
