"""`python -m headway.tuning.isolated.child`: a child process, allowed to crash, that tries plugins or measures one table.

The process reads one request and answers in lines of JSON. Each plugin runs in a fork of this process. If a plugin kills its
parent, only this process ends; a plugin that hangs is stopped and reported by name. This process never uses a GPU before it
forks.
"""

from __future__ import annotations

import atexit
import base64
import builtins
import faulthandler
import gc
import json
import locale
import logging
import os
import pickle
import resource
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TextIO, TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import HeadwayError
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec, ExpertsWeights
from headway.core.contract.kernel import Kernel
from headway.core.contract.linear import LinearKernel, LinearSpec
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import KINDS, OperationKind
from headway.core.contract.operation import STATE as STATES
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.text_plugins import ProposerOptions
from headway.core.contract.weights import Weight, WeightFormat
from headway.core.oracle.weight_cases import WEIGHTS, Drawn, WeightCase, experts_case, linear_case, make_weight
from headway.core.select.kernels import DEFAULT_BLOCK_SIZES
from headway.core.system.child import die_with_parent, how_it_ended, message_of, open_replies, reply
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.kernels.runtime.compile_process import compile_process
from headway.registry import Registry, create_registry
from headway.registry.isolation import Verdict
from headway.registry.plugin_sources import PluginSource, find_source, with_hooks
from headway.registry.records import Brought
from headway.tuning.measure.counted_layer import TRIED
from headway.tuning.measure.run import run_kernel_level
from headway.tuning.measure.self_test import self_test

T = TypeVar("T")
_HEADS = ((4, 2), (8, 1), (4, 4))
"""(query heads, kv heads) of the layers offered to a backend, one after another, until the backend supports one of them."""
_HEAD_DIMS = (64, 128)


class Fault(Exception):
    """Error: a plugin broke a rule, so its trial has failed."""


class TrialSteps:
    """Trial of one plugin, step by step. The current step is reported through a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  (open until the process ends)
        os.dup2(self._out.fileno(), 1)
        stdout, stderr = (open(handle, "w", closefd=False, buffering=1) for handle in (1, 2))  # noqa: SIM115
        sys.stdout = stdout
        sys.stderr = stderr
        self._before = ProcessSnapshot()
        self.remarks: list[str] = []
        self.details: list[str] = []

    def report(self, **message: Any) -> None:
        """Write one JSON line to the pipe."""
        os.write(self._pipe, json.dumps(message).encode() + b"\n")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run a step of the plugin's code. An exception becomes a remark. If the plugin exits, prints output or changes the
        process state, the step has a fault.

        :raises Fault: if the step has a fault.
        """
        self.report(stage=what)
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
        """Check that nothing was printed and that the state of the process is unchanged.

        :raises Fault: if something was printed or the state has changed.
        """
        sys.stdout.flush()
        size = os.lseek(self._out.fileno(), 0, os.SEEK_END)
        if size:
            printed = os.pread(self._out.fileno(), 2000, 0).decode(errors="replace")
            self.details.append(printed)
            raise Fault(f"prints to standard output in {what}: {' '.join(printed.split())[:80]!r}")
        if changed := self._before.changed():
            raise Fault(f"changes {changed}, in {what}")


def run(plugin: PluginSource, device: str, pipe: int) -> None:
    """Try a plugin and write the verdict to a pipe. The caller must end the processes that the plugin starts."""
    faulthandler.enable(2)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    trial = TrialSteps(pipe)
    fault = ""
    try:
        _try(trial, plugin, device)
    except Fault as found:
        fault = str(found)
    trial.report(verdict={"fault": fault, "remarks": trial.remarks, "details": "\n".join(trial.details)})


