"""The rules of docs/design.md that a machine can hold: imports only go down, files stay short."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from source_trees import FOLDERS, ROOT, SOURCES, all_imports, imported, is_kernel, module_of, nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("structure")  # the trees of all files are parsed once
ROOMS = (
    "core.contract",
    "core.system",
    "core.select",
    "core.sampling",
    "core.chat",
    "core.speculation",
    "core.oracle",
    "core.engine",
    "core.pooling",
    "kernels",
    "backends",
    "registry",
    "models",
    "tuning.table",
    "tuning.measure",
    "tuning.isolated",
    "tuning",
    "testing",
    "plan",
    "headway",
    "server",
    "bench",
    "cli",
    "entry",
    "bench.studies",
)
"""From the bottom up: a file imports from its own room and from those before it. `headway` is the face, headway/integrations with
it; `entry` is what Python itself opens: headway/__init__.py, which lends names from below, and headway/__main__.py. Above all of
them lies bench/studies, which is not installed: nothing imports it."""
PLUGIN = ROOT / "integrations" / "headway-vllm" / "headway_vllm"
"""A package of its own, which takes the contract, the selector and the tables, and never the engine."""


def room_of(module: str) -> str:
    """The room of ROOMS that holds a module; what lies in headway/ itself is the face."""
    if module in ("", "__main__"):
        return "entry"
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default="headway")


def above(module: str, others: Iterable[str]) -> list[str]:
    """Those of some modules that lie in a room above a module's."""
    rank = ROOMS.index(room_of(module))
    return sorted(other for other in others if ROOMS.index(room_of(other)) > rank)


def test_imports_only_go_down() -> None:
    wrong = {module: found for module, others in all_imports().items() if (found := above(module, others))}
    assert not wrong, "modules import from rooms above their own"


ENGINE_ORDERS = ("data", "cache", "offload", "scheduling"), ("data", "execution", "ranks")
"""The rooms of core/engine from the bottom up: those of the host decide, and those of the device run what was decided. The two
meet in core/engine/*.py alone."""


def engine_room_of(module: str) -> str:
    """The room of a module within core/engine; "" for the files on top of all rooms."""
    parts = module.removeprefix("core.engine").split(".")[1:]
    return parts[0] if len(parts) > 1 else ""


def test_rooms_of_the_engine_import_only_what_lies_below_them() -> None:
    wrong = {}
    for module in (module for module in SOURCES if room_of(module) == "core.engine"):
        own = engine_room_of(module)
        allowed = {room for order in ENGINE_ORDERS if own in order for room in order[: order.index(own) + 1]}
        taken = {other: engine_room_of(other) for other in all_imports()[module] if room_of(other) == "core.engine"}
        if own and (above_it := {other for other, room in taken.items() if room not in allowed}):
            wrong[module] = above_it
    assert not wrong


def test_every_room_of_the_engine_has_its_place() -> None:
    rooms = {engine_room_of(module) for module in SOURCES if room_of(module) == "core.engine"} - {""}
    assert rooms == {room for order in ENGINE_ORDERS for room in order}


def test_no_file_imports_itself_by_way_of_others() -> None:
    list(graphlib.TopologicalSorter(all_imports()).static_order())  # raises CycleError with the circle


def named_in_strings(path: Path) -> set[str]:
    """The files of Headway that a file names in its strings, such as a module that another process is to run; no docstrings."""
    nodes = nodes_of(path)
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented)
    words = {word for text in texts if isinstance(text, str) for word in re.findall(r"\bheadway((?:\.[a-z_]\w*)+)", text)}
    return {word[1:] for word in words if word[1:] in SOURCES} - {module_of(path)}


def test_strings_name_no_module_of_a_room_above() -> None:
    wrong = {module: found for module, path in SOURCES.items() if (found := above(module, named_in_strings(path)))}
    assert not wrong, "strings of modules name modules of rooms above their own"


def test_the_plugin_for_vllm_takes_no_more_than_it_says() -> None:
    taken = {other for path in PLUGIN.glob("*.py") for other in imported(path)}
    rooms = {room_of(other) for other in taken if other != "contract"}
    tuning = {"tuning.table", "tuning.measure", "tuning.isolated", "tuning"}
    assert rooms <= {"core.contract", "core.select", "registry", *tuning}, taken


