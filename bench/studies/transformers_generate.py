"""transformers' `generate` with Headway's backends beside its own attention: one model, one process, taking turns.

    python -m headway.bench.studies.transformers_generate --model smollm2 --implementations "sdpa;headway" \
        --work 1x128/64,8x128/64

A work BATCHxPROMPT/NEW is a batch of random prompts of equal length and greedy new tokens; the best of several passes counts, and
the tokens of each implementation are compared with the first one's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import headway.integrations.transformers as integration
from headway.models.checkpoints.locate import SHAPES, locate, shape_names
from headway.tuning.measure.device import resolve_device


def load(name: str, dtype: torch.dtype, device: Any) -> Any:
    """A model of `locate`, or one of Headway's shapes with random weights, wide enough that tokens differ clearly."""
    if name not in shape_names():
        return AutoModelForCausalLM.from_pretrained(locate(name), dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES / name), dtype=dtype).eval()  # type: ignore[no-untyped-call]
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in parameter_name:
            torch.nn.init.normal_(parameter, 0, parameter.shape[1] ** -0.5)
    return model


def measure(model: Any, work: str, implementation: str, cache: str, passes: int) -> dict[str, Any]:
    """Output tokens a second, and the tokens of the last pass."""
    batch, lengths = work.split("x")
    prompt, new = map(int, lengths.split("/"))
    ids = torch.randint(3, model.config.vocab_size, (int(batch), prompt), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    model.set_attn_implementation(implementation)
    wanted = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "cache_implementation": cache}
    wanted |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "disable_compile": True}
    rates = []
    for _ in range(passes + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            tokens = model.generate(ids, **wanted)[:, prompt:].cpu()
        rates.append(tokens.numel() / (time.perf_counter() - started))
    return {"tok_s": max(rates[1:]), "passes": rates, "tokens": tokens}


def compare(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Where the tokens of two implementations first differ."""
    if torch.equal(expected, found):
        return "equal"
    differing = expected != found
    rows = int(differing.any(1).sum())
    return f"{rows} of {len(found)} differ, first at token {int(differing.any(0).int().argmax())}"


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2", help="as for headway generate; a shape such as qwen3-0.6b has random weights"
    )
    parser.add_argument("--implementations", default="sdpa;headway", help="the first is what the others are compared with")
    parser.add_argument("--work", default="1x128/64,8x128/64")
    parser.add_argument("--caches", default="dynamic,static")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    device = resolve_device(chosen.device)
    model = load(chosen.model, getattr(torch, chosen.dtype), device)
    implementations = [
        integration.register(name.partition(":")[2]) if ":" in name else name for name in chosen.implementations.split(";")
    ]
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    software = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{chosen.model}, {chosen.dtype}, {machine}, {software}; output tokens a second")
    results = []
    for work in chosen.work.split(","):
        for cache in chosen.caches.split(","):
            own: tuple[float, torch.Tensor] | None = None
            for implementation in implementations:
                found = measure(model, work, implementation, cache, chosen.passes)
                rate, tokens = found["tok_s"], found.pop("tokens")
                own = own or (rate, tokens)
                ratio, text = rate / own[0], compare(own[1], tokens)
                print(f"{work:>14} {cache:>8} {implementation:>34} {rate:9.1f} {ratio:6.2f}x  {text}", flush=True)
                place = {"work": work, "cache": cache, "implementation": implementation}
                results.append({**place, "ratio": ratio, "tokens": text, **found})
    if chosen.json is not None:
        report = {"model": chosen.model, "dtype": chosen.dtype, "device": machine, "software": software, "results": results}
        chosen.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
