"""Plugins that no distribution brings: objects, backend classes, and files, each under a name and an owner."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path
from types import ModuleType

from headway.core.contract.backend import API_VERSION, AttentionBackend, BackendInfo
from headway.core.contract.errors import ConfigError, PluginError
from headway.core.contract.layout import LayoutInfo
from headway.registry.hookspecs import hookimpl


class ClassPlugin:
    """The plugin of a backend class that stands alone. Layouts that it reads and nobody registered are registered with it."""

    def __init__(self, backend: type[AttentionBackend], layouts: Mapping[str, LayoutInfo]) -> None:
        """layouts: those that are registered; the writer of the first, a built-in one, goes by the axes of any layout."""
        self._backend = backend
        known, writer = [info.layout for info in layouts.values()], next(iter(layouts.values())).load_writer
        claimed = getattr(backend.capabilities, "layouts", None) or ()
        self._layouts = [LayoutInfo(layout, writer) for layout in claimed if layout not in known]

    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        """The class, under its own name."""
        return [BackendInfo(self._backend.name, _summary(self._backend), lambda: self._backend, api_version=API_VERSION)]

    @hookimpl
    def headway_register_layouts(self) -> list[LayoutInfo]:
        """What it brings."""
        return self._layouts


@dataclass(frozen=True, slots=True)
class GivenFile:
    """FILE.py or FILE.py:CLASS; nothing of it is imported before `load`."""

    path: Path
    class_name: str = ""

    @classmethod
    def of(cls, text: str) -> GivenFile:
        """:raises ConfigError: the text names no Python file, or none that is there."""
        path, class_name = split_target(text)
        return cls(_there(path), class_name)

    @property
    def owner(self) -> str:
        """It ends with a hash of the file's text, so that a table that was measured with another text of it is stale."""
        return f"{self.path.name}@{hashlib.sha256(self.path.read_bytes()).hexdigest()[:8]}"

    @property
    def target(self) -> str:
        """The text that names it in any folder."""
        return f"{self.path.resolve()}:{self.class_name}" if self.class_name else str(self.path.resolve())

    def load(self) -> object:
        """The module with its hooks, or the class.

        :raises HeadwayError: it does not load, or holds no plugin.
        """
        module = load_file(self.path)
        if self.class_name:
            return class_in(module, self.class_name, self.path)
        if not has_hooks(module):
            classes = list(_own_classes(module))
            name = classes[0] if len(classes) == 1 else "CLASS"
            hint = f"mark its functions with headway.hookimpl, or name a class of it: {self.path}:{name}"
            raise PluginError(f"plugin {self.path}: it implements no hook of ours: {hint}")
        return module


def given_plugins(plugins: Mapping[str, object] | Iterable[object]) -> Iterator[tuple[str, str, object]]:
    """(name, owner, plugin) of each plugin: an object with hooks, a backend class, or a `GivenFile`.

    A plugin without a name is called what its type is, numbered from the second of a kind on.

    :raises ConfigError: a file that is not there.
    """
    seen: Counter[str] = Counter()
    named = plugins.items() if isinstance(plugins, Mapping) else (("", plugin) for plugin in plugins)
    for name, plugin in named:
        own = owner = name or _name(plugin)
        if isinstance(plugin, (str, os.PathLike)):
            plugin = GivenFile.of(os.fspath(plugin))
            owner = plugin.owner
        seen[own] += 1
        yield (own if seen[own] == 1 else f"{own}-{seen[own]}"), owner, plugin


def with_hooks(plugin: object, layouts: Mapping[str, LayoutInfo]) -> object:
    """What pluggy registers: the plugin itself or, of a backend class, one that brings it.

    layouts: those that are registered, the built-in ones first.

    :raises ConfigError: a class that lacks something.
    """
    if isinstance(plugin, type) and issubclass(plugin, AttentionBackend):
        return ClassPlugin(check_class(plugin), layouts)
    return plugin


def split_target(text: str) -> tuple[Path, str]:
    """The file and the class of FILE.py:CLASS; "" where none is named.

    :raises ConfigError: the text names no Python file.
    """
    path, _, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not path.endswith(".py"):
        raise ConfigError("plugin", "FILE.py or FILE.py:CLASS", repr(text))
    return Path(path), name


def load_file(path: Path) -> ModuleType:
    """Import a file under its own name, anew even where it was imported before; what lies beside it can be imported by it.

    :raises ConfigError: there is no such file.
    :raises PluginError: it does not load, with the line.
    """
    _there(path)
    known = sys.modules.get(path.stem)
    mine = known is None or getattr(known, "__file__", None) == str(path.resolve())
    name = path.stem if mine else f"headway_plugin_{path.stem}"  # nobody else's module is put aside
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # dataclasses, and compilers that read a function's source, look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        raise PluginError(f"plugin {path}: {type(error).__name__}: {error}{_line(error, path)}") from error
    return module


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError("plugin", "FILE.py or FILE.py:CLASS", str(path), "there is no such file")
    return path


def has_hooks(module: ModuleType) -> bool:
    """Whether anything in it is marked with hookimpl."""
    return any(hasattr(each, "headway_impl") for each in vars(module).values())


def class_in(module: ModuleType, name: str, path: Path) -> type[AttentionBackend]:
    """The named backend class of a file, or its only one.

    :raises ConfigError: there is no such class, or several and no name, or the class is not whole.
    """
    own = _own_classes(module)
    if name and name not in own:
        raise ConfigError(f"class in {path}", f"one of {', '.join(own) or 'no subclass of AttentionBackend there'}", repr(name))
    if not name and len(own) != 1:
        raise ConfigError("backend", f"{path}:CLASS, with a class out of {', '.join(own) or 'none there'}", path)
    return check_class(own[name or next(iter(own))])


def _own_classes(module: ModuleType) -> dict[str, type[AttentionBackend]]:
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, AttentionBackend) and value.__module__ == module.__name__
    }


def check_class(found: type[AttentionBackend]) -> type[AttentionBackend]:
    """The class, if it has what a registration needs.

    :raises ConfigError: an abstract method or a class attribute is missing.
    """
    if isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"class {found.__name__}", "every method the contract asks for", f"without {missing}")
    for field in ("name", "capabilities"):
        if not hasattr(found, field):
            raise ConfigError(f"class {found.__name__}", f"a class attribute `{field}`", "none")
    return found


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it was raised; a SyntaxError says so itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())]
    return f" (line {frames[-1].lineno})" if frames else ""


def _summary(backend: type[AttentionBackend]) -> str:
    lines = (backend.__doc__ or "").strip().splitlines()
    own = backend.__doc__ is not AttentionBackend.__doc__
    return lines[0] if lines and own else f"class {backend.__name__} of {backend.__module__}"


def _name(plugin: object) -> str:
    if isinstance(plugin, (str, os.PathLike)):
        return Path(os.fspath(plugin)).stem if not os.fspath(plugin).rpartition(":")[2].isidentifier() else os.fspath(plugin)
    return plugin.__name__ if isinstance(plugin, (type, ModuleType)) else type(plugin).__name__
