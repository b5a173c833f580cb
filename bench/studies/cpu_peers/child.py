"""Headway or transformers in a process of its own. Arguments and result are those of `llama_child`, with engine and dtype."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from headway.models.checkpoints.locate import locate


def headway(asked: dict[str, Any]) -> Callable[[list[list[int]], int], None]:
    """What writes `new` tokens for each prompt by Headway's engine."""
    from headway import LLM, SamplingParams

    # Without the prefix cache: the passes' prompts are the same, and the other engines compute them each time.
    llm = LLM(
        asked["path"], dtype=asked["dtype"], device="cpu", attn_backend=asked["backend"], enable_prefix_caching=False
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        llm.generate(prompts, params)

    return generate


def transformers(asked: dict[str, Any]) -> Callable[[list[list[int]], int], None]:
    """The same by transformers' generate."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, asked["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(locate(asked["path"]), dtype=dtype)

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
            )

    return generate


def main() -> None:
    """Print the rates of the work that the first argument names."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    generate = {"headway": headway, "transformers": transformers}[asked["engine"]](asked)
    rates = []
    for count, prompt, new, passes in asked["work"]:
        draw, passed = random.Random(0), []
        prompts = [[draw.randrange(3, 49000) for _ in range(prompt)] for _ in range(count)]
        for _ in range(passes + 1):
            began = time.perf_counter()
            generate(prompts, new)
            passed.append(count * new / (time.perf_counter() - began))
        rates.append(passed[1:])
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
