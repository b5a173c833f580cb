"""`headway doctor`: the machine, the backends that are ready, and the commands that would install the other backends."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headway.cli.look.backends import NEEDS_GPU, NOT_READY, READY
from headway.cli.options import PluginFiles
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    from headway.core.contract.support import Support
    from headway.core.select.kernels import KernelEntry, KernelRegistry
    from headway.machine.doctor import Advice, Machine
    from headway.registry import Registry

_NAME = 16  # Columns for names
_REASON_CHARACTERS = 160


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False, plugin: PluginFiles = None
) -> None:
    """Show the backends that are ready here and the commands to install the others.

    --json also gives every reason why a backend is not ready.
    """
    from headway.machine.doctor import PACKAGES, examine, library
    from headway.tuning.isolated.trial import create_registry

    registry = create_registry(plugin or ())
    entries: list[KernelEntry] = [*registry.backends.values(), *registry.states.entries.values()]
    names = [library(entry.info.extra) for entry in entries]
    machine = examine(tuple(name for name in dict.fromkeys([*PACKAGES, *names]) if name not in ("", "torch")))
    findings = diagnose(registry, machine)
    if as_json:
        print(json.dumps(findings, indent=2))
        return
    console = Terminal(highlight=False)
    for line in screen(findings, machine, min(console.width, 100)):
        console.print(line, soft_wrap=True)


def diagnose(registry: Registry, machine: Machine) -> dict[str, Any]:
    """Return all findings as plain data."""
    from headway.version import __version__

    failures = [{"plugin": failure.name, "owner": failure.owner, "error": str(failure)} for failure in registry.failures]
    return {
        "headway": __version__,
        "machine": asdict(machine),
        "backends": _diagnosed(registry.attention, machine),
        "state_backends": _diagnosed(registry.states, machine),
        "libraries": [_vllm_library(machine)],
        "failures": failures,
    }


def _vllm_library(machine: Machine) -> dict[str, Any]:
    """Return the findings on vLLM's library, which has GEMM kernels for quantized weights."""
    from headway.kernels.runtime.vllm_library import find_library
    from headway.machine.doctor import advise_vllm_library

    support = find_library()
    advice = None if support else advise_vllm_library(support, machine)
    return {"name": "vllm", "summary": "GEMM over quantized weights: marlin, cutlass", **_finding(support, "", advice)}


def _diagnosed(kernels: KernelRegistry[Any, Any], machine: Machine) -> list[dict[str, Any]]:
    """Return each backend of one kind, with its availability, and with advice if it is not available."""
    from headway.machine.doctor import advise

    found = []
    for name, entry in kernels.entries.items():
        support, advice, origin = kernels.availability(name), None, ""
        if support:
            origin = kernels.backend(name).origin()
        else:
            # a module that failed to load is not loaded a second time
            loads = all(reason.what != "import" for reason in support.reasons)
            advice = advise(entry.info.extra, support, kernels.backend(name).capabilities.devices if loads else None, machine)
        own = {"name": name, "kind": entry.owner, "summary": entry.info.summary}
        found.append({**own, **_finding(support, origin, advice)})
    return found


def _finding(support: Support, origin: str, advice: Advice | None) -> dict[str, Any]:
    """Return the availability and origin of a backend or library, and the reasons if it is unavailable. advice: advice to
    include, or None."""
    from headway.machine.doctor import Advice

    return {
        "available": bool(support),
        "origin": origin,
        "reasons": [reason._asdict() for reason in support.reasons],
        "advice": asdict(advice or Advice("")),
    }


def screen(findings: dict[str, Any], machine: Machine, width: int) -> list[Text]:
    """Return the findings in lines of at most `width` columns, unless a word is longer."""
    lines = [line for name, fact in facts(machine) for line in _entry(name, fact, width)]
    lines += [Text(), Text("attention backends", "bold"), *_rows(findings["backends"], width)]
    lines += [Text(), Text("backends of layers with a state", "bold"), *_rows(findings["state_backends"], width)]
    lines += [Text(), Text("libraries for quantized weights", "bold"), *_rows(findings["libraries"], width)]
    if findings["failures"]:
        lines += [Text(), Text("plugins that failed", "bold red")]
    for failure in findings["failures"]:
        lines += _entry(failure["plugin"], _short(failure["error"]), width)
    return lines


