"""The one table of vLLM's modules and names: what each is here, and why some are lacking.

A program that imports from `vllm` and its modules imports from `headway` and modules of the same names.
"""

from __future__ import annotations

from typing import Final

from headway.compat.vllm.reasons import NO_TRANSFER, TEXT_ALONE, of_each

_BATCH: Final = "headway.core.sampling.batch_processors"
_BEAMS: Final = "headway.beam_search"
_CONFIGS: Final = "headway.compat.vllm.configs"
_METRICS: Final = "headway.compat.vllm.metrics"
_OUTPUTS: Final = "headway.outputs"
_PARAMS: Final = "headway.core.sampling.params"
_PROMPTS: Final = "headway.requests.prompts"
_TOOLS: Final = "headway.compat.vllm.tools"

HOMES: Final = {
    "AdapterLogitsProcessor": f"{_BATCH}.RequestLogitsProcessors",
    "AsyncEngineArgs": "headway.engine_args.EngineArgs",
    "AsyncLLM": "headway.async_llm.AsyncLLM",
    "AsyncLLMEngine": "headway.async_llm.AsyncLLM",
    "BatchUpdate": f"{_BATCH}.BatchUpdate",
    "BeamSearchOutput": f"{_BEAMS}.BeamSearchOutput",
    "BeamSearchParams": f"{_BEAMS}.BeamSearchParams",
    "BeamSearchSequence": f"{_BEAMS}.BeamSearchSequence",
    "ChatCompletionMessageParam": f"{_PROMPTS}.Message",
    "ClassificationOutput": f"{_OUTPUTS}.ClassificationOutput",
    "ClassificationRequestOutput": f"{_OUTPUTS}.ClassificationRequestOutput",
    "CompilationConfig": f"{_CONFIGS}.CompilationConfig",
    "CompletionOutput": f"{_OUTPUTS}.CompletionOutput",
    "Counter": f"{_METRICS}.EngineCounter",
    "EmbedsPrompt": f"{_PROMPTS}.EmbedsPrompt",
    "EmbeddingOutput": f"{_OUTPUTS}.EmbeddingOutput",
    "EmbeddingRequestOutput": f"{_OUTPUTS}.EmbeddingRequestOutput",
    "EngineArgs": "headway.engine_args.EngineArgs",
    "EngineDeadError": "headway.hosting.host.EngineDeadError",
    "FlexibleArgumentParser": "headway.compat.vllm.arguments.FlexibleArgumentParser",
    "Gauge": f"{_METRICS}.EngineGauge",
    "GuidedDecodingParams": "headway.core.sampling.structured.StructuredOutputsParams",
    "Histogram": f"{_METRICS}.EngineHistogram",
    "LLM": "headway.llm.LLM",
    "LLMEngine": "headway.llm_engine.LLMEngine",
    "LoRARequest": "headway.core.contract.adapters.LoRARequest",
    "Logprob": "headway.core.sampling.logprobs.Logprob",
    "LogitsProcessor": f"{_BATCH}.BatchLogitsProcessor",
    "Metric": f"{_METRICS}.EngineMetric",
    "MoveDirectionality": f"{_BATCH}.MoveDirectionality",
    "PoolingOutput": f"{_OUTPUTS}.PoolingOutput",
    "PoolingParams": f"{_OUTPUTS}.PoolingParams",
    "PoolingRequestOutput": f"{_OUTPUTS}.PoolingRequestOutput",
    "PromptType": f"{_PROMPTS}.Prompt",
    "RequestLogitsProcessor": f"{_PARAMS}.LogitsProcessor",
    "RequestOutput": f"{_OUTPUTS}.RequestOutput",
    "RequestOutputKind": f"{_PARAMS}.RequestOutputKind",
    "SamplingParams": f"{_PARAMS}.SamplingParams",
    "ScoringOutput": f"{_OUTPUTS}.ScoringOutput",
    "ScoringRequestOutput": f"{_OUTPUTS}.ScoringRequestOutput",
    "StructuredOutputsParams": "headway.core.sampling.structured.StructuredOutputsParams",
    "TextPrompt": f"{_PROMPTS}.TextPrompt",
    "TokensPrompt": f"{_PROMPTS}.TokensPrompt",
    "UsageContext": f"{_CONFIGS}.UsageContext",
    "Vector": f"{_METRICS}.EngineVector",
    "VllmConfig": f"{_CONFIGS}.VllmConfig",
    "current_platform": f"{_TOOLS}.current_platform",
    "cleanup_dist_env_and_memory": f"{_TOOLS}.cleanup_dist_env_and_memory",
    "destroy_distributed_environment": f"{_TOOLS}.destroy_model_parallel",
    "destroy_model_parallel": f"{_TOOLS}.destroy_model_parallel",
    "get_open_port": f"{_TOOLS}.get_open_port",
    "get_tokenizer": f"{_TOOLS}.get_tokenizer",
    "init_logger": f"{_TOOLS}.init_logger",
    "load_chat_template": f"{_TOOLS}.load_chat_template",
    "process_dict_updates": f"{_BATCH}.process_dict_updates",
    "random_uuid": f"{_TOOLS}.random_uuid",
    "set_random_seed": f"{_TOOLS}.set_random_seed",
}
"""vLLM's name -> where it is here, as MODULE.NAME."""

