"""A model that is pooled in the hands of one process: calls of any thread, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Final, TypeVar

from tqdm import tqdm

from headway.core.contract.errors import ConfigError
from headway.models.encoders.pooling.detect import PoolingTask
from headway.pooling.assembly import PoolingAssembly
from headway.pooling.jobs import PoolingJob, PoolingJobs

Output = TypeVar("Output")

_INSTEAD: Final[Mapping[PoolingTask, tuple[str, str]]] = {
    "embed": ("embeds texts", "embed and score"),
    "score": ("scores documents", "score and classify"),
    "reward": ("rewards tokens", "reward and encode"),
}
"""Task -> what a model with it does, and the methods that ask for it."""


class PoolingClient:
    """Runs the jobs of an `LLM`."""

    def __init__(self, assembly: PoolingAssembly) -> None:
        self.assembly = assembly
        self.model = assembly.model
        self.engine = assembly.engine
        self.jobs = PoolingJobs(assembly.model)
        self._lock = Lock()

    def run(self, job: PoolingJob[Output], use_tqdm: bool = False) -> list[Output]:
        """Run a job to its end.

        :raises BackendError: a backend raised.
        """
        with self._lock, tqdm(total=len(job.texts), desc="Processed texts", disable=not use_tqdm) as bar:
            rows = self.engine.run(job.texts, bar.update)
        return job.finish(rows)

    def generates_not(self) -> ConfigError:
        """The error of a call that only a model which generates text can answer."""
        does, methods = _INSTEAD[self.model.task]
        got = f"{self.model.name}, which {does}"
        return ConfigError("LLM", "a model that generates text", got, f"{methods} answer for it; runner='generate' insists")
