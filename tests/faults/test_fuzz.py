"""Damaged files: they are read, or refused by an error in one line, in either case soon."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.core.contract.errors import HeadwayError, ModelError
from headway.core.system.json_files import write_json
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.gguf import gguf
from headway.models.checkpoints.tensor_files import plain_slices
from headway.models.checkpoints.weights import Weights
from headway.tuning.table.files import read_table
from quantized_models import FORMATS
from tables import a_table

FEW, MANY = 12, 300
EXAMPLES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3))


@st.composite
def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """Draw versions of a file that are cut short, or with a few bytes changed, removed or inserted."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(("cut", "change", "remove", "insert")))
        size = draw(st.integers(1, 8))
        if kind == "cut":
            content = content[:place]
        else:
            new = b"" if kind == "remove" else draw(st.binary(min_size=size, max_size=size))
            content = content[:place] + new + content[place + (0 if kind == "insert" else size) :]
    return content


def fuzz(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Run a check on drawn inputs, the same ones each time."""

    @seed(19)
    @settings(max_examples=examples, deadline=5000, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(value: Any) -> None:
        check(value)

    run()


def refused_in_one_line(act: Callable[[], object], kind: type[HeadwayError] = HeadwayError) -> None:
    said = ""
    try:
        act()
    except kind as error:
        said = str(error)
    assert "Traceback" not in said


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_tables_are_refused_or_read(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "table.json"
    write_json(a_table(), path)
    whole = path.read_bytes()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        refused_in_one_line(partial(read_table, path))

    fuzz(examples, damaged(whole), check)
    fields = json.loads(whole)
    fuzz(
        examples,
        st.tuples(st.sampled_from(sorted(fields)), JSON),
        lambda pair: check(json.dumps({**fields, pair[0]: pair[1]}).encode()),
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_config_json_is_refused_or_read(tmp_path: Path, examples: int) -> None:
    def check(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        refused_in_one_line(partial(check_folder, tmp_path), ModelError)

    whole = json.dumps(CONFIG, indent=2).encode()
    (tmp_path / "config.json").write_bytes(whole)
    assert check_folder(tmp_path) == CONFIG
    fuzz(examples, damaged(whole), check)
    changed = st.tuples(st.sampled_from(sorted(CONFIG)), JSON)
    fuzz(examples, changed, lambda pair: check(json.dumps({**CONFIG, pair[0]: pair[1]}).encode()))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_mutated_quantization_config_is_refused_or_read(tmp_path: Path, examples: int) -> None:
    def check(drawn: tuple[str, int, object]) -> None:
        name, place, value = drawn
        config = json.loads(json.dumps(FORMATS[name].config))
        keys = [*_objects(config)]
        inside, key = keys[place % len(keys)]
        inside[key] = value
        refused_in_one_line(partial(read_quantization, tmp_path, {"quantization_config": config}), ModelError)

    fuzz(examples, st.tuples(st.sampled_from(sorted(FORMATS)), st.integers(0, 99), JSON), check)


def _objects(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _objects(value)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_safetensors_are_refused_or_read(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        refused_in_one_line(partial(plain_slices, tmp_path), ModelError)
        refused_in_one_line(lambda: Weights(tmp_path, torch.float32, torch.device("cpu")).take("a", (8,)), ModelError)

    fuzz(examples, damaged(whole), check)
    header = st.dictionaries(st.text(max_size=4), JSON, max_size=3).map(lambda found: json.dumps(found).encode())
    fuzz(examples, header, lambda found: check(struct.pack("<Q", len(found)) + found + bytes(32)))
    lengths = st.integers(0, 2**64 - 1)
    fuzz(examples, lengths, lambda length: check(struct.pack("<Q", length) + whole[8:]))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_mutated_shard_index_is_refused_or_read(tmp_path: Path, examples: int) -> None:
    save_file({"a": torch.zeros(8)}, tmp_path / "one.safetensors")

    def check(found: Any) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(found))
        refused_in_one_line(partial(plain_slices, tmp_path), ModelError)

    fuzz(examples, JSON | st.fixed_dictionaries({"weight_map": JSON}), check)
    fuzz(examples, st.dictionaries(st.text(max_size=4), st.text(max_size=12)), lambda names: check({"weight_map": names}))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutated_gguf_is_refused_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw headers with any contents."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        refused_in_one_line(partial(gguf.convert, path), ModelError)
        assert list((tmp_path / "cache" / "models").iterdir()) == []

    fuzz(50, damaged(header + bytes(64)), check)
