"""Nonsense is refused, not computed: configurations, RoPE parameters, tables, block sizes, and files with damaged bytes."""

from __future__ import annotations

import contextlib
import json
import resource
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save_file

import hybrid_models
import plain_models
import tiny_encoders
from engine_logits import save_random
from headway.core.contract.errors import ConfigError, HeadwayError, ModelError
from headway.core.engine.data.config import EngineConfig
from headway.core.system.json_files import write_json
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.tensor_files import plain_slices
from headway.models.checkpoints.weights import Weights
from headway.models.encoders.pooling.loader import load_pooling_model
from headway.models.loader import load_model
from headway.registry import Registry
from headway.tuning.table.files import read_table
from plain_models import sizes
from quantized_models import FORMATS
from sandbox import save_tiny_model
from tables import a_device, a_table
from tiny_engine import made_engine

BASE: dict[str, Any] = {"max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
PLAIN: dict[str, Any] = {
    **sizes(64, 32, 64, 2, hidden_act="silu", sliding_window=None, rope_theta=10000.0, torch_dtype="float32", eos_token_id=2),
    **BASE,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}
NAN, INFINITE = float("nan"), float("inf")
SIZES = [0, -1, 1.5, NAN, "32", 2**31, 10**30]
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
ABSURD: dict[str, list[Any]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"), SIZES),
    "num_attention_heads": [*SIZES, 3, 5],
    "num_key_value_heads": [*SIZES, 3],
    "head_dim": [*SIZES, 7],
    "sliding_window": SIZES,
    "rms_norm_eps": [0, -1, NAN, "x", None, 1e300],
    **{name: [0, -1, NAN, INFINITE, "x"] for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    "rope_theta": [0, -1, NAN, INFINITE, "x", 10**400],
    "rope_scaling": [
        *({"rope_type": "linear", "factor": factor} for factor in (0, -2, NAN, "x", None)),
        *({**LLAMA3, name: value} for name in list(LLAMA3)[1:] for value in (0, -1, NAN, "x")),
        {**LLAMA3, "low_freq_factor": 4},
        {"rope_type": "yarn", "factor": 0},
        {"rope_type": "linear"},
        {"rope_type": 5},
        {"rope_type": "dynamic", "factor": INFINITE},
        *(
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": long}
            for long in ("x", None, [1.0], [1.0, NAN] * 2)
        ),
    ],
    "eos_token_id": [1.0, 1.5, NAN, -1, True, [1.0], [-3], "x"],
    "torch_dtype": [[], 3, "int32", "bool", "nn"],
    "model_type": [[], 3],
}


def load(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return load_model(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True)


def test_the_unchanged_model_loads(tmp_path: Path) -> None:
    assert load(tmp_path).eos_token_ids == {2}
    assert load(tmp_path, sliding_window=8).decoder.attention_specs[0].sliding_window == 8


def test_a_hidden_size_that_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hidden_size needs a multiple of num_attention_heads=4"):
        load(tmp_path, hidden_size=33)


@pytest.mark.parametrize("field", ABSURD)
def test_absurd_configurations_are_refused(field: str, tmp_path: Path) -> None:
    for value in ABSURD[field]:
        with pytest.raises(HeadwayError) as refused:
            load(tmp_path, **{field: value})
        said = str(refused.value)
        assert (field if field != "rope_scaling" else "rope") in said.lower(), value
        assert "a whole number of at least 1, got " in said or value not in SIZES[:2] or ABSURD[field][:7] != SIZES, said
        assert "\n" not in said, value
        assert len(said) < 600, value


FAMILIES = {name: plain_models.ROWS[name] for name in ("gpt2", "qwen3_moe", "deepseek_v3", "granite")}
FAMILIES |= {name: hybrid_models.ROWS[name] for name in ("bamba", "qwen3_next")}
CLASSIFIERS = ("bert", "modernbert")


def integers(config: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """Paths of the integers of a configuration."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from integers(value, *above, key)
        elif type(value) is int:
            yield (*above, key)


def vast_sizes_are_refused_or_do_not_matter(folder: Path, load: Callable[[], object]) -> None:
    """Set each integer of config.json to a vast number: neither the memory that it asks for is taken, nor the time."""
    load()
    plain = (folder / "config.json").read_text()
    for path in [*integers(json.loads(plain)), ("num_labels",), ("head_dim",), ("layers_in_a_plugin",)]:
        inner = config = json.loads(plain)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = 10**9
        (folder / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        with memory_bound(500 << 20), contextlib.suppress(HeadwayError):
            load()
        assert time.perf_counter() - start < 5, path


@contextlib.contextmanager
def memory_bound(more: int) -> Iterator[None]:
    """Let the process map this many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_vast_integer_in_a_configuration_takes_neither_memory_nor_time(name: str, tmp_path: Path) -> None:
    save_random(FAMILIES[name], tmp_path)
    vast_sizes_are_refused_or_do_not_matter(tmp_path, lambda: load_model(str(tmp_path), "float32", skip_tokenizer_init=True))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_vast_integer_in_a_classifiers_configuration_takes_neither_memory_nor_time(name: str, tmp_path: Path) -> None:
    tiny_encoders.save(*tiny_encoders.SCORERS[name], tmp_path)
    vast_sizes_are_refused_or_do_not_matter(tmp_path, lambda: load_pooling_model(tmp_path, "score", skip_tokenizer_init=True))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("intermediate_size", r"needs a whole number of at most 65536 for tensors whose longest axis is 97 .*, got 1000000000"),
        ("num_labels", "num_labels needs a whole number of at most 65536 for tensors"),
        ("num_hidden_layers", "num_hidden_layers needs a whole number of at most 4096"),
        ("num_experts", "num_experts needs a whole number of at most 65536"),
    ],
)
def test_a_vast_size_is_named_with_what_the_tensors_have(field: str, words: str, tmp_path: Path) -> None:
    save_random(FAMILIES["qwen3_moe"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((tmp_path / "config.json").read_text()), field: 10**9}))
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path), skip_tokenizer_init=True)


