"""A look at the engine's steps while it serves: asked for by the load generator, told in a table, and written as a trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headway import LLM
from headway.bench.serve.results import ServeReport
from headway.core.engine.data.stats import PARTS, no_ranges
from headway.server.options import ServerOptions
from sandbox import Result
from server_thread import running

LOAD = ("--modes", "offline", "--num-requests", "3", "--mix", "9/12", "--vocab-size", "200", "--profile")


def test_a_load_tells_where_the_time_of_steps_goes(llm: LLM, headway: Callable[..., Result], tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    with running(llm, ServerOptions(profile_dir=tmp_path / "traces")) as served:
        options = "--url", served.url, *LOAD, "--output", str(report)
        result = headway("bench", "serve", *options, "--profile-skip", "3", "--profile-steps", "4")
        assert result.code == 0, result
        short = headway("bench", "serve", *options)
        assert "no trace" in short.out
        assert httpx.post(f"{served.url}/stop_profile").status_code == 409
    assert llm.engine.clock.enter_range is no_ranges
    (trace,) = (tmp_path / "traces").iterdir()
    with gzip.open(trace) as file:
        ranges = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert {part: ranges[f"headway.{part}"] >= 4 for part in PARTS} == dict.fromkeys(PARTS, True)
    profile = ServeReport.read(report).cells[0].profile
    assert (profile.traced_steps, profile.trace) == (0, None)
    assert profile.output_tokens == 3 * 12
    assert sum(profile.parts_ms.values()) == pytest.approx(profile.step_ms, rel=1e-3)


def test_profile_is_refused_without_a_folder(llm: LLM, headway: Callable[..., Result]) -> None:
    with running(llm) as served:
        for path in ("/start_profile", "/stop_profile"):
            answer = httpx.post(f"{served.url}{path}")
            assert (answer.status_code, "--profile-dir" in answer.text) == (404, True)
        result = headway("bench", "serve", "--url", served.url, *LOAD)
        assert (result.code, "headway serve --profile-dir FOLDER" in result.err) == (2, True)


def test_one_profile_at_a_time(llm: LLM, tmp_path: Path) -> None:
    with running(llm, ServerOptions(profile_dir=tmp_path)) as served, httpx.Client(base_url=served.url, timeout=30) as http:
        assert http.post("/start_profile", json={"num_steps": 0}).status_code == 400
        assert http.post("/start_profile").status_code == 200
        assert http.post("/start_profile").status_code == 409
        found = http.post("/stop_profile").json()
        assert (found["steps"], found["trace"]) == (0, None)
