"""`headway warm`: the count of kernels, the table, and the error where there is no GPU."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from headway.cli.run.warm import show, watch_start
from headway.core.contract.kernel import announce_compilation
from sandbox import Result, assert_refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    return tmp_path


def test_kernels_that_a_start_compiles_and_finds_are_counted(own_cache: Path) -> None:
    (own_cache / "kernels").mkdir()
    (own_cache / "kernels" / "old.cubin").write_bytes(bytes(100))
    told: list[int] = []

    def start() -> None:
        for head_dim in (64, 128):
            announce_compilation(f"vllm_paged: paged_attention of paged_attention.cu HEAD_DIM={head_dim}")
        (own_cache / "kernels" / "new.cubin").write_bytes(bytes(50))
        announce_compilation("decode")

    warmed = watch_start(start, told.append)
    announce_compilation("later")
    assert warmed.kernels == {"vllm_paged: paged_attention": 2, "decode": 1}
    assert told == [1, 2, 3]
    assert warmed.compiled == 1
    assert warmed.folders[own_cache / "kernels"] == 150
    written = io.StringIO()
    show(warmed, "qwen3-0.6b", Console(file=written, width=200))
    text = written.getvalue()
    assert re.search(r"vllm_paged: paged_attention +2 *\n", text)
    assert re.search(r"qwen3-0\.6b: ready in \d+\.\d s; 3 kernels, 1 of them compiled, 2 found", text)
    assert f"0.0 MiB in {own_cache / 'kernels'}" in text


def test_warm_without_a_gpu_is_refused(headway: Callable[..., Result]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_refused(headway("warm", "--model", "qwen3-0.6b"), "a GPU of the kind that will serve", "headway build vllm_paged")


@pytest.mark.gpu
def test_a_second_start_compiles_nothing(own_cache: Path) -> None:
    from headway.llm import LLM

    def start() -> None:
        options = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory": "256MiB"}
        LLM("qwen3-0.6b", load_format="dummy", skip_tokenizer_init=True, autotune_budget=0.0, **options)

    assert watch_start(start).compiled > 10
    assert watch_start(start).compiled == 0
