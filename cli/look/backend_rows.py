"""What `headway backends` shows of each backend, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headway.core.contract.capabilities import Capabilities
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.state import STATE_KINDS
from headway.core.contract.state_backend import StateCapabilities
from headway.core.contract.support import Support
from headway.registry import BackendEntry, Registry


def describe(registry: Registry, name: str) -> dict[str, Any]:
    """Describe an attention backend; its capabilities are known only where its module loads."""
    row = _identity(name, registry.backends[name], registry.availability(name))
    try:
        claims = registry.backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    return row | {
        **_shared_claims(claims, registry.layouts),
        "block_multiple": claims.block_multiple,
        "head_dims": claims.head_dims,
        "features": sorted(claims.features),
    }


def describe_states(registry: Registry, name: str) -> dict[str, Any]:
    """Describe a backend for layers with a state; see `describe`."""
    row = _identity(name, registry.state_backends[name], registry.state_availability(name))
    try:
        claims = registry.state_backend(name).capabilities
    except Exception:  # its reason is already in the row
        return row
    return row | {
        **_shared_claims(claims, registry.state_layouts),
        "state_kinds": [kind for kind in STATE_KINDS if kind in claims.kinds],
        "convolution": claims.convolution,
        "state_dtypes": _names(claims.state_dtypes),
        "key_dims": claims.key_dims,
        "value_dims": claims.value_dims,
        "max_draft_tokens": claims.max_draft_tokens,
    }


def _identity(name: str, entry: BackendEntry[Any], available: Support) -> dict[str, Any]:
    return {
        "name": name,
        "kind": entry.owner,
        "summary": entry.info.summary,
        "available": bool(available),
        "reasons": [str(reason) for reason in available.reasons],
    }


def _shared_claims(claims: Capabilities | StateCapabilities, layouts: Iterable[str]) -> dict[str, Any]:
    return {
        "phases": [phase.value for phase in Phase if phase in claims.phases],
        "layouts": [layout.name for layout in claims.layouts] if claims.layouts is not None else list(layouts),
        "dtypes": _names(claims.dtypes),
        "devices": list(claims.devices),
    }


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    return [DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes]
