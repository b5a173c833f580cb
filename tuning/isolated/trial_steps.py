"""The steps of a plugin's trial, in a process that may be lost: import, hooks, loaders, a small prefill and decode, its end."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.metadata import Phase
from headway.core.contract.sampling_plugins import ProposerOptions
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state_backend import StateBackend
from headway.core.select.startup import DEFAULT_BLOCK_SIZES
from headway.registry import Registry, create_registry
from headway.registry.plugin_sources import PluginSource, with_hooks
from headway.registry.records import Brought
from headway.tuning.isolated.process_state import ProcessSnapshot
from headway.tuning.measure.self_test import self_test

T = TypeVar("T")
_HEADS = ((4, 2), (8, 1), (4, 4))
"""Query and kv heads of the layers that a backend is asked about, until it serves one."""
_HEAD_DIMS = (64, 128)


class Fault(Exception):
    """The plugin did what no plugin may do."""


class TrialSteps:
    """The trial of one plugin, step by step; a pipe is told which step runs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        os.dup2(self._out.fileno(), 1)
        sys.stdout, sys.stderr = (open(handle, "w", closefd=False, buffering=1) for handle in (1, 2))  # noqa: SIM115
        self._before = ProcessSnapshot()
        self.remarks: list[str] = []
        self.details: list[str] = []

    def tell(self, **message: Any) -> None:
        """Write one line into the pipe."""
        os.write(self._pipe, json.dumps(message).encode() + b"\n")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run code of the plugin: an exception is a remark, an exit is a fault, and so is anything that it prints or changes.

        :raises Fault: one of these.
        """
        self.tell(stage=what)
        try:
            yield
        except Fault:
            raise
        except Exception as error:
            if (ended := _exit_in(error)) is not None:
                self.details.append(traceback.format_exc())
                raise Fault(f"exits in {what} ({ended})") from error
            self.remarks.append(f"{what} raises {type(error).__name__}: {' '.join(str(error).split())}")
            self.details.append(traceback.format_exc())
        except BaseException as error:
            self.details.append(traceback.format_exc())
            raise Fault(f"exits in {what} ({type(error).__name__}: {error})") from error
        self.check(what)

    def check(self, what: str) -> None:
        """:raises Fault: something was printed, or something of the whole process is not as it was."""
        sys.stdout.flush()
        size = os.lseek(self._out.fileno(), 0, os.SEEK_END)
        if size:
            printed = os.pread(self._out.fileno(), 2000, 0).decode(errors="replace")
            self.details.append(printed)
            raise Fault(f"prints to standard output in {what}: {' '.join(printed.split())[:80]!r}")
        if changed := self._before.changed():
            raise Fault(f"changes {changed}, in {what}")


def run(plugin: PluginSource, device: str, pipe: int) -> None:
    """Try a plugin and write the verdict into a pipe. The caller ends what the plugin starts besides."""
    faulthandler.enable(2)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    trial = TrialSteps(pipe)
    fault = ""
    try:
        _try(trial, plugin, device)
    except Fault as found:
        fault = str(found)
    trial.tell(verdict={"fault": fault, "remarks": trial.remarks, "details": "\n".join(trial.details)})


def _try(trial: TrialSteps, plugin: PluginSource, device: str) -> None:
    registry = create_registry(load_entry_points=False)
    modules = set(sys.modules)
    own = set(registry.backends), set(registry.layouts)
    loaded: object = None
    with trial.step("its import"):
        loaded = plugin.load()
    if loaded is not None:
        with trial.step("its hooks"):
            registry.add_plugin(plugin.name, plugin.owner, with_hooks(loaded, registry.layouts, registry.state_layouts))
            registry.sources[plugin.name] = plugin
    if plugin.name in registry.brought:
        _try_parts(trial, registry, registry.brought[plugin.name])
        for name in registry.backends:
            if name not in own[0]:
                _try_backend(trial, registry, name, device)
        for name in registry.brought[plugin.name].state_backends:
            _try_state_backend(trial, registry, name)
        _try_rank(trial, registry, plugin.name)
    _end(trial, [module for name, module in sys.modules.items() if name not in modules and _is_of(module, plugin)])


def _try_parts(trial: TrialSteps, registry: Registry, brought: Brought) -> None:
    """Try what a plugin brings beside backends."""
    for name in brought.layouts:
        with trial.step(f"load_writer() of layout {name}"):
            registry.layout(name).writer(torch.device("cpu"))
    for name in brought.proposers:
        with trial.step(f"proposer {name}"):
            tokens = [1, 2, 3, 1, 2, 3, 1, 2]
            guessing = registry.proposer(name).make(ProposerOptions()).begin(len(tokens))
            guessing.propose(tokens, 4)
            guessing.finish(tokens)
    for name in brought.logits_processors:
        with trial.step(f"logits processor {name}"):
            registry.logits_processors[name].load()


def _try_backend(trial: TrialSteps, registry: Registry, name: str, device: str) -> None:
    """Load a backend, ask it, and hold a few small steps on each device to float64."""
    backend: type[AttentionBackend] | None = None
    with trial.step(f"load() of backend {name}"):
        backend = registry.backend(name)
    if backend is None:
        return
    able = False
    with trial.step(f"available() of backend {name}"):
        able = bool(backend.available())
    for kind in dict.fromkeys(("cpu", device)):
        if not able or kind not in backend.capabilities.devices:
            continue
        with trial.step(f"the self-test of backend {name} on {kind}"):
            for wrong in _self_tests(registry, name, backend, torch.device(kind)):
                if "SystemExit" in wrong:
                    raise Fault(f"exits in the {wrong}")
                trial.remarks.append(f"backend {name} on {kind}: {wrong}")


def _try_state_backend(trial: TrialSteps, registry: Registry, name: str) -> None:
    """Load a backend for layers with a state, and ask it."""
    backend: type[StateBackend] | None = None
    with trial.step(f"load() of state backend {name}"):
        backend = registry.state_backend(name)
    if backend is not None:
        with trial.step(f"available() of state backend {name}"):
            backend.available()


def _self_tests(registry: Registry, name: str, backend: type[AttentionBackend], device: torch.device) -> Iterator[str]:
    """Test the first layer that a backend serves in each element type, and yield what is wrong."""
    claims = backend.capabilities
    pairs = [(info.layout, size) for size in DEFAULT_BLOCK_SIZES for info in registry.layouts.values()]
    for dtype in claims.dtypes:
        specs = (
            AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, dtype, device)
            for head_dim in claims.head_dims or _HEAD_DIMS
            for heads, kv_heads in _HEADS
        )
        answers = ((spec, backend.supports(spec, *pair, phase)) for spec in specs for pair in pairs for phase in Phase)
        spec = next((spec for spec, answer in answers if answer), None)
        if spec is None:
            continue
        for phase in Phase:
            backend.kernel(spec, phase)
        if wrong := self_test(registry, name, spec, pairs, retry=True):
            yield wrong


def _try_rank(trial: TrialSteps, registry: Registry, name: str) -> None:
    """Ask a plugin for its order of all backends, in each phase of a layer."""
    spec = AttentionSpec(4, 2, 64, 0.125)
    for plugin, order in registry.rank_hooks():
        with trial.step("headway_rank_backends"):
            for phase in Phase if plugin == name else ():
                order(spec, phase, list(registry.backends))


def _is_of(module: object, plugin: PluginSource) -> bool:
    file, own = getattr(module, "__file__", None), plugin.file
    return bool(file and own) and (Path(str(file)) == own or own in Path(str(file)).parents)


def _end(trial: TrialSteps, modules: list[ModuleType]) -> None:
    """Do what Python does when Headway ends. modules: those of the plugin, whose names Python drops then.

    :raises Fault: Headway would not end, because of a thread.
    """
    with trial.step("what it does when Headway ends"):
        atexit._run_exitfuncs()
        for module in modules:
            names = [name for name in vars(module) if not name.startswith("__")]
            # Python calls __del__ while what it needs is still there, so instances go before what they may call.
            for name in sorted(names, key=lambda name: isinstance(vars(module)[name], (ModuleType, type, FunctionType))):
                setattr(module, name, None)
        gc.collect()
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    if left:
        raise Fault(f"leaves a thread running that keeps Headway from ending: {left[0].name}")


def _exit_in(error: BaseException | None) -> str | None:
    """Return the exit that an exception was made of, in words; None where there was none."""
    while error is not None:
        if isinstance(error, SystemExit):
            return f"SystemExit: {error}"
        error = error.__cause__ or error.__context__
    return None