def _try(trial: TrialSteps, plugin: PluginSource, device: str) -> None:
    registry = create_registry(load_entry_points=False)
    modules = set(sys.modules)
    loaded: object = None
    with trial.step("its import"):
        loaded = plugin.load()
    if loaded is not None:
        with trial.step("its hooks"):
            registry.add_plugin(plugin.name, plugin.owner, with_hooks(loaded, registry.layouts, registry.states.layouts))
            registry.sources[plugin.name] = plugin
    if plugin.name in registry.brought:
        _try_parts(trial, registry, registry.brought[plugin.name])
        for kind in KINDS:
            for name in getattr(registry.brought[plugin.name], kind.kernels):
                _try_kernel(trial, registry, name, device, kind)
        _try_rank(trial, registry, plugin.name)
    _end(trial, [module for name, module in sys.modules.items() if name not in modules and _is_of(module, plugin)])


def _try_parts(trial: TrialSteps, registry: Registry, brought: Brought) -> None:
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


def _try_kernel(trial: TrialSteps, registry: Registry, name: str, device: str, kind: OperationKind) -> None:
    """Load a kernel, check whether it can run, and compare a few small attention steps on each device with float64 results."""
    kernel: type[Kernel] | None = None
    with trial.step(f"load() of {kind.word} {name}"):
        kernel = registry.of(kind).backend(name)
    if kernel is None:
        return
    able = False
    with trial.step(f"available() of {kind.word} {name}"):
        able = bool(kernel.available())
    for place in dict.fromkeys(("cpu", device)):
        if not able or kind is STATES or place not in kernel.capabilities.devices:
            continue
        with trial.step(f"the self-test of {kind.word} {name} on {place}"):
            if issubclass(kernel, AttentionBackend):
                found = _self_tests(registry, name, kernel, torch.device(place))
            else:
                found = weight_tests(kernel, torch.device(place))
            for wrong in found:
                if "SystemExit" in wrong:
                    raise Fault(f"exits in the {wrong}")
                trial.remarks.append(f"{kind.word} {name} on {place}: {wrong}")


def _self_tests(registry: Registry, name: str, backend: type[AttentionBackend], device: torch.device) -> Iterator[str]:
    """Run the self-test on the first layer that a backend supports for each dtype, and yield each error."""
    claims = backend.capabilities
    pairs = [(info.layout, size) for size in DEFAULT_BLOCK_SIZES for info in registry.layouts.values()]
    for dtype in claims.dtypes:
        specs = (
            AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, dtype, device)
            for head_dim in claims.head_dims or _HEAD_DIMS
            for heads, kv_heads in _HEADS
        )
        asked = product(specs, pairs, Phase)
        answers = ((spec, backend.supports(spec, layout, size, phase)) for spec, (layout, size), phase in asked)
        spec = next((spec for spec, answer in answers if answer), None)
        if spec is None:
            continue
        for phase in Phase:
            backend.kernel(spec, phase)
        if wrong := self_test(registry, name, spec, pairs, retry=True):
            yield wrong


_SIZE = 256
"""Number of inputs and outputs of each layer of `weight_tests`: a multiple of the group and block sizes of every format."""
_WRONG = 0.05
"""Error, relative to the norm of the correct answer, above which a kernel is reported."""


def weight_tests(kernel: type[Any], device: torch.device) -> Iterator[str]:
    """Run a linear or experts kernel on one layer for each kind of weight that the kernel supports, and yield each error."""
    with torch.inference_mode():
        for dtype in kernel.capabilities.dtypes:
            for name in WEIGHTS:
                drawn = Drawn(torch.Generator().manual_seed(0))
                layer = _linear if issubclass(kernel, LinearKernel) else _experts
                wrong = ""
                try:
                    for rows, case, made, prepared in layer(kernel, name, dtype, drawn, device):
                        found = torch.zeros_like(case.right, dtype=dtype, device=device) if case.onto is None else case.onto
                        case.call(made, prepared, found)
                        error = float((found.cpu().double() - case.right).norm() / case.right.norm())
                        if not error < _WRONG:  # further rows are still run: they may crash
                            wrong = wrong or f"its answer is off by {error:.1e} with {rows} rows"
                except Exception as error:
                    wrong = f"it raised {type(error).__name__}: {error}"
                if wrong:
                    yield f"self-test with {name} weights, {dtype}: {wrong}"


