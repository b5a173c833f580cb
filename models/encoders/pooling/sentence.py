"""What sentence-transformers' files say of a model: how token states are pooled, and what comes behind that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

PoolingType = Literal["cls", "mean", "last"]
"""The state of a text's first token, the mean of all, or that of the last."""
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)

_MODES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Switches of 1_Pooling/config.json -> the name that sentence-transformers gives each today."""


@dataclass(frozen=True)
class DenseModule:
    """A product behind the pooling."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """The name of a class of torch.nn, such as Identity or Tanh."""


@dataclass(frozen=True)
class SentenceModules:
    """The modules behind the transformer."""

    pooling: PoolingType
    dense: tuple[DenseModule, ...]
    normalize: bool
    """Whether vectors are divided by their length."""
    max_seq_length: int | None
    """Tokens of the longest text; None: the files do not say."""


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Read modules.json and what it names; None where there is none.

    :raises ModelError: a file that cannot be read, or a module that Headway does not compute.
    """
    if not (folder / "modules.json").is_file():
        return None
    listed = _read(folder / "modules.json", list)
    pooling: PoolingType | None = None
    dense: list[DenseModule] = []
    normalize = False
    for number, module in enumerate(listed):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelError(f"model {folder}: modules.json needs objects with a type, got {shown(module)}")
        kind, path = module["type"].rpartition(".")[2], _inside(folder, module.get("path", ""))
        if number == 0 and (kind != "Transformer" or path != folder):
            got = f"{kind} in {path.name}" if path != folder else kind
            raise ModelError(f"model {folder}: modules.json needs a Transformer in the folder itself at first, got {got}")
        if kind == "Pooling" and pooling is None:
            pooling = _pooling(_read(path / "config.json", dict), path)
        elif kind == "Dense" and pooling is not None:
            dense.append(_dense(_read(path / "config.json", dict), path))
        elif kind == "Normalize" and number == len(listed) - 1:
            normalize = True
        elif number and kind != "Dropout":
            need = "Transformer, Pooling, Dense and Normalize in this order"
            raise ModelError(f"model {folder}: modules.json: needs {need}, got {kind} as number {number}")
    if pooling is None:
        raise ModelError(f"model {folder}: modules.json names no Pooling, so that a text would have a vector for each token")
    return SentenceModules(pooling, tuple(dense), normalize, _max_seq_length(folder))


def _max_seq_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    value = _read(path, dict).get("max_seq_length") if path.is_file() else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ModelError(f"model {folder}: {path.name} needs a max_seq_length of at least 1, got {shown(value)}")
    return value


def _pooling(config: dict[str, Any], folder: Path) -> PoolingType:
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for switch, mode in _OLD_MODES.items() if config.get(switch)]
    else:
        modes = [str(each) for each in named] if isinstance(named, list | tuple) else [str(named)]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{folder / 'config.json'}: needs one pooling mode of {', '.join(_MODES)}, got {', '.join(modes) or 'none'}"
        )
    return _MODES[modes[0]]


def _dense(config: dict[str, Any], folder: Path) -> DenseModule:
    sizes: list[Any] = [config.get(name) for name in ("in_features", "out_features")]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ModelError(f"{folder / 'config.json'}: needs in_features and out_features of at least 1, got {shown(sizes)}")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    return DenseModule(folder, sizes[0], sizes[1], bool(config.get("bias", True)), activation)


def _inside(folder: Path, path: object) -> Path:
    if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ModelError(f"model {folder}: modules.json needs paths in its folder, got {shown(path)}")
    return folder / path


def _read(path: Path, kind: type) -> Any:
    try:
        read = parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: it is not a valid JSON file ({error})") from error
    if not isinstance(read, kind):
        raise ModelError(f"{path} cannot be used: it needs a JSON {'list' if kind is list else 'object'}, got {shown(read)}")
    return read
