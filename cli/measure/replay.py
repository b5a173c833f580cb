"""`headway replay FILE`: check recorded steps against float64, and run them on other attention backends."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from headway.cli.engine_options import takes_engine_options
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.terminal import Terminal
from headway.engine_args import EngineArgs

if TYPE_CHECKING:
    import torch

    from headway.bench.diff.sides import SideOptions
    from headway.core.engine.record import CallRows, Checked, Difference, Record, RecordedCall, Run
    from headway.registry import Registry

_EXACT = 1e-9  # Allowed error of the reference, which another device sums in another order


@takes_engine_options("attn_options", "kv_layout", "block_size", "device", "plugins")
def replay(
    file: Annotated[Path, typer.Argument(help="File that the flight recorder wrote.")],
    engine: dict[str, Any],
    attn_backend: Annotated[str, typer.Option(help="Backends to run the recorded steps on: NAME or NAME,NAME.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model. A record of another model is refused.")] = "",
) -> None:
    """Check a record of the last steps against float64.

    The last line names the first layer, sequence, head and row that differ.

    The exit code is 0 if nothing differs, 1 if a result is beyond its tolerance, and 2 if the file or a backend cannot be used.
    """
    from headway.bench.diff.sides import SideOptions, check_side
    from headway.core.engine.record import Record
    from headway.tuning.measure.device import resolve_device

    record, args = Record.read(file), EngineArgs.of(**engine)
    if model not in ("", record.meta.model):
        raise ConfigError("--model", f"{record.meta.model or 'no name'}, the model of {file}", model, "leave it out")
    options, registry = SideOptions(args.kv_layout, args.block_size, args.attn_options), args.make_registry()
    names = attn_backend.split(",") if attn_backend else []
    for name in names:
        check_side(name, registry, options)
    record.device = resolve_device(args.device)
    try:
        checked, first = record.judge()
        others = [_judged(record, name, registry, options) for name in names]
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        raise ConfigError(f"record {file}", "tensors of the shapes that it describes", str(error), "write it again") from error
    print(_title(record))
    held = {each.place for each in checked}
    lost = [each for each in record.meta.checked if each.place not in held]
    _print(checked + lost, held)
    lines = _lines(record, first, lost)
    replayed = []
    for name, (found, text, _) in zip(names, others, strict=True):
        if found:
            _print(found, held)
        replayed.append(f"{name}: {text}")
    if not checked and not lost:
        raise ConfigError(str(file), "recorded steps whose sequences were still in the cache", "none", "record after a request")
    lines = [f"recorded: {line}" for line in lines] if names else lines
    print("\n".join([*(lines or ["within tolerance: every recorded output, cached row and state"]), *replayed]))
    codes = {1 if lines else 0, *(code for _, _, code in others)}
    raise typer.Exit(1 if 1 in codes else max(codes))


def _title(record: Record) -> str:
    meta = record.meta
    lines = [
        f"{meta.model or 'model'}, {meta.dtype} on {meta.device}, torch {meta.torch}, {meta.origin}",
        f"{meta.reason}, {meta.time}: {len(meta.steps)} steps, {len(meta.sequences)} sequences, {len(meta.layers)} layers",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in meta.notes)])


def _print(checked: list[Checked], held: set[int]) -> None:
    """Print a table of the largest errors. held: layers whose tensors the file holds."""

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layer", "phase", "backend", "max error", "allowed", "verdict"):
        table.add_column(column, justify="left" if column in ("backend", "verdict") else "right")
    for each in sorted(checked, key=lambda each: each.place):
        wrong = each.error > each.allowed
        verdict = ("differs" if wrong else "ok") + ("" if each.place in held else ", when written")
        row = str(each.place), each.phase, each.backend, f"{each.error:.1e}", f"{each.allowed:.1e}", verdict
        table.add_row(*row)
        table.rows[-1].style = "bold red" if wrong else ""
    Terminal().print(table)


def _lines(record: Record, first: Difference | None, lost: list[Checked]) -> list[str]:
    """Return a line for each wrong block table, then one for the first difference. lost: results without tensors."""
    meta, lines = record.meta, []
    for number, each in enumerate(meta.sequences):
        if each.wrong_block is not None:
            group, at, used, assigned = each.wrong_block
            layers = [place for place, layer in enumerate(meta.layers) if layer.kind == "attention" and layer.group == group]
            positions = f"positions {at * meta.block_size} to {(at + 1) * meta.block_size - 1}"
            where = f"layer {min(layers, default=0)}, sequence {number}, every head, block {at} ({positions})"
            lines.append(f"{where}: the block table has block {used}, the scheduler assigned block {assigned}")
    if first is not None:
        return [*lines, _sentence(record, first)]
    gone = [each for each in lost if each.error > each.allowed]
    error = [f"layer {each.place}, {each.phase}: error {each.error:.2g}, allowed {each.allowed:.2g}" for each in gone[:1]]
    return [*lines, *(f"{line}, when the file was written; it does not hold the tensors of the layer" for line in error)]


def _sentence(record: Record, first: Difference) -> str:
    layer = record.meta.layers[first.place]
    heads = f"head {first.head}"
    if layer.kind == "attention":
        last = first.head + layer.group_size - 1
        readers = f"query heads {first.head} to {last}" if last > first.head else f"query head {first.head}"
        heads = f"kv head {first.kv_head} / {f'query head {first.head}' if first.what == 'output' else readers}"
    where = f"layer {first.place}, sequence {first.sequence} (of {len(record.meta.sequences)}), {heads}"
    error = f"error {first.error:.2g}, allowed {first.allowed:.2g}"
    return f"{where}, row {first.row} (position {first.position}): {first.what}: {error}"


def _judged(record: Record, name: str, registry: Registry, options: SideOptions) -> tuple[list[Checked], str, int]:
    """Return the largest errors of backends, their result in a line, and its exit code."""

    try:
        found, first = record.judge(_run(record, name, registry, options))
    except HeadwayError as refusal:
        return [], " ".join(str(refusal).split()), 2
    if not found:
        return [], "not checked: the file has no call of the layers and phases that it is named for", 2
    phases = ", ".join(sorted({each.phase for each in found}))
    return (found, f"within tolerance ({phases})", 0) if first is None else (found, _sentence(record, first), 1)


def _run(record: Record, name: str, registry: Registry, options: SideOptions) -> dict[str, Run]:
    """Return the results of backends for the attention calls whose rows the file holds, in the phases and layers that `name`, a
    value of --attn-backend, names. A backend of some phases is named for these only."""
    from headway.core.contract.metadata import Phase
    from headway.core.contract.operation import ATTENTION
    from headway.core.select.request import AUTO, BackendRequest, kinds_of

    wanted = BackendRequest.parse(name)
    if name in registry.of(ATTENTION).entries:
        wanted = BackendRequest.for_backend(name, registry.backend(name).capabilities.phases)
    held = {(each.place, each.sequence): each for each in record.meta.held}
    calls = [(call, rows) for call in record.meta.calls if (rows := record.rows(call, held.get((call.place, call.sequence))))]

    def batch(each: tuple[RecordedCall, CallRows]) -> tuple[int, int, int, str]:
        return each[0].place, each[0].step, each[0].again, each[0].phase.value

    found: dict[str, Run] = {}
    for _, group in groupby(sorted(calls, key=batch), key=batch):
        own = list(group)
        request = wanted.for_layer(kinds_of(own[0][1].spec))
        if wanted.names and (request.decode if own[0][0].phase is Phase.DECODE else request.prefill) == AUTO:
            continue
        runs = _outs([rows for _, rows in own], str(request), registry, options, record.device)
        found |= {call.key: run for (call, _), run in zip(own, runs, strict=True)}
    return found


def _outs(calls: list[CallRows], name: str, registry: Registry, options: SideOptions, device: torch.device) -> list[Run]:
    """Return a backend's results for calls of one layer in one step, with a new cache that holds the recorded rows."""

    import torch

    from headway.bench.diff.sides import DiffStep, make_side
    from headway.core.contract.metadata import Phase
    from headway.core.engine.record import FACTOR, Run

    spec = replace(calls[0].spec, device=device)
    side = make_side(name, registry, [spec], options)
    lens, contexts = [len(each.q) for each in calls], [each.context for each in calls]
    run, cached = side.open([len(each.keys) for each in calls]), [at for at, context in enumerate(contexts) if context]

    def rows(part: str, at: list[int], new: bool) -> torch.Tensor:
        spans = [slice(contexts[each], None) if new else slice(contexts[each]) for each in at]
        return torch.cat([getattr(calls[each], part)[span] for each, span in zip(at, spans, strict=True)]).to(spec.dtype)

    with torch.inference_mode():
        if cached:
            run.begin(DiffStep(Phase.PREFILL, cached, [contexts[at] for at in cached], [0] * len(cached)))
            k, v = (rows(part, cached, False) for part in ("keys", "values"))
            run(0, k.new_zeros(len(k), spec.num_heads, spec.head_dim), k, v)
        phase, every = Phase.of(max(lens), min(contexts)), list(range(len(calls)))
        run.begin(DiffStep(phase, every, lens, contexts))
        out = run(0, torch.cat([each.q for each in calls]).to(spec.dtype), rows("keys", every, True), rows("values", every, True))
    return [Run(side.backend(phase), each, max(FACTOR * side.tolerance(phase), _EXACT)) for each in out.split(lens)]
