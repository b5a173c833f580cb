"""Headway as a worker of NVIDIA Dynamo, whose frontend serves HTTP, tokenises, and routes requests to workers.

pip install "headway[serve]" msgspec pyzmq
pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
python headway_dynamo.py --model Qwen/Qwen3-0.6B --discovery-backend file
python -m dynamo.frontend --discovery-backend file --http-port 8000
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import yaml
from dynamo._core import Context
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import token_ids_to_list

from headway import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Sampling options with the same name in Dynamo and Headway. Dynamo checks stop strings, because it detokenizes."""
REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""Headway's finish_reason -> Dynamo's."""


class HeadwayEngine(LLMEngine):
    """Dynamo's engine interface for one AsyncLLM: tokens in, tokens out."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """options: keyword arguments of AsyncLLM."""
        self._model, self._options = model, options
        self._llm: AsyncLLM | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[HeadwayEngine, WorkerConfig]:
        """Return the engine, not yet started, and its registration with Dynamo."""
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--model", default="smollm2")
        parser.add_argument("--served-model-name", help="default: the model's name")
        parser.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="option of AsyncLLM, with the value as YAML; repeatable",
        )
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="headway")
        parser.add_argument("--endpoint", default="generate")
        parser.add_argument("--discovery-backend", default="etcd", choices=("etcd", "file", "kubernetes", "mem"))
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane", default="zmq")
        asked = parser.parse_args(argv)
        name = asked.served_model_name or asked.model
        config = WorkerConfig(
            namespace=asked.namespace,
            component=asked.component,
            endpoint=asked.endpoint,
            model_name=asked.model,
            served_model_name=name,
            discovery_backend=asked.discovery_backend,
            request_plane=asked.request_plane,
            event_plane=asked.event_plane,
            enable_kv_routing=False,
        )
        return cls(asked.model, {"skip_tokenizer_init": True, **dict(map(_option, asked.option))}), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. Dynamo sends requests afterwards."""
        del worker_id
        args = EngineArgs.of(self._model, **self._options)
        # A separate process: otherwise the engine's steps and the handling of Dynamo's requests would compete for the GIL.
        self._llm = llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args, own_process=True)
        facts = llm.facts
        return EngineConfig(
            model=self._model,
            llm=LlmRegistration(
                context_length=facts.limits.max_model_len,
                kv_cache_block_size=facts.block_size,
                total_kv_blocks=facts.num_blocks,
                max_num_seqs=facts.max_num_seqs,
            ),
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the tokens of a completion as they are generated. The last chunk has the finish reason."""
        assert self._llm is not None, "start comes first"
        prompt = token_ids_to_list(request["token_ids"])
        written: Counter[int] = Counter()
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params_of(request), context.id()):
            for completion in output.outputs:
                written[completion.index] += len(completion.token_ids)
                chunk: GenerateChunk = {"token_ids": list(completion.token_ids), "index": completion.index}
                if completion.finish_reason is not None:
                    chunk["finish_reason"] = REASONS.get(completion.finish_reason, "error")
                    chunk["completion_usage"] = {
                        "prompt_tokens": len(prompt),
                        "completion_tokens": written.total(),
                        "total_tokens": len(prompt) + written.total(),
                    }
                yield chunk

    async def abort(self, context: Context) -> None:
        """Abort a request whose client has disconnected."""
        if self._llm is not None:
            await self._llm.abort(context.id())

    async def cleanup(self) -> None:
        """Shut the engine down. Further calls do nothing."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


def params_of(request: GenerateRequest) -> SamplingParams:
    """Return the sampling parameters of a request, with defaults for missing options."""
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    found = {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    found |= {name: stop[name] for name in ("min_tokens", "ignore_eos") if stop.get(name) is not None}
    ends = [token for name in ("stop_token_ids", "stop_token_ids_hidden") for token in stop.get(name) or ()]
    return SamplingParams(
        **found,
        max_tokens=stop.get("max_tokens"),
        stop_token_ids=ends,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    run(HeadwayEngine)
