"""An engine in a child process: the same outputs, errors and ends as in a thread, and no child outlives its parent."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest

from headway import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams, StructuredOutputsParams
from headway.core.contract.errors import ConfigError, HeadwayError, ModelError, PromptError, UnsupportedError
from headway.core.contract.support import Reason
from headway.core.engine.data.step import OutputDelta
from headway.core.engine.loop import EngineLoop
from headway.engine_args import EngineArgs
from headway.hosting.driver import driver_of
from headway.hosting.process_host import EngineProcess
from headway.server.launch import Server
from headway.server.options import ServerOptions
from server_clients import plain, read

pytestmark = pytest.mark.xdist_group("engine process")  # one process has the model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
ENDED_BY_CTRL_C = 130, -signal.SIGINT
"""Exit codes of a command that Ctrl-C has ended, which shells show as the same."""


def start(llm: LLM, **options: object) -> AsyncLLM:
    """The same model in another process."""
    args = EngineArgs.of(str(llm.model.folder), kv_cache_memory="8MiB", num_threads=1, block_size=16, **options)
    return AsyncLLM.from_engine_args(args, own_process=True)


def process_of(made: AsyncLLM) -> psutil.Process:
    return psutil.Process(cast("EngineProcess", made.host).pid)


@pytest.fixture(scope="module")
def apart(llm: LLM) -> Iterator[AsyncLLM]:
    made = start(llm)
    process = process_of(made)
    yield made
    made.shutdown()
    assert not process.is_running()


@pytest.mark.slow
async def test_requests_with_random_ends_have_the_tokens_that_they_have_in_a_thread(llm: LLM, apart: AsyncLLM) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(1, 300) for _ in range(draw.randint(1, 24))] for _ in range(40)]
    wishes = [SamplingParams(temperature=0, max_tokens=draw.randint(1, 16), ignore_eos=True) for _ in prompts]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, wishes, use_tqdm=False)]
    mosts = [draw.choice([99, 99, draw.randint(1, 8)]) for _ in prompts]

    async def one(number: int) -> list[int]:
        found: list[int] = []
        stream = apart.generate(prompts[number], wishes[number])
        async for output in stream:
            found = output.outputs[0].token_ids
            if len(found) >= mosts[number]:
                await stream.aclose()
        return found

    all_of_them = await asyncio.gather(*map(one, range(len(prompts))))
    for expected, got, most in zip(alone, all_of_them, mosts, strict=True):
        assert got == expected[: len(got)]
        assert len(got) >= min(most, len(expected))
    assert (await idle(apart)).num_used_blocks == 0


async def idle(made: AsyncLLM):  # type: ignore[no-untyped-def]
    """Wait until no sequence runs, and return the engine's figures."""
    while True:
        found = await made.stats()
        if not found.num_running:
            return found
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY),
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["abc", "abd"])),
    ],
    ids=["logprobs", "draws", "choice"],
)
async def test_outputs_for_any_parameters_are_those_of_a_thread(llm: LLM, apart: AsyncLLM, params: SamplingParams) -> None:
    beside = AsyncLLM.from_llm(llm)
    expected, got = [(await read(made.generate([1, 2, 3], params)))[-1] for made in (beside, apart)]
    beside.shutdown()
    assert plain(got) == plain(expected)
    assert (got.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for own, other in zip(got.outputs, expected.outputs, strict=True):
        assert [list(each) for each in own.logprobs or ()] == [list(each) for each in other.logprobs or ()]


@pytest.mark.slow
async def test_errors_are_those_of_a_thread(apart: AsyncLLM) -> None:
    with pytest.raises(PromptError):
        await read(apart.generate([], GREEDY))
    with pytest.raises(ConfigError, match="no_such_processor"):
        await read(apart.generate([1], SamplingParams(logits_processors=["no_such_processor"], max_tokens=2)))
    with pytest.raises(ConfigError, match="another process"):
        await read(apart.generate([1], SamplingParams(logits_processors=[lambda ids, logits: logits], max_tokens=2)))
    with pytest.raises(ConfigError, match="another process"):
        await apart.query(lambda engine: engine.snapshot())
    with pytest.raises(ZeroDivisionError):
        await apart.run_task(_divide)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        await apart.run_task(_unsendable)
    with pytest.raises(RuntimeError, match=r"NobodyElses.*seven"):
        await apart.run_task(_raise_what_nobody_else_knows)
    assert (await read(apart.generate([1], GREEDY)))[-1].finished
    assert await apart.reset_prefix_cache()
    assert (await apart.stats()).num_cached_blocks == 0
    with pytest.raises(ConfigError, match="own_process"):
        _ = apart.engine
    assert apart.num_unfinished_requests == 0


def _divide(_: object) -> float:
    return 1 / 0


def _raise_what_nobody_else_knows(_: object) -> None:
    raise type("NobodyElses", (Exception,), {})("seven")


def _unsendable(_: object) -> object:
    return lambda: None


@pytest.mark.slow
async def test_sequence_counts_are_those_of_the_last_step(apart: AsyncLLM) -> None:
    await apart.query(_slow)
    stream = apart.generate([1, 2, 3], LONG)
    await anext(stream)
    assert (apart.num_running, apart.num_waiting) == (1, 0)
    await stream.aclose()
    await apart.query(_fast)
    assert (apart.num_running, apart.num_waiting) == (0, 0)
    await idle(apart)


@pytest.mark.slow
def test_an_unloadable_model_raises_the_error_of_a_thread(llm: LLM) -> None:
    args = EngineArgs.of(str(llm.model.folder), kv_cache_memory="1MiB", num_threads=1, attn_backend="triton")
    before = set(psutil.Process().children())
    with pytest.raises(UnsupportedError, match="CUDA GPU"):
        AsyncLLM.from_engine_args(args, own_process=True)
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("what", "need", 3, "hint"),
        PromptError("prompt", "a", "b"),
        UnsupportedError("x", [Reason("a", "b", "c")], "fix"),
        ModelError("text"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_errors_are_the_same_after_pickling(error: HeadwayError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.slow
async def test_a_process_that_is_killed_ends_requests_with_its_reason_and_this_process_lives(llm: LLM) -> None:
    made = start(llm)
    process = process_of(made)
    await made.query(_slow)
    stream = made.generate([1, 2, 3], LONG)
    await anext(stream)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await read(stream)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await read(made.generate([1], GREEDY))
    with pytest.raises(EngineDeadError):
        await made.stats()
    with pytest.raises(EngineDeadError):
        await made.check_health()
    assert (made.is_running, made.errored, made.num_unfinished_requests) == (False, True, 0)
    made.shutdown()
    assert not process.is_running()


@pytest.mark.slow
async def test_an_engine_that_is_killed_is_started_again_as_often_as_allowed(llm: LLM) -> None:
    make = partial(driver_of, EngineArgs.of(str(llm.model.folder), kv_cache_memory="8MiB", num_threads=1, block_size=16))
    host = EngineProcess(make, restarts=1)
    made = AsyncLLM.over(host)
    first = process_of(made)
    expected = plain((await read(made.generate([1, 2, 3], GREEDY)))[-1])
    await made.query(_slow)
    stream = made.generate([1, 2, 3], LONG)
    await anext(stream)
    first.kill()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await read(stream)
    with pytest.raises(EngineDeadError, match=r"being started again \(1 of 1 times\).*SIGKILL"):
        await made.check_health()
    with pytest.raises(EngineDeadError, match="being started again"):
        await read(made.generate([1, 2, 3], GREEDY))
    while host.is_restarting:
        await asyncio.sleep(0.05)
    await made.check_health()
    assert plain((await read(made.generate([1, 2, 3], GREEDY)))[-1]) == expected
    process_of(made).kill()
    while made.is_running:
        await asyncio.sleep(0.01)
    assert not host.is_restarting
    assert (made.errored, made.num_unfinished_requests) == (True, 0)
    made.shutdown()
    assert not first.is_running()
    assert not psutil.pid_exists(host.pid)


@pytest.mark.slow
async def test_health_tells_of_a_step_that_does_not_end(llm: LLM, apart: AsyncLLM) -> None:
    beside = AsyncLLM.from_llm(llm)
    for made in (apart, beside):
        await made.query(_slow_down)
        reading = asyncio.create_task(read(made.generate([1, 2, 3], replace(GREEDY, max_tokens=1))))
        await asyncio.sleep(0.4)
        with pytest.raises(EngineDeadError, match=r"stuck: no step has ended for \d+ s \(step_timeout=0.1\)"):
            await made.check_health(0.1)
        await made.check_health(60.0)
        await reading
        await made.query(_fast)
        await made.check_health(0.1)  # nothing is to be done
    beside.shutdown()


@pytest.mark.slow
def test_a_server_starts_its_engine_again_and_ends_with_the_last_one(llm: LLM) -> None:
    options = ["--port", "0", "--kv-cache-memory", "8MiB", "--num-threads", "1", "--restart-engine", "1"]
    command = [sys.executable, "-m", "headway", "serve", str(llm.model.folder), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = next(line.split()[2] for line in process.stderr if line.startswith("listening on"))
        body = {"prompt": [3], "max_tokens": 200, "n": 16, "ignore_eos": True, "stream": True}
        for left in (1, 0):
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:  # runs when it dies
                lines = answer.iter_lines()
                next(lines)
                psutil.Process(process.pid).children()[0].kill()
                assert "was killed by SIGKILL" in "".join(lines)
            if left:
                _wait_for(f"{url}/health", 503)
                _wait_for(f"{url}/health", 200)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, "Traceback" in said) == (1, False), said
    assert "the server has ended with its engine: the engine's process was killed by SIGKILL" in said


def _wait_for(url: str, status: int) -> None:
    for _ in range(600):
        if httpx.get(url).status_code == status:
            return
        time.sleep(0.05)
    raise AssertionError(f"{url} has not answered {status}")


def _slow_down(engine: EngineLoop) -> None:
    engine.step = partial(_step_slowly, engine.step, 0.6)  # type: ignore[method-assign]


def _slow(engine: EngineLoop) -> None:
    """Slow the engine down, so that no request ends before the test has acted."""
    engine.step = partial(_step_slowly, engine.step)  # type: ignore[method-assign]


def _step_slowly(step: Callable[[], list[OutputDelta]], seconds: float = 0.02) -> list[OutputDelta]:
    time.sleep(seconds)
    return step()


def _fast(engine: EngineLoop) -> None:
    del engine.step


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.soak), "os.kill(os.getpid(), 9)"], ids=["ends", "killed"])
def test_no_process_outlives_its_parent(llm: LLM, end: str) -> None:
    options = f"{str(llm.model.folder)!r}, kv_cache_memory='1MiB', num_threads=1"
    script = (
        "import os\nfrom headway import AsyncLLM\nfrom headway.engine_args import EngineArgs\n"
        f"made = AsyncLLM.from_engine_args(EngineArgs.of({options}), own_process=True)\n"  # without a main guard
        f"print(made.host.pid, flush=True)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == (-9 if end else 0), done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(20)


@pytest.mark.slow
def test_ctrl_c_ends_a_command_that_still_loads_without_a_traceback(llm: LLM) -> None:
    command = [sys.executable, "-m", "headway", "serve", str(llm.model.folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        time.sleep(2)
        children = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode in ENDED_BY_CTRL_C, "Traceback" in said) == (True, False), (process.returncode, said)
    assert psutil.wait_procs(children, 20)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT])
