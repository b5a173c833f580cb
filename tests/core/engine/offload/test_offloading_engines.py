"""Engines whose cache is too small, with the host's memory or a disk behind it: the tokens stay the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD, NHD_INT8
from headway.core.engine.data import pool
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.groups import page_format
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.sampling.params import SamplingParams
from headway.core.select.request import LayerSpecs
from headway.registry import Registry
from tiny_engine import generate, made_engine, tokens_of
from windowed_model import MODELS, Windowed

GREEDY = SamplingParams(temperature=0, max_tokens=14)
PLAIN = Windowed((None, 2), (None, 2))
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, max_num_batched_tokens=64, max_model_len=160, async_scheduling=True)
_random = Random(5)
PROMPTS = [[_random.randrange(50) for _ in range(60 + 9 * number)] for number in range(3)]


def small(model: Any, **options: Any) -> EngineConfig:
    """A cache for little more than one sequence."""
    config = replace(CONFIG, **options)
    specs = LayerSpecs.of(model, config.kv_cache_dtype).cached
    layout = NHD_INT8 if config.kv_cache_dtype == "int8_per_token_head" else NHD
    pages = page_format(specs, [layout] * len(specs), 8, 160)
    return replace(config, kv_cache_memory=(pages.pages_for(160, 64) + 4) * pages.page_bytes)


def tokens(engine: EngineLoop, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return tokens_of(generate(engine, prompts, GREEDY))


EVERYDAY = {("plain", "vllm_5d"), ("two windows", "hnd")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in EVERYDAY else pytest.mark.slow)
        for name in ("plain", *MODELS)
        for layout in ("nhd", "hnd", "vllm_5d")
    ],
)
def test_offloading_changes_no_token(registry: Registry, name: str, layout: str) -> None:
    model = MODELS.get(name, PLAIN)
    expected = [model.greedy(prompt, 14) for prompt in PROMPTS]
    engine = made_engine(model, registry, small(model, kv_offload_size="4MiB", preemption_mode="swap", kv_layout=layout))
    assert tokens(engine) == expected
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens_of(again) == expected
    stats = engine.stats
    assert stats.blocks_offloaded > 0
    assert stats.offload_hits > 0
    assert sum(each.num_cached_tokens for each in again) > 0
    assert set(stats.preemptions_by_kind) <= {"swap"}
    engine.scheduler.offloader.tier.check_integrity(idle=True)  # type: ignore[union-attr]
    assert engine.snapshot().num_offloaded_blocks == engine.cache_usage().num_offloaded_blocks > 0


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("plain", "fp8_e4m3"),
        ("two windows", "int8_per_token_head"),
        pytest.param("plain", "int8_per_token_head", marks=pytest.mark.slow),
    ],
)
def test_offloading_a_cache_of_8_bits_changes_no_token(registry: Registry, name: str, kv_cache_dtype: str) -> None:
    model = MODELS.get(name, PLAIN)
    config = small(model, attn_backend="sdpa.math", kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=True)
    expected = tokens(made_engine(model, registry, replace(config, kv_cache_memory=2**20)))
    engine = made_engine(model, registry, replace(config, kv_offload_size="4MiB", preemption_mode="swap"))
    first = tokens(engine)
    assert tokens(engine) == first == expected
    assert engine.stats.offload_hits > 0


def on_disk(folder: Path, weights: str = "these", **options: Any) -> dict[str, Any]:
    return {"config": small(PLAIN, kv_offload_size="4MiB", kv_offload_dir=str(folder), **options), "weights": weights}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.page"))


def finish(engine: EngineLoop) -> None:
    """Wait until the disk, which works in the order of the calls, has done what it was asked for."""
    engine.executor.mover.fetch([]).result()


def test_second_start_finds_pages_that_the_first_stored(registry: Registry, tmp_path: Path) -> None:
    first = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    expected = tokens(first)
    finish(first)
    assert len(files(tmp_path)) > 12
    second = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    written = generate(second, PROMPTS, GREEDY)
    assert tokens_of(written) == expected
    assert [each.num_cached_tokens // 8 for each in written] == [(len(prompt) - 1) // 8 for prompt in PROMPTS]
    assert not second.stats.offload_failures
    finish(second)
    third = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path, weights="others")))
    assert generate(third, PROMPTS[:1], GREEDY)[0].num_cached_tokens == 0
    finish(third)


def test_forgotten_prefixes_are_found_neither_in_memory_nor_on_disk(registry: Registry, tmp_path: Path) -> None:
    engine = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    expected = tokens(engine)
    engine.forget_prefixes(everywhere=True)
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens_of(again) == expected
    assert [each.num_cached_tokens for each in again] == [0] * len(PROMPTS)
    finish(engine)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def exchange(path: Path) -> None:
    """Another page's file under this one's name."""
    path.write_bytes(next(each for each in path.parent.iterdir() if each != path).read_bytes())


def fold(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm", [flip, *(pytest.param(harm, marks=pytest.mark.slow) for harm in (cut, empty, exchange, fold, Path.unlink))]
)
def test_damaged_file_is_recomputed(registry: Registry, tmp_path: Path, harm: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    expected = tokens(first, PROMPTS[:2])
    finish(first)
    second = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    for path in files(tmp_path):
        if harm is not exchange or int(path.stem[-1], 16) % 2:
            harm(path)
    with caplog.at_level(logging.WARNING, "headway"):
        assert tokens(second, PROMPTS[:2]) == expected
    assert second.stats.offload_failures["not read from disk"] > 0
    assert len([record for record in caplog.records if "a block was not read" in record.message]) <= 3
    finish(second)


def test_full_disk_changes_no_token(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.core.engine.offload.disk_tier.write_whole", full)
    engine = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path)))
    expected = [PLAIN.greedy(prompt, 14) for prompt in PROMPTS]
    assert tokens(engine) == expected
    assert tokens(engine) == expected
    finish(engine)
    assert engine.stats.offload_failures["not written to disk"] > 0
    assert files(tmp_path) == []
    assert sum("No space left on device" in record.message for record in caplog.records) == 1


def test_offload_folder_stays_within_its_size(registry: Registry, tmp_path: Path) -> None:
    engine = make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path, kv_offload_dir_size=30_000)))
    tokens(engine)
    finish(engine)
    assert 10_000 < sum(path.stat().st_size for path in files(tmp_path)) <= 30_000
    smaller = make_engine(
        EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path, kv_offload_dir_size=10_000, weights="others"))
    )
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    finish(smaller)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "drop"}, "auto, recompute or swap"),
        ({"preemption_mode": "swap"}, "needs kv_offload_size"),
        ({"kv_offload_dir": "/tmp"}, "needs kv_offload_size"),
        ({"kv_offload_size": "4 cats"}, "a positive number of bytes"),
        ({"kv_offload_size": 4, "kv_offload_dir_size": 0}, "a positive number of bytes"),
        ({"kv_offload_size": "1GiB", "enable_prefix_caching": False}, "prefix cache"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_offloading_that_cannot_work_is_refused(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bytes of a block"):
        made_engine(PLAIN, registry, small(PLAIN, kv_offload_size=4))
    with pytest.raises(ConfigError, match="at most what the host has free"):
        made_engine(PLAIN, registry, small(PLAIN, kv_offload_size="900TiB"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder that can be written"):
        make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path / "file")))
    with pytest.raises(ConfigError, match="told from others"):
        make_engine(EngineParts(model=PLAIN, source=registry, **on_disk(tmp_path, weights="")))


@pytest.mark.parametrize("name", MODELS)
def test_page_memory_is_all_of_the_pool(name: str) -> None:
    specs = MODELS[name].attention_specs
    pages = page_format(specs, [NHD] * len(specs), 8, 160)
    size = pool.PoolSize(6, pages, 8)
    caches = pool.allocate(specs, [NHD] * len(specs), size)
    memory = pool.page_memory(caches, size)
    assert sum(view.nbytes for view in memory) == size.num_bytes
    for view in memory:
        view[:, 3] = 255
    group = pages.groups[0]
    for block in range(caches[group.layers[0]].geometry.num_blocks):
        assert bool(caches[group.layers[0]].key[block].isnan().all()) == (block in group.blocks_of([3]))
    assert torch.equal(memory[0][:, 2], torch.zeros_like(memory[0][:, 2]))
