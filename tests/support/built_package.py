"""Paths and results that tests of the published files share."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from sandbox import Result

VERSION = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]["version"]
"""Version that the built files must have."""


@dataclass(frozen=True)
class Built:
    """Two files, and the sources that they were made of."""

    sources: tuple[str, ...]
    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Environment:
    """An environment into which Headway came as a wheel."""

    bin: Path
    cwd: Path

    def run(self, program: str, *arguments: str, **variables: str) -> Result:
        """A program of the environment, in a folder that has nothing to do with the sources."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", **variables}
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(command, cwd=self.cwd, env=environment, capture_output=True, text=True, timeout=300)
        return Result(done.returncode, done.stdout, done.stderr)
