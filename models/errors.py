"""Why a model is not computed."""

from __future__ import annotations

from headway.core.contract.errors import ModelError


class BeyondDecoderError(ModelError):
    """A sound model that Headway's own decoder does not compute; transformers may."""
