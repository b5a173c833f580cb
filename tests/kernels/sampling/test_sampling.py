"""The kernels that filter and draw choose the tokens that torch's operations do: on a GPU, and in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import pytest
import torch

from headway.core.contract.kernel import compile_ahead
from headway.core.sampling.filtering import TokenFilter, torch_filter
from headway.core.sampling.ranked_vocabulary import best_of_part, tokens_of, winners
from headway.core.sampling.sampler import Draws, SamplingOps, draw, greedy, keys_of, sample
from headway.core.sampling.verification import accept_drafts
from headway.kernels.sampling.draw_kernels import FusedPart, FusedSampling
from headway.kernels.sampling.top_k_top_p_kernels import TopKTopPSampler
from triton_interpreter import DEVICES

NO_MIN = -math.inf
WISHES = [
    TokenFilter(1.4, 50, 0.9, math.log(0.02)),
    TokenFilter(0, 0, 1, NO_MIN),
    TokenFilter(0.6, 0, 0.95, NO_MIN),
    TokenFilter(1, 1, 1, NO_MIN),
    TokenFilter(1, 0, 1, math.log(0.2)),
    TokenFilter(2, 0, 1e-9, NO_MIN),
    TokenFilter(1, 2500, 0.999, NO_MIN),
    TokenFilter(0.1, 20, 1, NO_MIN),
]


def table(wishes: Sequence[TokenFilter], device: str) -> torch.Tensor:
    return torch.tensor(wishes, dtype=torch.float32, device=device).T.contiguous()


def same(logits: torch.Tensor, wishes: Sequence[TokenFilter], draws: int = 1) -> None:
    """For several keys: tokens of both paths, and of each row alone."""
    fused, device, rows = TopKTopPSampler(logits.device), str(logits.device), len(logits)
    others, generator = torch.arange(rows, device=device) + 7, torch.Generator().manual_seed(rows)
    for _ in range(draws):
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device)
        found = fused(logits, others, keys, table(wishes, device))
        assert found.tolist() == torch_filter(logits, others, keys, table(wishes, device)).tolist()
    last = slice(rows - 1, rows)
    assert fused(logits[last], others[last], keys[last], table(wishes, device)[:, last]).tolist() == found[last].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_same_tokens_as_torch(device: str) -> None:
    logits = torch.randn(3, 703, generator=torch.Generator().manual_seed(0)).to(device)[:, :700] * 3
    same(logits.bfloat16(), WISHES[:3])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_picked_out_of_a_table_draw_as_torch_does(device: str) -> None:
    """numpy lays picked columns one after another, whichever way the table lies."""
    known, rows = numpy.array(WISHES, dtype=numpy.float32).T.copy(), numpy.array([0, 2, 5, 0, 2])
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(device)
    keys = keys_of(range(5), [9] * 5).view(numpy.int64)
    draws = Draws(numpy.zeros(5, dtype=numpy.float32), keys, known[:, rows])
    ours, theirs = (SamplingOps(filter=each) for each in (TopKTopPSampler(logits.device), torch_filter))
    assert sample(logits, draws, ours).tolist() == sample(logits, draws, theirs).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, 4096, 9001, 5000])
def test_same_tokens_as_torch_whatever_the_rows_want(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    spread = torch.tensor([3, 1, 0.01, 3, 2, 1, 1, 9])[:, None]
    logits = (torch.randn(8, vocab_size + 3, generator=generator) * spread).to(device, dtype)[:, :vocab_size]
    wishes = [each._replace(top_k=0.0 if each.top_k >= vocab_size else each.top_k) for each in WISHES]
    same(logits, wishes)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ties_and_what_is_left_out(device: str) -> None:
    """Thousands of equal logits on both sides of the cut, rows of -inf but for a few tokens or all, and infinity."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(8, 4500, generator=generator) * 2).round()
    logits[0] = 0
    logits[1, 7:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 123] = torch.inf
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    wishes = [TokenFilter(1, k, p, m) for k, p, m in [(50, 1, NO_MIN), (30, 0.9, NO_MIN), (3, 1, NO_MIN), (5, 0.5, NO_MIN)]]
    wishes += [TokenFilter(1, k, p, m) for k, p, m in [(0, 0.3, NO_MIN), (0, 0.5, NO_MIN), (900, 0.8, -1.0), (0, 0.999, -3.0)]]
    same(logits.to(device), wishes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [0, pytest.param(4999, marks=pytest.mark.slow)])
