"""Executor for several ranks: sends each step to the other ranks and runs it on rank 0, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.captured_step import GraphRecorder
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.local_executor import DeviceParts, LocalExecutor
from headway.core.engine.ranks.rank_messages import encode
from headway.core.engine.ranks.rank_processes import RankProcesses


class RankedExecutor(LocalExecutor):
    """Executor of rank 0, which also sends each step to the other ranks. All ranks run the same steps in the same order, and
    sample the same tokens.

    A step that fails on one rank leaves the other ranks in the middle of the step, so no later step can run. Offloading with
    several ranks is refused when the options are checked.
    """

    def __init__(self, parts: DeviceParts, processes: RankProcesses) -> None:
        super().__init__(parts)
        self._processes = processes
        self._shows_logits = False

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and above."""
        return self._processes.pids

    def capture(self, recorder: GraphRecorder | None = None) -> None:
        super().capture(recorder)
        self._processes.wait_ready(self.facts)

    def observe(self, look: Callable[[NDArray[numpy.int32], Tensor], None] | None) -> None:
        """Set a function that observes logits; see `LocalExecutor.observe`. While a function is set, the ranks gather the logits
        of every step."""
        self._shows_logits = look is not None
        super().observe(look)

    def launch(self, step: StepInput) -> Launched:
        """Start a step on all ranks. :raises ExecutorLostError: if a rank is lost, or rank 0 has failed."""
        if self._shows_logits:
            step = replace(step, shows_logits=True)
        progress = self._processes.progress
        self._processes.send(encode(step))
        progress.begin_step()
        try:
            launched = super().launch(step)
        except Exception as error:
            self._processes.fail(error)
        except BaseException as error:  # a second Ctrl-C: the other ranks wait in the middle of the step
            with suppress(ExecutorLostError):
                self._processes.fail(error)
            raise
        progress.end_step()
        launched.check = self._processes.check
        return launched

    def sleep(self, lost: Sequence[Tensor]) -> None:
        """:raises ConfigError: always, because engines with several ranks cannot sleep."""
        size = len(self._processes.pids) + 1
        raise ConfigError("sleep", "tensor_parallel_size=1", size, "del llm frees the devices' memory")

    def failed(self, error: Exception) -> None:
        """:raises ExecutorLostError: always, because every failure ends the engine."""
        self._processes.fail(error)

    def call_when_lost(self, callback: Callable[[ExecutorLostError], None]) -> None:
        self._processes.call_when_lost(callback)

    def shutdown(self) -> None:
        self._processes.end()
