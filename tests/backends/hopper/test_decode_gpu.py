"""decode.cu on a GPU beside float64: random steps, and steps of a graph that is replayed for other lengths."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from backend_cases import spec
from decode_writes import LENGTHS, error_after_writing, new_token_case, write_and_decode
from headway.backends.hopper.backend import HopperAttention
from headway.backends.hopper.decode import HopperDecoding
from headway.core.contract.layout import HND, NHD, write_rows
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, parse_case, reference, reference_with_lse, relative_error, run_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HopperAttention.available(), reason="needs a GPU of compute capability 9.0, and a compiler"),
]
BF16, FP16 = torch.bfloat16, torch.float16
SEQUENCES = (1, 2, 3, 5, 9, 17, 40)


def layer(draw: random.Random, **changes: object) -> AttentionSpec:
    head_dim, kv_heads, group = (
        draw.choice((64, 80, 128, 128, 192, 256)),
        draw.choice((1, 2, 4, 8)),
        draw.choice((1, 2, 4, 7, 8, 16)),
    )
    sizes = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    more = draw.choice(({}, {"sliding_window": draw.randint(1, 600)}, {"softcap": 15.0}))
    own = {**sizes, "scale": head_dim**-0.5, "dtype": draw.choice((BF16, FP16)), "device": torch.device("cuda", 0)}
    return spec(**{**own, **more, **changes})


@pytest.mark.parametrize("number", range(24))
def test_random_steps_match_float64(number: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    asked, verify, block_size = layer(draw), draw.choice((1, 1, 2, 5)), draw.choice((16, 48, 64, 256))
    lengths = [verify + int(2 ** draw.uniform(0, 12)) for _ in range(draw.choice(SEQUENCES))]
    step = "_".join(f"1q{verify}s{length}" for length in lengths)
    print(f"seed {seed}: {step}, {asked}, blocks of {block_size}")
    case = make_case(
        parse_case(step, verify), asked, draw.choice((NHD, HND)), block_size, write_rows, seed=seed, decode_query_len=verify,
        poison=math.nan,
    )  # fmt: skip
    lse = torch.full((asked.num_heads, len(case.q)), math.nan, device=case.q.device)
    answer = run_backend(HopperDecoding(asked, case.cache.layout, block_size), case, lse)
    expected, sums = reference_with_lse(case)
    assert relative_error(answer, expected, case) < HopperDecoding.tolerance[asked.dtype]
    assert float((lse - sums).abs().max()) < 2e-3


@pytest.mark.parametrize("number", range(8))
def test_new_tokens_are_written(number: int) -> None:
    draw = random.Random(random.randrange(2**31))
    asked, block_size = layer(draw), draw.choice((16, 48, 256))
    case = new_token_case(LENGTHS if number % 2 else "1q1s700", asked, draw.choice((NHD, HND)), block_size, draw.choice((0, 3)))
    backend = HopperDecoding(asked, case.cache.layout, block_size)
    for spoiled in (math.nan, 3e4):
        assert error_after_writing(case, lambda: write_and_decode(backend, case), spoiled) < backend.tolerance[asked.dtype]


@pytest.mark.parametrize("lengths", ["1q1s3000", "3q1s400_1q1s5000", "1q1s9_20q1s200"])
def test_a_graph_serves_other_lengths(lengths: str) -> None:
    """Captured for the longest context, with two launches behind each other, and replayed many times."""
    asked = layer(random.Random(random.randrange(2**31)), sliding_window=None, softcap=None)
    case = make_case(parse_case(lengths, 1), asked, NHD, 16, write_rows, decode_query_len=1, poison=math.nan)
    view = case.metadata.decode
    backend = HopperDecoding(asked, NHD, 16)
    plan = backend.plan_for_capture(dataclasses.replace(view, seq_lens_cpu=torch.full_like(view.seq_lens_cpu, 8192)))
    out, other = torch.empty_like(case.q), torch.empty_like(case.q)

    def step() -> None:
        backend.decode(case.q, case.cache, plan, other)
        backend.decode(case.q, case.cache, plan, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected = reference(case)
    for _ in range(50):
        out.fill_(math.nan), other.fill_(math.nan)
        backend.plan_for_replay(plan, view)
        graph.replay()
        assert torch.equal(out, other)
    assert relative_error(out, expected, case) < backend.tolerance[asked.dtype]