def test_a_row_with_a_nan_has_no_token(device: str, place: int) -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, place] = torch.nan
    same(logits, [TokenFilter(1, 5, 1, NO_MIN)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("room", "programs"), [(4, 4), (64, 4), (512, 8)])
def test_full_lists_and_programs_with_many_logits(device: str, room: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is too short, narrowed by both digits, or cut twice; thousands of equal logits lie at its lower end."""
    monkeypatch.setattr("headway.kernels.sampling.top_k_top_p_kernels.LIST_CAPACITY", (room, room))
    monkeypatch.setattr("headway.kernels.sampling.top_k_top_p_kernels.MAX_PROGRAMS", programs)
    logits = torch.randn(6, 7000, generator=torch.Generator().manual_seed(5)).to(device)
    logits[4:] = (2 * logits[4:]).round()
    large, both = TokenFilter(1, 1700, 1, NO_MIN), TokenFilter(1, 5000, 0.9, NO_MIN)
    same(logits, [WISHES[0], WISHES[2], large, both, both, large._replace(top_p=0.6)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 64, 257])
@pytest.mark.parametrize("vocab_size", [151936, 128256, 32000, 100003, 262144])
def test_same_tokens_as_torch_at_real_sizes(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    """A token whose sums lie within the last bit of a limit may differ, for exp2 rounds otherwise: one row in a thousand may."""
    generator = torch.Generator("cuda").manual_seed(rows)
    spread = torch.tensor([0.02, 1, 3, 6], device="cuda").repeat(rows)[:rows, None]
    logits = (torch.randn(rows, vocab_size, generator=generator, device="cuda") * spread).to(dtype)
    wishes, others = table((WISHES * rows)[:rows], "cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, device="cuda")
    fused = TopKTopPSampler(logits.device)
    found = fused(logits, others, keys, wishes)
    different = torch.nonzero(found != torch_filter(logits, others, keys, wishes))
    assert len(different) <= (1 if rows > 64 else 0), different
    for row in range(min(rows, 8)):
        alone = fused(logits[row : row + 1], others[:1], keys[row : row + 1], wishes[:, row : row + 1])
        assert int(alone) == int(found[row])


@pytest.mark.gpu
def test_a_captured_graph_filters_as_its_inputs_say() -> None:
    device, fused = torch.device("cuda"), TopKTopPSampler(torch.device("cuda"))
    logits = torch.randn(16, 151936, device=device, dtype=torch.bfloat16) * 3
    keys, others = torch.arange(16, device=device), torch.arange(16, device=device)
    wishes = torch.zeros(4, 16, device=device)
    fused(logits, others, keys, wishes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = fused(logits, others, keys, wishes)
    for turn in range(5):
        wishes.copy_(table((WISHES * 3)[turn:][:16], "cuda"))
        keys.add_(1000)
        logits.normal_(std=turn + 0.1)
        graph.replay()
        assert chosen.tolist() == torch_filter(logits, others, keys, wishes).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_come_as_often_as_the_kept_ones_should(device: str) -> None:
    count, logits = (60 if device == "cpu" else 20000), torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -5.0], device=device)
    wishes = [TokenFilter(1, 4, 0.99, NO_MIN)] * count
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(1)).to(device)
    others = torch.zeros_like(keys)
    found = TopKTopPSampler(torch.device(device))(logits.expand(count, 6).contiguous(), others, keys, table(wishes, device))
    counts = torch.bincount(found.cpu(), minlength=6).double()
    expected = logits[:4].cpu().double().softmax(0) * count
    assert not counts[4:].any()
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 16.3, "three degrees of freedom, one chance in a thousand"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab_size"),
    [(5, 4096), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 50), (3, 9001), (8, 20000)))],
)
def test_draws_are_those_of_torch(device: str, dtype: torch.dtype, rows: int, vocab_size: int) -> None:
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
    logits = torch.full((64, 5000), -torch.inf, device=device)
    logits[:, 4321] = 0.0
    fused = FusedSampling(torch.device(device))
    tokens = fused.draw(logits, torch.ones(64, device=device), torch.arange(64, device=device))
    assert tokens.unique().tolist() == [4321]
    assert fused.greedy(logits).unique().tolist() == [4321]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [4096, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 4095, 4999))])
def test_a_row_with_a_nan_draws_no_token(device: str, place: int) -> None:
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
    device = torch.device("cuda")
    logits = torch.randn(64, 5000, device=device)
    torch.full((64,), 2**62, device=device)  # whose memory the tokens are given next
    with compile_ahead():
        assert FusedSampling(device).greedy(logits).unique().tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [2, 3, 8])
def test_drafts_hold_as_by_torch(device: str, width: int) -> None:
    """Every number of drafts that hold, behind every number of tokens that are no new ones; and a NaN's token."""
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


def found_by(
    ranks: int, logits: torch.Tensor, scales: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens that so many ranks choose."""
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
