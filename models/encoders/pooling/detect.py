"""Detection of a model folder's task from its small JSON files, without importing torch, so that commands start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json

PoolingTask = Literal["embed", "score", "reward"]
"""Pooling task: embed (a vector per text), score (a number per query and document) or reward (scores per token or step)."""
RUNNERS: Final = ("auto", "generate", "pooling")
TASKS: Final = ("auto", "generate", "embed", "score", "reward")
ENCODER_TYPES: Final = ("bert", "modernbert", "roberta", "xlm-roberta")
"""Model types with an entry in `models.encoders.families.ENCODERS`."""
_REWARDING: Final = ("ForTokenClassification", "ForRewardModel", "ForProcessRewardModel")
"""Suffixes of architecture names for models that return a result per token."""


def pooling_task(folder: Path, runner: str = "auto", task: str = "auto") -> PoolingTask | None:
    """Return the pooling task of a model; None if it generates text.

    runner, task: the user's choices from RUNNERS and TASKS. If both are auto, the task depends on the model. Sequence classifiers
    get score. Reward models and token classifiers get reward. Encoders, bidirectional models and sentence-transformers folders
    get embed. All other models generate text.

    :raises ConfigError: if runner and task contradict each other.
    """
    pools, generates = runner == "pooling", runner == "generate"
    if (generates and task in ("embed", "score", "reward")) or (pools and task == "generate"):
        raise ConfigError("task", f"one that runner={runner} has", task, "leave one of the two out")
    if generates or task == "generate":
        return None
    if task in ("embed", "score", "reward"):
        return task  # type: ignore[return-value]
    config = read_object(folder / "config.json")
    architectures = config.get("architectures")
    named = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if any(name.endswith("ForSequenceClassification") for name in named):
        return "score"
    if any(name.endswith(_REWARDING) for name in named):
        return "reward"
    embeds = config.get("model_type") in ENCODER_TYPES or bool(config.get("use_bidirectional_attention"))
    return "embed" if pools or embeds or (folder / "modules.json").is_file() else None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Return an empty object if the file is unreadable, because this is an error only when the file is
    needed."""
    try:
        read = parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
