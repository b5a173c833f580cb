"""What a timed call of one layer consists of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend_cases import LAYOUTS, spec
from headway.backends.sdpa import SDPA
from headway.core.contract.layout import LayerCache, write_rows
from headway.core.oracle.cases import make_case, parse_case, reference, relative_error
from headway.tuning.measure.contender import backend_contender, checked


class Writes(SDPA):
    """Writes in decode; not as fast as it might."""

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: object, out: Tensor) -> None:
        self.writes += 1
        self.decode(q, cache, plan, out)


@pytest.mark.parametrize("decode_writes", [False, True])
@pytest.mark.parametrize(
    ("text", "most", "written"), [("3q1s20", 1, True), ("2q4s20", 4, False), ("2q9", 1, False), ("2q4s20", 1, False)]
)
def test_a_backend_that_writes_in_decode_does_so_where_the_write_counts(
    text: str, most: int, written: bool, decode_writes: bool
) -> None:
    case = make_case(parse_case(text, most), spec(), LAYOUTS[0], 16, write_rows, decode_query_len=most)
    expected = reference(case)
    backend = Writes(case.spec, LAYOUTS[0], 16)
    backend.decode_writes, backend.writes = decode_writes, 0
    calls = []
    for writer in (None, lambda *_: calls.append("write")):
        contender = backend_contender(backend, case, lambda out: relative_error(out, expected, case), writer)
        assert checked(contender) < 1e-5
    assert (backend.writes, len(calls)) == ((1, 0) if written and decode_writes else (0, 1))
    assert not torch.isnan(contender.call()).any()
