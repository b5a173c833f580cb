"""Maps the top-level folders core/, backends/, ... to the package headway.*; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

PARTS = ("core", "registry", "backends", "models", "testing", "tuning", "bench")

setup(
    packages=["headway", "headway.cli", "headway.server"]
    + [f"headway.{part}" for part in PARTS]
    + [f"headway.{part}.{sub}" for part in PARTS for sub in find_packages(part)],
    package_dir={"headway": "headway", **{f"headway.{part}": part for part in PARTS}},
)
