"""What is handed to the kernels: number, order and types of the arguments as the sources declare them, with no GPU in sight."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from headway.backends.vllm_paged import decode
from headway.backends.vllm_paged.decode import CSRC, PagedDecode
from headway.core.contract.layout import VLLM_5D, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch

pytest.importorskip("cuda.bindings")

CPU = torch.device("cpu")
BLOCK_SIZE, HEAD_DIM, KV_HEADS = 16, 64, 2


@dataclass
class Launched:
    """One launch: what the source declares, and what was handed in under those names."""

    function: str
    declared: list[tuple[str, str]]
    config: Launch
    arguments: dict[str, Any]


class Recorder:
    """In place of a loaded kernel."""

    def __init__(self, launches: list[Launched], variant: Variant, function: str) -> None:
        self.launches, self.function = launches, function
        self.declared = declared(variant.source, function)
        self.most_shared = 0

    def allow_shared(self, shared_bytes: int) -> None:
        self.most_shared = max(self.most_shared, shared_bytes)

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        assert launch.shared_bytes <= self.most_shared
        names = [name for _, name in self.declared]
        self.launches.append(Launched(self.function, self.declared, launch, dict(zip(names, arguments.values, strict=True))))


def declared(source: str, function: str) -> list[tuple[str, str]]:
    """(type, name) of each parameter of a kernel in the sources."""
    text = re.sub(r"//.*", "", (CSRC / source).read_text())
    found = re.search(rf"{function}\(([^)]*)\) \{{", text)
    assert found is not None
    pairs = [parameter.rpartition(" ") for parameter in " ".join(found[1].split()).split(", ")]
    return [(kind, name) for kind, _, name in pairs]


def agrees(kind: str, value: object) -> bool:
    """Whether `Arguments` packs `value` with the size that the kernel reads."""
    if kind.endswith("*") or kind == "long long":
        return type(value) is int
    return type(value) is {"int": numpy.int32, "float": numpy.float32}[kind]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    made: list[Launched] = []

    def load(variant: Variant, function: str, device: torch.device) -> Recorder:
        return Recorder(made, variant, function)

    machine = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(decode, "load", load)
    monkeypatch.setattr(decode, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
    return made


def cache_of(num_blocks: int) -> LayerCache:
    return VLLM_5D.allocate(CacheGeometry(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, CPU))


def decoded(
    lens: list[int], partitions: int, **changes: Any
) -> tuple[PagedDecode, Callable[[], None], torch.Tensor, torch.Tensor]:
    """A decode of sequences with these contexts: its kernels' owner, what runs it, q and out."""
    spec = AttentionSpec(8, KV_HEADS, HEAD_DIM, 0.125, torch.bfloat16, CPU, **changes)
    tables = [[number % 4] * -(-(length + 1) // BLOCK_SIZE) for number, length in enumerate(lens)]
    step = AttentionMetadata.build([1] * len(lens), lens, tables, BLOCK_SIZE, CPU, decode_query_len=1).decode
    assert step is not None
    owner = PagedDecode(spec, BLOCK_SIZE, (2, partitions))
    q, out = (torch.zeros(len(lens), 12, HEAD_DIM, dtype=torch.bfloat16)[:, 2:10] for _ in range(2))
    plan = owner.plan(step)
    return owner, lambda: owner.run(q, cache_of(4), plan, out), q, out


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 70, "softcap": 30.0}, {"alibi_slopes": (0.5,) * 8, "sinks": (1.0,) * 8}],
    ids=["plain", "window and cap", "slopes and sinks"],
)
def test_decode_hands_in_what_the_kernels_declare(launches: list[Launched], changes: dict[str, Any], partitions: int) -> None:
    _, run, q, out = decoded([5, 300, 40], partitions, **changes)
    run()
    assert [launch.function for launch in launches] == ["paged_attention", "reduce_partitions"][: 1 if partitions == 1 else 2]
    for launch in launches:
        for kind, name in launch.declared:
            assert agrees(kind, launch.arguments[name]), (kind, name, launch.arguments[name])
        given = launch.arguments
        assert (given["kv_heads"], given["group"], given["partitions"]) == (KV_HEADS, 4, partitions)
        assert (given["out"], given["out_stride_token"], given["out_stride_head"]) == (out.data_ptr(), 12 * 64, 64)
        assert given["window"] == changes.get("sliding_window", 0)
        assert (given["sinks"] != 0) == ("sinks" in changes)
    first = launches[0]
    assert (first.arguments["q"], first.arguments["q_stride_token"]) == (q.data_ptr(), 12 * 64)
    assert first.arguments["cap"] == pytest.approx(changes.get("softcap", 0.0) * 1.442695)
    assert (first.arguments["slopes"] != 0) == ("alibi_slopes" in changes)
    assert first.config.grid == (KV_HEADS, partitions, 3)
    assert first.config.block == (64, 1, 1)
    assert not first.config.overlaps
    if partitions > 1:
        assert launches[1].config.grid == (KV_HEADS, 4, 3)
        assert launches[1].config.overlaps, "the second kernel starts while the first still runs"
        assert launches[1].arguments["partials"] == first.arguments["partial"]
        assert launches[1].arguments["states"] == first.arguments["state"]


def test_layers_share_what_a_plan_prepared(launches: list[Launched]) -> None:
    _, run, _, _ = decoded([5, 300], 3)
    run()
    run()
    assert launches[0].config is launches[2].config
    assert launches[1].config is launches[3].config


def test_no_sequence_launches_nothing(launches: list[Launched]) -> None:
    empty = AttentionMetadata.build([], [], [], BLOCK_SIZE, CPU, decode_query_len=1)
    owner, _, q, out = decoded([5], 1)
    if empty.decode is not None:
        owner.run(q[:0], cache_of(4), owner.plan(empty.decode), out[:0])
    assert launches == []


def test_the_writer_and_the_copies_hand_in_what_the_kernels_declare(launches: list[Launched]) -> None:
    cache, other = cache_of(4), cache_of(4)
    rows = torch.zeros(40, 3 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    _, k, v = rows.split(KV_HEADS, dim=1)
    decode.write_rows(k, v, cache, torch.arange(40))
    pairs = torch.tensor([[0, 1], [2, 3]])
    decode.swap_blocks(cache.key, cache.value, other.key, other.value, pairs)
    for launch in launches:
        for kind, name in launch.declared:
            assert agrees(kind, launch.arguments[name]), (kind, name, launch.arguments[name])
    write, copy = launches
    assert write.config.grid == (KV_HEADS, 3, 1)
    assert (write.arguments["new_k"], write.arguments["new_v"]) == (k.data_ptr(), v.data_ptr())
    assert (write.arguments["k_stride_token"], write.arguments["v_stride_head"]) == (3 * KV_HEADS * HEAD_DIM, HEAD_DIM)
    assert (write.arguments["num_tokens"], write.arguments["k_scale"]) == (40, 1.0)
    assert copy.arguments == {
        "from_key": cache.key.data_ptr(),
        "from_value": cache.value.data_ptr(),
        "to_key": other.key.data_ptr(),
        "to_value": other.value.data_ptr(),
        "pairs": pairs.data_ptr(),
        "vectors": BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2 // 16,
    }
