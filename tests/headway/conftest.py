"""Fixtures of the front door's tests."""

from front_fixtures import headway, llm, model_copy, plugins, served, tiny_model_folder

__all__ = ["headway", "llm", "model_copy", "plugins", "served", "tiny_model_folder"]
