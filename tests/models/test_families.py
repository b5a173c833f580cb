"""Tests that unsupported settings of a family are refused in one line that names the key."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import hybrid_models
import plain_models
from config_changes import changes, fields_read
from dense_attention import logits_of_text
from engine_logits import save_random
from headway import LLM
from headway.core.contract.errors import HeadwayError, ModelError
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.families.plain_config import plain_config
from headway.models.loader import load_model
from plain_models import sizes
from tiny_encoders import EMBEDDERS, save, vector
from transformers_release import needs

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def changed(config: PretrainedConfig, **values: Any) -> PretrainedConfig:
    for key, value in values.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx: needs false, got true"),
        (GPT2Config(scale_attn_weights=False), "scale_attn_weights: needs true, got false"),
        (GPT2Config(n_embd=100, n_head=12), "num_attention_heads: needs a divisor of hidden_size=100, got 12"),
        (GPT2Config(activation_function="quick_gelu"), "activation_function: needs one of silu, .*got quick_gelu"),
        (OPTConfig(do_layer_norm_before=False), "do_layer_norm_before: needs true, got false"),
        (OPTConfig(hidden_size=768, word_embed_proj_dim=512), "word_embed_proj_dim: needs hidden_size=768, got 512"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type: needs default, linear, llama3, yarn, longrope or proportional, got dynamic",
        ),
        (OPTConfig(activation_function="quick_gelu"), "activation_function: needs one of silu, .*got quick_gelu"),
        (LlamaConfig(rope_parameters=HALF), "partial_rotary_factor: needs 1 in LlamaForCausalLM, got 0.5"),
        (
            changed(Phi3Config(), rope_parameters={**HALF, "partial_rotary_factor": 0.27}),
            "partial_rotary_factor: needs an even part",
        ),
        (changed(Qwen3Config(), layer_types=["full_attention"]), "layer_types: needs one for each of the 32 layers, got 1"),
        (
            changed(Gemma3TextConfig(), layer_types=["linear_attention"] * 26),
            "layer_types: needs sliding_attention or full_attention, got linear_attention",
        ),
        (Gemma4TextConfig(use_bidirectional_attention="all"), "use_bidirectional_attention: needs null or vision, got all"),
        (Gemma4TextConfig(enable_moe_block=True, num_experts=4), "enable_moe_block: needs false, got true"),
        (
            Gemma4TextConfig(num_kv_shared_layers=25),
            "num_kv_shared_layers: needs at most 29, .*, got 25 .no full_attention has one.",
        ),
        (Gemma4TextConfig(num_kv_shared_layers=-1), "num_kv_shared_layers: needs a whole number of at least 0, got -1"),
        (
            Gemma4TextConfig(per_layer_config={0: {"num_attention_heads": 4}}),
            "per_layer_config: needs head_dim and num_key_value_heads only, got num_attention_heads",
        ),
        (
            Gemma4TextConfig(vocab_size_per_layer_input=90),
            "vocab_size_per_layer_input: needs a whole number of at least 262144, got 90",
        ),
        (changed(LlamaConfig(), rms_norm_eps=0.0), "rms_norm_eps: needs a number above 0, got 0.0"),
        (Qwen3MoeConfig(num_experts=4, num_experts_per_tok=8), "num_experts_per_tok: needs .*4.*, got 8"),
        (changed(Qwen3MoeConfig(), decoder_sparse_step=0), "decoder_sparse_step: needs a whole number of at least 1, got 0"),
        (changed(LlamaConfig(), model_type="bloom"), "model architecture: needs one of .*LlamaForCausalLM.*, got bloom"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else value.partition(":")[0],
)
def test_what_the_decoder_does_not_compute_is_refused(config: PretrainedConfig, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read_decoder_config(config)
    assert "\n" not in str(caught.value)


def test_a_window_counts_only_where_the_family_obeys_it() -> None:
    for config, window in ((changed(LlamaConfig(), sliding_window=7), None), (Phi3Config(sliding_window=7), 7)):
        assert {layer.sliding_window for layer in read_decoder_config(config).layers} == {window}


def test_equal_rotary_embeddings_are_computed_once() -> None:
    same = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma3TextConfig(rope_parameters={"full_attention": same, "sliding_attention": dict(same)})
    assert len(read_decoder_config(config).ropes) == 1
    different = read_decoder_config(Gemma3TextConfig())
    assert len(different.ropes) == 2
    assert [layer.rope for layer in different.layers[:7]] == [0, 0, 0, 0, 0, 1, 0]


ROWS: Mapping[str, PretrainedConfig] = {**plain_models.ROWS, **hybrid_models.ROWS}
ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
NUM_TOKENS = 40
"""More than any window."""
SAMPLE: tuple[tuple[str, str, Any, str], ...] = (
    ("minimax", "sliding_window", 5, "equal"),
    ("qwen3_5", "hidden_act", "gelu", "refused"),
    ("nemotron_h", "mamba_hidden_act", "gelu", "refused"),
    ("gpt2", "activation_function", "quick_gelu", "refused"),
    ("deepseek_v2", "mlp_bias", True, "refused"),
    ("deepseek_v2", "n_shared_experts", 0, "equal"),
    ("nemotron_h, experts", "mlp_bias", True, "refused"),
    ("mixtral", "hidden_act", "gelu", "refused"),
    ("gemma2", "final_logit_softcapping", 2.0, "equal"),
)
"""Family, field, value and result: one of each kind, for fast tests."""

Pair = Callable[[PretrainedConfig, Path], tuple[Tensor, Callable[[], Tensor]]]
"""Function that returns the results of transformers and of Headway for a random model saved in a folder."""


def decoders(config: PretrainedConfig, folder: Path) -> tuple[Tensor, Callable[[], Tensor]]:
    ids = torch.randint(3, 90, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    reference = save_random(config, folder)

    def ours() -> Tensor:
        model: Any = load_model(str(folder), "float32", skip_tokenizer_init=True, model_impl="headway").decoder
        return logits_of_text(model, ids)

    return reference(ids[None], use_cache=False).logits[0], ours


def encoders(config: PretrainedConfig, folder: Path) -> tuple[Tensor, Callable[[], Tensor]]:
    ids = [*range(3, 3 + NUM_TOKENS // 2)]
    name = config.model_type
    reference = save(EMBEDDERS[name][0], config, folder)

    def ours() -> Tensor:
        llm = LLM(str(folder), autotune_budget=0)
        return torch.tensor(llm.embed({"prompt_token_ids": ids}, use_tqdm=False)[0].outputs.embedding)

    return vector(reference, ids, EMBEDDERS[name][2]), ours


def verdict(pair: Pair, config: PretrainedConfig, field: str, value: Any, folder: Path) -> str:
    """Return equal, refused, none (transformers makes no model of it, or one whose logits are no numbers), or what is wrong."""
    stated = json.dumps({**json.loads(config.to_json_string(use_diff=False)), field: value})
    (folder / "config.json").write_text(stated)
    with torch.inference_mode():
        try:
            expected, ours = pair(AutoConfig.from_pretrained(folder), folder)
        except Exception:  # whatever transformers raises for values that do not go together
            return "none"
        (folder / "config.json").write_text(stated)
        try:
            found = ours()
        except HeadwayError as error:
            return _refused(error, field, value, stated, folder)
    if not expected.isfinite().all():
        return "none"
    apart = float((found - expected).abs().max())
    noise = float((found - expected).norm() / expected.norm())  # a few logits of some random weights amplify rounding
    return "equal" if apart < 1e-4 or noise < 2e-5 else f"{apart:.2g} apart"


def _refused(error: HeadwayError, field: str, value: Any, stated: str, folder: Path) -> str:
    """The verdict of a refusal. It names the field, or one that does not go with the field's new value."""
    config = AutoConfig.from_pretrained(folder)
    names = {field, *_keys(value), *_keys(json.loads(stated)), *config.attribute_map, *config.attribute_map.values()}
    named = re.search(r"(\w+)(: needs| needs|=)", str(error))
    if named is not None and named[1] in names:
        return "refused"
    if re.search(r"needs shape .* by config.json, got", str(error)):
        return "refused"  # transformers writes three convolutions of Olmo-Hybrid in equal thirds, whatever their sizes
    return f"refused without the field's name: {error}"


