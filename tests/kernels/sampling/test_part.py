"""What ranks find in their parts of the vocabulary by kernels, and choose: the tokens of the fused draw over all of it."""

from __future__ import annotations

import pytest
import torch

from headway.core.sampling.ranked_vocabulary import best_of_part, tokens_of, winners
from triton_interpreter import DEVICES


def found_by(
    ranks: int, logits: torch.Tensor, scales: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens that so many ranks choose."""
    from headway.kernels.sampling.draw_kernels import FusedPart

    part, width = FusedPart(logits.device), -(-logits.shape[1] // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * width - logits.shape[1]), value=-torch.inf)
    own = [padded[:, rank * width :][:, :width] for rank in range(ranks)]
    return part.winners(torch.stack([part.best_of_part(each, scales, keys, rank * width) for rank, each in enumerate(own)]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ranks", "vocab_size"),
    [(2, 4097), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 50), (4, 20003), (8, 9001)))],
)
def test_tokens_are_those_of_one_rank(device: str, dtype: torch.dtype, ranks: int, vocab_size: int) -> None:
    from headway.kernels.sampling.draw_kernels import FusedSampling

    fused, generator = FusedSampling(torch.device(device)), torch.Generator().manual_seed(ranks)
    logits = torch.randn(5, vocab_size, generator=generator).to(device, dtype)
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(device)
    scales = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0], device=device)
    assert torch.equal(found_by(ranks, logits), fused.greedy(logits))
    assert torch.equal(found_by(ranks, logits, scales, keys), fused.draw(logits, scales, keys))
    grained = logits.mul(2).round()  # -0 among them
    assert torch.equal(found_by(ranks, grained.clamp_max(0)), fused.greedy(grained.clamp_max(0)))
    assert torch.equal(found_by(ranks, grained), grained.float().argmax(1)), "of equal ones the first"


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_are_those_of_torch(device: str) -> None:
    from headway.kernels.sampling.draw_kernels import FusedPart

    part = FusedPart(torch.device(device))
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0] -= 9
    logits[1] = -torch.inf
    logits[1, 3] = 0.0
    logits[2, 600:] = torch.nan
    found, expected = (each(logits, None, None, 1300) for each in (part.best_of_part, best_of_part))
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert int(tokens_of(found)[1]) == 1303
    both = torch.stack([found, expected - 1])
    assert part.winners(both).tolist() == winners(both).tolist()
    assert int(part.winners(both)[2]) == -1


@pytest.mark.parametrize("device", DEVICES)
def test_of_a_row_without_a_likely_token_the_first_is_chosen(device: str) -> None:
    assert found_by(4, torch.full((2, 2000), -torch.inf, device=device)).tolist() == [0, 0]
