"""Libraries called bare: who is there, who is not and why, and that nobody is imported unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fake_flash_attn_3 import FlashAttn3
from headway.backends.flash_attn_3_library import Library, Operators
from headway.bench.kernel.contenders import KernelPeer
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.bench.studies.kernel_peers import all_peers, page_lists, peers_of
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD
from headway.core.contract.support import YES
from headway.core.oracle.cases import reference
from headway.registry import Registry
from headway.tuning.measure.workloads import build_case
from tiny_bench import CPU, QUICK, SMALL, cell_of


def test_a_peer_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"flashinfer\.fa2"):
        peers_of("decode", ["nobody"])
    assert [peer.name for peer in peers_of("prefill", ["flash_attn"])] == ["flash_attn"]
    assert "xformers.splitk" in {peer.name for peer in peers_of("decode", None)}
    assert "xformers.splitk" not in {peer.name for peer in peers_of("prefill", None)}


def test_absent_peers_are_listed_with_the_reason(registry: Registry) -> None:
    options = KernelOptions(
        peers=all_peers(), geometries=[SMALL], cases=["2q1s9"], backends=["sdpa"], block_sizes=[16], device=CPU, timer=QUICK
    )
    report = run_kernel_bench(options, registry)
    peers = {contender.name: contender for contender in report.contenders if contender.owner == "peer"}
    assert {"flash_attn", "flashinfer.fa2", "flashinfer.fa3", "flash_attn_4", "xformers.splitk"} <= set(peers)
    for peer in peers.values():
        assert not peer.available
        assert "device: needs cuda, got cpu" in peer.reason
    assert [cell.backend for cell in report.cells] == ["sdpa"]


@pytest.mark.parametrize(
    ("phase", "case"), [("prefill", "2q9"), ("prefill", "1q5s300_2q3s40"), ("decode", "3q1s200"), ("decode", "2q4s40")]
)
def test_flash_attention_3_bare_serves_every_phase(monkeypatch: pytest.MonkeyPatch, phase: str, case: str) -> None:
    fake = FlashAttn3()
    found = Library("a stand-in", Path("/nowhere"), Operators.of(fake.namespace))
    monkeypatch.setattr("headway.bench.studies.kernel_peers.find_library", lambda: (found, YES))
    peer = next(peer for peer in all_peers() if peer.name == "flash_attn_3.bare")
    assert peer.available(torch.device("cuda"))
    assert peer.version == "a stand-in"
    assert peer.supports(cell_of(phase, case, dtype=torch.bfloat16))
    built = build_case(cell_of(phase, case), NHD, peer.block_size, 0)
    out = peer.prepare(built)()
    right = reference(built)
    assert float((out.double() - right).norm() / right.norm()) < 1e-6
    assert fake.names == ["fwd"]


def test_peers_refuse_what_the_bare_call_cannot_do() -> None:
    flash, fa2 = (next(peer for peer in all_peers() if peer.name == name) for name in ("flash_attn", "flashinfer.fa2"))
    half = {"dtype": torch.bfloat16}
    assert flash.supports(cell_of("decode", "2q1s40", **half))
    assert flash.supports(cell_of("decode", "2q4s40", **half))
    assert "query_len" in str(fa2.supports(cell_of("decode", "2q4s40", **half)))
    assert "query_len" in str(flash.supports(cell_of("decode", "1q1s40_1q2s40", **half)))
    assert "dtype" in str(flash.supports(cell_of("decode", "2q1s40")))
    assert "kv_dtype" in str(flash.supports(cell_of("decode", "2q1s40", kv_dtype=torch.float8_e4m3fn, **half)))
    assert "extend" in str(flash.supports(cell_of("prefill", "1q7s20", **half)))


@pytest.mark.slow
def test_a_peer_stands_beside_backends_in_one_run(registry: Registry) -> None:
    class Plain(KernelPeer):
        """What a library would be: the reference, unplanned."""

        name, distribution, package, block_size = "plain", "torch", "torch", 8

        def available(self, device):
            return YES

        def probe(self):
            return None

        def decode(self, case):
            assert case.cache.layout == NHD
            assert case.cache.block_size == 8
            return lambda: reference(case).to(case.q.dtype)[:, None]

        def prefill(self, case):
            return lambda: reference(case).to(case.q.dtype) * 2  # wrong

    for phase, case, status in (("decode", "2q1s20", "ok"), ("prefill", "2q5", "incorrect")):
        options = KernelOptions(phase, ["sdpa"], [Plain()], [SMALL], [case], torch.bfloat16, device=CPU, timer=QUICK)
        cell = run_kernel_bench(options, registry).cells[-1]
        assert (cell.backend, cell.owner, cell.status) == ("plain", "peer", status), cell.reason
        assert cell.block_size == (8 if phase == "decode" else None)


def test_flashinfers_form_of_a_block_table() -> None:
    step = build_case(cell_of("decode", "1q1s32_1q1s33_1q1s5"), NHD, 16, seed=0).metadata
    indptr, blocks, last = page_lists(step)
    assert indptr.tolist() == [0, 2, 5, 6]
    assert last.tolist() == [16, 1, 5]
    assert blocks.tolist() == [*step.block_table_cpu[0, :2], *step.block_table_cpu[1, :3], step.block_table_cpu[2, 0]]
    assert {tensor.dtype for tensor in (indptr, blocks, last)} == {torch.int32}
