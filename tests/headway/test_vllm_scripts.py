"""Scripts and clients in the manner of vLLM's documentation run with nothing changed but the import or the address."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import openai
import pytest

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.server.options import ServerOptions
from sandbox import save_tiny_model
from server_thread import pooled, running
from tiny_adapters import save_adapter
from tiny_encoders import classifier, embedder, rewarding
from vllm_programs import FOLDER, ONLINE, PAGE, header, page, programs

SCRIPTS = programs(FOLDER)
QUICK = ("basic", "chat", "clone_params", "llm_engine", "logits_processor", "stop_strings")
"""Programs of the everyday suite."""
MODELS = ("facebook/opt-125m", "Qwen/Qwen2.5-0.5B-Instruct")
REWARDING_MODELS = {"reward": "Qwen/Qwen2.5-Math-RM-72B", "process reward": "Qwen/Qwen2.5-Math-PRM-7B", "bert": "names"}
"""Tiny models that say something of each token -> where the programs look for them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the programs' models are: those that generate are the tiny one."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tiny", positions=512, chat=True)
    save_adapter(folder / "adapter", folder / "tiny", rank=8)
    for name in MODELS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "tiny")
    classifier(folder / "classifier", 2)
    for name, place in REWARDING_MODELS.items():
        rewarding(name, folder / place)
    return folder


def of_headway(text: str) -> str:
    """A program with nothing changed but what it imports from."""
    text, count = re.subn(r"^from vllm\b", "from headway.compat.vllm", text, flags=re.MULTILINE)
    text, more = re.subn(r"^import vllm$", "import headway.compat.vllm as vllm", text, flags=re.MULTILINE)
    assert count + more
    return text


def run_program(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = script.read_text()
    monkeypatch.setattr(sys, "argv", [script.name, *header(text, "argv").split()])
    names = {"__name__": f"program_{script.stem}" if "__main__" not in text else "__main__"}
    exec(compile(of_headway(text), str(script), "exec", dont_inherit=True), names)


RUNNING = [script for script in SCRIPTS if not header(script.read_text(), "refused")]
REFUSED = [script for script in SCRIPTS if script not in RUNNING]


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=pytest.mark.slow if script.stem not in QUICK else ()) for script in RUNNING],
    ids=lambda script: script.stem,
)
def test_program_runs_with_headways_import(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    if "structured" in script.stem or "guided" in script.stem:
        pytest.importorskip("llguidance")
    monkeypatch.chdir(models)
    run_program(script, monkeypatch)
    assert capsys.readouterr().out, "a program shows what it found"


def test_the_page_lists_the_programs() -> None:
    assert all(header(script.read_text(), "shows") for script in SCRIPTS)
    assert PAGE.read_text() == page(), "python docs/_tools/vllm_programs.py --write"


@pytest.mark.slow
@pytest.mark.parametrize("script", REFUSED, ids=lambda script: script.stem)
def test_program_that_cannot_run_is_refused_in_one_line(models: Path, monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
    monkeypatch.chdir(models)
    with pytest.raises((ImportError, ValueError, AttributeError, HeadwayError)) as error:
        run_program(script, monkeypatch)
    assert header(script.read_text(), "refused") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def llm(models: Path) -> LLM:
    return LLM(str(models / "tiny"), kv_cache_memory="1MiB", num_threads=1)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"lora_request": "adapter"}, "lora_request: needs a LoRARequest"),
        ({"prompt_adapter_request": "x"}, "prompt_adapter_request: needs an option of LLM.generate.*by lora_request"),
        ({"priority": [1]}, "priority: needs 0, because .*first come, first served.*scheduling_policy"),
        ({"params": SamplingParams()}, "params: needs .*it is called sampling_params"),
        ({"use_tqmd": True}, "use_tqmd: needs .*did you mean use_tqdm?"),
    ],
    ids=str,
)
def test_missing_vllm_keyword_is_refused_with_the_nearest(llm: LLM, keywords: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.generate("the", **keywords)
    assert not llm.engine.has_unfinished


def test_missing_vllm_attribute_names_the_nearest(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'enqueue'.*llm_engine has add_request and step"):
        llm.enqueue  # noqa: B018
    assert not hasattr(llm, "update_weights")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("use_beam_search", "LLM.beam_search"),
        ("max_new_tokens", "max_tokens"),
        ("repetition_penality", "did you mean repetition_penalty?"),
    ],
)
def test_an_unknown_parameter_of_sampling_gets_the_nearest_of_ours(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: needs an option of SamplingParams, got '{name}'.*{re.escape(words)}"):
        SamplingParams(**{name: 1})


PROGRAMS = programs(ONLINE)
QUICK_SERVER = ("chat_client", "sglang_generate", "api_server_client", "image_client", "embeddings_of_a_chat_model")
"""Programs of the everyday suite."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(scope="module")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the programs' model is the tiny one."""
    folder = tmp_path_factory.mktemp("served_models")
    save_tiny_model(folder / MODEL, positions=4096, chat=True)
    return folder


@pytest.fixture(scope="module")
def generating(served_models: Path) -> Iterator[str]:
    llm = LLM(str(served_models / MODEL), kv_cache_memory="8MiB", num_threads=1, enable_prompt_embeds=True)
    options = ServerOptions(served_model_names=(MODEL,), operator_paths=True, files_dir=served_models / "files")
    with running(llm, options) as found:
        yield found.url


def served_from(save: Callable[[Path], object], folder: Path) -> Iterator[str]:
    save(folder)
    with pooled(LLM(str(folder), autotune_budget=0, num_threads=1), "encoder") as (url, _):
        yield url


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served_from(partial(embedder, "bert"), tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def classifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served_from(partial(classifier, num_labels=2), tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served_from(partial(rewarding, "reward"), tmp_path_factory.mktemp("rewards"))


SERVERS = {"": "generating", "embedder": "embedding", "classifier": "classifying", "rewards": "judging"}


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=() if each.stem in QUICK_SERVER else pytest.mark.slow) for each in PROGRAMS],
    ids=lambda program: program.stem,
)
def test_program_runs_with_another_address(
    program: Path,
    served_models: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = program.read_text()
    if needed := header(text, "needs"):
        pytest.importorskip(needed)
    url = request.getfixturevalue(SERVERS[header(text, "model")])
    monkeypatch.chdir(served_models)
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
