"""System errors: one line that tells where, what and what to do; faults of Headway keep their traceback."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway import __main__ as entry
from headway.core.contract.errors import ConfigError
from headway.core.system.system_errors import escape_unencodable, open_closed_streams, system_error_text
from headway.core.system.text import shown
from headway.engine_args import EngineArgs


def an_os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/some/[b]file[/b]")


WORLD = {
    "disk full": (an_os_error(errno.ENOSPC), "'/some/[b]file[/b]': No space left on device (free some space"),
    "read-only": (an_os_error(errno.EROFS), "Read-only file system (name a place"),
    "unreadable": (an_os_error(errno.EACCES), "Permission denied (change its permissions"),
    "no folder": (an_os_error(errno.ENOTDIR), "Not a directory (a part of the path is a file"),
    "a folder": (an_os_error(errno.EISDIR), "Is a directory (name a file in the folder)"),
    "full device": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "standard output: No space left on device"),
    "memory": (MemoryError(), "memory: there is too little"),
    "torch's memory": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory: there is too little"),
    "ascii": (
        UnicodeEncodeError("ascii", "a\u00e9b", 1, 2, "ordinal not in range"),
        "cannot be written as ascii (set PYTHONUTF8=1)",
    ),
    "not utf-8": (UnicodeDecodeError("utf-8", b"ab\xff\xfe", 2, 3, "invalid start byte"), "not utf-8: 0xff 0xfe at byte 2"),
}


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail() -> None:
        raise error

    monkeypatch.setattr(entry, "run_command_line", fail)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", WORLD)
def test_a_system_error_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    error, words = WORLD[name]
    assert run(monkeypatch, error) == 2
    said = capfd.readouterr().err
    assert said.startswith("headway: error: ")
    assert said.count("\n") == 1
    assert words in said


def test_a_fault_of_headway_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for error in (KeyError("oops"), RuntimeError("shapes differ"), ZeroDivisionError()):
        assert system_error_text(error) is None
        assert run(monkeypatch, error) == 1
        said = capfd.readouterr().err
        assert "Traceback" in said
        assert "please report it" in said.splitlines()[-1]


def test_a_broken_pipe_exits_141(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == 141
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_under_typer_exits_141(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        try:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        except BrokenPipeError:
            sys.exit(1)  # as typer does

    monkeypatch.setattr(entry, "run_command_line", leave)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 141


def test_closed_standard_streams_become_null_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        assert sys.stdin.read() == ""
        assert not sys.stdout.isatty()
        print("nobody hears it", file=sys.stderr)


@pytest.mark.parametrize("columns", ["0", "1", "2", "3"])
def test_a_terminal_narrower_than_20_columns_counts_as_20(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    run(monkeypatch, SystemExit(0))
    assert os.environ["COLUMNS"] == "20"


def test_an_ascii_terminal_shows_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    escape_unencodable(stream, None)
    stream.write("caf\u00e9 \udcff")
    stream.flush()
    assert raw.getvalue() == rb"caf\xe9 \udcff"


def test_any_value_is_shown_in_one_short_line() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError("no")

    for value in (10**5000, "x\n" * 1000, Odd(), [1] * 10**4):
        assert "\n" not in shown(value)
        assert len(shown(value)) <= 130


OPTIONS: dict[str, list[Any]] = {
    "num_threads": [0, -1, 10**6, 2**63, 1.5, "2", True],
    "seed": [2**63, -(2**63) - 1, 1.5, "x", True],
    "max_model_len": [0, -1, 2**64, 10**30, float("nan"), 100.0, "x"],
    "kv_cache_memory": [0, -1, "0", "nan", "2 lots"],
    "tensor_parallel_size": [0, "2"],
    "max_num_seqs": [0, 2**21, 2**63],
    "autotune_budget": [-1, -0.5, float("nan"), "x", -float("inf")],
    "log_stats_interval": [0, -1, float("nan")],
    "gpu_memory_utilization": [0, -1, 2, float("nan"), True],
    "attn_backend": [0, [], b"sdpa"],
    "attn_options": [3, "sdpa", ["x"], {"sdpa": 3}],
    "enforce_eager": [1, "yes", []],
    "block_size": [12, 0, -16, 2**64, 16.0, True],
    "kv_cache_dtype": [[], {}, 3, "fp8_e9"],
    "plugins": [3],
    "crossover_table": [3, []],
    "registry": ["x", 3],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_another_kind_is_refused_by_name(option: str) -> None:
    for value in OPTIONS[option]:
        with pytest.raises(ConfigError) as refused:
            EngineArgs.of(**{option: value})
        said = str(refused.value)
        assert said.startswith(option)
        assert "\n" not in said
        assert len(said) < 300


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("{headway} backends > /dev/full", 2, "standard output: No space left on device"),
        ("{headway} backends >&- 2>&-", 0, ""),
        ("{headway} chat --load-format dummy --model qwen3-0.6b --num-threads 0 <&-", 2, "num_threads"),
        ("{headway} backends | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        ("PYTHONIOENCODING=ascii COLUMNS=0 {headway} backends", 0, ""),
        ("LC_ALL=C {headway} generate $'caf\\xe9' --load-format dummy --model qwen3-0.6b --num-threads 0", 2, "num_threads"),
    ],
)
def test_commands_end_with_the_right_exit_code_and_words(command: str, code: int, words: str, tmp_path: Path) -> None:
    line = command.format(headway=f"{sys.executable} -m headway")
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, timeout=120, env={**os.environ, "HEADWAY_PLUGINS": "none"}
    )
    said = done.stderr.decode(errors="replace")
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert words in " ".join(said.split())
    assert done.returncode == code, said


def test_a_removed_working_folder_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "argv", ["headway", "backends"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("headway: error: the working folder: needs one that exists")
