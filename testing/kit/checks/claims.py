"""Checks of a backend's claims: the fields of its class, refusals with reasons, and options; also the trial of its plugin.

The trial needs an expendable process that has not loaded the plugin, so the kit's child processes do not run the trial. As for
the registry, the function that tries plugins is passed as an argument.
"""

from __future__ import annotations

import time
from dataclasses import replace

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import FEATURES, RULE_FEATURES
from headway.core.contract.errors import HeadwayError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPES
from headway.core.oracle.cells import CheckCell, Finding, Skipped
from headway.registry.isolation import TIMEOUT, Trial
from headway.registry.plugin_sources import PluginSource
from headway.testing.kit.attention import AttentionStage
from headway.testing.kit.cover import layer_support
from headway.testing.kit.report import CellResult, new_result

CELL = CheckCell("process")


def try_plugin(plugin: PluginSource, trial: Trial) -> CellResult:
    """Try a plugin as a start does, but ignore stored verdicts. A finding reports the fault of the plugin and the step in which
    it occurred."""
    started = time.perf_counter()
    (verdict,) = trial([plugin])
    more = f"; {TIMEOUT}=60 in the environment gives it more time" if verdict.fault.startswith("hangs") else ""
    if not verdict.fault:
        return new_result(CELL, "passed", "", started=started)
    reason = f"refused at every start by the trial of plugins: it {verdict.fault}{more}"
    return new_result(CELL, "failed", reason, "does what no plugin may do to a process that is not its own", started)


def process(stage: AttentionStage, cell: CheckCell) -> str:
    """Skip the check: there is no plugin, or no function that tries plugins."""
    if stage.subject.plugin is None:
        raise Skipped(f"backend {stage.subject.name} is no plugin's, and is used untried")
    raise Skipped("`headway check` tries plugins; from Python, check(wanted, trial=...) is given how")


NO_OPTION = "headway_check_asks_for_nothing"
NO_VALUE = "\x00headway check"
"""Value that no option accepts."""


def claims(stage: AttentionStage, cell: CheckCell) -> str:
    """Check the class against the contract as far as possible without running the backend."""
    backend, claimed = stage.subject.backend, stage.subject.claims
    methods = {Phase.PREFILL: "prefill", Phase.EXTEND: "prefill", Phase.DECODE: "decode"}
    for phase in claimed.phases:
        name = methods[phase]
        _need(
            getattr(backend, name) is not getattr(AttentionBackend, name), f"phase {phase.value} is claimed", f"a method {name}()"
        )
    _need(claimed.dense_prefill or not claimed.non_causal, "non_causal is claimed", "dense_prefill, which such layers come by")
    for dtype in claimed.dtypes:
        value = backend.tolerance.get(dtype)
        got = f"{value!r}"
        _need(isinstance(value, float) and value > 0, f"tolerance of {DTYPE_NAMES.get(dtype, dtype)}: {got}", "a number above 0")
    for dtype in claimed.kv_dtypes:
        known = " or ".join(KV_DTYPES)
        _need(dtype in KV_DTYPES.values(), f"kv_dtypes has {dtype}, which nobody can ask for", f"{known} (--kv-cache-dtype)")
        holds = (
            claimed.layouts is None or dtype.is_floating_point or any(each.dtypes.get("key") == dtype for each in claimed.layouts)
        )
        _need(holds, f"kv_dtypes has {dtype}, which no layout holds that is claimed", "one with scales among layouts: nhd_int8")
    features = FEATURES | RULE_FEATURES
    _need(claimed.features <= features, f"features {sorted(claimed.features)}", f"names out of {sorted(features)}")
    _need(isinstance(backend.graph_level, GraphLevel), f"graph_level {backend.graph_level!r}", "a GraphLevel")
    registered = stage.subject.layouts.values()
    unknown = [layout.name for layout in claimed.layouts or () if layout not in registered]
    brings = "one that is registered, or a hook headway_register_layouts() that brings it"
    _need(bool(stage.claimed.rows) or not unknown, f"layouts has {', '.join(unknown)}, which nobody registers", brings)
    _need(bool(stage.claimed.rows), "it accepts no layer of the kit's", "at least one layout, block size, head_dim and dtype")
    spec = stage.claimed.spec(stage.claimed.rows[0][0])
    plain = stage.claimed.rows[0][0]
    instance = stage.backend(plain)
    room = instance.workspace_bytes(2048, 64)
    _need(isinstance(room, int) and room >= 0, f"workspace_bytes() is {room!r}", "bytes, 0 or more")
    for phase in claimed.phases:
        kernel = type(instance).kernel(spec, phase)
        _need(isinstance(kernel, str) and bool(kernel), f"kernel() is {kernel!r}", "the name of a kernel")
    if getattr(instance, "decode_writes", False):
        has = type(instance).write_and_decode is not AttentionBackend.write_and_decode
        _need(has, "decode_writes is set", "a method write_and_decode()")
    _unclaimed(stage, plain)
    return ""


