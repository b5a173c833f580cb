"""The rules of docs/design.md that a machine can hold: imports only go down, files stay short, importing is cheap."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("core", "registry", "backends", "models", "testing", "tuning", "headway", "bench")
ROOMS = (
    "core.contract",
    "core.system",
    "core.select",
    "core.sampling",
    "core.speculation",
    "core.engine",
    "registry",
    "backends",
    "models",
    "testing",
    "tuning",
    "headway",
    "bench",
    "cli",
    "entry",
)
"""From the bottom up: a file imports from its own room and from those before it. `headway` is the face, headway/integrations with
it; `entry` is what Python itself opens: headway/__init__.py, which lends names from below, and headway/__main__.py."""
PLUGIN = ROOT / "integrations" / "headway-vllm" / "headway_vllm"
"""A package of its own, which takes the contract, the selector and the tables, and never the engine."""


def module_of(path: Path) -> str:
    """The dotted name, without the leading `headway`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "headway" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def room_of(module: str) -> str:
    """The room of ROOMS that holds a module; what lies in headway/ itself is the face."""
    if module in ("", "__main__"):
        return "entry"
    return next((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), "headway")


def imported(path: Path) -> set[str]:
    """The files of Headway that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "headway":
                continue
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in SOURCES:
                parts.pop()  # a name in a file
            found.add(".".join(parts))
    return found - {module_of(path)}


IMPORTS = {module: imported(path) for module, path in SOURCES.items()}


@pytest.mark.parametrize("module", SOURCES, ids=lambda module: module or "headway")
def test_imports_only_go_down(module: str) -> None:
    rank = ROOMS.index(room_of(module))
    above = {other for other in IMPORTS[module] if ROOMS.index(room_of(other)) > rank}
    assert not above, f"{module} ({ROOMS[rank]}) imports {sorted(above)}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    list(graphlib.TopologicalSorter(IMPORTS).static_order())  # raises CycleError with the circle


def test_the_hookimpl_marker_is_all_that_backends_take_from_the_registry() -> None:
    taken = {other for module, others in IMPORTS.items() if room_of(module) == "backends" for other in others}
    assert {other for other in taken if room_of(other) == "registry"} <= {"registry.hookspecs"}


def test_the_plugin_for_vllm_takes_no_more_than_it_says() -> None:
    taken = {other for path in PLUGIN.glob("*.py") for other in imported(path)}
    rooms = {room_of(other) for other in taken if other != "contract"}
    assert rooms <= {"core.contract", "core.select", "registry", "tuning"}, taken


def test_type_checkers_see_every_file() -> None:
    """What has no link in typings/ is skipped in silence. A folder's link shows all that lies in it."""
    links = {path.name: path.resolve() for path in (ROOT / "typings" / "headway").iterdir()}
    shown = {path.name: path for path in (ROOT / "headway").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    shown |= {name: ROOT / name for name in FOLDERS if name != "headway"} | {"py.typed": ROOT / "headway" / "py.typed"}
    assert links == shown


def test_files_stay_short() -> None:
    files = {**SOURCES, **{path.stem: path for path in PLUGIN.glob("*.py")}}
    long = {module: lines for module, path in files.items() if (lines := len(path.read_text().splitlines())) > 300}
    assert not long


def test_importing_headway_and_listing_backends_loads_no_kernel_library() -> None:
    code = """
import sys, headway
from headway.registry import create_registry
create_registry(load_entry_points=False)
heavy = {"triton", "flash_attn", "xformers", "flashinfer", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
