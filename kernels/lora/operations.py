"""Decoder operations with LoRA adapters. An adapter's output is added between a linear layer and the next operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.adapters import NO_ADAPTER, AdapterSlots
from headway.core.contract.errors import ModelError
from headway.core.system.text import shown_size
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.lora.bank import AdaptedProduct, AdapterBank, Shrunk
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Operations, Rope

log = logging.getLogger("headway")


RANK_MULTIPLE = 16
"""Number of columns that a tensor-core instruction sums over. Ranks are rounded up to a multiple of this number."""


class Additions(Protocol):
    """Interface for adding the output of each row's adapter to a linear layer. Methods with a body are defaults that leave the
    work to `Operations`."""

    def normed(self, x: Tensor, norm: Norm, product: AdaptedProduct, slots: Tensor) -> tuple[Tensor, Shrunk] | None:
        """Norm x before a linear layer, and compute the first half of the adapters' additions. A result of None leaves both to
        `Operations`."""
        return None

    def add(self, y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, low: Shrunk | None = None) -> Tensor:
        """Return y [rows, out_features] plus (x A^T) B^T of each row's slot, in place. Rows without a slot stay unchanged.

        x: [rows, in_features], contiguous, the linear layer's input. slots: int32 [rows]. low: result of `normed`, if `normed`
        has run.
        """

    def joined(self, both: Tensor, product: AdaptedProduct, slots: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Return the linear layer's output [rows, out_features] plus the adapters' output. The sum is added in place to `add_to`
        if given.

        both: output of `AdaptedProduct.joined`: x W^T, followed by x A^T in the same rows.
        """

    def joined_activated(self, both: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation) -> Tensor | None:
        """Return the same result as `activated`. both: as for `joined`."""
        return None

    def activated(
        self, both: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, activation: Activation, low: Shrunk | None = None
    ) -> Tensor | None:
        """Add adapters to gate and up, and return activation(gate) * up. both: [rows, out_features], gate before up.

        Return None, without adding anything, to leave the operation to `Operations`.
        """
        return None


