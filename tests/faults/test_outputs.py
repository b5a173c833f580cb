"""Files that commands write are whole or not there, devices and folders stay what they are, and large tables are soon shown."""

from __future__ import annotations

import io
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.bench.crossover.report import print_view, view
from headway.core.contract.errors import ConfigError
from headway.core.system.files import clean, clean_once, new_folder, write_whole
from headway.core.system.json_files import write_bytes, write_json
from headway.core.system.terminal import Terminal
from headway.tuning.table.files import read_table
from process_limits import NOBODY, apart, killed_after, left_behind
from tables import a_cell, a_table

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
OLD, NEW = b"old", b"new" * 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_bytes(OLD)
    return path


def test_writing_to_a_device_does_not_replace_it(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), NEW)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    link = tmp_path / "link"
    link.symlink_to(os.devnull)
    write_whole(link, NEW)
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat(link).st_mode)


def test_a_full_device_is_an_error_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"/dev/full, which cannot be written \(No space left on device\)$"):
        write_bytes(NEW, Path("/dev/full"))


def test_a_fifo_is_written_into_and_one_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="a pipe that nobody reads"):
        write_bytes(NEW, fifo)
    handle = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    read: list[bytes] = []

    def reader() -> None:
        os.set_blocking(handle, True)
        while True:
            over = not write_thread.is_alive()
            if chunk := os.read(handle, 1 << 16):  # nothing, too, before the writer has opened it
                read.append(chunk)
            elif over:
                return

    thread = threading.Thread(target=reader)
    write_thread = threading.Thread(target=write_whole, args=(fifo, NEW * 100))  # more than a pipe holds
    write_thread.start()
    thread.start()
    write_thread.join(10)
    thread.join(10)
    os.close(handle)
    assert b"".join(read) == NEW * 100
    assert stat.S_ISFIFO(os.stat(fifo).st_mode)


def test_folders_and_sockets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        write_bytes(NEW, tmp_path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        with pytest.raises(ConfigError, match="neither a file nor"):
            write_bytes(NEW, tmp_path / "socket")


def test_a_symbolic_link_stays_and_its_target_is_written(file: Path, tmp_path: Path) -> None:
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "elsewhere" / "new.json")
    write_whole(link, NEW)
    write_whole(dangling, NEW)
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert file.read_bytes() == (tmp_path / "elsewhere" / "new.json").read_bytes() == NEW


def test_a_mode_is_kept_and_a_new_file_has_the_usual_one(file: Path, tmp_path: Path) -> None:
    file.chmod(0o640)
    write_whole(file, NEW)
    old = os.umask(0o027)
    try:
        write_whole(tmp_path / "other", NEW)
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o640


@ROOT
def test_an_owner_is_kept_by_root_and_another_owner_s_file_is_refused_to_others(file: Path, tmp_path: Path) -> None:
    os.chown(file, NOBODY, NOBODY)
    write_whole(file, NEW)
    assert (file.stat().st_uid, file.stat().st_gid) == (NOBODY, NOBODY)
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.owner() == "root" and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    assert apart(lambda: write_bytes(OLD, file), NOBODY) == ""
    os.chown(file, 0, 0)
    file.chmod(0o666)
    assert "belongs to another user" in apart(lambda: write_bytes(NEW, file), NOBODY)
    os.chown(file, NOBODY, NOBODY)
    file.chmod(0o444)
    assert "Permission denied" in apart(lambda: write_bytes(NEW, file), NOBODY)
    tmp_path.chmod(0o555)
    assert "Permission denied" in apart(lambda: write_bytes(NEW, tmp_path / "new"), NOBODY)
    assert file.read_bytes() == OLD


def test_a_full_disk_leaves_the_old_file_and_says_so(file: Path, tmp_path: Path) -> None:
    said = apart(lambda: write_bytes(NEW, file, "--json"), file_size=100)
    assert said.startswith(f"ConfigError: --json: needs a file in a folder that can be written to, got {file}, which cannot be")
    assert said.endswith("the old file is unchanged")
    assert file.read_bytes() == OLD
    assert "cannot be written" in apart(lambda: write_bytes(NEW, tmp_path / "new"), file_size=100)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_part_files_of_killed_writers_are_removed_and_of_living_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".table.json.0a1b2c.headway-part"
    dead.write_bytes(b"half")
    (tmp_path / ".folder.0a1b2c.headway-part" / "below").mkdir(parents=True)
    with new_folder(tmp_path / "model") as living:
        assert left_behind(tmp_path) == [living]
        assert clean(tmp_path) == []
        (living / "weights").write_bytes(NEW)
    assert (tmp_path / "model" / "weights").read_bytes() == NEW
    dead.write_bytes(b"half")
    clean_once.cache_clear()
    write_whole(tmp_path / "another", NEW)
    assert left_behind(tmp_path) == []


def test_a_failed_new_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "model") as part:
            (part / "weights").write_bytes(OLD)
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half"):
        fail()
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from headway.core.system.files import write_whole
path = Path(sys.argv[1])
for number in range(10**9):
    write_whole(path, str(number % 10).encode() * 2_000_000)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path, kills: int) -> None:
    path, moments = tmp_path / "table.json", random.Random(19)
    for _ in range(kills):
        assert killed_after(["-c", WRITER, str(path)], moments.uniform(0.25, 0.6), tmp_path)
        if path.exists():
            content = path.read_bytes()
            assert len(content) == 2_000_000
            assert len(set(content)) == 1
    clean_once.cache_clear()
    write_whole(path, NEW)
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


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
    assert "b0" in next(line.split() for line in lines if line.split()[:1] == [str(rows)])


def test_a_terminal_of_thirty_columns_gets_every_row_of_a_long_table_whole() -> None:
    cells = [
        a_cell(us, kernel=name, case=f"1q1s{n}", kv_len=n) for n in range(1, 601) for name, us in (("slow", 15.0), ("fast", 10.0))
    ]
    page = io.StringIO()
    print_view(view(a_table(*cells)), Terminal(file=page, width=30))
    rows = [line.split() for line in page.getvalue().splitlines() if line.endswith("1.50x")]
    assert rows == [[str(n), "fast", "10.0", "slow", "15.0", "1.50x"] for n in range(1, 601)]
