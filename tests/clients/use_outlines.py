# pip: outlines openai
"""Outlines: types of answers, by OpenAI's client."""

from typing import Literal

import openai
import outlines
from pydantic import BaseModel


class Pet(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]


model = outlines.from_openai(openai.OpenAI(), "smollm2")
assert Pet.model_validate_json(model("Name a pet.", Pet, max_tokens=40)).kind in ("cat", "dog")
