"""The kernels of docs/tutorial-backend.md and docs/tutorial-state-backend.md are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headway.cli.look.plugins import write_package
from headway.contract import StateBackend
from headway.registry import create_registry
from headway.testing.kit.kit import CHECKS, Kit, parse_cell
from headway.testing.kit.report import CellResult
from headway.testing.kit.subject import subject_of
from sandbox import run_python

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, STATES_PAGE = (DOCS / f"tutorial-{name}.md" for name in ("backend", "state-backend"))
BLOCKS, STATE_BLOCKS = (re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in (PAGE, STATES_PAGE))


@pytest.mark.parametrize(("query_len", "kv_len"), [(1, 300), (7, 7), (130, 257)])
def test_the_online_softmax_is_attention(query_len: int, kv_len: int) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, heads, 32) for count, heads in ((query_len, 6), (kv_len, 2), (kv_len, 2)))
    visible = torch.arange(kv_len) <= torch.arange(kv_len - query_len, kv_len)[:, None]
    query, key, value = (rows.transpose(0, 1).double() for rows in (q, k, v))
    expected = scaled_dot_product_attention(query, key, value, visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(names["attend"](q, k, v, kv_len - query_len, 0.3), expected.transpose(0, 1).float())


@pytest.mark.parametrize("number", [0, 1])
def test_kernels_are_under_forty_lines(number: int) -> None:
    kernel = re.findall(r"^def .*?(?=\n\n\n|\Z)", BLOCKS[number], re.MULTILINE | re.DOTALL)[0]
    assert len(kernel.splitlines()) < 40


def test_the_scorecard_on_the_page_is_the_kits() -> None:
    names = re.findall(r"^ [✓✗–] (\w+)", PAGE.read_text(), re.MULTILINE)
    assert len(names) >= 4
    assert not set(names) - set(CHECKS)
    assert not re.search(r"\d+ passed", PAGE.read_text()), "the number of cells changes with the kit"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "verify", "ragged"])
def test_the_triton_kernel_is_right_under_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "walnut_triton.py").write_text(BLOCKS[1])
    cell = f"answer:{phase}:nhd:own:b256:d32:g1:float32:none:-"
    done = run_python("-m", "headway", "check", "walnut_triton.py:WalnutTriton", "--cell", cell, "--timeout", "110", cwd=tmp_path)
    assert done.code == 0, done


@pytest.mark.slow
def test_the_mistake_that_the_page_shows_is_found(tmp_path: Path) -> None:
    write_package("walnut", tmp_path / "walnut", create_registry(load_entry_points=False))
    file = tmp_path / "walnut" / "headway_walnut.py"
    whole = file.read_text()
    old = whole[whole.index("def attend") : whole.index("\n\n\nclass")]
    attend = BLOCKS[0][BLOCKS[0].index("def attend") :].rstrip().replace("total = total * shrink", "total = total")
    file.write_text(whole.replace(old, attend))
    done = run_python("-m", "headway", "check", f"{file.name}:Walnut", "--quick", "--only", "long", cwd=file.parent)
    assert done.code == 1, done
    assert "2 of 2 failed" in done.out
    assert "6 of 7 sequences are wrong; layer 0: sequence 3 (query_len 1, kv_len 1024)" in done.out


@pytest.mark.slow
@pytest.mark.model
def test_the_notebook_writes_a_text(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(BLOCKS[0] + BLOCKS[2])
    done = run_python("notebook.py", cwd=tmp_path)
    assert done.code == 0, done
    assert "Paris" in done.out


def state_results(text: str, class_name: str, *cells: str) -> list[CellResult]:
    """What the kit says of a class of the page's text in some cells, or in one of each check."""
    names: dict[str, Any] = {"__name__": "walnut"}
    exec(text, names)
    found: type[StateBackend] = names[class_name]
    kit = Kit(subject_of(found, torch.device("cpu")))
    quick = {(cell.check, cell.phase): cell for cell in reversed(kit.cells(quick=True)) if cell.check not in ("memory", "sync")}
    return [kit.run(cell) for cell in ([parse_cell(cell) for cell in cells] or quick.values())]  # type: ignore[arg-type]


def test_the_state_backends_are_right() -> None:
    whole, decodes = STATE_BLOCKS[0], STATE_BLOCKS[1].replace("from walnut_states import *", "")
    results = state_results(whole, "WalnutStates") + state_results(whole + decodes, "WalnutDecode")
    assert [result for result in results if result.status != "passed"] == []
    assert {"claims", "refuse", "answer", "session", "graph"} <= {result.check for result in results}


def test_the_mistake_that_the_page_of_states_shows_is_found_and_named() -> None:
    decay = "    state = state * g.exp()[..., None, None]\n"
    late = STATE_BLOCKS[0].replace(decay, "", 1)
    late = late.replace("    return (q[...", f"{decay}    return (q[...", 1)
    shown = STATES_PAGE.read_text()
    (cell,) = set(re.findall(r"✗ (answer:states:\S+)", shown))
    (result,) = state_results(late, "WalnutStates", cell)
    assert " ".join(result.reason.split()) in " ".join(shown.split())
    assert result.guess == "decay applied after instead of before the update"


def test_the_hook_of_the_page_registers_the_state_backend() -> None:
    names: dict[str, Any] = {}
    exec(STATE_BLOCKS[0] + STATE_BLOCKS[2], names)
    (info,) = names["headway_register_state_backends"]()
    assert info.load() is names["WalnutStates"]
