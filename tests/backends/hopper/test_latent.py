"""The latent kernel compiles for every tile, takes what it is handed in order, and claims what it was written for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from grid import spec
from headway.backends.hopper import backend, latent
from headway.backends.hopper.latent import HeadTile, variant_of
from headway.backends.hopper.latent_backend import HopperLatent
from headway.backends.hopper.tiles import ARCH
from headway.backends.nvrtc.compiler import Compiler
from headway.core.contract.layout import LATENT, NHD, CacheGeometry
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec

SOURCE = Path(latent.__file__).parent / "csrc" / "latent.cu"
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def layer(num_heads: int = 16, **changes: object) -> AttentionSpec:
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "value_in_key": True}
    return spec(**{**sizes, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


@pytest.mark.parametrize(
    ("num_heads", "block_size"), [(16, 64), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((20, 16), (128, 48)))]
)
def test_every_tile_compiles(compiler: Compiler, num_heads: int, block_size: int) -> None:
    tile = HeadTile.of(num_heads)
    assert tile is not None
    assert variant_of(layer(num_heads), tile, block_size).compile(ARCH, compiler).startswith(b"\x7fELF")


def test_the_arguments_are_packed_as_they_are_declared() -> None:
    body = re.sub(r"//.*", "", SOURCE.read_text().split("struct LatentArguments {")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    assert re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), latent._ARGUMENTS.format.lstrip("=")) == declared


def test_tiles_hold_whole_tokens_or_equal_parts_of_one() -> None:
    tiles = {heads: HeadTile.of(heads) for heads in (1, 16, 20, 64, 96, 128, 100, 67)}
    assert tiles == {
        1: HeadTile(1, 64),
        16: HeadTile(16, 4),
        20: HeadTile(20, 3),
        64: HeadTile(64, 1),
        96: HeadTile(48, 1),
        128: HeadTile(64, 1),
        100: HeadTile(50, 1),
        67: None,
    }


def test_it_claims_absorbed_layers_of_deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "capability", lambda device: (9, 0))

    def reasons(asked: AttentionSpec, phase: Phase = Phase.DECODE) -> str:
        return str(HopperLatent.supports(asked, LATENT if asked.value_in_key else NHD, 16, phase))

    assert reasons(layer()) == reasons(layer(), Phase.EXTEND) == "yes"
    assert "phase: needs extend or decode, got prefill" in reasons(layer(), Phase.PREFILL)
    assert "query heads: needs equal parts of at most 64, got 67" in reasons(layer(67))
    assert "head_dim/v_head_dim: needs 576/512, got 160/128" in reasons(layer(head_dim=160, v_head_dim=128))
    assert "absorbed latent attention of one kv head" in reasons(spec(dtype=torch.bfloat16, device=torch.device("cuda")))
    assert "sinks" in reasons(layer(sinks=(0.0,) * 16))
    strided = LATENT.allocate(CacheGeometry.of(layer(head_dim=580, device=torch.device("cpu")), 2, 16))
    assert "rows in one piece, at multiples of 16 bytes" in str(HopperLatent.accepts(strided))
