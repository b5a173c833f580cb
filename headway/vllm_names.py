"""Names of vLLM's offline API that Headway lacks, and what comes nearest here; options of LLM itself are in engine_args."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headway.core.contract.unknown import refuse_unknown

_NO_ADAPTERS: Final = "not supported yet: merge the adapter into its model with peft's merge_and_unload()"
_TEXT_ALONE: Final = "not supported yet, because models read text alone"
_OWN_TOKENIZER: Final = "tokenise by hand with get_tokenizer() and pass the ids"

CALL_KEYWORDS: Final = {
    "lora_request": _NO_ADAPTERS,
    "prompt_adapter_request": _NO_ADAPTERS,
    "tokenization_kwargs": _OWN_TOKENIZER,
    "mm_processor_kwargs": _TEXT_ALONE,
    "chat_template_content_format": 'leave it out: messages take texts, and lists of {"type": "text"} parts',
    "guided_options_request": "SamplingParams(structured_outputs=...) says the form of a completion",
    "prompt_token_ids": 'pass them as prompts: a list of ids, or {"prompt_token_ids": ids}',
    "params": "it is called sampling_params",
}
"""Keywords of generate and chat -> what to do."""

_METHODS: Final = {
    "encode": "Headway generates text; get_tokenizer() turns texts into ids",
    "embed": "Headway generates text, and has no embedding models yet",
    "classify": "Headway generates text; structured_outputs with a choice of labels classifies",
    "score": "Headway generates text; prompt_logprobs scores a text",
    "reward": "Headway generates text",
    "beam_search": "SamplingParams(best_of=..., n=...) returns the likeliest of several completions",
    "start_profile": "headway bench throughput --profile FILE writes a trace",
    "stop_profile": "headway bench throughput --profile FILE writes a trace",
    "sleep": "del llm frees the device's memory",
    "wake_up": "del llm frees the device's memory",
    "collective_rpc": "Headway runs a model in this process: llm.model.decoder is it",
    "apply_model": "Headway runs a model in this process: llm.model.decoder is it",
    "get_metrics": "llm.stats() has the engine's counters",
    "llm_engine": "it is called engine",
    "set_tokenizer": "the tokenizer of the model's folder is used",
}
"""Attributes of LLM -> what to do."""


def check_keywords(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keywords that a method does not take; one of vLLM's that is None asks for nothing.

    :raises ConfigError: with what comes nearest.
    """
    asked = [name for name, value in given.items() if value is not None or name not in CALL_KEYWORDS]
    refuse_unknown(owner, asked, known, CALL_KEYWORDS, "docs/sampling.md")


def missing_attribute(name: str) -> AttributeError:
    """What reading an attribute raises that LLM lacks."""
    hint = f": {_METHODS[name]}" if name in _METHODS else ""
    return AttributeError(f"LLM has no attribute {name!r}{hint}")
