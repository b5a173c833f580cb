"""The kit of linear layers and of experts: it passes what is right, and finds and names what is planted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.core.contract.errors import ConfigError
from headway.core.contract.experts import ExpertsCapabilities
from headway.core.contract.kernel import GraphLevel, Kernel
from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.oracle.weight_cases import NUMBERS, WEIGHTS, Drawn, dequantized, make_weight
from headway.testing.broken.kernels import PLANTED_KERNELS, ReferenceExperts, ReferenceLinear
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.kit import Kit, make_kit, parse_cell, run_cell
from headway.testing.kit.report import CellResult
from headway.testing.kit.states import StateCell
from headway.testing.kit.subject import subject_of
from headway.testing.kit.weights import ExpertCell, LinearCell

CPU = torch.device("cpu")
INT4 = "int4-32"
NAMED: dict[str, tuple[LinearCell | ExpertCell, str]] = {
    "wrong-zeros": (LinearCell("answer", f"{INT4}-zeros"), "zeros off by +1"),
    "late-last-group": (LinearCell("answer", INT4, "float32"), "reads input column 224 wrongly"),
    "ignores-order": (LinearCell("answer", f"{INT4}-order"), "ignores the order of the columns"),
    "exchanged-halves": (LinearCell("answer", INT4), "exchanges the halves of a group"),
    "sums-in-half": (LinearCell("answer", "plain", "float16", 1120), "sums, or factors, in a shorter type"),
    "whole-tiles": (LinearCell("answer"), "leaves elements of `out` unwritten; wrong in rows 16 alone, of 17"),
    "stale-out": (LinearCell("answer", "int8"), "adds to what `out` held"),
    "splits-for-many-rows": (LinearCell("invariant", dtype="float32"), "not batch invariant"),
    "forgets-the-residual": (LinearCell("answer", fused="residual"), ""),
    "first-layer": (LinearCell("prepare"), ""),
    "drops-last-token": (ExpertCell("answer", routing="one"), "wrong in rows 16 alone, of 17"),
    "ignores-scores": (ExpertCell("answer"), "ignores the scores"),
    "overwrites-out": (ExpertCell("answer"), "overwrites `out`, to which it must add"),
    "wrong-expert-of-a-tie": (ExpertCell("answer", routing="equal"), ""),
    "rounds-scores-of-many-tokens": (ExpertCell("invariant", dtype="float32"), "not batch invariant"),
    "adds-bias-twice": (ExpertCell("answer", expert="biases"), ""),
}
"""Name -> a cell that finds it, and words of the guess; nothing where the kit has no word for it."""


@cache
def kit_of(kernel: type[Kernel]) -> Kit:
    return Kit(subject_of(kernel, CPU))


def run(kernel: type[Kernel], cell: LinearCell | ExpertCell) -> CellResult:
    return kit_of(kernel).run(cell)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_reference_reads_a_weight_as_the_contract_does(name: str, numbers: str) -> None:
    weight = make_weight(name, (40, 256), torch.float32, Drawn(torch.Generator().manual_seed(0), numbers))
    right = dequantized(weight)
    other = weight if isinstance(weight, Tensor) else weight.dequantized(torch.float32)
    assert float((other.double() - right).norm()) <= 1e-6 * float(right.norm())


def test_every_planted_mistake_is_tried_here() -> None:
    assert set(NAMED) == set(PLANTED_KERNELS)


@pytest.mark.parametrize("name", NAMED)
def test_a_planted_mistake_is_caught_and_named(name: str) -> None:
    cell, words = NAMED[name]
    result = make_kit(f"broken:{name}", "cpu").run(cell)
    assert result.status == "failed", result
    assert words in result.guess, result
    plain = ReferenceExperts if isinstance(cell, ExpertCell) else ReferenceLinear
    assert run(plain, cell).status == "passed"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMED)
def test_the_quick_answers_and_preparations_find_every_planted_mistake(name: str) -> None:
    tried = make_kit(f"broken:{name}", "cpu")
    cells = [cell for cell in tried.cells(quick=True) if cell.check in ("answer", "prepare", "invariant")]
    assert any(tried.run(cell).status == "failed" for cell in cells)


@pytest.mark.parametrize("kernel", [ReferenceLinear, ReferenceExperts])
def test_a_right_kernel_passes_a_cell_of_each_check_and_an_answer_of_each_weight(kernel: type[Kernel]) -> None:
    cells = kit_of(kernel).cells(quick=True)
    assert [parse_cell(str(cell)) for cell in cells] == cells
    some = {(cell.check, cell.weight * (cell.check == "answer"), cell.about): cell for cell in cells if cell.check != "memory"}
    results = [kit_of(kernel).run(cell) for cell in some.values()]
    assert {result.check for result in results} >= {"claims", "refuse", "tolerance", "answer", "prepare", "instances", "repeat"}
    assert [result for result in results if result.status == "failed"] == []
    assert {result.check for result in results if result.status == "skipped"} == {"sync"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [ReferenceLinear, ReferenceExperts])
def test_a_right_kernel_passes_every_quick_cell(kernel: type[Kernel]) -> None:
    results = [kit_of(kernel).run(cell) for cell in kit_of(kernel).cells(quick=True)]
    assert [result for result in results if result.status == "failed"] == []


class Greedy(ReferenceLinear):
    """Accepts what it does not claim."""

    name = "greedy"
    capabilities = LinearCapabilities(frozenset({"int4"}), devices=("cpu",), group_sizes=(32,), zeros=False)

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        return YES


class Narrow(Greedy):
    """Accepts what it claims, and of it whole tiles alone."""

    name = "narrow"

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        whole = spec.in_features % 64 == 0 or Support.no("in_features", "a multiple of 64", spec.in_features)
        return cls.capabilities.check(spec) if whole is True else cls.capabilities.check(spec) & whole


@pytest.mark.parametrize(("kernel", "status"), [(Greedy, "failed"), (Narrow, "passed")])
def test_claims_are_held_both_ways(kernel: type[Kernel], status: str) -> None:
    refusals = [cell for cell in kit_of(kernel).cells(quick=True) if cell.check == "refuse"]
    about = {cell.about for cell in refusals}
    assert about >= {"weight", "dtype", "fused"}
    assert ("in_features" in about) == (kernel is Narrow)
    assert {kit_of(kernel).run(cell).status for cell in refusals} == {status}


def test_a_claim_that_no_layer_bears_out_is_found() -> None:
    claims = LinearCapabilities(frozenset({"int4", "mxfp4"}), devices=("cpu",))

    def supports(cls: Any, spec: LinearSpec) -> Support:
        return Support.no("weight", "int4", spec.weight) if spec.weight.name == "mxfp4" else claims.check(spec)

    kernel = type("Claims", (ReferenceLinear,), {"name": "claims", "capabilities": claims, "supports": classmethod(supports)})
    assert "mxfp4 is claimed" in run(kernel, LinearCell("claims")).reason


def past_the_end(x: Tensor, weight: Any, out: Tensor) -> None:
    torch.as_strided(out, (len(out) + 1, out.shape[1]), out.stride(), out.storage_offset())[-1] = 0.0


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (lambda x, weight, out: x.add_(1), "x must be left as it is"),
        (lambda x, weight, out: weight.add_(1), "the weight must be left as it is"),
        (past_the_end, "rows before or after `out`"),
    ],
)
def test_memory_that_is_not_the_calls_own_is_watched(after: Any, words: str) -> None:
    class Spoils(ReferenceLinear):
        name = "spoils"

        def prepare(self, weight: Any) -> Any:
            return weight

        def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
            out.copy_(x.double() @ weight.double().t())
            after(x, weight, out)

    assert words in run(Spoils, LinearCell("answer")).reason


class Wavers(ReferenceLinear):
    name = "wavers"
    calls = 0

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.calls += 1
        super().apply(x, weight * (1 + 1e-2 * (self.calls % 7 == 0)), out)


class KeepsX(ReferenceLinear):
    """Computes with the x of its first call, as a graph does that was captured over a copy."""

    name = "keeps-x"
    x: Tensor | None = None

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.x = x.clone() if self.x is None or len(self.x) != len(x) else self.x
        super().apply(self.x, weight, out)


class SharesState(ReferenceLinear):
    """Keeps a prepared layer for all instances."""

    name = "shares-state"
    kept: dict[str, Tensor] = {}  # noqa: RUF012

    def prepare(self, weight: Any) -> Any:
        self.kept["last"] = super().prepare(weight)

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        super().apply(x, self.kept["last"], out)


def test_what_is_kept_from_call_to_call_is_found() -> None:
    assert run(Wavers, LinearCell("repeat")).guess == "non-deterministic"
    assert "replay 1 of a captured call" in run(KeepsX, LinearCell("graph")).reason
    assert run(SharesState, LinearCell("instances")).status == "failed"
    ungraphed = type("Ungraphed", (ReferenceLinear,), {"name": "ungraphed", "graph_level": GraphLevel.NONE})
    assert run(ungraphed, LinearCell("graph")).status == "skipped"


def test_a_kernel_that_rounds_x_may_be_coarser_and_no_other() -> None:
    class Rounds(ReferenceLinear):
        name = "rounds"

        def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
            super().apply(x.to(torch.float8_e4m3fn).double(), weight, out)

    told = type("Told", (Rounds,), {"name": "told", "rounds_input": True})
    assert [run(kernel, LinearCell("answer")).status for kernel in (Rounds, told)] == ["failed", "passed"]
    loose = {"tolerance": {torch.bfloat16: 5e-2}}
    kernels = [type("Loose", (base,), {"name": f"loose-{base.__name__}", **loose}) for base in (Rounds, told)]
    assert [run(kernel, LinearCell("tolerance")).status for kernel in kernels] == ["failed", "passed"]


def test_few_rows_are_tried_where_few_are_claimed() -> None:
    seen = set[int]()

    class FewRows(ReferenceLinear):
        name = "few-rows"
        capabilities = LinearCapabilities(frozenset({"plain"}), devices=("cpu",), max_rows=8)

        def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
            seen.add(len(x))
            super().apply(x, weight, out)

    assert {run(FewRows, LinearCell("answer", work=work)).status for work in ("few", "many")} == {"passed"}
    assert max(seen) == 8
    tokens = ExpertsCapabilities(frozenset({"plain"}), devices=("cpu",), max_tokens=4)
    few = type("FewTokens", (ReferenceExperts,), {"name": "few-tokens", "capabilities": tokens})
    assert run(few, ExpertCell("answer", work="many")).status == "passed"


def test_scales_that_an_arrangement_has_no_place_for_are_refused_in_words() -> None:
    class Fixed(ReferenceLinear):
        name = "fixed"

        def prepare(self, weight: Any) -> Any:
            raise ArithmeticError("scales beyond 16 bits")

    assert run(Fixed, LinearCell("answer", numbers="uneven")).status == "skipped"
    assert run(Fixed, LinearCell("answer")).status == "failed"


def test_a_cell_of_another_kind_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="reference-linear, which is a kernel for linear layers"):
        run_cell(kit_of(ReferenceLinear), str(StateCell("answer", "decode")))
    for text in ("answer:linear:int5:bfloat16:k256:n256:normal:few:-", "answer:linear:plain", "answer:experts:plain:bfloat16:k1"):
        with pytest.raises(ConfigError, match="a cell's name"):
            parse_cell(text)


_HOOKS = """
import headway.contract
from headway import hookimpl
from headway.core.contract.experts import ExpertsKernelInfo
from headway.core.contract.linear import LinearKernelInfo
from headway.testing.broken.kernels import ReferenceExperts, ReferenceLinear


