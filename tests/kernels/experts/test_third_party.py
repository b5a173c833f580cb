"""A third party's kernel for layers of experts: registered, bound at load, measured, refused, left out, and named."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, Qwen3MoeConfig

from expert_layers import CONFIGS, UNGATED, Layer
from headway import LLM, SamplingParams
from headway.contract import API_VERSION, ExpertsCapabilities, ExpertsKernel, ExpertsKernelInfo, ExpertsSpec, ExpertsWeights
from headway.core.contract.errors import BackendError, UnknownBackendError, UnsupportedError
from headway.core.contract.weights import Int4Weight
from headway.core.select.costs import AxisTimes
from headway.kernels.experts.bound import BoundExperts, ExpertsOptions
from headway.kernels.experts.builtin import TOKEN_COUNTS, TOKENS
from headway.kernels.experts.plain import TorchExperts
from headway.kernels.experts.weights import spec_of
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.loader import LoadOptions, load_model
from headway.registry import create_registry, hookimpl
from headway.tuning.measure.experts import choose_experts
from quantized_models import FORMATS as STORED
from quantized_models import QWEN3_MOE, save_both
from sandbox import install

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SMALL = {**SIZES, "vocab_size": 128, "intermediate_size": 48, "max_position_embeddings": 256}
EXAMPLE = Path(__file__).parents[3] / "examples" / "headway-experts" / "headway_experts.py"
MOST = 16
"""Tokens up to which the kernel here runs."""


class Gathered(ExpertsKernel):
    """Gathers the weights of each pair and multiplies all pairs at once."""

    name = "gathered"
    capabilities = ExpertsCapabilities(
        formats=frozenset({"plain"}), dtypes=(torch.float32, torch.bfloat16), devices=("cpu",), max_tokens=MOST
    )
    calls = 0

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
        type(self).calls += 1
        chosen = experts.long()
        gate, up = torch.einsum("tsnk,tk->tsn", weights.gate_up[chosen], x).chunk(2, dim=2)
        out += torch.einsum("tshn,tsn,ts->th", weights.down[chosen], silu(gate) * up, scores.to(x.dtype))


class Wrong(Gathered):
    """Forgets the scores."""

    name = "wrong"

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
        super().apply(x, experts, torch.ones_like(scores), weights, out)


class Raising(Gathered):
    """Raises once it has served some steps, as many as its trial takes."""

    name = "raising"
    good = 10**9

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
        if type(self).calls >= self.good:
            raise RuntimeError("no room")
        super().apply(x, experts, scores, weights, out)


class Bringing:
    """A plugin that brings kernels."""

    def __init__(self, *kernels: type[ExpertsKernel]) -> None:
        self.kernels = kernels

    @hookimpl
    def headway_register_kernels(self) -> Iterable[ExpertsKernelInfo]:
        return [
            ExpertsKernelInfo(each.name, "a test's", lambda each=each: each, devices=("cpu",), api_version=API_VERSION)
            for each in self.kernels
        ]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    for each in (Gathered, Wrong, Raising):
        monkeypatch.setattr(each, "calls", 0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model each of whose tokens passes 8 of 64 experts, so that one expert after the other takes long."""
    place = tmp_path_factory.mktemp("moe")
    Qwen3MoeConfig(**SMALL, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=24).save_pretrained(place)
    return str(place)


def served(folder: str, *kernels: type[ExpertsKernel], length: int = 5, **options: object) -> list[int]:
    """The tokens that a model continues a prompt with."""
    options = {"plugins": [Bringing(*kernels)], "autotune_budget": 0.0, **options}
    sizes = {"kv_cache_memory": "4MiB", "num_threads": 1, "block_size": 16, "attn_backend": "sdpa.math"}
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **sizes, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([list(range(1, length + 1))], params, use_tqdm=False)
    return output.outputs[0].token_ids


