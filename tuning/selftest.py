"""A few small steps, held to float64, before a backend may be timed or chosen on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import torch

from headway.core.contract.errors import known_cause
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.testing.cases import make_case, parse_case
from headway.testing.reference import reference, relative_error, run_backend
from headway.tuning.measure_point import Pair
from headway.tuning.schema import BackendRecord

CASES = {
    Phase.PREFILL: (("2q17_1q5", 1),),
    Phase.EXTEND: (("1q7s20_1q16s33", 1),),
    Phase.DECODE: (("1q1s2_3q1s40", 1), ("2q4s21", 8)),
}
"""(case, most query tokens of a decode) of each phase."""
_POISON = 1e4
"""In slots that hold no token: finite, since some kernels may read them, and large enough to show in any sum."""


def examine(registry: Registry, names: Sequence[str], spec: AttentionSpec, pairs: Sequence[Pair]) -> list[BackendRecord]:
    """Say of each backend whether it is here, serves the layer at all, and computes it right on its first layout and block size.

    One that fails takes no part, and its record says why.
    """
    return [_record(registry, name, spec, pairs) for name in names]


def launch(registry: Registry, names: Sequence[str], spec: AttentionSpec, pairs: Sequence[Pair]) -> None:
    """Run every step of every backend, whatever comes of it: so that its kernels are compiled."""
    for name in names:
        for phase, cases in CASES.items():
            pair = _first_served(registry, name, spec, pairs, phase)
            if pair is not None:
                for text, decode_query_len in cases:
                    _wrong(registry, name, spec, pair, text, decode_query_len)


def _record(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair]) -> BackendRecord:
    owner = registry.backends[name].owner
    here = registry.availability(name)
    reason = here.brief if not here else self_test(registry, name, spec, pairs)
    return BackendRecord(name=name, owner=owner, version=version_of(owner), available=bool(here), reason=reason)


def self_test(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair]) -> str:
    """Why a backend must not be used on this machine; empty if nothing speaks against it."""
    tested = False
    refusal = ""
    for phase, cases in CASES.items():
        pair = _first_served(registry, name, spec, pairs, phase)
        if pair is None:
            refusal = refusal or registry.supports(name, spec, *pairs[0], phase).brief
            continue
        for text, decode_query_len in cases:
            tested = True
            wrong = _wrong(registry, name, spec, pair, text, decode_query_len)
            if wrong:
                return f"self-test: {phase.value} {text} on {pair[0].name} {pair[1]}: {wrong}"
    return "" if tested else refusal


def _first_served(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair], phase: Phase) -> Pair | None:
    return next((pair for pair in pairs if registry.supports(name, spec, *pair, phase)), None)


def _wrong(registry: Registry, name: str, spec: AttentionSpec, pair: Pair, text: str, decode_query_len: int) -> str:
    try:
        writer = registry.layout(pair[0].name).load_writer(spec.device)
        lens = parse_case(text, decode_query_len)
        case = make_case(lens, spec, *pair, writer, poison=_POISON, decode_query_len=decode_query_len)
        backend = registry.backend(name)(spec, *pair)
        found = relative_error(run_backend(backend, case), reference(case), case)
        tolerance = backend.tolerance[spec.dtype]
    except (Exception, SystemExit) as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        cause = known_cause(str(error))
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{f' ({cause})' if cause else ''}"
    return "" if found <= tolerance else f"relative error {found:.2g}, tolerance {tolerance:.2g}"


def owners(registry: Registry) -> dict[str, tuple[str, str]]:
    """Each backend's owner and the version of that distribution that is installed now; "" where it has none."""
    return {name: (entry.owner, version_of(entry.owner)) for name, entry in registry.backends.items()}


def version_of(owner: str) -> str:
    """The version of the distribution that brought a backend."""
    try:
        return metadata.version("headway" if owner == BUILTIN_OWNER else owner)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