class PlainAdditions(Additions):
    """Additions by torch, only to rows with an adapter. The host reads the rows' slots, so CUDA graphs cannot capture them."""

    def __init__(self, tile_rows: int | None = None) -> None:
        """Prepare the additions. tile_rows: number of rows per GEMM in deterministic mode (see `InvariantOperations`). None means
        that the number of rows may vary."""
        self._tile_rows = tile_rows

    def add(self, y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor, low: object = None) -> Tensor:
        """Return y plus the output of each row's adapter, in place.

        y: [rows, out_features]. x: [rows, in_features], the linear layer's input. slots: int32 [rows].
        """
        for slot in sorted(set(slots.tolist()) - {NO_ADAPTER}):
            rows = (slots == slot).nonzero().squeeze(1)
            low = self._multiplied(x.index_select(0, rows), product.a[slot])
            for start, end, module in product.parts:
                first = module * product.rank
                own = self._multiplied(low[:, first : first + product.rank], product.b[slot, start:end])
                y[:, start:end].index_add_(0, rows, own)
        return y

    def joined(self, both: Tensor, product: AdaptedProduct, slots: Tensor, add_to: Tensor | None = None) -> Tensor:
        size, rank = product.out_features, product.rank
        y = both[:, :size].clone()
        lows = both[:, size:].reshape((len(both), *product.a.shape[:2]))
        for slot in sorted(set(slots.tolist()) - {NO_ADAPTER}):
            rows = (slots == slot).nonzero().squeeze(1)
            for start, end, module in product.parts:
                low = lows[rows, slot, module * rank : (module + 1) * rank]
                y[:, start:end].index_add_(0, rows, self._multiplied(low, product.b[slot, start:end]))
        return y if add_to is None else add_to.add_(y)

    def _multiplied(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x [rows, k] by weight [n, k]. Return [rows, n]."""
        size = self._tile_rows
        if size is None:
            return torch.mm(x, weight.t())
        tiles = torch.split(pad(x, (0, 0, 0, -len(x) % size)), size)
        return torch.cat([torch.mm(tile, weight.t()) for tile in tiles])[: len(x)]


class AdaptedOperations:
    """Decoder operations that add the adapters of a bank.

    If no row has an adapter, the inner operations are used unchanged. Otherwise, the inner norm, the linear layer, and the inner
    activation or rotary embedding run separately. Adapters read the linear layer's input, and the activation reads the sum of
    both outputs. All rows of a step are computed in this way. A row without an adapter therefore has the same bits as with the
    inner operations, unless these fuse operations without rounding between them.
    """

    def __init__(self, inner: Operations, bank: AdapterBank, additions: Additions, always: bool = False) -> None:
        """Wrap `inner`. additions: implementation for the device. always: True to compute every step as if a row had an adapter,
        so that a row's bits do not depend on whether other rows have adapters."""
        self._inner = inner
        self._bank = bank
        self._additions = additions
        self._none: Callable[[int], Tensor] | None = None
        if always:
            self._none = lambda rows: torch.full((rows,), NO_ADAPTER, dtype=torch.int32, device=next(iter(bank.products)).device)
        self.embed = inner.embed
        self.norm = inner.norm
        self.add_norm = inner.add_norm
        self.softcap = inner.softcap
        self.rotate_latent = inner.rotate_latent
        self.latent_layer = inner.latent_layer
        self.gate = inner.gate
        self.experts = inner.experts
        self.rotate_heads = inner.rotate_heads
        self.activated = inner.activated

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Return the arguments unchanged: adapters read inputs that are normed with the norm's own weight."""
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices of the inner operations."""
        return self._inner.linear_choices(products)

    def _adapted(self, x: Tensor, linear: Linear) -> tuple[AdaptedProduct, Tensor] | None:
        """Return a layer's adapter weights and each row's slot. None if no row has an adapter, or the layer does not support
        adapters."""
        product = self._bank.products.get(linear)
        if product is None:
            return None
        slots = self._bank.slots
        if slots is None:
            return None if self._none is None else (product, self._none(len(x)))
        assert len(slots) == len(x), "a row of a product inside of layers is a token's"
        return product, slots

    def _normed(self, x: Tensor, norm: Norm | None, adapted: tuple[AdaptedProduct, Tensor]) -> tuple[Tensor, Shrunk | None]:
        """Return a linear layer's input, and the intermediate result of `Additions.normed`."""
        x = x.contiguous()
        if norm is None:
            return x, None
        product, slots = adapted
        return self._additions.normed(x, norm, product, slots) or (self._inner.norm(x, norm), None)

    def _added(self, x: Tensor, norm: Norm | None, linear: Linear, adapted: tuple[AdaptedProduct, Tensor]) -> Tensor:
        """Compute a linear layer of x and add adapters. x is normed first if needed."""
        product, slots = adapted
        if product.joined is not None:
            return self._additions.joined(self._both(x, norm, product.joined), product, slots)
        normed, low = self._normed(x, norm, adapted)
        return self._additions.add(self._inner.product(normed, linear), normed, product, slots, low)

    def _both(self, x: Tensor, norm: Norm | None, joined: Linear) -> Tensor:
        """Compute a linear layer joined with the A matrices of all slots. x is normed first if needed."""
        return self._inner.product(x if norm is None else self._inner.norm(x, norm), joined)

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return the linear layer's output plus adapters."""
        adapted = self._adapted(x, linear)
        if adapted is None:
            return self._inner.product(x, linear, out)
        y = self._added(x, None, linear, adapted)
        return y if out is None else out.copy_(y)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Return the result of norm, linear layer plus adapters, and activation."""
        adapted = self._adapted(x, linear)
        if adapted is None:
            return self._inner.norm_product(x, norm, linear, activation)
        y = self._added(x, norm, linear, adapted)
        return y if activation is None else self._inner.activated(y, activation, gated=False)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Return the result of norm, linear layer plus adapters, and gated activation."""
        adapted = self._adapted(x, linear)
        if adapted is None:
            return self._inner.norm_gated_product(x, norm, linear, activation)
        product, slots = adapted
        if product.joined is not None:
            both = self._both(x, norm, product.joined)
            y = self._additions.joined_activated(both, product, slots, activation)
            return self._inner.activated(self._additions.joined(both, product, slots), activation, True) if y is None else y
        normed, low = self._normed(x, norm, adapted)
        both = self._inner.product(normed, linear)
        y = self._additions.activated(both, normed, product, slots, activation, low)
        if y is not None:
            return y
        return self._inner.activated(self._additions.add(both, normed, product, slots, low), activation, gated=True)

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of a linear layer plus adapters."""
        adapted = self._adapted(x, linear)
        if adapted is None:
            return self._inner.norm_qkv(x, norm, linear, heads, rope)
        return self._inner.rotate_heads(self._added(x, norm, linear, adapted), heads, rope)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Return residual + linear layer plus adapters."""
        adapted = self._adapted(x, linear)
        if adapted is None:
            return self._inner.add_product(residual, x, linear)
        product, slots = adapted
        if product.joined is not None:
            return self._additions.joined(self._both(x, None, product.joined), product, slots, add_to=residual)
        x = x.contiguous()
        return self._additions.add(self._inner.add_product(residual, x, linear), x, product, slots)

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return residual + outputs of the linear layers plus adapters. The outputs are added one by one if any layer has
        adapters."""
        if all(self._adapted(x, linear) is None for x, linear in terms):
            return self._inner.add_products(residual, terms)
        return Operations.add_products(self, residual, terms)


def adapted_operations(
    inner: Operations, linears: Iterable[Linear], slots: AdapterSlots, dtype: torch.dtype, tile_rows: int | None
) -> tuple[Operations, AdapterBank]:
    """Return operations that wrap `inner` and add adapters, and the adapter bank, whose slots are allocated.

    linears: the decoder's linear layers. tile_rows: number of rows of every GEMM in deterministic mode. None means that the
    number of rows may vary.
    :raises ModelError: if a GPU has no Triton, or no linear layer supports adapters.
    """
    adaptable = [linear for linear in linears if linear.origin is not None]
    if not adaptable:
        raise ModelError("enable_lora: needs a model with products that adapters can be added to, got none")
    additions: Additions
    if adaptable[0].device.type == "cpu":
        bank = AdapterBank(adaptable, slots, dtype)
        additions = PlainAdditions(tile_rows)
    else:
        try:
            from headway.kernels.lora.fused import FusedAdditions
        except ImportError:
            raise ModelError("enable_lora: needs Triton on a GPU, got none: pip install 'headway[triton]'") from None
        bank = AdapterBank(adaptable, slots, dtype, RANK_MULTIPLE, joins=tile_rows is None)
        additions = FusedAdditions(adaptable[0].device, bank)
    steps = "every step" if tile_rows is not None else "steps in which a row has one"
    size = f"{slots.number} of rank {slots.max_rank}, {shown_size(slots.number * bank.slot_bytes)}"
    log.info(
        "adapters: slots for %s, on %d linear layers; %s compute norms and activations separately",
        size,
        len(bank.products),
        steps,
    )
    return AdaptedOperations(inner, bank, additions, always=tile_rows is not None), bank
