"""What is compared under one load: a server that a command starts, and the same engine without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headway.bench.serve.client import Client, RequestSender, ServerAnswer
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.child import how_it_ended

IN_PROCESS = "in-process"
_READY_SECONDS = 900.0
"""Seconds that a server may take to start: some compile for minutes."""
_STOP_SECONDS = 60.0
_NEEDS = "NAME=COMMAND with {port} in it, or NAME=in-process OPTIONS with the options of LLM as JSON"


@dataclass(frozen=True)
class ServerContender:
    """One of what is compared."""

    name: str
    command: str
    """A command line, read as a shell would split it, {port} where the port goes; or in-process, and LLM's options as JSON."""

    @classmethod
    def parse(cls, text: str) -> ServerContender:
        """From NAME=COMMAND.

        :raises ConfigError: a text of another form.
        """
        name, _, command = text.partition("=")
        made = cls(name, command)
        try:
            known = made.options is not None or "{port}" in "".join(shlex.split(command))
        except ValueError:  # no JSON, or a quotation without its end
            known = False
        if not name or not known:
            raise ConfigError("--server", _NEEDS, repr(text))
        return made

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments of LLM; None: it is a server.

        :raises ValueError: they are no JSON object.
        """
        first, _, rest = self.command.partition(" ")
        if first != IN_PROCESS:
            return None
        options = json.loads(rest)
        if not isinstance(options, dict):
            raise ValueError(rest)
        return options


@dataclass
class Started:
    """A contender that answers."""

    client: RequestSender
    model: str
    version: str
    """What it says of itself; empty where it says nothing."""


@asynccontextmanager
async def started(contender: ServerContender) -> AsyncIterator[Started]:
    """Start a contender, and stop it at the end.

    :raises HeadwayError: it does not start.
    """
    if contender.options is not None:
        async with _in_process(contender.options) as found:
            yield found
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = shlex.split(contender.command.replace("{port}", str(port)))
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise HeadwayError(f"{contender.name}: {command[0]} cannot be started: {error.strerror}") from None
        try:
            client = Client(f"http://127.0.0.1:{port}")
            await _ready(client, process, contender.name, log)
            yield Started(client, await client.model(), _version(await client.ask("/version")))
        finally:
            await asyncio.to_thread(_stop, process)


async def _ready(client: Client, process: subprocess.Popen[bytes], name: str, log: Any) -> None:
    until = time.monotonic() + _READY_SECONDS
    while (await client.ask("/health")).status != 200:
        if process.poll() is not None or time.monotonic() > until:
            how = f"it was not ready within {_READY_SECONDS:.0f} s"
            how = how if process.returncode is None else f"the server {how_it_ended(process.returncode)}"
            log.seek(0)
            words = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            raise HeadwayError(f"{name}: {how}: {words[-1].strip()[-300:] if words else 'it printed nothing'}")
        await asyncio.sleep(0.2)


def _version(answer: ServerAnswer) -> str:
    try:
        return str(json.loads(answer.text)["version"]) if answer.status == 200 else ""
    except (ValueError, KeyError, TypeError):  # a path that this server has for something else
        return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; then end whatever is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@asynccontextmanager
async def _in_process(options: dict[str, Any]) -> AsyncIterator[Started]:
    """AsyncLLM with its engine in a process of its own, as that of `headway serve`: what is left out is HTTP."""
    from headway.async_llm import AsyncLLM
    from headway.engine_args import EngineArgs

    args = EngineArgs.of(options.pop("model", "smollm2"), **options)
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args, own_process=True)
    try:
        yield Started(_Direct(llm), args.model, "")
    finally:
        await asyncio.to_thread(llm.shutdown)


class _Direct:
    """Requests to an AsyncLLM, as a client sends them to a server."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> ServerAnswer:
        """A completion of token ids. path: any."""
        from headway.core.sampling.params import RequestOutputKind, SamplingParams

        assert body is not None
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            ignore_eos=body["ignore_eos"],
            output_kind=RequestOutputKind.DELTA,
        )
        answer = ServerAnswer(time.perf_counter(), prompt_tokens=len(body["prompt"]))
        texts = []
        try:
            async for output in self._llm.generate({"prompt_token_ids": body["prompt"]}, params):
                answer.token_times.append(time.perf_counter())
                (choice,) = output.outputs
                texts.append(choice.text)
                answer.token_ids += choice.token_ids
        except HeadwayError as error:
            answer.error = str(error)
        answer.text = "".join(texts)
        answer.output_tokens = len(answer.token_ids)
        answer.ended = time.perf_counter()
        answer.status = 200
        return answer
