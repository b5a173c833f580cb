"""Which models of transformers the adapter takes, as far as their classes and configurations tell; `model` looks at the rest."""

from __future__ import annotations

from typing import Any

from headway.core.contract.errors import ModelError


def causal_lm_class(config: Any) -> Any:
    """The class by which transformers makes text with a model of this configuration (PreTrainedConfig).

    :raises ModelError: there is none, or it is one that cannot run on Headway's attention, with the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = ", ".join(config.architectures or [config.model_type])
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ModelError(f"model architecture: {named} generates no text in transformers: it has no causal language model of it")
    reason = refusal(found, config)
    if reason:
        raise ModelError(f"model architecture: {found.__name__} {reason}")
    if config.architectures and found.__name__ not in config.architectures:
        raise ModelError(f"model architecture: needs {found.__name__} for model_type={config.model_type}, got {named}")
    return found


def refusal(model_class: Any, config: Any) -> str:
    """Why a class of transformers cannot run through the adapter: the end of a sentence that begins with its name; or empty."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder with a decoder; Headway computes decoders alone"
    if config.get_text_config() is not config:
        return "reads more than text (its config.json has a text_config beside others); Headway runs models of text alone"
    if getattr(model_class, "_is_stateful", False):
        return "keeps a state of each sequence beside keys and values (_is_stateful in transformers), which Headway does not"
    if not model_class._supports_attention_backend:
        return (
            "computes its attention by itself: it ignores transformers' attention interface (_supports_attention_backend is "
            "False), through which Headway's attention and cache would serve it"
        )
    return ""
