"""Which steps a backend may write itself, and what a step calls then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend_cases import spec
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.execution.attention import PagedAttention
from headway.core.engine.execution.host_rows import HostResults, Launched
from headway.core.select.request import LayerSpecs

BLOCK_SIZE = 4
PLAIN, WRITING = spec(), spec(sliding_window=5)


class Noting(AttentionBackend):
    """Notes what it is asked for, beside what the writer is."""

    name = "noting"
    capabilities = Capabilities(phases=frozenset(Phase), devices=("cpu",))

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        self.calls.append("prefill")

    def decode(self, q: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        self.calls.append("decode")

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: AttentionMetadata, out: Tensor) -> None:
        assert len(q) == len(k) == len(v) == len(out) == plan.num_seqs
        out.copy_(q)
        self.calls.append("write_and_decode")


class Steps:
    """Two layers, the second of a spec whose backend writes in decode; what each step called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.backends = {}
        for layer in (PLAIN, WRITING):
            backend = self.backends[layer] = Noting(layer, NHD, BLOCK_SIZE)
            backend.calls = self.calls
        self.backends[WRITING].decode_writes = True
        geometry = CacheGeometry(8, BLOCK_SIZE, PLAIN.num_kv_heads, PLAIN.head_dim, PLAIN.dtype, PLAIN.device)
        caches = [NHD.allocate(geometry) for _ in range(2)]
        self.attention = PagedAttention(LayerSpecs([PLAIN, WRITING]), caches, lambda *_: self.calls.append("write"))

    def metadata(self, lens: list[tuple[int, int]], decode_query_len: int = 1) -> AttentionMetadata:
        queries, contexts = zip(*lens, strict=True)
        self.num_tokens = sum(queries)
        return AttentionMetadata.build(
            queries, contexts, [[2 * row, 2 * row + 1] for row in range(len(lens))], BLOCK_SIZE, decode_query_len=decode_query_len
        )

    def run(self, layer: int, first: float = 1.0, again: bool = False) -> list[str]:
        self.calls.clear()
        q, k, v = (torch.ones(self.num_tokens, heads, PLAIN.head_dim) for heads in (4, 2, 2))
        q[0] = first
        (self.attention.again if again else self.attention)(layer, q, k, v)
        return list(self.calls)


@pytest.mark.parametrize(
    ("lens", "decode_query_len", "calls"),
    [
        ([(1, 3), (1, 5)], 1, ["write_and_decode"]),
        ([(1, 3), (1, -1)], 1, ["write_and_decode"]),  # a padding row
        ([(1, 0)], 1, ["write", "prefill"]),
        ([(3, 0), (1, 5)], 1, ["write", "prefill", "decode"]),
        ([(2, 3), (1, 5)], 1, ["write", "prefill", "decode"]),
        ([(2, 3), (1, 5)], 2, ["write", "decode"]),
    ],
    ids=["decode", "padded", "prompt of a token", "prefill beside it", "extend beside it", "verify"],
)
def test_only_decode_of_one_token_is_written_by_backends(
    lens: list[tuple[int, int]], decode_query_len: int, calls: list[str]
) -> None:
    steps = Steps()
    plain = ["write", "decode"] if calls == ["write_and_decode"] else calls  # of the layer whose backend does not write
    for _ in range(2):  # a step before leaves nothing behind
        steps.attention.begin(steps.metadata(lens, decode_query_len), steps.backends, steps.backends)
        assert steps.run(1) == calls
        assert steps.run(0) == plain
        assert steps.run(0, again=True) == steps.run(1, again=True) == plain[1:]  # of a layer that shares the cache
        steps.attention.begin(steps.metadata([(1, 3)]), steps.backends, steps.backends)
        assert steps.run(1) == ["write_and_decode"]


@pytest.mark.parametrize(("tokens", "call"), [(1, ["write_and_decode"]), (2, ["write", "decode"])])
def test_captured_decode_of_one_token_is_written_by_the_backend(tokens: int, call: list[str]) -> None:
    steps = Steps()
    steps.attention.begin_graph(steps.metadata([(tokens, 3)] * 2, decode_query_len=2), steps.backends)
    assert steps.run(1) == call
    assert steps.run(0) == ["write", "decode"]


