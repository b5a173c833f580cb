"""The Registry, filled with built-ins, a caller's plugins, and installed plugins that passed their trial."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import pluggy
import torch

from headway.core.contract.errors import ConfigError, PluginError
from headway.core.contract.kernel import KernelInfo
from headway.core.contract.operation import ALL_KINDS, ATTENTION, KINDS, OperationKind
from headway.core.contract.rule import AttentionRule, rule_of
from headway.core.contract.text_plugins import ChatParserInfo, LogitsProcessorInfo, ProposerInfo
from headway.core.select.kernels import KernelEntry, Kernels, RankHook
from headway.core.system.logs import log_traceback, warn_once
from headway.core.system.text import shown
from headway.kernels.linear.choice import LinearKernels
from headway.registry import builtin, hookspecs
from headway.registry.isolation import TIMEOUT, TRUST, PassportCheck, Refusal, Trial, Verdict, verdicts
from headway.registry.plugin_sources import (
    HubKernel,
    PluginFile,
    PluginObject,
    PluginSource,
    UnreadablePlugin,
    given_plugins,
    installed_plugins,
    load_file,
    rules_in,
    split_target,
    with_hooks,
)
from headway.registry.records import BUILTIN_OWNER, Brought, PluginFailure, PluginPolicy, PluginRecord
from headway.registry.validate import answers_of, check_class, check_items, named

_HOOKS: dict[str, type] = {
    name.removeprefix("headway_register_"): get_args(get_type_hints(hook)["return"])[0]
    for name, hook in vars(hookspecs).items()
    if name.startswith("headway_register_")
}
"""Hook name without headway_register_ -> type of the items that it returns."""
RETRY = "headway plugins --retry tries it again"


class Registry(Kernels):
    """Layouts and backends, keyed by name. `create_registry` fills the registry once; afterwards, a lookup is a dictionary
    access."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._owners: dict[str, str] = {}
        self.proposers: dict[str, ProposerInfo] = {}
        self.logits_processors: dict[str, LogitsProcessorInfo] = {}
        self.chat_parsers: dict[tuple[str, str], ChatParserInfo] = {}
        """Chat parsers, keyed by (`calls` or `reasoning`, parser name)."""
        self.attention_rules: dict[str, AttentionRule] = {}
        self.failures: list[PluginFailure] = []
        super().__init__(check_class, self.failures)
        self._known: dict[str, dict[Any, Any]] = {
            "proposers": self.proposers,
            "logits_processors": self.logits_processors,
            "chat_parsers": self.chat_parsers,
            "attention_rules": self.attention_rules,
            **{each.kind.kernels: each.entries for each in self.kinds},
            **{each.kind.layouts: each.layouts for each in self.kinds if each.kind.layouts},
        }
        """Registered items of each kind by name, keyed by the kind's field name in `Brought`."""
        self.plugins: list[PluginRecord] = []
        """Records of installed plugins, including excluded and blocked ones, and of files that the user named."""
        self.sources: dict[str, PluginSource] = {}
        """Plugin name -> the plugin's source, for loaded plugins that are installed or files."""
        self.brought: dict[str, Brought] = {}
        """Plugin name -> names of the items that it registered."""

    def add_plugin(self, name: str, owner: str, plugin: object) -> None:
        """Register a plugin completely or, if any part is not valid, not at all.

        :raises PluginError: if a name is taken, an api_version does not match, or an item of a hook is not valid.
        """
        self._check_new(name, owner, plugin)
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            found = self._answers(f"plugin {name!r} of {owner}", owner, plugin)
        except BaseException as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError):  # an unknown hook or one with another signature
                raise PluginError(f"plugin {name!r} of {owner}: {' '.join(str(error).split())}") from None
            raise
        self._owners[name] = owner
        hooks = tuple(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
        for kernels in self.kinds:
            if kernels.kind.rank_hook:
                asked = reversed(getattr(self._manager.hook, kernels.kind.rank_hook).get_hookimpls())
                own = [each for each in asked if not each.wrapper and not each.hookwrapper]
                kernels.rank_hooks = [
                    RankHook(each.plugin_name, self._owners[each.plugin_name], each.function, each.argnames) for each in own
                ]
        names = {kind: tuple(str(named(item).name) for item in items) for kind, items in found.items()}
        self.brought[name] = Brought(hooks, **names)
        for kind, items in found.items():
            for item in items:
                key = (item.reads, item.name) if isinstance(item, ChatParserInfo) else named(item).name
                self._known[kind][key] = KernelEntry(item, owner) if isinstance(item, KernelInfo) else item

    def _answers(self, where: str, owner: str, plugin: object) -> dict[str, list[Any]]:
        """Return the items that a plugin registers, by field of `Brought`, after checking all of them."""
        if not self._manager.get_hookcallers(plugin):
            raise PluginError(f"{where} implements no hook of ours: mark its functions with headway.hookimpl")
        found: dict[str, list[Any]] = {kind: [] for kind in self._known}
        for hook, kind in _HOOKS.items():
            for item in self._ask(f"headway_register_{hook}", kind, plugin, where):
                of = next((known for known in ALL_KINDS if isinstance(item, known.info)), None)
                if of is None and kind is KernelInfo:
                    need = ", ".join(known.info.__name__ for known in KINDS)
                    raise PluginError(f"{where}: headway_register_kernels() must return {need}, got {type(item).__name__}")
                found[hook if of is None else of.kernels].append(item)
        for field, items in found.items():
            entries = self._known[field].values()
            check_items(items, [(getattr(each, "info", each), getattr(each, "owner", "")) for each in entries], owner, where)
        return found

    def digest_of(self, name: str, kind: OperationKind = ATTENTION) -> str:
        """Return a hash of the version and files of a kernel's plugin; "" for built-ins and plugin objects."""
        source = self.source_of(name, kind)
        return "" if source is None else source.digest()

    def source_of(self, name: str, kind: OperationKind = ATTENTION) -> PluginSource | None:
        """Return the plugin of a kernel; None for built-ins and plugin objects."""
        brought = ((source, getattr(self.brought[plugin], kind.kernels)) for plugin, source in self.sources.items())
        return next((source for source, names in brought if name in names), None)

    def _ask(self, hook: str, kind: type, plugin: object, where: str) -> list[Any]:
        """Return a plugin's answers to a hook; empty if the plugin does not implement the hook."""
        if all(caller.name != hook for caller in self._manager.get_hookcallers(plugin) or ()):
            return []
        try:
            answers = self._call(hook, plugin)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{where}: {hook}() raised {type(error).__name__}: {error}") from error
        return answers_of(hook, answers or [None], kind, where)  # pluggy omits an answer of None

    def _call(self, hook: str, plugin: object, **arguments: Any) -> Any:
        """Call a hook of one plugin and return pluggy's result."""
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        return self._manager.subset_hook_caller(hook, others)(**arguments)

    def _check_new(self, name: str, owner: str, plugin: object) -> None:
        if name in self._owners:
            raise PluginError(f"plugin name {name!r} of {owner} is already taken by {self._owners[name]}: rename one of them")
        try:
            hash(plugin)
        except Exception as error:  # pluggy stores plugins in sets
            why = f"{type(error).__name__}: {error}; a dataclass needs eq=False or frozen=True"
            raise PluginError(f"plugin {name!r} of {owner} must be hashable: {why}") from error
        if self._manager.is_registered(plugin):
            raise PluginError(f"plugin {name!r} of {owner} is already registered as {self._manager.get_name(plugin)!r}")

    def linear_kernels(self, device: torch.device, named: str = "auto", invariant: bool = False) -> LinearKernels:
        """Return the linear kernels from which a model on a device can choose.

        named: name of the kernel that the user requests, or auto. invariant: True for deterministic mode.

        :raises UnknownBackendError: if the name is not registered.
        """
        kernels = self.linear
        if named != "auto":
            kernels.backend(named)
        names = kernels.meant_for(device.type)
        third_party = [name for name in names if kernels.entries[name].owner != BUILTIN_OWNER]
        asked = None if named == "auto" else named
        return LinearKernels(device, names, kernels.backend, kernels.supports, third_party, asked, invariant)

    def proposer(self, name: str) -> ProposerInfo:
        """Return a proposer of draft tokens by name.

        :raises ConfigError: if the name is not registered.
        """
        if name not in self.proposers:
            raise ConfigError("speculate", f"one of {', '.join(self.proposers)}", repr(name))
        return self.proposers[name]

    def attention_rule(self, given: object, files: bool = True, option: str = "require_passport") -> AttentionRule:
        """Return an attention rule.

        given: a rule or its class, FILE.py:NAME of either, the name of a plugin's rule, or a mapping with such a name as `rule`
        and values of parameters. files: False to refuse files, whose code would run. option: what refuses files, for the error.

        :raises ConfigError: if no rule has this name, or the file is refused. :raises PluginError: if the file does not load.
        """
        if isinstance(given, Mapping) and "rule" in given:
            parameters = {name: value for name, value in given.items() if name != "rule"}
            return rule_of(self.attention_rule(given["rule"], files, option), parameters)
        if isinstance(given, str) and given in self.attention_rules:
            return self.attention_rules[given]
        if isinstance(given, str) and ".py" in given:
            path, name = split_target(given)
            if not files:
                hint = f"if you trust its code: --attention-rule {given}, with the path of the file" * ("json" in option)
                raise ConfigError(option, "the name of a plugin's rule", repr(given), hint)
            own = rules_in(load_file(path, "attention rule"))
            if not name and len(own) == 1:
                name = next(iter(own))
            if name not in own:
                raise ConfigError("attention rule", f"{path}:RULE, with a rule out of {', '.join(own) or 'none there'}", given)
            return rule_of(own[name], {})
        if isinstance(given, AttentionRule) or (isinstance(given, type) and issubclass(given, AttentionRule)):
            return rule_of(given, {})
        known = ", ".join(self.attention_rules) or "none is registered"
        need = f"an AttentionRule, its class, FILE.py:CLASS, or a plugin's rule ({known})"
        raise ConfigError("attention_rules", need, shown(given))


def builtin_registry() -> Registry:
    """Return a registry that contains only the built-ins."""
    registry = Registry()
    registry.add_plugin(BUILTIN_OWNER, BUILTIN_OWNER, builtin)
    return registry


def create_registry(
    plugins: Mapping[str, object] | Iterable[object] = (),
    *,
    trial: Trial | None = None,
    load_entry_points: bool = True,
    block: Iterable[str] = (),
    policy: str | None = None,
    retry: bool = False,
    passports: PassportCheck | None = None,
) -> Registry:
    """Create a registry as `headway.create_registry` does, with the trial and the check of passports that a caller passes.

    trial: None accepts untried plugins. passports: None means no check.
    """
    registry = builtin_registry()
    wanted = PluginPolicy.of_environment() if policy is None else PluginPolicy.parse(policy)
    given: list[PluginSource] = list(given_plugins(plugins))
    judged = _judge(given, trial, retry, passports)
    for plugin in given:
        verdict = judged.get(id(plugin), Verdict())
        if isinstance(plugin, HubKernel) and verdict.fault and not isinstance(verdict, Refusal):
            _let_in_or_record(registry, plugin, verdict, passports)
        else:
            _let_in(registry, plugin, verdict, passports)
    if load_entry_points:
        found: list[PluginSource] = list(installed_plugins(hookspecs.PROJECT, frozenset(block)))
        for name in wanted.unknown(found):
            warn_once(f"plugins: no installed plugin is named {name}")
        judged = _judge([plugin for plugin in found if wanted.takes(plugin)], trial, retry, passports)
        for plugin in found:
            if wanted.takes(plugin):
                _let_in_or_record(registry, plugin, judged.get(id(plugin), Verdict()), passports)
            else:
                registry.plugins.append(PluginRecord(plugin.name, plugin.owner, str(plugin.file or ""), "blocked"))
    return registry


def _judge(
    plugins: Sequence[PluginSource], trial: Trial | None, retry: bool, passports: PassportCheck | None
) -> dict[int, Verdict]:
    """Return id -> verdict on each plugin that can be tried or that lacks a required passport. The latter are not tried."""
    refused: dict[int, Verdict] = {
        id(each): Refusal(reason) for each in plugins if passports is not None and (reason := passports.refusal(each))
    }
    able = [each for each in plugins if id(each) not in refused and not isinstance(each, (PluginObject, UnreadablePlugin))]
    return refused | dict(zip(map(id, able), verdicts(able, trial, retry), strict=True))


def _let_in_or_record(registry: Registry, plugin: PluginSource, verdict: Verdict, passports: PassportCheck | None) -> None:
    """Load and register a plugin, or record its failure."""
    try:
        _let_in(registry, plugin, verdict, passports)
    except (Exception, SystemExit) as error:
        details = verdict.details
        if not verdict.fault:
            log_traceback(f"plugin {plugin.name} of {plugin.owner}", error)
            details = "".join(traceback.format_exception(error))
        registry.failures.append(PluginFailure(plugin.name, plugin.owner, error, details))
        _record(registry, plugin, verdict, registry.failures[-1])


def _let_in(registry: Registry, plugin: PluginSource, verdict: Verdict, passports: PassportCheck | None) -> None:
    """Load and register a plugin that has a verdict, except its kernels that lack a required passport. Exceptions raised while
    importing the plugin are not caught.

    :raises HeadwayError: if the plugin's trial failed or the plugin cannot be registered.
    """
    if isinstance(verdict, Refusal):
        raise PluginError(f"plugin {plugin.name!r} of {plugin.owner}: {verdict.fault}")
    if verdict.fault:
        longer = f"{TIMEOUT}=60 gives it longer" * verdict.fault.startswith("hangs")
        if isinstance(plugin, PluginFile):
            hint = ", ".join(filter(None, (f"{TRUST}=1 lets it in untried", longer)))
            raise PluginError(f"plugin {plugin.path}: {verdict.fault} (tried in a process of its own; {hint})")
        hint = "; ".join(filter(None, (f"{TRUST}=1 lets it in untried" if plugin.target else RETRY, longer)))
        raise PluginError(f"{verdict.fault} (tried in a process of its own on {verdict.date}; {hint})")
    given = isinstance(plugin, (PluginFile, PluginObject, HubKernel))
    loaded = plugin.load()
    hooks = with_hooks(loaded, registry.layouts, registry.states.layouts) if given else loaded
    registry.add_plugin(plugin.name, plugin.owner, hooks)
    if not isinstance(plugin, PluginObject):
        registry.sources[plugin.name] = plugin
        _record(registry, plugin, verdict)
    if passports is not None:
        brought = registry.brought[plugin.name]
        names = [(each.kind.name, name) for each in registry.kinds for name in getattr(brought, each.kind.kernels)]
        for kind, name in passports.without(plugin, names, verdict):
            next(each for each in registry.kinds if each.kind.name == kind).entries.pop(name)
            error = PluginError(f"kernel {name}: needs a passport, and the plugin's does not contain it (require_passport)")
            registry.failures.append(PluginFailure(plugin.name, plugin.owner, error))


def _record(registry: Registry, plugin: PluginSource, verdict: Verdict, failure: PluginFailure | None = None) -> None:
    registry.plugins.append(
        PluginRecord(
            plugin.name,
            plugin.owner,
            str(plugin.file or ""),
            "left out" if failure else "loaded",
            reason=failure.reason if failure else "",
            brought=Brought() if failure else registry.brought[plugin.name],
            remarks=tuple(verdict.remarks),
            details=failure.details if failure else verdict.details,
            tried=verdict.date,
            target=plugin.target,
        )
    )
