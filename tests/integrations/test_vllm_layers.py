"""What vLLM hands a layer, and the names by which its users choose, without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.select.backend_request import BackendRequest
from headway.registry import create_registry
from headway_vllm.layers import LayerOptions, check_exact_lengths, make_selector
from headway_vllm.request import VARIABLE, environment_request, member_names
from vllm_steps import SPEC

GIVEN = {"num_heads": 4, "head_size": 8, "scale": 0.3, "num_kv_heads": 2, "kv_cache_dtype": "auto", "attn_type": "decoder"}


def test_a_layers_arguments_become_a_spec() -> None:
    plain = LayerOptions.of({**GIVEN, "alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None})
    assert plain.spec(torch.float32, torch.device("cpu")) == SPEC
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rich = {**GIVEN, "sliding_window": 64, "logits_soft_cap": 30.0, "alibi_slopes": [0.5] * 4, "sinks": sinks}
    spec = LayerOptions.of(rich).spec(torch.bfloat16, torch.device("cpu"))
    assert (spec.sliding_window, spec.softcap, spec.alibi_slopes, spec.sinks) == (64, 30.0, (0.5,) * 4, (1.0, 2.0, 3.0, 4.0))
    alone = LayerOptions.of({"num_heads": 4, "head_size": 8, "scale": 1.0})
    assert alone.num_kv_heads == 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attn_type": "encoder_only"}, "needs decoder self-attention, got encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "got fp8"),
        ({"use_alibi_sqrt": True}, "got use_alibi_sqrt"),
        ({"indexer": "x"}, "got indexer"),
    ],
)
def test_a_layer_that_headway_does_not_compute_is_refused_in_one_line(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        LayerOptions.of({**GIVEN, **wrong})
    assert "\n" not in str(error.value)


def test_vllm_options_with_default_values_are_accepted() -> None:
    LayerOptions.of({**GIVEN, "use_alibi_sqrt": False, "chunk_lookback": -1, "kv_sharing_target_layer_name": None})


def test_every_backend_has_a_name_that_vllm_can_read() -> None:
    known = create_registry(load_entry_points=False).backends
    names = member_names(known)
    assert len(names) == len(known)
    assert names["HEADWAY_SDPA_MATH"] == "sdpa.math"
    assert all(name.isidentifier() and name == name.upper() for name in names)


def test_the_environment_says_what_else_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert environment_request() is None
    monkeypatch.setenv(VARIABLE, " prefill=hopper,decode=triton ")
    assert environment_request() == "prefill=hopper,decode=triton"


@pytest.mark.slow  # a refusal looks for every backend that would do instead
def test_a_request_that_cannot_be_served_says_why() -> None:
    with pytest.raises(UnsupportedError, match="hopper"):
        make_selector([SPEC], BackendRequest("hopper", "hopper"), 16)


def test_beside_drafts_a_backend_that_needs_exact_lengths_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        check_exact_lengths(make_selector([SPEC], BackendRequest("sdpa", "sdpa"), 16))


@pytest.mark.slow  # two processes that import torch
@pytest.mark.parametrize("what", ["nothing", "0.11"])
def test_another_vllm_is_refused_in_one_line_with_the_versions_that_work(what: str) -> None:
    """In a process of its own: a vllm that is not there, or has no such interface."""
    code = f"""
import sys
from types import ModuleType
if {what!r} != "nothing":
    vllm = ModuleType("vllm"); vllm.__version__ = {what!r}; vllm.__path__ = []; sys.modules["vllm"] = vllm
else:
    sys.modules["vllm"] = None
from headway_vllm import register
try: register()
except ImportError as error: print(error)
"""
    path = "integrations/headway-vllm"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path})
    (line,) = found.stdout.strip().splitlines()
    assert "needs vLLM 0.24 to 0.28 and 0.29 to 0.33" in line
    assert f"got {'none' if what == 'nothing' else what}" in line
