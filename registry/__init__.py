"""Hooks, plugins and the Registry of layouts and backends."""

from typing import TYPE_CHECKING, Any

__all__ = ["PluginFailure", "Registry", "create_registry", "hookimpl"]

if TYPE_CHECKING:
    from headway.registry.hookspecs import hookimpl
    from headway.registry.records import PluginFailure
    from headway.registry.registry import Registry, create_registry

_HOME = {
    "PluginFailure": "records",
    "Registry": "registry",
    "create_registry": "registry",
    "hookimpl": "hookspecs",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: records of plugins are read where no torch is needed."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway.registry' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headway.registry.{_HOME[name]}"), name)
