"""Tables are shown at once: no command that reads one imports torch, and a table of 20,000 cells is soon shown."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.bench.crossover.report import print_view, view
from headway.core.system.json_files import write_json
from headway.core.system.terminal import Terminal
from headway.tuning.table.files import read_table
from tables import a_cell, a_table


def test_a_table_is_read_without_torch(tmp_path: Path) -> None:
    write_json(a_table(a_cell()), tmp_path / "table.json")
    program = """
import sys
from headway.cli.app import make_app
app = make_app()
for command in ("show table.json", "diff table.json table.json", "merge table.json table.json -o merged.json"):
    app(["table", *command.split()], standalone_mode=False)
print(sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1250, 10_000])
def test_a_table_of_twenty_thousand_cells_is_read_and_shown(rows: int, tmp_path: Path) -> None:
    layouts = [("nhd", 16), ("hnd", 16), ("nhd", 256), ("hnd", 256)][: 20_000 // rows // 2]
    names = [f"b{number}" for number in range(20_000 // rows // len(layouts))]
    began = time.process_time()
    cells = [
        a_cell(10.0 + kv_len % 7 + number, kernel=name, case=f"1q1s{kv_len}", kv_len=kv_len, layout=layout, block_size=size)
        for kv_len in range(1, rows + 1)
        for number, name in enumerate(names)
        for layout, size in layouts
    ]
    assert len(cells) == 20_000
    write_json(a_table(*cells), tmp_path / "table.json")
    made, page = time.process_time(), io.StringIO()
    print_view(view(read_table(tmp_path / "table.json")), Terminal(file=page, width=120))
    assert time.process_time() - made < 8 * (made - began)  # two to four times, unless a step grows faster than the table
    lines = page.getvalue().splitlines()
    assert len(lines) >= rows
    row = next(line.split() for line in lines if line.split()[:1] == [str(rows)])
    assert "b0" in row


def test_a_terminal_of_thirty_columns_gets_every_row_of_a_long_table_whole() -> None:
    cells = [
        a_cell(us, kernel=name, case=f"1q1s{n}", kv_len=n) for n in range(1, 601) for name, us in (("slow", 15.0), ("fast", 10.0))
    ]
    page = io.StringIO()
    print_view(view(a_table(*cells)), Terminal(file=page, width=30))
    rows = [line.split() for line in page.getvalue().splitlines() if line.endswith("1.50x")]
    assert rows == [[str(n), "fast", "10.0", "slow", "15.0", "1.50x"] for n in range(1, 601)]
