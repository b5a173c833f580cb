"""A folder with a config.json of a model's shapes whose weights are published in another form, to be filled with random ones.

python -m headway.bench.studies.weight_shapes w4a16 FOLDER --model llama-3-8b

Headway and other engines then read the same folder with `--load-format dummy`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_files import write_bytes
from headway.models.locate import locate

_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def _group(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}


_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_GROUPS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": False,
    "actorder": None,
}
FORMS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {**_COMPRESSED, "format": "float-quantized", "config_groups": _group(_ROWS, _TOKENS)},
    "fp8-blocks": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "w4a16": {**_COMPRESSED, "format": "pack-quantized", "config_groups": _group(_GROUPS, None)},
}
"""Name -> `quantization_config`, as RedHatAI's and Qwen's checkpoints have it; None: weights in bfloat16."""


def weight_shapes(
    form: Annotated[str, typer.Argument(help=f"{', '.join(FORMS)}.")],
    folder: Annotated[Path, typer.Argument(help="Made where it is missing; its config.json is written anew.")],
    model: Annotated[str, typer.Option(help="Shapes that ship, or a folder with a config.json.")] = "llama-3-8b",
) -> None:
    """Write the config.json of a model with its weights in another form."""
    if form not in FORMS:
        raise ConfigError("form", ", ".join(FORMS), form)
    config = json.loads(read_text(locate(model, weights=False) / "config.json"))
    config.pop("quantization_config", None)
    quantized = FORMS[form]
    told = config if quantized is None else {**config, "quantization_config": quantized}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("folder", "a folder that can be made", f"{folder}: {error.strerror}") from error
    write_bytes(f"{json.dumps(told, indent=1)}\n".encode(), folder / "config.json")
    print(folder)


if __name__ == "__main__":
    run_study(weight_shapes)
