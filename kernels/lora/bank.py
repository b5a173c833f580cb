"""Slots of adapters beside a decoder's products: their layout, what a folder becomes in one, and which rows have which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.adapters import AdapterSlots, LoRARequest
from headway.core.contract.errors import ConfigError
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear, ProductOrigin
from headway.kernels.lora.folder import AdapterFolder, LowRank, check_targets, read_folder

FEWEST_ROWS = 8
"""Times the rows of A that a weight must have for them to lie behind it: every step with an adapter multiplies all of them."""
_STD = 0.02
"""Standard deviation of random adapters: what they add stays small beside what products are."""


class ModuleRows(NamedTuple):
    """Rows of a product that belong to one of the modules it was made of."""

    start: int
    end: int
    module: int
    """Which of the product's modules."""


@dataclass(frozen=True, eq=False)
class AdaptedProduct:
    """A product and the memory of all slots beside it: y += (x A^T) B^T, with the A and B of a row's slot."""

    origin: ProductOrigin
    out_features: int
    a: Tensor
    """[slots, modules * rank, in_features], a view: slots do not follow one another closely."""
    b: Tensor
    """[slots, out_features, rank]; the adapter's scale is in it."""
    parts: Sequence[ModuleRows]
    """The rows of the product, in their order."""
    joined: Linear | None = None
    """The product's weight with the A of every slot behind it: [out_features + slots * modules * rank, in_features], so that one
    product makes x W^T and x A^T of all slots. None: A is multiplied apart."""

    @property
    def rank(self) -> int:
        """Rows of A for each module, those of smaller adapters being zeros."""
        return self.b.shape[2]

    def joined_slots(self, slots: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Each of some slots, and the rows of `joined` that hold its A."""
        assert self.joined is not None
        assert isinstance(self.joined.weight, Tensor)
        behind = self.joined.weight[self.out_features :].view(self.a.shape)
        return ((slot, behind[slot]) for slot in slots)


class Shrunk(NamedTuple):
    """x A^T of rows with an adapter, on its way to B."""

    sums: Tensor
    """float32, as the kernels lay them out; the next product overwrites them."""
    squares: Tensor
    """float32: sums of squares of x, where x was not normed yet."""
    normed: int
    """Elements of a row of x that the sums are still to be normed by; 0: they are of normed rows."""
    eps: float


class AdapterInMemory(NamedTuple):
    """An adapter as its slot holds it; a HostAdapter."""

    digest: bytes
    flat: Tensor
    """[elements of a slot], on the host."""


class AdapterBank:
    """The adapters of one decoder on one rank; see `ModelAdapters`.

    A slot is one piece of memory, so that an adapter is copied at once. Every product's A and B have their places in it.
    """

    def __init__(
        self, linears: Iterable[Linear], slots: AdapterSlots, dtype: torch.dtype, rank_multiple: int = 1, joins: bool = False
    ) -> None:
        """linears: products with an origin. rank_multiple: what memory for ranks is rounded up to, a power of two or 1.

        dtype: of the products' inputs. joins: whether the A of all slots may lie behind a weight, where they are few rows.
        """
        self.num_slots, self.max_rank = num_slots, max_rank = slots
        self._rank = max_rank if rank_multiple == 1 else max(rank_multiple, 1 << (max_rank - 1).bit_length())
        products = [(linear, linear.origin) for linear in linears if linear.origin is not None]
        self._device = products[0][0].device
        sizes = [_sizes(linear, origin, self._rank) for linear, origin in products]
        self._memory = torch.zeros(num_slots, sum(map(sum, sizes)), dtype=dtype, device=self._device)
        self.products: dict[Linear, AdaptedProduct] = {}
        at = 0
        for (linear, origin), (size_a, size_b) in zip(products, sizes, strict=True):
            width = len(origin.modules) * self._rank
            a = self._placed(at, (width, linear.in_features))
            b = self._placed(at + size_a, (linear.out_features, self._rank))
            behind = num_slots * width
            joined = None
            if joins and linear.is_dense and behind * FEWEST_ROWS <= linear.out_features:
                joined = linear.followed_by(behind)
            parts = _parts(origin, linear.out_features)
            self.products[linear] = AdaptedProduct(origin, linear.out_features, a, b, parts, joined)
            at += size_a + size_b
        self.slots: Tensor | None = None
        """int32 [num_tokens]: the slot of each row of the calls to come; None: no row has any."""

    def _placed(self, first: int, shape: tuple[int, int]) -> Tensor:
        """A matrix in every slot, from this element of it on."""
        return self._memory.as_strided((self.num_slots, *shape), (self._memory.shape[1], shape[1], 1), first)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self._memory[0].nbytes

    @cached_property
    def modules(self) -> list[str]:
        """The modules that adapters may have, as the checkpoint names them."""
        return [module for product in self.products.values() for module in product.origin.modules]

    def begin(self, slots: Tensor | None) -> None:
        self.slots = slots

    @torch.inference_mode()
    def put(self, slot: int, adapter: AdapterInMemory) -> None:
        self._memory[slot].copy_(adapter.flat, non_blocking=True)
        self._join([slot])

    @torch.inference_mode()
    def arrange(self) -> None:
        self._join(range(self.num_slots))

    def _join(self, slots: Iterable[int]) -> None:
        """Copy the A of slots behind the weights."""
        for product in self.products.values():
            if product.joined is not None:
                for slot, rows in product.joined_slots(slots):
                    rows.copy_(product.a[slot])

    @torch.inference_mode()
    def read(self, request: LoRARequest) -> AdapterInMemory:
        """See ModelAdapters; of several ranks, each keeps its part alone.

        :raises ConfigError: the adapter cannot be served; the message names what and why.
        """
        folder = self._of_this_model(read_folder(request))
        if folder.rank > self.max_rank:
            raise ConfigError(folder.name, f"a rank of at most max_lora_rank={self.max_rank}", folder.rank, "raise max_lora_rank")
        check_targets(folder, self.modules)
        flat = torch.zeros(self._memory.shape[1], dtype=self._memory.dtype, pin_memory=self._device.type == "cuda")
        for product in self.products.values():
            a, b = (flat.as_strided(view.shape[1:], view.stride()[1:], view.storage_offset()) for view in (product.a, product.b))
            _fill(product.origin, folder, a, b)
        return AdapterInMemory(folder.digest, flat)

    @torch.inference_mode()
    def drawn(self, seed: int) -> AdapterInMemory:
        """Make an adapter of small random numbers in place of one that was read, for measurements."""
        draw, pinned = torch.Generator().manual_seed(seed), self._device.type == "cuda"
        flat = torch.empty(self._memory.shape[1], dtype=self._memory.dtype, pin_memory=pinned)
        return AdapterInMemory(b"drawn %d" % seed, flat.normal_(0, _STD, generator=draw))

    def _of_this_model(self, folder: AdapterFolder) -> AdapterFolder:
        """The adapter with the model's own names of modules, where the one that wrote it had a part less or more before them."""
        by_end = {module[module.find("layers.") :]: module for module in self.modules if "layers." in module}
        renamed = {}
        for module, low_rank in folder.low_ranks.items():
            known = module if module in self.modules else by_end.get(module[module.find("layers.") :], module)
            renamed[known] = low_rank
        return replace(folder, low_ranks=renamed)


def _sizes(linear: Linear, origin: ProductOrigin, rank: int) -> tuple[int, int]:
    """Elements of a product's A and B in a slot; both begin at multiples of 16 bytes."""
    return _rounded(len(origin.modules) * rank * linear.in_features), _rounded(linear.out_features) * rank


def _rounded(count: int) -> int:
    return -(-count // 8) * 8


def _rows(origin: ProductOrigin) -> list[int]:
    """The number of the module of each row that the rank holds, in the checkpoint's order."""
    return [number for number, axis in enumerate(origin.modules.values()) for _ in range(axis.size)]


def _parts(origin: ProductOrigin, out_features: int) -> list[ModuleRows]:
    modules = _rows(origin)
    if origin.order is not None:
        modules = [modules[row] for row in origin.order]
    assert len(modules) == out_features
    edges = [0, *(row for row in range(1, out_features) if modules[row] != modules[row - 1]), out_features]
    return [ModuleRows(start, end, modules[start]) for start, end in pairwise(edges)]


def _fill(origin: ProductOrigin, folder: AdapterFolder, a: Tensor, b: Tensor) -> None:
    """Write a product's A and B. a: [modules * rank, in_features]; b: [out_features, rank]; both are zeros.

    :raises ConfigError: a tensor has not the shape that the base has for it.
    """
    columns, rank = _held(origin.in_features), b.shape[1]
    rows = []
    for number, (module, axis) in enumerate(origin.modules.items()):
        own = torch.zeros(axis.size, rank)
        low_rank = folder.low_ranks.get(module)
        if low_rank is not None:
            _check_shapes(folder.name, module, low_rank, origin.in_features, axis)
            size = len(low_rank.a)
            first = number * rank
            a[first : first + size] = low_rank.a if columns is None else low_rank.a[:, columns]
            held = _held(axis)
            own[:, :size] = (low_rank.b if held is None else low_rank.b[held]).float() * low_rank.scale
        rows.append(own)
    merged = torch.cat(rows)
    if origin.order is not None:
        merged = merged[torch.tensor(origin.order)]
    b.copy_(merged * (origin.scale if isinstance(origin.scale, float) else torch.tensor(origin.scale)[:, None]))


def _held(axis: Axis) -> Tensor | None:
    """The elements of an axis that the rank holds; None: all of them."""
    return None if axis.is_whole else torch.tensor(axis.pick(range(axis.whole)))


def _check_shapes(name: str, module: str, low_rank: LowRank, columns: Axis, rows: Axis) -> None:
    rank = len(low_rank.a)
    for half, tensor, needed in (("A", low_rank.a, [rank, columns.whole]), ("B", low_rank.b, [rows.whole, rank])):
        if list(tensor.shape) != needed:
            hint = "the adapter is another base's"
            raise ConfigError(name, f"{needed} as {module}.lora_{half}.weight", list(tensor.shape), hint)
