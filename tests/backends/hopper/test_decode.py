"""The kernels of decode and of latent attention compile, their backends claim what they do, and partial results fit."""

from __future__ import annotations

import pytest
import torch

from absent_gpu import most_local_bytes
from backend_cases import spec
from headway.backends.hopper import backend, latent
from headway.backends.hopper.decode import HopperDecoding, Ring, row_blocks, shared_bytes, variant_of
from headway.backends.hopper.latent import HeadTile, HopperLatent
from headway.backends.hopper.tiles import ARCH, HEAD_DIMS, SHARED_BYTES
from headway.backends.triton.chunk_kernel import Chunks
from headway.backends.triton.decode import DecodePlan
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Compiler
from host_hopper import HostDecode, HostLatent, decode_by_the_host, heads_of, latent_by_the_host

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")


def layer(heads: str = "16/8/128", **changes: object) -> AttentionSpec:
    return heads_of(heads, **{"device": torch.device("cuda"), **changes})


LAYERS = {
    "16/8 heads of 128": (layer(), 1),
    "groups of 4, verified": (layer("32/8/128", sliding_window=100), 5),
    "one head of 256": (layer("8/1/256", dtype=torch.float16), 1),
    "sinks": (layer("64/8/64", sinks=(0.5,) * 64), 1),
    "16 rows of 256": (layer("16/1/256", softcap=30.0), 1),
    "16 rows of 192": (layer("16/1/192"), 1),
    "heads of 80": (layer("32/32/80"), 1),
    "32 rows of 128": (layer("32/1/128"), 1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("asked", "tokens"), LAYERS.values(), ids=LAYERS)
def test_every_layer_compiles_without_spills(compiler: Compiler, asked: AttentionSpec, tokens: int) -> None:
    blocks = row_blocks(asked.group_size * tokens, asked.head_dim)
    assert most_local_bytes(variant_of(asked, 16, blocks).compile(ARCH, compiler)) <= 8


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_a_multiprocessor(head_dim: int) -> None:
    assert Ring.of(head_dim).keys % 16 == 0
    for rows in (1, 5, 8, 16, 40):
        blocks = row_blocks(rows, head_dim)
        assert shared_bytes(head_dim, blocks) <= SHARED_BYTES
        assert blocks * 8 >= min(rows, 32 if head_dim <= 128 else 16)


def test_it_claims_decode_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "capability", lambda device: (9, 0))

    def reasons(asked: AttentionSpec, phase: Phase = Phase.DECODE) -> str:
        return str(HopperDecoding.supports(asked, NHD, 16, phase))

    assert reasons(layer()) == reasons(layer("8/1/256", softcap=3.0)) == "yes"
    assert HopperDecoding.supports(layer(), HND, 48, Phase.DECODE)
    assert "phase: needs decode, got extend" in reasons(layer(), Phase.EXTEND)
    assert "layout" in str(HopperDecoding.supports(layer(), VLLM_5D, 16, Phase.DECODE))
    assert "head_dim" in reasons(layer("16/8/32"))
    assert "scale: needs a positive number" in reasons(layer(scale=-1.0))
    assert "dtype" in reasons(layer(dtype=torch.float32))
    monkeypatch.setattr(backend, "capability", lambda device: (8, 0))
    assert "9.0" in reasons(layer())


