"""Programs in the manner of vLLM's and SGLang's documentation run with nothing changed but the server's address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import openai
import pytest

from headway import LLM
from headway.pooling.assembly import AsyncPooling
from headway.server.launch import Server
from headway.server.options import ServerOptions
from sandbox import save_tiny_model
from server_thread import running
from tiny_encoders import SCORERS, embedder, save
from tiny_rewards import rewarding
from vllm_programs import ONLINE, header, programs

PROGRAMS = programs(ONLINE)
QUICK = ("chat_client", "sglang_generate", "api_server_client", "image_client", "embeddings_of_a_chat_model")
"""Programs of the everyday suite."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the programs' model is the tiny one."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / MODEL, positions=4096, chat=True)
    return folder


@pytest.fixture(scope="module")
def generating(models: Path) -> Iterator[str]:
    llm = LLM(str(models / MODEL), kv_cache_memory="8MiB", num_threads=1, enable_prompt_embeds=True)
    options = ServerOptions(served_model_names=(MODEL,), operator_paths=True, files_dir=models / "files")
    with running(llm, options) as found:
        yield found.url


def pooled(folder: Path) -> Iterator[str]:
    pooling = AsyncPooling(LLM(str(folder), autotune_budget=0, num_threads=1).pooling)
    server = Server(pooling, ServerOptions(served_model_names=("encoder",)), port=0)
    thread = Thread(target=server.run, name="server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    embedder("bert", folder := tmp_path_factory.mktemp("embedder"))
    yield from pooled(folder)


@pytest.fixture(scope="module")
def classifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kind, config = SCORERS["bert"]
    save(kind, config.__class__(**{**config.to_dict(), "num_labels": 2}), folder := tmp_path_factory.mktemp("classifier"))
    yield from pooled(folder)


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rewarding("reward", folder := tmp_path_factory.mktemp("rewards"))
    yield from pooled(folder)


SERVERS = {"": "generating", "embedder": "embedding", "classifier": "classifying", "rewards": "judging"}


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=() if each.stem in QUICK else pytest.mark.slow) for each in PROGRAMS],
    ids=lambda program: program.stem,
)
def test_program_runs_with_another_address(
    program: Path,
    models: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = program.read_text()
    if needed := header(text, "needs"):
        pytest.importorskip(needed)
    url = request.getfixturevalue(SERVERS[header(text, "model")])
    monkeypatch.chdir(models)
    text, count = re.subn(r"http://localhost:(8000|30000)", url, text)
    assert count
    code, names = compile(text, str(program), "exec", dont_inherit=True), {"__name__": "__main__"}
    refused = header(text, "refused")
    if not refused:
        exec(code, names)
        assert capsys.readouterr().out, "a program shows what it found"
        return
    with pytest.raises(openai.APIStatusError) as error:
        exec(code, names)
    message = error.value.response.json()["error"]["message"]
    assert refused in message
    assert "\n" not in message
