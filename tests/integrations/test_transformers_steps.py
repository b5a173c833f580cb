"""What layers of a step share, planned once: few operators for each layer, and nothing that outlives what it depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, chunked_causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as sliding

import headway.integrations.transformers  # noqa: F401 -- registers the names
from headway.backends.sdpa import SDPA
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.support import Support
from transformers_release import needs

needs("generate with Headway's attention")

MODULE = SimpleNamespace(is_causal=True, layer_idx=0)


class Operators(TorchDispatchMode):
    """Counts what is dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function).removeprefix("aten.").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def layer(mask: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """A layer's call as transformers makes it; [batch, q_length, heads, dim]."""
    attend: Callable[..., tuple[Tensor, None]] = AttentionInterface()["headway"]
    return attend(MODULE, query, key, value, mask, **{"dropout": 0.0, "scaling": 0.3, **options})[0]


def mask_of(batch: int, queries: int, keys: int, padding: Tensor | None = None, window: int | None = None) -> Any:
    """A step's mask as transformers asks for it; the queries are the last ones."""
    rule = causal_mask_function if window is None else sliding(window)
    make = AttentionMaskInterface()["headway"]
    return make(batch, queries, keys, keys - queries, 0, mask_function=rule, attention_mask=padding, local_size=window)


def tensors(batch: int, queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of a layer with 4 and 2 heads of 8 elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]


def exact(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None, window: int | None = None, scale: float = 0.3
) -> Tensor:
    """The same by the definition, in float64; rows of padding are left out by the caller."""
    queries, keys = query.shape[2], key.shape[2]
    at = torch.arange(keys - queries, keys)[:, None]
    seen = torch.arange(keys)[None] <= at
    if window is not None:
        seen &= torch.arange(keys)[None] > at - window
    seen = seen.expand(len(query), 1, queries, keys)
    if padding is not None:
        seen = seen & padding.bool()[:, None, None]
    k, v = (t.double().repeat_interleave(2, 1) for t in (key, value))
    scores = (query.double() @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def right(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_decode_is_planned_once_for_all_layers_with_four_views_each(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[AttentionMetadata] = []
    monkeypatch.setattr(SDPA, "plan", lambda _, metadata: planned.append(metadata))
    monkeypatch.setattr(SDPA, "decode", lambda *_: None)
    mask = mask_of(2, 1, 9, torch.ones(2, 9, dtype=torch.bool)) if masked else None
    layers = [tensors(2, 1, 9, seed) for seed in range(6)]
    layer(mask, *layers[0])
    with Operators() as operators:
        for each in layers[1:]:
            layer(mask, *each)
    assert operators.seen == {"new_empty": 5, "select": 5, "as_strided": 10, "view": 5}
    assert len(planned) == 1


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_another_mask_over_the_same_tensors_is_another_plan(queries: int) -> None:
    each = tensors(2, queries, 9)
    padding = torch.ones(2, 9, dtype=torch.bool)
    for count in (0, 3, 1):
        padding[1, :count] = False  # the same tensor, changed in place
        padding[1, count:] = True
        live = torch.arange(9 - queries, 9) >= count
        found, expected = layer(mask_of(2, queries, 9, padding), *each), exact(*each, padding)
        right(found[0], expected[0])
        right(found[1, live], expected[1, live])
        assert not found[1, ~live].any()


def test_mask_keeps_a_copy_of_the_padding() -> None:
    each, padding = tensors(1, 1, 9), torch.ones(1, 9, dtype=torch.bool)
    padding[0, :4] = False
    then = padding.clone()
    mask = mask_of(1, 1, 9, padding)
    padding.fill_(True)
    right(layer(mask, *each), exact(*each, then))
    assert mask.to("meta") is mask


def test_layers_of_one_mask_that_differ_are_kinds_of_their_own() -> None:
    mask, roomy = mask_of(2, 1, 9), tensors(2, 1, 40, 3)
    for _ in range(2):
        for seed in range(2):
            each = tensors(2, 1, 9, seed)
            right(layer(mask, *each), exact(*each))
            right(layer(mask, *each, scaling=0.7), exact(*each, scale=0.7))
            half = [t.half() for t in each]
            torch.testing.assert_close(layer(mask, *half).double(), exact(*each), rtol=1e-2, atol=1e-2)
            query = each[0]
            views = [t[:, :, 31:] for t in roomy[1:]]  # the end of longer rows, and then the same strides before their end
            right(layer(mask, query, *views), exact(query, *views))
            views = [t[:, :, 5:14] for t in roomy[1:]]
            right(layer(mask, query, *views), exact(query, *views))
            turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in each[1:]]
            right(layer(mask, query, *turned), exact(*each))
            softcap = layer(mask, *each, softcap=0.2)
            assert not torch.allclose(softcap.double(), exact(*each), atol=1e-3)
    assert len(mask.visibility.calls) == 7


def test_windows_and_full_attention_take_turns() -> None:
    full, near = mask_of(2, 1, 30), mask_of(2, 1, 30, None, 7)
    for seed in range(4):
        each, window = tensors(2, 1, 30, seed), (None, 7)[seed % 2]
        right(layer((full, near)[seed % 2], *each), exact(*each, None, window))


def test_calls_without_a_mask_of_other_sizes() -> None:
    for batch, queries, keys in ((1, 1, 9), (2, 1, 9), (1, 1, 10), (1, 9, 9), (1, 1, 9), (1, 1, 1)):
        for seed in range(2):
            each = tensors(batch, queries, keys, seed)
            right(layer(None, *each), exact(*each))
    with pytest.raises(ConfigError, match="none for 3 queries of 9 keys"):
        layer(None, *tensors(1, 3, 9))


def test_a_backend_that_cannot_read_blocks_that_overlap_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Support.no("cache", "blocks that follow one another", "gaps between them")
    monkeypatch.setattr(SDPA, "accepts", classmethod(lambda _, cache: answer))
    each = tensors(1, 9, 9)
    right(layer(mask_of(1, 9, 9), *each), exact(*each))  # a prompt reads no cache
    with pytest.raises(UnsupportedError, match="needs blocks that follow one another"):
        layer(mask_of(1, 1, 9), *tensors(1, 1, 9))


def test_a_rule_that_only_looks_like_one_is_tried_out() -> None:
    make = AttentionMaskInterface()["headway"]
    strange = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    mask = make(1, 1, 9, 8, 0, mask_function=strange, attention_mask=None, local_size=None)
    with pytest.raises(ConfigError, match="neither causal nor causal within a window"):
        layer(mask, *tensors(1, 1, 9))
    wrong = make(1, 1, 9, 8, 0, mask_function=sliding(3), attention_mask=None, local_size=4)
    with pytest.raises(ConfigError, match="neither causal nor causal within a window"):
        layer(wrong, *tensors(1, 1, 9))
    plain = make(1, 1, 9, 8, 0, mask_function=lambda _, __, q, k: k <= q, attention_mask=None, local_size=None)
    each = tensors(1, 1, 9)
    right(layer(plain, *each), exact(*each))
