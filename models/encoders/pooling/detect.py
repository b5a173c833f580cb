"""What a model folder is for, by its small JSON files alone: nothing here imports torch, so that a command knows at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json

PoolingTask = Literal["embed", "score", "reward"]
"""embed: a text to a vector; score: a query and a document to a number; reward: each token to a number, or to those of labels."""
RUNNERS: Final = ("auto", "generate", "pooling")
TASKS: Final = ("auto", "generate", "embed", "score", "reward")
ENCODER_TYPES: Final = ("bert", "modernbert", "roberta", "xlm-roberta")
"""The model types of `models.encoder_families`."""
_REWARDING: Final = ("ForTokenClassification", "ForRewardModel", "ForProcessRewardModel")
"""Ends of the names of architectures that say something of each token."""


def pooling_task(folder: Path, runner: str = "auto", task: str = "auto") -> PoolingTask | None:
    """Tell for what a model is pooled; None: it generates text.

    runner, task: what the user asked for, of RUNNERS and TASKS. auto: a sequence classifier scores; reward models and
    classifiers of tokens reward; an encoder, attention in both directions and the files of sentence-transformers embed;
    everything else generates.

    :raises ConfigError: runner and task contradict each other.
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
    """Read a JSON object; an empty one where there is none that can be read: whoever needs the file says so later."""
    try:
        read = parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