def test_a_vast_context_of_windowed_layers_takes_no_vast_block_tables(registry: Registry, tmp_path: Path) -> None:
    model = load(tmp_path, sliding_window=8, max_position_embeddings=10**9).decoder
    with memory_bound(2 << 30):
        engine = made_engine(model, registry, EngineConfig(kv_cache_memory=2**20))
    assert 10**6 < engine.capacity.max_model_len < 10**8
    with pytest.raises(
        ConfigError, match=r"max_model_len: needs at most \d+, as far as block tables of 1 GiB .*, got 1000000000"
    ):
        made_engine(model, registry, EngineConfig(kv_cache_memory=2**20, max_model_len=10**9))


@pytest.mark.parametrize("name", ["mod\udcffel", "mod\udcffel.gguf"])
def test_a_path_that_is_not_utf_8_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mod\\udcffel.*: needs a path in UTF-8"):
        load_model(str(tmp_path / name))
    save_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"mod\\udcffel.* needs a name in UTF-8") as refused:
        load_model(str(tmp_path / "model"), skip_tokenizer_init=True)
    str(refused.value).encode()


def test_an_eos_token_beyond_the_vocabulary_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, eos_token_id=[2, 10**30]).eos_token_ids == {2}
    assert "outside the vocabulary" in caplog.text


@pytest.mark.parametrize("changes", [{"type": "cuda"}, {"type": "banana"}, {"compute_capability": "9.0"}])
def test_a_device_edited_into_nonsense_is_refused(changes: dict[str, str]) -> None:
    device = a_device()
    with pytest.raises(ValidationError, match="type: needs"):
        type(device).model_validate(device.model_dump() | changes)


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


CONFIG = sizes(300, 32, 64, 2, architectures=["LlamaForCausalLM"], model_type="llama", **BASE)


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
