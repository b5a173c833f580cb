"""What is tested: a backend by name or by file, or a layout, with the registry it lives in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

import torch

from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackend
from headway.core.contract.support import Support
from headway.registry import Registry, create_registry
from headway.registry.plugin_sources import ClassPlugin, class_in, has_hooks, load_file, split_target
from headway.testing.kit.state_subject import StateSubject, registered, state_subject_of

STATES = "states:"
"""What stands before the name of a backend for layers with a state, since one of attention may have the same."""
BASELINE = "sdpa.math"
"""Serves what the subject does not, and takes turns with it."""


@dataclass(frozen=True)
class Subject:
    """A registered backend on one device."""

    registry: Registry
    name: str
    device: torch.device
    file: str = ""
    """FILE.py or FILE.py:CLASS by which `--plugin` would take the subject; empty: it was named otherwise."""

    @property
    def plugin(self) -> tuple[str, str, str] | None:
        """Name and owner of the plugin that brings the subject, and its file if it is one; None: no plugin does."""
        if self.file:
            return self.name, self.file, self.file
        source = self.registry.source_of(self.name)
        return None if source is None else (source.name, source.owner, source.target)

    def anew(self) -> Subject | None:
        """The subject from its file, loaded once more; None where no file brings it, or it needs plugins beside it."""
        if not self.file:
            return None
        try:
            return load_subject(self.file, self.device)
        except HeadwayError:
            return None

    @property
    def backend(self) -> type[AttentionBackend]:
        """The backend's class."""
        return self.registry.backend(self.name)

    @property
    def claims(self) -> Capabilities:
        """What the subject says it serves."""
        return self.backend.capabilities

    @cached_property
    def layouts(self) -> dict[str, CacheLayout]:
        """All layouts by name."""
        return {name: info.layout for name, info in self.registry.layouts.items()}

    def writer(self, layout: str) -> CacheWriter:
        """The writer of a layout on the subject's device."""
        return self.registry.layout(layout).writer(self.device)

    def supports(self, spec: AttentionSpec, layout: str, block_size: int, phase: Phase, name: str = "") -> Support:
        """Whether the subject, or the backend of another name, serves this layer."""
        return self.registry.supports(name or self.name, spec, self.layouts[layout], block_size, phase)

    def make(self, spec: AttentionSpec, layout: str, block_size: int, name: str = "") -> AttentionBackend:
        """An instance of the subject or of another backend."""
        return make_backend(self.registry.backend(name or self.name), spec, self.layouts[layout], block_size)


def load_subject(target: str, device: torch.device, registry: Registry | None = None, plugins: Sequence[str] = ()) -> Subject:
    """The attention backend of a command line: NAME, broken:NAME, or FILE.py:CLASS.

    plugins: files that are registered beside the installed plugins.

    :raises ConfigError: there is no such file or class, or it is for layers with a state.
    :raises HeadwayError: a name that nobody registered; a plugin that does not register.
    """
    found = load_any_subject(target, device, registry, plugins)
    if isinstance(found, StateSubject):
        raise ConfigError("backend", "one of attention", f"{found.name}, for layers with a state")
    return found


def load_any_subject(
    target: str, device: torch.device, registry: Registry | None = None, plugins: Sequence[str] = ()
) -> Subject | StateSubject:
    """Load the subject of a command line: also states:NAME, or a class for layers with a state; see `load_subject`."""
    if target.startswith("broken:"):
        from headway.testing.broken.attention import PLANTED
        from headway.testing.broken.states import PLANTED_STATES

        name = target.removeprefix("broken:")
        if name in PLANTED_STATES:
            return state_subject_of(PLANTED_STATES[name], device, target)
        if name not in PLANTED:
            raise ConfigError("broken:NAME", f"one of {', '.join(PLANTED)}", repr(name))
        return subject_of(PLANTED[name], device, target)
    if not target.endswith(".py") and ".py:" not in target:
        registry = registry or create_registry(plugins)  # untried: to find out is what the caller is about
        if target.startswith(STATES):
            registry.states.backend(name := target.removeprefix(STATES))
            return StateSubject(registry, name, device)
        registry.backend(target)
        return Subject(registry, target, device)
    path, class_name = split_target(target)
    module = load_file(path)
    found = class_in(module, class_name, path)
    file = str(path) if has_hooks(module) else f"{path}:{found.__name__}"
    if issubclass(found, StateBackend):
        return replace(state_subject_of(found, device, target, module, tuple(plugins)), file=file)
    if not issubclass(found, AttentionBackend):
        raise ConfigError("backend", "a class of an attention backend or of a state backend", f"{target}, a {found.__name__}")
    return replace(subject_of(found, device, target, module, plugins), file=file)


def subject_of(
    found: type[AttentionBackend],
    device: torch.device,
    target: str = "a class",
    module: ModuleType | None = None,
    plugins: Sequence[str] = (),
) -> Subject:
    """Register a class under its own name or, where that is taken, under its target's; and the layouts it brings."""
    registry, name = registered(found, ClassPlugin, target, module, plugins)
    return Subject(registry, name, device)
