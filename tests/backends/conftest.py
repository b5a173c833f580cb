"""What tests of several backends share."""

from __future__ import annotations

import pytest

from headway.kernels.runtime.nvrtc.compiler import Compiler, find_compiler


@pytest.fixture
def compiler() -> Compiler:
    """NVRTC, which the extra `dev` installs: without it no test would show that our CUDA C++ compiles."""
    found, support = find_compiler()
    assert found is not None, str(support)
    return found
