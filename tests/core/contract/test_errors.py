"""Messages name what their reader types: flags on the command line, arguments in Python."""

from __future__ import annotations

import pickle

import pytest

from headway.core.contract.errors import ConfigError, with_arguments

NAMES = ("attn_backend", "kv_layout", "block_size", "kv_cache_dtype", "dtype", "max_model_len")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("kv_layout: needs x, got y (--kv-layout x)", 'kv_layout: needs x, got y (kv_layout="x")'),
        (
            "nearest fix: --attn-backend prefill=auto,decode=x --kv-layout nhd --block-size 16",
            'nearest fix: attn_backend="prefill=auto,decode=x", kv_layout="nhd", block_size=16',
        ),
        ("choose another --dtype", "choose another dtype"),
        ("--max-model-len: needs 3, got 4", "max_model_len: needs 3, got 4"),
        ("a smaller --max-model-len or --block-size 8, or fewer", "a smaller max_model_len or block_size=8, or fewer"),
        ("--unknown 3 (--block-size)", "--unknown 3 (block_size)"),
        ("type headway check NAME --dtype float32", "type headway check NAME --dtype float32"),
    ],
)
def test_flags_are_written_as_arguments(text: str, written: str) -> None:
    assert with_arguments(text, NAMES) == written


def test_the_command_line_keeps_its_flags() -> None:
    error = ConfigError("kv_layout", "x", "y", "--kv-layout x")
    error.name_arguments(NAMES)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == 'kv_layout: needs x, got y (kv_layout="x")'
    assert again.on_command_line == "kv_layout: needs x, got y (--kv-layout x)"
