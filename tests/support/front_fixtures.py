"""Fixtures of the face's tests: a tiny model, broken copies of it, and the command line in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway import LLM, AsyncLLM
from headway.__main__ import main
from sandbox import REFUSING, TOY, Result, install, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_tiny_model(tmp_path_factory.mktemp("chatty"), chat=True)
    return LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, block_size=16)


@pytest.fixture
def served(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM over the module's engine, which must be left as it was found."""
    made = AsyncLLM.from_llm(llm)
    yield made
    made.shutdown()
    assert (made.num_unfinished_requests, llm.engine.has_unfinished) == (0, False)
    llm.engine.blocks.check_integrity([])


@pytest.fixture
def model_copy(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model in a folder of the test's own, to be spoiled."""
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `python -m headway` in this process: (arguments) -> exit code and output."""

    def run(*arguments: str, columns: int = 80) -> Result:
        monkeypatch.setattr(sys, "argv", ["headway", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code or 0
        assert isinstance(code, int)
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working plugin and one whose backends refuse, found by this process."""
    folder = tmp_path / "plugins"
    install(folder, "headway_toy", TOY)
    install(folder, "headway_odd", REFUSING)
    monkeypatch.syspath_prepend(str(folder))
    return folder
