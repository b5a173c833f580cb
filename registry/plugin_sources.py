"""Sources of plugins: entry points of installed distributions, files, kernels of the hub, objects and backend classes.

Each source is a `PluginSource` with a name and an owner. A plugin's code is not imported before `load` is called.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from importlib.metadata import EntryPoint, distributions
from inspect import isabstract
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from headway.core.contract.backend import API_VERSION
from headway.core.contract.errors import ConfigError, PluginError
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.operation import KINDS, OperationKind, kind_of_class
from headway.core.contract.rule import AttentionRule
from headway.core.contract.state import StateLayout
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.registry.hookspecs import PROJECT, hookimpl

C = TypeVar("C", bound=Kernel)

_MOST_FILES = 2000
"""Maximum number of a package's files that its digest covers."""
HUB = "hub:"
"""Beginning of the name of a kernel of the Hugging Face kernel hub, or of a folder."""
_FORMS = "hub:FOLDER, hub:OWNER/NAME[@VERSION], FILE.py or FILE.py:CLASS"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Plugin that is not imported yet. This base class represents a plugin of which only the name is known."""

    name: str
    owner: str
    """Owner of the plugin: name and version of its distribution, name and hash of its file, or the object's own name."""

    @property
    def file(self) -> Path | None:
        """Path of the plugin's module or package, or None if it is not found."""
        return None

    @property
    def target(self) -> str:
        """The plugin as FILE.py or FILE.py:CLASS, with an absolute path. "" if the plugin is not a file."""
        return ""

    def load(self) -> object:
        """Import and return the plugin. Exceptions of the plugin are not caught.

        :raises PluginError: if only the plugin's name is known.
        """
        raise PluginError(
            f"plugin {self.name} of {self.owner} is known by its name alone, and loaded by the process that tries it"
        )

    def digest(self) -> str:
        """Return a hash of the plugin's name, version, and files with their sizes and modification times."""
        # The measuring process uses the file's absolute path, a user any path; both are the same plugin.
        facts: list[object] = [(self.owner, self.target) if self.target else repr(self)]
        for path in islice(self._files(), _MOST_FILES):
            with suppress(OSError):
                stat = path.stat()
                facts.append((str(path), stat.st_mtime_ns, stat.st_size) if path.is_file() else str(path))
        return hashlib.sha256(repr(facts).encode("utf-8", "replace")).hexdigest()

    def content_digest(self) -> str:
        """Return the SHA-256 of the contents and relative paths of the plugin's files, which is equal on every machine. "" if the
        plugin has no files.

        :raises OSError: if a file cannot be read.
        """
        hashed, root = hashlib.sha256(), self.file
        for path in (path for path in self._files() if path.is_file()):
            place = path.relative_to(root).as_posix() if root is not None and root.is_dir() else path.name
            hashed.update(f"{place}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    hashed.update(chunk)
        return "" if root is None else hashed.hexdigest()

    @property
    def passport(self) -> Path | None:
        """Path of the plugin's passport, next to its code; None if the plugin has no files."""
        file = self.file
        return file and (file / "passport.json" if file.is_dir() else file.with_suffix(".passport.json"))

    def _files(self) -> Iterator[Path]:
        """Yield the plugin's files and folders, without its passport and compiled Python files."""
        file, passport = self.file, self.passport
        listed = [] if file is None else _with_neighbours(file) if file.is_file() else sorted(file.rglob("*"))
        return (path for path in listed if "__pycache__" not in path.parts and path != passport)


def _with_neighbours(file: Path) -> list[Path]:
    """Return a file, and the files and folders next to it that it imports, directly or through each other."""
    found, left = [file], [file]
    while left:
        try:
            nodes = list(ast.walk(ast.parse(left.pop().read_bytes())))
        except (SyntaxError, ValueError):  # loading the file will raise the same error
            continue
        names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        for name in dict.fromkeys(name.partition(".")[0] for name in names):
            folder, module = file.parent / name, file.parent / f"{name}.py"
            new = sorted(folder.rglob("*")) if (folder / "__init__.py").is_file() else [module] if module.is_file() else []
            new = [path for path in new if path not in found]
            found += new
            left += [path for path in new if path.suffix == ".py"]
    return found


@dataclass(frozen=True, slots=True)
class InstalledPlugin(PluginSource):
    """An entry point of a distribution."""

    point: EntryPoint

    @property
    def file(self) -> Path | None:
        with suppress(Exception):  # raised by an entry point without a module, or by a custom finder
            top = importlib.util.find_spec(self.point.module.partition(".")[0])  # submodules would have to be imported
            if top is not None and top.submodule_search_locations:
                return Path(next(iter(top.submodule_search_locations)))
            return Path(top.origin) if top is not None and top.origin else None
        return None

    def load(self) -> object:
        return self.point.load()


@dataclass(frozen=True, slots=True)
class UnreadablePlugin(PluginSource):
    """A distribution whose entry points cannot be read."""

    error: Exception

    def load(self) -> object:
        raise self.error


@dataclass(frozen=True, slots=True)
class PluginObject(PluginSource):
    """An object with hooks, or a backend class, passed by a program."""

    plugin: object

    def load(self) -> object:
        return self.plugin


@dataclass(frozen=True, slots=True)
class PluginFile(PluginSource):
    """A plugin file, named as FILE.py or FILE.py:CLASS."""

    path: Path
    """Path of the file, as the user gave it."""
    class_name: str = ""

    @classmethod
    def of(cls, text: str, name: str = "") -> PluginFile:
        """Parse FILE.py or FILE.py:CLASS.

        :raises ConfigError: if the text is not a Python file name, or the file does not exist.
        """
        path, class_name = split_target(text)
        # With the hash of the file's text, a table measured with another text is stale.
        text_hash = hashlib.sha256(_existing(path).read_bytes()).hexdigest()[:8]
        return cls(name or text, f"{path.name}@{text_hash}", path, class_name)

    @property
    def file(self) -> Path | None:
        return self.path.resolve()

    @property
    def target(self) -> str:
        return f"{self.path.resolve()}:{self.class_name}" if self.class_name else str(self.path.resolve())

    def load(self) -> object:
        """Return the module with its hooks, or the class.

        :raises HeadwayError: if the file does not load or is not a plugin.
        """
        module = load_file(self.path)
        if self.class_name:
            return class_in(module, self.class_name, self.path)
        if not has_hooks(module):
            classes = list(_own_classes(module))
            name = classes[0] if len(classes) == 1 else "CLASS"
            hint = f"mark its functions with headway.hookimpl, or name a class of it: {self.path}:{name}"
            hint = _rules_hint(module, self.path) or hint
            raise PluginError(f"plugin {self.path}: it implements no hook of ours: {hint}")
        return module


@dataclass(frozen=True, slots=True)
class HubKernel(PluginSource):
    """A folder with a module that has flash-attention's functions: given as hub:FOLDER, or as hub:OWNER/NAME[@VERSION] and
    downloaded from the Hugging Face kernel hub."""

    folder: Path

    @classmethod
    def of(cls, text: str, name: str = "") -> HubKernel:
        """Parse hub:FOLDER or hub:OWNER/NAME[@VERSION], and download the kernel in the second case. An existing folder precedes.

        :raises ConfigError: if the text has another form, or the kernel cannot be downloaded.
        """
        wanted = text.removeprefix(HUB)
        folder = Path(wanted).expanduser()
        if wanted and folder.is_dir():
            return cls(name or text, folder.resolve().name, folder.resolve())
        return cls(name or text, wanted, _download(wanted).resolve())

    @property
    def file(self) -> Path | None:
        return self.folder

    @property
    def target(self) -> str:
        return f"{HUB}{self.folder}"

    def load(self) -> object:
        """Import the folder, and return an attention backend class with this plugin's name.

        A plain Python package is imported directly; a folder with build variants or metadata.json is imported by the library
        `kernels`.

        :raises HeadwayError: if the folder does not load or lacks flash-attention's functions.
        """
        from headway.backends.flash_interface import flash_backend

        package = self.folder / "__init__.py"
        if package.is_file() and not (self.folder / "metadata.json").is_file():
            module = load_file(package)
        else:
            _read_sources({path for path in (self.folder, *self.folder.rglob("*")) if path.is_dir()})
            module = _of_library("get_local_kernel", str(self.folder), self.folder)
        home = Path(str(module.__file__)).parent
        devices = ("cuda",) if any(home.rglob("*.so")) else ("cpu", "cuda")
        with suppress(OSError, ValueError, KeyError, TypeError):
            metadata = parse_json(read_text(home / "metadata.json"), "metadata.json", dict)
            devices = ("cpu" if metadata["backend"]["type"] == "cpu" else "cuda",)
        return flash_backend(self.name, module, devices)


def _download(wanted: str) -> Path:
    """Return the folder of a kernel of the hub, OWNER/NAME[@VERSION], after downloading the build variant for this machine.

    VERSION is a number, or a branch, tag or commit; the default is the branch main. $HF_HUB_OFFLINE=1 uses only files that were
    downloaded before. No code of the kernel runs.
    """
    repository, _, version = wanted.partition("@")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise ConfigError("hub kernel", "an existing folder, or OWNER/NAME[@VERSION]", repr(wanted))
    chosen = {"version": int(version)} if version.isdecimal() else {"revision": version or "main"}
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    install = partial(_of_library, "install_kernel", wanted, repository, local_files_only=offline)
    return Path(install(**chosen))


def _of_library(function: str, wanted: str, *given: object, **options: object) -> Any:
    """Call a function of the library `kernels`. wanted: name of the kernel, for errors.

    :raises ConfigError: if the library is not installed, or raises an exception.
    """
    try:
        return getattr(import_module("kernels"), function)(*given, **options)
    except (Exception, SystemExit) as error:
        need = "a folder with __init__.py, or what the library `kernels` 0.17 or newer loads"
        got = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "pip install 'headway[hub]'" if isinstance(error, (ImportError, AttributeError)) else ""
        raise ConfigError(f"hub kernel {wanted}", need, got, hint) from error


def given_source(text: str, name: str = "") -> PluginFile | HubKernel:
    """Return the plugin that a user named: FILE.py, FILE.py:CLASS, or a kernel of the hub. See `HubKernel.of`.

    :raises ConfigError: if the text has another form, or the file or kernel does not exist.
    """
    return HubKernel.of(text, name) if text.startswith(HUB) else PluginFile.of(text, name)


def find_source(name: str, owner: str, target: str) -> PluginSource:
    """Return a plugin by its name, its owner and `PluginSource.target`; a plain `PluginSource` for an unknown installed plugin.

    :raises ConfigError: if the plugin's file no longer exists.
    """
    if target:
        return replace(given_source(target, name), owner=owner)
    found = (each for each in installed_plugins(PROJECT) if (each.name, each.owner) == (name, owner))
    return next(found, PluginSource(name, owner))


def installed_plugins(group: str, blocked: frozenset[str] = frozenset()) -> Iterator[InstalledPlugin | UnreadablePlugin]:
    """Yield the entry points of a group that are not blocked. A distribution that is found twice counts once; a distribution with
    unreadable entry points yields an `UnreadablePlugin`."""
    seen = set()
    for distribution in distributions():
        # Few of hundreds of distributions have the group, and reading names and versions is slow.
        owner = str(getattr(distribution, "_path", "a distribution"))
        try:
            if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            owner = f"{distribution.name} {distribution.version}"
            points = list(distribution.entry_points)
        except Exception as error:  # the file's contents are arbitrary
            yield UnreadablePlugin("entry_points.txt", owner, error)
            continue
        for point in points:
            if point.group == group and point.name not in blocked and (owner, point.name) not in seen:
                seen.add((owner, point.name))
                yield InstalledPlugin(point.name, owner, point)


def given_plugins(plugins: Mapping[str, object] | Iterable[object]) -> Iterator[PluginFile | HubKernel | PluginObject]:
    """Yield the plugins that a caller passed: objects with hooks, backend classes, files, and kernels of the hub.

    A plugin without a name is named after its file, class, module or type. If several plugins have the same name, a number is
    added from the second plugin on.

    :raises ConfigError: if a file does not exist.
    """
    seen: Counter[str] = Counter()
    named = plugins.items() if isinstance(plugins, Mapping) else (("", plugin) for plugin in plugins)
    for given_name, plugin in named:
        own = given_name or _name(plugin)
        seen[own] += 1
        name = own if seen[own] == 1 else f"{own}-{seen[own]}"
        if isinstance(plugin, (str, os.PathLike)):
            yield given_source(os.fspath(plugin), name)
        else:
            yield PluginObject(name, own, plugin)


class ClassPlugin:
    """Plugin that registers a single kernel class, and the layouts that the class supports and that are not registered yet."""

    def __init__(self, kernel: type[Kernel], layouts: Mapping[str, LayoutInfo], state_layouts: Mapping[str, StateLayout]) -> None:
        """layouts, state_layouts: registered layouts. New layouts use the writer of the first, built-in layout, which works with
        any layout's axes."""
        self._kernel = kernel
        known, writer = [info.layout for info in layouts.values()], next(iter(layouts.values())).load_writer
        claimed = getattr(kernel.capabilities, "layouts", None) or ()
        self._layouts = [LayoutInfo(each, writer) for each in claimed if isinstance(each, CacheLayout) and each not in known]
        self._state_layouts = [each for each in claimed if isinstance(each, StateLayout) and each not in state_layouts.values()]

    @hookimpl
    def headway_register_kernels(self) -> list[KernelInfo]:
        """Register the class under its own name."""
        info = kind_of_class(self._kernel).info
        return [info(self._kernel.name, _summary(self._kernel), lambda: self._kernel, api_version=API_VERSION)]

    @hookimpl
    def headway_register_layouts(self) -> list[LayoutInfo]:
        """Register the layouts that the class supports and that are not registered yet."""
        return self._layouts

    @hookimpl
    def headway_register_state_layouts(self) -> list[StateLayout]:
        """Register the state layouts that the class supports and that are not registered yet."""
        return self._state_layouts


def with_hooks(plugin: object, layouts: Mapping[str, LayoutInfo], state_layouts: Mapping[str, StateLayout]) -> object:
    """Return the object to register with pluggy: the plugin itself or, for a kernel class, a plugin that registers the class.

    layouts, state_layouts: registered layouts, built-ins first.

    :raises ConfigError: if the class is incomplete.
    """
    if isinstance(plugin, type) and issubclass(plugin, Kernel):
        return ClassPlugin(check_class(plugin), layouts, state_layouts)
    return plugin


def split_target(text: str) -> tuple[Path, str]:
    """Return the file and the class of FILE.py:CLASS; the class is "" if none is named.

    :raises ConfigError: if the text is not a Python file name.
    """
    path, _, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not path.endswith(".py"):
        raise ConfigError("plugin", _FORMS, repr(text))
    return Path(path), name


class _SourceLoader(SourceFileLoader):
    """Loader that compiles each source file, because a passport does not cover compiled files in __pycache__."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _read_sources(folders: Iterable[Path]) -> None:
    """Make imports of modules in these folders use `_SourceLoader`."""
    for folder in map(str, folders):
        compiled, source = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES)
        sys.path_importer_cache[folder] = FileFinder(folder, compiled, source)


def load_file(path: Path, word: str = "plugin") -> ModuleType:
    """Import a file as a module named after the file, even if it was imported before. The file may import other files in its
    folder. word: what the file contains, for errors.

    :raises ConfigError: if the file does not exist.
    :raises PluginError: if the file does not load; the error states the line.
    """
    _existing(path, word)
    stem = re.sub(r"\W", "_", path.resolve().parent.name) if path.name == "__init__.py" else path.stem
    known = sys.modules.get(stem)
    mine = known is None or getattr(known, "__file__", None) == str(path.resolve())
    name = stem if mine else f"headway_plugin_{stem}"  # other modules of that name are not replaced
    inside = path.resolve().parent.rglob("*") if path.name == "__init__.py" else ()
    _read_sources({each.resolve().parent for each in _with_neighbours(path)} | {each for each in inside if each.is_dir()})
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=_SourceLoader(name, str(path.resolve())))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # dataclasses, and compilers that read a function's source, need this
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        raise PluginError(f"{word} {path}: {type(error).__name__}: {error}{_line(error, path)}") from error
    return module


def _existing(path: Path, word: str = "plugin") -> Path:
    if not path.is_file():
        raise ConfigError(word, "FILE.py or FILE.py:CLASS", str(path), "there is no such file")
    return path


def rules_in(module: ModuleType) -> dict[str, AttentionRule | type[AttentionRule]]:
    """Return name -> attention rule, or class of one, that a module defines."""
    return {name: vars(module)[name] for name, kind in _types(module).items() if issubclass(kind, AttentionRule)}


def _rules_hint(module: ModuleType, path: Path) -> str:
    """Return how to pass the rules of a file that was given as a plugin or a kernel; "" if it has none."""
    rules = ", ".join(f"{path}:{name}" for name in rules_in(module))
    return f"attention rules are passed with --attention-rule, or with --rule of headway check: {rules}" if rules else ""


def has_hooks(module: ModuleType) -> bool:
    """Return whether a module has any function marked with hookimpl."""
    return any(hasattr(each, "headway_impl") for each in vars(module).values())


def class_in(module: ModuleType, name: str, path: Path, kind: OperationKind | None = None) -> type[Kernel]:
    """Return the named kernel class of a file, or its only kernel class. kind: required kind of operation; None means any.

    :raises ConfigError: if no such class exists, if several exist and none is named, or if the class is incomplete.
    """
    kinds = KINDS if kind is None else (kind,)
    own = _own_classes(module, kinds)
    if name and name not in own:
        bases = " or ".join(kind.kernel.__name__ for kind in kinds)
        known = f"one of {', '.join(own)}" if own else f"a subclass of {bases} there"
        raise ConfigError(f"class in {path}", known, repr(name), _rules_hint(module, path))
    if not name and len(own) != 1:
        need = f"{path}:CLASS, with a class out of {', '.join(own) or 'none there'}"
        raise ConfigError("backend", need, path, _rules_hint(module, path))
    return check_class(own[name or next(iter(own))])


def _own_classes(module: ModuleType, kinds: Sequence[OperationKind] = KINDS) -> dict[str, type[Kernel]]:
    bases, own = tuple(kind.kernel for kind in kinds), vars(module)
    return {key: each for key, each in _types(module).items() if issubclass(each, bases) and own[key] is each}


def _types(module: ModuleType) -> dict[str, type[Any]]:
    """Return name -> class, for the classes that a module defines and their instances."""
    types = {key: each if isinstance(each, type) else type(each) for key, each in vars(module).items()}
    return {key: each for key, each in types.items() if each.__module__ == module.__name__}


def check_class(found: type[C]) -> type[C]:
    """Return a backend class after checking that it has everything a registration needs.

    :raises ConfigError: if an abstract method or a class attribute is missing.
    """
    if isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(f"class {found.__name__}", "every method the contract asks for", f"without {missing}")
    for field in ("name", "capabilities"):
        if not hasattr(found, field):
            raise ConfigError(f"class {found.__name__}", f"a class attribute `{field}`", "none")
    return found


def _line(error: BaseException, path: Path) -> str:
    """Return text that states the line at which a file raised an error; "" for a SyntaxError, whose message already states the
    line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())]
    return f" (line {frames[-1].lineno})" if frames else ""


def _summary(kernel: type[Kernel]) -> str:
    lines = (kernel.__doc__ or "").strip().splitlines()
    own = kernel.__doc__ not in [kind.kernel.__doc__ for kind in KINDS]
    return lines[0] if lines and own else f"class {kernel.__name__} of {kernel.__module__}"


def _name(plugin: object) -> str:
    if isinstance(plugin, str) and plugin.startswith(HUB):
        return plugin
    if isinstance(plugin, (str, os.PathLike)):
        return Path(os.fspath(plugin)).stem if not os.fspath(plugin).rpartition(":")[2].isidentifier() else os.fspath(plugin)
    return plugin.__name__ if isinstance(plugin, (type, ModuleType)) else type(plugin).__name__
