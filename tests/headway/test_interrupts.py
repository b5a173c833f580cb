"""Ctrl-C of a command: never lost, never another error, and no import torn by it."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from headway.bench.serve.client import Client
from headway.interrupts import never_lost

PRESSES = """
import os, signal, time
ended = False
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.2)
ended = True
"""


@pytest.fixture
def presses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that presses Ctrl-C while it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "presses_ctrl_c", raising=False)
    importlib.invalidate_caches()
    return "presses_ctrl_c"


def test_ctrl_c_waits_for_the_end_of_an_import(presses: str, tmp_path: Path) -> None:
    (tmp_path / f"{presses}.py").write_text(PRESSES)
    begun = time.perf_counter()

    def work() -> None:
        with never_lost():
            importlib.import_module(presses)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.perf_counter() - begun < 3, "it wakes what waits"
    assert sys.modules[presses].ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_does_not_wait_for_an_import_that_hangs(presses: str, tmp_path: Path) -> None:
    (tmp_path / f"{presses}.py").write_text("import time\ntime.sleep(20)\n")
    begun = time.perf_counter()
    strokes = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.3, 0.9)]
    for each in strokes:
        each.start()
    with pytest.raises(KeyboardInterrupt), never_lost():
        importlib.import_module(presses)
    assert 0.8 < time.perf_counter() - begun < 10
    time.sleep(0.2)  # the timer of the first is cancelled


def test_without_an_import_ctrl_c_comes_at_once() -> None:
    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), never_lost():
        signal.raise_signal(signal.SIGINT)
    assert time.perf_counter() - begun < 1


def test_an_error_that_comes_of_a_dropped_interrupt_is_the_interrupt() -> None:
    """pydantic's validators are such: one that was made while Ctrl-C came refuses everything."""

    class Watched:
        pass

    def work() -> None:
        with never_lost():
            watched = Watched()
            reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
            del watched
            raise ValueError(reference)

    with pytest.raises(KeyboardInterrupt) as ended:
        work()
    assert isinstance(ended.value.__cause__, ValueError)
    time.sleep(0.2)  # it is not raised again


def test_a_benchmark_of_a_server_ends_its_requests_by_ctrl_c() -> None:
    ended = []

    async def request() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(5)
        finally:
            ended.append(sys.exc_info()[0])

    with pytest.raises(KeyboardInterrupt), never_lost():
        Client.run(request())
    assert ended == [asyncio.CancelledError]


def test_a_command_in_the_background_goes_on_ignoring_ctrl_c() -> None:
    """As shells start it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with never_lost():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
