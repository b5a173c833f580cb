"""What `--show-cache` draws: it fits a terminal, reads without colours, and its letters add up to its numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headway.cli.engine_view import picture
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from sandbox import Result
from tiny_engine import TinyModel, drain

CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**19, max_num_batched_tokens=64)


class Windowed(TinyModel):
    """Its first layer sees ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        spec: AttentionSpec = self.attention_specs[0]
        self.attention_specs = [replace(spec, sliding_window=10), spec]


def drawn(engine: EngineLoop) -> str:
    out = io.StringIO()
    Console(file=out, width=80, no_color=True).print(picture(engine.cache_usage()))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def test_blocks_are_drawn_by_sequence_and_group(registry: Registry) -> None:
    engine = make_engine(EngineParts(model=Windowed(), source=registry, config=CONFIG))
    params = SamplingParams(temperature=0, max_tokens=30)
    engine.add_request("first", engine.limits.checked(list(range(40)), params))
    for _ in range(9):
        engine.step()
    engine.add_request("second", engine.limits.checked([*range(32), 7], params))  # after 32 tokens of the first
    engine.step()
    text = drawn(engine)
    assert "group 0: 1 layer keeps every token" in text
    assert "group 1: 1 layer sees 10 tokens" in text
    assert re.findall(r"(\w+), (\d+) tokens: (\d+) blocks\n +([a-z]+)", text) == [
        ("first", "49", "7", "ssssooo"),
        ("second", "33", "5", "sssso"),
        ("first", "49", "7", "gggggoo"),
        ("second", "33", "5", "gggso"),  # found again, though the first has given it back
    ]
    assert re.findall(r"^(\d) +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE) == [
        ("0", "511", "8", "0", "0"),
        ("1", "511", "4", "4", "6"),
    ]
    assert "\npool  01c......" in text
    drain(engine)
    assert all(group.used == 0 < group.cached for group in engine.cache_usage().groups)


def test_generate_draws_the_cache_beside_the_text(headway: Callable[..., Result], tiny_model_folder: Path) -> None:
    arguments = ("generate", "--model", str(tiny_model_folder), "--max-tokens", "20", "--ignore-eos", "--block-size", "8")
    result = headway(*arguments, "--show-cache", "the quick fox")
    assert result.code == 0, result
    assert "layers keep every token\n  0, " in result.err
    assert re.search(r"^0 +\d[\d,]* +[34] +0 +0$", result.err, re.MULTILINE), result.err
    assert "pool  0" in result.err
    assert "reserved" not in result.out
