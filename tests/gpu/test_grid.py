"""The grid on a GPU: `HEADWAY_GRID_OUT=grid.json python -m pytest -m gpu tests/gpu`.

Most of its time goes into compiling kernels, which more processes do sooner, one a backend:

    for b in triton flash_attn flash_attn_4 xformers torch_varlen,sdpa,sdpa.math; do
      HEADWAY_GRID_ONLY=$b HEADWAY_GRID_OUT=grid-$b.json python -m pytest -q -m gpu tests/gpu & done; wait
    python -m headway.bench.conformance.support_matrix grid-*.json --output bench/results/h200/grid.json
"""

from __future__ import annotations

import pytest

from conformance import (  # noqa: F401 - pytest finds the grid's tests here
    pytest_generate_tests,
    test_a_graph_captured_at_the_longest_is_right_at_any_length,
    test_a_value_that_is_not_claimed_is_refused,
    test_an_accepted_option_changes_the_output,
    test_answer,
    test_availability_is_yes_or_has_reasons,
    test_two_backends_take_turns_on_one_cache,
    test_written_rows_read_back_exactly,
)

DEVICE = "cuda"
pytestmark = pytest.mark.gpu
