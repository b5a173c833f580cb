"""Plugin hooks, and the Registry of layouts and backends."""

from typing import TYPE_CHECKING, Any

__all__ = ["PluginFailure", "Registry", "create_registry", "hookimpl"]

if TYPE_CHECKING:
    from headway.registry.hookspecs import hookimpl
    from headway.registry.records import PluginFailure
    from headway.registry.registry import Registry, create_registry

_HOME = {"PluginFailure": "records", "Registry": "registry", "create_registry": "registry", "hookimpl": "hookspecs"}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because programs that must not import torch also read plugin records."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway.registry' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headway.registry.{_HOME[name]}"), name)
