"""Limits on the size of the code that may only fall: lower a number here when the code got smaller."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import count_lines
from source_trees import FOLDERS, ROOT, SOURCES, all_imports, is_kernel, nodes_of

pytestmark = pytest.mark.xdist_group("structure")

FILES, LINES = 514, 112_270
"""Of the installed package; the plan is 92,000 lines. Raised eleven times. First, from 510 and 103,333: docstrings became whole
sentences, and Gemma 4, the choice by kind of layer, derived times and any head size were added. The second time, by 166 lines: an
idle engine measures, and `hopper` computes heads of 512. The third time, by one file and 327 lines: a process compiles Triton's
kernels, and configurations are read without transformers, which halves a first start. The fourth time, by seven files and 2,648
lines: the flight recorder, passports, kernels of the hub, reasons for cache misses, the books of blocks, and `full`. The fifth
time, by 225 lines: `full` on GPUs. The sixth time, by three files and 2,300 lines: attention rules, which are checked,
computed by `sdpa`, inlined into Triton's kernels, held to by the kit, and known to tables and engine; FlexAttention; and
differential attention. The seventh time, by one file and 311 lines: an all-reduce for large tensors, weights of 5 and 6 bits on a
CPU, and block masks for FlexAttention. The eighth time, by 244 lines: all-reduces that overlap with linear layers. The ninth
time, by three files and no lines: two files with several subjects were divided. The tenth time, by 16 lines: `triton` lets the
next kernel start late, and a second kernel that overlaps is named. The eleventh time, by 57 lines: one rule splits the last
items of a prefill or extend, in `hopper` and `triton`."""
BENCH_LINES, TEST_LINES = 9_209, 64_916
SMALL_WITH_ONE_IMPORTER = 0
MANY_PARAMETERS = 6
MIXED_SPLATS = 120
TUPLES_OF_ATTRIBUTES = 6
IGNORES = 70
PACKAGE = {module: path for module, path in SOURCES.items() if not module.startswith("bench")}


def test_the_package_stays_small() -> None:
    files, lines = count_lines.count()
    assert sum(files[each] for each in count_lines.PACKAGE) <= FILES
    assert sum(lines[each] for each in count_lines.PACKAGE) <= LINES
    assert lines["bench"] <= BENCH_LINES
    assert lines["tests"] <= TEST_LINES


def test_no_folder_holds_more_than_twenty_files() -> None:
    held = Counter(path.parent for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in held.items() if count > 20}
    assert not crowded


def test_a_small_module_with_one_importer_belongs_into_it() -> None:
    importers: Counter[str] = Counter(other for module, others in all_imports().items() for other in others if module in PACKAGE)
    small = [
        module
        for module, path in PACKAGE.items()
        if path.name != "__init__.py" and importers[module] == 1 and len(path.read_text().splitlines()) < 60
    ]
    assert len(small) <= SMALL_WITH_ONE_IMPORTER, small


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function, without self and cls, `*args` and `**options`."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in every if each.arg not in ("self", "cls")])


def is_command(module: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether typer calls a function: a public one of the command line with annotated options."""
    return module.startswith("cli.") and not function.name.startswith("_") and "Annotated" in ast.unparse(function.args)


def test_few_functions_have_more_than_eight_parameters() -> None:
    many = [
        f"{module}.{node.name}"
        for module, path in PACKAGE.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters_of(node) > 8
        and not is_kernel(node)
        and not is_command(module, node)
    ]
    assert len(many) <= MANY_PARAMETERS, many


def test_few_calls_mix_unpacked_arguments_with_their_own() -> None:
    mixed = 0
    for path in PACKAGE.values():
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                unpacked = [isinstance(each, ast.Starred) for each in node.args] + [each.arg is None for each in node.keywords]
                mixed += any(unpacked) and not all(unpacked)
    assert mixed <= MIXED_SPLATS, mixed


def test_attributes_are_assigned_one_by_one() -> None:
    tuples = [
        f"{module}:{node.lineno}"
        for module, path in PACKAGE.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple) and any(isinstance(each, ast.Attribute) for each in target.elts)
    ]
    assert len(tuples) <= TUPLES_OF_ATTRIBUTES, tuples


def test_few_types_are_ignored() -> None:
    found = sum(Path(path).read_text().count("# type: ignore") for path in PACKAGE.values())
    assert found <= IGNORES, found
