"""A registry with all that there is: the built-ins, a caller's own plugins, and the installed ones that passed their trial."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import pluggy

from headway.core.contract.errors import PluginError
from headway.core.system.logs import log_traceback, warn_once
from headway.registry import builtin, hookspecs
from headway.registry.isolation import TIMEOUT, TRUST, Trial, Verdict, verdicts
from headway.registry.plugin_sources import (
    InstalledPlugin,
    PluginFile,
    PluginSource,
    UnreadablePlugin,
    given_plugins,
    installed_plugins,
    with_hooks,
)
from headway.registry.records import BUILTIN_OWNER, Brought, PluginFailure, PluginPolicy, PluginRecord
from headway.registry.registry import Registry

RETRY = "headway plugins --retry tries it again"


def create_registry(
    plugins: Mapping[str, object] | Iterable[object] = (),
    *,
    trial: Trial | None = None,
    load_entry_points: bool = True,
    block: Iterable[str] = (),
    policy: str | None = None,
    retry: bool = False,
) -> Registry:
    """Make a registry: the built-ins first, then the given plugin objects, then entry points of the group "headway".

    plugins: modules or objects with hook implementations, backend classes, files (FILE.py or FILE.py:CLASS), or name -> plugin;
    one that fails raises.
    trial: how an installed plugin or a file is tried in another process before it is let in, once for each version of it.
    None: what was never tried is let in; `headway.create_registry` hands in the trial that every command uses.
    block: names of entry points to leave alone. policy: which installed plugins are wanted (`PluginPolicy.parse`); None: as
    $HEADWAY_PLUGINS says. retry: try again, whatever is remembered.

    An installed plugin that fails there or here is recorded in `failures`, and start-up goes on. A file that fails raises, for
    the user has named it.

    :raises ConfigError: a policy that cannot be understood; a file that is not there.
    :raises HeadwayError: a given plugin that cannot be registered.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager)
    registry.add_plugin(BUILTIN_OWNER, BUILTIN_OWNER, builtin)
    wanted = PluginPolicy.of_environment() if policy is None else PluginPolicy.parse(policy)
    given = list(given_plugins(plugins))
    files = [plugin for plugin in given if isinstance(plugin, PluginFile)]
    tried = dict(zip(files, verdicts(files, trial, retry), strict=True))
    for plugin in given:
        if isinstance(plugin, PluginFile):
            _add_file(registry, plugin, tried[plugin])
        else:
            registry.add_plugin(plugin.name, plugin.owner, with_hooks(plugin.load(), registry.layouts, registry.states.layouts))
    if load_entry_points:
        _add_installed(registry, list(installed_plugins(hookspecs.PROJECT, frozenset(block))), wanted, trial, retry)
    return registry


def _add_installed(
    registry: Registry,
    found: list[InstalledPlugin | UnreadablePlugin],
    policy: PluginPolicy,
    trial: Trial | None,
    retry: bool,
) -> None:
    for name in policy.unknown(found):
        warn_once(f"plugins: nothing that is installed is called {name}")
    readable = [plugin for plugin in found if policy.takes(plugin) and isinstance(plugin, InstalledPlugin)]
    tried = dict(zip(map(id, readable), verdicts(readable, trial, retry), strict=True))
    for plugin in found:
        if policy.takes(plugin):
            _add(registry, plugin, tried.get(id(plugin), Verdict()))
        else:
            registry.plugins.append(PluginRecord(plugin.name, plugin.owner, str(plugin.file or ""), "blocked"))


def _add_file(registry: Registry, plugin: PluginFile, verdict: Verdict) -> None:
    """Let a file in that the user has named.

    :raises HeadwayError: what came of its trial, or why it cannot be registered.
    """
    if verdict.fault:
        hint = f"{TRUST}=1 lets it in untried" + f", {TIMEOUT}=60 gives it longer" * verdict.fault.startswith("hangs")
        raise PluginError(f"plugin {plugin.path}: {verdict.fault} (tried in a process of its own; {hint})")
    registry.add_plugin(plugin.name, plugin.owner, with_hooks(plugin.load(), registry.layouts, registry.states.layouts))
    _record(registry, plugin, verdict)


def _add(registry: Registry, plugin: PluginSource, verdict: Verdict) -> None:
    """Let an installed plugin in, or record why not."""
    try:
        if verdict.fault:
            hint = f"; {TIMEOUT}=60 gives it longer" if verdict.fault.startswith("hangs") else ""
            raise PluginError(f"{verdict.fault} (tried in a process of its own on {verdict.date}; {RETRY}{hint})")
        registry.add_plugin(plugin.name, plugin.owner, plugin.load())
    except (Exception, SystemExit) as error:
        details = verdict.details
        if not verdict.fault:
            log_traceback(f"plugin {plugin.name} of {plugin.owner}", error)
            details = "".join(traceback.format_exception(error))
        registry.failures.append(PluginFailure(plugin.name, plugin.owner, error, details))
        _record(registry, plugin, verdict, registry.failures[-1])
    else:
        _record(registry, plugin, verdict)


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
    if not failure:
        registry.sources[plugin.name] = plugin
