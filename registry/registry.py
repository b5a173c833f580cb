"""The Registry: which layouts and backends exist, whose they are, whether they run here, and why the rest is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pluggy
import torch

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.chat_parsers import ChatParserInfo
from headway.core.contract.errors import ConfigError, PluginError, UnknownBackendError
from headway.core.contract.experts import ExpertsKernel
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.linear import LinearKernel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ALL_KINDS, ALL_REDUCE, ATTENTION, EXPERTS, KINDS, LINEAR, STATE, OperationKind
from headway.core.contract.ranks import AllReduceKernel
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, ProposerInfo
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackend, StateBackendInfo, StateLayout, StateSpec
from headway.core.contract.support import YES, Reason, Support
from headway.core.system.logs import log_traceback, warn_once
from headway.kernels.linear.choice import LinearKernels
from headway.registry.plugin_sources import PluginSource
from headway.registry.records import BUILTIN_OWNER, Brought, PluginFailure, PluginRecord
from headway.registry.validate import (
    answers_of,
    check_all_reduce_class,
    check_backend_class,
    check_chat_parser_info,
    check_experts_class,
    check_kernel_info,
    check_layout_info,
    check_linear_class,
    check_processor_info,
    check_proposer_info,
    check_state_backend_class,
    check_state_layout,
)

B = TypeVar("B", bound=Kernel)
L = TypeVar("L")

RankHook = Callable[[AttentionSpec | StateSpec, Phase, Sequence[str]], list[str] | None]
"""(layer, phase, candidates) -> the candidates, best first; None leaves it to the next."""
RankHooks = Callable[[str], list[tuple[str, str, RankHook]]]
"""A rank hook's name -> name and owner of each plugin that has it, and the hook."""
Failures = Sequence[PluginFailure]


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A registered kernel and who brought it."""

    info: KernelInfo
    owner: str
    """"built-in", or the distribution (or object) that registered it."""


class KernelRegistry(Generic[B, L]):
    """The registered kernels of one kind of operation, and the layouts of what they keep."""

    def __init__(
        self, kind: OperationKind, check: Callable[[object, str, str], type[B]], hooks: RankHooks, failures: Failures
    ) -> None:
        """check: checks a class that `load` returned; hooks: asks the plugins for an order; failures: plugins left out."""
        self.kind = kind
        self._word = kind.word
        self._check = check
        self._hooks = hooks
        self._failures = failures
        self._classes: dict[str, type[B]] = {}
        self._support: dict[str, Support] = {}
        self.entries: dict[str, KernelEntry] = {}
        self.layouts: dict[str, L] = {}

    def check_new(self, infos: Sequence[KernelInfo], owner: str, where: str) -> None:
        """Check what a plugin registers. where: the plugin and its owner, for the error.

        :raises PluginError: a field of the wrong kind, or a name that is taken already or given twice.
        """
        for info in infos:
            check_kernel_info(info, self.kind, where)
        names = [info.name for info in infos]
        for name in names:
            known = self.entries.get(name)
            if known is not None or names.count(name) > 1:
                taken = known.owner if known else owner
                raise PluginError(f"{self._word} name {name!r} of {owner} is already taken by {taken}: rename one of them")

    def add(self, infos: Sequence[KernelInfo], owner: str) -> None:
        """Register backends that `check_new` has passed."""
        self.entries.update({info.name: KernelEntry(info, owner) for info in infos})

    def backend(self, name: str) -> type[B]:
        """Load a backend's class.

        :raises UnknownBackendError: nobody registered that name.
        :raises PluginError: its module does not load, or what it loads is not a backend.
        """
        if name not in self._classes:
            if name not in self.entries:
                found = {known: self.availability(known) for known in self.entries}
                states = {known: "available" if ok else f"unavailable: {ok.brief}" for known, ok in found.items()}
                raise UnknownBackendError(name, states, [str(failure) for failure in self._failures], self.kind.name)
            entry = self.entries[name]
            where = f"{self._word} {name} of {entry.owner}"
            try:
                loaded = entry.info.load()
            except (Exception, SystemExit) as error:
                log_traceback(f"{where} does not load", error)
                raise PluginError(f"{where} does not load: {type(error).__name__}: {error}") from error
            self._classes[name] = self._check(loaded, name, where)
        return self._classes[name]

    def availability(self, name: str) -> Support:
        """Load and probe a backend, once, and return whether this machine can run it.

        :raises UnknownBackendError: nobody registered that name.
        """
        if name not in self._support:
            try:
                self._support[name] = _support(self.backend(name).available(), "available")
            except UnknownBackendError:
                raise
            except (Exception, SystemExit) as error:
                log_traceback(f"available() of {self._word} {name}", error)
                info = self.entries[name].info
                hint = f"pip install '{info.extra}'" if info.extra else ""
                missing = error.__cause__ if isinstance(error, PluginError) else error
                if isinstance(missing, ModuleNotFoundError) and missing.name:
                    package = missing.name.partition(".")[0]
                    self._support[name] = Support.no("import", f"the package {package}", "not installed", hint)
                else:
                    self._support[name] = Support.no("import", "a backend that loads and answers", error, hint)
        return self._support[name]

    def able(self, name: str, device_type: str) -> Support:
        """Return whether a backend serves a type of device and can run on this machine.

        One for a CPU alone is not probed for a GPU: that may take a compiler's time.
        """
        try:
            devices = self.backend(name).capabilities.devices
        except PluginError:  # availability says why it does not load
            return self.availability(name)
        probed = self.availability(name) if device_type in devices or "cuda" in devices else YES
        if probed and device_type not in devices:
            return Support.no("device", " or ".join(devices), device_type)
        return probed

    def meant_for(self, device_type: str) -> list[str]:
        """Return the names of those whose registration does not name other types of device; none of them is imported."""
        return [name for name, entry in self.entries.items() if device_type in (entry.info.devices or (device_type,))]

    def all_able(self, device_type: str) -> list[str]:
        """Return the names of those that serve a type of device and can run on this machine."""
        return [name for name in self.meant_for(device_type) if self.able(name, device_type)]

    def classes(self, device_type: str) -> list[type[B]]:
        """Return the classes of `all_able`."""
        return [self.backend(name) for name in self.all_able(device_type)]

    def supports(self, name: str, *asked: Any) -> Support:
        """Return whether a kernel can run here, and if so its own answer about a layer.

        asked: what its class's `supports` takes, the layer's spec first.
        """
        able = self.able(name, asked[0].device.type)
        if not able:
            return able
        try:
            kernel: Any = self.backend(name)  # whose `supports` takes what its kind of operation asks
            found = _support(kernel.supports(*asked), "supports")
        except (Exception, SystemExit) as error:
            log_traceback(f"supports() of {self._word} {name}", error)
            return Support.no("supports()", "an answer", f"{type(error).__name__}: {error}")
        return found if found else Support(tuple(map(self._with_known_layout, found.reasons)))

    def _with_known_layout(self, reason: Reason) -> Reason:
        """A reason whose hint is no layout that nobody registered: a backend may read those of another plugin."""
        option, _, layout = reason.hint.partition(" ")
        if option != "--kv-layout" or layout in self.layouts:
            return reason
        return reason._replace(hint=f"nobody has registered layout {layout}; headway plugins lists the plugins")

    def rank(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first, by the rank hook; third parties are asked before the built-in order.

        A hook that raises, or whose answer is no order of the candidates, is named in the log and passed over.
        """
        for plugin, owner, order in self._hooks(self.kind.rank_hook):
            try:
                answer = order(spec, phase, candidates)
            except (Exception, SystemExit) as error:
                who = f"plugin {plugin!r} of {owner}"
                log_traceback(f"{self.kind.rank_hook}() of {who}", error)
                raised = str(error) if isinstance(error, PluginError) else f"it raised {type(error).__name__}: {error}"
                warn_once(f"{self.kind.rank_hook}() of {who} is passed over: {raised}")
                continue
            if answer is not None:
                return answer
        return list(candidates)


