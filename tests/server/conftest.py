"""One tiny model behind one server, for all tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from front_fixtures import headway, model_copy, plugins, tiny_model_folder
from headway import LLM
from headway.server.options import ServerOptions
from sandbox import save_tiny_model
from server_thread import Running, running

__all__ = ["headway", "model_copy", "plugins", "tiny_model_folder"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/server" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("server"))  # one process has the model


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_tiny_model(tmp_path_factory.mktemp("served"), chat=True)
    return LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, block_size=16, scheduling_policy="priority")


@pytest.fixture(scope="session")
def everyday(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(served_model_names=("tiny", "small"))) as found:
        yield found


@pytest.fixture
def served(everyday: Running) -> Iterator[Running]:
    """The server, which must be left without requests."""
    yield everyday
    everyday.wait_idle()


@pytest.fixture(scope="session")
def client(everyday: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{everyday.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="session")
def http(everyday: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=everyday.url, timeout=30) as made:
        yield made