_Case = tuple[int, WeightCase, Any, Any]
"""(number of rows, case, kernel instance, weights that the instance prepared)."""


def _linear(kernel: type[LinearKernel], name: str, dtype: torch.dtype, drawn: Drawn, device: torch.device) -> Iterator[_Case]:
    weight = make_weight(name, (_SIZE, _SIZE), dtype, drawn)
    spec = LinearSpec(_SIZE, _SIZE, dtype, device, WeightFormat.of(weight))
    if not kernel.supports(spec):
        return
    made = kernel(spec)
    first = linear_case(weight, drawn.rows(1, _SIZE).to(dtype), device)
    prepared = made.prepare(first.weight)
    for rows in TRIED:
        if made.runs(rows):
            yield rows, linear_case(weight, drawn.rows(rows, _SIZE).to(dtype), device), made, prepared


def _experts(kernel: type[ExpertsKernel], name: str, dtype: torch.dtype, drawn: Drawn, device: torch.device) -> Iterator[_Case]:
    config = ExpertsConfig(num_experts=4, top_k=2, intermediate_size=_SIZE)
    up, down = (_stacked(name, (config.num_all, rows, _SIZE), dtype, drawn) for rows in (config.up_size, _SIZE))
    spec = ExpertsSpec(config, _SIZE, dtype, device, WeightFormat.of(up), WeightFormat.of(down))
    if not kernel.supports(spec):
        return
    made, weights, prepared = kernel(spec), ExpertsWeights(up, down), None
    for rows in TRIED:
        if not made.runs(rows):
            continue
        experts = torch.stack([torch.randperm(4, generator=drawn.generator)[:2] for _ in range(rows)]).int()
        scores = torch.rand(rows, 2, generator=drawn.generator)
        given = drawn.rows(rows, _SIZE).to(dtype), experts, scores
        case = experts_case(config, weights, given, drawn.rows(rows, _SIZE).to(dtype), device)
        prepared = made.prepare(case.weight) if prepared is None else prepared
        yield rows, case, made, prepared


def _stacked(name: str, shape: tuple[int, int, int], dtype: torch.dtype, drawn: Drawn) -> Weight:
    weight = make_weight(name, (shape[0] * shape[1], shape[2]), dtype, drawn)
    return weight.view(shape) if isinstance(weight, Tensor) else weight


def _try_rank(trial: TrialSteps, registry: Registry, name: str) -> None:
    """Ask a plugin to order all backends, in each phase of one layer."""
    spec = AttentionSpec(4, 2, 64, 0.125)
    for hook in registry.attention.rank_hooks:
        with trial.step("headway_rank_backends"):
            for phase in Phase if hook.plugin == name else ():
                hook.order(spec, phase, list(registry.backends))


def _is_of(module: object, plugin: PluginSource) -> bool:
    file, own = getattr(module, "__file__", None), plugin.file
    return bool(file and own) and (Path(str(file)) == own or own in Path(str(file)).parents)


def _end(trial: TrialSteps, modules: list[ModuleType]) -> None:
    """Run Python's exit handlers and set the names in the plugin's modules to None, as Python does at exit. modules: the plugin's
    modules.

    :raises Fault: if a thread of the plugin would keep Headway from ending.
    """
    with trial.step("what it does when Headway ends"):
        atexit._run_exitfuncs()
        for module in modules:
            names = [name for name in vars(module) if not name.startswith("__")]
            # Python calls __del__ while the names that it needs still exist, so instances are dropped before classes, functions
            # and modules.
            for name in sorted(names, key=lambda name: isinstance(vars(module)[name], (ModuleType, type, FunctionType))):
                setattr(module, name, None)
        gc.collect()
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    if left:
        raise Fault(f"leaves a thread running that keeps Headway from ending: {left[0].name}")