def planned(monkeypatch: pytest.MonkeyPatch, kv_lens: list[int], heads: str) -> tuple[HostDecode, DecodePlan]:
    decode_by_the_host(monkeypatch, 0, multiprocessors=132)
    monkeypatch.setattr("headway.backends.triton.chunk_kernel.Chunks.cut", lambda *_: None)  # which is launched
    made = HostDecode(layer(heads, device=torch.device("cpu")), NHD, 16)
    tables = [list(range(-(-length // 16))) for length in kv_lens]
    step = AttentionMetadata.build([1] * len(kv_lens), [length - 1 for length in kv_lens], tables, 16, "cpu")
    assert step.decode is not None
    return made, made.plan(step.decode)


@pytest.mark.parametrize("kv_lens", [[640], [9000, 3, 70], [2] * 300, [32000]])
def test_partial_results_fit_what_is_kept_free(monkeypatch: pytest.MonkeyPatch, kv_lens: list[int]) -> None:
    made, plan = planned(monkeypatch, kv_lens, "16/8/128")
    assert plan.partial.nbytes <= made.workspace_bytes(4096, len(kv_lens))


@pytest.mark.parametrize(
    ("heads", "batch", "kv_len", "programs"),
    [
        ("16/8/256", 1, 362, 48),  # a tile of keys each
        ("16/8/256", 3, 512, 96),
        ("16/8/256", 4, 512, 128),
        ("16/8/256", 8, 1024, 128),
        ("16/8/128", 1, 65536, 128),
        ("16/8/128", 6, 1024, 96),  # 144 would take two waves
        ("32/8/128", 9, 815, 72),
        ("16/8/128", 1, 256, 8),  # merging would take longer than the second tile
        ("32/8/64", 1, 65536, 128),
        ("16/8/128", 24, 1024, 192),
    ],
)
def test_few_sequences_are_split_over_one_wave(
    monkeypatch: pytest.MonkeyPatch, heads: str, batch: int, kv_len: int, programs: int
) -> None:
    _, plan = planned(monkeypatch, [kv_len] * batch, heads)
    assert batch * plan.items * plan.chunks.splits == programs


TILES = (128, 64, 2), (16, 64, 1), (20, 16, 1), (128, 48, 1), (96, 256, 2)


def latent_layer(num_heads: int = 16, **changes: object) -> AttentionSpec:
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    return spec(**{**sizes, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize(("num_heads", "block_size", "cluster"), TILES)
def test_every_tile_compiles(
    compiler: Compiler, num_heads: int, block_size: int, cluster: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headway")
    tile = HeadTile.of(num_heads, cluster)
    assert tile.cluster == cluster
    for dtype in (torch.bfloat16, torch.float16):
        assert (
            latent.variant_of(latent_layer(num_heads, dtype=dtype), tile, block_size)
            .compile(ARCH, compiler)
            .startswith(b"\x7fELF")
        )
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


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

    assert reasons(latent_layer()) == reasons(latent_layer(128), Phase.EXTEND) == "yes"
    assert "phase: needs extend or decode, got prefill" in reasons(latent_layer(), Phase.PREFILL)
    assert "query heads: needs equal parts of at most 64, got 67" in reasons(latent_layer(67))
    assert "head_dim/v_head_dim: needs 576/512, got 160/128" in reasons(latent_layer(head_dim=160, v_head_dim=128))
    assert "absorbed latent attention, of one kv head" in reasons(spec(dtype=torch.bfloat16, device=torch.device("cuda")))
    assert "sinks" in reasons(latent_layer(sinks=(0.0,) * 16))
    monkeypatch.setattr(backend, "capability", lambda device: (8, 0))
    assert "9.0" in reasons(latent_layer())


def test_options_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_by_the_host(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"hopper_mla.cluster: needs an integer from 1 to 2"):
        HostLatent(latent_layer(device=torch.device("cpu")), LATENT, 16, {"cluster": "0"})


STEPS = [(1, [4096] * 64), (1, [16384]), (1, [2048] * 8), (5, [9000, 3, 70]), (300, [5000]), (1, [2] * 700), (64, [900] * 64)]


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("query_len", "kv_lens"), STEPS)
def test_partial_results_of_latents_fit(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, query_len: int, kv_lens: list[int]
) -> None:
    latent_by_the_host(monkeypatch, 0, multiprocessors=132)
    monkeypatch.setattr(Chunks, "cut", lambda *_: None)  # which is launched
    made = HostLatent(latent_layer(num_heads, device=torch.device("cpu")), LATENT, 64)
    contexts = [length - min(query_len, length - 1) for length in kv_lens]
    queries = [length - context for length, context in zip(kv_lens, contexts, strict=True)]
    tables = [list(range(-(-length // 64))) for length in kv_lens]
    step = AttentionMetadata.build(queries, contexts, tables, 64, "cpu")
    view = step.decode or step.prefill
    assert view is not None
    plan = made.plan(view)
    assert plan.partial.nbytes <= made.workspace_bytes(4096, len(kv_lens))
    assert plan.items % HeadTile.of(num_heads).cluster == 0  # type: ignore[union-attr]