def bound(config: object, *kernels: type[ExpertsKernel], requested: str = "auto", form: str = "") -> BoundExperts:
    layer = Layer(config, torch.float32, hidden=64)
    options = ExpertsOptions(lambda device: [TorchExperts, *kernels], requested)
    weights = layer.quantized(form) if form else layer.weights(torch.float32)
    ops = TorchOperations(torch.empty(1, 1), torch.empty(1, 1), options)
    return ops.experts(config, weights, layer.norm_of(torch.float32))


PLAIN = replace(CONFIGS["mixtral"], intermediate_size=64)


def test_a_named_kernel_serves_a_model_as_torch_does(folder: str) -> None:
    expected = served(folder)
    assert served(folder, Gathered, experts_kernel="gathered") == expected
    assert Gathered.calls >= 2 * 6
    assert served(folder, Gathered, experts_kernel="torch") == expected


def test_the_fastest_serves_where_it_runs_and_is_measured_once(
    folder: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")
    expected = served(folder)
    assert served(folder, Gathered, autotune_budget=20.0) == expected
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("experts: gathered from 1")]
    assert ", torch from 32 tokens on (measured" in line
    assert served(folder, Gathered, length=MOST + 9, autotune_budget=20.0) == served(folder, length=MOST + 9)
    assert sum("auto: measuring" in each.getMessage() for each in caplog.records) == 1