def _exit_in(error: BaseException | None) -> str | None:
    """Return a description of the SystemExit in an exception's chain of causes, or None if there is none."""
    while error is not None:
        if isinstance(error, SystemExit):
            return f"SystemExit: {error}"
        error = error.__cause__ or error.__context__
    return None


_SHARED = ("builtins", "json", "logging", "os", "pickle", "signal", "socket", "subprocess", "sys", "threading", "time", "torch")
"""Shared modules that a plugin must not replace."""
_OPERATIONS: tuple[tuple[object, str], ...] = (
    *((functional, name) for name in ("scaled_dot_product_attention", "linear", "softmax", "embedding")),
    *((torch, name) for name in ("matmul", "mm", "bmm", "addmm", "softmax", "cat", "empty")),
    *((torch.Tensor, name) for name in ("__matmul__", "matmul", "to", "mul_")),
)
"""(module, name) of torch functions that other backends and the model use."""


def modules() -> dict[str, ModuleType]:
    """Return the loaded modules of Headway and the modules in `_SHARED`."""
    return {name: module for name, module in sys.modules.items() if name in _SHARED or name.startswith("headway.")}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


STATE: dict[str, Callable[[], object]] = {
    "the working folder": os.getcwd,
    "the mask of new files' modes": _umask,
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's switch for gradients": torch.is_grad_enabled,
    "torch's switch for deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "torch's precision of products": torch.get_float32_matmul_precision,
    "torch's seed": torch.initial_seed,  # does not change when random numbers are drawn
    "torch's operations": lambda: [getattr(owner, name) for owner, name in _OPERATIONS],
    "what Ctrl-C does": lambda: signal.getsignal(signal.SIGINT),
    "what SIGTERM does": lambda: signal.getsignal(signal.SIGTERM),
    "sys.stdout": lambda: sys.stdout,
    "sys.stderr": lambda: sys.stderr,
    "sys.excepthook": lambda: sys.excepthook,
    "the switch interval of threads": sys.getswitchinterval,
    "print": lambda: builtins.print,
    "the handlers of the root logger": lambda: tuple(logging.getLogger().handlers),
}
"""Name of each part of the process state -> function that reads it."""


class ProcessSnapshot:
    """State of the process at the start of a plugin's trial."""

    def __init__(self) -> None:
        self._before = {what: read() for what, read in STATE.items()}
        self._modules = modules()
        self._variables = set(os.environ)

    def changed(self) -> str:
        """Return a description of the first part of the state that has changed, or "" if no part has changed."""
        for name, read in STATE.items():
            now, before = read(), self._before[name]
            if now != before:
                return name if isinstance(now, list) else f"{name} from {before} to {now}"
        if gone := sorted(self._variables - set(os.environ)):
            return f"the environment: {gone[0]} is gone"
        present = modules()
        other = next((name for name, module in self._modules.items() if present.get(name) is not module), "")
        return f"the module {other} for another" if other else ""


_DUMP_SECONDS = 0.5
"""Seconds that a hanging process has to write its stack."""
_END_SECONDS = 1.0
"""Seconds that the processes started by a plugin have to end after the plugin has ended."""
_POLL_SECONDS = 0.02
_MOST_OUTPUT = 20_000
"""Maximum number of characters of a plugin's output that are stored."""
_MOST_MEMORY = 16 * 2**30
"""Limit of a plugin's address space in bytes, on machines without a GPU. On machines with a GPU no limit is set, because the GPU
driver reserves more address space than any useful limit."""


