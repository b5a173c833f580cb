"""Subject of a test: a kernel, identified by name or file, with its registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.kernel import Kernel
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, EXPERTS, KINDS, LINEAR, STATE, OperationKind, kind_of_class
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.registry import Registry, create_registry
from headway.registry.plugin_sources import HUB, ClassPlugin, class_in, has_hooks, load_file, split_target

PREFIXES: Final = {STATE.name: "states:", LINEAR.name: "linear:", EXPERTS.name: "experts:"}
"""Kind of operation -> prefix for names and files of its kernels. The prefix is needed because an attention backend may have the
same name."""
WORDS: Final = {
    ATTENTION.name: "backend of attention",
    STATE.name: "backend for layers with a state",
    LINEAR.name: "kernel for linear layers",
    EXPERTS.name: "kernel for layers of experts",
}
BASELINE = "sdpa.math"
"""Backend that runs the parts that the subject does not support, and that alternates with the subject in some checks."""


@dataclass(frozen=True)
class Subject:
    """Registered kernel under test on one device."""

    registry: Registry
    name: str
    device: torch.device
    file: str = ""
    """FILE.py or FILE.py:CLASS, as for `--plugin`; "" if the subject was not given as a file."""
    kind: OperationKind = ATTENTION

    @property
    def plugin(self) -> tuple[str, str, str] | None:
        """(name, owner, file) of the subject's plugin; `file` is "" if the plugin is not a file. None if no plugin provides the
        subject."""
        if self.file:
            return self.name, self.file, self.file
        source = self.registry.source_of(self.name, self.kind)
        return None if source is None else (source.name, source.owner, source.target)

    @property
    def backend(self) -> type[Any]:
        """Class of the kernel."""
        loaded: type[Any] = self.registry.of(self.kind).backend(self.name)
        return loaded

    @property
    def claims(self) -> Any:
        """Capabilities of the subject."""
        return self.backend.capabilities

    def described(self) -> dict[str, Any]:
        """Return the subject's name, owner, plugin and kind, and the reason if it is not available on its device."""
        kernels = self.registry.of(self.kind)
        here, devices = kernels.availability(self.name), ()
        unavailable = "" if here else str(here).removeprefix("no: ")
        if here and self.device.type not in (devices := self.claims.devices):
            unavailable = f"device: needs {' or '.join(devices)}, got {self.device.type}"
        owner = kernels.entries[self.name].owner
        found = {"subject": self.name, "owner": owner, "plugin": self.plugin, "kind": self.kind.name}
        return found | {"unavailable": unavailable}


@dataclass(frozen=True)
class AttentionSubject(Subject):
    """Registered attention backend under test on one device."""

    def anew(self) -> AttentionSubject | None:
        """Return the subject, loaded again from its file. The result is None if the subject has no file, or cannot be loaded
        without additional plugins."""
        if not self.file:
            return None
        try:
            return load_subject(self.file, self.device)
        except HeadwayError:
            return None

    @cached_property
    def layouts(self) -> dict[str, CacheLayout]:
        """All layouts, keyed by name."""
        return {name: info.layout for name, info in self.registry.layouts.items()}

    def writer(self, layout: str) -> CacheWriter:
        """Return the writer of a layout for the subject's device."""
        return self.registry.layout(layout).writer(self.device)

    def supports(self, spec: AttentionSpec, layout: str, block_size: int, phase: Phase, name: str = "") -> Support:
        """Return the support of the subject, or of the backend `name`, for a layer."""
        return self.registry.supports(name or self.name, spec, self.layouts[layout], block_size, phase)

    def make(self, spec: AttentionSpec, layout: str, block_size: int, name: str = "") -> AttentionBackend:
        """Return an instance of the subject or of the backend `name`."""
        return make_backend(self.registry.backend(name or self.name), spec, self.layouts[layout], block_size)


