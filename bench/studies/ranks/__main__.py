"""`python -m headway.bench.studies.ranks check|predict|report`: several ranks, on GPUs or, to try the study, on a CPU over gloo.

check compares the tokens of every family on several ranks with those of one, kills ranks, and takes a device away; predict writes
down what `headway plan` expects of GPUs of a kind, which needs none; report puts the files of one folder side by side.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.bench.studies.ranks.results import RanksCheck
    from headway.bench.studies.ranks.tokens import RanksUnderTest


def ranks(
    what: Annotated[str, typer.Argument(help="check, predict or report.")],
    folder: Annotated[Path | None, typer.Argument(help="Of the files to report on.")] = None,
    size: Annotated[int, typer.Option("--ranks", min=2, help="Ranks.")] = 2,
    device: Annotated[str, typer.Option(help="To check: auto, cuda or cpu.")] = "auto",
    gpu: Annotated[
        str | None, typer.Option(help="To predict: a kind of GPU that `headway plan` knows. Default: that which is here.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Families to check; repeatable. Default: all.")] = None,
    kills: Annotated[int, typer.Option(min=0, help="Ranks to kill.")] = 20,
    jobs: Annotated[int | None, typer.Option(min=1, help="Engines at once. Default: one for each three cores.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds after which no further family is begun.")] = 240.0,
    seed: Annotated[int, typer.Option(help="Of which ranks are killed, and when.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Check, predict, or report."""
    console = Terminal(width=120, highlight=False)
    if what == "check":
        _check(_place(device, size, jobs), family or [], (kills, seed), seconds, output, console)
    elif what == "predict":
        from headway.bench.studies.ranks.predict import predict_runs, print_prediction
        from headway.core.system.json_files import write_json

        prediction = predict_runs(gpu or _kind_here(), size)
        print_prediction(prediction, console)
        if output is not None:
            write_json(prediction, output)
    elif what == "report":
        if folder is None:
            raise ConfigError("report", "the folder of the files", "none")
        from headway.bench.studies.ranks.report import print_report, report_of
        from headway.core.system.json_files import write_json

        report = report_of(folder)
        print_report(report, console)
        write_json(report, output or folder / "ranks.json")
    else:
        raise ConfigError("WHAT", "check, predict or report", repr(what))


def _kind_here() -> str:
    """The kind of GPU that is here, by the name that `headway plan` has for it."""
    import torch

    from headway.plan.devices import GPU_KINDS

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = next((kind.name for kind in GPU_KINDS.values() if kind.title == name), None)
    if found is None:
        raise ConfigError("--gpu", f"one of {', '.join(GPU_KINDS)} where the GPU that is here is none of them", name)
    return found


def _place(device: str, size: int, jobs: int | None) -> RanksUnderTest:
    import os

    from headway.bench.studies.ranks.tokens import RanksUnderTest
    from headway.tuning.measure.device import resolve_device

    return RanksUnderTest(resolve_device(device).type, size, jobs or max(1, (os.cpu_count() or 1) // 3))


def _check(
    place: RanksUnderTest, names: list[str], kills: tuple[int, int], seconds: float, output: Path | None, console: Terminal
) -> None:
    """Check everything, and write the file again after each answer: a run that is cut off has left what it had found."""
    from headway.bench.studies.ranks.faults import kill_ranks, names_in_shm, refuse, without_peers
    from headway.bench.studies.ranks.tokens import check_tokens, families, save_model
    from headway.core.system.json_files import write_json

    report, before = _new_check(place), names_in_shm()

    def keep() -> None:
        if output is not None:
            write_json(report, output)

    with tempfile.TemporaryDirectory() as root:
        models = {name: save_model(name, Path(root, str(number))) for number, name in enumerate(families(names))}
        first = next(iter(models.values()))
        report.faults += [refuse(first, place), without_peers(first, place)]
        keep()
        for fault in kill_ranks(first, place, *kills) if kills[0] else ():
            report.faults.append(fault)
            keep()
        for name, found in check_tokens(models, place, time.monotonic() + seconds):
            report.families += found
            report.not_run += [] if found else [name]
            keep()
    report.left_behind = sorted(names_in_shm() - before)
    keep()
    _print_check(report, console)
    if not report.ok:
        raise HeadwayError("ranks: not all is as it should be; see above")


def _new_check(place: RanksUnderTest) -> RanksCheck:
    from datetime import UTC, datetime

    import torch

    from headway.bench.studies.ranks.results import RanksCheck
    from headway.core.system.provenance import Origin, command_line
    from headway.tuning.measure.device import identify_device

    return RanksCheck(
        command=command_line("python", "-m", "headway.bench.studies.ranks"),
        origin=Origin.here(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=identify_device(torch.device(place.device)).name,
        ranks=place.ranks,
    )


def _print_check(report: RanksCheck, console: Terminal) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{report.ranks} ranks beside one, {report.device}", box=box.SIMPLE_HEAD)
    for column in ("family", "type", "tokens", "same", "largest gap", "start, s", "graphs", ""):
        table.add_column(column, justify="left" if column in ("family", "type", "") else "right")
    for each in report.families:
        gap = f"{max(each.gaps):.3f}" if each.gaps else ""
        start = "" if each.error else f"{each.start_seconds:.1f}"
        shown = (str(each.tokens), str(each.same), gap, start, str(each.graph_steps))
        table.add_row(each.family, each.dtype, *shown, each.error or ("ok" if each.ok else "DIFFERS"))
    console.print(table)
    faults = Table(box=box.SIMPLE_HEAD)
    for column in ("fault", "after, s", "told and ended, s", "", "what was told"):
        faults.add_column(column)
    for fault in report.faults:
        verdict = "ok" if fault.ok else fault.error
        faults.add_row(fault.what, f"{fault.after_seconds:.2f}", f"{fault.seconds:.2f}", verdict, fault.text[:70])
    console.print(faults)
    for label, names in (("not run for want of time", report.not_run), ("left in /dev/shm", report.left_behind)):
        if names:
            console.print(f"{label}: {', '.join(names)}")


if __name__ == "__main__":
    run_study(ranks)