LACKING: Final = {
    **of_each("LoRAConfig", "not supported as an object: enable_lora, max_loras and max_lora_rank are options"),
    **of_each(
        "ImageAsset VideoAsset AudioAsset fetch_image fetch_audio fetch_video encode_image_base64 encode_audio_base64 "
        "MultiModalDataDict MultiModalDataBuiltins convert_image_mode rescale_image_size ExplicitEncoderDecoderPrompt",
        TEXT_ALONE,
    ),
    "DataPrompt": "not supported: prompts are texts, token ids or embeddings",
    **of_each("KVTransferConfig KVEventsConfig ECTransferConfig", NO_TRANSFER),
    **of_each("ModelRegistry", "not supported: a model of transformers runs by model_impl='transformers'"),
    **of_each(
        "AttentionConfig PoolerConfig ProfilerConfig StructuredOutputsConfig SpeculativeConfig KernelConfig",
        "not supported as an object: the option takes a dict",
    ),
    **of_each("WeightTransferConfig", "not supported: load the new weights with a new LLM"),
}
"""vLLM's name -> why it is lacking. A stand-in is imported in its place, whose use raises."""

MODULES: Final = {
    "": "AsyncEngineArgs AsyncLLMEngine LLMEngine PoolingOutput PoolingParams PoolingRequestOutput PromptType ModelRegistry "
    "ClassificationOutput ClassificationRequestOutput EmbeddingOutput ScoringOutput",
    "assets": "",
    "assets.audio": "AudioAsset",
    "assets.image": "ImageAsset",
    "assets.video": "VideoAsset",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": "AttentionConfig CompilationConfig ECTransferConfig KVEventsConfig KVTransferConfig KernelConfig PoolerConfig "
    "ProfilerConfig SpeculativeConfig StructuredOutputsConfig VllmConfig WeightTransferConfig LoRAConfig",
    "distributed": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel",
    "distributed.parallel_state": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel",
    "engine": "",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints": "",
    "entrypoints.chat_utils": "ChatCompletionMessageParam load_chat_template",
    "entrypoints.llm": "LLM",
    "inputs": "DataPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType TextPrompt TokensPrompt",
    "inputs.data": "EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType TextPrompt TokensPrompt",
    "logger": "init_logger",
    "logprobs": "Logprob",
    "lora": "",
    "lora.request": "LoRARequest",
    "model_executor": "",
    "model_executor.utils": "set_random_seed",
    "multimodal": "MultiModalDataBuiltins MultiModalDataDict",
    "multimodal.image": "convert_image_mode rescale_image_size",
    "multimodal.utils": "encode_audio_base64 encode_image_base64 fetch_audio fetch_image fetch_video",
    "platforms": "current_platform",
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "sequence": "Logprob",
    "tokenizers": "get_tokenizer",
    "transformers_utils": "",
    "transformers_utils.tokenizer": "get_tokenizer",
    "usage": "",
    "usage.usage_lib": "UsageContext",
    "utils": "FlexibleArgumentParser random_uuid cleanup_dist_env_and_memory get_open_port",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port",
    "utils.torch_utils": "set_random_seed",
    "v1": "",
    "v1.engine": "",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.exceptions": "EngineDeadError",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics": "",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "v1.sample": "",
    "v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality RequestLogitsProcessor "
    "process_dict_updates",
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.sample.logits_processor.interface": "BatchUpdate LogitsProcessor MoveDirectionality",
}
"""vLLM's module, without its first word -> the names that programs import from it."""

LACKING_MODULES: Final = {
    "assets": TEXT_ALONE,
    "multimodal": TEXT_ALONE,
    "lora": "not supported: lora.request has LoRARequest, and docs/lora.md says what adapters may be",
    "distributed": NO_TRANSFER,
    "model_executor": "not supported: docs/models.md says which models run; model_impl='transformers' runs those of transformers",
    "envs": "not supported: docs/options.md has the options; Headway reads no variables of vLLM's but VLLM_TORCH_PROFILER_DIR",
    "attention": "not supported: docs/backends.md says how a backend is written",
    "v1.attention": "not supported: docs/backends.md says how a backend is written",
    "v1.executor": "not supported: tensor_parallel_size starts a process for each rank",
    "v1.worker": "not supported: tensor_parallel_size starts a process for each rank",
    "entrypoints.openai": "not supported: `headway serve` has OpenAI's API",
    "reasoning": "not supported here: headway serve parses answers of chats",
    "tool_parsers": "not supported here: headway serve parses answers of chats",
    "plugins": "not supported: docs/backends.md says how a plugin is registered",
    "benchmarks": "headway bench throughput and headway bench serve measure",
}
"""vLLM's module -> why it, or what lies below it, is lacking."""
