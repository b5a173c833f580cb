"""The tokens of tiny models of every family on several ranks, beside those of one rank.

In float32 all of them must be the same. In half precision sums over ranks are rounded in another order, so that one of two tokens
that are all but equally likely may take the other's place: the texts part there, and how far apart the two were is written down.
Where two experts are all but equally likely, another one is chosen, and then any token may follow: at least half of the texts
must part at a tie of tokens, or not at all.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headway.bench.studies.ranks.results import FamilyTokens
from headway.core.contract.errors import ConfigError
from headway.core.system.child import Child, ChildDied, python_command

TIE: Final = 0.25
"""The most by which two tokens' log-probabilities may differ in half precision that take each other's place: the tiny models have
large weights at random, whose logits are some ten apart and have 8 bits."""
_SUPPORT: Final = Path(__file__).resolve().parents[3] / "tests" / "support"
_LIMIT: Final = 180.0
"""Seconds between two events of a child: kernels are compiled."""
_FAR: Final = 1e3
"""Stands for a token that is not among the most likely: JSON has no infinity."""
DTYPES: Final = ("float32", "bfloat16")
FIRST: Final = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_moe, fp8 blocks", "gpt_oss, mxfp4", "llama", "gemma3")
"""Families that are tried first, for there may be no time for all."""


@dataclass(frozen=True)
class RanksUnderTest:
    """Where engines run."""

    device: str
    """cuda or cpu."""
    ranks: int
    jobs: int
    """Engines at once."""


@dataclass(frozen=True)
class Wrote:
    """What one engine wrote."""

    tokens: Sequence[Sequence[int]]
    best: Sequence[Sequence[Mapping[str, float]]]
    """For each text and position the log-probabilities of the most likely tokens, by token."""
    seconds: float
    graph_steps: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Wrote:
        """Take it out of a child's event."""
        return cls(event["tokens"], event["best"], event["seconds"], event["graph_steps"])


def families(names: Sequence[str]) -> list[str]:
    """The families to try, those of FIRST first. names: no others; empty: all.

    :raises ConfigError: a name that is none.
    """
    known = [*_configs(), *_QUANTIZED]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError("--family", f"one of {'; '.join(known)}", repr(unknown[0]))
    return sorted(names or known, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def save_model(name: str, folder: Path) -> Path:
    """Save a tiny model of a family with random weights, as the tests do, and return its folder."""
    folder.mkdir(parents=True)
    if name in _QUANTIZED:
        return _QUANTIZED[name](folder)
    _support("engine_logits").save_random(_configs()[name], folder)
    return folder


def check_tokens(models: Mapping[str, Path], place: RanksUnderTest, until: float) -> Iterator[tuple[str, list[FamilyTokens]]]:
    """Compare each family's tokens, and yield a family as soon as it is done, for a slow one must not hide those that a run which
    is cut off has finished.

    models: family -> folder, begun in their order. until: on time.monotonic's clock; families that would begin later come with
    nothing.
    """

    def of_family(name: str) -> list[FamilyTokens]:
        return [] if time.monotonic() > until else _of_family(name, models[name], place)

    with ThreadPoolExecutor(place.jobs) as pool:
        names = {pool.submit(of_family, name): name for name in models}
        try:
            for done in as_completed(names):
                yield names[done], done.result()
        finally:  # whoever stops asking waits for those that have begun alone
            pool.shutdown(wait=False, cancel_futures=True)


def run_engines(
    folder: Path, place: RanksUnderTest, environment: Mapping[str, str] | None = None, **request: Any
) -> Iterator[dict[str, Any]]:
    """The events of one child, of which the last is "ended" with how.

    environment: variables of its own. request: what of it is not usual.
    """
    usual = {"folder": str(folder), "device": place.device, "dtypes": ["float32"], "sizes": [place.ranks], "forever": False}
    with Child(python_command("headway.bench.studies.ranks.child"), environment) as child:
        child.send({**usual, **request})
        while True:
            try:
                yield child.answer(_LIMIT)
            except ChildDied as died:
                yield {"event": "ended", "text": str(died)}
                return


def _of_family(name: str, folder: Path, place: RanksUnderTest) -> list[FamilyTokens]:
    """One line for each element type."""
    wrote: dict[tuple[str, int], Wrote] = {}
    error = ""
    for event in run_engines(folder, place, dtypes=DTYPES, sizes=[1, place.ranks]):
        if event["event"] == "wrote":
            wrote[event["dtype"], event["size"]] = Wrote.of(event)
        else:
            error = error or event.get("text", "")
    found = []
    for dtype in DTYPES:
        one, several = wrote.get((dtype, 1)), wrote.get((dtype, place.ranks))
        if one is None or several is None:
            found.append(FamilyTokens(family=name, dtype=dtype, error=error or "it has written nothing"))
        else:
            found.append(compare(name, dtype, one, several))
    return found


def compare(name: str, dtype: str, one: Wrote, several: Wrote) -> FamilyTokens:
    """Compare the texts of two engines, each up to the first difference."""
    same, gaps = 0, []
    for mine, other, best in zip(one.tokens, several.tokens, one.best, strict=True):
        at = next((at for at, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), None)
        same += len(mine) if at is None else at
        if at is not None:
            likely = {int(token): logprob for token, logprob in best[at].items()}
            gaps.append(likely[mine[at]] - likely.get(other[at], -math.inf))
    return FamilyTokens(
        family=name,
        dtype=dtype,
        tokens=sum(map(len, one.tokens)),
        same=same,
        gaps=[min(gap, _FAR) for gap in gaps],
        start_seconds=several.seconds,
        graph_steps=several.graph_steps,
        ok=not gaps if dtype == "float32" else 2 * sum(gap > TIE for gap in gaps) <= len(one.tokens),
    )


def _support(name: str) -> Any:
    """A module that the tests share, out of the checkout."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if str(_SUPPORT) not in sys.path:
        sys.path += map(str, (_SUPPORT, *_SUPPORT.glob("*/")))
    return importlib.import_module(name)


@functools.cache
def _configs() -> Mapping[str, Any]:
    """The first tiny configuration of each family, by the name that the tests give it."""
    rows = {**_support("plain_models").ROWS, **_support("hybrid_models").ROWS}
    first: dict[str, str] = {}
    for name, config in rows.items():
        first.setdefault(config.model_type, name)
    return {name: rows[name] for name in first.values()}


def _fp8_blocks(folder: Path) -> Path:
    """Experts in blocks of 64 that the ranks' parts of an expert are whole numbers of, as Qwen3-30B-A3B's of 128 are of two."""
    models = _support("quantized_models")
    quantized: Path = models.save_both(
        folder, models.FORMATS["fp8 blocks"], models.QWEN3_MOE, plain=lambda module: module.endswith("mlp.gate")
    )[0]
    return quantized


def _mxfp4(folder: Path) -> Path:
    """Experts in groups of 32, as gpt-oss has them."""
    models = _support("quantized_models")
    quantized: Path = models.save_mxfp4(folder, models.GPT_OSS)[0]
    return quantized


_QUANTIZED: Final[Mapping[str, Callable[[Path], Path]]] = {"qwen3_moe, fp8 blocks": _fp8_blocks, "gpt_oss, mxfp4": _mxfp4}
