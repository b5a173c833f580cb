"""`python -m headway.kernels.runtime.compile_process`: a process that compiles Triton kernels on all cores.

Triton's front end is Python code. Threads that compile would share one GIL with each other and with the engine that starts. This
process imports Triton once, forks for each kernel, and leaves the results in the cache on disk. It never uses a GPU.
"""

from __future__ import annotations

import base64
import inspect
import io
import itertools
import logging
import os
import pickle
import selectors
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

from headway.core.system.child import Child, ChildDied, die_with_parent, message_of, open_replies, python_command, reply

log = logging.getLogger("headway")

_LEAST_CORES = 4
"""With fewer cores, another process that imports torch costs more than it saves."""
_PARTS = ("src", "target", "options", "_env_vars")  # Arguments of triton.compile
_running: list[CompileProcess] = []


class CompileProcess:
    """A running compile process, as seen by the process that started it."""

    def __init__(self) -> None:
        """Start the process. It is ready a few seconds later. :raises OSError: if it cannot be started."""
        self._child = Child(python_command(__name__))
        self._numbers = itertools.count()
        self._asked: dict[int, Future[bool]] = {}
        self._lock = Lock()
        self._ready = self._stopping = False
        self._reader = Thread(target=self._read, name="compile-process", daemon=True)
        self._reader.start()

    def compile(self, task: Callable[[], Any]) -> None:
        """Compile a kernel into the cache on disk, and wait for it. Do nothing if the process is not ready or has ended, or if
        the kernel cannot be sent.

        task: function with which Triton would compile the kernel here. Triton's public interface does not name its parts, so they
        are read from its closure.
        """
        with self._lock:
            if not self._ready:
                return
            number, asked = next(self._numbers), Future[bool]()
            try:
                pickled = _pickled(inspect.getclosurevars(task).nonlocals)
            except Exception:  # another release of Triton, or a value that cannot be sent
                return
            self._asked[number] = asked
            self._child.send({"number": number, "task": base64.b85encode(pickled).decode()})
        asked.result()

    def stop(self) -> None:
        """End the process and its forks."""
        self._stopping = True
        self._child.process.kill()  # forks die with it, and then the reader ends
        self._reader.join()

    def _read(self) -> None:
        """Hand answers to the threads that wait for them, until the process ends."""
        try:
            while True:
                answer = self._child.answer(None)
                if "number" in answer:
                    self._asked.pop(answer["number"]).set_result(answer["compiled"])
                self._ready = True
        except ChildDied as error:
            if not self._stopping:
                log.warning("compiling: the compile process ended: %s; this process compiles instead, which is slower", error)
        with self._lock:
            self._ready = False
        for asked in self._asked.values():
            asked.set_result(False)


@contextmanager
def compile_process(device_type: str) -> Iterator[None]:
    """Run a compile process while the block runs, if the device needs Triton and there are enough cores."""
    if device_type != "cuda" or len(os.sched_getaffinity(0)) < _LEAST_CORES or _running:
        yield
        return
    process = CompileProcess()
    _running.append(process)
    try:
        yield
    finally:
        _running.remove(process)
        process.stop()


def compile_elsewhere(task: Callable[[], Any]) -> None:
    """Compile a kernel in the running compile process, if there is one. `task` then finds the kernel in the cache."""
    for process in _running:
        process.compile(task)


def _pickled(found: Mapping[str, Any]) -> bytes:
    """Return the arguments of triton.compile in a closure's variables. :raises KeyError: if it has others."""
    named = {name: found[name.removeprefix("_")] for name in _PARTS}
    to = io.BytesIO()
    _Pickler(to).dump(named | {"options": dict(named["options"].__dict__)})
    return to.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes kernels as their names and the files in which they are found."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a kernel is found again; everything else is pickled as usual."""
        from triton import JITFunction

        from headway.kernels.runtime.triton_cache import find_function

        if not isinstance(value, JITFunction):
            return NotImplemented
        return find_function, (value.module, value.fn.__code__.co_filename, value.fn.__qualname__)


def _compile(given: dict[str, Any]) -> None:
    """Compile a kernel and what launches it, into the cache on disk."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    compiled = triton.compile(**given)
    with suppress(Exception):  # the launch will raise the same error
        CudaLauncher(compiled.src, compiled.metadata)


class _Server:
    """The process itself: reads kernels, and forks for each of them."""

    def __init__(self) -> None:
        self._replies = open_replies()
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._forks: dict[int, tuple[int, int]] = {}
        """Process ID and kernel number of each fork, by the pipe that it holds."""
        self._most = len(os.sched_getaffinity(0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the input ends."""
        reply(self._replies, {"ready": True})
        rest = b""
        while True:
            for key, _ in self._selector.select():
                if key.fd != 0:
                    self._end(key.fd)
                    continue
                if not (chunk := os.read(0, 1 << 20)):
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(message_of(line))
            while self._waiting and len(self._forks) < self._most:
                self._fork(*self._waiting.popleft())

    def _take(self, message: dict[str, Any]) -> None:
        from headway.kernels.runtime.triton_launch import hash_helpers_first

        try:  # imports the module of the kernel, once for all forks
            given = pickle.loads(base64.b85decode(message["task"]))
            hash_helpers_first(given["src"].fn)
        except Exception:
            reply(self._replies, {"number": message["number"], "compiled": False})
            return
        self._waiting.append((message["number"], given))

    def _fork(self, number: int, given: dict[str, Any]) -> None:
        ended, ends = os.pipe()  # the fork holds one end of the pipe until it ends
        process = os.fork()
        if process == 0:
            try:
                die_with_parent()
                _compile(given)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(ends)
        self._forks[ended] = process, number
        self._selector.register(ended, selectors.EVENT_READ)

    def _end(self, ended: int) -> None:
        process, number = self._forks.pop(ended)
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(process, 0)
        reply(self._replies, {"number": number, "compiled": status == 0})


if __name__ == "__main__":
    die_with_parent()
    from triton import knobs
    from triton.backends.nvidia import compiler, driver  # noqa: F401  (once for all forks)
    from triton.compiler import code_generator  # noqa: F401

    from headway.kernels.runtime.triton_cache import hash_triton, use_kernel_cache

    hashing = Thread(target=hash_triton)
    hashing.start()
    import headway.kernels.runtime.triton_launch  # noqa: F401  (imports torch, as most kernels do)

    use_kernel_cache()
    if "TRITON_STORE_BINARY_ONLY" not in os.environ:  # an engine reads nothing else, and loads its kernels faster
        knobs.compilation.store_binary_only = True
    hashing.join()  # no thread may run when this process forks
    _Server().serve()
