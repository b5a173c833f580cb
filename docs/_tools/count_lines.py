"""Count the files and lines of the installed package, the benchmarks and the tests: `python docs/_tools/count_lines.py`."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".cu", ".cuh", ".c", ".h")
PACKAGE = ("core", "kernels", "backends", "registry", "models", "tuning", "testing", "plan", "headway", "server", "cli")


def count(root: Path = ROOT) -> tuple[Counter[str], Counter[str]]:
    """Return the files and the lines of each top-level folder, counting tracked Python, CUDA and C files."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in tracked:
        path = root / name
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            folder = name.split("/")[0]
            files[folder] += 1
            lines[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return files, lines


def main() -> None:
    """Print a row per folder, and the sum over the package."""
    files, lines = count()
    for folder in (*PACKAGE, "bench", "tests"):
        if folder == "bench":
            print(f"{'package':<10}{sum(files[each] for each in PACKAGE):6,}{sum(lines[each] for each in PACKAGE):9,}")
        print(f"{folder:<10}{files[folder]:6,}{lines[folder]:9,}")


if __name__ == "__main__":
    main()
