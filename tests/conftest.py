"""Shared fixtures. A GPU test skips, with its reason, where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from headway.registry import Registry, create_registry

os.environ.setdefault("HEADWAY_AUTOTUNE_BUDGET", "0")  # nothing is measured at a start unless a test asks for it
os.environ.setdefault("HEADWAY_TRUST_PLUGINS", "1")  # no plugin is tried in a process of its own, which takes seconds, likewise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The built-ins alone, whatever else is installed."""
    return create_registry(load_entry_points=False)
