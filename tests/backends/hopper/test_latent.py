"""The latent kernel compiles for every tile, takes what it is handed in order, is right on the host, and claims what it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from backend_cases import spec
from headway.backends.hopper import backend, latent
from headway.backends.hopper.latent import HeadTile, HopperLatent, variant_of
from headway.backends.hopper.tiles import ARCH
from headway.backends.triton.chunk_kernel import Chunks
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import LATENT, NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Compiler
from headway.registry import Registry
from host_latent import HostLatent, run_by_the_host

CSRC = Path(latent.__file__).parent / "csrc"
RARE_TILES = (16, 64, 1), (20, 16, 1), (128, 48, 1), (96, 256, 2)
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def layer(num_heads: int = 16, **changes: object) -> AttentionSpec:
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    return spec(**{**sizes, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "block_size", "cluster"),
    [(128, 64, 2), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in RARE_TILES)],
)
def test_every_tile_compiles(
    compiler: Compiler, num_heads: int, block_size: int, cluster: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headway")
    tile = HeadTile.of(num_heads, cluster)
    assert tile is not None
    assert tile.cluster == cluster
    for dtype in (torch.bfloat16, torch.float16):
        assert variant_of(layer(num_heads, dtype=dtype), tile, block_size).compile(ARCH, compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


def test_the_arguments_are_packed_as_they_are_declared() -> None:
    body = re.sub(r"//.*", "", (CSRC / "latent.cuh").read_text().split("struct LatentArguments {")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    assert re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), latent.ARGUMENTS.format.lstrip("=")) == declared


def test_tiles_hold_whole_tokens_or_equal_parts_of_one() -> None:
    tiles = {heads: HeadTile.of(heads) for heads in (1, 16, 20, 64, 96, 128, 100, 192, 67)}
    assert tiles == {
        1: HeadTile(1, 64),
        16: HeadTile(16, 4),
        20: HeadTile(20, 3),
        64: HeadTile(64, 1),
        96: HeadTile(48, 1, 2),
        128: HeadTile(64, 1, 2),
        100: HeadTile(50, 1, 2),
        192: HeadTile(64, 1, 1),
        67: None,
    }
    assert HeadTile.of(128, cluster=1) == HeadTile(64, 1, 1)
    assert HeadTile.of(16, cluster=2) == HeadTile(16, 4), "a cluster of what has one block"


def test_it_claims_absorbed_layers_of_deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "capability", lambda device: (9, 0))

    def reasons(asked: AttentionSpec, phase: Phase = Phase.DECODE) -> str:
        return str(HopperLatent.supports(asked, LATENT if asked.value_in_key else NHD, 16, phase))

    assert reasons(layer()) == reasons(layer(128), Phase.EXTEND) == "yes"
    assert "phase: needs extend or decode, got prefill" in reasons(layer(), Phase.PREFILL)
    assert "query heads: needs equal parts of at most 64, got 67" in reasons(layer(67))
    assert "head_dim/v_head_dim: needs 576/512, got 160/128" in reasons(layer(head_dim=160, v_head_dim=128))
    assert "absorbed latent attention, of one kv head" in reasons(spec(dtype=torch.bfloat16, device=torch.device("cuda")))
    assert "sinks" in reasons(layer(sinks=(0.0,) * 16))
    monkeypatch.setattr(backend, "capability", lambda device: (8, 0))
    assert "9.0" in reasons(layer())


def test_the_registry_takes_its_claims(registry: Registry) -> None:
    assert registry.backend("hopper_mla") is HopperLatent
    if not torch.cuda.is_available():
        assert str(registry.availability("hopper_mla")) == "no: device: needs a CUDA GPU, got none"
    equal = layer(v_head_dim=576, value_in_key=False)
    refused = str(HopperLatent.supports(equal, NHD, 16, Phase.DECODE))
    assert "head_dim: needs values of another length than keys, got 576" in refused


def test_a_cache_whose_rows_are_scattered_is_refused() -> None:
    asked = layer(device=torch.device("cpu"))
    cache = LATENT.allocate(CacheGeometry.of(asked, 2, 16))
    assert HopperLatent.accepts(cache)
    wide = torch.zeros(2, 16, 1, 580, dtype=torch.bfloat16)[..., :576]
    scattered = LayerCache({"key": wide}, LATENT, cache.geometry)
    assert "rows in one piece, at multiples of 16 bytes" in str(HopperLatent.accepts(scattered))


def test_options_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    run_by_the_host(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"hopper_mla.cluster: needs a number of at least 1"):
        HostLatent(layer(device=torch.device("cpu")), LATENT, 16, {"cluster": "0"})


STEPS = [
    (1, [4096] * 64),
    (1, [16384]),
    (1, [2048] * 8),
    (5, [9000, 3, 70]),
    (300, [5000]),
    (1, [2] * 700),
    (64, [900] * 64),
]


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("query_len", "kv_lens"), STEPS)
def test_partial_results_fit_what_is_kept_free(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, query_len: int, kv_lens: list[int]
) -> None:
    run_by_the_host(monkeypatch, 0, multiprocessors=132)
    monkeypatch.setattr(Chunks, "cut", lambda *_: None)  # which is launched
    made = HostLatent(layer(num_heads, device=torch.device("cpu")), LATENT, 64)
    contexts = [length - min(query_len, length - 1) for length in kv_lens]
    queries = [length - context for length, context in zip(kv_lens, contexts, strict=True)]
    tables = [list(range(-(-length // 64))) for length in kv_lens]
    step = AttentionMetadata.build(queries, contexts, tables, 64, "cpu")
    view = step.decode or step.prefill
    assert view is not None
    plan = made.plan(view)
    assert plan.partial.nbytes <= made.workspace_bytes(4096, len(kv_lens))
    assert plan.items % HeadTile.of(num_heads).cluster == 0  # type: ignore[union-attr]
