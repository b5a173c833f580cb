"""Version of the installed package, as `pyproject.toml` states it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("headway")
except PackageNotFoundError:  # running from sources that are not installed
    __version__ = "unknown"