def load_subject(
    target: str, device: torch.device, registry: Registry | None = None, plugins: Sequence[str] = ()
) -> AttentionSubject:
    """Return the attention backend for a command-line target: NAME, broken:NAME or FILE.py:CLASS.

    plugins: files to register in addition to the installed plugins.

    :raises ConfigError: if the file or class does not exist, or is for a different kind of operation.
    :raises HeadwayError: if a name is not registered, or a plugin cannot be registered.
    """
    found = load_any_subject(target, device, registry, plugins)
    if not isinstance(found, AttentionSubject):
        raise ConfigError("backend", "one of attention", f"{found.name}, a {WORDS[found.kind.name]}")
    return found


def load_any_subject(target: str, device: torch.device, registry: Registry | None = None, plugins: Sequence[str] = ()) -> Subject:
    """Return the kernel of any kind for a command-line target. A prefix in PREFIXES selects the kind; see
    `load_subject`."""
    if target.startswith("broken:"):
        name = target.removeprefix("broken:")
        planted = _planted()
        if name not in planted:
            raise ConfigError("broken:NAME", f"one of {', '.join(planted)}", repr(name))
        return subject_of(planted[name], device, target)
    prefix = next((each for each in PREFIXES.values() if target.startswith(each)), "")
    kind = next((kind for kind in (STATE, LINEAR, EXPERTS) if PREFIXES[kind.name] == prefix), None)
    text = target.removeprefix(prefix)
    if not text.endswith(".py") and ".py:" not in text:
        given = [*plugins, *([text] if text.startswith(HUB) and text not in plugins else [])]
        registry = registry or create_registry(given)  # without a trial: testing the plugin is the caller's task
        registry.of(kind or ATTENTION).backend(text)
        return _subject(registry, text, device, kind or ATTENTION)
    path, class_name = split_target(text)
    module = load_file(path)
    found = class_in(module, class_name, path, kind)
    file = str(path) if has_hooks(module) else f"{path}:{found.__name__}"
    return replace(subject_of(found, device, target, module, plugins), file=file)


def _planted() -> dict[str, type[Any]]:
    """Return name -> class for all kernels with planted mistakes."""
    tables = ("attention", "PLANTED"), ("kernels", "PLANTED_STATES"), ("kernels", "PLANTED_KERNELS")
    found: dict[str, type[Any]] = {}
    for module, table in tables:
        found |= getattr(import_module(f"headway.testing.broken.{module}"), table)
    return found


def _subject(registry: Registry, name: str, device: torch.device, kind: OperationKind) -> Subject:
    return AttentionSubject(registry, name, device) if kind is ATTENTION else Subject(registry, name, device, kind=kind)


def subject_of(
    found: type[Kernel],
    device: torch.device,
    target: str = "a class",
    module: ModuleType | None = None,
    plugins: Sequence[str] = (),
) -> Subject:
    """Register a class together with its layouts, and return it as a subject. The class is registered under its own name or, if
    this name is taken, under a derived name."""
    kind = kind_of_class(found)
    extra_plugins: list[object] = [*plugins, *([module] if module is not None and has_hooks(module) else [])]
    registry = create_registry(extra_plugins, load_entry_points=module is not None)
    kernels = registry.of(kind)
    taken = found.name in kernels.entries
    if taken and kernels.backend(found.name) is found:
        return _subject(registry, found.name, device, kind)
    name = f"{found.name}-{found.__name__}" if taken else found.name
    loaded: Any = type(found.__name__, (found,), {"name": name, "__module__": found.__module__}) if taken else found
    registry.add_plugin(f"check {name}", target, ClassPlugin(loaded, registry.layouts, registry.states.layouts))
    return _subject(registry, name, device, kind)


def brought_by(plugins: Sequence[str]) -> list[str]:
    """Return the targets of all kernels that files register, in the format that `load_any_subject` accepts.

    :raises HeadwayError: if a file cannot be registered.
    """
    registry = create_registry(plugins, load_entry_points=False)
    own = [registry.brought[plugin] for plugin in registry.brought if plugin in registry.sources]
    return [f"{PREFIXES.get(kind.name, '')}{name}" for each in own for kind in KINDS for name in getattr(each, kind.kernels)]
