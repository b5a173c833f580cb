"""`headway plugins` lists the installed plugins; `headway new-kernel` writes the package of a new plugin."""

from __future__ import annotations

import json
import keyword
import logging
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from headway.core.contract.operation import OperationKind
    from headway.registry import Registry
    from headway.registry.records import PluginRecord

TEMPLATE: Final = Path(__file__).parents[2] / "template"
"""Folder of the copier template for a plugin's package."""


_WRITTEN: Final = {
    "attention": (
        "attend()",
        "headway check {module}:{title} --quick",
        'headway generate --plugin {module} --attn-backend {name} "The capital of France is"',
    ),
    "linear": (
        "apply()",
        "headway check {module}:{title} --quick",
        'headway generate --model MODEL-AWQ --plugin {module} --linear-kernel {name} "Hello"',
    ),
    "experts": (
        "apply()",
        "headway check {module}:{title} --quick",
        'headway generate --model MODEL-MOE --plugin {module} --experts-kernel {name} "Hello"',
    ),
}
"""Kind of operation -> the function that the plugin's author replaces, and the commands to run next."""
Name = Annotated[
    str, typer.Argument(help="Name of the kernel for --attn-backend, --linear-kernel or --experts-kernel, such as my_kernel.")
]
Into = Annotated[Path | None, typer.Option(help="Folder to create. Default: headway-NAME in the current folder.")]


def new_backend(name: Name, into: Into = None) -> None:
    """Write a package with a working backend and its tests.

    The package has a README and a CI workflow. docs/tutorial-backend.md continues from there.
    """
    new_kernel(name, "attention", into)


def new_kernel(
    name: Name,
    kind: Annotated[str, typer.Option(help="Kind of kernel: attention, linear or experts.")] = "attention",
    into: Into = None,
) -> None:
    """Write a package with a working kernel and its tests.

    docs/tutorial-backend.md and docs/tutorial-linear-kernel.md continue from there.
    """
    from headway.core.contract.operation import kind_of
    from headway.tuning.isolated.trial import create_registry

    operation, folder = kind_of(kind, "--kind"), into or Path(distribution_of(name))
    files = write_package(name, folder, create_registry(), operation)
    replaced, *following = _WRITTEN[kind]
    module = next(path for path in files if path.suffix == ".py" and path.parent == Path())
    title = "".join(part.capitalize() for part in name.split("_"))
    written = f"{folder}: {', '.join(map(str, files))}"
    print(textwrap.fill(written, 79, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
    print(f"It runs as it is. Your kernel replaces {replaced} in {module}. Next:\n")
    for line in (f"cd {folder}", *(line.format(module=module, title=title, name=name) for line in following)):
        print(f"    {line}")


def distribution_of(name: str) -> str:
    """Return the name of a kernel's package, which is also the name of its folder."""
    return f"headway-{name.replace('_', '-')}"


def write_package(name: str, folder: Path, registry: Registry, kind: OperationKind | None = None) -> list[Path]:
    """Write the package of a kernel into a new folder. Return the paths of the files, relative to the folder. kind: None means
    attention.
    :raises ConfigError: if the name is invalid or taken, the folder exists or cannot be made, or copier is missing.
    """
    from headway.core.contract.backend import API_VERSION
    from headway.core.contract.operation import ATTENTION
    from headway.registry.validate import RESERVED

    kind = kind or ATTENTION
    if kind.name not in _WRITTEN:
        raise ConfigError("--kind", f"one that there is a template for: {', '.join(_WRITTEN)}", kind.name)
    known = registry.of(kind).entries
    ok = name.isidentifier() and name.isascii() and name == name.lower() and not keyword.iskeyword(name)
    if not ok or name in RESERVED:
        raise ConfigError("NAME", "a Python identifier in lower case, such as my_kernel", repr(name))
    if name in known:
        raise ConfigError("NAME", f"a name that no {kind.word} has", f"{name!r} of {known[name].owner}")
    if folder.exists():
        raise ConfigError("--into", "a folder that does not exist yet", str(folder))
    try:
        from copier import run_copy
    except ImportError as error:
        raise ConfigError("headway new-kernel", "the package copier", str(error), 'pip install "headway[kit]"') from error
    answers = {"kind": kind.name, "name": name, "distribution": distribution_of(name), "api_version": API_VERSION}
    try:
        run_copy(str(TEMPLATE), folder, answers, defaults=True, quiet=True)
    except OSError as error:
        raise ConfigError("--into", "a folder that can be written", str(folder), str(error)) from error
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


_STATES = {"loaded": "green", "left out": "bold red", "blocked": "yellow"}
_KINDS = {
    "backends": "backends",
    "state_backends": "state backends",
    "linear_kernels": "linear kernels",
    "experts_kernels": "experts kernels",
    "all_reduce_kernels": "all-reduce kernels",
    "layouts": "cache layouts",
    "state_layouts": "state layouts",
    "proposers": "proposers",
    "logits_processors": "logits processors",
    "chat_parsers": "chat parsers",
    "attention_rules": "attention rules",
    "hooks": "hooks",
}


def plugins(
    retry: Annotated[bool, typer.Option("--retry", help="Try every plugin again, ignoring saved results.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List installed plugins with what each adds or why it is not used.

    Each version of a plugin is tried once in a separate process. A plugin that crashes, hangs or exits in this process is not
    used until --retry. headway -v plugins shows tracebacks and output. HEADWAY_PLUGINS and --plugins select plugins.
    """
    from headway.core.system.terminal import Terminal
    from headway.tuning.isolated.trial import create_registry

    found = create_registry(retry=retry).plugins
    if as_json:
        print(json.dumps({"plugins": [asdict(record) for record in found]}, indent=2))
        return
    console = Terminal(highlight=False)
    if not found:
        console.print("no plugins are installed besides the built-in one; docs/backends.md says how to write one")
    for record in found:
        _show(record, console)


def _show(record: PluginRecord, console: Console) -> None:
    from rich.text import Text

    heading = Text(record.name, "bold").append(f"  {record.owner}  ", "default").append(record.state, _STATES[record.state])
    console.print(heading, soft_wrap=True)
    lines: list[tuple[str, Any]] = [("file", record.file or "not found")]
    lines += [(shown, ", ".join(getattr(record.brought, kind))) for kind, shown in _KINDS.items()]
    lines += [("tried", record.tried), ("reason", record.reason), *(("remark", remark) for remark in record.remarks)]
    for what, text in lines:
        if text:
            console.print(Text(f"  {what}: ", "dim").append(text, "default"), soft_wrap=True)
    if record.details and logging.getLogger("headway").isEnabledFor(logging.INFO):
        for line in record.details.splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
