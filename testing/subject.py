"""What is tested: a backend by name or by file, or a layout, with the registry it lives in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from headway.core.contract.backend import API_VERSION, AttentionBackend, BackendInfo
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout, CacheWriter, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.registry import Registry, create_registry, hookimpl

BASELINE = "sdpa.math"
"""Serves what the subject does not, and takes turns with it."""


@dataclass(frozen=True)
class Subject:
    """A registered backend on one device."""

    registry: Registry
    name: str
    device: torch.device

    @property
    def backend(self) -> type[AttentionBackend]:
        """Its class."""
        return self.registry.backend(self.name)

    @property
    def claims(self) -> Capabilities:
        """What it says it serves."""
        return self.backend.capabilities

    @cached_property
    def layouts(self) -> dict[str, CacheLayout]:
        """All layouts by name."""
        return {name: info.layout for name, info in self.registry.layouts.items()}

    def writer(self, layout: str) -> CacheWriter:
        """The writer of a layout on the subject's device."""
        return self.registry.layout(layout).load_writer(self.device)

    def supports(self, spec: AttentionSpec, layout: str, block_size: int, phase: Phase, name: str = "") -> Support:
        """Whether the subject, or the backend of another name, serves this layer."""
        return self.registry.supports(name or self.name, spec, self.layouts[layout], block_size, phase)

    def make(self, spec: AttentionSpec, layout: str, block_size: int, name: str = "") -> AttentionBackend:
        """An instance of the subject or of another backend."""
        return self.registry.backend(name or self.name)(spec, self.layouts[layout], block_size)


def load_subject(target: str, device: torch.device, registry: Registry | None = None) -> Subject:
    """The subject of a command line: NAME, broken:NAME, or FILE.py:CLASS.

    :raises ConfigError: there is no such file or class.
    :raises HeadwayError: a name that nobody registered; a plugin that does not register.
    """
    if target.startswith("broken:"):
        from headway.testing.broken import find

        return _of_class(find(target.removeprefix("broken:")), target, device)
    path, _, class_name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not path.endswith(".py"):
        registry = registry or create_registry()
        registry.backend(target)
        return Subject(registry, target, device)
    module = _import(Path(path))
    return _of_class(_class_of(module, class_name, path), target, device, module)


def _of_class(found: type[AttentionBackend], target: str, device: torch.device, module: ModuleType | None = None) -> Subject:
    """Register a class under its own name or, where that is taken, under its target's; and the layouts it brings."""
    plugins: list[Any] = []
    if module is not None and any(hasattr(each, "headway_impl") for each in vars(module).values()):
        plugins.append(module)
    registry = create_registry(plugins, load_entry_points=module is not None)
    entry = registry.backends.get(found.name)
    if entry is not None and registry.backend(found.name) is found:
        return Subject(registry, found.name, device)
    name = found.name if entry is None else f"{found.name}-{found.__name__}"
    loaded = found if entry is None else type(found.__name__, (found,), {"name": name, "__module__": found.__module__})
    known = [info.layout for info in registry.layouts.values()]
    layouts = [layout for layout in found.capabilities.layouts or () if layout not in known]
    registry.add_plugin(f"check {name}", target, _plugin(loaded, layouts))
    return Subject(registry, name, device)


def _plugin(found: type[AttentionBackend], layouts: Sequence[CacheLayout]) -> object:
    """A plugin of one backend; its layouts get the plain writer, which reads their axes."""

    def backends() -> list[BackendInfo]:
        return [BackendInfo(found.name, "under test", lambda: found, api_version=API_VERSION)]

    def own_layouts() -> list[LayoutInfo]:
        from headway.backends.layouts import write_rows

        return [LayoutInfo(layout, lambda device: write_rows) for layout in layouts]

    backends.__name__, own_layouts.__name__ = "headway_register_backends", "headway_register_layouts"
    plugin = ModuleType(f"headway_check_{found.__name__}")
    plugin.headway_register_backends = hookimpl(backends)  # type: ignore[attr-defined]
    if layouts:
        plugin.headway_register_layouts = hookimpl(own_layouts)  # type: ignore[attr-defined]
    return plugin


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError("backend", "NAME or FILE.py:CLASS", str(path), "there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _class_of(module: ModuleType, name: str, path: str) -> type[AttentionBackend]:
    """The named class, or the only backend of the file."""
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, AttentionBackend) and value.__module__ == module.__name__
    }
    if name and name not in own:
        raise ConfigError(f"class in {path}", f"one of {', '.join(own) or 'no subclass of AttentionBackend there'}", repr(name))
    if not name and len(own) != 1:
        raise ConfigError("backend", f"{path}:CLASS, with a class out of {', '.join(own) or 'none there'}", path)
    found = own[name or next(iter(own))]
    if isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"class {found.__name__}", "every method the contract asks for", f"without {missing}")
    for field in ("name", "capabilities"):
        if not hasattr(found, field):
            raise ConfigError(f"class {found.__name__}", f"a class attribute `{field}`", "none")
    return found
