"""The engine's options: sizes as texts, and each bad value refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.config import EngineConfig


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GiB", 2 * 1024**3), ("512MB", 512 * 10**6), ("1.5G", 1_500_000_000), ("64kib", 65536), ("1000", 1000), (77, 77)],
)
def test_a_size_is_a_number_or_a_text(size: str | int, expected: int) -> None:
    assert EngineConfig(kv_cache_memory=size).pool_bytes == expected


@pytest.mark.parametrize("size", ["", "0", "-1GiB", "many", "1 lot", "nan", "1 2", 0, -5, 1.5, True, [1]], ids=repr)
def test_any_other_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="^kv_cache_memory: needs a positive number of bytes such as 2GiB or 512MiB, got"):
        EngineConfig(kv_cache_memory=size)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": None},
        {"gpu_memory_utilization": "0.9"},
        {"gpu_memory_utilization": float("nan")},
        {"kv_cache_dtype": "fp8"},
        {"cudagraph_capture_sizes": 8},
        {"cudagraph_capture_sizes": []},
        {"cudagraph_capture_sizes": [512]},
        {"workload": "nonsense"},
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: needs "):
        EngineConfig(**wrong)
