"""Where tables live: one file a device and kind of layer, in the user's cache folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from headway.core.contract.folders import cache_folder
from headway.tuning.identity import DeviceIdentity
from headway.tuning.schema import SpecRecord


def folder() -> Path:
    """The folder of all tables: crossover/ in Headway's cache folder."""
    return cache_folder() / "crossover"


def table_path(device: DeviceIdentity, spec: SpecRecord) -> Path:
    """The file that `auto` reads for a layer on a device, and that `headway bench crossover` writes unless told otherwise."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")[:48]
    heads = f"{spec.num_heads}-{spec.num_kv_heads}-{spec.head_dim}-{spec.dtype}"
    key = hashlib.sha256(repr((device.name, spec.kind)).encode()).hexdigest()[:8]
    return folder() / f"{name}-{heads}-{key}.json"


def stored() -> list[Path]:
    """All table files, the newest first."""
    return sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)