def test_headway_links_to_every_folder_of_the_package() -> None:
    """So that headway/core is core/ for an editable install, type checkers and a wheel."""
    links = {path.name: path.resolve() for path in (ROOT / "headway").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in FOLDERS if name != "headway"}


def test_what_tests_share_has_an_index() -> None:
    folder = ROOT / "tests" / "support"
    listed = {line.split("`")[1] for line in (folder / "README.md").read_text().splitlines() if line.startswith("| `")}
    assert listed == {str(path.relative_to(folder)) for path in folder.rglob("*.[pc]*") if path.suffix in (".py", ".c")}


def test_files_stay_short() -> None:
    files = {**SOURCES, **{path.stem: path for path in PLUGIN.glob("*.py")}}
    long = {module: lines for module, path in files.items() if (lines := len(path.read_text().splitlines())) > 600}
    assert not long


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_that_are_no_kernels_stay_short() -> None:
    long = {
        f"{module}.{node.name}": lines
        for module, path in SOURCES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node) and (lines := body_lines(node)) > 50
    }
    assert not long


def test_a_public_class_name_stands_once() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(expression: ast.expr) -> bool:
    """Whether an expression is a method's own object or class."""
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name):
        return expression.func.id == "super"
    return isinstance(expression, ast.Name) and expression.id in ("self", "cls")


def private_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a file gives to functions, classes, variables and attributes."""
    defined = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    named = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    set_on = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return set(filter(is_private, defined | named | set_on))


def own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a test's own functions, classes and objects have, which may be those of ours by chance."""
    defined = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    on_self = {each.attr for each in nodes if isinstance(each, ast.Attribute) and is_own(each.value)}
    return defined | on_self


def reached(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a file takes from others: imported, as an attribute of anything but its own object, or as a
    string that is handed to a function."""
    imported = {alias.name for each in nodes if isinstance(each, ast.ImportFrom) for alias in each.names}
    attributes = {each.attr for each in nodes if isinstance(each, ast.Attribute) and not is_own(each.value)}
    handed = (value for each in nodes if isinstance(each, ast.Call) for value in each.args)
    strings = {value.value for value in handed if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return set(filter(is_private, imported | attributes | strings))


def test_tests_reach_no_private_name_of_ours() -> None:
    """What a test needs to see is public, if only within the package: a private name can be renamed without opening a test."""
    ours = set().union(*(private_names(nodes_of(path)) for path in SOURCES.values()))
    files = {path: nodes_of(path) for path in sorted((ROOT / "tests").rglob("*.py"))}
    found = {
        str(path.relative_to(ROOT)): names for path, nodes in files.items() if (names := reached(nodes) & ours - own_names(nodes))
    }
    assert not found


READERS_OF_JSON = {
    "core.system.json_text": "the one reader of what others wrote",
    "core.system.child": "messages between this process and its own children, whose names of files need not be UTF-8",
    "core.sampling.guidance_notation": "finds where a schema ends in a Lark grammar",
}


def calls_of_json_readers(path: Path) -> list[str]:
    """The calls in a file that read JSON by another function than `parse_json` and `parse_model`."""
    methods = {"model_validate_json", "validate_json", "raw_decode", "from_json"}
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "orjson", "pydantic_core"):
            found += [alias.name for alias in node.names if alias.name in ("load", "loads", "from_json", "JSONDecoder")]
        elif isinstance(node, ast.Attribute):
            of_module = isinstance(node.value, ast.Name) and node.value.id in ("json", "orjson", "pydantic_core")
            if node.attr in methods or (of_module and node.attr in ("load", "loads", "JSONDecoder")):
                found.append(node.attr)
    return found


def test_json_is_read_by_one_function() -> None:
    """Its limits (depth, numbers, surrogates, marks) and the form of its errors hold for every file, request and option.

    bench/studies is not installed, and reads what its own runs have written.
    """
    found = {module: calls for module, path in SOURCES.items() if (calls := calls_of_json_readers(path))}
    assert {module for module in found if room_of(module) != "bench.studies"} == READERS_OF_JSON.keys()
