"""Which models are pooled: told by small files, so that a command knows before it loads torch or starts a process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway.models.checkpoints.locate import ALIASES, locate
from headway.models.encoders.pooling.detect import PoolingTask, pooling_task

if TYPE_CHECKING:
    from headway.engine_args import EngineArgs


class PoolingModel(NamedTuple):
    """Where a model that is pooled was found, and what for."""

    folder: Path
    task: PoolingTask


def find_pooling_model(args: EngineArgs) -> PoolingModel | None:
    """Find the model of these options if it is pooled; None: it generates text. Reads small files alone and loads no torch.

    :raises HeadwayError: there is no such model, or options contradict each other.
    """
    asked = args.runner != "auto" or args.task != "auto"
    if args.model in ALIASES and not asked:
        return None
    if asked and pooling_task(Path(), args.runner, args.task) is None:
        return None
    task = pooling_task(locate(args.model, weights=False, origin=args.origin), args.runner, args.task)
    return None if task is None else PoolingModel(locate(args.model, args.load_format != "dummy", args.origin), task)
