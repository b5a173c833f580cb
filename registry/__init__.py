"""Hooks, discovery and the Registry of layouts and backends."""

from headway.registry.discovery import PluginFailure
from headway.registry.hookspecs import hookimpl
from headway.registry.registry import BackendEntry, Registry, create_registry

__all__ = ["BackendEntry", "PluginFailure", "Registry", "create_registry", "hookimpl"]
