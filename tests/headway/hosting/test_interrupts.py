"""Ctrl-C of a command: it ends the process at once while modules load, and is a KeyboardInterrupt afterwards."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.bench.serve.client import Client
from headway.machine.process import handle_sigint, interrupt_command

COMMAND = """
import atexit, signal, sys
from headway.machine.process import handle_sigint, interrupt_command
atexit.register(print, "cleaned up")
with handle_sigint(interrupt_command, instead_of=signal.default_int_handler):
    try:
        import presses_ctrl_c
    except BaseException as error:
        print("the import saw", type(error))
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def run_command(folder: Path, module: str) -> tuple[int, str]:
    """Run COMMAND, which imports a module of this text; returns the exit code and all that it has printed."""
    (folder / "presses_ctrl_c.py").write_text(module)
    signals = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell in the background ignores it
    command = [sys.executable, "-c", f"{signals}import sys; sys.path.insert(0, {str(folder)!r})\n{COMMAND}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    print('caught')",
        "import signal, weakref\nclass A: pass\na = A()\nr = weakref.ref(a, lambda _: signal.raise_signal(signal.SIGINT))\ndel a",
    ],
    ids=["", "where errors are caught", "in a callback"],
)
def test_ctrl_c_during_an_import_ends_the_process_by_the_signal(tmp_path: Path, module: str) -> None:
    assert run_command(tmp_path, module) == (-signal.SIGINT, "")


def test_ctrl_c_after_the_imports_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    assert run_command(tmp_path, "") == (0, "interrupted\ncleaned up\n")


def test_a_benchmark_of_a_server_cancels_its_requests_by_ctrl_c() -> None:
    ended = []

    async def request() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(5)
        finally:
            ended.append(sys.exc_info()[0])

    with pytest.raises(KeyboardInterrupt), handle_sigint(interrupt_command, instead_of=signal.default_int_handler):
        Client.run(request())
    assert ended == [asyncio.CancelledError]


def test_a_command_in_the_background_goes_on_ignoring_ctrl_c() -> None:
    """A shell starts background commands with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handle_sigint(interrupt_command, instead_of=signal.default_int_handler):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
