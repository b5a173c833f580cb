"""The FlashInfer plugin over a stand-in for the library: what it plans and runs is what the signatures of 0.6.4 take."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from grid import spec
from headway.core.contract.layout import LATENT
from headway.core.contract.metadata import Phase
from headway.testing.reference import reference, relative_error, run_backend
from latent import case_of

FILE = Path(__file__).resolve().parent.parent / "examples" / "headway-flashinfer" / "headway_flashinfer.py"
LAYER = spec(num_heads=3, num_kv_heads=1, head_dim=576, v_head_dim=512, value_in_key=True)


class Wrapper:
    """Plain attention with the library's parameters and its checks of types."""

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.int8

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {each.dtype for each in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (3, 512, 64, 16, True)
        self.steps = [each.tolist() for each in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)], sm_scale

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor) -> Tensor:
        (starts, pages, ids, lens), scale = self.steps
        for row, length in enumerate(lens):
            blocks, tokens = ids[pages[row] : pages[row + 1]], slice(starts[row], starts[row + 1])
            ckv, kpe = (cache[blocks].flatten(0, 1)[:length].double() for cache in (ckv_cache, kpe_cache))
            scores = (q_nope[tokens].double() @ ckv.T + q_pe[tokens].double() @ kpe.T) * scale
            n = starts[row + 1] - starts[row]
            later = torch.arange(length) > torch.arange(length - n, length)[:, None]
            if length:
                out[tokens] = (scores.masked_fill(later[:, None], -torch.inf).softmax(-1) @ ckv).to(out.dtype)
        return out


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    library = ModuleType("flashinfer.mla")
    library.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", library)
    found = importlib.util.spec_from_file_location("headway_flashinfer", FILE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case_name", ["decode ragged", "extend", "verify"])
def test_it_computes_latent_attention(plugin: ModuleType, case_name: str) -> None:
    case = case_of(case_name, LAYER, LATENT)
    backend = plugin.FlashInferLatent(LAYER, LATENT, 16)
    assert relative_error(run_backend(backend, case), reference(case), case) < 2e-6


def test_it_claims_absorbed_layers_alone_and_says_what_a_release_lacks(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(**changes: object) -> str:
        layer = spec(**{"num_heads": 3, "num_kv_heads": 1, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})
        return str(plugin.FlashInferLatent.supports(layer, LATENT, 16, Phase.DECODE))

    assert reasons(head_dim=576, v_head_dim=512, value_in_key=True) == "yes"
    assert "head_dim/v_head_dim: needs 576/512" in reasons(head_dim=80, v_head_dim=64, value_in_key=True)
    assert "head_dim" in reasons(head_dim=64)
    assert plugin.find_wrapper()[1]
    monkeypatch.setattr(Wrapper, "run", lambda self, query, kv_cache: None)
    assert "none named ckv_cache, kpe_cache, out, q_nope, q_pe" in str(plugin.find_wrapper()[1])


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) <= 150
