"""The decode kernel compiles for every layer, takes what it is handed in order, is right on the host, and claims what it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from backend_cases import spec
from cubin_registers import most_local_bytes
from headway.backends.hopper import backend, decode
from headway.backends.hopper.decode import HopperDecoding, Ring, row_blocks, shared_bytes, variant_of
from headway.backends.hopper.tiles import ARCH, HEAD_DIMS, SHARED_BYTES
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Compiler
from headway.registry import Registry
from host_decode import HostDecode, run_by_the_host

CSRC = Path(decode.__file__).parent / "csrc"
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def layer(heads: str = "16/8/128", **changes: object) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim = map(int, heads.split("/"))
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    return spec(**{**sizes, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


LAYERS = {
    "16/8 heads of 128": (layer(), 1),
    "groups of 4, verified": (layer("32/8/128", sliding_window=100), 5),
    "one head of 256": (layer("8/1/256", dtype=torch.float16), 1),
}
RARE = {
    "sinks": (layer("64/8/64", sinks=(0.5,) * 64), 1),
    "16 rows of 256": (layer("16/1/256", softcap=30.0), 1),
    "16 rows of 192": (layer("16/1/192"), 1),
    "heads of 80": (layer("32/32/80"), 1),
    "32 rows of 128": (layer("32/1/128"), 1),
}


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        *(pytest.param(*each, id=name) for name, each in LAYERS.items()),
        *(pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in RARE.items()),
    ],
)
def test_every_layer_compiles_without_spills(compiler: Compiler, asked: AttentionSpec, tokens: int) -> None:
    blocks = row_blocks(asked.group_size * tokens, asked.head_dim)
    cubin = variant_of(asked, 16, blocks).compile(ARCH, compiler)
    assert most_local_bytes(cubin) <= 8


def test_the_arguments_are_packed_as_they_are_declared() -> None:
    body = re.sub(r"//.*", "", (CSRC / "decode.cu").read_text().split("struct DecodeArguments {")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    expected = re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), decode.ARGUMENTS.format.lstrip("="))
    assert expected.rstrip("x") == declared


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


def test_the_registry_takes_its_claims(registry: Registry) -> None:
    assert registry.backend("hopper_decode") is HopperDecoding
    if not torch.cuda.is_available():
        assert str(registry.availability("hopper_decode")) == "no: device: needs a CUDA GPU, got none"


def test_a_cache_whose_rows_are_scattered_is_refused() -> None:
    asked = layer(device=torch.device("cpu"))
    cache = NHD.allocate(CacheGeometry.of(asked, 2, 16))
    assert HopperDecoding.accepts(cache)
    wide = torch.zeros(2, 16, 8, 132, dtype=torch.bfloat16)[..., :128]
    scattered = LayerCache({"key": cache.key, "value": wide}, NHD, cache.geometry)
    assert "cache, value: needs rows in one piece, at multiples of 16 bytes" in str(HopperDecoding.accepts(scattered))


@pytest.mark.parametrize("kv_lens", [[640], [9000, 3, 70], [2] * 300, [32000]])
def test_partial_results_fit_what_is_kept_free(monkeypatch: pytest.MonkeyPatch, kv_lens: list[int]) -> None:
    run_by_the_host(monkeypatch, 0, multiprocessors=132)
    monkeypatch.setattr("headway.backends.triton.chunk_kernel.Chunks.cut", lambda *_: None)  # which is launched
    made = HostDecode(layer(device=torch.device("cpu")), NHD, 16)
    tables = [list(range(-(-length // 16))) for length in kv_lens]
    step = AttentionMetadata.build([1] * len(kv_lens), [length - 1 for length in kv_lens], tables, 16, "cpu")
    assert step.decode is not None
    plan = made.plan(step.decode)
    assert plan.partial.nbytes <= made.workspace_bytes(4096, len(kv_lens))
