"""A registry with backends of a test's own."""

from __future__ import annotations

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.registry import Registry, create_registry, hookimpl


class _Plugin:
    def __init__(self, backends: dict[str, type[AttentionBackend]]) -> None:
        self._backends = backends

    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [
            BackendInfo(name, "for tests", lambda each=each: each, api_version=2)  # type: ignore[misc]
            for name, each in self._backends.items()
        ]


def registering(*plugins: object, **backends: type[AttentionBackend]) -> Registry:
    """The built-in plugins, these, and one that brings the backends, by name."""
    return create_registry([_Plugin(backends), *plugins], load_entry_points=False)
