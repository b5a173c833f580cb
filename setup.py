"""What pyproject.toml cannot say: PyPI's README has absolute links."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

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
    long_description=readme(),
    long_description_content_type="text/markdown",
)
