"""Decode over dense keys that end where memory ends: a slot too many would end the process. Started by test_interpreter.py."""

from __future__ import annotations

import ctypes
import math
import mmap
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")
try:
    from headway.kernels.runtime.triton_launch import INTERPRETED
except RuntimeError as error:  # pragma: no cover - an old GPU driver
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_interpreter.py runs these with TRITON_INTERPRET=1")


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last byte is the last before a page that must not be touched."""
    page = mmap.PAGESIZE
    room = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - tensor.nbytes)
    assert copy.untyped_storage().nbytes() == tensor.nbytes
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.slow  # transformers is slow to import, so it is not imported above
@pytest.mark.parametrize(("batch", "keys"), [(1, 17), (2, 40), (1, 65), (1, 15)])
def test_a_decode_reads_no_slot_behind_the_last_key(batch: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    import headway.integrations.transformers  # noqa: F401 -- registers the names

    monkeypatch.setenv("HEADWAY_DEBUG", "1")  # block numbers are checked, too
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(batch, 4, 1, 32, generator=generator)
    key, value = (guarded(torch.randn(batch, 2, keys, 32, generator=generator)) for _ in "kv")
    mask = AttentionMaskInterface()["headway:triton"](batch, 1, keys, keys - 1, 0)
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    found = [AttentionInterface()["headway:triton"](module, query, key, value, mask)[0] for _ in range(2)]
    (call,) = mask.visibility.calls.values()
    assert (call.blocks.room > 0) == (keys < 16), "a copy is made where no whole block fits, and nowhere else"
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=1 / math.sqrt(32)).transpose(1, 2)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
