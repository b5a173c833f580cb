"""`python -m headway.bench.studies.rules`: attention rules in `triton` and in FlexAttention (`flex`), in the same run.

A result is first compared with float64 for some queries of each sequence. A call is timed as the replay of a CUDA graph, with a
flushed L2 cache, and without its plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import BaseModel, Field
from rich import box
from rich.table import Table
from torch import Tensor

from headway.backends.flex import FlexAttention
from headway.backends.triton.backend import TritonAttention
from headway.bench.studies.command import run_study
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import NHD, write_rows
from headway.core.contract.rule import AttentionRule, PerHead
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case
from headway.core.system.json_files import ResultFile, write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.tuning.measure.contender import captured
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.measure.timing import Timer
from headway.tuning.table.schema import DeviceIdentity

CASES = ("1q8192", "4q4096", "16q1s4096", "64q1s1024")
BLOCK_SIZES: dict[type[AttentionBackend], int] = {TritonAttention: 16, FlexAttention: 128}
"""Backend -> block size of its cache. FlexAttention reads a page as one block of its mask, and prefers large ones."""
_CHECKED = 64  # Maximum number of queries per sequence that are compared with float64
_WIDTH = 80


class Causal(AttentionRule):
    """No change: plain attention for FlexAttention."""


class Alibi(AttentionRule):
    """A bias that falls with the distance, with one slope per head."""

    slopes: PerHead

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score.sub(params.slopes * (q_pos - k_pos))


class SoftCap(AttentionRule):
    """A limit on the scores."""

    cap: float = 30.0

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.tanh(score / params.cap).mul(params.cap)


class Documents(AttentionRule):
    """A mask by a table of positions: a query sees the keys of its document."""

    document: Tensor

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.eq(params.document[q_pos], params.document[k_pos])


class RuleCell(BaseModel):
    """Result of one backend with one rule on one case. Only correct results have a time."""

    case: str
    backend: str
    rule: str
    """Name of the rule. `none` means a layer without a rule, in `flex` a rule that changes nothing."""
    median_us: float | None = None
    plan_us: float | None = None
    """Host and device time of `plan`, in microseconds, which all layers of a step share."""
    first_seconds: float | None = None
    """Time of the first plan and call, in seconds, with compilations."""
    relative_error: float | None = None
    """||out - reference|| / ||reference|| over the compared queries."""
    captured: bool = True
    """False if the call could not be captured in a CUDA graph, so that the time includes launches."""
    reason: str = ""
    """Reason for a missing time; else empty."""


class RulesReport(ResultFile):
    """Result of one run of the rules study."""

    schema_: Literal["headway.bench_rules/1"] = Field(default="headway.bench_rules/1", alias="schema")
    command: str
    origin: Origin
    device: DeviceIdentity
    layer: str
    cells: list[RuleCell]


def rules_of(heads: int, kv_len: int) -> dict[str, AttentionRule | None]:
    """Return the rules by name. The documents hide half of the tiles of a causal mask, and half of the last query's keys."""
    slopes = tuple(2 ** (-8 * (head + 1) / heads) for head in range(heads))
    halves = torch.arange(kv_len) // -(-kv_len // 2)
    return {"none": None, "alibi": Alibi(slopes), "softcap": SoftCap(), "documents": Documents(halves)}


