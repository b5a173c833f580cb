"""The kernel compiles for every kind of layer, and takes what it is handed in the order in which the source declares it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from headway.backends.hopper import backend as attention
from headway.backends.hopper import schedule, tiles
from headway.backends.hopper.tiles import ARCH, SHARED_BYTES, tiles_of, variant_of
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Compiler

CSRC = Path(tiles.__file__).parent / "csrc"
PAIRS = [(dim, dim) for dim in tiles.HEAD_DIMS] + list(tiles.UNEQUAL)
EVERYDAY = [(128, 128)]
KINDS = [pair if pair in EVERYDAY else pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS]
FORMATS = {"int": "i", "float": "f", "long long": "q"}


def _spec(pair: tuple[int, int], **others: object) -> AttentionSpec:
    return AttentionSpec(8, 2, pair[0], 0.1, torch.bfloat16, v_head_dim=pair[1], **others)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, ids=str)
def test_every_kind_compiles(compiler: Compiler, pair: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    chosen = tiles_of(*pair)
    plain, full = _spec(pair), _spec(pair, sliding_window=100, softcap=30.0)
    for spec, tile, block_size in ((plain, chosen.wide, None), (plain, chosen.narrow, 16), (full, chosen.wide, 48)):
        assert variant_of(spec, tile, block_size).compile(ARCH, compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_shared_memory_suffices(pair: tuple[int, int]) -> None:
    chosen = tiles_of(*pair)
    assert max(tile.shared_bytes(*pair) for tile in (chosen.wide, chosen.narrow)) <= SHARED_BYTES
    assert chosen.narrow.rows >= tiles.MAX_GROUP, "a group must fit a tile"


def test_the_arguments_are_packed_as_they_are_declared() -> None:
    source = (CSRC / "shape.cuh").read_text()
    body = re.sub(r"//.*", "", source.split("struct Arguments {")[1].split("};")[0])
    declared = ""
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in statement else next(code for name, code in FORMATS.items() if statement.startswith(name))
        declared += kind * (statement.count(",") + 1)
    packed = re.sub(r"(\d+)(\D)", lambda found: found[2] * int(found[1]), attention.ARGUMENTS.format.lstrip("="))
    assert packed == declared


def test_an_item_has_as_many_numbers_as_its_struct() -> None:
    body = (CSRC / "shape.cuh").read_text().split("struct Item {")[1].split("};")[0]
    assert len(re.findall(r"^\s*int \w+;", body, re.MULTILINE)) == schedule.ITEM_INTS
