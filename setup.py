"""What pyproject.toml cannot say: core/, backends/, ... install as headway.core, headway.backends, ...; and PyPI's README."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

PARTS = ("core", "registry", "backends", "models", "testing", "tuning", "bench")
ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")


def readme() -> str:
    """README.md for PyPI: relative links become absolute, or, as long as the repository has no address, their words alone."""

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if SOURCE is None:
            return "" if image else text
        return f"{image}[{text}]({SOURCE}/{'raw' if image else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    packages=["headway", *(f"headway.{sub}" for sub in find_packages("headway"))]
    + [f"headway.{part}" for part in PARTS]
    + [f"headway.{part}.{sub}" for part in PARTS for sub in find_packages(part)],
    package_dir={"headway": "headway", **{f"headway.{part}": part for part in PARTS}},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
