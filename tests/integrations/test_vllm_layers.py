"""What vLLM hands a layer and a step, and the names by which its users choose, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.backends.sdpa import SDPAMath
from headway.core.contract.backend import StepLimits
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import write_rows
from headway.core.contract.metadata import Phase
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.registry import Registry, create_registry
from headway_vllm.layers import LayerOptions, check_exact_lengths, make_selector
from headway_vllm.metadata import Rows, parts_of
from headway_vllm.planner import Planner, Step, attend, graph_backend
from headway_vllm.request import VARIABLE, environment_request, member_names
from headway_vllm.warming import warm
from tiny_engine import registering
from vllm_steps import SIZE, SPEC, VllmStep

GIVEN = {"num_heads": 4, "head_size": 8, "scale": 0.3, "num_kv_heads": 2, "kv_cache_dtype": "auto", "attn_type": "decoder"}


def test_a_layers_arguments_become_a_spec() -> None:
    plain = LayerOptions.of({**GIVEN, "alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None})
    assert plain.spec(torch.float32, torch.device("cpu")) == SPEC
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rich = {**GIVEN, "sliding_window": 64, "logits_soft_cap": 30.0, "alibi_slopes": [0.5] * 4, "sinks": sinks}
    spec = LayerOptions.of(rich).spec(torch.bfloat16, torch.device("cpu"))
    assert (spec.sliding_window, spec.softcap, spec.alibi_slopes, spec.sinks) == (64, 30.0, (0.5,) * 4, (1.0, 2.0, 3.0, 4.0))
    assert LayerOptions.of({"num_heads": 4, "head_size": 8, "scale": 1.0}).num_kv_heads == 4


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


STEPS = {
    "decodes": [(1, 5), (1, 16), (1, 33)],
    "prompts": [(5, 5), (20, 20)],
    "chunks": [(4, 20), (17, 40)],
    "all": [(1, 9), (1, 1), (1, 48), (7, 7), (3, 35), (1, 20)],  # the last one is no decode: vLLM put it behind a prompt
}


def select(request: str, registry: Registry, spec: object = SPEC) -> Selector:
    layers = LayerSpecs([spec])  # type: ignore[list-item]
    return Selector(registry, layers, BackendRequest.parse(request), kv_layout="nhd", block_size=SIZE)


def planner(request: str = "sdpa.math", registry: Registry | None = None, spec: object = SPEC, **options: bool) -> Planner:
    selector = select(request, registry or registering(), spec)
    return Planner([spec], selector, SIZE, 192, 8, **options)  # type: ignore[list-item]


def run(step: VllmStep, plan: Step, write: bool = True) -> Tensor:
    out = torch.full_like(step.tensors[0], torch.nan)
    attend(plan, 0, step.tensors, step.cache, write_rows if write else None, out)
    return out


def check(step: VllmStep, out: Tensor) -> None:
    expected = step.expected()
    real = ~expected.isnan().any(-1).any(-1)
    assert real.any()
    torch.testing.assert_close(out[: len(expected)][real].double(), expected[real], rtol=1e-5, atol=1e-6)
    assert out[len(expected) :].isnan().all()  # rows of padding are left alone


@pytest.mark.parametrize("memory", ["0.24", "0.29"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_computed_and_its_keys_are_written(name: str, memory: str) -> None:
    step = VllmStep.of(STEPS[name], memory, extra=3)
    check(step, run(step, planner().step(step.common)))
    k, v = step.cache.gather(step.common.slot_mapping)
    assert torch.equal(k, step.tensors[1][: len(k)])
    assert torch.equal(v, step.tensors[2][: len(v)])


def test_padding_of_a_graph_is_decodes_of_length_0() -> None:
    step = VllmStep.of([(1, 5), (1, 20)], padding=2)
    parts = parts_of(step.common, SIZE, Rows(4, torch.device("cpu")))
    assert parts.prefill is None
    assert parts.decode.query_lens == [1, 1, 1, 1]
    assert parts.decode.kv_lens == [5, 20, 0, 0]
    assert parts.decode.context_lens.tolist() == [4, 19, 0, 0]
    check(step, run(step, planner().step(step.common)))


def test_padded_row_without_tokens_is_no_decode() -> None:
    step = VllmStep.of([(1, 5), (1, 20)])
    lens = torch.tensor([5, 20, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    table = torch.cat([step.common.block_table_tensor, torch.zeros(1, 12, dtype=torch.int32)])
    step.common = replace(
        step.common, num_reqs=3, seq_lens=lens, seq_lens_cpu_upper_bound=lens, query_start_loc=starts, block_table_tensor=table
    )
    step.common.query_start_loc_cpu = starts
    assert planner().step(step.common).num_decode_tokens == 2
    check(step, run(step, planner().step(step.common)))


def test_metadata_are_views_of_vllms_tensors() -> None:
    step = VllmStep.of(STEPS["all"])
    parts = parts_of(step.common, SIZE, Rows(8, torch.device("cpu")))
    for part in (parts.decode, parts.prefill):
        for name in ("seq_lens", "block_table", "slot_mapping"):
            memory = getattr(step.common, {"block_table": "block_table_tensor"}.get(name, name)).untyped_storage().data_ptr()
            assert getattr(part, name).untyped_storage().data_ptr() == memory, name
    assert parts.prefill.phase is Phase.EXTEND
    assert parts.prefill.query_start_loc.tolist() == [0, 7, 10, 11]
    assert parts.prefill.context_lens.tolist() == [0, 32, 19]


def test_lengths_missing_on_the_host_are_bounded_for_decodes_and_read_for_prompts() -> None:
    step = VllmStep.of([(1, 5), (1, 20), (6, 30)]).without_host_lengths()
    parts = parts_of(step.common, SIZE, Rows(8, torch.device("cpu")))
    assert parts.decode.upper_bound_lens
    assert parts.decode.kv_lens == [30, 30]
    assert parts.prefill.kv_lens == [30]


def test_a_step_that_is_not_causal_is_refused() -> None:
    step = VllmStep.of(STEPS["prompts"])
    with pytest.raises(ConfigError, match="needs causal attention"):
        planner().step(replace(step.common, causal=False))


def test_each_part_has_the_backend_that_was_asked_for() -> None:
    step = VllmStep.of(STEPS["all"])
    plan = planner("prefill=sdpa,decode=sdpa.math").step(step.common)
    assert (plan.decode.backends[0].name, plan.prefill.backends[0].name) == ("sdpa.math", "sdpa")
    check(step, run(step, plan))


def test_a_layer_whose_cache_another_one_fills_takes_its_keys_from_there() -> None:
    step = VllmStep.of(STEPS["all"])
    plan = planner().step(step.common)
    first = run(step, plan)
    step.tensors = step.tensors[0], torch.full_like(step.tensors[1], torch.nan), torch.full_like(step.tensors[2], torch.nan)
    assert torch.equal(run(step, plan, write=False), first)


class Told(SDPAMath):
    """Captured in graphs, and writes in decode: it tells what it was asked for."""

    name = "told"
    capabilities = Capabilities(phases=frozenset(Phase), devices=("cpu",))
    graph_level = GraphLevel.DECODE
    told: list[object]

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self.told, self.decode_writes = [], True

    def plan_for_capture(self, metadata):
        self.told.append(("capture", metadata.kv_lens))
        return [metadata]

    def plan_for_replay(self, plan, metadata) -> None:
        self.told.append(("replay", metadata.kv_lens))
        plan[:] = self.plan(metadata)

    def write_and_decode(self, q, k, v, cache, plan, out) -> None:
        self.told.append("writes")
        write_rows(k, v, cache, self.slots)
        self.decode(q, cache, plan, out)


def test_a_captured_decode_keeps_its_plan_and_is_told_each_steps_lengths() -> None:
    made = planner("told", registering(told=Told))
    step = VllmStep.of([(1, 5), (1, 20)], padding=1)
    lens = step.common.seq_lens.clone()
    step.common.seq_lens_cpu_upper_bound = lens
    captured = made.captured_step(step.common)
    backend = captured.decode.backends[0]
    assert isinstance(backend, Told)
    assert step.common.seq_lens.tolist() == [1, 1, 1]  # what the capture ran with
    step.common.seq_lens.copy_(lens)
    backend.slots = step.common.slot_mapping
    replayed = made.step(step.common)
    assert replayed.decode is captured.decode
    assert backend.told == [("capture", [192] * 3), ("replay", [5, 20, 0])]
    check(step, run(step, replayed))
    assert backend.told[-1] == "writes"
    moved = replace(step.common, seq_lens=step.common.seq_lens.clone())
    assert made.step(moved).decode is not captured.decode  # a graph would not read that memory
    assert planner("told", registering(told=Told), may_write=False).step(step.common).decode_writes == [False]


def test_a_graph_takes_only_a_backend_that_can_be_captured() -> None:
    registry = registering(told=Told)
    assert graph_backend(select("told", registry), 4) == "told"
    assert graph_backend(select("prefill=told,decode=sdpa", registry), 4) is None


def test_warming_up_runs_every_phase_and_leaves_the_cache_as_it_was() -> None:
    step = VllmStep.of(STEPS["all"])
    for tensor in step.cache.tensors.values():
        tensor.nan_to_num_()
    before = [tensor.clone() for tensor in step.cache.tensors.values()]
    selector = select("prefill=sdpa.math,decode=told", registering(told=Told))
    assert warm(selector, {SPEC: step.cache}, write_rows, StepLimits(24, 3, 20)) > 12
    assert all(torch.equal(*pair) for pair in zip(before, step.cache.tensors.values(), strict=True))


def test_warming_up_names_a_backend_that_raises_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Falls(Told):
        name = "falls"

        def decode(self, *_: object) -> None:
            raise RuntimeError("it fell over")

    selector = select("prefill=sdpa.math,decode=falls", registering(falls=Falls))
    assert warm(selector, {SPEC: VllmStep.of(STEPS["all"]).cache}, write_rows, StepLimits(8, 2, 20)) > 1
    assert "falls in decode: RuntimeError: it fell over" in caplog.text


def test_vllm_is_imported_only_where_its_classes_are_subclassed() -> None:
    folder = Path(__file__).resolve().parents[2] / "integrations/headway-vllm/headway_vllm"
    for path in folder.glob("*.py"):
        top = [line for line in path.read_text().splitlines() if line.startswith(("import vllm", "from vllm"))]
        assert not top or path.name == "backends.py"
