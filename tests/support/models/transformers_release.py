"""Features of transformers that tests need, with the first release that has them; tests are skipped on older ones."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

SINCE = {
    "DeepseekV2ForCausalLM": "5.15",  # its experts in groups raise before 5.13, and YaRN's factor is not in its scale before 5.15
    "DiffLlamaForCausalLM": "5.13",  # as RecurrentGemma: knows no attention but its own before
    "RecurrentGemmaForCausalLM": "5.13",
    "the defaults in config_defaults.json": "5.24",
    "generate with Headway's attention": "5.17",
    "continuous batching with Headway's attention": "5.19",
}


def needs(what: str) -> None:
    """Skip the test where SINCE names a later transformers than is installed. What SINCE does not name, every release has."""
    first = SINCE.get(what)
    if first is not None and Version(transformers.__version__) < Version(first):
        pytest.skip(f"{what} needs transformers {first}, got {transformers.__version__}", allow_module_level=True)
