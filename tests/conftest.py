"""Shared fixtures. A GPU test skips, with its reason, where there is no GPU."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from headway.core.engine.data.step import OutputDelta
from headway.core.engine.loop import EngineLoop
from headway.core.system.files import cache_folder
from headway.kernels.runtime.nvrtc.compiler import Compiler, find_compiler
from headway.machine import process
from headway.registry import Registry, create_registry

os.environ.setdefault("HEADWAY_AUTOTUNE_BUDGET", "0")  # nothing is measured at a start unless a test asks for it
os.environ.setdefault("HEADWAY_TRUST_PLUGINS", "1")  # no plugin is tried in a process of its own, which takes seconds, likewise
settings.register_profile("headway", deadline=None, print_blob=True)  # a busy machine takes long now and then
settings.load_profile("headway")
if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError):
        from quick_interpreter import quicken

        quicken()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _cache_of_these_tests() -> Path:
    """A folder of the session's own, so that no table, verdict or self-test of a test is found by the user's next start.

    Converted models and compiled kernels are the user's: they take long to make, and are found by a hash of all that they are of.
    """
    folder = Path(tempfile.mkdtemp(prefix="headway-tests-"))
    maker = os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a plugin's trial, which is a fork, ends as a program does
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    for name in ("models", "kernels", "triton", "host-kernels"):
        with suppress(OSError):  # where the user's cannot be written, the session has its own
            (cache_folder() / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(cache_folder() / name)
    return folder


if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the folder of the process that started it
    os.environ["HEADWAY_CACHE"] = str(_cache_of_these_tests())


def _check_books_after_every_step() -> None:
    """As `--check-books` does, in every engine of this process."""
    step = EngineLoop.step

    @functools.wraps(step)
    def checked(engine: EngineLoop) -> list[OutputDelta]:
        deltas = step(engine)
        engine.check_books()
        return deltas

    EngineLoop.step = checked  # type: ignore[method-assign]


_check_books_after_every_step()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave files that need Triton's interpreter to the processes that tests/test_interpreter.py starts."""
    return True if collection_path.name.endswith("_interpreted.py") and os.environ.get("TRITON_INTERPRET") != "1" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `sampled` leaves out as slow or soak, and leave out what needs a CUDA device where there is none.

    `-m gpu` shows the latter, as skipped. Tests that use a fixture of their module run in one process, which makes it once.
    """
    seen: Counter[str] = Counter()
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        shared = any(made.scope == "module" for each in fixtures.values() for made in each)
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        mark = item.get_closest_marker("sampled")
        then = mark.kwargs.get("then", "slow") if mark is not None else ""
        if mark is not None and (then == "soak" or item.get_closest_marker("slow") is None):
            name = item.nodeid.partition("[")[0]
            step, first = (*mark.args, 0)[:2]
            if seen[name] % step != first:
                item.add_marker(pytest.mark.slow)
                item.add_marker(then)
            seen[name] += 1
    if torch.cuda.is_available():
        return
    of_gpus = [item for item in items if "gpu" in item.keywords]
    if "gpu" in config.option.markexpr:
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
    elif of_gpus:
        config.hook.pytest_deselected(items=of_gpus)
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Each engine that starts has Python collect garbage, for a second among the objects of all tests: these are left out.

    `freeze_heap` would thaw it; what that is for is tested in a process of its own.
    """
    for item in session.items:
        if "_nodeid" in vars(item):  # xdist 3.8 adds the group of a test to a name that pytest 9.2 does not read
            item._id = item._id.parse(item._nodeid)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    process.gc = SimpleNamespace(  # type: ignore[assignment]
        collect=gc.collect, freeze=gc.freeze, unfreeze=lambda: None, get_freeze_count=lambda: 1, set_threshold=gc.set_threshold
    )
    atexit.register(gc.unfreeze)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function in an event loop, which ends with its test."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The built-ins alone, whatever else is installed."""
    return create_registry(load_entry_points=False)


@pytest.fixture
def compiler() -> Compiler:
    """NVRTC, which the extra `dev` installs: without it no test would show that our CUDA C++ compiles."""
    found, support = find_compiler()
    assert found is not None, str(support)
    return found
