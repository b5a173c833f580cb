"""Floats of 4 bits: MXFP4 (gpt-oss's experts), and NVFP4 (compressed-tensors, ModelOpt), which is expanded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headway.kernels.linear.forms import FP4_VALUES, MX_GROUP, Float4Weight, packed
from headway.models.checkpoints.formats.drawn import Octets, float4
from headway.models.checkpoints.formats.module import QuantizedModule
from headway.models.checkpoints.tensor_files import PLAIN

_OCTETS = ("uint8",)
_NV_GROUP = 16
"""Elements of a row that share a scale in NVFP4."""
_NAN = 255
"""The exponent that stands for no number."""


@dataclass(frozen=True, slots=True)
class ExpertsMxfp4:
    """`_blocks` uint8 [E, N, K / 32, 16] and `_scales` uint8 [E, N, K / 32] in place of a tensor [E, K, N] of all experts."""

    suffixes: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    of_experts: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The format in words."""
        return "MXFP4"

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return bool(module.elements("_blocks"))

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        return 1, MX_GROUP, 1

    def read(self, module: QuantizedModule) -> Float4Weight:
        """See StoredFormat. The result has the rows of all experts: [E N, K]."""
        experts, columns, rows = module.axes
        groups = columns.units(MX_GROUP)
        blocks = module.take("_blocks", _OCTETS, experts, rows, groups, MX_GROUP // 2)
        exponents = module.take("_scales", _OCTETS, experts, rows, groups)
        if bool((exponents == _NAN).any()):
            raise module.error("_scales", f"needs exponents below {_NAN}", f"{_NAN}, which is no number")
        octets = torch.empty(experts.size, rows.size, columns.size // 2, dtype=torch.uint8, device=blocks.device)
        for target, block in zip(octets, blocks, strict=True):  # one at a time: codes take more memory than they do packed
            target.copy_(packed(_codes(block.flatten(1)), MX_GROUP))
        return Float4Weight(octets.flatten(0, 1), exponents.flatten(0, 1))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Float4Weight | None:
        """See StoredFormat."""
        return None if columns % MX_GROUP else float4(octets, rows, columns, std)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Codes uint8 [N, K / 2], `weight_scale` float8 [N, K / 16], and one more scale of the whole tensor."""

    codes: str
    """What the codes' name adds."""
    scale: str
    """The same of the whole tensor's scale."""
    divides: bool
    """Whether that divides instead of multiplying."""
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_global_scale"),
        *(".input_scale", ".input_global_scale"),
    )
    of_experts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The format in words."""
        return "NVFP4"

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return module.elements(self.codes) in _OCTETS

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        return 1, _NV_GROUP

    def read(self, module: QuantizedModule) -> Tensor:
        """See StoredFormat."""
        module.divided(_NV_GROUP)
        groups = module.columns.units(_NV_GROUP)
        codes = _codes(module.take(self.codes, _OCTETS, module.rows, module.columns.units(2)))
        scales = module.take(".weight_scale", ("float8_e4m3fn",), module.rows, groups).float()  # 0 where all of a group is 0
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise module.error(".weight_scale", "needs finite scales, none below 0", "others")
        one = module.shape(self.scale) if module.elements(self.scale) else [1]
        factor = module.take_scales(self.scale, *(one if one in ([], [1], [1, 1]) else [1]), elements=PLAIN).float().reshape(())
        scales = scales / factor if self.divides else scales * factor
        values = torch.tensor(FP4_VALUES, device=codes.device)[codes.int()].view(len(codes), -1, _NV_GROUP)
        return (values * scales[:, :, None]).to(module.dtype).flatten(1)

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> None:
        """See StoredFormat."""


def _codes(octets: Tensor) -> Tensor:
    """Two codes of a byte, the lower bits' first: uint8 [R, C] to [R, 2 C]."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
