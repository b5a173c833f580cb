"""The version of Headway, which git's tag sets when the package is built."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("headway")
except PackageNotFoundError:  # sources that are not installed
    __version__ = "unknown"
