"""Diagrams of the documentation: the memory order of a block in each cache layout, and the tensors of one step.

    python docs/_tools/diagrams.py docs/images

Both are drawn from the contract's own values: layouts are written and read back, and the step is an `AttentionMetadata`.
"""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headway.bench.charts import new_figure
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, CacheLayout, write_rows
from headway.core.contract.metadata import AttentionMetadata
from headway.core.system.json_files import write_bytes

_COLOURS = ("#88aacc", "#f2a1ac", "#8fc49a", "#e3d68a")
"""Colours of tokens in one diagram, of sequences in the other."""
_TOKENS, _HEADS, _HEAD_DIM = 4, 2, 8

Element = tuple[int, int, int]
"""(token, head, index in the head) of one number."""


def memory(layout: CacheLayout, tensor: str) -> list[Element]:
    """Return the elements of one block of a tensor in memory order, determined by writing and reading, not by formula."""
    geometry = CacheGeometry(1, _TOKENS, _HEADS, _HEAD_DIM, torch.float32, torch.device("cpu"))
    cache = layout.allocate(geometry)
    rows = torch.arange(_TOKENS * _HEADS * _HEAD_DIM, dtype=torch.float32).view(_TOKENS, _HEADS, _HEAD_DIM)
    write_rows(rows, rows, cache, torch.arange(_TOKENS))
    numbers = [int(number) for number in cache.tensors[tensor].flatten().tolist()]
    return [(number // (_HEADS * _HEAD_DIM), number // _HEAD_DIM % _HEADS, number % _HEAD_DIM) for number in numbers]


def layouts() -> bytes:
    """Return an SVG of one block of four tokens and two kv heads of eight float32 elements, in every layout."""
    shown = [(NHD, "key", "nhd, key and value"), (HND, "key", "hnd, key and value")]
    shown += [(VLLM_5D, "key", "vllm_5d, key"), (VLLM_5D, "value", "vllm_5d, value")]
    figure = new_figure(10.0, 5.6)
    figure.suptitle(
        "One block in memory: 4 tokens, 2 kv heads of 8 float32 elements, from the first byte to the last", fontsize=11
    )
    for axis, (layout, tensor, title) in zip(figure.subplots(len(shown), 1), shown, strict=True):
        elements = memory(layout, tensor)
        axes = ", ".join(axis for axis in layout.tensors[tensor])
        axis.set_title(f"{title}: [{axes}]", fontsize=10, loc="left")
        starts = [place for place in range(len(elements)) if place == 0 or not _goes_on(elements[place - 1], elements[place])]
        for start, end in pairwise([*starts, len(elements)]):
            token, head, first = elements[start]
            _box(axis, start, 0, end - start, 1, _COLOURS[token], hatch="//" if head else None)
            if end - start > 1:
                _text(axis, (start + end) / 2, 0.5, f"token {token}\nhead {head}\n{first} to {first + end - start - 1}", 6.5)
            else:
                _text(axis, start + 0.5, 0.5, str(token), 6.5)
        axis.set(xlim=(0, len(elements)), ylim=(0, 1))
        axis.set_axis_off()
    figure.supxlabel(
        "colour: token; hatched: head 1; in vllm_5d's value each box is one element, and its number is the token", fontsize=9
    )
    return svg(figure)


def step() -> bytes:
    """Return an SVG of the tokens of one step, the slots that they are written to, and the blocks of their contexts."""
    query_lens, context_lens, tables = [5, 3, 1, 1], [0, 4, 6, 3], [[2, 5], [0, 7], [4, 1], [6]]
    names = ["sequence 0: a new prompt", "sequence 1: a later chunk", "sequence 2: decodes", "sequence 3: decodes"]
    block_size, num_blocks = 4, 8
    metadata = AttentionMetadata.build(query_lens, context_lens, tables, block_size)
    owner = [row for row, length in enumerate(metadata.query_lens) for _ in range(length)]
    slots = metadata.slot_mapping.tolist()
    figure = new_figure(10.0, 4.8)
    axis = figure.subplots()
    for token, (row, slot) in enumerate(zip(owner, slots, strict=True)):
        x = 4 + token * 2.4
        _box(axis, x, 6.2, 2.2, 1.1, _COLOURS[row])
        _text(axis, x + 1.1, 6.75, f"token {token}\nslot {slot}", 7)
    starts = metadata.query_start_loc.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        phase = "prefill or extend: backend A" if row < metadata.num_prefills else "decode: backend B"
        if row in (0, metadata.num_prefills):
            _text(axis, 4 + start * 2.4, 8.1, phase, 9, ha="left", weight="bold")
        _text(axis, 4 + start * 2.4, 7.6, names[row] if end - start > 1 else f"seq. {row}", 7.5, ha="left")
    _text(
        axis,
        4,
        8.8,
        f"the step's tokens, packed: query_start_loc = {starts}, seq_lens = {metadata.seq_lens.tolist()}",
        9,
        ha="left",
    )
    _text(
        axis,
        4,
        4.9,
        f"the pool: {num_blocks} blocks of {block_size} slots; strong colors: what this step writes, pale: cached before",
        9,
        ha="left",
    )
    held = {
        table[at // block_size] * block_size + at % block_size: row
        for row, table in enumerate(tables)
        for at in range(context_lens[row])
    }
    for block in range(num_blocks):
        x = 4 + block * 3.05
        for offset in range(block_size):
            slot = block * block_size + offset
            colour = _COLOURS[owner[slots.index(slot)]] if slot in slots else _COLOURS[held[slot]] if slot in held else "white"
            _box(axis, x + offset * 0.7, 3.3, 0.7, 1.0, colour, alpha=1.0 if slot in slots else 0.4)
            _text(axis, x + offset * 0.7 + 0.35, 3.8, str(slot), 6.5)
        _text(axis, x + 1.4, 3.0, f"block {block}", 8)
    tables_text = "   ".join(f"{row}: {table}" for row, table in enumerate(tables))
    _text(axis, 4, 2.0, f"block_table, by sequence:   {tables_text}", 9, ha="left")
    _text(
        axis,
        4,
        1.3,
        "slot = block x block_size + offset; the layout's writer stores k and v there, then each backend reads its part",
        9,
        ha="left",
    )
    axis.set(xlim=(3.5, 28.6), ylim=(0.9, 9.2))
    axis.set_axis_off()
    return svg(figure)


def _goes_on(before: Element, after: Element) -> bool:
    return before[:2] == after[:2] and before[2] + 1 == after[2]


def _box(
    axis: Any, x: float, y: float, width: float, height: float, colour: str, hatch: str | None = None, alpha: float = 1.0
) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="#ffffff00", alpha=alpha, linewidth=0))
    if hatch:
        axis.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="#ffffff", hatch=hatch, linewidth=0, alpha=0.6))
    axis.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="#444444", linewidth=0.6))


def _text(axis: Any, x: float, y: float, text: str, size: float, ha: str = "center", weight: str = "normal") -> None:
    axis.text(x, y, text, ha=ha, va="center", fontsize=size, weight=weight)


def svg(figure: Any) -> bytes:
    """Return the figure as SVG, with the same bytes each time."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "headway"}):  # the same bytes each time
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def main() -> None:
    """Draw both diagrams into the folder named on the command line."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    for name, content in (("layouts", layouts()), ("step", step())):
        write_bytes(content, folder / f"{name}.svg")


if __name__ == "__main__":
    main()