def test_nothing_is_measured_where_there_is_no_choice(folder: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    decoder = load_model(folder, load_format="dummy", skip_tokenizer_init=True).decoder
    assert decoder.expert_kinds == []
    served(folder, autotune_budget=20.0)
    assert "experts:" not in caplog.text


def test_a_third_party_is_not_chosen_unmeasured(folder: str) -> None:
    served(folder, Gathered)
    assert Gathered.calls == 4, "its trials, for one token and for a few"


def test_an_entry_point_brings_the_kernel_of_the_example(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "example_of_experts", EXAMPLE.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = create_registry()
    assert registry.experts.entries["gathered"].owner == "example_of_experts 1.0"
    caplog.set_level(logging.INFO, "headway")
    assert served(folder, plugins=(), registry=registry, experts_kernel="gathered") == served(folder)
    assert "experts: gathered from 1, torch from 32 tokens on (gathered was asked for)" in caplog.text
    sys.modules.pop("example_of_experts", None)


def test_a_wrong_kernel_is_left_out_with_the_numbers(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    assert served(folder, Wrong, autotune_budget=5.0) == served(folder)
    assert "experts: excluding wrong: its answer is off by " in caplog.text
    with pytest.raises(BackendError, match=r"^experts kernel wrong: its answer is off by \d\.\de[+-]\d+ with 1 tokens$"):
        served(folder, Wrong, experts_kernel="wrong")


def test_one_that_raises_in_a_step_is_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    layer = bound(PLAIN, Raising)
    layer.kind.use_times(AxisTimes(TOKENS, {"raising": [1.0] * len(TOKEN_COUNTS), "torch": [9.0] * len(TOKEN_COUNTS)}, "a test"))
    x = torch.randn(3, 64)
    expected = bound(PLAIN)(x.clone())
    torch.testing.assert_close(layer(x.clone()), expected)
    Raising.good, good = 0, Raising.good
    try:
        torch.testing.assert_close(layer(x.clone()), expected)
        torch.testing.assert_close(layer(x.clone()), expected)
        assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == [
            "experts: excluding raising: it raised RuntimeError: no room"
        ]
        assert "got it raised RuntimeError: no room" in str(layer.kind.refused["raising"])
        with pytest.raises(BackendError, match="^experts kernel raising: it raised RuntimeError: no room$"):
            bound(PLAIN, Raising, requested="raising")(x.clone())
    finally:
        Raising.good = good


def test_memory_that_runs_out_blames_no_kernel() -> None:
    class Full(Gathered):
        name = "full"

        def apply(self, *_: object) -> None:
            raise torch.OutOfMemoryError("none left")

    layer = bound(PLAIN, Full, requested="full")
    with pytest.raises(torch.OutOfMemoryError):
        layer(torch.randn(3, 64))
    assert "full" in layer.kind.kernels


def test_a_kernel_that_cannot_prepare_weights_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Unprepared(Gathered):
        name = "unprepared"

        def prepare(self, weights: ExpertsWeights) -> object:
            raise ArithmeticError("scales out of range")

    layer = bound(PLAIN, Unprepared)
    choose_experts([layer.kind], 0.0)
    assert "excluding unprepared: ArithmeticError: scales out of range" in caplog.text
    assert list(layer.kind.kernels) == ["torch"]


@pytest.mark.parametrize(
    ("config", "form", "reason"),
    [
        (replace(CONFIGS["gpt_oss"], intermediate_size=64), "", "biases: needs none, got a layer with biases"),
        (
            replace(CONFIGS["gpt_oss"], intermediate_size=64),
            "",
            "activation: needs plain SiLU, got a gate with a factor or limits",
        ),
        (replace(UNGATED, intermediate_size=64), "", "activation: needs a gate with SiLU, got one product with the squared ReLU"),
        (PLAIN, "mxfp4", "weight format: needs plain, got mxfp4"),
        (replace(PLAIN, held=range(2, 6)), "", "experts: needs all of the layer's, got 4 of 8"),
    ],
)
def test_a_layer_outside_its_claims_is_refused_with_reasons(
    config: object, form: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ExpertsOptions(lambda device: [TorchExperts, Gathered], "gathered")
    layer = Layer(replace(config, held=None), torch.float32, hidden=64)
    weights = layer.quantized(form) if form else layer.weights(torch.float32)
    if config.held is not None:
        weights = replace(weights, gate_up=weights.gate_up[2:6], down=weights.down[2:6])
    ops = TorchOperations(torch.empty(1, 1), torch.empty(1, 1), options)
    kind = ops.experts(config, weights, layer.norm_of(torch.float32)).kind
    assert list(kind.kernels) == ["torch"]
    assert "experts: gathered does not support" in caplog.text
    with pytest.raises(UnsupportedError) as raised:
        options.check()
    assert reason in str(raised.value)


def test_a_name_that_cannot_be_is_an_error(folder: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownBackendError, match="experts kernel: asked for 'gatherd'"):
        served(folder, Gathered, experts_kernel="gatherd")
    with pytest.raises(UnsupportedError, match=r"experts kernel cuda\.rows8 cannot be used here"):
        served(folder, experts_kernel="cuda.rows8")
    with pytest.raises(
        UnsupportedError, match="batch_invariant: needs a kernel that declares it, in deterministic mode, got one that"
    ):
        served(folder, Gathered, experts_kernel="gathered", deterministic=True)
    claims = replace(Gathered.capabilities, batch_invariant=True)
    declaring = type("Declaring", (Gathered,), {"name": "declaring", "capabilities": claims, "apply": token_by_token})
    with pytest.raises(
        UnsupportedError, match="needs a kernel for any number of rows, in deterministic mode, got one for up to 16"
    ):
        served(folder, declaring, experts_kernel="declaring", deterministic=True)
    declaring.capabilities = replace(declaring.capabilities, max_tokens=None)
    declaring.calls = 0
    found = served(folder, declaring, experts_kernel="declaring", deterministic=True)
    assert declaring.calls > 2 * 6
    assert found == served(folder, deterministic=True)
    drifting = type("Drifting", (declaring,), {"name": "drifting", "apply": drifts})
    with pytest.raises(
        BackendError, match="^experts kernel drifting: batch_invariant: the bits of a token depend on the others$"
    ):
        served(folder, drifting, experts_kernel="drifting", deterministic=True)
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="model: needs layers of experts, got one without"):
        served(str(tmp_path), Gathered, experts_kernel="gathered")


def token_by_token(self: Gathered, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
    for token in range(len(x)):
        one = slice(token, token + 1)
        Gathered.apply(self, x[one], experts[one], scores[one], weights, out[one])


def drifts(self: Gathered, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
    """Add what is right, times a factor that the number of tokens changes."""
    token_by_token(self, x, experts, scores * (1 + 1e-6 * len(x)), weights, out)


def test_weights_stay_quantised_where_a_kernel_reads_them(tmp_path: Path) -> None:
    """On a CPU torch expands them, or packs them, where that kernel does not serve."""

    class Int4(ExpertsKernel):
        name = "int4"
        capabilities = ExpertsCapabilities(formats=frozenset({"int4"}), dtypes=(torch.float32,), devices=("cpu",))

        def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
            assert isinstance(weights.gate_up, Int4Weight)
            torch_kernel = TorchExperts(self.spec)
            torch_kernel.apply(x, experts, scores, torch_kernel.prepare(weights), out)

    quantized, _ = save_both(tmp_path, STORED["compressed int4"], QWEN3_MOE, plain=lambda name: name.endswith("mlp.gate"))
    found = []
    for name in ("auto", "int4"):
        options = LoadOptions(experts=ExpertsOptions(lambda device: [TorchExperts, Int4], name))
        decoder = load_model(str(quantized), "float32", skip_tokenizer_init=True, options=options).decoder
        bound_layer = next(layer.mlp.compute for layer in decoder.layers if hasattr(layer.mlp, "compute"))
        assert bound_layer.kind.spec.gate_up.name == "int4"
        assert bound_layer.kind.kernel_for(3).name == ("torch" if name == "auto" else "int4")
        found.append(bound_layer(torch.randn(3, bound_layer.kind.spec.hidden_size, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(*found)


def test_layers_of_one_spec_share_kernels_and_hold_no_copy_that_nobody_reads() -> None:
    layers: list[BoundExperts] = []
    options = ExpertsOptions(lambda device: [TorchExperts, Gathered])
    layer = Layer(PLAIN, torch.float32, hidden=64)
    ops = TorchOperations(torch.empty(1, 1), torch.empty(1, 1), options)
    for _ in range(2):
        layers.append(ops.experts(PLAIN, layer.weights(torch.float32), layer.norm_of(torch.float32)))
    first, second = layers
    kind = first.kind
    assert kind is second.kind
    assert first.weights is not None, "which the kernel that is not chosen yet may need"
    kind.use_times(AxisTimes(TOKENS, {"gathered": [9.0] * len(TOKEN_COUNTS), "torch": [1.0] * len(TOKEN_COUNTS)}, "a test"))
    kind.prepare()
    assert (first.weights, second.weights, list(kind.kernels)) == (None, None, ["torch"])
    gone = ref(second)
    layers.clear()
    del second
    gc.collect()
    assert gone() is None, "a layer that is rebuilt leaves nothing behind"


def test_our_kernels_names_are_those_that_times_are_stored_by() -> None:
    names = create_registry(load_entry_points=False).experts.entries
    assert list(names)[:4] == ["torch", "cuda.rows8", "cuda.rows16", "triton.rows"]
    assert {"triton.rows.4warps", "triton.tiles16x64x128.swapped.whole", "triton.tiles128x64x128.swapped"} <= set(names)
    assert {"torch.grouped_mm", "dequantize+triton.tiles128x128x64", "dequantize+torch.grouped_mm", "cuda.lots64"} <= set(names)


def test_a_spec_names_the_layer() -> None:
    layer = Layer(PLAIN, torch.float32, hidden=64)
    spec: ExpertsSpec = spec_of(PLAIN, layer.quantized("mxfp4"))
    assert str(spec) == "8 experts of 64, 2 a token, hidden 64, mxfp4, float32"
