"""Invalid arguments of commands and errors of the system: each is one line, with the right exit code."""

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
from headway.bench.crossover.regret import RegretReport
from headway.bench.generate.workloads import parse_sizes
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, parse_case
from headway.core.select.request import Workload
from headway.core.system import files
from headway.core.system.files import read_text
from headway.core.system.json_files import write_json
from headway.core.system.system_errors import escape_unencodable, open_closed_streams, system_error_text
from headway.core.system.text import shown
from headway.engine_args import EngineArgs
from headway.tuning.measure.workloads import Geometry, build_case, make_work
from headway.tuning.table.files import read_table
from tables import a_cell, a_table

HUGE = "9" * 23
FAILED = "an edited table has no time anywhere"
REFUSED = {
    "of a list": (f"build vllm_paged --head-dim {HUGE}", "--head-dim: needs a whole number of at most 64 bits"),
    "a time that is no number": ("bench serve --timeout nan", "--timeout"),
    "an endless time": ("bench serve --burstiness 1e400", "--burstiness: needs a finite number, got inf"),
    "a host": ("bench serve --url http://[red]x[/red]", "--url: needs a URL such as"),
    "another machine's address": ("serve no/such/model --host 192.0.2.1", "--host and --port: needs an address of"),
    "pages in a list that is none": ("serve smollm2 --allowed-origins [", "needs origins, or a list of them in JSON"),
    "two models": (
        "serve --model smollm2 --served-model-name a b",
        "MODEL and --model: needs one model, got 'b' and 'smollm2' (--served-model-name is repeated",
    ),
    "a page with a path": ('serve smollm2 --allowed-origins ["http://a/b"]', "--allowed-origins: needs"),
    "a proposer": ("serve smollm2 --speculate nonsense", "speculate: needs one of ngram, suffix, got 'nonsense'"),
    "no limit": ("bench serve --goodput ttft:nan", "--goodput: needs limits"),
    "a limit that is no number": ("bench crossover --level engine --cell-limit nan", "--cell-limit: needs a time such as 120s"),
    "a key that no header carries": ("serve --api-key a\x07", "--api-key: needs a text that a header carries"),
    "a file for profiles": ("serve --profile-dir /etc/passwd", "--profile-dir: needs a folder, got /etc/passwd, which is none"),
}


def run(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["headway", *command.split()])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return int(ended.value.code or 0), " ".join(capfd.readouterr().err.split())


def test_an_address_is_refused_before_a_servers_libraries_are_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "headway.server.launch", None)
    assert "--host and --port" in run("serve --host 192.0.2.1", monkeypatch, capfd)[1]
    assert "its libraries" in run("serve --port 0", monkeypatch, capfd)[1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--files-dir /proc/nothing", "--files-dir: needs a folder that this user may write to"),
        (
            "--otlp-traces-endpoint http://127.0.0.1:1",
            "$OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: needs grpc or http/protobuf, got 'smoke'",
        ),
    ],
)
def test_what_a_server_opens_later_is_checked_before_its_model_is_loaded(
    option: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    monkeypatch.setitem(sys.modules, "headway.server.launch", None)  # which comes before the model
    code, said = run(f"serve smollm2 --port 0 {option}", monkeypatch, capfd)
    assert (code, words in said) == (2, True), said


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_number_or_address_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command, words = REFUSED[name]
    code, said = run(command, monkeypatch, capfd)
    assert code == 2, said
    assert words in said
    assert "Traceback" not in said


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "")
    code, said = run("serve", monkeypatch, capfd)
    assert (code, "--api-key: needs a text that a header carries, got an empty one" in said) == (2, True)


@pytest.mark.parametrize("option", ["--attn-backend draft=sdpa", "--kv-cache-dtype draft=fp8_e4m3"])
def test_a_plan_without_a_draft_model_refuses_its_kind(
    option: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = run(f"backends explain --geometry 8/2/64 {option}", monkeypatch, capfd)
    assert (code, "needs kinds of the model's own layers, got draft" in said) == (2, True)


def test_a_batch_size_over_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--batch-size: needs whole numbers from 1 to 1,048,576"):
        parse_sizes("--batch-size", "1,1000000000")


@pytest.mark.parametrize("text", ["0q1s8", "1048577q1s8", "600000q1s8_600000q1s9", "1q1s9999999999k"])
def test_a_case_larger_than_any_machine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="case: needs"):
        parse_case(text)