@hookimpl
def headway_register_kernels():
    return [
        LinearKernelInfo("file-linear", "", lambda: type("L", (ReferenceLinear,), {"name": "file-linear"}), api_version=3),
        ExpertsKernelInfo("file-experts", "", lambda: type("E", (ReferenceExperts,), {"name": "file-experts"}), api_version=3),
    ]
"""


@pytest.mark.slow
def test_the_command_finds_the_kernels_of_all_kinds_that_a_file_brings(tmp_path: Path) -> None:
    file = tmp_path / "brings.py"
    file.write_text(_HOOKS)
    command = ["check", "--plugin", str(file), "--quick", "--only", "claims", "--jobs", "1"]
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == 0, result.output
    assert "file-linear on cpu" in result.output
    assert "file-experts on cpu" in result.output
    one = CliRunner().invoke(make_app(), [*command, "--kind", "experts"])
    assert "file-experts on cpu" in one.output
    assert "file-linear" not in one.output
    with pytest.raises(ConfigError, match="the name of one kernel, got linear:file-linear, experts:file-experts"):
        CliRunner().invoke(make_app(), [*command, "--json", str(tmp_path / "x.json")], catch_exceptions=False)


def test_an_unknown_kind_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--kind: needs one of attention, state, linear, experts, got 'nosuch'"):
        CliRunner().invoke(make_app(), ["check", "x", "--kind", "nosuch"], catch_exceptions=False)


@pytest.mark.slow
def test_a_class_in_a_file_is_checked_in_children_by_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "own_linear.py"
    imports = "from headway.testing.broken.kernels import PLANTED_KERNELS"
    file.write_text(f"{imports}\n\n\nclass Own(PLANTED_KERNELS['whole-tiles']):\n    name = 'own'\n")
    cell = str(LinearCell("answer"))
    report = check(Wanted(f"linear:{file}:Own", cell=cell))
    assert [(result.cell, result.status) for result in report.cells] == [(cell, "failed")]
    assert report.cells[0].feature == "plain"
    assert "256 x 256" in report.cells[0].shape
    with pytest.raises(ConfigError, match="needs a subclass of ExpertsKernel there, got"):
        check(Wanted(f"experts:{file}:Own", cell=cell))