def _keys(value: object) -> Iterator[str]:
    for key, each in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _keys(each)


@pytest.mark.parametrize(("name", "field", "value", "expected"), SAMPLE, ids=lambda value: str(value))
def test_a_field_is_computed_or_refused_by_name(tmp_path: Path, name: str, field: str, value: Any, expected: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    assert verdict(decoders, ROWS[name], field, value, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROWS, *ENCODERS])
def test_each_field_that_transformers_reads_is_computed_or_refused_by_name(tmp_path: Path, name: str) -> None:
    if name in ENCODERS:
        model_class, config, _ = EMBEDDERS[name]
        pair: Pair = encoders
    else:
        config, pair = ROWS[name], decoders
        needs(FAMILIES[config.model_type].architecture)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    verdicts = {}
    for field in fields_read(type(config), model_class):
        for number, value in enumerate(changes(config, field)):
            folder = tmp_path / f"{field}-{number}"
            folder.mkdir()
            verdicts[field, str(value)] = verdict(pair, config, field, value, folder)
    wrong = {change: found for change, found in verdicts.items() if found not in ("equal", "refused", "none")}
    assert not wrong
    assert Counter(verdicts.values())["equal"] > 4, verdicts


NUMBERS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
COMMON = sizes(300, 64, 96, 2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2, **NUMBERS)
PLAIN = {
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**COMMON, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
    "qwen3": {**COMMON, "model_type": "qwen3", "head_dim": 32, "attention_bias": False, "rope_theta": 1000000},
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CHANGES = {
    "rope_theta": [None, 500000, "many", 1e4],
    "rope_scaling": [
        LLAMA3,
        {**LLAMA3, "extra": 1},
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0},
    ],
    "rope_parameters": [
        {**LLAMA3, "rope_theta": 5e5},
        None,
        {"rope_theta": 5e5, "rope_type": "default"},
        {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
    ],
    "sliding_window": [None, 16],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]],
    "head_dim": [None, 16, 32],
    "num_key_value_heads": [None, 4],
    "attention_bias": [True, None],
    "mlp_bias": [True],
    "tie_word_embeddings": [True, None],
    "eos_token_id": [None, [2, 3]],
    "dtype": ["float16", "float64", None],
    "hidden_act": ["gelu"],
    "rms_norm_eps": [1e-6, 1, 0.0],
    "partial_rotary_factor": [0.5],
    "use_cache": [False],
    "num_experts": [4, None],
    "decoder_sparse_step": [2, None],
    "norm_topk_prob": [False, None],
    "mlp_only_layers": [[], None],
}
_GONE = object()


