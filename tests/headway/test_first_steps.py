"""A start that is done has imported all that requests need: the first request waits for no import."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import run_python

REQUESTS = """
import sys
from headway import LLM, SamplingParams

llm = LLM(sys.argv[1], device=sys.argv[2], autotune_budget=0, num_threads=1)
before = set(sys.modules)
plain = SamplingParams(temperature=0, max_tokens=4)
drawn = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=1, n=2, max_tokens=4)
counted = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1, logprobs=2, prompt_logprobs=1, max_tokens=4)
llm.generate(["Hello", "The capital of France is"], [plain, counted], use_tqdm=False)
llm.chat([{"role": "user", "content": "Hello"}], drawn, use_tqdm=False)
for _ in llm.stream("Hello", plain):
    pass
# Standard modules (a codec, a lock) take microseconds.
later = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names)
assert not later, f"{len(later)} modules imported after the start: {later[:9]}"
"""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_imported_after_the_start(device: str, tmp_path: Path) -> None:
    script = tmp_path / "requests.py"
    script.write_text(REQUESTS)
    result = run_python(str(script), "smollm2", device, cwd=tmp_path)
    assert result.code == 0, result.err
