"""Measurement in a child process, for third-party backends: a shape that crashes or hangs a backend does not end the start.

The child writes the table after each point, as a measurement in this process does, and reports which backends it is about to
call. When the child dies or stops responding, the backends at fault are excluded, and the table records the reason. A new child
then continues the measurement.
"""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.operation import ATTENTION, OperationKind
from headway.core.system.child import Child, ChildDied, python_command
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.isolated.trial import CHILD
from headway.tuning.measure.kinds import kind_of
from headway.tuning.measure.run import CrossoverOptions
from headway.tuning.table.files import read_table
from headway.tuning.table.schema import CRASHED, HUNG, CrossoverTable

log = logging.getLogger("headway")

_START = 120.0
"""Seconds that the child process has to import torch and the plugins."""
ANSWER_SECONDS = {"cpu": 15.0, "cuda": 180.0}
"""Maximum seconds for one backend at one point. On a GPU, all kernels of the grid may be compiled in this time."""
_DUMP = 'File "'


def third_party_files(registry: Registry, names: Collection[str], kind: OperationKind = ATTENTION) -> dict[str, str]:
    """Return backend name -> file of the plugin that registers the backend, for installed plugins and plugin files."""
    return {
        name: record.file
        for record in registry.plugins
        if record.state == "loaded"
        for name in getattr(record.brought, kind.kernels)
        if name in names
    }


def can_measure_in_child(registry: Registry, names: Collection[str], kind: OperationKind = ATTENTION) -> bool:
    """Return whether a child process can load all of the named backends. A child cannot load plugin objects, which exist only in
    the program that passed them."""
    entries = registry.of(kind).entries
    brought = {name for name in names if entries[name].owner != BUILTIN_OWNER}
    return brought <= third_party_files(registry, names, kind).keys()


def measure_in_child(
    options: CrossoverOptions, registry: Registry, started: Callable[[Child], None] = lambda child: None
) -> CrossoverTable:
    """Run a measurement in a child process. After each crash, start a new child without the backends at fault.

    options: must contain the names of the backends and the path of the table. started: function called with each child.

    :raises HeadwayError: if the measurement raises one, or if the child ends and no backend is at fault.
    """
    assert options.backends is not None
    kind = kind_of(options.spec)
    output = options.output
    assert output is not None
    loaded = {record.name for record in registry.plugins if record.state == "loaded"}
    targets = {record.name: record.target for record in registry.plugins if record.target and record.name in loaded}
    block = [record.name for record in registry.plugins if record.name not in loaded]
    began, budget, files = time.monotonic(), options.budget, third_party_files(registry, options.backends, kind)
    before = _written(output)
    while True:
        options = replace(options, compile_ahead=None)
        at, point, child = "", "its self-test", None
        try:
            with Child(python_command(CHILD)) as child:
                started(child)
                message = {
                    "options": base64.b64encode(pickle.dumps(options)).decode(),
                    "threads": torch.get_num_threads(),
                    "plugins": targets,
                    "block": block,
                }
                answer = child.ask({"measure": message}, _START)
                while "at" in answer:
                    at, point = str(answer["at"]), str(answer["point"])
                    answer = child.answer(ANSWER_SECONDS[options.spec.device.type])
            if "error" in answer:
                raise HeadwayError(str(answer["error"]))
            return read_table(output, kind.name)
        except OSError as error:
            raise ConfigError("auto", "a process to measure in", "none", str(error)) from error
        except ChildDied as died:
            blamed = _blamed(at, died.stderr, {name: file for name, file in files.items() if name not in options.excluded})
            if not blamed:
                raise HeadwayError(f"the process that measures ended in {point}: {died}") from died
            # A process that hangs is aborted so that it writes its stack. The stack shows who is at fault, but the abort is not
            # the cause.
            why = f"{HUNG} in {point}: {died.how}" if died.timed_out else f"{CRASHED} in {point}: {died}"
            log.info("measuring continues without %s: %s", ", ".join(blamed), why)
            resume = options.resume or _written(output) != before  # an unchanged file is an older table
            options = replace(options, excluded={**options.excluded, **dict.fromkeys(blamed, why)}, resume=resume)
            if budget is not None:
                options = replace(options, budget=max(1.0, budget - (time.monotonic() - began)))


def _written(path: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the file is rewritten, or None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _blamed(at: str, output: str, files: dict[str, str]) -> list[str]:
    """Return the backends at fault: the backends whose files appear in the crash's stack dump, else the backends about to be
    called, else all of `files`."""
    named = [name for name, file in files.items() if file and f"{_DUMP}{file}" in output]
    return named or [name for name in files if name in at.split(",")] or list(files)