def error_of(case: Case, out: Tensor) -> float:
    """Return the relative error of up to _CHECKED evenly spaced queries per sequence, against float64."""
    spec, rule, token, found, right = case.spec, case.spec.rule or Causal(), 0, [], []
    head = torch.arange(spec.num_heads, device=out.device)[:, None, None]
    for row, (query_len, kv_len) in enumerate(zip(case.metadata.query_lens, case.metadata.kv_lens, strict=True)):
        at = torch.arange(kv_len, device=out.device)
        size = case.metadata.block_size
        k, v = case.cache.gather(case.metadata.block_table[row].long()[at // size] * size + at % size)
        k, v = (each.double().repeat_interleave(spec.group_size, 1).transpose(0, 1) for each in (k, v))
        chosen = torch.linspace(0, query_len - 1, min(query_len, _CHECKED), device=out.device).long()
        q_pos = (kv_len - query_len + chosen)[None, :, None]
        given = q_pos, torch.minimum(at[None, None], q_pos), head, rule.params(head)
        scores = rule.score(case.q[token + chosen].double().transpose(0, 1) @ k.mT * spec.scale, *given)
        weights = scores.masked_fill(~(rule.mask(*given) & (at <= q_pos)), -torch.inf).softmax(2)
        right.append((weights @ v).transpose(0, 1))
        found.append(out[token + chosen].double())
        token += query_len
    return float((torch.cat(found) - torch.cat(right)).norm() / torch.cat(right).norm())


def measure(kind: type[AttentionBackend], name: str, rule: AttentionRule | None, text: str, timer: Timer) -> RuleCell:
    """Return the result of a backend with one rule on one case. A fault of the backend becomes its reason."""
    device = torch.device("cuda", torch.cuda.current_device())
    cell = RuleCell(case=text, backend=kind.name, rule=name)
    spec = AttentionSpec(32, 8, 128, 128**-0.5, torch.bfloat16, device, rule=rule)
    try:
        began = time.perf_counter()
        case = make_case(parse_case(text), spec, NHD, BLOCK_SIZES[kind], write_rows)
        view, out = case.metadata.prefill or case.metadata.decode, torch.full_like(case.q, torch.nan)
        assert view is not None
        if not (support := kind.supports(spec, NHD, BLOCK_SIZES[kind], view.phase)):
            return cell.model_copy(update={"reason": str(support)})
        backend = kind(spec, NHD, BLOCK_SIZES[kind])
        torch.cuda.synchronize()
        began = time.perf_counter()
        plan = backend.plan(view)
        call = _call(backend, case, plan, out)
        call()
        torch.cuda.synchronize()
        cell.first_seconds = time.perf_counter() - began
        cell.relative_error = error_of(case, out)
        if not cell.relative_error <= kind.tolerance[spec.dtype]:
            return cell.model_copy(update={"reason": "wrong answer"})
        began = time.perf_counter()
        backend.plan(view)
        torch.cuda.synchronize()
        cell.plan_us = 1e6 * (time.perf_counter() - began)
        try:
            replay = captured(call)
        except Exception:
            cell.captured = False
            replay = call
        cell.median_us = timer.time(replay, device).median_us
    except Exception as error:
        return cell.model_copy(update={"reason": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
    return cell


def _call(backend: AttentionBackend, case: Case, plan: Any, out: Tensor) -> Callable[[], None]:
    if case.metadata.prefill is not None:
        return lambda: backend.prefill(case.q, case.k, case.v, case.cache, plan, out)
    return lambda: backend.decode(case.q, case.cache, plan, out)


def rules(
    case: Annotated[list[str] | None, typer.Option(help="Case such as 4q4096 or 16q1s4096. Repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Backend, triton or flex. Repeatable. Default: both.")] = None,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of warm-up before timing.")] = 15.0,
    rep_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of timed runs.")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time attention rules in triton and flex on a GPU, after checking each result against float64."""
    device, timer = resolve_device("cuda"), Timer(warmup_ms, rep_ms)
    console = Terminal()
    console = console if console.is_terminal else Terminal(width=_WIDTH)
    report = RulesReport(
        command=command_line("python", "-m", "headway.bench.studies.rules"),
        origin=Origin.here(),
        device=identify_device(device),
        layer="32/8 heads x 128 bfloat16",
        cells=[],
    )
    console.print(f"{report.device.name}, torch {report.device.torch}, {report.layer}", highlight=False)
    for text in case or CASES:
        for name, rule in rules_of(32, max(kv_len for _, kv_len in parse_case(text))).items():
            for kind in BLOCK_SIZES:
                if not backend or kind.name in backend:
                    given = Causal() if kind is FlexAttention and rule is None else rule
                    with torch.inference_mode():
                        report.cells.append(measure(kind, name, given, text, timer))
                    torch.cuda.empty_cache()
        console.print(table_of(text, report.cells))
        for cell in report.cells:
            if cell.reason and cell.case == text:
                console.print(f"{cell.backend}, {cell.rule}: {cell.reason}", highlight=False, markup=False)
        if output is not None:
            write_json(report, output)


def table_of(text: str, cells: list[RuleCell]) -> Table:
    """Return the table of one case: a row per rule. `speed` is the time without a rule divided by the time with the rule."""
    found = {(cell.backend, cell.rule): cell for cell in cells if cell.case == text}
    table = Table(title=text, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    columns = [f"{name} {what}" for name in ("triton", "flex") for what in ("us", "speed", "plan us")]
    for column in ("rule", *columns, "flex / triton"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule in dict.fromkeys(cell.rule for cell in found.values()):
        row = []
        times = {name: _us(found, name, rule) for name in ("triton", "flex")}
        for name, us in times.items():
            plain, cell = _us(found, name, "none"), found.get((name, rule))
            row += ["-" if us is None else f"{us:.1f}{'' if cell is not None and cell.captured else ' *'}"]
            row += ["-" if us is None or plain is None else f"{plain / us:.2f}"]
            row += ["-" if cell is None or cell.plan_us is None else f"{cell.plan_us:.0f}"]
        triton, flex = times["triton"], times["flex"]
        table.add_row(rule, *row, "-" if triton is None or flex is None else f"{flex / triton:.2f}")
    return table


def _us(found: dict[tuple[str, str], RuleCell], backend: str, rule: str) -> float | None:
    cell = found.get((backend, rule))
    return None if cell is None else cell.median_us


if __name__ == "__main__":
    run_study(rules)
