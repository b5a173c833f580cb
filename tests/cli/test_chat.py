"""`headway chat`, through a pipe and in a terminal, and the flags that it shares with `headway generate`."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from sandbox import Result, assert_refused, save_tiny_model

Headway = Callable[..., Result]
OPTIONS = ("--kv-cache-memory", "8MiB", "--num-threads", "1", "--temperature", "0", "--ignore-eos", "--no-autotune")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("chatty"), positions=4096, chat=True)


@pytest.fixture
def chat(headway: Headway, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> Headway:
    """`headway chat` with lines on stdin: (lines, options) -> what it left behind."""

    def run(lines: list[str], *options: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return headway("chat", "--model", str(chatty), *OPTIONS, *options)

    return run


def test_piped_lines_are_messages_of_one_conversation_until_reset(chat: Headway) -> None:
    result = chat(["the fox", "the dog", "/reset", "the fox", "", "/nothing", "/stats", "/exit", "the cat"], "--max-tokens", "8")
    assert result.code == 0, result
    alone, dog = (chat([line], "--max-tokens", "8").out for line in ("the fox", "the dog"))
    assert result.out.startswith(alone)
    assert result.out.endswith(alone)
    second = result.out.removeprefix(alone).removesuffix(alone)
    assert second
    assert second != dog, "the model sees what was said before"
    assert "no such command: /nothing" in result.err
    assert "24 tokens in" in result.err
    found = re.search(r"(\d+) tokens, (\d+) of them \(\d+%\) found in the cache", result.err)
    assert int(found[2]) > 0.4 * int(found[1]), "the conversation so far is in the cache"
    assert "attention  prefill=" in result.err
    assert result.err.count("tokens/s (8 tokens, cut off; first after ") == 3
    assert "extend: sdpa" in result.err, "the second message follows a cached prefix"
    assert "Traceback" not in result.err


def test_what_the_system_says_comes_first_and_a_seed_repeats(chat: Headway) -> None:
    options = ("--max-tokens", "8", "--temperature", "2", "--seed", "3")
    plain, told, again = (
        chat(["the fox"], *options),
        chat(["the fox"], *options, "--system", "be quick"),
        chat(["the fox"], *options),
    )
    assert plain.out == again.out != told.out


def test_too_long_message_is_refused_and_the_chat_goes_on(chat: Headway) -> None:
    result = chat(["the fox " * 4000, "the fox", "/stats"], "--max-tokens", "4", "--stats")
    assert result.code == 0, result
    assert len(result.out.splitlines()) == 1
    assert "headway: prompt 0: needs at most" in result.err
    lines = [line for line in result.err.splitlines() if " tok/s | " in line]
    assert lines
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves_chat(chatty: Path) -> None:
    arguments = ["-m", "headway", "chat", "--model", str(chatty), *OPTIONS, "--max-tokens", "4000", "--stats"]
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    termios.tcsetwinsize(terminal, (24, 100))
    seen, read = b"", 0

    def wait_for(words: bytes, pressed: bytes = b"") -> None:
        """Read on until the words have come, after those of the last call. pressed: meanwhile, again and again."""
        nonlocal seen, read
        deadline = time.monotonic() + 60
        while words not in seen[read:]:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 65536)
            elif pressed:
                os.write(terminal, pressed)
        read = seen.index(words, read) + len(words)

    try:
        wait_for(b"> ")
        wait_for(b"Ctrl-D or /exit ends the chat", b"\x03")  # once more, where it comes just before readline listens
        os.write(terminal, b"the fox\n")
        wait_for(b" tok/s | ")
        os.write(terminal, b"\x03")
        wait_for(b"(stopped)")
        os.write(terminal, b"/stats\n")
        wait_for(b"0 running, 0 waiting")
        wait_for(b"> ")
        os.write(terminal, b"\x04")
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:  # the other side is closed
                    time.sleep(0.1)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert b"Traceback" not in seen
    (line,) = set(re.findall(rb"\x1b\[24;1H\x1b\[2K(run 1[^\x1b]*)", seen)[:1])
    assert len(line) <= 80
    assert seen.rindex(b"\x1b[1;23r") < seen.rindex(b"\x1b[r"), "the terminal scrolls all its rows again"


def test_bad_sampling_is_refused_before_a_model_is_loaded(headway: Headway, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    bad = {
        ("--presence-penalty", "3"): ("presence_penalty", "from -2 to 2", "got 3.0"),
        ("--repetition-penalty", "0"): ("repetition_penalty", "above 0", "got 0.0"),
        ("--json-schema", str(tmp_path / "none.json")): ("--json-schema", "a file that can be read", "No such file"),
        ("--json-schema", str(tmp_path / "bad.json")): ("structured_outputs.json", "needs JSON"),
        ("--regex", "a", "--choice", "b"): ("--choice", "one form of the text alone", "--regex as well"),
        ("--choice", ""): ("choice", "not empty"),
    }
    for arguments, words in bad.items():
        for command in (["generate", "hello"], ["chat"]):
            assert_refused(headway(*command, "--model", "/nowhere", *arguments), *words)
    assert_refused(headway("generate", "hello", "--model", "/nowhere", "--n", "0"), "n:", "from 1 to")


@pytest.mark.parametrize("recommended", [{"temperature": 0.3, "top_k": 7}, {}], ids=["recommended", "nothing"])
def test_both_commands_sample_as_the_model_recommends(
    headway: Headway, chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recommended: dict[str, float]
) -> None:
    folder = Path(shutil.copytree(chatty, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    used: list[SamplingParams] = []
    stream = LLM.stream

    def noting(self: LLM, prompt: Any, params: SamplingParams, **more: Any) -> Any:
        used.append(params)
        return stream(self, prompt, params, **more)

    monkeypatch.setattr(LLM, "stream", noting)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n"))
    options = ("--model", str(folder), "--kv-cache-memory", "8MiB", "--num-threads", "1", "--no-autotune", "--max-tokens", "2")
    answers = [headway(*command, *options) for command in (["chat"], ["generate", "--chat", "the fox"])]
    plain = headway("generate", "the fox", *options)
    assert [each.code for each in (*answers, plain)] == [0, 0, 0], (answers, plain)
    assert used[:2] == [SamplingParams(max_tokens=2, **recommended)] * 2
    assert used[2] == SamplingParams(max_tokens=2, temperature=0)
    hint = "PROMPT is continued as plain text; --chat answers it"
    assert [hint in each.err for each in (*answers, plain)] == [False, False, True]
    assert hint not in headway("generate", "the fox", *options, "--json").err


def test_generate_takes_the_same_flags(headway: Headway, chatty: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    model = ("--model", str(chatty), *(each for each in OPTIONS if each != "--ignore-eos"))
    chosen = headway("generate", "the fox", *model, "--choice", "red", "--choice", "green")
    assert chosen.out.strip() in ("red", "green"), chosen
    written = headway("generate", "the fox", *model, "--json-schema", str(tmp_path / "schema.json"), "--max-tokens", "60")
    assert json.loads(written.out)["a"] in ("x", "y")
    drawn = ("--temperature", "1", "--seed", "1", "--max-tokens", "4", "--logprobs", "2")
    several = headway("generate", "the fox", *model, "--n", "2", *drawn, "--stats")
    assert several.out.startswith("[0] ")
    assert several.out.count("\n[1] ") == 1
    assert several.err.count("(rank ") == 8
    assert "sequences  0 running" in several.err
    record = json.loads(headway("generate", "the fox", *model, "--n", "2", "--max-tokens", "3", "--logprobs", "1", "--json").out)
    assert [len(each["token_ids"]) for each in record["completions"]] == [3, 3]
    assert len(record["completions"][0]["logprobs"]) == 3
