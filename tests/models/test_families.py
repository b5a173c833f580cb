"""Tests that unsupported settings of a family are refused in one line that names the key."""

from __future__ import annotations

import copy
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
    DiffLlamaConfig,
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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hybrid_models
import plain_models
from config_changes import changes, fields_read
from config_defaults import defaults_of
from dense_attention import logits_of_text
from engine_logits import save_random
from headway import LLM
from headway.core.contract.errors import HeadwayError, ModelError
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.families.plain_config import DEFAULTS, plain_config
from headway.models.families.rope import read_rope
from headway.models.loader import config_of, load_model
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
        (DiffLlamaConfig(num_key_value_heads=1), "num_key_value_heads: needs an even number for differential attention, got 1"),
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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32}
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
        "max_window_layers": 2,
    },
    "gemma2": {**COMMON, **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid"},
    "gemma3_text": {**COMMON, **GEMMA, "model_type": "gemma3_text", "rope_local_base_freq": 1e4, "sliding_window_pattern": 2},
    "gemma4_text": {**{key: COMMON[key] for key in COMMON if key != "rope_theta"}, **GEMMA, "model_type": "gemma4_text"}
    | {"global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**COMMON, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    | {"sliding_window": 32, "rope_scaling": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
    "mixtral": {**COMMON, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": {**COMMON, "model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 128, "pad_token_id": 0},
    "smollm3": {**COMMON, "model_type": "smollm3", "use_sliding_window": False, "no_rope_layer_interval": 2},
}
"""As transformers 4 wrote them; SAVED are those of transformers 5."""
READ = json.loads(DEFAULTS.read_text())
_MORE = {
    f"reads images, {config.model_type}": config
    for config in (*plain_models.GEMMA4_READS_IMAGES[::2], hybrid_models.READS_IMAGES)
}
SAVED = {
    f"{name}, saved": {**json.loads(config.to_json_string()), "dtype": "bfloat16"}
    for name, config in {**ROWS, **_MORE}.items()
    if config.model_type in READ and name not in ("gpt2", "qwen2")  # with keys of other models, and with a window
}
BOTH = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
CHANGES: dict[str, list[Any]] = {
    "rope_theta": [None, 500000, "many", 1e4],
    "rope_scaling": [
        *(
            LLAMA3,
            {**LLAMA3, "extra": 1},
            None,
            {},
            LINEAR,
            {"type": "linear", "factor": 2},
            {"type": "yarn", "factor": 4.0},
            YARN,
        ),
        *({**YARN, "truncate": False}, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, {**YARN, "attention_factor": 1.5}, LONG),
        *(
            {**LONG, "factor": 3.0},
            {**LONG, "short_factor": [1.0] * 6, "long_factor": [2] * 6},
            {"type": "su"},
            {"type": "dynamic"},
        ),
        *({**LONG, "original_max_position_embeddings": 64}, {"rope_type": "default", "partial_rotary_factor": 0.5}, BOTH),
    ],
    "rope_parameters": [
        *(
            {**LLAMA3, "rope_theta": 5e5},
            None,
            {},
            {"rope_theta": 5e5, "rope_type": "default"},
            {**LINEAR, "rope_theta": 5e5},
            YARN,
        ),
        *({**YARN, "rope_theta": 5e5}, LONG, BOTH, {**BOTH, "full_attention": {**YARN, "rope_theta": 5e5}}),
        *({**BOTH, "full_attention": LINEAR}, {**BOTH, "full_attention": None}, {"full_attention": BOTH["full_attention"]}),
    ],
    "rope_local_base_freq": [None, 5000, 2e4],
    "partial_rotary_factor": [0.5, 1.0, None],
    "max_position_embeddings": [64, 4096, None],
    "original_max_position_embeddings": [64, None],
    "sliding_window": [None, 16],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "layer_types": [
        *(None, ["full_attention"] * 2, ["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]),
        *(["linear_attention"] * 2, ["attention", "full_attention"], []),
    ],
    "sliding_window_pattern": [1, 2, 3, None],
    "full_attention_interval": [1, 3],
    "no_rope_layer_interval": [1, 3],
    "no_rope_layers": [None, [1, 0]],
    "num_hidden_layers": [1, 2, 7],
    "head_dim": [None, 16, 32],
    "global_head_dim": [16, 24, None],
    "num_global_key_value_heads": [1, None],
    "attention_k_eq_v": [True, False],
    "per_layer_config": [{}, {"01": {"head_dim": 24}}, {"1": {"num_attention_heads": 2}}, {"7": {"head_dim": 24}}, None],
    "num_key_value_heads": [None, 4],
    "hidden_size": [128, 66],
    "attention_bias": [True, None],
    "mlp_bias": [True],
    "tie_word_embeddings": [True, None],
    "eos_token_id": [None, [2, 3]],
    "dtype": ["float16", "float64", None],
    "hidden_act": ["gelu"],
    "hidden_activation": ["gelu", None],
    "attn_logit_softcapping": [None, 3.0, 3],
    "use_bidirectional_attention": [None, True, False, "vision", "all"],
    "rms_norm_eps": [1e-6, 1, 0.0],
    "use_cache": [False],
    "num_experts": [4, None],
    "num_local_experts": [4, None],
    "decoder_sparse_step": [2, None],
    "norm_topk_prob": [False, None],
    "mlp_only_layers": [[], None],
    "moe_layer_freq": [2, None],
    "scoring_func": ["softmax", 1],
    "topk_method": ["greedy", "noaux_tc", None],
    "auto_map": [{"AutoConfig": "configuration_phi3.Phi3Config"}, {}, None, "x"],
}
_GONE = object()


def fields(config: Any) -> dict[str, Any]:
    """All that Headway reads of a configuration, or the reason why it refuses it."""
    try:
        decoders = [dataclasses.asdict(read_decoder_config(config, longest)) for longest in (None, 48, 10**6)]
    except Exception as error:  # as load_model does, which gives all of them a line
        return {"refused": str(error)}
    return {"decoders": decoders, "dtype": config.dtype, "eos": config.eos_token_id}


def by_transformers(folder: Path, stated: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(stated))
    return config_of(folder, stated, plain=False)


@pytest.mark.parametrize("kind", [*PLAIN, *SAVED])
def test_an_ordinary_file_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    stated = {**PLAIN, **SAVED}[kind]
    before = json.dumps(stated)
    assert plain_config(stated) is not None
    plain = config_of(tmp_path, stated)
    assert plain.dtype is torch.bfloat16
    assert fields(plain) == fields(by_transformers(tmp_path, stated))
    assert json.dumps(stated) == before, "the checkpoint's other readers need it as it is"


def test_defaults_are_those_of_transformers() -> None:
    needs("the defaults in config_defaults.json")
    assert {kind: defaults_of(kind) for kind in READ} == READ


@pytest.mark.parametrize("spelling", [{"rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}])
def test_llama_3_1s_frequencies_are_transformers(tmp_path: Path, spelling: dict[str, Any]) -> None:
    changed = {**PLAIN["llama"], "rope_theta": 500000.0, **spelling}
    if "rope_parameters" in spelling:
        del changed["rope_theta"]
    plain, whole = plain_config(changed), by_transformers(tmp_path, changed)
    assert plain is not None
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](whole, torch.device("cpu"))
    found = read_decoder_config(plain)
    assert torch.equal(torch.tensor(found.ropes[0].inv_freq), expected)
    assert set(found.ropes[0].factors) == {factor} == {1.0}
    ratios = (expected * 500000.0 ** (torch.arange(0, 16, 2) / 16)).tolist()
    assert ratios[0] == pytest.approx(1), "a short wave is kept"
    assert 0.13 < ratios[1] < 0.99, "one between is interpolated"
    assert ratios[2] == pytest.approx(1 / 8), "a long one is stretched"


_NUMBERS = st.floats(0.125, 4.0)
_LENGTHS = st.integers(16, 8192)
_STRETCHED = {"factor": st.floats(0.5, 40.0), "attention_factor": st.none() | _NUMBERS}
_PARTS = {
    "rope_theta": st.floats(10.0, 1e7) | st.integers(10, 10**7),
    "original_max_position_embeddings": _LENGTHS,
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
}
_YARN = {"truncate": st.booleans(), "mscale": _NUMBERS, "mscale_all_dim": _NUMBERS, "beta_fast": st.none() | st.floats(2.0, 64.0)}
_FACTORS = dict.fromkeys(("short_factor", "long_factor"), st.lists(_NUMBERS, min_size=16, max_size=16))
ROPES = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), **_PARTS, "factor": _STRETCHED["factor"]},
    optional={**_YARN, "beta_slow": _NUMBERS, "attention_factor": _STRETCHED["attention_factor"]},
) | st.fixed_dictionaries({"rope_type": st.just("longrope"), **_PARTS, **_FACTORS}, optional=_STRETCHED)


@settings(max_examples=200, deadline=None)
@given(ROPES, _LENGTHS, _LENGTHS, st.booleans())
def test_yarn_and_longrope_are_transformers(rope: dict[str, Any], longest: int, most: int, nested: bool) -> None:
    half = int(32 * rope["partial_rotary_factor"]) // 2
    rope |= {name: rope[name][:half] for name in _FACTORS if name in rope}
    both = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kind: Any = Gemma3TextConfig if nested else LlamaConfig
    config = kind(**sizes(90, 128, 96, 2), head_dim=32, max_position_embeddings=most, rope_parameters=both if nested else rope)
    layer_type = "full_attention" if nested else None
    compute: Any = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    expected, factor = compute(config, torch.device("cpu"), seq_len=longest, layer_type=layer_type)
    found = read_rope(config, 32, layer_type, longest)
    assert torch.equal(torch.tensor(found.inv_freq[:half]), expected)
    assert set(found.factors[:half]) == {factor}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*PLAIN, *SAVED]), st.dictionaries(st.sampled_from(sorted(CHANGES)), st.integers(0, 19), max_size=4))
