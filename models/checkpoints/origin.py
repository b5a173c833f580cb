"""What a user says of where a model comes from: a revision, a folder for downloads, and values in place of its config.json's."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.contract.errors import ConfigError
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown


class ModelOrigin(NamedTuple):
    """Options of loading that say which files a model has."""

    revision: str | None = None
    """Branch, tag or commit on a Hugging Face hub; None: its main branch."""
    download_dir: str | None = None
    """Folder that a hub's files are fetched to; None: huggingface_hub's own."""
    hf_overrides: Mapping[str, Any] | None = None
    """Values in place of those of config.json; a mapping for text_config is merged into it."""

    def view(self, folder: Path) -> Path:
        """The folder, or where values are overridden one of links to its files, beside a config.json with those values.

        :raises ConfigError: values that are no JSON.
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
    """Link to each file of a folder but its config.json; several processes may do so at once."""
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
