"""Headway: LLM inference with the attention kernel that is fastest on this machine for each batch."""

from typing import TYPE_CHECKING, Any

__all__ = [
    "AsyncLLM",
    "LLM",
    "LLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineSnapshot",
    "HeadwayError",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "create_registry",
    "hookimpl",
]

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.beam_search import BeamSearchParams
    from headway.core.contract.adapters import LoRARequest
    from headway.core.contract.errors import HeadwayError
    from headway.core.engine.data.stats import EngineSnapshot
    from headway.core.sampling.logprobs import Logprob
    from headway.core.sampling.params import RequestOutputKind, SamplingParams
    from headway.core.sampling.structured import StructuredOutputsParams
    from headway.engine_args import EngineArgs
    from headway.hosting.host import EngineDeadError
    from headway.llm import LLM
    from headway.llm_engine import LLMEngine
    from headway.outputs import CompletionOutput, EmbeddingRequestOutput, PoolingParams, RequestOutput, ScoringRequestOutput
    from headway.registry import hookimpl
    from headway.requests.prompts import TextPrompt, TokensPrompt
    from headway.tuning.isolated.trial import create_registry
    from headway.version import __version__

_NAMES = {
    "headway.async_llm": "AsyncLLM",
    "headway.beam_search": "BeamSearchParams",
    "headway.core.contract.adapters": "LoRARequest",
    "headway.core.contract.errors": "HeadwayError",
    "headway.core.engine.data.stats": "EngineSnapshot",
    "headway.core.sampling.logprobs": "Logprob",
    "headway.core.sampling.params": "RequestOutputKind SamplingParams",
    "headway.core.sampling.structured": "StructuredOutputsParams",
    "headway.engine_args": "EngineArgs",
    "headway.hosting.host": "EngineDeadError",
    "headway.llm": "LLM",
    "headway.llm_engine": "LLMEngine",
    "headway.outputs": "CompletionOutput EmbeddingRequestOutput PoolingParams RequestOutput ScoringRequestOutput",
    "headway.registry": "hookimpl",
    "headway.requests.prompts": "TextPrompt TokensPrompt",
    "headway.tuning.isolated.trial": "create_registry",
    "headway.version": "__version__",
}
"""Module name -> the public names that this package re-exports from it."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562), so that `import headway` takes milliseconds and does not import torch."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
