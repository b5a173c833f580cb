"""Hooks, discovery and the Registry of layouts and backends."""

from headway.registry.create import create_registry
from headway.registry.discovery import PluginFailure
from headway.registry.hookspecs import hookimpl
from headway.registry.registry import BackendEntry, Registry

__all__ = ["BackendEntry", "PluginFailure", "Registry", "create_registry", "hookimpl"]
