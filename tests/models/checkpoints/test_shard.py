"""Tests of sharded decoders: every family gives the logits of one rank, and each rank reads only its shard of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2MoeConfig

import hybrid_models
import plain_models
from dense_attention import DenseAttention
from engine_logits import save_random
from headway.core.contract.adapters import AdapterSlots, rows_with
from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import Invariance
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.ranked_vocabulary import join_logits
from headway.models.checkpoints import tensor_files as files_module
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.layers.ranked import RankedOperations
from headway.models.loader import LoadOptions, load_model
from headway.models.shard import ModelShard
from plain_models import ROWS as PLAIN
from plain_models import SMALL, VOCAB
from quantized_models import FORMATS, GPT_OSS, QWEN3_MOE, save_both, save_mxfp4
from ranked_decoder import decoder_engine
from thread_ranks import LateSum, alone, on_ranks
from tiny_engine import Written, drain
from transformers_release import needs

UNEVEN = {**SMALL, "hidden_act": "silu", "moe_intermediate_size": 42, "num_experts": 12, "num_experts_per_tok": 3}
ROWS: dict[str, PretrainedConfig] = {
    **PLAIN,
    **hybrid_models.ROWS,
    "experts by expert": MixtralConfig(**{**SMALL, "intermediate_size": 42}, num_local_experts=8, num_experts_per_tok=2),
    "experts by expert, shared ones by column": Qwen2MoeConfig(**UNEVEN, shared_expert_intermediate_size=56),
    "more ranks than tokens": LlamaConfig(**{**SMALL, "vocab_size": 5}, tie_word_embeddings=True),
}
EVERY_DAY = {
    "deepseek_v3": "latent attention, queries of low rank, groups of experts, shared ones",
    "diffllama": "pairs of heads",
    "gpt2": "transposed and merged weights, learned positions, biases everywhere",
    "gpt_oss": "sinks, biases of experts, gate and up in turn",
    "olmo2": "norms of all heads as one",
    "phi3, rotated in part": "merged weights whose rows are put in order",
    "qwen3_next": "gated delta, a gated output",
    "falcon_h1, normed": "attention beside mamba2, norms that several ranks share",
    "jamba": "mamba1",
    "kimi_linear": "kda",
    "lfm2, biased": "short convolutions",
    "minimax": "lightning attention with a norm of all heads",
    "experts by expert, shared ones by column": "other experts on each rank",
    "more ranks than tokens": "a tied head of which one rank has nothing",
}
CASES = [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in ROWS]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_one_rank(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    save_random(ROWS[name], tmp_path)
    (expected,) = on_ranks(1, lambda ranks: logits_of(tmp_path, ranks))
    for size in (2, 4):
        of_ranks = on_ranks(size, lambda ranks: logits_of(tmp_path, ranks))
        assert all(torch.equal(found, of_ranks[0]) for found in of_ranks)
        torch.testing.assert_close(of_ranks[0], expected, rtol=0, atol=4e-5)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_same_with_sums_that_overlap(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    save_random(ROWS[name], tmp_path)
    whole = on_ranks(2, lambda ranks: logits_of(tmp_path, ranks))
    late = on_ranks(2, lambda ranks: logits_of(tmp_path, with_late_sums(ranks)))
    torch.testing.assert_close(late[0], whole[0], rtol=0, atol=4e-5)
    assert torch.equal(late[0], late[1])


def with_late_sums(ranks: Any) -> Any:
    ranks.late = LateSum(ranks)
    return ranks


def test_long_prompts_are_summed_in_equal_chunks_of_rows(tmp_path: Path) -> None:
    save_random(PLAIN["llama"], tmp_path)

    def rows(ranks: Any) -> list[int]:
        logits_of(tmp_path, with_late_sums(ranks))
        found: list[int] = ranks.late.rows
        return found

    assert on_ranks(2, rows) == [[6, 6, 6] * 6] * 2  # a row has 192 bytes, so that a sum has at most 6 rows


def test_a_quantized_gated_layer_runs_as_one_operation_in_chunks() -> None:
    inner: Any = MagicMock()
    inner.product.side_effect = lambda x, _: x.clone()
    inner.add_products.side_effect = lambda x, _: x
    inner.norm_gated_product.side_effect = lambda x, *_: x[:, :4] * 3
    ranks = SimpleNamespace(size=2, all_reduce=lambda x, onto: onto.add_(2 * x))
    late = LateSum(ranks)
    ranks.overlapped = lambda: late
    operations, x = RankedOperations(inner, ranks), torch.randn(90, 8)
    found = operations.add_product(torch.ones(90, 8), x, SimpleNamespace(summed=True))
    gated = operations.norm_gated_product(found, None, SimpleNamespace(weight="quantized"), "silu")
    torch.testing.assert_close(gated, (1 + 2 * x[:, :4]) * 3)
    assert late.rows == [30, 30, 30]


@pytest.mark.parametrize("adapted", [False, True])
def test_adapters_are_added_to_whole_steps(tmp_path: Path, adapted: bool) -> None:
    save_random(PLAIN["llama"], tmp_path)
    slots = torch.tensor([0] * 5 + [-1] * 4 + [1] * 9, dtype=torch.int32) if adapted else None
    whole = on_ranks(2, lambda ranks: adapted_step(tmp_path, ranks, slots)[0])
    late = on_ranks(2, lambda ranks: adapted_step(tmp_path, with_late_sums(ranks), slots))
    torch.testing.assert_close(late[0][0], whole[0], rtol=0, atol=4e-5)
    assert late[0][1] == (0 if adapted else 18), "sums that overlapped"


def adapted_step(folder: Path, ranks: Any, slots: Tensor | None) -> tuple[Tensor, int]:
    """Hidden states of a prompt, and the number of sums that overlapped."""
    options = LoadOptions(slots=AdapterSlots(2, 4))
    model: Any = load_model(str(folder), "float32", skip_tokenizer_init=True, ranks=ranks, options=options).decoder
    for product in model.adapters.products.values():
        product.a.fill_(0.1)
        product.b.fill_(0.1)
    attention = DenseAttention(model)
    attention.begin([(0, 18)])
    with rows_with(model.adapters, slots):
        hidden: Tensor = model(torch.arange(3, 21), torch.arange(18), attention)
    return hidden, 0 if ranks.late is None else len(ranks.late.rows)


def logits_of(folder: Path, ranks: Ranks, **options: Any) -> Tensor:
    """Logits of two prompts at once, and then of one more token of each."""
    model = load_model(str(folder), "float32", skip_tokenizer_init=True, ranks=ranks, **options).decoder
    ids = torch.randint(0, model.vocab_size, (20,), generator=torch.Generator().manual_seed(1))
    attention, logits = DenseAttention(model), []
    for step, places in (((11, 7), [*range(11), *range(7)]), ((1, 1), [11, 7])):
        attention.begin([*enumerate(step)])
        now, ids = ids.split([sum(step), len(ids) - sum(step)])
        logits.append(joined(model, model(now, torch.tensor(places), attention), ranks))
    assert logits[0].shape == (18, model.vocab_size)
    out = torch.empty(18, -(-model.vocab_size // ranks.size))
    assert model.compute_logits(torch.ones(18, model.config.hidden_size), out) is out
    return torch.cat(logits)


def joined(model: Any, hidden: Tensor, ranks: Ranks) -> Tensor:
    return join_logits(model.compute_logits(hidden), model.vocab_size, ranks)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_random_weights_are_those_of_one_rank(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    ROWS[name].save_pretrained(tmp_path)
    (expected,) = on_ranks(1, lambda ranks: logits_of(tmp_path, ranks, load_format="dummy"))
    (found, _) = on_ranks(2, lambda ranks: logits_of(tmp_path, ranks, load_format="dummy"))
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-5)


def test_specs_are_those_of_the_ranks_own_heads(tmp_path: Path) -> None:
    save_random(PLAIN["gpt_oss"], tmp_path)
    (whole,) = loaded(tmp_path, 1)
    heads = [sink for model in loaded(tmp_path, 4) for sink in model.attention_specs[0].sinks]
    assert tuple(heads) == whole.attention_specs[0].sinks
    for size, kv_heads in ((2, 1), (4, 1)):
        specs = loaded(tmp_path, size)[1].attention_specs
        assert {(spec.num_heads, spec.num_kv_heads) for spec in specs} == {(4 // size, kv_heads)}


def loaded(folder: Path, size: int) -> list[Any]:
    return on_ranks(size, lambda ranks: load_model(str(folder), "float32", skip_tokenizer_init=True, ranks=ranks).decoder)


def test_a_rank_reads_its_part_of_the_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SMALL, "intermediate_size": 160, "num_key_value_heads": 4}
    save_random(LlamaConfig(**sizes, head_dim=16), tmp_path)
    counted: list[int] = []
    monkeypatch.setattr(files_module, "safe_open", lambda *given, **options: Counting(counted, *given, **options))
    read = []
    for ranks in (ONE_RANK, *(alone(rank, 4) for rank in range(4))):
        counted.clear()
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True, ranks=ranks)
        read.append(sum(counted))
    norms = 7 * 48
    assert sum(read[1:]) == read[0] + 3 * norms
    assert max(read[1:]) <= (read[0] - norms) / 4 + 2 * 48 + norms, "the vocabulary of 97 alone is uneven"


class Counting:
    """A file of safetensors that counts the elements that are read."""

    def __init__(self, counted: list[int], *given: Any, **options: Any) -> None:
        self._counted, self._file = counted, files_module_safe_open(*given, **options)

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name), self._count)

    def _count(self, tensor: Tensor) -> Tensor:
        self._counted.append(tensor.numel())
        return tensor


class CountingSlice:
    def __init__(self, inner: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype
        self._inner, self._count = inner, count

    def __getitem__(self, places: Any) -> Tensor:
        return self._count(self._inner[places])


files_module_safe_open = files_module.safe_open


@pytest.mark.parametrize(
    ("name", "sums"), [("llama", 1 + 3 * 2), ("falcon_h1", 1 + 4 * 2), ("qwen3_moe", 1 + 3 * 2), ("olmo2", 1 + 3 * 3)]
)
def test_there_is_one_sum_over_ranks_for_each_part(tmp_path: Path, name: str, sums: int) -> None:
    ROWS[name].save_pretrained(tmp_path)

    def counted(ranks: Any) -> int:
        model: Any = load_model(str(tmp_path), "float32", load_format="dummy", ranks=ranks).decoder
        attention = DenseAttention(model)
        attention.begin([(0, 3)])
        model(torch.arange(3), torch.arange(3), attention)
        found: int = ranks.sums
        return found

    assert on_ranks(2, counted) == [sums, sums]


def test_a_rows_bits_do_not_depend_on_others_in_deterministic_mode(tmp_path: Path) -> None:
    save_random(PLAIN["mistral"], tmp_path)
    ids = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(2))

    def both(ranks: Ranks) -> list[Tensor]:
        options = {"skip_tokenizer_init": True, "options": LoadOptions(invariance=Invariance.BATCH)}
        model: Any = load_model(str(tmp_path), "float32", ranks=ranks, **options).decoder
        found = []
        for before in (0, 7):
            attention = DenseAttention(model)
            attention.begin([(0, before), (1, 5)] if before else [(1, 5)])
            places = torch.tensor([*range(before), *range(5)])
            found.append(joined(model, model(ids[7 - before :], places, attention)[before:], ranks))
        return found

    for by_itself, beside in on_ranks(4, both):
        assert torch.equal(by_itself, beside)


def changed(name: str, **values: Any) -> PretrainedConfig:
    return type(ROWS[name])(**{**ROWS[name].to_dict(), **values})


REFUSED = [
    ("llama", {}, 3, r"a divisor of the 4 attention heads, .* of the 80 columns of the MLP, .* 2 key-value heads, got 3"),
    ("llama", {}, 3, r"nearest that work: 2 and 4"),
    ("llama", {}, 1000, r"got 1000 \(nearest that works: 4\)"),
    ("llama", {"intermediate_size": 82}, 4, r"needs a divisor of the 82 columns of the MLP, got 4 \(nearest that works: 2\)"),
    ("mixtral", {"intermediate_size": 42}, 4, r"the experts' inner size 42 or of their number 6, got 4"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 58}, 4, r"needs a divisor of the shared experts' inner size 58, got 4"),
    ("bamba", {"mamba_n_groups": 8, "num_key_value_heads": 4}, 8, r"a divisor of the 4 attention heads, got 8"),
    ("diffllama", {}, 8, r"needs a divisor of the 4 pairs of attention heads, got 8 \(nearest that works: 4\)"),
    ("jamba", {}, 5, r"a divisor of the 96 heads of the state"),
    ("lfm2", {}, 5, r"a divisor of the 48 channels of the convolution"),
    ("deepseek_v3", {}, 3, r"needs a divisor of the 4 attention heads, a divisor of the 80 columns of the MLP"),
]


@pytest.mark.parametrize(("name", "values", "size", "words"), REFUSED)
def test_sizes_that_do_not_divide_are_named_with_what_does(name: str, values: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size: .*{words}"):
        ModelShard(read_decoder_config(changed(name, **values)), 0, size)


def test_they_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    PLAIN["llama"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size: .* got 3"):
        load_model(str(tmp_path), load_format="dummy", ranks=alone(0, 3))


def test_transformers_code_is_refused_with_more_than_one_rank(tmp_path: Path) -> None:
    PLAIN["llama"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="needs 1, or a model that Headway's decoder computes, got 2 .*model_impl='headway'"):
        load_model(str(tmp_path), load_format="dummy", model_impl="transformers", ranks=alone(0, 2))


WRITING = {**plain_models.ROWS, **hybrid_models.ROWS}
OFTEN_WRITTEN = {"qwen3_next"}
"""Families with experts, and with attention and a state."""
OFTEN = {
    2: {
        "qwen3_moe",
        "gemma3",
        "gpt2",
        "gpt_oss",
        "phi3",
        "diffllama",
        "olmo2",
        "deepseek_v3",
        "falcon_h1",
        "kimi_linear",
        "minimax",
        "jamba",
        "lfm2",
    },
    4: {"llama", "deepseek_v3", "nemotron_h, experts", "qwen3_next"},
}
"""Families of the slow tests, by the number of ranks: each is sharded differently. Logits of all are compared in test_shard.py,
and the others' tokens in `make soak`.
"""


def _marks(name: str, size: int) -> tuple[pytest.MarkDecorator, ...]:
    if size == 2 and name in OFTEN_WRITTEN:
        return ()
    return (pytest.mark.slow,) if name in OFTEN[size] else (pytest.mark.slow, pytest.mark.soak)


WRITTEN = [pytest.param(name, size, marks=_marks(name, size)) for size in OFTEN for name in WRITING]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.2, "n": 2},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    {"top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0, "prompt_logprobs": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), WRITTEN)
def test_several_processes_write_what_one_writes(tmp_path: Path, name: str, size: int) -> None:
    needs(FAMILIES[WRITING[name].model_type].architecture)
    save_random(WRITING[name], tmp_path)
    expected, found = write(tmp_path, 1), write(tmp_path, size)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert found[key].token_ids == one.token_ids, key
        for mine, theirs in zip(
            [*found[key].logprobs, *found[key].prompt_logprobs], [*one.logprobs, *one.prompt_logprobs], strict=True
        ):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe, fp8 blocks", "gpt_oss, mxfp4"])
def test_two_processes_read_their_parts_of_quantised_experts(tmp_path: Path, name: str) -> None:
    if name == "gpt_oss, mxfp4":
        folder = save_mxfp4(tmp_path, GPT_OSS)[0]
    else:
        folder = save_both(tmp_path, FORMATS["fp8 blocks"], QWEN3_MOE, plain=lambda module: module.endswith("mlp.gate"))[0]
    expected, found = write(folder, 1), write(folder, 2)
    assert {key: each.token_ids for key, each in found.items()} == {key: each.token_ids for key, each in expected.items()}


def write(folder: Path, size: int) -> dict[tuple[str, int], Written]:
    """Return the outputs of an engine with `size` ranks for prompts of which some are longer than a step."""
    engine = decoder_engine(folder, size)
    try:
        vocab_size = engine.limits.vocab_size
        for number, wish in enumerate(WISHES):
            prompt = [3 + (7 * place + number) % (vocab_size - 7) for place in range(5 + 9 * number)]
            params = SamplingParams(max_tokens=8, seed=number, ignore_eos=True, **wish)
            engine.add_request(str(number), engine.limits.checked(prompt, params))
        return drain(engine)
    finally:
        engine.executor.shutdown()
