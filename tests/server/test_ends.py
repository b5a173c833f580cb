"""What a server leaves behind when it has ended, and what clients leave behind who have gone."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from weakref import ref

import httpx
import pytest

from headway import LLM
from server_thread import Running, running


def test_stopped_server_frees_the_engine(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1)
    with running(llm) as served:
        assert httpx.get(f"{served.url}/v1/models", timeout=30).status_code == 200
    engine = ref(llm.engine)
    del llm, served
    gc.collect()
    assert engine() is None


@pytest.mark.slow
def test_forms_whose_clients_have_left_delay_nobody(everyday: Running) -> None:
    pytest.importorskip("llguidance")
    rules = "\n".join(f'r{number} ::= "x" r{number + 1} | "y"' for number in range(4000))  # seconds of a trial each
    for number in range(6):
        grammar = f'root ::= r{number}\n{rules}\nr4000 ::= "a"'
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{everyday.url}/v1/completions", json=asking(grammar=grammar), timeout=0.2)
    for wanted in (asking(regex="[ab]{3}"), asking(choice=[f"answer {number}" for number in range(1000)])):
        began = time.monotonic()
        assert httpx.post(f"{everyday.url}/v1/completions", json=wanted, timeout=30).status_code == 200
        assert time.monotonic() - began < 5
    everyday.wait_idle()


def asking(**form: object) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": form}
