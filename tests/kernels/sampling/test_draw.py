"""The fused draw makes the tokens that torch's operations make: on a GPU, and (by test_interpreter.py) in the interpreter."""

from __future__ import annotations

import pytest
import torch

from headway.core.sampling.sampler import draw, greedy
from headway.core.sampling.verification import accept_drafts
from triton_interpreter import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab_size"),
    [(5, 4096), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 50), (3, 9001), (8, 20000)))],
)
def test_same_tokens_as_torch(device: str, dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    from headway.kernels.sampling.draw_kernels import FusedSampling

    fused = FusedSampling(torch.device(device))
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab_size + 3, generator=generator).to(device, dtype)[:, :vocab_size]
    scales = 1 / (torch.rand(rows, generator=generator).to(device) + 0.3)
    for _ in range(3):
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device)
        expected, got = draw(logits, scales, keys), fused.draw(logits, scales, keys)
        assert torch.equal(got, expected)
    if dtype == torch.float32:  # no ties
        assert torch.equal(fused.greedy(logits), greedy(logits))
    mixed, some = fused.draw(logits, scales * (torch.arange(rows, device=device) % 2), keys), torch.arange(rows) % 2 == 1
    assert torch.equal(mixed[some], got[some])
    assert torch.equal(mixed[~some], fused.greedy(logits)[~some]), "a row of scale 0 is greedy"
    chosen = logits.gather(1, fused.greedy(logits)[:, None])
    assert torch.equal(chosen, logits.amax(1, keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_out_never_comes(device: str) -> None:
    from headway.kernels.sampling.draw_kernels import FusedSampling

    logits = torch.full((64, 5000), -torch.inf, device=device)
    logits[:, 4321] = 0.0
    fused = FusedSampling(torch.device(device))
    tokens = fused.draw(logits, torch.ones(64, device=device), torch.arange(64, device=device))
    assert tokens.unique().tolist() == [4321]
    assert fused.greedy(logits).unique().tolist() == [4321]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [4096, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 4095, 4999))])
def test_a_row_with_a_nan_has_no_token(device: str, place: int) -> None:
    from headway.kernels.sampling.draw_kernels import FusedSampling

    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 17] = torch.inf
    logits[1, place] = torch.nan
    logits[1, 17] = torch.inf
    fused = FusedSampling(torch.device(device))
    for tokens in (fused.greedy(logits), fused.draw(logits, torch.ones(3, device=device), torch.arange(3, device=device))):
        assert int(tokens[0]) == 17
        assert int(tokens[1]) == -1
        assert int(tokens[2]) >= 0


@pytest.mark.gpu
def test_while_kernels_are_compiled_ahead_the_tokens_can_be_looked_up() -> None:
    from headway.core.contract.compiled import compile_ahead
    from headway.kernels.sampling.draw_kernels import FusedSampling

    device = torch.device("cuda")
    logits = torch.randn(64, 5000, device=device)
    torch.full((64,), 2**62, device=device)  # whose memory the tokens are given next
    with compile_ahead():
        assert FusedSampling(device).greedy(logits).unique().tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [2, 3, 8])
def test_drafts_hold_as_by_torch(device: str, width: int) -> None:
    """Every number of drafts that hold, behind every number of tokens that are no new ones; and a NaN's token."""
    from headway.kernels.sampling.draw_kernels import FusedSampling

    generator, rows = torch.Generator().manual_seed(width), 4 * width * width
    sampled = torch.randint(0, 2, (rows, width), generator=generator)
    ids = torch.randint(0, 2, (rows, width), generator=generator)
    ids[: rows // 2, 1:] = sampled[: rows // 2, :-1]
    sampled[::7, width // 2] = -1
    given = [each.to(device) for each in (sampled, ids, torch.arange(rows) % width, torch.randperm(rows, generator=generator))]
    newest = [torch.full((rows + 1,), 9, device=device) for _ in range(2)]
    found = FusedSampling(torch.device(device)).accept_drafts(*given, newest[0])
    expected = accept_drafts(*given, newest[1])
    assert newest[0].tolist() == newest[1].tolist()
    for one, other in zip(found.tolist(), expected.tolist(), strict=True):
        assert one[-1] == other[-1]
        assert one[: one[-1]] == other[: other[-1]]