def test_whatever_is_read_plainly_is_what_transformers_reads(tmp_path: Path, kind: str, chosen: dict[str, int]) -> None:
    changed = copy.deepcopy({**PLAIN, **SAVED}[kind])
    for name, number in chosen.items():
        place = changed["text_config"] if number % 2 and "text_config" in changed else changed
        value = [*CHANGES[name], _GONE][number % (len(CHANGES[name]) + 1)]
        place.pop(name, None)
        if value is not _GONE:
            place[name] = value
    if plain_config(changed) is not None:
        assert fields(config_of(tmp_path, changed)) == fields(by_transformers(tmp_path, changed)), changed


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize("shape", ["gemma-4-e2b", "gpt-oss-20b", "llama-3-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"])
def test_shipped_shapes_need_no_transformers(shape: str) -> None:
    code = (
        "import sys; from pathlib import Path; from headway.models import loader; "
        f"loader.read_config(Path(loader.__file__).parent / 'shapes' / {shape!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow  # a process
def test_a_start_needs_no_transformers(tmp_path: Path) -> None:
    kinds = ("llama", "qwen2", "gemma3_text", "gemma4_text", "gpt_oss", "phi3")
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(PLAIN[kind]))
    code = (
        "import sys; from headway import LLM, SamplingParams\n"
        f"for kind in {kinds}:\n"
        f"    llm = LLM({str(tmp_path)!r} + '/' + kind, load_format='dummy', device='cpu', autotune_budget=0)\n"
        "    llm.generate({'prompt_token_ids': [5, 6, 7]}, SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "    assert 'transformers' not in sys.modules, kind\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
