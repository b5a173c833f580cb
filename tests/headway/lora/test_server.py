"""Adapters behind a server and on the command line: named as models, listed, loaded, unloaded, and refused in one line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.cli.options import adapters_of
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.server.options import ServerOptions
from sandbox import Result, assert_refused, run_headway
from server_thread import Running, running

PROMPT = "the quick brown fox"
BODY = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def served(adapted: LLM, adapters: list[LoRARequest]) -> Iterator[Running]:
    adapted.add_lora(adapters[0])
    options = ServerOptions(served_model_names=("tiny",), operator_paths=True, lora_modules=adapters[:1])
    with running(adapted, options) as found:
        yield found
    adapted.remove_lora(1)


def tokens(adapted: LLM, adapter: LoRARequest | None) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    return list(adapted.generate(PROMPT, params, use_tqdm=False, lora_request=adapter)[0].outputs[0].token_ids)


def test_requests_name_adapters_as_models(served: Running, adapted: LLM, adapters: list[LoRARequest]) -> None:
    expected = {"tiny": tokens(adapted, None), "a0": tokens(adapted, adapters[0])}
    with httpx.Client(base_url=served.url, timeout=30) as http:
        for name, ids in expected.items():
            answer = http.post("/v1/completions", json={**BODY, "model": name}).json()
            assert (answer["model"], answer["choices"][0]["token_ids"]) == (name, ids)
        assert http.post("/v1/completions", json=BODY).json()["choices"][0]["token_ids"] == expected["tiny"]
        listed = http.get("/v1/models").json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [("tiny", None), ("a0", "tiny")]
        assert http.get("/v1/models/a0").json()["root"] == adapters[0].lora_path
        refused = http.post("/v1/completions", json={**BODY, "model": "sql"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "model: this server has tiny, a0, not 'sql'"


def test_every_api_has_adapters(served: Running) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=served.url, timeout=30) as http:

        def texts(path: str, body: dict[str, Any]) -> list[str]:
            found = []
            for name in ("tiny", "a0"):
                answer = http.post(path, json={**body, "model": name})
                assert answer.status_code == 200, answer.text
                found.append(json.dumps(answer.json().get("choices") or answer.json().get("content") or answer.json()["output"]))
            return found

        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": PROMPT, "max_output_tokens": 8, "temperature": 0}),
        ):
            plain, adapted = texts(path, body)
            assert plain != adapted, path


def test_numbers_that_a_program_has_given_are_left_alone(served: Running, adapted: LLM, adapters: list[LoRARequest]) -> None:
    number = max(adapted.list_loras()) + 1
    adapted.add_lora(LoRARequest("the program's", number, adapters[3].lora_path))
    with httpx.Client(base_url=served.url, timeout=30) as http:
        for name in ("first", "second"):
            load = {"lora_name": name, "lora_path": adapters[1].lora_path}
            answer = http.post("/v1/load_lora_adapter", json=load)
            assert answer.status_code == 200, answer.text
        for name in ("first", "second"):
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    assert number in adapted.list_loras()
    adapted.remove_lora(number)


def test_adapters_are_loaded_and_unloaded_while_requests_run(served: Running, adapted: LLM, adapters: list[LoRARequest]) -> None:
    expected, again = tokens(adapted, adapters[1]), tokens(adapted, adapters[2])
    for each in adapters[1:3]:
        adapted.remove_lora(each.lora_int_id)
    with httpx.Client(base_url=served.url, timeout=30) as http, ThreadPoolExecutor(2) as threads:
        load = {"lora_name": "b", "lora_path": adapters[1].lora_path}
        answer = http.post("/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' added successfully.")
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny", "a0", "b"]
        assert http.post("/v1/completions", json={**BODY, "model": "b"}).json()["choices"][0]["token_ids"] == expected
        long = {**BODY, "model": "b", "max_tokens": 120}
        running_one = threads.submit(httpx.post, served.url + "/v1/completions", json=long, timeout=30)
        while not adapted.engine.scheduler.running:
            assert not running_one.done()
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'b' removed successfully.")
        assert http.post("/v1/completions", json={**BODY, "model": "b"}).status_code == 404
        finished = running_one.result().json()["choices"][0]
        assert (len(finished["token_ids"]), finished["token_ids"][:10]) == (120, expected)
        assert http.post("/v1/load_lora_adapter", json={**load, "lora_path": adapters[2].lora_path}).status_code == 200
        assert http.post("/v1/completions", json={**BODY, "model": "b"}).json()["choices"][0]["token_ids"] == again
        in_place = {**load, "load_inplace": True}
        answer = http.post("/v1/load_lora_adapter", json=in_place)
        assert answer.status_code == 200, answer.text
        assert http.post("/v1/completions", json={**BODY, "model": "b"}).json()["choices"][0]["token_ids"] == expected
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("load", {"lora_name": "a0", "lora_path": "x"}, 400, "lora_name: the adapter 'a0' has been loaded already; unload it"),
        ("load", {"lora_name": "tiny", "lora_path": "x"}, 400, "a name of its own, got 'tiny', which is the model's"),
        ("load", {"lora_name": "b"}, 400, "lora_path: field required"),
        ("load", {"lora_name": "b", "lora_path": ""}, 400, "lora_path: needs the adapter's folder, got none"),
        ("load", {"lora_name": "b", "lora_path": "/nowhere/at/all"}, 400, "adapter b: needs a folder that peft has written"),
        ("unload", {"lora_name": "b"}, 404, "lora_name: this server has no adapter 'b'"),
        ("unload", {}, 400, "lora_name: field required"),
    ],
)
def test_mistakes_are_told_in_openais_shape(served: Running, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = httpx.post(f"{served.url}/v1/{path}_lora_adapter", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_nobody_loads_adapters_unless_the_operator_lets_them(adapted: LLM, adapters: list[LoRARequest]) -> None:
    with running(adapted) as found:
        body = {"lora_name": "b", "lora_path": adapters[1].lora_path}
        for path in ("load", "unload"):
            answer = httpx.post(f"{found.url}/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == 404
            assert "--operator-paths" in answer.json()["error"]["message"]


def test_modules_in_vllms_two_forms() -> None:
    found = adapters_of(["sql=some/folder", '{"name": "chat", "path": "b", "base_model_name": "org/base"}'], True)
    assert found == [LoRARequest("sql", 1, "some/folder"), LoRARequest("chat", 2, "b", base_model_name="org/base")]


@pytest.mark.parametrize(
    ("texts", "enabled", "words"),
    [
        (["sql"], True, "--lora-modules: needs NAME=FOLDER or a JSON object"),
        (["=x"], True, "NAME=FOLDER"),
        (['{"name": "a"}'], True, "an object with name, path"),
        (['{"name": "a", "path": "b", "rank": 3}'], True, "an object with name, path"),
        (["{"], True, "NAME=FOLDER or a JSON object, got"),
        (["a=b", "a=c"], True, "a name for each adapter, got a twice"),
        (["a=b"], False, "--enable-lora beside it"),
    ],
)
def test_modules_that_cannot_work(texts: Sequence[str], enabled: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapters_of(texts, enabled)


@pytest.mark.parametrize("name", ["y" * 70_000, "y" * 257, "a\nb", "a\u202eb", "a\x00", " ", "", " a"])
def test_names_that_cannot_be_shown_are_refused_in_a_short_error(served: Running, adapters: list[LoRARequest], name: str) -> None:
    answer = httpx.post(
        f"{served.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": adapters[0].lora_path}, timeout=30
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
    assert len(answer.text) < 300
    assert answer.json()["error"]["message"].isprintable()
    with pytest.raises(ConfigError, match="^--served-model-name: needs"):
        ServerOptions(served_model_names=(name,))


def test_the_error_for_an_unknown_model_stays_short(served: Running) -> None:
    given = {f"{number}{'n' * 250}": LoRARequest(f"{number}{'n' * 250}", number, "/x") for number in range(10, 60)}
    served.service.adapters.update(given)
    try:
        answer = httpx.post(f"{served.url}/v1/completions", json={**BODY, "model": "m" * 70_000}, timeout=30)
    finally:
        for name in given:
            del served.service.adapters[name]
    assert answer.status_code == 404
    assert "42 more, not 'mmm" in answer.json()["error"]["message"]
    assert len(answer.text) < 1_000


Headway = Callable[..., Result]
ENGINE = ("--kv-cache-memory", "4MiB", "--num-threads", "1", "--no-autotune", "--max-lora-rank", "8")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def texts_of(llm: LLM, prompt: object, adapters: list[LoRARequest | None]) -> list[str]:
    found = [llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=each)[0].outputs[0].text for each in adapters]
    assert len(set(found)) == len(found), "adapters change the text"
    return found


def test_generate_and_chat_write_with_an_adapter(
    base: Path, adapters: list[LoRARequest], adapted: LLM, headway: Headway, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", str(base), *ENGINE, "--temperature", "0", "--max-tokens", "6", "--ignore-eos")
    (text,) = texts_of(adapted, adapted.chat_prompt("the fox"), [adapters[1]])
    for each in ((), ("--lora", adapters[1].lora_path)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n"))
        told = headway("chat", *options, *each)
        assert told.code == 0, told
        assert (told.out.strip() == text.strip()) is bool(each)
    written = headway("generate", "the fox", "--chat", *options, "--lora", adapters[1].lora_path)
    assert written.code == 0, written
    assert text.strip() in written.out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "batch"])
def test_an_adapter_that_cannot_be_served_is_refused_at_the_start(
    command: str, base: Path, headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n"))
    (tmp_path / "in.jsonl").write_text("{}\n")
    file = (str(tmp_path / "in.jsonl"), "--enable-lora", "--lora-modules", f"sql={tmp_path / 'nowhere'}")
    own = ("--lora", str(tmp_path / "nowhere")) if command == "chat" else file
    assert_refused(headway(command, "--model", str(base), *ENGINE, *own), "nowhere")
    if command == "batch":
        assert_refused(headway(command, "--model", str(base), *file[:1], "--lora-modules", "a=b"), "--enable-lora beside it")


@pytest.mark.slow
def test_lines_of_a_batch_name_adapters_as_their_model(
    base: Path, adapters: list[LoRARequest], adapted: LLM, tmp_path: Path
) -> None:
    texts = texts_of(adapted, "the fox", [None, adapters[0], adapters[1]])
    body = {"prompt": "the fox", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in ("tiny", "sql", "tone", "other")
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    modules = (f"sql={adapters[0].lora_path}", json.dumps({"name": "tone", "path": adapters[1].lora_path}))
    options = ("--model", str(base), "--served-model-name", "tiny", *ENGINE, "--enable-lora", "--max-loras", "2")
    named = [each for module in modules for each in ("--lora-modules", module)]
    done = run_headway("batch", "in.jsonl", *options, *named, cwd=tmp_path)
    assert done.code == 0, done
    found = [json.loads(each) for each in (tmp_path / "in.results.jsonl").read_text().splitlines()]
    assert [each["response"]["body"]["choices"][0]["text"] for each in found[:3]] == texts
    assert "this server has tiny, sql, tone" in json.dumps(found[3])
