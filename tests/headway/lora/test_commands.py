"""Adapters of the commands that start an engine of their own: generate, chat and batch."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.contract.adapters import LoRARequest
from sandbox import Result, assert_refused, run_headway

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
