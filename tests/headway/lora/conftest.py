"""A tiny model with slots for two adapters, and four adapters for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import LLM
from headway.core.contract.adapters import LoRARequest
from sandbox import save_tiny_model
from tiny_adapters import OPTIONS, save_adapter


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), chat=True)


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder, kinds = tmp_path_factory.mktemp("adapters"), (4, 8, 2, 4)
    made = [save_adapter(folder / f"a{seed}", base, rank, seed=seed) for seed, rank in enumerate(kinds)]
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(made, start=1)]


@pytest.fixture(scope="package")
def adapted(base: Path) -> LLM:
    """Two slots, and room for three adapters in host memory."""
    return LLM(str(base), **OPTIONS, max_loras=2, max_cpu_loras=3)