@dataclass
class _PipeReader:
    """Reader of the messages in the pipe of a plugin's process."""

    pipe: int
    stage: str = "its process"
    verdict: Verdict | None = None
    rest: bytes = b""

    def read(self) -> None:
        """Read all messages that are available."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while self.verdict is None and selector.select(_POLL_SECONDS):
                if not (chunk := os.read(self.pipe, 1 << 16)):
                    time.sleep(_POLL_SECONDS)  # the pipe is closed: the caller sees that the process ended
                    return
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                for line in lines:
                    with suppress(ValueError, AttributeError, TypeError):  # the plugin may write other data to the pipe
                        message = message_of(line)
                        self.stage = str(message.get("stage", self.stage))
                        if "verdict" in message:
                            self.verdict = Verdict.of({**asdict(Verdict()), **message["verdict"]})


def judge(plugin: PluginSource, device: str, seconds: float, private: int | None = None) -> Verdict:
    """Try a plugin in a fork of this process. The fork ends after little more than `seconds` at the latest.

    private: file descriptor to close in the fork, so that the plugin cannot use it.
    """
    started = time.monotonic()
    read, write = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            try:
                if private is not None:
                    os.close(private)
                _run_in_fork(plugin, device, write, errors.fileno())
            finally:
                os._exit(0)
        os.close(write)
        verdict = _follow(pid, _PipeReader(read), started + seconds, seconds)
        os.close(read)
        errors.seek(0)
        printed = errors.read().decode(errors="replace")[-_MOST_OUTPUT:].strip()
    details = "\n".join(text for text in (verdict.details, printed) if text)
    took = round(time.monotonic() - started, 2)
    return replace(verdict, details=details, seconds=took, date=time.strftime("%Y-%m-%d %H:%M"))


def _run_in_fork(plugin: PluginSource, device: str, pipe: int, errors: int) -> None:
    """Try a plugin in this process, which is a fork made for this plugin."""
    die_with_parent()
    # Only the plugin's own exit functions and garbage are tried: those of libraries loaded before may not survive a fork.
    atexit._clear()
    gc.freeze()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    run(plugin, device, pipe)


def _follow(pid: int, reader: _PipeReader, until: float, seconds: float) -> Verdict:
    """Wait for a plugin's verdict or for the end of its process, then kill its process group."""
    status = None
    while reader.verdict is None and status is None and time.monotonic() < until:
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        reader.read()
    verdict = reader.verdict
    if verdict is None and status is None:
        os.kill(pid, signal.SIGABRT)  # faulthandler then writes the stack
        time.sleep(_DUMP_SECONDS)
        verdict = Verdict(f"hangs in {reader.stage}: no answer within {seconds:.3g} s")
    elif verdict is None:
        assert status is not None
        verdict = Verdict(f"ends the process in {reader.stage}: it {how_it_ended(os.waitstatus_to_exitcode(status))}")
    elif not verdict.fault and _outlives(pid):
        verdict = replace(verdict, fault="leaves a process running that it has started")
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return verdict


def _outlives(pid: int) -> bool:
    """Return whether a process that a plugin started is still running after the plugin's process has ended."""
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        time.sleep(_POLL_SECONDS)
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _measure(request: Mapping[str, Any], replies: TextIO) -> None:
    faulthandler.enable(2)
    torch.set_num_threads(int(request["threads"]))
    options = pickle.loads(base64.b64decode(request["options"]))
    options = replace(options, compile_ahead=compile_ahead(options.spec.device))
    try:
        registry = create_registry(request["plugins"], block=request["block"])  # these plugins have already passed their trial
        with compile_process(options.spec.device.type):
            run_kernel_level(options, registry, report=lambda at, point: reply(replies, {"at": at, "point": point}))
    except (HeadwayError, OSError) as error:
        reply(replies, {"error": str(error)})
    else:
        reply(replies, {"done": True})


def main() -> None:
    """Answer one request: {"try": [...]} or {"measure": ...}."""
    die_with_parent()
    replies = open_replies()
    request = message_of(sys.stdin.readline())
    if "measure" in request:
        _measure(request["measure"], replies)
    else:
        for each in request["try"]:
            plugin = find_source(each["name"], each["owner"], each["file"])
            reply(replies, asdict(judge(plugin, each["device"], each["seconds"], replies.fileno())))


if __name__ == "__main__":
    main()
