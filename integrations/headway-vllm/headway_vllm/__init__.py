"""Headway's attention backends inside vLLM: `--attention-backend HEADWAY` chooses by measured times, `HEADWAY_<NAME>` takes one.

vLLM calls `register` in each of its processes. README.md says which versions work and what is served.
"""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Make Headway's backends known to vLLM; calling it again does no harm.

    :raises UnknownVllmError: a vLLM with an attention interface that is not known, in one line.
    """
    from headway_vllm.generation import find_generation

    generation = find_generation()
    _log_as_vllm_does()

    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from headway_vllm.layers import registry
    from headway_vllm.request import AUTO, environment_request, member_names

    def path(member: str) -> str:
        return f"headway_vllm.backends.{member}"

    if generation.names_are_free:
        for member in (AUTO, *member_names(registry().backends)):
            if member not in AttentionBackendEnum.__members__:
                register_backend(member, path(member))
    else:
        register_backend(AttentionBackendEnum.CUSTOM, path("CUSTOM"))
    if current_platform.is_cpu() and environment_request() is not None:  # vLLM ignores the option there, so only if it was said
        register_backend(AttentionBackendEnum.CPU_ATTN, path("CPU_ATTN"))


def _log_as_vllm_does() -> None:
    """Show what was chosen, and why, among vLLM's own lines; vLLM sets their handlers and level up at a time of its own."""
    ours = logging.getLogger("headway")
    if not ours.handlers:  # a program that has set up Headway's log keeps it
        ours.parent = logging.getLogger("vllm")
