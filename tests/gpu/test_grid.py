"""The grid on a GPU: `HEADWAY_GRID_OUT=grid.json pytest -m gpu tests/gpu`; one backend with `-k NAME`, several side by side."""

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
