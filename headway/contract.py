"""The stable names of the contract: what a backend, a layout or a test outside this repository may import.

They change only with `API_VERSION`. `headway.core` and everything else is Headway's own and may change in any release.
"""

from headway.core.contract.backend import API_VERSION, AttentionBackend, BackendInfo, Lengths, Plan, StepLimits
from headway.core.contract.capabilities import ALL_PHASES, FEATURES, Capabilities
from headway.core.contract.chat_parsers import CallSyntax, ChatContext, ChatParser, ChatParserInfo, ChatPiece, ReasoningSyntax
from headway.core.contract.compiled import announce_compilation
from headway.core.contract.errors import (
    BackendError,
    ConfigError,
    HeadwayError,
    ModelError,
    PluginError,
    PromptError,
    UnknownBackendError,
    UnsupportedError,
)
from headway.core.contract.experts import (
    ExpertsCapabilities,
    ExpertsConfig,
    ExpertsKernel,
    ExpertsKernelInfo,
    ExpertsSpec,
    ExpertsWeights,
)
from headway.core.contract.kernel import GraphLevel, Kernel, KernelInfo
from headway.core.contract.layout import (
    HND,
    LATENT,
    NHD,
    NHD_INT8,
    VLLM_5D,
    CacheGeometry,
    CacheLayout,
    CacheWriter,
    LayerCache,
    LayoutInfo,
)
from headway.core.contract.linear import LinearCapabilities, LinearKernel, LinearKernelInfo, LinearSpec
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, Proposer, ProposerInfo, ProposerOptions, SequenceProposer
from headway.core.contract.spec import DTYPES, KV_DTYPES, AttentionSpec
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    KEY_VALUE,
    STATE_KINDS,
    VALUE_KEY,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.contract.state_backend import StateBackend, StateBackendInfo, StateCapabilities
from headway.core.contract.support import YES, Reason, Support
from headway.core.contract.weights import Float4Weight, Float8Weight, Int4Weight, Int8Weight, Weight, WeightFormat

__all__ = [
    "ALL_PHASES",
    "API_VERSION",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "BackendError",
    "BackendInfo",
    "CHECKPOINT_TOKENS",
    "CacheGeometry",
    "CacheLayout",
    "CacheWriter",
    "CallSyntax",
    "Capabilities",
    "ChatContext",
    "ChatParser",
    "ChatParserInfo",
    "ChatPiece",
    "ConfigError",
    "DTYPES",
    "ExpertsCapabilities",
    "ExpertsConfig",
    "ExpertsKernel",
    "ExpertsKernelInfo",
    "ExpertsSpec",
    "ExpertsWeights",
    "FEATURES",
    "Float4Weight",
    "Float8Weight",
    "GraphLevel",
    "HND",
    "HeadwayError",
    "Int4Weight",
    "Int8Weight",
    "KEY_VALUE",
    "KV_DTYPES",
    "Kernel",
    "KernelInfo",
    "LATENT",
    "LayerCache",
    "LayoutInfo",
    "Lengths",
    "LinearCapabilities",
    "LinearKernel",
    "LinearKernelInfo",
    "LinearSpec",
    "LogitsProcessorInfo",
    "ModelError",
    "NHD",
    "NHD_INT8",
    "Phase",
    "Plan",
    "PluginError",
    "PromptError",
    "Proposer",
    "ProposerInfo",
    "ProposerOptions",
    "Reason",
    "ReasoningSyntax",
    "STATE_KINDS",
    "SequenceProposer",
    "StateBackend",
    "StateBackendInfo",
    "StateCache",
    "StateCapabilities",
    "StateLayout",
    "StateMetadata",
    "StateParameters",
    "StateSpec",
    "StepLimits",
    "Support",
    "UnknownBackendError",
    "UnsupportedError",
    "VALUE_KEY",
    "VLLM_5D",
    "Weight",
    "WeightFormat",
    "YES",
    "announce_compilation",
]
