"""What would be published, built once: an sdist, the wheel made of that sdist, and an environment with the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from built_package import Built, Environment

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's folder: what is tracked is what is published")
    folder = tmp_path_factory.mktemp("built")
    sources = tuple(_run("git", "ls-files", cwd=ROOT).splitlines())
    checkout = folder / "checkout"
    for name in sources:
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    make = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    sdist = folder / _run(sys.executable, "-c", make, "build_sdist", folder, cwd=checkout).splitlines()[-1]
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = folder / _run(sys.executable, "-c", make, "build_wheel", folder, cwd=unpacked).splitlines()[-1]
    return Built(sources, sdist, wheel)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Headway from the wheel alone; the libraries that it needs are links to those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    for library in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        for entry in Path(library).iterdir():
            if not entry.name.startswith(("headway", "__editable__", "_virtualenv", "distutils-precedence")):
                (site / entry.name).symlink_to(entry)
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built.wheel, cwd=folder)
    (folder / "elsewhere").mkdir()
    return Environment(python.parent, folder / "elsewhere")
