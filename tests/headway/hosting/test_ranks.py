"""Several ranks behind every host of an engine: a lost one is told of at once, and no interrupt leaves one behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread, Timer

import httpx
import pytest

from headway import LLM, AsyncLLM, EngineDeadError, SamplingParams, StructuredOutputsParams
from headway.bench.serve.client import Client
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.loop import EngineLoop
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.engine_args import EngineArgs
from headway.hosting import assembly
from headway.hosting.host import EngineThread
from headway.hosting.process_host import EngineProcess
from headway.hosting.rank_assembly import rank_devices
from headway.machine.process import handle_sigint, interrupt_command
from headway.server.launch import Server
from headway.server.options import ServerOptions
from ranked_model import assert_ended, is_alive, pids_of, ranked_driver, ranked_engine
from sandbox import save_tiny_model
from server_clients import read

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KILLED = r"^rank 1 of 2 failed .*: its process \d+ was killed by SIGKILL"


def ranks_of(made: AsyncLLM) -> list[int]:
    return asyncio.run(made.query(pids_of))


def wait_until_lost(made: AsyncLLM) -> None:
    until = time.monotonic() + 10
    while not made.errored:
        assert time.monotonic() < until, "nobody has noticed"
        time.sleep(0.01)


@pytest.mark.slow
def test_the_model_runs_once_all_ranks_know_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ran it before would wait in its sums for others, which wait for the choices."""
    order: list[str] = []
    run, tell = assembly.sampling_of, RankProcesses.choose
    monkeypatch.setattr(assembly, "sampling_of", lambda *given: (order.append("run"), run(*given))[1])
    monkeypatch.setattr(RankProcesses, "choose", lambda *given: (order.append("told"), tell(*given))[1])
    save_tiny_model(tmp_path)
    made = LLM(str(tmp_path), tensor_parallel_size=2, kv_cache_memory="8MiB", skip_tokenizer_init=True, num_threads=2)
    pids = pids_of(made.engine)
    del made
    gc.collect()
    assert_ended(pids)
    assert order == ["told", "run"]


@pytest.fixture(params=[pytest.param("thread", marks=pytest.mark.soak), "process"])
def made(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    make = partial(ranked_driver, 2)
    made = AsyncLLM.over(EngineThread(make()) if request.param == "thread" else EngineProcess(make))
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_ends_the_engine(made: AsyncLLM) -> None:
    pids = ranks_of(made)
    assert len(asyncio.run(read(made.generate([1, 2, 3], GREEDY)))[-1].outputs[0].token_ids) == 8
    os.kill(pids[0], signal.SIGKILL)
    wait_until_lost(made)
    with pytest.raises(EngineDeadError, match=KILLED):
        asyncio.run(read(made.generate([1], GREEDY)))
    assert_ended(pids)


@pytest.mark.slow
def test_ranks_end_with_their_host(made: AsyncLLM) -> None:
    pids = ranks_of(made)
    asyncio.run(read(made.generate([1, 2, 3], GREEDY)))
    made.shutdown()
    assert_ended(pids)
    assert not made.errored


@pytest.mark.slow
def test_a_rank_that_fails_at_its_start_fails_the_start_in_one_line() -> None:
    with pytest.raises(HeadwayError) as raised:
        EngineProcess(partial(ranked_driver, 2, fault="start"))
    assert re.fullmatch("rank 1 of 2 failed at its start: RuntimeError: no part of the model here; .*", str(raised.value))


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.soak), True])
def test_ranks_end_with_a_process_of_the_engine_that_is_killed(stopped: bool) -> None:
    host = EngineProcess(partial(ranked_driver, 2))
    made = AsyncLLM.over(host)
    pids = ranks_of(made)
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    os.kill(host.pid, signal.SIGKILL)
    wait_until_lost(made)
    if stopped:
        os.kill(pids[0], signal.SIGCONT)  # a process that is stopped does nothing, and so does not end
    assert_ended(pids)
    made.shutdown()


@pytest.mark.slow
def test_a_server_answers_503_when_a_rank_is_lost_and_200_when_the_engine_runs_again() -> None:
    made = AsyncLLM.over(EngineProcess(partial(ranked_driver, 2), restarts=1))
    server = Server(made, ServerOptions(served_model_names=("ranked",)), port=0)
    thread = Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        health = f"http://127.0.0.1:{server.port}/health"
        assert httpx.get(health).status_code == 200
        first = ranks_of(made)
        os.kill(first[0], signal.SIGKILL)
        wait_for(health, 503, 10)
        assert "was killed by SIGKILL" in httpx.get(health).text
        assert_ended(first)
        wait_for(health, 200, 60)
        second = ranks_of(made)
        os.kill(second[0], signal.SIGSTOP)
        thread.join(30)  # there is no other start
        assert not thread.is_alive()
        assert_ended(second)
    finally:
        server.should_exit = True
        thread.join(20)
        made.shutdown()


