"""vLLM's description of a step as Headway's: views of its two parts, no copies.

vLLM packs decodes first and prompts behind them, Headway the other way round; so each part becomes metadata of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from headway.contract import AttentionMetadata, ConfigError

log = logging.getLogger("headway")


class CommonMetadata(Protocol):
    """The fields of vLLM's CommonAttentionMetadata that are read here; all versions that work have them under these names."""

    query_start_loc: Tensor
    """int32 [num_reqs + 1]"""
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    """int32 [num_reqs]; 0 marks padding"""
    seq_lens_cpu_upper_bound: Tensor | None
    """int32 [num_reqs]; exact for prompts"""
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    """int32 [num_reqs, blocks]"""
    slot_mapping: Tensor
    """int64 [at least num_actual_tokens]"""
    causal: bool | Tensor


class _WhenAsked:
    """A field that is computed on its first read, since most backends never read it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, part: object, owner: type | None = None) -> Any:
        if part is None:
            return self
        value = part.__dict__[self._name]
        if callable(value):
            value = part.__dict__[self._name] = value()
        return value

    def __set__(self, part: object, value: Tensor | Callable[[], Tensor]) -> None:
        part.__dict__[self._name] = value


class Part(AttentionMetadata):
    """The decodes, or the prompts, of one of vLLM's steps."""

    context_lens = _WhenAsked()
    """int32 [num_seqs]; a launch."""
    block_table_cpu = _WhenAsked()
    """int32 [num_seqs, max_blocks]; vLLM has no such twin, so on a GPU a read of it waits for the device."""


class Rows:
    """0, 1, 2 and so on: where the tokens of decodes begin. They lie in one place for good, so that CUDA graphs may read them."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._cpu = torch.arange(most + 1, dtype=torch.int32, device="cpu")
        self._device = self._cpu.to(device)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """int32 [count + 1] on the device and on the host."""
        if count >= len(self._cpu):
            self._cpu = torch.arange(2 * count + 1, dtype=torch.int32, device="cpu")
            self._device = self._cpu.to(self._device.device)
        return self._device[: count + 1], self._cpu[: count + 1]


class Parts(NamedTuple):
    """A step: `num_decode_tokens` tokens of decodes, one each, then those of prompts."""

    decode: Part | None
    prefill: Part | None
    num_decode_tokens: int
    num_tokens: int


def parts_of(common: CommonMetadata, block_size: int, rows: Rows, upper_bound_lens: bool = False) -> Parts:
    """Split a step of vLLM's. A sequence with one new token is a decode, as in vLLM, and padding is one of length 0.

    upper_bound_lens: whether vLLM may not know how long a decoding sequence is (drafts are being verified meanwhile).

    :raises ConfigError: a step that is not causal.
    """
    if common.causal is not True:
        raise ConfigError("headway-vllm", "causal attention", "a step that is not", "name one of vLLM's own backends")
    num_tokens, count = common.num_actual_tokens, common.num_reqs
    starts = common.query_start_loc_cpu[: count + 1].numpy()
    num_decodes = count
    if common.max_query_len > 1:
        longer = numpy.diff(starts) > 1
        num_decodes = int(longer.argmax()) if longer.any() else count
    num_decode_tokens = num_tokens if num_decodes == count else int(starts[num_decodes])
    num_decodes = min(num_decodes, num_decode_tokens)  # padding without a token has no row
    decode = _decodes(common, num_decodes, block_size, rows, upper_bound_lens) if num_decodes else None
    prefill = _prompts(common, num_decodes, num_decode_tokens, block_size, starts) if num_decode_tokens < num_tokens else None
    return Parts(decode, prefill, num_decodes, num_tokens)


def _decodes(common: CommonMetadata, count: int, block_size: int, rows: Rows, upper_bound_lens: bool) -> Part:
    starts, starts_cpu = rows.first(count)
    lens, bounds = common.seq_lens[:count], common.seq_lens_cpu_upper_bound
    known = bounds is not None
    lens_cpu = bounds[:count] if bounds is not None else torch.full((count,), common.max_seq_len, dtype=torch.int32)
    return Part(
        num_prefills=0,
        num_decodes=count,
        num_prefill_tokens=0,
        num_decode_tokens=count,
        query_start_loc=starts,
        seq_lens=lens,
        context_lens=lambda: (lens - 1).clamp_min_(0),  # type: ignore[arg-type]
        block_table=common.block_table_tensor[:count],
        slot_mapping=common.slot_mapping[:count],
        block_size=block_size,
        max_query_len=1,
        max_seq_len=common.max_seq_len,
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=lens_cpu,
        block_table_cpu=lambda: _on_host(common.block_table_tensor[:count]),  # type: ignore[arg-type]
        upper_bound_lens=upper_bound_lens or not known,
    )


def _prompts(common: CommonMetadata, first: int, skip: int, block_size: int, starts: numpy.ndarray[Any, Any]) -> Part:
    count, bounds = common.num_reqs, common.seq_lens_cpu_upper_bound
    lens, table = common.seq_lens[first:count], common.block_table_tensor[first:count]
    lens_cpu = bounds[first:count] if bounds is not None else _on_host(lens)
    on_device = common.query_start_loc[first : count + 1]
    on_device = on_device - skip if skip else on_device
    on_host = torch.from_numpy(starts[first:] - skip)
    num_tokens = common.num_actual_tokens - skip
    return Part(
        num_prefills=count - first,
        num_decodes=0,
        num_prefill_tokens=num_tokens,
        num_decode_tokens=0,
        query_start_loc=on_device,
        seq_lens=lens,
        context_lens=lambda: lens - (on_device[1:] - on_device[:-1]),  # type: ignore[arg-type]
        block_table=table,
        slot_mapping=common.slot_mapping[skip : skip + num_tokens],
        block_size=block_size,
        max_query_len=int(numpy.diff(starts[first:]).max()),
        max_seq_len=int(lens_cpu.max()),
        query_start_loc_cpu=on_host,
        seq_lens_cpu=lens_cpu,
        block_table_cpu=lambda: _on_host(table),  # type: ignore[arg-type]
    )


_SAID: set[str] = set()


def _on_host(tensor: Tensor) -> Tensor:
    """A twin in host memory; on a GPU that waits for the device, which the log says once."""
    if tensor.device.type != "cpu" and not _SAID:
        _SAID.add("waits")
        log.warning(
            "headway-vllm: a backend needs block tables or lengths in host memory, which vLLM does not keep; each step waits "
            "for the GPU; triton, hopper and the FlashAttention backends do not need them"
        )
    return tensor.cpu()
