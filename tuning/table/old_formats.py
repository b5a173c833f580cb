"""Conversion of the five table formats before 2026-11-29 to `headway.table/1`, and the paths of their files."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Any

from headway.tuning.table.schema import SCHEMA, CountedRecord, DeviceIdentity, LayerRecord, slug

_COUNTED = {
    "headway.products/1": ("linear", "rows", "product", "rows"),
    "headway.experts/1": ("experts", "tokens", "layer", "tokens"),
    "headway.all-reduce/1": ("all_reduce", "bytes", "ranks", "sizes"),
}
"""Schema -> (kind of operation, phase, name of the layer field, name of the counts field)."""
OLD_NAMES = {"kernels": "backends", "kernel": "backend", "variant": "kernel", "schema": "file_schema"}
"""Field -> the field's name in an old file."""
_FOLDERS = {"attention": "crossover", "state": "crossover/states", "linear": "products"}
_UNPLACED = "unknown path"
HIDDEN = ", hidden size "
"""Text before the hidden size in the identity of a layer of experts. Old files lack the hidden size, so their times may be for a
different size."""


def schema_of(data: Any) -> object:
    """Return the schema that a file names, or None if it does not name one."""
    return data.get("schema", data.get("file_schema")) if isinstance(data, dict) else None


def upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of an old file converted to `headway.table/1`. Data of any other schema is returned unchanged."""
    schema = schema_of(data)
    if schema not in ("headway.crossover/1", "headway.states/1", *_COUNTED):
        return data
    own = {name: value for name, value in data.items() if name not in ("schema", "file_schema", "backends")}
    own |= {"schema": SCHEMA, "device": _device(data.get("device")), "kernels": data.get("backends")}
    if isinstance(prior := data.get("prior"), dict):
        own["prior"] = {**prior, "device": _device(prior.get("device"))}
    if schema in _COUNTED:
        return _counted(data, own["device"], str(schema))
    states = schema == "headway.states/1"
    cells = data.get("cells")
    if isinstance(cells, list):
        own["cells"] = [_cell(cell, states) if isinstance(cell, dict) else cell for cell in cells]
    return {**own, "kind": "state", "noise": 0.01} if states else {**own, "kind": "attention"}


def _device(found: Any) -> Any:
    """Return a device record in which cuBLAS and the path of ptxas are marked as unknown if the file lacks them."""
    known = found.get("compilers") if isinstance(found, dict) else None
    if not isinstance(known, dict) or found.get("type") != "cuda":
        return found
    placed = {name: f"{version} ({_UNPLACED})" if name == "ptxas" else version for name, version in known.items()}
    return {**found, "compilers": {**placed, "cublas": "unknown"}}


def _cell(cell: dict[str, Any], states: bool) -> dict[str, Any]:
    renamed = {{"backend": "kernel", "kernel": "variant", "verb": "phase"}.get(name, name): value for name, value in cell.items()}
    if states:
        helper = renamed.pop("convolution", "")
        renamed |= {"case": f"{cell.get('batch')}q{cell.get('query_len')}", "kv_len": cell.get("query_len")}
        renamed |= {"variant": f"convolution by {helper}" if helper else ""}
    return renamed


def _counted(data: dict[str, Any], place: Any, schema: str) -> dict[str, Any]:
    """Return the converted data of a table along one axis. Only measured times become cells. place: the device."""
    kind, phase, layer, numbers = _COUNTED[schema]
    us, device, origin, prior = (data.get(name) for name in ("us", "device", "origin", "prior"))
    counts, layer_name = data.get(numbers), data.get(layer)
    date = device.get("date") if isinstance(device, dict) else None
    cells = None  # None is rejected by the schema
    if isinstance(us, dict) and isinstance(counts, list) and all(isinstance(times, list) for times in us.values()):
        common = {"phase": phase, "status": "ok", "source": "prior" if prior else "measured"}
        cells = [
            {**common, "case": str(count), "batch": count, "kernel": name, "median_us": time}
            for name, times in us.items()
            for count, time in zip(counts, times, strict=False)
            if time is not None
        ]
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": date,
        "command": "",
        "complete": True,
        "noise": 0.01,
        "origin": origin,
        "device": place,
        "spec": {"layer": f"{layer_name} ranks" if kind == "all_reduce" else layer_name},
        "kernels": [{"name": name, "owner": "built-in", "available": True} for name in (us if isinstance(us, dict) else ())],
        "cells": cells,
        "prior": {"device": place, "origin": origin, "date": date, "differs": [prior]} if prior else None,
    }


def old_path(device: DeviceIdentity, spec: LayerRecord) -> PurePosixPath:
    """Return the path of an old-format table, relative to Headway's cache folder."""
    if spec.kind == "all_reduce":
        assert isinstance(spec, CountedRecord)
        return PurePosixPath("all_reduce", f"{slug(device.name)}-{slug(spec.layer)}.json")
    sizes, key = spec.sizes, spec.key
    if isinstance(spec, CountedRecord):
        key = re.sub(rf"{HIDDEN}\d+", "", spec.layer)
        sizes = slug(key)
    name = f"{slug(device.name)}-{sizes}-{hashlib.sha256(repr((device.name, key)).encode()).hexdigest()[:8]}.json"
    return PurePosixPath(_FOLDERS.get(spec.kind, spec.kind), name)
