"""Sizes that engine and backends agree on, without importing torch."""

from __future__ import annotations

from typing import Final

BLOCK_MULTIPLE: Final = 8
"""Every block size of an engine is a multiple of this: no kernel reads smaller steps."""
