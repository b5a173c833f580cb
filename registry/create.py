"""A registry with all that is there: the built-ins, a caller's own plugins, and the installed ones that passed their trial."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

import pluggy

from headway.core.contract.errors import PluginError
from headway.core.system.faults import trace, warn_once
from headway.registry import hookspecs
from headway.registry.discovery import FoundPlugin, PluginFailure, entry_points
from headway.registry.given import GivenFile, given_plugins, with_hooks
from headway.registry.guests import TIMEOUT, TRUST, Verdict, verdicts
from headway.registry.policy import PluginPolicy
from headway.registry.records import BUILTIN_OWNER, Brought, PluginRecord
from headway.registry.registry import BUILTIN_PLUGIN, Registry

AGAIN = "headway plugins --retry tries it again"


def create_registry(
    plugins: Mapping[str, object] | Iterable[object] = (),
    *,
    load_entry_points: bool = True,
    block: Iterable[str] = (),
    policy: str | None = None,
    retry: bool = False,
    try_files: bool = True,
) -> Registry:
    """Make a registry: the built-ins first, then the given plugin objects, then entry points of the group "headway".

    plugins: modules or objects with hook implementations, backend classes, files (FILE.py or FILE.py:CLASS), or name -> plugin;
    one that fails raises.
    block: names of entry points to leave alone. policy: which installed plugins are wanted (`PluginPolicy.parse`); None: as
    $HEADWAY_PLUGINS says.

    An installed plugin is tried in another process first, once for each version of it (retry: whatever is remembered). One that
    fails there or here is recorded in `failures`, and start-up goes on. A file is tried as well, once for each text of it, and
    raises where it fails, for the user has named it. try_files: off, for a caller whose own process may be lost.

    :raises ConfigError: a policy that cannot be understood; a file that is not there.
    :raises HeadwayError: a given plugin that cannot be registered.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager)
    registry.add_plugin(BUILTIN_OWNER, BUILTIN_OWNER, import_module(BUILTIN_PLUGIN))
    wanted = PluginPolicy.of_environment() if policy is None else PluginPolicy.parse(policy)
    given = list(given_plugins(plugins))
    files = [FoundPlugin(name, owner, plugin) for name, owner, plugin in given if isinstance(plugin, GivenFile)]
    tried = verdicts(files, retry) if try_files else [Verdict() for _ in files]
    for name, owner, plugin in given:
        if isinstance(plugin, GivenFile):
            _add_file(registry, plugin.path, files.pop(0), tried.pop(0))
        else:
            registry.add_plugin(name, owner, with_hooks(plugin, registry.layouts))
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


def _add_file(registry: Registry, path: Path, plugin: FoundPlugin, verdict: Verdict) -> None:
    """Let a file in that the user has named; path: as it was named.

    :raises HeadwayError: what came of its trial, or why it cannot be registered.
    """
    if verdict.fault:
        hint = f"{TRUST}=1 lets it in untried" + f", {TIMEOUT}=60 gives it longer" * verdict.fault.startswith("hangs")
        raise PluginError(f"plugin {path}: {verdict.fault} (tried in a process of its own; {hint})")
    registry.add_plugin(plugin.name, plugin.owner, with_hooks(plugin.load(), registry.layouts))
    registry.plugins.append(
        PluginRecord(
            plugin.name,
            plugin.owner,
            str(plugin.file),
            "loaded",
            brought=registry.brought[plugin.name],
            remarks=tuple(verdict.remarks),
            details=verdict.details,
            tried=verdict.date,
            target=plugin.target,
        )
    )


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
            brought=Brought() if why else registry.brought[plugin.name],
            remarks=tuple(verdict.remarks),
            details=details,
            tried=verdict.date,
        )
    )