@pytest.mark.parametrize("shares", [True, False])
def test_layers_that_differ_in_sinks_share_a_plan_where_their_backend_says_so(shares: bool) -> None:
    class Planning(Noting):
        capabilities = replace(Noting.capabilities, shares_plans=shares)

        def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
            planned.append(self.spec)
            return metadata

    planned: list[AttentionSpec] = []
    layers = [spec(sinks=(float(number),) * 4, sliding_window=window) for number in range(3) for window in (None, 8)]
    geometry = CacheGeometry(8, BLOCK_SIZE, PLAIN.num_kv_heads, PLAIN.head_dim, PLAIN.dtype, PLAIN.device)
    attention = PagedAttention(LayerSpecs(layers), [NHD.allocate(geometry) for _ in layers], lambda *_: None)
    backends = {layer: Planning(layer, NHD, BLOCK_SIZE) for layer in layers}
    metadata = AttentionMetadata.build([3, 1], [0, 5], [[0, 1], [2, 3]], BLOCK_SIZE)
    attention.begin(metadata, backends, backends)
    assert planned == 2 * (layers[:2] if shares else layers)  # for the prompt, and for the decode
    planned.clear()
    plans = attention.begin_graph(AttentionMetadata.build([1], [5], [[0, 1]], BLOCK_SIZE), backends)
    assert planned == (layers[:2] if shares else layers)
    assert list(plans) == layers


def test_debug_mode_finds_a_nan_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    steps = Steps()
    steps.attention.begin(steps.metadata([(1, 3)]), steps.backends, steps.backends)
    assert steps.run(1) == ["write_and_decode"]
    assert steps.attention.first_nan is None
    steps.run(1, first=math.nan)
    assert "the model's operations before attention layer 1" in steps.attention.first_nan
    monkeypatch.setattr(steps.attention, "first_nan", None)
    monkeypatch.setattr(steps.backends[WRITING], "write_and_decode", lambda *arguments: arguments[-1].fill_(math.nan))
    steps.run(1)
    assert "noting, in attention layer 1" in steps.attention.first_nan


class Promises(Noting):
    """Says that it writes, and cannot."""

    write_and_decode = AttentionBackend.write_and_decode


def test_a_backend_that_cannot_keep_its_word_is_named() -> None:
    steps = Steps()
    steps.backends[WRITING] = Promises(WRITING, NHD, BLOCK_SIZE)
    steps.backends[WRITING].decode_writes = True
    steps.attention.begin(steps.metadata([(1, 3)]), steps.backends, steps.backends)
    with pytest.raises(BackendError, match="noting failed in decode .* noting does not write in decode"):
        steps.run(1)


def test_memory_is_reused_once_its_step_has_been_read() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(3)
    first, second = results.copy(tokens), results.copy(tokens + 10)
    tokens.fill_(99)  # as the next replay does
    assert first.wait().tolist() == [0, 1, 2]
    third = results.copy(tokens)
    assert third.memory.data_ptr() == first.memory.data_ptr() != second.memory.data_ptr()
    assert second.wait().tolist() == [10, 11, 12]


def test_tokens_of_a_step_stay_when_its_memory_is_reused() -> None:
    results = HostResults(4, torch.device("cpu"))
    launched = Launched(results.copy(torch.tensor([5, 6])), None)
    sampled = launched.wait()
    results.copy(torch.tensor([7, 8]))
    assert launched.wait() is sampled
    assert sampled.plain_tokens() == [5, 6]


def test_memory_of_a_step_nobody_waited_for_is_not_reused() -> None:
    results = HostResults(4, torch.device("cpu"))
    lost = results.copy(torch.tensor([1]))
    assert results.num_free == 0
    assert results.copy(torch.tensor([2])).memory.data_ptr() != lost.memory.data_ptr()


def test_memory_grows_to_the_largest_step() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(12).view(3, 4)
    small, large = results.copy(torch.tensor([5])), results.copy(tokens)
    assert large.wait().tolist() == tokens.tolist()
    assert small.wait().tolist() == [5]
    again = results.copy(tokens + 1)
    assert again.memory.data_ptr() == large.memory.data_ptr()
    assert again.wait().tolist() == (tokens + 1).tolist()
