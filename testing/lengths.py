"""The lengths that steps of each kind are tried at: edges of blocks, ones, primes, many rows, and more than a thousand tokens."""

from __future__ import annotations

from headway.core.contract.errors import ConfigError

Lens = list[tuple[int, int, int]]
"""(query_len, context, num_draft_tokens) of each sequence, those that decode last."""
LONG = 1031
"""A prime just above 1,024."""


def first_step(phase: str, block_size: int) -> Lens:
    """The lengths of a step of one kind (a name of cells.PHASES, or "long")."""
    b = block_size
    prompts = [1, 2, 3, 5, 7, 13, 17, 31, 33, 36, 37, 38, 61, b - 1, b, b + 1, 2 * b - 1, 19]
    extends = [(5, b), (7, 2 * b), (3, b - 1), (b, b), (2, b + 1), (33, 1), (17, 30), (13, 2 * b + 3), (2, 37), (20, 17)]
    kv_lens = [2, 3, 15, 16, 17, 31, 33, 36, 37, 38, 63, 64, 65, 97, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 3 * b + 1]
    decodes = [(1, length - 1, 0) for length in (kv_lens + kv_lens[::-2] + [29])[:33] if length > 1]
    steps: dict[str, Lens] = {
        "prefill": [(n, 0, 0) for n in prompts if n > 0],
        "extend": [(n, context, 0) for n, context in extends if n > 1 and context > 0],
        "decode": decodes,
        "mixed": [(9, 0, 0), (6, b, 0), (b + 3, 0, 0), (40, 2 * b - 1, 0), (3, 19, 0), *decodes[1:8], (1, 3 * b - 1, 0)],
        "verify": [(4, 17, 3), (2, b, 1), (8, b - 3, 7), (3, 2, 2), (5, 2 * b + 1, 4), (7, 36, 6), (6, 1, 5), (4, 63, 3)],
        "ragged": [(1, 1, 0), (1, LONG + 70, 0), (1, b, 0), (1, 40, 0), (1, 7, 0), (1, 190, 0)],
        "long": [(LONG, 0, 0), (5, LONG, 0), (70, LONG + 300, 0), (1, LONG - 8, 0), (1, 2 * LONG, 0), (1, 1024, 0), (1, 20, 0)],
    }
    if phase not in steps:
        raise ConfigError("--cell", f"a phase out of {', '.join(steps)}", repr(phase))
    return steps[phase]


def padding_rows(phase: str) -> int:
    """Rows of length 0 at a step's end, as a captured graph has them."""
    return 3 if phase == "ragged" else 0


def second_step(lens: Lens) -> Lens:
    """Other lengths with as many tokens, for a second step of the same instance at the same addresses."""
    queries = [turn for turn in lens if not turn[1]]
    cached = [turn for turn in lens if turn[1]]
    contexts = [context for _, context, _ in cached]
    rotated = [(query, context, drafts) for (query, _, drafts), context in zip(cached, contexts[1:] + contexts[:1], strict=True)]
    return sorted([*queries[1:], *queries[:1], *rotated], key=_decodes)


def blocks_for(lens: Lens, block_size: int) -> int:
    """Blocks that these sequences take."""
    return sum(-(-(query_len + context) // block_size) for query_len, context, _ in lens)


def _decodes(turn: tuple[int, int, int]) -> bool:
    query_len, context, drafts = turn
    return context > 0 and (query_len == 1 or drafts > 0)