def fields(config: Any) -> dict[str, Any]:
    """All that Headway reads of a configuration, or the reason why it refuses it."""
    try:
        decoder = dataclasses.asdict(read_decoder_config(config))
    except ModelError as error:
        return {"refused": str(error)}
    return {**decoder, "dtype": config.dtype, "eos": config.eos_token_id}


def by_transformers(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize("kind", PLAIN)
def test_an_ordinary_file_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN[kind]))
    plain = plain_config(PLAIN[kind])
    assert plain.dtype is torch.bfloat16
    assert fields(plain) == fields(by_transformers(tmp_path))


@pytest.mark.parametrize("spelling", [{"rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}])
def test_llama_3_1s_frequencies_are_transformers(tmp_path: Path, spelling: dict[str, Any]) -> None:
    changed = {**PLAIN["llama"], "rope_theta": 500000.0, **spelling}
    if "rope_parameters" in spelling:
        del changed["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(changed))
    plain, whole = plain_config(changed), by_transformers(tmp_path)
    assert plain is not None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](whole, torch.device("cpu"))
    found = read_decoder_config(plain)
    assert torch.equal(torch.tensor(found.ropes[0].inv_freq), expected)
    assert set(found.ropes[0].factors) == {factor} == {1.0}
    ratios = (expected * 500000.0 ** (torch.arange(0, 16, 2) / 16)).tolist()
    assert ratios[0] == pytest.approx(1), "a short wave is kept"
    assert 0.13 < ratios[1] < 0.99, "one between is interpolated"
    assert ratios[2] == pytest.approx(1 / 8), "a long one is stretched"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PLAIN)), st.dictionaries(st.sampled_from(sorted(CHANGES)), st.integers(0, 5), max_size=3))
def test_whatever_is_read_plainly_is_what_transformers_reads(tmp_path: Path, kind: str, chosen: dict[str, int]) -> None:
    changed = dict(PLAIN[kind])
    for name, number in chosen.items():
        value = [*CHANGES[name], _GONE][number % (len(CHANGES[name]) + 1)]
        changed.pop(name, None)
        if value is not _GONE:
            changed[name] = value
    plain = plain_config(changed)
    if plain is not None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert fields(plain) == fields(by_transformers(tmp_path)), changed


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-0.6b", "qwen3-30b-a3b"])  # hybrids are read by transformers
def test_shipped_shapes_need_no_transformers(shape: str) -> None:
    code = (
        "import sys; from pathlib import Path; from headway.models import loader; "
        f"loader.read_config(Path(loader.__file__).parent / 'shapes' / {shape!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
