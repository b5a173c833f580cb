"""Keywords of vLLM's methods and attributes of its LLM that Headway lacks, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headway.compat.vllm.reasons import TEXT_ALONE, of_each
from headway.core.contract.errors import refuse_unknown

CALL_KEYWORDS: Final = {
    "prompt_adapter_request": "not supported: adapters are of low rank (LoRA), by lora_request",
    "lora_request": "not supported here: adapters are for models that generate text",
    "tokenization_kwargs": "tokenise by hand with get_tokenizer() and pass the ids",
    "mm_processor_kwargs": TEXT_ALONE,
    "guided_options_request": "SamplingParams(structured_outputs=...) says the form of a completion",
    "reasoning_ended": "not supported: a structured output begins with the completion",
    "data_parallel_rank": "not supported: docs/replicas.md has several engines",
    "params": "it is called sampling_params",
}
"""Keywords of vLLM's generate, chat and add_request -> what to do."""

_ASKS_NOTHING: Final[Mapping[str, tuple[object, ...]]] = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "trace_headers": (None, {}),
    "tokenization_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Keyword -> values beside None that change nothing here."""

METHODS: Final = {
    **of_each("pause_generation resume_generation is_paused", "not supported here: headway serve has /pause and /resume"),
    "save_sharded_state": "not supported: each rank reads its part of the model's own files",
    "set_tokenizer": "the option tokenizer names another tokenizer",
    **of_each("init_weight_transfer_engine update_weights", "not supported: collective_rpc hands a function load_weights"),
    **of_each("enqueue wait_for_completion", "llm_engine has add_request and step"),
}
"""Attributes of vLLM's LLM and LLMEngine -> what to do."""


def check_keywords(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keywords that a method does not take, except those of vLLM's that ask for nothing.

    :raises ConfigError: an unknown keyword, with what comes nearest.
    """
    asked = [name for name, value in given.items() if not _asks_nothing(name, value)]
    refuse_unknown(owner, asked, known, CALL_KEYWORDS, "docs/sampling.md")


def _asks_nothing(name: str, value: object) -> bool:
    if name not in CALL_KEYWORDS and name not in _ASKS_NOTHING:
        return False
    return value is None or any(value == each for each in _ASKS_NOTHING.get(name, ()))


def missing_attribute(name: str, owner: str = "LLM") -> AttributeError:
    """The error of reading an attribute that LLM, or another owner, lacks."""
    hint = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