def wait_for(url: str, status: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while httpx.get(url).status_code != status:
        assert time.monotonic() < until, f"no {status}"
        time.sleep(0.02)


SCRIPT = """
import sys, time
from headway.core.engine.data.config import EngineConfig
from headway.core.sampling.params import SamplingParams
from ranked_model import pids_of, ranked_engine

engine = ranked_engine(2, EngineConfig(block_size=8, kv_cache_memory=2**20))
engine.add_request("0", engine.limits.checked([1, 2, 3], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)))
print(*pids_of(engine), flush=True)
while True:
    engine.step()
    if not engine.has_unfinished:
        engine.add_request("0", engine.limits.checked([1, 2, 3], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_ranks_end_with_a_program_that_a_signal_ends_in_a_step(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    command, environment = [sys.executable, str(tmp_path / "program.py")], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(map(is_alive, pids))
        time.sleep(0.3)
        process.send_signal(number)
        process.wait(10)
    assert_ended(pids)


WISHES = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True, n=2),
    SamplingParams(
        temperature=1, seed=5, top_p=0.9, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="(yes|no)+")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"speculate": "ngram"}, {"deterministic": True}], ids=str)
def test_an_llm_of_two_ranks_writes_what_one_of_one_writes(options: dict[str, object], tmp_path: Path) -> None:
    folder, written = save_tiny_model(tmp_path, chat=True), []
    for size in (1, 2):
        llm = LLM(str(folder), kv_cache_memory="8MiB", block_size=16, device="cpu", tensor_parallel_size=size, **options)
        outputs = llm.generate(["hello there", "abc abc abc", "maybe"], WISHES, use_tqdm=False)
        written.append([[each.token_ids for each in output.outputs] for output in outputs])
        pids = pids_of(llm.engine) if size > 1 else []
        del llm
        gc.collect()
        assert_ended(pids)
    assert written[0] == written[1]


@pytest.mark.slow
@pytest.mark.soak
def test_fifty_random_ends_of_ranks_under_load_are_clean_and_so_are_the_next_starts() -> None:
    draw, before = random.Random(0), set(os.listdir("/dev/shm"))
    for _ in range(50):
        engine = ranked_engine(size := draw.choice([2, 4]), EngineConfig(block_size=8, kv_cache_memory=2**20, max_num_seqs=8))
        pids, number = pids_of(engine), itertools.count()
        timer = Timer(draw.random(), os.kill, (draw.choice(pids), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])))
        timer.start()
        began = time.monotonic()
        with pytest.raises(ExecutorLostError, match=rf"^rank \d of {size} failed (in|after|before)"):
            load(engine, draw, number)
        assert time.monotonic() - began < 11
        assert_ended(pids)
        engine.executor.shutdown()
    assert set(os.listdir("/dev/shm")) <= before


def load(engine: EngineLoop, draw: random.Random, number: Iterator[int]) -> None:
    while True:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 12:
            prompt = [draw.randrange(512) for _ in range(draw.randint(1, 60))]
            params = SamplingParams(max_tokens=draw.randint(1, 30), seed=1, ignore_eos=True)
            engine.add_request(str(next(number)), engine.limits.checked(prompt, params))
        engine.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: needs a whole number of at least 1, got 0"),
        (
            {"tensor_parallel_size": 2, "kv_offload_size": "1GiB"},
            "tensor_parallel_size=2: needs a cache in the ranks' own memory",
        ),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device: needs a kind of device where tensor_parallel_size is 2"),
        (
            {"tensor_parallel_size": 4096, "device": "cpu"},
            r"tensor_parallel_size: needs at most \d+, the machine's cores, got 4096",
        ),
    ],
    ids=str,
)
def test_what_several_ranks_cannot_do_is_refused_before_any_is_started(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rank_devices(EngineArgs.of("no such model", **options))


def test_torchrun_is_refused_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"a process that torchrun has started \(WORLD_SIZE=2\) \(start it without torchrun"):
        rank_devices(EngineArgs.of("no such model", tensor_parallel_size=2, device="cpu"))


def test_more_ranks_than_gpus_are_refused_with_the_nearest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("headway.hosting.rank_assembly.resolve_device", lambda name: __import__("torch").device("cuda"))
    with pytest.raises(ConfigError, match=r"at most 3, the GPUs that torch sees, got 4 \(tensor_parallel_size=2\)"):
        rank_devices(EngineArgs.of("no such model", tensor_parallel_size=4))
    names = ["one GPU", "another GPU"]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: names[number])
    with pytest.raises(ConfigError, match="needs GPUs of one kind, got one GPU, another GPU"):
        rank_devices(EngineArgs.of("no such model", tensor_parallel_size=2))


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