async def test_signals_to_a_group_leave_the_engine_to_its_parent(apart: AsyncLLM, number: signal.Signals) -> None:
    stream = apart.generate([1, 2, 3], LONG)
    await anext(stream)
    process_of(apart).send_signal(number)
    assert (await read(stream))[-1].outputs[0].finish_reason == "length"


@pytest.mark.slow
async def test_a_server_over_an_engine_process_answers_all_paths(
    apart: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "shutdown", lambda: None)  # it is the module's
    server = Server(apart, ServerOptions(served_model_names=("tiny",), profile_dir=tmp_path), port=0)
    asked = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
        assert (await http.post("/start_profile", json={"skip_steps": 1, "num_steps": 2})).status_code == 200
        answers = await asyncio.gather(*(http.post("/v1/completions", json=asked) for _ in range(3)))
        assert len({tuple(each.json()["choices"][0]["token_ids"]) for each in answers}) == 1
        profile = (await http.post("/stop_profile")).json()
        assert profile["output_tokens"] == 15
        assert os.path.exists(profile["trace"])
        state, table = (await http.get("/headway/state")).json(), (await http.get("/headway/table")).json()
        assert (state["running"], state["totals"]["num_output_tokens"] >= 15) == (0, True)
        assert (table["device"], [each["phase"] for each in table["phases"]]) == ("cpu", ["prefill", "extend", "decode"])
        found = (await http.get("/headway/explain", params={"phase": "decode", "batch": 2, "kv_len": 64})).json()
        assert found["backends"][0] == table["phases"][2]["backends"][0]
        assert "vllm:num_requests_running" in (await http.get("/metrics")).text
        texts = await http.post("/tokenize", json={"model": "tiny", "prompt": "a b"})
        assert texts.json()["count"] == len(texts.json()["tokens"])
    server.should_exit = True
    await serving
    assert apart.is_running
