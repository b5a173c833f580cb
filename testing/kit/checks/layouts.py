"""Checks of a cache layout and its writer: rows are read back as written, and no other memory changes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, CacheGeometry, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import CACHE_TYPES, FP8_SCALES, CheckCell, Finding, Skipped, check_refusal
from headway.core.oracle.steps import bits
from headway.testing.kit.attention import AttentionStage

BLOCKS = 40


def layout_spec(stage: AttentionStage, cell: CheckCell) -> AttentionSpec:
    """Return a layer for a layout's cell. If the layout stores no values, the layer's values are part of its keys. The cell's
    feature is a cache dtype or `none`."""
    value = stage.subject.layouts[cell.layout]
    latent, dtype = not value.has_value, CACHE_TYPES.get(cell.feature)
    scales = ((FP8_SCALES[0],) * 2 if latent else FP8_SCALES) if cell.feature == "fp8" and not value.has_scales else (1.0, 1.0)
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=2,
        head_dim=cell.head_dim,
        scale=1.0,
        dtype=getattr(torch, cell.dtype),
        device=stage.subject.device,
        v_head_dim=cell.head_dim if not latent else cell.head_dim // 9 * 8,
        value_in_key=latent,
    )
    return spec if dtype is None else replace(spec, kv_dtype=dtype, k_scale=scales[0], v_scale=scales[1])


def layout(stage: AttentionStage, cell: CheckCell) -> str:
    """Check that the writer and `gather` agree on every slot, for one row, many rows, and skipped rows."""
    spec, value = layout_spec(stage, cell), stage.subject.layouts[cell.layout]
    support = value.check(spec, cell.block_size)
    if not support:
        check_refusal(support, "check() must say what it needs and what it got")
        raise Skipped.refused(support)
    geometry = CacheGeometry.of(spec, BLOCKS, cell.block_size)
    try:
        cache = value.allocate(geometry, spec.k_scale, spec.v_scale)
    except Exception as error:
        raise Finding(
            f"check() accepts head_dim {cell.head_dim}, and no cache can be allocated: {type(error).__name__}: {error}",
            guess="a check() that accepts what it cannot lay out",
        ) from None
    if any(bool(tensor.view(torch.uint8).any()) for tensor in cache.tensors.values()):
        raise Finding("a cache must be allocated zeroed: kernels that read whole blocks must meet finite numbers")
    for tokens in (1, 2, cell.block_size + 1, BLOCKS * cell.block_size - 3):
        _write_and_read(stage, cell, spec, value.allocate(geometry, spec.k_scale, spec.v_scale), tokens)
    _sizes(cache)
    return ""


def _sizes(cache: LayerCache) -> None:
    whole = sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors.values())
    said = cache.layout.bytes_per_block(cache.geometry) * cache.geometry.num_blocks
    if whole != said:
        raise Finding(f"bytes_per_block: a cache of {cache.geometry.num_blocks} blocks takes {whole} bytes, said are {said}")


def _write_and_read(stage: AttentionStage, cell: CheckCell, spec: AttentionSpec, cache: LayerCache, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    device, count = spec.device, BLOCKS * cell.block_size
    slots = torch.randperm(count, generator=generator)[: tokens + 2].to(device)
    slots[tokens // 2] = -1
    slots[-1] = -1
    merged = torch.randn(len(slots), spec.num_kv_heads * (spec.head_dim + spec.v_head_dim), generator=generator)
    merged = (merged * (3 if spec.kv_dtype else 1)).to(device, spec.dtype)
    if cache.layout.has_scales:  # rows with different scales, and a row of zeros
        merged *= 10.0 ** ((torch.arange(len(slots), device=device) % 5) - 2)[:, None].to(spec.dtype)
        merged[::4] = 0.0
    elif spec.kv_dtype is None:  # bits that arithmetic would change but a copy does not
        merged[::3, ::7], merged[1::3, 3::11] = -0.0, torch.nan
    k, v = torch.split(merged, [spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim], dim=1)
    k, v = (torch.unflatten(part, 1, (spec.num_kv_heads, -1)) for part in (k, v))
    v = k[..., : spec.v_head_dim] if spec.value_in_key else v
    before = merged.clone()
    stage.subject.writer(cell.layout)(k, v, cache, slots)
    if not torch.equal(bits(merged), bits(before)):
        raise Finding("the writer must not change k or v", guess="changes k or v")
    kept = slots >= 0
    got = cache.gather(slots[kept])
    for name, given, read, scale in zip("kv", (k, v), got, (spec.k_scale, spec.v_scale), strict=True):
        if cache.layout.has_scales:
            _near(name, given[kept], read, cache)
            continue
        right = _stored(given[kept], spec.cache_dtype, scale)
        if not torch.equal(bits(read), bits(right)):
            wrong = int((bits(read) != bits(right)).flatten(1).any(1).sum())
            raise Finding(
                f"{name} of {wrong} of {int(kept.sum())} rows comes back changed (block_size {cell.block_size}, {tokens} tokens)",
                guess=_looks(read, right, scale),
            )
    rest = torch.ones(count, dtype=torch.bool)
    rest[slots[kept].cpu()] = False
    for name, read in zip("kv", cache.gather(rest.nonzero().flatten().to(device)), strict=True):
        if bool(read.float().any()):
            raise Finding(
                f"{name}: a slot that no row names is written", guess="slot -1 is not skipped, or rows go to other slots"
            )


def _stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return rows as a cache must store them: divided by the scale and, for FP8, clamped to FP8's range."""
    if rows.dtype == dtype:
        return rows
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def _near(name: str, given: Tensor, read: Tensor, cache: LayerCache) -> None:
    """Check rows that were read from a cache that stores its own scales. The error of a row must not exceed the rounding error.

    :raises Finding: if a row has a larger error.
    """
    tensor = {"k": "key", "v": "value"}[name]
    axes, dtype = cache.layout.tensors.get(SCALES[tensor], ()), cache.tensors[tensor].dtype
    step = 2.0**-4 if dtype.is_floating_point else 0.5 / torch.iinfo(dtype).max  # relative to a row's largest element
    largest = given.double().abs().amax(-1 if "head" in axes else (-2, -1), keepdim=True)
    off = (read.double() - given.double()).abs()
    wrong = int((~(off <= step * (1 + 1e-5) * largest)).flatten(1).any(1).sum())
    if wrong:
        zeros = bool((read == 0).all())
        raise Finding(
            f"{name} of {wrong} of {len(given)} rows comes back farther from what was written than rounding takes it",
            guess="rows are not written"
            if zeros
            else "scales are wrong or not each row's own, or numbers are cut off, not rounded",
        )


def _looks(read: Tensor, right: Tensor, scale: float) -> str:
    if torch.equal(read.nan_to_num(7.0) + 0.0, right.nan_to_num(7.0) + 0.0):
        return "rows go through arithmetic: -0.0 or the bits of a NaN are changed"
    for name, factor in (("without its scale", 1 / scale), ("with its scale multiplied in place of divided", scale**2)):
        if scale != 1.0 and float((read.float() * factor - right.float()).norm()) < 0.1 * float(right.float().norm()):
            return f"fp8 rows are written {name}"
    if bool((read.float() == 0).all()):
        return "rows are not written"
    return "rows are written to other slots, or the axes are not what the layout says"
