"""Slots for LoRA adapters of a decoder's linear layers: their memory layout, loading of adapters, and the slot of each row."""

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
"""Minimum ratio of the weight's rows to the rows of A with which A is appended to the weight. Each step with an adapter
multiplies all rows of A."""
_STD = 0.02
"""Standard deviation of random adapters: small, so that they change outputs little."""


class ModuleRows(NamedTuple):
    """Range of a merged linear layer's rows that belongs to one of its modules."""

    start: int
    end: int
    module: int
    """Index of the module in the linear layer."""


@dataclass(frozen=True, eq=False)
class AdaptedProduct:
    """A linear layer with the memory of all slots: y += (x A^T) B^T, with A and B of each row's slot."""

    origin: ProductOrigin
    out_features: int
    a: Tensor
    """[slots, modules * rank, in_features]: a view, with gaps between slots."""
    b: Tensor
    """[slots, out_features, rank], multiplied by the adapter's scale."""
    parts: Sequence[ModuleRows]
    """Row ranges of the linear layer's modules, in order."""
    joined: Linear | None = None
    """Linear layer [out_features + slots * modules * rank, in_features]: the weight followed by the A of every slot.

    One GEMM computes x W^T and x A^T of all slots. None if A is multiplied separately.
    """

    @property
    def rank(self) -> int:
        """Number of rows of A per module. Adapters of a smaller rank are padded with zeros."""
        return self.b.shape[2]

    def joined_slots(self, slots: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each of the given slots, and the rows of `joined` that contain the slot's A."""
        assert self.joined is not None
        assert isinstance(self.joined.weight, Tensor)
        appended = self.joined.weight[self.out_features :].view(self.a.shape)
        return ((slot, appended[slot]) for slot in slots)


class Shrunk(NamedTuple):
    """Intermediate result x A^T of rows with an adapter."""

    sums: Tensor
    """float32: x A^T in the kernels' layout. The next linear layer overwrites the sums."""
    squares: Tensor
    """float32: sum of squares of each row of x, if x was not normed yet."""
    normed: int
    """Number of elements per row of x if the norm's factor is still to be applied to the sums. 0 means that x was normed."""
    eps: float


class AdapterInMemory(NamedTuple):
    """An adapter on the host in the layout of a slot. Implements HostAdapter."""

    digest: bytes
    flat: Tensor
    """[elements of a slot]: the adapter's matrices, on the host."""


class AdapterBank:
    """Adapters of one decoder on one rank; see `ModelAdapters`.

    A slot is contiguous memory, so that an adapter is loaded in one copy. The A and B of each linear layer have the same
    positions in every slot.
    """

    def __init__(
        self, linears: Iterable[Linear], slots: AdapterSlots, dtype: torch.dtype, rank_multiple: int = 1, joins: bool = False
    ) -> None:
        """Allocate the slots.

        linears: linear layers with an origin. rank_multiple: multiple to which ranks are rounded up in memory; a power of two or
        1. dtype: type of the layers' inputs. joins: True to append the A of all slots to a weight if that adds few rows.
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
            appended = num_slots * width
            joined = None
            if joins and linear.is_dense and appended * FEWEST_ROWS <= linear.out_features:
                joined = linear.followed_by(appended)
            parts = _parts(origin, linear.out_features)
            self.products[linear] = AdaptedProduct(origin, linear.out_features, a, b, parts, joined)
            at += size_a + size_b
        self.slots: Tensor | None = None
        """int32 [num_tokens]: slot of each row for the following calls. None means that no row has an adapter."""

    def _placed(self, first: int, shape: tuple[int, int]) -> Tensor:
        """Return a view of a matrix in every slot, starting at element `first`."""
        return self._memory.as_strided((self.num_slots, *shape), (self._memory.shape[1], shape[1], 1), first)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot in bytes."""
        return self._memory[0].nbytes

    @cached_property
    def modules(self) -> list[str]:
        """Names of the modules that adapters may have, as in the checkpoint."""
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
        """Copy the A matrices of the given slots into the rows of `joined` that follow the weight."""
        for product in self.products.values():
            if product.joined is not None:
                for slot, rows in product.joined_slots(slots):
                    rows.copy_(product.a[slot])

    @torch.inference_mode()
    def read(self, request: LoRARequest) -> AdapterInMemory:
        """Read an adapter. With several ranks, only this rank's shard is read.

        :raises ConfigError: if the adapter is not supported. The message gives the reason.
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
        """Return an adapter of small random numbers, for measurements without a real adapter."""
        draw, pinned = torch.Generator().manual_seed(seed), self._device.type == "cuda"
        flat = torch.empty(self._memory.shape[1], dtype=self._memory.dtype, pin_memory=pinned)
        return AdapterInMemory(b"drawn %d" % seed, flat.normal_(0, _STD, generator=draw))

    def _of_this_model(self, folder: AdapterFolder) -> AdapterFolder:
        """Return the adapter with the model's module names. The names in the adapter may have a different prefix."""
        by_end = {module[module.find("layers.") :]: module for module in self.modules if "layers." in module}
        renamed = {}
        for module, low_rank in folder.low_ranks.items():
            known = module if module in self.modules else by_end.get(module[module.find("layers.") :], module)
            renamed[known] = low_rank
        return replace(folder, low_ranks=renamed)


def _sizes(linear: Linear, origin: ProductOrigin, rank: int) -> tuple[int, int]:
    """Return the number of elements that a linear layer's A, and its B, take in a slot. A and B start at multiples of 16
    bytes."""
    return _rounded(len(origin.modules) * rank * linear.in_features), _rounded(linear.out_features) * rank


def _rounded(count: int) -> int:
    return -(-count // 8) * 8


def _rows(origin: ProductOrigin) -> list[int]:
    """Return the module index of each row that the rank holds, in the checkpoint's order."""
    return [number for number, axis in enumerate(origin.modules.values()) for _ in range(axis.size)]


def _parts(origin: ProductOrigin, out_features: int) -> list[ModuleRows]:
    modules = _rows(origin)
    if origin.order is not None:
        modules = [modules[row] for row in origin.order]
    assert len(modules) == out_features
    edges = [0, *(row for row in range(1, out_features) if modules[row] != modules[row - 1]), out_features]
    return [ModuleRows(start, end, modules[start]) for start, end in pairwise(edges)]


def _fill(origin: ProductOrigin, folder: AdapterFolder, a: Tensor, b: Tensor) -> None:
    """Write a linear layer's A and B. a: [modules * rank, in_features]. b: [out_features, rank]. a and b must be zeros.

    :raises ConfigError: if a tensor's shape does not match the base model.
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
    """Return the indices along an axis that the rank holds. None means all indices."""
    return None if axis.is_whole else torch.tensor(axis.pick(range(axis.whole)))


def _check_shapes(name: str, module: str, low_rank: LowRank, columns: Axis, rows: Axis) -> None:
    rank = len(low_rank.a)
    for half, tensor, needed in (("A", low_rank.a, [rank, columns.whole]), ("B", low_rank.b, [rows.whole, rank])):
        if list(tensor.shape) != needed:
            hint = "the adapter is another base's"
            raise ConfigError(name, f"{needed} as {module}.lora_{half}.weight", list(tensor.shape), hint)
