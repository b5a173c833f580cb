"""What a server leaves behind when it has ended."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import httpx

from headway import LLM
from server_thread import running


def test_stopped_server_frees_the_engine(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1)
    with running(llm) as served:
        assert httpx.get(f"{served.url}/v1/models", timeout=30).status_code == 200
    engine = ref(llm.engine)
    del llm, served
    gc.collect()
    assert engine() is None
