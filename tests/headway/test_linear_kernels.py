"""Third parties' kernels for linear layers: served through `LLM`, chosen by time, refused with reasons, replaced if they fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import LLM, SamplingParams
from headway.contract import BackendError, ConfigError, LinearCapabilities, LinearKernel, UnknownBackendError
from headway.core.contract.linear import LinearSpec
from headway.core.contract.weights import WeightFormat
from headway.hosting import assembly
from headway.kernels.linear.linear import Applied, Linear
from headway.models.layers.decoder import Decoder
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from headway.tuning.measure.products import choose_products
from headway.tuning.measure.timing import InterleavedTimer, Timing
from quantized_models import FORMATS, save_both
from sandbox import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "headway-int4" / "headway_int4.py"
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [[5, 9, 2, 44, 7]]


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
    options = {"kv_cache_memory": "4MiB", "num_threads": 1, "skip_tokenizer_init": True, "device": "cpu", **options}
    return LLM(str(folder), backends=list(kernels), **options)


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
    monkeypatch.setattr(assembly, "choose_products", lambda choices, *_: choose_products(choices, 60.0, timer=Told()))
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
    assert "--linear-kernel mine does not serve them: no: in_features: needs 128, got 256" in caplog.text
    assert answer(llm) == answer(serve(folders[1]))


def wrong(self: LinearKernel, x: Tensor, weight: Any, out: Tensor) -> None:
    out.fill_(1.0)


def test_a_wrong_one_is_left_out_with_the_numbers(
    folders: tuple[Path, Path], example: ModuleType, caplog: pytest.LogCaptureFixture, measured: list[float]
) -> None:
    llm = serve(folders[0], mine(example, apply=wrong))
    assert "mine is left out from 1 rows on: ArithmeticError: its answer is off by" in caplog.text
    assert kernels_of(llm) == {"expanded"}
    with pytest.raises(BackendError, match=r"^linear kernel mine: needs a right answer for int4 of 32 .* off by [\d.e+]+$"):
        serve(folders[0], mine(example, apply=wrong), linear_kernel="mine")


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
    warnings = [record.message for record in caplog.records if "serves no longer: it raised" in record.message]
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
    """torch's own product over a copy of the weight, which an object of its own holds."""

    name = "plain_too"
    capabilities = LinearCapabilities(frozenset({"plain"}), (torch.float32,), ("cpu",))

    def prepare(self, weight: Tensor) -> Any:
        return SimpleNamespace(copies=[weight.t().clone()], scale=1.0)

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        torch.mm(x, weight.copies[0], out=out).mul_(weight.scale)


class Scaled(Plain):
    """Keeps a number of the weight, which is no tensor."""

    def prepare(self, weight: Tensor) -> Any:
        scale = float(weight.abs().max())
        return SimpleNamespace(copies=[weight.t() / scale], scale=scale)


DOWN = "model.layers.0.mlp.down_proj"


def test_a_kernel_of_plain_weights_takes_part_and_its_copies_follow_new_weights(folders: tuple[Path, Path]) -> None:
    llm = serve(folders[1], Plain, linear_kernel="plain_too")
    assert kernels_of(llm) == {"plain_too"}
    layer = next(each for each in layers_of(llm) if each.origin is not None and DOWN in each.origin.modules)
    assert isinstance(layer.bound_to(layer.choice.kernels["plain_too"]), Applied)  # type: ignore[union-attr]
    before, x, live = answer(llm), torch.randn(3, layer.in_features), llm.model.live_weights
    assert before == answer(serve(folders[1]))
    y, held = layer(x), layer.prepared["plain_too"].copies[0]
    live.load([(f"{DOWN}.weight", 2 * layer.weight)])
    torch.testing.assert_close(layer(x), 2 * y)
    assert layer.prepared["plain_too"].copies[0] is held, "captured steps keep its address"
    live.read_again()
    assert answer(llm) == before


def test_a_kernel_whose_copy_cannot_be_written_again_is_named(folders: tuple[Path, Path]) -> None:
    live = serve(folders[1], Scaled, linear_kernel="plain_too").model.live_weights
    with pytest.raises(ConfigError, match=r"load_weights: needs kernels whose `prepare` .*, got others by the kernel plain_too"):
        live.load([(f"{DOWN}.weight", torch.ones(128, 256))])
