"""The page's files and the data behind them. What it looks like and how it behaves is in test_page_browser.py."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from headway import LLM
from headway.core.system.json_files import write_json
from headway.server.options import ServerOptions
from headway.server.page.routes import ASSETS
from server_thread import Running, running
from tables import a_page_table


def test_page_files_need_no_api_key_and_its_data_do(llm: LLM) -> None:
    with running(llm, ServerOptions(api_key="secret")) as served, httpx.Client(base_url=served.url) as http:
        assert 'data-key="required"' in http.get("/").text
        assert {http.get(path).status_code for path in ASSETS} == {200}
        for path in ("/headway/state", "/headway/table", "/headway/explain?phase=decode"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"authorization": "Bearer secret"}).status_code == 200


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text(http: httpx.Client) -> None:
    answers = {path: http.get(path) for path in ASSETS}
    for path, answer in answers.items():
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        links = re.findall(r"https?://[^\s'\"]+", answer.text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, path  # a namespace, which nobody fetches
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", answer.text), path
    assert 'data-key="none"' in answers["/"].text
    assert set(re.findall(r'(?:src|href)="(/headway[^"]*)"', answers["/"].text)) < set(ASSETS)
    folder = Path(__file__).parents[2] / "server" / "page"
    assert {path.name for path in folder.iterdir() if path.suffix in (".css", ".html", ".js")} == {
        name for name, _ in ASSETS.values()
    }


def test_the_state_is_the_engines(served: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    step = served.llm.engine.step
    before = _state(http)
    monkeypatch.setattr(served.llm.engine, "step", lambda: (time.sleep(0.01), step())[1])
    asked = {"prompt": list(range(3, 43)), "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()  # which closes the stream when it goes
        next(lines)
        now = _state(http)
        assert (now["running"], now["waiting"], now["num_sequences"]) == (1, 0, 1)
        (held,) = now["sequences"]
        assert held["num_prompt_tokens"] == 40
        assert held["num_tokens"] >= 40
        assert held["found"] + held["computed"] + held["reserved"] == now["blocks"]["used"] >= 3
        assert now["decode"]["batch"] == 1
        assert now["decode"]["ranking"] == []  # nothing was measured
        assert {each["phase"] for each in now["steps"]} >= {"prefill", "decode"}
    assert now["totals"]["num_prompt_tokens"] == before["totals"]["num_prompt_tokens"] + 40
    assert now["time"] > before["time"]


def test_open_pages_share_one_reading_of_the_engine(served: Running, http: httpx.Client) -> None:
    assert len({http.get("/headway/state").json()["time"] for _ in range(20)}) <= 2


def test_explain_refuses_invalid_shapes(http: httpx.Client) -> None:
    for query in (
        "phase=guess",
        "phase=decode&batch=0",
        "phase=decode&query_len=9&kv_len=3",
        "phase=prefill&kv_len=3",
        "batch=1",
    ):
        answer = http.get(f"/headway/explain?{query}")
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), query


def test_without_a_table_the_page_is_told_why(http: httpx.Client) -> None:
    found = http.get("/headway/table").json()
    assert found["noise"] is None
    assert [(row["kind"], row["phase"], row["backend"]) for row in found["plan"]] == [
        ("full", each["phase"], each["backends"][0]) for each in found["phases"]
    ]
    assert "no crossover table" in found["why"]
    assert [each["points"] for each in found["phases"]] == [[], [], []]
    refused = {each["backend"]: each["reasons"] for each in found["phases"][0]["refused"]}
    assert any("CUDA" in reason for reason in refused["hopper"])


def test_the_table_and_its_look_up_are_what_auto_obeys(llm: LLM, tmp_path: Path) -> None:
    write_json(a_page_table(), tmp_path / "table.json")
    measured = LLM(llm.model.name, kv_cache_memory="8MiB", num_threads=1, crossover_table=str(tmp_path / "table.json"))
    with running(measured) as served, httpx.Client(base_url=served.url) as http:
        found = http.get("/headway/table").json()
        assert found["noise"] == pytest.approx(0.02)
        decode = next(each for each in found["phases"] if each["phase"] == "decode")
        assert {point["kv_len"] for point in decode["points"]} == {16, 256}
        for length, winner in ((16, "sdpa.math"), (256, "sdpa")):
            looked = http.get(f"/headway/explain?phase=decode&batch=1&kv_len={length}").json()
            assert looked["covered"]
            assert looked["ranking"][0]["backend"] == winner
            assert set(looked["backends"]) == {"sdpa", "sdpa.math"}
        assert not http.get("/headway/explain?phase=decode&batch=900&kv_len=16").json()["covered"]


def _state(http: httpx.Client) -> dict:
    time.sleep(0.51)  # one look serves half a second
    return http.get("/headway/state").json()
