"""The documentation's code is the code that runs, and its facts are those of the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from grid import CASES, LAYOUTS, SPECS, VERIFY
from headway.backends.layouts import write_rows
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.support import Support
from headway.core.sampling.params import SamplingParams
from headway.registry import create_registry, hookspecs
from headway.testing.cases import make_case, parse_case
from headway.testing.reference import reference, relative_error, run_backend

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "headway-example" / "headway_example.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headway_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_in_the_docs_are_the_example_files() -> None:
    assert EXAMPLE.read_text().rstrip() in (ROOT / "docs" / "backends.md").read_text()
    layout = ROOT / "examples" / "headway-layout" / "headway_layout.py"
    assert layout.read_text().rstrip() in (ROOT / "docs" / "layouts.md").read_text()


def test_the_example_is_short() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_example_backend_is_right(example: ModuleType, layout: CacheLayout, case_name: str) -> None:
    registry = create_registry([example], load_entry_points=False)
    verify = VERIFY.get(case_name, 1)
    lens = parse_case(CASES[case_name], verify)
    case = make_case(lens, SPECS["gqa 2"], layout, 8, write_rows, poison=float("nan"), padding_rows=2, decode_query_len=verify)
    backend = registry.backend("example")(case.spec, layout, 8)
    assert relative_error(run_backend(backend, case), reference(case), case) < 1e-6


def test_the_example_refuses_what_it_does_not_claim(example: ModuleType) -> None:
    registry = create_registry([example], load_entry_points=False)
    window = dataclasses.replace(SPECS["gqa 2"], sliding_window=4)
    support = registry.supports("example", window, LAYOUTS[0], 8, Phase.DECODE)
    assert isinstance(support, Support)
    assert [reason.what for reason in support.reasons] == ["sliding_window"]


def test_every_hook_stands_in_the_docs_with_its_signature() -> None:
    text = (ROOT / "docs" / "backends.md").read_text()
    hooks = [name for name in vars(hookspecs) if name.startswith("headway_")]
    assert len(hooks) == 5
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