def test_a_case_larger_than_free_memory_is_refused_before_it_is_allocated() -> None:
    layer = AttentionSpec(2, 1, 64, 0.125)
    with pytest.raises(MemoryError, match="GiB of memory are needed"):
        make_case([(1, 10**12)], layer, NHD, 16, lambda *_: None)
    with pytest.raises(MemoryError, match="GiB of memory are needed"):
        build_case(make_work("decode", "1q1s99999999k", Geometry(2, 1, 64), layer), NHD, 16, seed=0)


def test_a_table_is_not_overwritten_by_its_picture_or_an_empty_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    write_json(a_table(a_cell()), path)
    before = path.read_bytes()
    too_long = f"bench crossover --geometry 2/1/16 --backends sdpa.math --phases decode --input-lens 10000000000 --output {path}"
    for command, words in (
        (f"table plot {path} {path}", "needs another file than the table's"),
        (f"table show {path} --export {path}", "needs another file than the table's"),
        (f"bench crossover --output {path} --export {path}", "needs another file than the table's"),
        (too_long, "needs a point that this machine's memory holds"),
    ):
        code, said = run(command, monkeypatch, capfd)
        assert code == 2, said
        assert words in said
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["9999999999999x5+5", "1x99999999999+9", "1x1+99999999999"])
def test_an_impossible_workload_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="workload: needs"):
        Workload.parse(text)


@pytest.mark.timeout(20)
def test_text_is_read_from_files_and_pipes_and_not_from_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT", 1 << 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_text(pipe) == ""  # nobody writes into it
    reading, writing = os.pipe()
    os.write(writing, "caf\u00e9".encode())
    os.close(writing)
    assert read_text(Path(f"/dev/fd/{reading}")) == "caf\u00e9"
    os.close(reading)
    with pytest.raises(OSError, match="not a file"):
        read_text(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)
    with pytest.raises(OSError, match="larger than 1 MiB"):
        read_text(large)
    for path in (pipe, Path("/dev/zero"), large):
        with pytest.raises(ConfigError, match="needs a file of schema"):
            read_table(path)
        with pytest.raises(ConfigError, match=r"result file.*: needs a file that headway table regret --output wrote"):
            RegretReport.read(path)


@pytest.mark.slow
def test_a_table_without_times_is_shown_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [a_cell(None, kernel=name, status="error", reason=FAILED) for name in ("sdpa", "sdpa.math")]
    write_json(a_table(*cells), tmp_path / "failed.json")
    write_json(a_table(cells=[]), tmp_path / "empty.json")
    for name in ("failed", "empty"):
        code, said = run(f"backends explain --crossover-table {name}.json --batch 1 --len 64", monkeypatch, capfd)
        assert code in (0, 2), said
        assert "Traceback" not in said
        assert run(f"table show {name}.json", monkeypatch, capfd)[0] == 0


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


def run_in_world(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail() -> None:
        raise error

    monkeypatch.setattr(entry, "run_command_line", fail)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", WORLD)
def test_a_system_error_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    error, words = WORLD[name]
    assert run_in_world(monkeypatch, error) == 2
    said = capfd.readouterr().err
    assert said.startswith("headway: error: ")
    assert said.count("\n") == 1
    assert words in said


def test_a_fault_of_headway_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for error in (KeyError("oops"), RuntimeError("shapes differ"), ZeroDivisionError()):
        assert system_error_text(error) is None
        assert run_in_world(monkeypatch, error) == 1
        said = capfd.readouterr().err
        assert "Traceback" in said
        assert "please report it" in said.splitlines()[-1]


def test_a_broken_pipe_exits_141(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_world(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == 141
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
    run_in_world(monkeypatch, SystemExit(0))
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
    "gpu_memory_utilization": [0, -1, 2, float("nan"), True, "0.9"],
    "cudagraph_capture_sizes": [8, [], [512]],
    "workload": ["nonsense"],
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
