"""The version of Headway; pyproject.toml has the same, and a test compares them."""

__version__ = "0.1.0"
