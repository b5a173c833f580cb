"""What tells a model's weights from all others, for what is kept of its computations beyond this process."""

from __future__ import annotations

import hashlib

from headway.models.loader import LoadedModel

_WEIGHTS = (".safetensors", ".gguf", ".json")


def identity_of(model: LoadedModel, load_format: str) -> str:
    """A digest of the configuration's content, of the names, sizes and times of the weights' files, of what computes the model,
    and of the devices' kind and the element type in which it does so."""
    spec = model.decoder.attention_specs[0]
    digest = hashlib.blake2b(digest_size=16)
    parts: list[object] = [load_format, model.implementation, spec.dtype, spec.device.type]
    files = [model.folder] if model.folder.is_file() else sorted(model.folder.iterdir())
    for path in files:
        if path.suffix in _WEIGHTS and path.is_file():
            stat = path.stat()
            parts.append((path.name, stat.st_size, stat.st_mtime_ns))
            if path.name == "config.json":
                parts.append(path.read_bytes())
    digest.update(repr(parts).encode())
    return digest.hexdigest()
