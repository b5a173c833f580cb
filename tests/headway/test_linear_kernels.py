"""Third parties' kernels for linear layers: served through `LLM`, chosen by time, refused with reasons, replaced if they fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from headway import LLM, SamplingParams
from headway.contract import (
    BackendError,
    ConfigError,
    LinearCapabilities,
    LinearKernel,
    LinearParts,
    PluginError,
    UnknownBackendError,
)
from headway.core.contract.linear import LinearSpec
from headway.core.contract.weights import WeightFormat
from headway.core.select.costs import AxisTimes
from headway.core.system.files import cache_folder
from headway.hosting import assembly
from headway.kernels.linear.choice import ROW_COUNTS, ROWS
from headway.kernels.linear.linear import Applied, Linear
from headway.models.layers.decoder import Decoder
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from headway.tuning.measure.linear import choose_linear_kernels
from headway.tuning.measure.timing import InterleavedTimer, Timing
from headway.tuning.table.files import read_table
from plain_models import sizes
from quantized_models import FORMATS, save_both
from sandbox import install
from tiny_encoders import embedder

EXAMPLE = Path(__file__).parents[2] / "examples" / "headway-int4" / "headway_int4.py"
CPU = torch.device("cpu")
SMALL = {**sizes(128, 64, 96, 2), "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [[5, 9, 2, 44, 7]]
OPTIONS: dict[str, Any] = {"kv_cache_memory": "4MiB", "num_threads": 1, "skip_tokenizer_init": True, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny int4 checkpoint, and the plain one that it stands for."""
    return save_both(tmp_path_factory.mktemp("models"), FORMATS["compressed int4"])


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_file(EXAMPLE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return iter(())


def test_the_page_shows_the_example() -> None:
    source = EXAMPLE.read_text()
    page = (EXAMPLE.parents[2] / "docs" / "tutorial-linear-kernel.md").read_text()
    assert source[source.index("import torch") :].rstrip() in page


def mine(example: ModuleType, **body: Any) -> type[LinearKernel]:
    """The example's kernel with other methods."""
    return type("Mine", (example.Int4,), {"name": "mine", **body})


def serve(folder: Path, *kernels: type[LinearKernel], **options: Any) -> LLM:
    return LLM(str(folder), backends=list(kernels), **{**OPTIONS, **options})


def answer(llm: LLM) -> list[int]:
    return [*llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids]


def layers_of(llm: LLM) -> list[Linear]:
    assert isinstance(llm.model.decoder, Decoder)
    return [linear for linear, _ in llm.model.decoder.products]


def kernels_of(llm: LLM) -> set[str]:
    """Names of the kernels that serve steps of few rows."""
    return {layer.choice.kernel_for(1) for layer in layers_of(llm) if layer.choice is not None}


def test_a_class_that_the_user_names_serves_a_model(folders: tuple[Path, Path], example: ModuleType) -> None:
    quantized, dense = folders
    calls: list[int] = []

    def apply(self: LinearKernel, x: Tensor, weight: Any, out: Tensor) -> None:
        calls.append(len(x))
        example.Int4.apply(self, x, weight, out)

    llm = serve(quantized, mine(example, apply=apply), linear_kernel="mine")
    assert answer(llm) == answer(serve(dense))
    assert set(calls) >= {1, 5}, "prompt and decode"
    assert kernels_of(llm) == {"mine"}


def test_a_plugin_that_is_installed_brings_one(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, "headway_int4_here", EXAMPLE.read_text().replace('"int4",', '"int4_here",').replace('"int4"\n', '"int4_here"\n')
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = serve(folders[0], linear_kernel="int4_here")
    assert kernels_of(llm) == {"int4_here"}
    assert answer(llm) == answer(serve(folders[1]))


class Told(InterleavedTimer):
    """Says that the built-in kernel takes 50 us, and the third party's as long as given."""

    def time(self, calls: Any, device: torch.device, check: Any = None) -> list[Timing | Exception]:
        for call in calls:
            call()
        return [Timing(us, us, us) for us in (50.0, MINE_US[0])[: len(calls)]]


MINE_US = [10.0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have starts measure linear layers, and nothing else; the third party's kernel takes this many microseconds."""
    monkeypatch.setattr(
        assembly,
        "choose_linear_kernels",
        lambda choices, *_, registry: choose_linear_kernels(choices, 60.0, timer=Told(), registry=registry),
    )
    MINE_US[:] = [10.0]
    return MINE_US


@pytest.mark.parametrize(("us", "fastest"), [(10.0, "mine"), (90.0, "expanded")])
def test_times_decide(folders: tuple[Path, Path], example: ModuleType, us: float, fastest: str, measured: list[float]) -> None:
    measured[:] = [us]
    llm = serve(folders[0], mine(example))
    assert kernels_of(llm) == {fastest}
    assert all("measured" in choice.source for choice in llm.model.decoder.linear_choices)
    assert all(isinstance(layer.weight, Tensor) == (fastest == "expanded") for layer in layers_of(llm)), "settled"
    assert answer(llm) == answer(serve(folders[1]))


def test_a_changed_plugin_is_measured_again(
    folders: tuple[Path, Path],
    tmp_path: Path,
    measured: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, "mine_of_int4", EXAMPLE.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    for more, found in (("", 4), ("", 0), ("# other tiles", 4), ("", 0)):
        if more:
            (tmp_path / "mine_of_int4.py").write_text(EXAMPLE.read_text() + more)
        caplog.clear()
        LLM(str(folders[0]), registry=create_registry(), **OPTIONS)
        texts = [record.getMessage() for record in caplog.records]
        assert sum("auto: measuring kernels for int4" in text for text in texts) == found
        assert sum("files of the plugin of int4: measured with " in text for text in texts) == found * bool(more)
    sys.modules.pop("mine_of_int4", None)


def test_without_a_measurement_the_rule_keeps_headways_own(folders: tuple[Path, Path], example: ModuleType) -> None:
    llm = serve(folders[0], mine(example))
    assert kernels_of(llm) == {"expanded"}
    assert all(isinstance(layer.weight, Tensor) for layer in layers_of(llm))


def test_what_it_cannot_serve_is_refused_with_every_reason(folders: tuple[Path, Path], example: ModuleType) -> None:
    spec = LinearSpec(128, 64, torch.float32, CPU, WeightFormat("fp8"))
    support = create_registry([mine(example)], load_entry_points=False).linear.supports("mine", spec)
    assert "weight format: needs int4, got fp8" in str(support)
    with pytest.raises(
        ConfigError, match=r"linear_kernel: needs auto, or a kernel that serves a layer .* weight format: needs int4"
    ):
        serve(folders[1], mine(example), linear_kernel="mine")
    with pytest.raises(UnknownBackendError, match="nobody"):
        serve(folders[1], linear_kernel="nobody")


def test_a_layer_that_the_named_kernel_cannot_serve_takes_what_auto_takes(
    folders: tuple[Path, Path], example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")

    @classmethod
    def supports(cls: type[LinearKernel], spec: LinearSpec) -> Any:
        from headway.contract import Support

        found = cls.capabilities.check(spec)
        return found if spec.in_features == 128 else found & Support.no("in_features", "128", spec.in_features)

    llm = serve(folders[0], mine(example, supports=supports), linear_kernel="mine")
    assert kernels_of(llm) == {"mine", "torch"}
    assert "--linear-kernel mine does not support it: no: in_features: needs 128, got 256" in caplog.text
    assert answer(llm) == answer(serve(folders[1]))


def wrong(self: LinearKernel, x: Tensor, weight: Any, out: Tensor) -> None:
    out.fill_(1.0)


def test_a_wrong_one_is_left_out_with_the_numbers(
    folders: tuple[Path, Path], example: ModuleType, caplog: pytest.LogCaptureFixture, measured: list[float]
) -> None:
    llm = serve(folders[0], mine(example, apply=wrong))
    assert "skipping mine from 1 rows on: ArithmeticError: its answer is off by" in caplog.text
    assert kernels_of(llm) == {"expanded"}
    with pytest.raises(BackendError, match=r"^linear kernel mine: needs a right answer for .* off by [\d.e+-]+ with 1 rows$"):
        serve(folders[0], mine(example, apply=wrong), linear_kernel="mine")
    with pytest.raises(BackendError, match=r"^linear kernel mine: needs a right answer for .* off by [\d.e+-]+ with 33 rows$"):
        serve(folders[0], mine(example, apply=wrong_from_20_rows), linear_kernel="mine")
    with pytest.raises(BackendError, match=r"^linear kernel mine: needs a right answer for .*, got RuntimeError: out of tiles$"):
        serve(folders[0], mine(example, apply=raises), linear_kernel="mine")


def wrong_from_20_rows(self: LinearKernel, x: Tensor, weight: Any, out: Tensor) -> None:
    codes, scales = weight
    torch.mm(x, (codes * scales).flatten(1).t(), out=out)
    out[20:] = 0


def test_a_start_by_name_stores_no_times(folders: tuple[Path, Path], example: ModuleType, measured: list[float]) -> None:
    """They would be times of one kernel, from which auto would choose later."""
    serve(folders[0], mine(example), linear_kernel="mine")
    assert not [*cache_folder().rglob("*int4*.json")]
    llm = serve(folders[0], mine(example))
    assert {cell.kernel for path in cache_folder().rglob("*int4*.json") for cell in read_table(path, None).cells} >= {
        "mine",
        "expanded",
    }
    assert kernels_of(llm)


def raises(self: LinearKernel, x: Tensor, weight: Any, out: Tensor) -> None:
    raise RuntimeError("out of tiles")


def test_one_that_raises_is_replaced_with_one_warning(
    folders: tuple[Path, Path],
    example: ModuleType,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    measured: list[float],
) -> None:
    kernel = mine(example)
    llm = serve(folders[0], kernel)
    assert kernels_of(llm) == {"mine"}
    monkeypatch.setattr(kernel, "apply", raises)
    assert answer(llm) == answer(serve(folders[1]))
    warnings = [record.message for record in caplog.records if "it raised" in record.message]
    choices = {layer.choice.name for layer in layers_of(llm) if layer.choice is not None}
    assert len(warnings) == len(choices), "one for each kind of layer, however often it raises"
    assert "RuntimeError: out of tiles" in warnings[0]
    assert kernels_of(llm) == {"expanded"}


def test_a_named_one_that_raises_is_an_error_of_one_line(folders: tuple[Path, Path], example: ModuleType) -> None:
    kernel = mine(example)
    llm = serve(folders[0], kernel, linear_kernel="mine")
    layer = layers_of(llm)[0]
    kernel.apply = raises  # type: ignore[assignment]
    with pytest.raises(
        BackendError, match=r"^linear kernel mine: needs to compute int4 of 32 .*, got RuntimeError: out of tiles$"
    ):
        layer(torch.zeros(1, layer.in_features))


class Plain(LinearKernel):
    """torch's own product, once more."""

    name = "plain_too"
    capabilities = LinearCapabilities(frozenset({"plain"}), (torch.float32,), ("cpu",))
    shapes: ClassVar[set[tuple[int, int]]] = set()

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.shapes.add((self.spec.out_features, self.spec.in_features))
        torch.mm(x, weight.t(), out=out)


def test_the_head_of_a_model_takes_it(folders: tuple[Path, Path]) -> None:
    Plain.shapes.clear()
    llm = serve(folders[1], Plain, linear_kernel="plain_too")
    assert answer(llm) == answer(serve(folders[1]))
    head = llm.model.decoder.lm_head  # type: ignore[union-attr]
    assert (head.out_features, head.in_features) in Plain.shapes
    assert head.choice in llm.model.decoder.linear_choices  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3-embedding"])
def test_pooled_models_take_it(name: str, tmp_path: Path) -> None:
    """Each of their layers, and by times as by name."""
    embedder(name, tmp_path)
    options = {"num_threads": 1, "device": "cpu", "runner": "pooling", "backends": [Plain]}
    prompts = [{"prompt_token_ids": [5, 9, 2, 44]}]
    expected = LLM(str(tmp_path), **options, autotune_budget=0).embed(prompts, use_tqdm=False)[0].outputs.embedding
    Plain.shapes.clear()
    llm = LLM(str(tmp_path), **options, autotune_budget=0, linear_kernel="plain_too")
    found = llm.embed(prompts, use_tqdm=False)[0].outputs.embedding
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=5e-5)
    choices = llm.pooling.model.network.linear_choices
    assert {choice.layers[0].weight.shape for choice in choices} == Plain.shapes
    with pytest.raises(UnknownBackendError, match="nobody"):
        LLM(str(tmp_path), **options, linear_kernel="nobody")


class Whole(Plain):
    """What stands around the product, too."""

    name = "whole"
    capabilities = replace(Plain.capabilities, fused=frozenset({"norm", "bias", "activation", "gated", "residual"}))
    parts: ClassVar[set[str]] = set()

    def apply_fused(self, x: Tensor, weight: Tensor, parts: LinearParts, out: Tensor) -> None:
        given = {name: getattr(parts, name) for name in ("norm", "bias", "gated", "residual")}
        self.parts.update(name for name, value in given.items() if value is not None and value is not False)
        self.parts.update([parts.activation] if parts.activation is not None else [])
        rows = x if parts.norm is None else torch.nn.functional.rms_norm(x, x.shape[1:], parts.norm, parts.eps)
        y = torch.nn.functional.linear(rows, weight, parts.bias)
        if parts.activation is not None:
            gate, up = y.chunk(2, dim=1) if parts.gated else (y, torch.ones(()))
            y = torch.nn.functional.silu(gate) * up
        out.copy_(out + y if parts.residual else y)


@pytest.mark.parametrize(
    ("fused", "handed"),
    [
        (Whole.capabilities.fused, {"norm", "bias", "gated", "silu", "residual"}),
        ({"norm", "gated"}, {"norm", "gated", "silu"}),
        ({"residual"}, {"residual"}),
        ({"bias"}, {"bias"}),
    ],
)
def test_a_kernel_is_handed_the_parts_that_it_claims(
    fused: set[str], handed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes the others, and all of them if the kernel raises in a step."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path)
    claiming = type("Claiming", (Whole,), {"capabilities": replace(Whole.capabilities, fused=frozenset(fused))})
    expected = answer(serve(tmp_path))
    Whole.parts.clear()
    llm = serve(tmp_path, claiming, linear_kernel="whole")
    assert answer(llm) == expected
    assert Whole.parts == handed
    rows = {name: [us] * len(ROW_COUNTS) for name, us in (("whole", 1.0), ("torch", 2.0), ("onednn", 3.0))}
    times = AxisTimes(ROWS, rows, "a test")
    monkeypatch.setattr(
        assembly, "choose_linear_kernels", lambda choices, *_, registry: [each.use_times(times) for each in choices]
    )
    llm = serve(tmp_path, claiming)
    assert kernels_of(llm) == {"whole"}
    claiming.apply_fused = raises_fused  # type: ignore[assignment]
    assert answer(llm) == expected
    assert kernels_of(llm) <= {"torch", "onednn"}


def raises_fused(self: LinearKernel, x: Tensor, weight: Any, parts: LinearParts, out: Tensor) -> None:
    raise RuntimeError("out of tiles")


def test_claimed_parts_need_the_call_that_takes_them() -> None:
    claims = replace(Plain.capabilities, fused=frozenset({"norm"}))
    with pytest.raises(PluginError, match="capabilities.fused must be empty for a class without apply_fused\\(\\), got 'norm'"):
        create_registry([type("Bare", (Plain,), {"capabilities": claims})], load_entry_points=False).linear.backend("plain_too")


class RowByRow(Plain):
    """One row after the other."""

    name = "row_by_row"
    capabilities = replace(Plain.capabilities, batch_invariant=True)
    rows: ClassVar[set[int]] = set()

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.rows.add(len(x))
        for row, into in zip(x, out, strict=True):
            torch.mv(weight, row, out=into)


class Drifting(RowByRow):
    """Claims what does not hold."""

    name = "drifting"

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(x, weight.t() * (1 + 1e-5 * len(x)), out=out)


def test_deterministic_mode_takes_those_that_declare_it(folders: tuple[Path, Path]) -> None:
    """By name, for the rows as they are, which other kernels get in tiles of 16."""
    llm = serve(folders[1], RowByRow, linear_kernel="row_by_row", deterministic=True)
    assert kernels_of(llm) == {"row_by_row"}
    RowByRow.rows.clear()
    assert answer(llm) == answer(serve(folders[1], deterministic=True))
    assert {1, 5} <= RowByRow.rows
    assert kernels_of(serve(folders[1], RowByRow, deterministic=True)) == {"torch"}
    with pytest.raises(
        ConfigError, match="batch_invariant: needs a kernel that declares it, in deterministic mode, got one that"
    ):
        serve(folders[1], Plain, linear_kernel="plain_too", deterministic=True)
    with pytest.raises(BackendError, match="linear kernel drifting: needs rows whose bits do not depend on the others"):
        serve(folders[1], Drifting, linear_kernel="drifting", deterministic=True)
    wrong_too = type("WrongToo", (RowByRow,), {"name": "wrong_too", "apply": wrong})
    with pytest.raises(BackendError, match="linear kernel wrong_too: needs a right answer for plain .* off by"):
        serve(folders[1], wrong_too, linear_kernel="wrong_too", deterministic=True)


class Copied(LinearKernel):
    """torch's own product over a copy of the weight, which an object of its own holds."""

    name = "copied"
    capabilities = LinearCapabilities(frozenset({"plain"}), (torch.float32,), ("cpu",))

    def prepare(self, weight: Tensor) -> Any:
        return SimpleNamespace(copies=[weight.t().clone()], scale=1.0)

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        torch.mm(x, weight.copies[0], out=out).mul_(weight.scale)


class Scaled(Copied):
    """Keeps a number of the weight, which is no tensor."""

    def prepare(self, weight: Tensor) -> Any:
        scale = float(weight.abs().max())
        return SimpleNamespace(copies=[weight.t() / scale], scale=scale)


DOWN = "model.layers.0.mlp.down_proj"


def test_a_kernel_of_plain_weights_takes_part_and_its_copies_follow_new_weights(folders: tuple[Path, Path]) -> None:
    llm = serve(folders[1], Copied, linear_kernel="copied")
    assert kernels_of(llm) == {"copied"}
    layer = next(each for each in layers_of(llm) if each.origin is not None and DOWN in each.origin.modules)
    assert isinstance(layer.bound_to(layer.choice.kernels["copied"]), Applied)  # type: ignore[union-attr]
    before, x, live = answer(llm), torch.randn(3, layer.in_features), llm.model.live_weights
    assert before == answer(serve(folders[1]))
    y, held = layer(x), layer.prepared["copied"].copies[0]
    live.load([(f"{DOWN}.weight", 2 * layer.weight)])
    torch.testing.assert_close(layer(x), 2 * y)
    assert layer.prepared["copied"].copies[0] is held, "captured steps keep its address"
    live.read_again()
    assert answer(llm) == before


def test_a_kernel_whose_copy_cannot_be_written_again_is_named(folders: tuple[Path, Path]) -> None:
    live = serve(folders[1], Scaled, linear_kernel="copied").model.live_weights
    with pytest.raises(ConfigError, match=r"load_weights: needs kernels whose `prepare` .*, got others by the kernel copied"):
        live.load([(f"{DOWN}.weight", torch.ones(128, 256))])
