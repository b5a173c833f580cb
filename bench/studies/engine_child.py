"""Another engine in its own process: `python -m headway.bench.studies.engine_child`, started by engines.py.

Reads one request and answers with events, as headway.bench.crossover.worker does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from headway.bench.crossover.worker_protocol import receive_request

Generate = Callable[[Sequence[list[int]], Sequence[int], float], Sequence[int]]
"""(prompts, output lengths, temperature) -> number of requested tokens that each request generated."""


@dataclass(frozen=True)
class Engine:
    """A peer engine that is ready."""

    version: str
    settings: str
    generate: Generate


def headway(request: dict[str, Any]) -> Engine:
    """Return Headway's offline LLM, with its prefix cache emptied before each generation."""
    from headway import LLM, SamplingParams

    given = {name: request[name] for name in ("load_format", "dtype", "device", "max_model_len", "max_num_seqs")}
    threads = request["threads"] if request["device"] == "cpu" else None
    llm = LLM(request["model"], skip_tokenizer_init=True, num_threads=threads, **given)

    def generate(prompts: Sequence[list[int]], output_lens: Sequence[int], temperature: float) -> list[int]:
        llm.engine.forget_prefixes()
        params = [SamplingParams(temperature=temperature, max_tokens=size, ignore_eos=True) for size in output_lens]
        return [len(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params, use_tqdm=False)]

    chosen = ", ".join(f"{phase.value}: {name}" for phase, name in llm.engine.selection.names.items())
    settings = f"torch {metadata.version('torch')}, {llm.num_threads} threads, {chosen}, prefix cache emptied"
    return Engine(metadata.version("headway"), settings, generate)


def vllm(request: dict[str, Any]) -> Engine:
    """Return vLLM's offline LLM."""
    library: Any = import_module("vllm")
    # On Hopper vLLM uses FlashInfer for gated delta prefill without checking that it is installed.
    without = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
    llm = library.LLM(
        model=request["folder"],
        load_format=request["load_format"],
        dtype=request["dtype"],
        tensor_parallel_size=request["tensor_parallel_size"],
        quantization=request["quantization"],
        skip_tokenizer_init=True,
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        enable_prefix_caching=False,
        **without,
    )

    def generate(prompts: Sequence[list[int]], output_lens: Sequence[int], temperature: float) -> list[int]:
        params = [
            library.SamplingParams(temperature=temperature, max_tokens=size, ignore_eos=True, detokenize=False)
            for size in output_lens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    settings = f"max_num_seqs {request['max_num_seqs']}, prefix caching off, no detokenisation"
    settings += ", Triton for gated delta prompts (no FlashInfer)" if without else ""
    return Engine(metadata.version("vllm"), settings, generate)


def nano_vllm(request: dict[str, Any]) -> Engine:
    """Return nano-vllm's LLM, which reads a tokenizer and weights from the model's folder."""
    library: Any = import_module("nanovllm")
    llm = library.LLM(request["folder"], enforce_eager=False, max_model_len=request["max_model_len"])

    def generate(prompts: Sequence[list[int]], output_lens: Sequence[int], temperature: float) -> list[int]:
        drawn = temperature or 0.6  # it rejects 0
        params = [library.SamplingParams(temperature=drawn, max_tokens=size, ignore_eos=True) for size in output_lens]
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return Engine(metadata.version("nano-vllm"), "CUDA graphs; draws at 0.6 where the workload is greedy", generate)


def transformers(request: dict[str, Any]) -> Engine:
    """Return transformers' `generate` on one left-padded batch: every request runs until the longest output is complete."""
    import torch

    library: Any = import_module("transformers")
    dtype = {"auto": "auto"}.get(request["dtype"]) or getattr(torch, request["dtype"])
    if request["load_format"] == "dummy":
        config = library.AutoConfig.from_pretrained(request["folder"])
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = library.AutoModelForCausalLM.from_pretrained(request["folder"], dtype=dtype)
    model = model.to(request["device"]).eval()

    def generate(prompts: Sequence[list[int]], output_lens: Sequence[int], temperature: float) -> list[int]:
        longest, most = max(map(len, prompts)), max(output_lens)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=request["device"])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=request["device"])
        drawn: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        )
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, min_new_tokens=most, max_new_tokens=most, pad_token_id=0, eos_token_id=None, **drawn
            )
        if request["device"] != "cpu":
            torch.cuda.synchronize()
        written = out.shape[1] - longest
        return [min(written, size) for size in output_lens]

    settings = f"generate, {model.config._attn_implementation}, one left-padded batch that runs to the longest output"
    return Engine(metadata.version("transformers"), settings, generate)


ENGINES: dict[str, tuple[str, Callable[[dict[str, Any]], Engine]]] = {
    "headway": ("headway", headway),
    "vllm": ("vllm", vllm),
    "nano-vllm": ("nanovllm", nano_vllm),
    "transformers": ("transformers", transformers),
}
"""Engine's name -> the required module, and the function that returns the engine."""


def main() -> None:
    """Answer the request with events: "ready", then for each workload "begin", "pass" before each generation, and "done". An
    error ends the events with "fatal"."""
    request, emit = receive_request()
    try:
        engine = ENGINES[request["engine"]][1](request)
        emit("ready", version=engine.version, settings=engine.settings)
        for work in request["workloads"]:
            emit("begin", label=work["label"])
            seconds = []
            for number in range(request["warmup"] + request["repeat"]):
                emit("pass")
                started = time.perf_counter()
                written = engine.generate(work["prompts"], work["output_lens"], work["temperature"])
                took = time.perf_counter() - started
                if list(written) != work["output_lens"]:
                    raise RuntimeError(
                        f"{work['label']}: {sum(written)} of {sum(work['output_lens'])} output tokens were written"
                    )
                seconds += [took] if number >= request["warmup"] else []
            emit("done", label=work["label"], seconds=seconds)
    except Exception as error:  # any error of a peer is reported
        emit("fatal", reason=" ".join(f"{type(error).__name__}: {error}".split())[:400])


if __name__ == "__main__":
    main()
