"""Libraries called bare: who is there, who is not and why; and products over weights beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fake_flash_attn_3 import FlashAttn3
from headway.backends.flash_attn_3 import Library, Operators
from headway.bench.kernel import products
from headway.bench.kernel.contenders import KernelPeer
from headway.bench.kernel.linear_kernels import FORMS, LinearCandidates, ProductLayers, TimedProduct
from headway.bench.kernel.products import FORM_NAMES, ProductOptions, ProductTime, run_products_bench
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.bench.studies.kernel_peers import all_peers, page_lists, peers_of
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD
from headway.core.contract.support import YES
from headway.core.oracle.cases import reference
from headway.kernels.linear.linear import Linear
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


SHAPE = (64, 256)


def run(**changes: object) -> dict[tuple[str, int, str], ProductTime]:
    options = {"shapes": [SHAPE], "rows": (1, 3), "device": CPU, "timer": QUICK, "peak_gbps": 100.0, "peak_tflops": 1.0}
    options |= changes
    return {(cell.form, cell.rows, cell.way): cell for cell in run_products_bench(ProductOptions(**options)).cells}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_gets_the_ways_that_a_cpu_has(dtype: torch.dtype) -> None:
    cells = run(dtype=dtype)
    assert {form for form, _, _ in cells} == set(FORM_NAMES)
    for (form, _, way), cell in cells.items():
        assert cell.status == "ok", cell.reason
        assert 0 < cell.p20_us <= cell.median_us <= cell.p80_us
        assert cell.relative_error < (1e-5 if dtype == torch.float32 else 1e-2)
        assert cell.chosen or (form, way) == ("int4", "expanded") or form == "plain"
    ways = {way for form, _, way in cells if form == "int4"}
    packed = ProductLayers.drawn(SHAPE, "int4", CPU, dtype).linears[0].reads_quantized
    assert ways == ({"packed", "expanded"} if packed else {"expanded"})
    assert cells["int4", 1, "expanded"].chosen == ("packed" not in ways)


def test_floors_are_of_the_stored_bytes_or_of_the_operations() -> None:
    cells = run(forms=["fp8", "plain"], rows=(1, 50))
    out_features, in_features = SHAPE
    stored = out_features * in_features + 4 * out_features  # and a scale a row
    one, many = cells["fp8", 1, "expanded"], cells["fp8", 50, "expanded"]
    assert one.floor_us == pytest.approx((stored + 4 * (out_features + in_features)) / 100e3)
    assert many.floor_us == pytest.approx(2 * 50 * out_features * in_features / 1e6)
    assert (one.bound, many.bound) == ("bytes", "operations")
    plain = next(cell for (form, rows, _), cell in cells.items() if (form, rows) == ("plain", 1))
    assert plain.floor_us == pytest.approx(4 * (out_features * in_features + out_features + in_features) / 100e3)


def wrong(x: Tensor, linear: Linear) -> Tensor:
    return linear(x) * 1.02


def raises(x: Tensor, linear: Linear) -> Tensor:
    raise RuntimeError("it\nfell over")


def test_a_wrong_answer_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(layers: ProductLayers, dtype: torch.dtype, device: torch.device) -> LinearCandidates:
        steps = {"wrong": wrong, "raises": raises, "right": lambda x, linear: linear(x)}
        return LinearCandidates(lambda x: [TimedProduct(name, step, layers.linears) for name, step in steps.items()])

    monkeypatch.setattr(products, "candidates_of", spoilt)
    cells = run(forms=["fp8"], rows=(3,))
    assert {way: cell.status for (_, _, way), cell in cells.items()} == {"wrong": "incorrect", "raises": "error", "right": "ok"}
    assert [cell.median_us is None for cell in cells.values()] == [True, True, False]
    assert "relative error 0.02" in cells["fp8", 3, "wrong"].reason
    assert cells["fp8", 3, "raises"].reason == "RuntimeError: it fell over"


def test_layers_are_larger_together_than_a_cache_or_sixteen() -> None:
    assert [len(ProductLayers.drawn(SHAPE, form, CPU).linears) for form in FORMS] == [16] * len(FORMS)
    large = ProductLayers.drawn((2048, 8192), "bf16", CPU, torch.bfloat16)
    assert len(large.linears) * large.num_bytes == 2 * 32 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "fp8", "fp8-blocks", "mxfp4", "plain"])
def test_the_engines_ways_are_right_on_a_gpu(form: str) -> None:
    device = torch.device("cuda", 0)
    report = run_products_bench(ProductOptions([(256, 512)], [form], (1, 40, 300), device=device, timer=QUICK))
    assert {cell.status for cell in report.cells} == {"ok"}, [cell.reason for cell in report.cells]
    chosen = [cell.rows for cell in report.cells if cell.chosen]
    assert chosen == ([] if form == "plain" else [1, 40, 300])
