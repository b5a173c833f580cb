"""Options of backends from `--attn-opt`, and conversion of numeric options."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.contract.errors import ConfigError

Options = Mapping[str, str] | None
"""Option name -> value, for one backend. None means that no option is given."""


def count_of(backend: str, options: Options, name: str, most: int | None = None) -> int | None:
    """Return the integer given by `--attn-opt BACKEND.NAME`, or None if the option is not given.

    :raises ConfigError: if the value is not an integer between 1 and `most`.
    """
    text = (options or {}).get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1 or (most is not None and int(text) > most):
        need = "a number of at least 1" if most is None else f"a number from 1 to {most}"
        raise ConfigError(f"--attn-opt {backend}.{name}", need, repr(text))
    return int(text)
