"""Nonsense is refused, not computed: configurations, RoPE parameters, tables, block sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headway.core.contract.errors import ConfigError, HeadwayError, ModelError
from headway.core.engine.state.config import check_block_size
from headway.models.checkpoint import check_sizes
from headway.models.loader import load_model
from sandbox import save_tiny_model
from tables import a_device

PLAIN: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "eos_token_id": 2,
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


@pytest.mark.parametrize("field", ABSURD)
def test_absurd_configurations_are_refused(field: str, tmp_path: Path) -> None:
    for value in ABSURD[field]:
        with pytest.raises(HeadwayError) as refused:
            load(tmp_path, **{field: value})
        said = str(refused.value)
        assert "\n" not in said, value
        assert len(said) < 600, value


def test_an_eos_token_beyond_the_vocabulary_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, eos_token_id=[2, 10**30]).eos_token_ids == {2}
    assert "outside the vocabulary" in caplog.text


def test_a_gguf_header_with_impossible_sizes_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ModelError, match="its header cannot be used: num_hidden_layers needs a whole number of at most 4096"):
        check_sizes(Path("m.gguf"), {**PLAIN, "num_hidden_layers": 2**31 - 1}, "its header")


@pytest.mark.slow
def test_a_rust_panic_is_reported_as_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("range end index 2 out of range for slice of length 1")

    folder = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", panic)
    with pytest.raises(ModelError, match="the tokenizer cannot be read .PanicException: range end"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("size", [12, 0, -16, 1])
def test_impossible_block_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        check_block_size(size)


@pytest.mark.parametrize("changes", [{"type": "cuda"}, {"type": "banana"}, {"compute_capability": "9.0"}])
def test_a_device_edited_into_nonsense_is_refused(changes: dict[str, str]) -> None:
    device = a_device()
    with pytest.raises(ValidationError, match="type: needs"):
        type(device).model_validate(device.model_dump() | changes)
