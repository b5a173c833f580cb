"""A registry with all that is there: the built-ins, a caller's own plugins, and the installed ones that passed their trial."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module

import pluggy

from headway.core.contract.errors import PluginError
from headway.core.system.faults import trace, warn_once
from headway.registry import hookspecs
from headway.registry.discovery import FoundPlugin, PluginFailure, entry_points
from headway.registry.given import given_plugins
from headway.registry.guests import TIMEOUT, Verdict, verdicts
from headway.registry.policy import PluginPolicy
from headway.registry.records import PluginRecord
from headway.registry.registry import BUILTIN_OWNER, BUILTIN_PLUGIN, Registry

AGAIN = "headway plugins --retry tries it again"


def create_registry(
    plugins: Mapping[str, object] | Iterable[object] = (),
    *,
    load_entry_points: bool = True,
    block: Iterable[str] = (),
    policy: str | None = None,
    retry: bool = False,
) -> Registry:
    """Make a registry: the built-ins first, then the given plugin objects, then entry points of the group "headway".

    plugins: modules or objects with hook implementations, backend classes, files (FILE.py or FILE.py:CLASS), or name -> plugin;
    one that fails raises.
    block: names of entry points to leave alone. policy: which installed plugins are wanted (`PluginPolicy.parse`); None: as
    $HEADWAY_PLUGINS says.

    An installed plugin is tried in another process first, once for each version of it (retry: whatever is remembered). One that
    fails there or here is recorded in `failures`, and start-up goes on.

    :raises ConfigError: a policy that cannot be understood.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager)
    registry.add_plugin(BUILTIN_OWNER, BUILTIN_OWNER, import_module(BUILTIN_PLUGIN))
    wanted = PluginPolicy.of_environment() if policy is None else PluginPolicy.parse(policy)
    for name, owner, plugin in given_plugins(plugins, registry.layouts):
        registry.add_plugin(name, owner, plugin)
    if load_entry_points:
        _add_installed(registry, list(entry_points(hookspecs.PROJECT, frozenset(block))), wanted, retry)
    return registry


def _add_installed(registry: Registry, found: list[FoundPlugin], policy: PluginPolicy, retry: bool) -> None:
    for name in policy.unknown(found):
        warn_once(f"plugins: nothing that is installed is called {name}")
    wanted = [plugin for plugin in found if policy.takes(plugin)]
    readable = [plugin for plugin in wanted if not isinstance(plugin.point, Exception)]
    tried = dict(zip([id(plugin) for plugin in readable], verdicts(readable, retry), strict=True))
    for plugin in found:
        if plugin not in wanted:
            registry.plugins.append(PluginRecord(plugin.name, plugin.owner, str(plugin.file or ""), "blocked"))
            continue
        _add(registry, plugin, tried.get(id(plugin), Verdict()))


def _add(registry: Registry, plugin: FoundPlugin, verdict: Verdict) -> None:
    """Let one plugin in, or record why not."""
    why, details = "", verdict.details
    try:
        if verdict.fault:
            hint = f"; {TIMEOUT}=60 gives it longer" if verdict.fault.startswith("hangs") else ""
            raise PluginError(f"{verdict.fault} (tried in a process of its own on {verdict.date}; {AGAIN}{hint})")
        registry.add_plugin(plugin.name, plugin.owner, plugin.load())
    except (Exception, SystemExit) as error:
        if not verdict.fault:
            trace(f"plugin {plugin.name} of {plugin.owner}", error)
            details = "".join(traceback.format_exception(error))
        failure = PluginFailure(plugin.name, plugin.owner, error, details)
        registry.failures.append(failure)
        why = str(failure).removeprefix(f"{plugin.name} (from {plugin.owner}): ")
    registry.plugins.append(
        PluginRecord(
            plugin.name,
            plugin.owner,
            str(plugin.file or ""),
            "left out" if why else "loaded",
            why,
            **({} if why else {"brought": registry.brought[plugin.name]}),
            remarks=tuple(verdict.remarks),
            details=details,
            tried=verdict.date,
        )
    )
