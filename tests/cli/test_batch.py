"""`headway batch`: a file of requests without a server, stopped and repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.server.openai.batches.store import Journal
from sandbox import Result, assert_refused, run_headway, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), chat=True)


def lines(count: int) -> list[str]:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 3, "temperature": 0}
    made = [{"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} for number in range(count)]
    return [json.dumps(each) for each in made]


@pytest.mark.slow
def test_a_file_is_answered_and_a_stopped_run_goes_on(folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines(5), "{broken"]))
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:32]
    with Journal(tmp_path / "out.jsonl.journal", name) as journal:  # what a run that was killed has left
        journal.add(2, "r1", {"status_code": 200, "body": {"id": "before"}})
    options = ("--model", str(folder), "--served-model-name", "tiny", "--kv-cache-memory", "8MiB", "--no-autotune")
    done = run_headway("batch", "-i", str(source), "-o", str(output), *options, cwd=tmp_path)
    assert done.code == 0, done
    assert "out.jsonl: 5 answered, 1 failed, 1 of them by an earlier run" in done.err
    found = [json.loads(each) for each in output.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [*(f"r{number}" for number in range(5)), None]
    assert found[1]["response"]["body"] == {"id": "before"}
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found[5]["error"]["code"] == "invalid_json_line"
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_mistakes_are_one_line(headway: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(headway("batch"), "headway batch", "one file")
    (tmp_path / "in.jsonl").write_text("{}\n")
    with Journal(tmp_path / "in.results.jsonl.journal", "another") as journal:
        journal.add(1, "a", None, {"code": "x", "message": "y"})
    assert_refused(headway("batch", "in.jsonl", "--model", "nowhere"), "answers to another")