def _name_of(info: Any) -> str:
    return str(info.layout.name if isinstance(info, LayoutInfo) else info.name)


def _support(answer: object, method: str) -> Support:
    if not isinstance(answer, Support):
        raise PluginError(f"{method}() must return a Support, got {answer!r}")
    return answer


_KINDS: dict[str, type] = {
    "layouts": LayoutInfo,
    "backends": BackendInfo,
    "proposers": ProposerInfo,
    "logits_processors": LogitsProcessorInfo,
    "state_layouts": StateLayout,
    "state_backends": StateBackendInfo,
    "kernels": KernelInfo,
    "chat_parsers": ChatParserInfo,
}
"""What plugins bring, as the names of hooks and the fields of `Brought` have it -> its type."""


class Registry:
    """Layouts and backends by name, filled once by `create_registry`; from then on a lookup is a dict get."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._owners: dict[str, str] = {}
        self.proposers: dict[str, ProposerInfo] = {}
        self.logits_processors: dict[str, LogitsProcessorInfo] = {}
        self.chat_parsers: dict[tuple[str, str], ChatParserInfo] = {}
        """What a parser reads, and its name -> the parser."""
        self.failures: list[PluginFailure] = []
        self.attention: KernelRegistry[AttentionBackend, LayoutInfo] = KernelRegistry(
            ATTENTION, check_backend_class, self.rank_hooks, self.failures
        )
        self.states: KernelRegistry[StateBackend, StateLayout] = KernelRegistry(
            STATE, check_state_backend_class, self.rank_hooks, self.failures
        )
        self.linear: KernelRegistry[LinearKernel, None] = KernelRegistry(
            LINEAR, check_linear_class, self.rank_hooks, self.failures
        )
        self.experts: KernelRegistry[ExpertsKernel, None] = KernelRegistry(
            EXPERTS, check_experts_class, self.rank_hooks, self.failures
        )
        self.all_reduce: KernelRegistry[AllReduceKernel, None] = KernelRegistry(
            ALL_REDUCE, check_all_reduce_class, self.rank_hooks, self.failures
        )
        self._kinds = (self.attention, self.states, self.linear, self.experts, self.all_reduce)
        self.backends = self.attention.entries
        self.layouts = self.attention.layouts
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
            found = self._answers(f"plugin {name!r} of {owner}", owner, plugin)
        except BaseException as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError):  # a hook with another signature, or that there is none of
                raise PluginError(f"plugin {name!r} of {owner}: {' '.join(str(error).split())}") from None
            raise
        self._owners[name] = owner
        hooks = tuple(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
        self.brought[name] = Brought(hooks, **{kind: tuple(map(_name_of, infos)) for kind, infos in found.items()})
        for kernels in self._kinds:
            kernels.add(found[kernels.kind.kernels], owner)
            kernels.layouts.update({_name_of(info): info for info in found.get(kernels.kind.layouts, ())})
        for kind in ("proposers", "logits_processors"):
            getattr(self, kind).update({_name_of(info): info for info in found[kind]})
        self.chat_parsers.update({(parser.reads, parser.name): parser for parser in found["chat_parsers"]})

    def _answers(self, where: str, owner: str, plugin: object) -> dict[str, list[Any]]:
        if not self._manager.get_hookcallers(plugin):
            raise PluginError(f"{where} implements no hook of ours: mark its functions with headway.hookimpl")
        found = {name: self._ask(f"headway_register_{name}", kind, plugin, where) for name, kind in _KINDS.items()}
        self._sort_kernels(found, where)
        layouts, proposers = found["layouts"], found["proposers"]
        for layout in layouts:
            check_layout_info(layout, where)
        self._check_state_layouts(found["state_layouts"], where)
        for proposer in proposers:
            check_proposer_info(proposer, where)
        self._check_processors(found["logits_processors"], where)
        self._check_chat_parsers(found["chat_parsers"], where)
        for number, layout in enumerate(layouts):
            self._check_layout(layout, layouts[:number])
        for kernels in self._kinds:
            kernels.check_new(found[kernels.kind.kernels], owner, where)
        self._check_proposer_names([each.name for each in proposers], where)
        return found

    def _sort_kernels(self, found: dict[str, list[Any]], where: str) -> None:
        """Put what `headway_register_kernels` returned to the other kernels of its kind."""
        for info in found.pop("kernels"):
            kind = next((kind for kind in ALL_KINDS if isinstance(info, kind.info)), None)
            if kind is None:
                need = ", ".join(known.info.__name__ for known in KINDS)
                raise PluginError(f"{where}: headway_register_kernels() must return {need}, got {type(info).__name__}")
            found.setdefault(kind.kernels, []).append(info)
        for kind in ALL_KINDS:
            found.setdefault(kind.kernels, [])

    def of(self, kind: OperationKind) -> KernelRegistry[Any, Any]:
        """Return the kernels of a kind of operation."""
        return next(kernels for kernels in self._kinds if kernels.kind is kind)

    def digest_of(self, name: str, kind: OperationKind = ATTENTION) -> str:
        """Hash of the version and the files of the plugin that brought a kernel; empty for built-ins and objects."""
        source = self.source_of(name, kind)
        return "" if source is None else source.digest()

    def source_of(self, name: str, kind: OperationKind = ATTENTION) -> PluginSource | None:
        """Return the plugin that brought a kernel; None for built-ins and objects."""
        brought = ((source, getattr(self.brought[plugin], kind.kernels)) for plugin, source in self.sources.items())
        return next((source for source, names in brought if name in names), None)

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

    def _check_chat_parsers(self, parsers: Sequence[ChatParserInfo], where: str) -> None:
        known = set(self.chat_parsers)
        for parser in parsers:
            check_chat_parser_info(parser, where)
            if (key := (parser.reads, parser.name)) in known:
                raise PluginError(f"{where}: parser of {parser.reads} {parser.name!r} is already registered: rename one of them")
            known.add(key)

    def _check_proposer_names(self, names: Sequence[str], where: str) -> None:
        for name in names:
            if name in self.proposers or names.count(name) > 1:
                raise PluginError(f"{where}: the proposer name {name!r} is already taken: rename one of them")

    def _check_state_layouts(self, layouts: Sequence[StateLayout], where: str) -> None:
        known = list(self.states.layouts.values())
        for layout in layouts:
            check_state_layout(layout, where)
            for other in known:
                if other.name == layout.name or other == layout:
                    raise PluginError(f"{where}: state layout {layout.name!r} is already registered as {other.name!r}")
            known.append(layout)

    def _check_layout(self, info: LayoutInfo, own: Sequence[LayoutInfo]) -> None:
        for known in (*self.layouts.values(), *own):
            if known.layout.name == info.layout.name or known.layout == info.layout:
                raise PluginError(f"layout {info.layout.name!r} is already registered as {known.layout.name!r}")

    def linear_kernels(self, device: torch.device, named: str = "auto") -> LinearKernels:
        """Return the linear kernels that a model on a device chooses among. named: the one that the user asks for, or auto.

        :raises UnknownBackendError: nobody registered that name.
        """
        kernels = self.linear
        if named != "auto":
            kernels.backend(named)
        names = kernels.meant_for(device.type)
        guests = [name for name in names if kernels.entries[name].owner != BUILTIN_OWNER]
        asked = None if named == "auto" else named
        return LinearKernels(device, names, kernels.backend, kernels.supports, guests, asked)

    def backend(self, name: str) -> type[AttentionBackend]:
        """Load an attention backend's class; see `KernelRegistry.backend`."""
        return self.attention.backend(name)

    def availability(self, name: str) -> Support:
        """Load and probe an attention backend, once, and return whether this machine can run it."""
        return self.attention.availability(name)

    def able(self, device: torch.device) -> list[str]:
        """The attention backends that serve a type of device and can run on this machine; see `KernelRegistry.all_able`."""
        return [name for name in self.attention.all_able(device.type) if name in self.backends]

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
        return self.attention.supports(name, spec, layout, block_size, phase)

    def meant_for(self, device_type: str) -> list[str]:
        """Return the attention backends that may serve a type of device, by their registrations: none is imported."""
        return self.attention.meant_for(device_type)

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Attention backends, best guess first; see `KernelRegistry.rank`."""
        return self.attention.rank(spec, phase, candidates)

    def rank_hooks(self, hook: str) -> list[tuple[str, str, RankHook]]:
        """Name and owner of each plugin that has a rank hook, in the order in which they are asked, and the hook.

        It raises whatever the plugin raises, and PluginError for an answer that is no order of the candidates.
        """
        found = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        named = ((each.plugin_name, each.plugin) for each in found)
        return [(name, self._owners.get(name, "nobody"), partial(self._rank_of, hook, plugin)) for name, plugin in named]

    def _rank_of(
        self, hook: str, plugin: object, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]
    ) -> list[str] | None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        ask = self._manager.subset_hook_caller(hook, others)
        answer = ask(spec=spec, phase=phase, candidates=tuple(candidates))
        if answer is not None and not _is_order(answer, candidates):
            raise PluginError(f"it must return an order of {list(candidates)}, got {answer!r}")
        return None if answer is None else list(answer)


def _is_order(answer: object, candidates: Sequence[str]) -> bool:
    try:
        return isinstance(answer, (list, tuple)) and Counter(answer) == Counter(candidates)
    except TypeError:  # of what cannot be hashed
        return False
