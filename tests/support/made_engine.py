"""Engines of a model, backends and a configuration, as tests make them."""

from __future__ import annotations

from typing import Any

from headway.core.contract.model import Model
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.registry import Registry


def made_engine(model: Model, source: Registry, config: EngineConfig, **parts: Any) -> EngineLoop:
    """Make an engine. parts: other fields of EngineParts."""
    return make_engine(EngineParts(model=model, source=source, config=config, **parts))