def _rows(rows: Iterable[dict[str, Any]], width: int) -> list[Text]:
    """Return lines on the backends, grouped into ready, needs a GPU, and not ready (with reason and advice)."""
    from headway.machine.doctor import NO_GPU

    groups: dict[str, list[dict[str, Any]]] = {READY: [], NEEDS_GPU: [], NOT_READY: []}
    for row in rows:
        needs_gpu = row["advice"]["text"] == NO_GPU.text
        groups[READY if row["available"] else NEEDS_GPU if needs_gpu else NOT_READY].append(row)
    lines = []
    if groups[READY]:
        lines.append(Text(READY, "green"))
    for row in groups[READY]:
        where = f" (from {row['origin']})" if row["origin"] else ""
        lines += _entry(f"  {row['name']}", row["summary"] + where, width)
    if groups[NEEDS_GPU]:  # no command would help, so names are enough
        lines += [Text(NEEDS_GPU, "dim"), *_indented(", ".join(row["name"] for row in groups[NEEDS_GPU]), width, 2)]
    if groups[NOT_READY]:
        lines.append(Text(NOT_READY, "red"))
    for row in groups[NOT_READY]:
        advice = row["advice"]
        lines += _entry(f"  {row['name']}", _short("; ".join(map(_why, row["reasons"]))), width)
        lines += _indented(advice["text"], width)
        for command in advice["commands"]:
            lines += [Text(line, "bold") for line in command_lines(command, width)]
        if advice["note"]:
            lines += _indented(f"({advice['note']})", width)
    return lines


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Return the machine's properties as (name, value) pairs."""
    from headway.version import __version__

    gpus = [f"{gpu.name}, {'{}.{}'.format(*gpu.capability)}, {gpu.memory_gib:g} GiB" for gpu in machine.gpus]
    counted = [f"{gpus.count(gpu)} x {gpu}" if gpus.count(gpu) > 1 else gpu for gpu in dict.fromkeys(gpus)]
    cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "no CUDA"
    tools = (("nvcc", machine.nvcc), ("ninja", machine.ninja), ("C++ compiler", machine.compiler))
    return [
        ("headway", f"{__version__}, Python {machine.python}, {machine.system} {machine.arch}"),
        ("torch", f"{machine.torch} ({cuda}{', works' if machine.cuda_works else ''})"),
        ("NVIDIA driver", machine.driver or "none"),
        ("GPUs", "; ".join(counted) or "none"),
        ("to build with", ", ".join(f"{name} {found or 'not found'}" for name, found in tools)),
        ("CPU", f"{machine.cores} cores, torch uses {machine.threads} threads, {machine.memory_gib:g} GiB memory"),
        ("model cache", machine.model_cache),
        (
            "kernel cache",
            ", ".join(f"{folder} ({wrong})" if wrong else folder for folder, wrong in machine.kernel_cache) or "none",
        ),
        ("libraries", ", ".join(f"{name} {version}" for name, version in machine.installed.items()) or "none"),
    ]


def command_lines(command: str, width: int) -> list[str]:
    """Return the lines of a command to copy. A command longer than a line is continued with backslashes."""
    parts = textwrap.wrap(command, width - 6, break_long_words=False, break_on_hyphens=False)
    return [f"    {part} \\" for part in parts[:-1]] + [f"    {part}" for part in parts[-1:]]


def _entry(name: str, text: str, width: int) -> list[Text]:
    wrapped = textwrap.wrap(text, width - _NAME, break_on_hyphens=False) or [""]
    lines = [Text(" " * _NAME + line) for line in wrapped]
    if len(name) >= _NAME:
        return [Text(name, "bold"), *lines]
    return [Text(name.ljust(_NAME), "bold").append(wrapped[0], "default"), *lines[1:]]


def _indented(text: str, width: int, columns: int = 4) -> list[Text]:
    wrapped = textwrap.wrap(text, width - columns, break_long_words=False, break_on_hyphens=False)
    return [Text(" " * columns + line) for line in wrapped]


def _why(reason: dict[str, str]) -> str:
    if "Error" in reason["got"]:  # an exception already says what was needed
        return f"{reason['what']}: {reason['got']}"
    return f"{reason['what']}: needs {reason['need']}, got {reason['got']}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]} ... (whole with --json)"
