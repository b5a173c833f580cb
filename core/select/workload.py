"""The requests that an engine expects: over their steps a layout and block size are chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape

_CHUNK = 2048
"""Prompt tokens of one step."""
_MOST = 1 << 24
"""Most requests, and most tokens of one: a thousand times what is served, and still weighed in a moment."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal requests, `batch` of them at a time."""

    batch: int
    input_len: int
    output_len: int
    cached_len: int = 0
    """Tokens of the input that the prefix cache already holds."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read chat, long, batch, or BATCHxINPUT+OUTPUT such as 16x1024+256.

        :raises ConfigError: text of another form.
        """
        if text in PRESETS:
            return PRESETS[text]
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text.strip())
        sizes = [int(number) for number in match.groups()] if match else [0]
        if min(sizes) < 1 or max(sizes) > _MOST:
            need = f"{', '.join(PRESETS)}, or BATCHxINPUT+OUTPUT in tokens such as 16x1024+256, each at most {_MOST:,}"
            raise ConfigError("workload", need, repr(text))
        return cls(*sizes)

    def steps(self) -> list[tuple[Shape, float]]:
        """The attention of all requests: (shape, number of steps of that shape)."""
        steps: list[tuple[Shape, float]] = [
            (Shape(Phase.DECODE, self.batch, 1, self.input_len + self.output_len // 2), float(self.output_len))
        ]
        new = self.input_len - self.cached_len
        if new <= _CHUNK:
            together = min(self.batch, max(1, _CHUNK // new))
            phase = Phase.EXTEND if self.cached_len else Phase.PREFILL
            return [(Shape(phase, together, new, self.input_len), self.batch / together), *steps]
        ends = range(self.cached_len + _CHUNK, self.input_len + 1, _CHUNK)
        phases = [Phase.of(_CHUNK, end - _CHUNK) for end in ends]
        chunks = [(Shape(phase, 1, _CHUNK, end), float(self.batch)) for phase, end in zip(phases, ends, strict=True)]
        return chunks + steps

    def __str__(self) -> str:
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        return name or f"{self.batch}x{self.input_len}+{self.output_len}"


PRESETS = {
    "chat": Workload(16, 1280, 256, cached_len=1024),
    "long": Workload(4, 16384, 512),
    "batch": Workload(256, 512, 512),
}
"""Turns of conversations; long documents; many short requests offline."""
