"""JSON files of pydantic models, written whole or not at all, and read with the first fault named."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text, write_whole

Model = TypeVar("Model", bound=BaseModel)


def write_json(model: BaseModel, path: Path, option: str = "--output") -> None:
    """Write a model whole or not at all: a reader never sees half a file, and a failed write leaves the old one.

    option: the one that names the file, for the error.

    :raises ConfigError: the folder cannot be written to.
    """
    write_bytes(f"{model.model_dump_json(by_alias=True, indent=1)}\n".encode(), path, option)


def write_bytes(content: bytes, path: Path, option: str = "--output") -> None:
    """Write a file of the user's as `write_whole` does. option: the one that names it, for the error.

    :raises ConfigError: it cannot be written; an old file is as it was.
    """
    try:
        write_whole(path, content, durable=True)
    except OSError as error:
        old = "; the file that is there is as it was" if path.is_file() else ""
        got = f"{path}, which cannot be written ({error.strerror or error})"
        raise ConfigError(option, "a file in a folder that can be written to", got + old) from error


def read_json(path: Path, kind: type[Model], schema: str) -> Model:
    """Read a file that `write_json` wrote.

    :raises ConfigError: missing, not JSON, of another schema, or with a field that cannot be; the first fault is named.
    """
    need = f"a JSON file of schema {schema}"
    try:
        return kind.model_validate_json(read_text(path))
    except UnicodeDecodeError as error:
        raise ConfigError("result file", need, str(path), "it is no text") from error
    except OSError as error:
        raise ConfigError("result file", need, str(path), error.strerror or str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        hint = f"{error.error_count()} fault(s)" if error.error_count() > 1 else ""
        raise ConfigError(f"result file {path}", need, f"{place}: {first['msg']}", hint) from error
