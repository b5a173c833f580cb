"""Measuring in another process, where backends of plugins take part: a shape that crashes or hangs one ends no start.

The other process writes the table after each point, as a run in this process does, and says what it is about to call. When it
dies or falls silent, the backends at fault are left out, with the reason in the table, and the next process goes on from there.
"""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Collection
from dataclasses import replace

import torch

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.child import Child, Died, python
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.files import read_table
from headway.tuning.run import CrossoverOptions
from headway.tuning.schema import CrossoverTable

log = logging.getLogger("headway")

CHILD = "headway.tuning.measuring"
_START = 120.0
"""Seconds for the other process to import torch and whatever the plugins import."""
_SILENCE = {"cpu": 15.0, "cuda": 180.0}
"""Seconds that one backend may take at one point. On a GPU all kernels of the grid may be compiled in one go."""
_DUMP = 'File "'
TOOK_ALONG = "takes the process that measures it with it"
"""How the reason of a backend begins that is not called again, as long as its table holds."""


def guests(registry: Registry, names: Collection[str]) -> dict[str, str]:
    """Those of some backends that installed plugins and files bring -> where the plugin's files lie."""
    return {
        name: record.file
        for record in registry.plugins
        if record.state == "loaded"
        for name in record.brought.backends
        if name in names
    }


def all_found_apart(registry: Registry, names: Collection[str]) -> bool:
    """Whether another process finds all of some backends: an object that a program hands in is nowhere else."""
    return {name for name in names if registry.backends[name].owner != BUILTIN_OWNER} <= guests(registry, names).keys()


def measure_apart(options: CrossoverOptions, registry: Registry) -> CrossoverTable:
    """`run_kernel_level` in another process.

    options: with the names of its backends, and the file of its table.

    :raises HeadwayError: as there.
    """
    assert options.backends is not None
    output = options.output
    assert output is not None
    targets = [record.target for record in registry.plugins if record.target]
    began, budget, files = time.monotonic(), options.budget, guests(registry, options.backends)
    while True:
        options = replace(options, compile_ahead=None)
        at, point, child = "", "its self-test", None
        try:
            with Child(python(CHILD)) as child:
                message = {
                    "options": base64.b64encode(pickle.dumps(options)).decode(),
                    "threads": torch.get_num_threads(),
                    "plugins": targets,
                }
                answer = child.ask(message, _START)
                while "at" in answer:
                    at, point = str(answer["at"]), str(answer["point"])
                    answer = child.answer(_SILENCE[options.spec.device.type])
            if "error" in answer:
                raise HeadwayError(str(answer["error"]))
            return read_table(output)
        except OSError as error:
            raise ConfigError("auto", "a process to measure in", "none", str(error)) from error
        except Died as died:
            blamed = _blamed(at, died.said, {name: file for name, file in files.items() if name not in options.excluded})
            if not blamed:
                raise HeadwayError(f"the process that measures ended in {point}: {died}") from died
            why = f"{TOOK_ALONG}, in {point}: {died}"
            for name in blamed:
                log.warning("auto leaves out %s: it %s", name, why)
            options = replace(options, excluded={**options.excluded, **dict.fromkeys(blamed, why)}, resume=True)
            if budget is not None:
                options = replace(options, budget=max(1.0, budget - (time.monotonic() - began)))


def _blamed(at: str, said: str, files: dict[str, str]) -> list[str]:
    """Who is at fault: whose files the dump of a crash names, else who was about to be called, else every guest."""
    named = [name for name, file in files.items() if file and f"{_DUMP}{file}" in said]
    return named or [name for name in files if name in at.split(",")] or list(files)
