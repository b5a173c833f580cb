"""The Registry: which layouts and backends exist, whose they are, and why the rest is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pluggy

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.errors import ConfigError, PluginError, UnknownBackendError
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, ProposerInfo
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.core.system.logs import log_traceback, warn_once
from headway.registry.plugin_sources import PluginSource
from headway.registry.records import Brought, PluginFailure, PluginRecord
from headway.registry.validate import (
    answers_of,
    check_backend_class,
    check_backend_info,
    check_layout_info,
    check_processor_info,
    check_proposer_info,
)


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered backend and who brought it."""

    info: BackendInfo
    owner: str
    """"built-in", or the distribution (or object) that registered it."""


class Registry:
    """Layouts and backends by name, filled once by `create_registry`; from then on a lookup is a dict get."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._owners: dict[str, str] = {}
        self._classes: dict[str, type[AttentionBackend]] = {}
        self._support: dict[str, Support] = {}
        self.backends: dict[str, BackendEntry] = {}
        self.layouts: dict[str, LayoutInfo] = {}
        self.proposers: dict[str, ProposerInfo] = {}
        self.logits_processors: dict[str, LogitsProcessorInfo] = {}
        self.failures: list[PluginFailure] = []
        self.plugins: list[PluginRecord] = []
        """The installed plugins, those that were left out or not wanted as well, and files that the user named."""
        self.sources: dict[str, PluginSource] = {}
        """Plugin name -> where it came from, of installed plugins and files that are loaded."""
        self.brought: dict[str, Brought] = {}
        """What each registered plugin handed in."""

    def add_plugin(self, name: str, owner: str, plugin: object) -> None:
        """Register one plugin whole or, if anything is wrong with it, not at all.

        :raises PluginError: a taken name, another api_version, or anything that a hook hands in and that cannot be used.
        """
        self._check_new(name, owner, plugin)
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            if not self._manager.get_hookcallers(plugin):
                raise PluginError(
                    f"plugin {name!r} of {owner} implements no hook of ours: mark its functions with headway.hookimpl"
                )
            where = f"plugin {name!r} of {owner}"
            layouts: list[LayoutInfo] = self._ask("headway_register_layouts", LayoutInfo, plugin, where)
            backends: list[BackendInfo] = self._ask("headway_register_backends", BackendInfo, plugin, where)
            proposers: list[ProposerInfo] = self._ask("headway_register_proposers", ProposerInfo, plugin, where)
            processors: list[LogitsProcessorInfo] = self._ask(
                "headway_register_logits_processors", LogitsProcessorInfo, plugin, where
            )
            for layout in layouts:
                check_layout_info(layout, where)
            for backend in backends:
                check_backend_info(backend, where)
            for proposer in proposers:
                check_proposer_info(proposer, where)
            self._check_processors(processors, where)
            for number, layout in enumerate(layouts):
                self._check_layout(layout, layouts[:number])
            for backend in backends:
                self._check_backend(backend, owner, [other.name for other in backends])
            self._check_proposer_names([each.name for each in proposers], where)
        except BaseException as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError):  # a hook with another signature, or that there is none of
                raise PluginError(f"plugin {name!r} of {owner}: {' '.join(str(error).split())}") from None
            raise
        self._owners[name] = owner
        self.brought[name] = Brought(
            tuple(caller.name for caller in self._manager.get_hookcallers(plugin) or ()),
            tuple(info.name for info in backends),
            tuple(info.layout.name for info in layouts),
            tuple(info.name for info in proposers),
            tuple(info.name for info in processors),
        )
        self.layouts.update({info.layout.name: info for info in layouts})
        self.proposers.update({info.name: info for info in proposers})
        self.backends.update({backend.name: BackendEntry(backend, owner) for backend in backends})
        self.logits_processors.update({processor.name: processor for processor in processors})

    def digest_of(self, backend: str) -> str:
        """Hash of the version and the files of the plugin that brought a backend; empty for built-ins and objects."""
        source = self.source_of(backend)
        return "" if source is None else source.digest()

    def source_of(self, backend: str) -> PluginSource | None:
        """Return the plugin that brought a backend; None for built-ins and objects."""
        return next((source for name, source in self.sources.items() if backend in self.brought[name].backends), None)

    def _ask(self, hook: str, kind: type, plugin: object, where: str) -> list[Any]:
        """What one plugin answers to a hook; nothing where it does not implement it."""
        if all(caller.name != hook for caller in self._manager.get_hookcallers(plugin) or ()):
            return []
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        try:
            answers = self._manager.subset_hook_caller(hook, others)()
        except (Exception, SystemExit) as error:
            raise PluginError(f"{where}: {hook}() raised {type(error).__name__}: {error}") from error
        return answers_of(hook, answers or [None], kind, where)  # pluggy leaves an answer of None out

    def _check_new(self, name: str, owner: str, plugin: object) -> None:
        if name in self._owners:
            raise PluginError(f"plugin name {name!r} of {owner} is already taken by {self._owners[name]}: rename one of them")
        try:
            hash(plugin)
        except Exception as error:  # pluggy keeps plugins in sets
            why = f"{type(error).__name__}: {error}; a dataclass needs eq=False or frozen=True"
            raise PluginError(f"plugin {name!r} of {owner} must be hashable: {why}") from error
        if self._manager.is_registered(plugin):
            raise PluginError(f"plugin {name!r} of {owner} is already registered as {self._manager.get_name(plugin)!r}")

    def _check_processors(self, processors: Sequence[LogitsProcessorInfo], where: str) -> None:
        for processor in processors:
            check_processor_info(processor, where)
            if processor.name in self.logits_processors or [other.name for other in processors].count(processor.name) > 1:
                raise PluginError(f"{where}: logits processor name {processor.name!r} is already taken: rename one of them")

    def _check_proposer_names(self, names: Sequence[str], where: str) -> None:
        for name in names:
            if name in self.proposers or names.count(name) > 1:
                raise PluginError(f"{where}: the proposer name {name!r} is already taken: rename one of them")

    def _check_layout(self, info: LayoutInfo, own: Sequence[LayoutInfo]) -> None:
        for known in (*self.layouts.values(), *own):
            if known.layout.name == info.layout.name or known.layout == info.layout:
                raise PluginError(f"layout {info.layout.name!r} is already registered as {known.layout.name!r}")

    def _check_backend(self, info: BackendInfo, owner: str, own_names: Sequence[str]) -> None:
        known = self.backends.get(info.name)
        if known is not None or own_names.count(info.name) > 1:
            raise PluginError(
                f"backend name {info.name!r} of {owner} is already taken by {known.owner if known else owner}: rename one of them"
            )

    def backend(self, name: str) -> type[AttentionBackend]:
        """Load a backend's class.

        :raises UnknownBackendError: nobody registered that name.
        :raises PluginError: its module does not load, or what it loads is not a backend.
        """
        if name not in self._classes:
            if name not in self.backends:
                found = {known: self.availability(known) for known in self.backends}
                states = {known: "available" if ok else f"unavailable: {ok.brief}" for known, ok in found.items()}
                raise UnknownBackendError(name, states, [str(failure) for failure in self.failures])
            entry = self.backends[name]
            try:
                loaded = entry.info.load()
            except (Exception, SystemExit) as error:
                log_traceback(f"backend {name} of {entry.owner} does not load", error)
                raise PluginError(f"backend {name} of {entry.owner} does not load: {type(error).__name__}: {error}") from error
            self._classes[name] = check_backend_class(loaded, name, f"backend {name} of {entry.owner}")
        return self._classes[name]

    def availability(self, name: str) -> Support:
        """Load and probe a backend, once, and return whether this machine can run it."""
        if name not in self._support:
            try:
                self._support[name] = _support(self.backend(name).available(), "available")
            except UnknownBackendError:
                raise
            except (Exception, SystemExit) as error:
                log_traceback(f"available() of backend {name}", error)
                info = self.backends[name].info
                hint = f"pip install '{info.extra}'" if info.extra else ""
                missing = error.__cause__ if isinstance(error, PluginError) else error
                if isinstance(missing, ModuleNotFoundError) and missing.name:
                    self._support[name] = Support.no(
                        "import", f"the package {missing.name.partition('.')[0]}", "not installed", hint
                    )
                else:
                    self._support[name] = Support.no("import", "a backend that loads and answers", error, hint)
        return self._support[name]

    def layout(self, name: str) -> LayoutInfo:
        """A layout by name.

        :raises ConfigError: nobody registered that name.
        """
        if name not in self.layouts:
            raise ConfigError("kv_layout", f"auto or one of {', '.join(self.layouts)}", repr(name))
        return self.layouts[name]

    def proposer(self, name: str) -> ProposerInfo:
        """A proposer of draft tokens by name.

        :raises ConfigError: nobody registered that name.
        """
        if name not in self.proposers:
            raise ConfigError("speculate", f"one of {', '.join(self.proposers)}", repr(name))
        return self.proposers[name]

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether a backend can run here and can serve this layer in this phase."""
        available = self.availability(name)
        if not available:
            return available
        try:
            return _support(self.backend(name).supports(spec, layout, block_size, phase), "supports")
        except (Exception, SystemExit) as error:
            log_traceback(f"supports() of backend {name}", error)
            return Support.no("supports()", "an answer", f"{type(error).__name__}: {error}")

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first, by the rank hook; third parties are asked before the built-in order.

        A hook that raises, or whose answer is no order of the candidates, is named in the log and passed over.
        """
        for plugin, order in self.rank_hooks():
            try:
                answer = order(spec, phase, candidates)
            except (Exception, SystemExit) as error:
                who = f"plugin {plugin!r} of {self._owners.get(plugin, 'nobody')}"
                log_traceback(f"headway_rank_backends() of {who}", error)
                raised = str(error) if isinstance(error, PluginError) else f"it raised {type(error).__name__}: {error}"
                warn_once(f"headway_rank_backends() of {who} is passed over: {raised}")
                continue
            if answer is not None:
                return answer
        return list(candidates)

    def rank_hooks(self) -> list[tuple[str, RankHook]]:
        """Name of each plugin that has a rank hook, in the order in which they are asked -> the hook, with its answer checked.

        It raises whatever the plugin raises, and PluginError for an answer that is no order of the candidates.
        """
        found = reversed(self._manager.hook.headway_rank_backends.get_hookimpls())
        return [(each.plugin_name, partial(self._rank_of, each.plugin)) for each in found]

    def _rank_of(self, plugin: object, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str] | None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        ask = self._manager.subset_hook_caller("headway_rank_backends", others)
        answer = ask(spec=spec, phase=phase, candidates=tuple(candidates))
        if answer is not None and not _is_order(answer, candidates):
            raise PluginError(f"it must return an order of {list(candidates)}, got {answer!r}")
        return None if answer is None else list(answer)


RankHook = Callable[[AttentionSpec, Phase, Sequence[str]], list[str] | None]
"""(layer, phase, candidates) -> the candidates, best first; None leaves it to the next."""


def _is_order(answer: object, candidates: Sequence[str]) -> bool:
    try:
        return isinstance(answer, (list, tuple)) and Counter(answer) == Counter(candidates)
    except TypeError:  # of what cannot be hashed
        return False


def _support(answer: object, method: str) -> Support:
    if not isinstance(answer, Support):
        raise PluginError(f"{method}() must return a Support, got {answer!r}")
    return answer
