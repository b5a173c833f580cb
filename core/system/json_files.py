"""JSON files of pydantic models. They are written atomically, and the error for an invalid file names the first fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text, write_whole
from headway.core.system.json_text import JsonError, parse_model

Model = TypeVar("Model", bound=BaseModel)


def write_json(model: BaseModel, path: Path, option: str = "--output") -> None:
    """Write a model to a file atomically. option: command-line option of the file, for errors.

    :raises ConfigError: if the file cannot be written.
    """
    write_bytes(f"{model.model_dump_json(by_alias=True, indent=1)}\n".encode(), path, option)


def write_bytes(content: bytes, path: Path, option: str = "--output") -> None:
    """Write a user's file atomically. option: command-line option of the file, for errors.

    :raises ConfigError: if the file cannot be written. The old file then remains.
    """
    try:
        write_whole(path, content, durable=True)
    except OSError as error:
        old = "; the old file is unchanged" if path.is_file() else ""
        got = f"{path}, which cannot be written ({error.strerror or error})"
        raise ConfigError(option, "a file in a folder that can be written to", got + old) from error


def read_json(path: Path, kind: type[Model], schema: str, written_by: str = "") -> Model:
    """Read a file that `write_json` wrote, and return its model. written_by: command that writes such files, for errors.

    :raises ConfigError: if the file is missing, not JSON, or invalid.
    """
    need = f"a file that {written_by} wrote" if written_by else f"a JSON file of schema {schema}"
    try:
        return parse_model(read_text(path), kind, str(path), any_number=True)
    except UnicodeDecodeError as error:
        raise ConfigError("result file", need, str(path), "it is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError("result file", need, str(path), error.strerror or str(error)) from error
    except JsonError as error:
        raise ConfigError(f"result file {path}", need, error.reason.got) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        hint = f"{error.error_count()} fault(s)" if error.error_count() > 1 else ""
        raise ConfigError(f"result file {path}", need, f"{place}: {first['msg']}", hint) from error


class ResultFile(BaseModel):
    """Results of one run of a command. Each subclass sets the name of its schema as the default of `schema_` (alias "schema")."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    written_by: ClassVar[str] = ""
    """Command that writes such files, for errors."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the results in a file. :raises ConfigError: see `read_json`."""
        schema: Any = cls.model_fields["schema_"].default
        return read_json(path, cls, schema, cls.written_by)