def _unclaimed(stage: AttentionStage, plain: CheckCell) -> None:
    """Check that supports() agrees with the capabilities: a layer with an unclaimed feature must never be accepted."""
    spec = replace(stage.claimed.spec(plain), causal=True)
    fields = {"sliding_window": 7, "softcap": 1.5, "alibi_slopes": (0.5,) * spec.num_heads, "sinks": (0.5,) * spec.num_heads}
    both_ways = replace(spec, causal=False, dense=True, kv_dtype=None, k_scale=1.0, v_scale=1.0, alibi_slopes=None)
    if not stage.subject.claims.non_causal and stage.subject.supports(both_ways, plain.layout, plain.block_size, Phase.PREFILL):
        raise Finding(
            "non_causal is not claimed, and supports() accepts a layer that is not causal", guess="accepts it unclaimed"
        )
    for name in FEATURES - stage.subject.claims.features:
        other = replace(spec, **{name: fields[name]})  # type: ignore[arg-type]
        for phase in Phase:
            if stage.subject.supports(other, plain.layout, plain.block_size, phase):
                raise Finding(
                    f"{name} is not among the claimed features, and supports() accepts it", guess=f"accepts {name} unclaimed"
                )


def serves(stage: AttentionStage, cell: CheckCell) -> str:
    """Return the phases in which a layer of the model is supported, in words."""
    return layer_support(stage.claimed.layers[cell.layer], stage.subject, stage.block_sizes)


def options(stage: AttentionStage, cell: CheckCell) -> str:
    """Check that declared options are parsed, and unknown options refused."""
    backend, spec = stage.subject.backend, stage.claimed.spec(cell)
    layout = stage.subject.layouts[cell.layout]

    def takes(chosen: dict[str, str]) -> bool:
        try:
            backend.check_options(chosen)
            backend(spec, layout, cell.block_size, chosen)
        except HeadwayError:
            return False
        except Exception as error:
            raise Finding(
                f"--attn-opt {backend.name}.{next(iter(chosen))}={next(iter(chosen.values()))!r} must be taken or refused in "
                f"words: {type(error).__name__}: {error}",
                guess="an option whose value is not checked",
            ) from None
        return True

    if takes({NO_OPTION: "1"}):
        raise Finding(
            f"--attn-opt {backend.name}.{NO_OPTION}=1 must be refused: no such option is declared",
            guess="unknown options are silently ignored",
        )
    for key in backend.options:
        if takes({key: NO_VALUE}):
            raise Finding(
                f"--attn-opt {backend.name}.{key}={NO_VALUE!r} must be refused: nothing can mean that",
                guess=f"option {key} is silently ignored",
            )
    if not backend.options:
        raise Skipped("no options are declared; an unknown one is refused")
    return ""


def _need(ok: bool, got: str, need: str) -> None:
    if not ok:
        raise Finding(f"{got}; needs {need}", guess="a claim that does not hold")
