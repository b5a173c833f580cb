"""Which code a result was made by: every result file says so, in one field."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from headway.core.system.text import harmless

COMMIT_VARIABLE = "HEADWAY_COMMIT"
"""Environment variable that names the commit of a copy of the sources without git's folder, such as one in a container."""
_SHORT = 12
_UNKNOWN = "unknown"
"""The version of sources that are not installed."""
_SECONDS = 10


def command_line() -> str:
    """The command that is running, as typed; bytes that are no text appear as escapes, so that any file can hold it."""
    return harmless(shlex.join(["headway", *sys.argv[1:]]), keep="\n\t")


class Origin(BaseModel):
    """The code that made a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    """Of the distribution headway."""
    commit: str | None = None
    """The checkout's commit, twelve digits; None where the package was installed from elsewhere."""
    modified: bool = False
    """Whether tracked files differed from that commit."""

    @classmethod
    def here(cls) -> Origin:
        """The code that is running: git is asked where the package lies in a checkout, else $HEADWAY_COMMIT."""
        try:
            version = metadata.version("headway")
        except metadata.PackageNotFoundError:
            version = _UNKNOWN
        root = Path(__file__).resolve().parents[1]
        commit = _git(root, "rev-parse", f"--short={_SHORT}", "HEAD") if (root / ".git").exists() else None
        if commit:
            return cls(version=version, commit=commit, modified=bool(_git(root, "status", "--porcelain", "--untracked-files=no")))
        return cls(version=version, commit=os.environ.get(COMMIT_VARIABLE, "").strip()[:_SHORT] or None)

    def __str__(self) -> str:
        commit = f", commit {self.commit}{' with changes' if self.modified else ''}" if self.commit else ""
        return f"headway{'' if self.version == _UNKNOWN else f' {self.version}'}{commit}"


def _git(root: Path, *words: str) -> str | None:
    """What git answers; None where it is missing or knows no commit."""
    try:
        found = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
