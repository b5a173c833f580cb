"""Create a folder with a model's config.json for a different weight format, to be used with random weights.

python -m headway.bench.studies.weight_shapes w4a16 FOLDER --model llama-3-8b

Headway and other engines then read the same folder with `--load-format dummy`.

The number of experts that a step reads depends on the router's weights, and each engine draws different random weights.
`mxfp4 FOLDER --model gpt-oss-20b --weights` therefore also writes weights, which all engines then load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_files import write_bytes
from headway.models.checkpoints.locate import locate

if TYPE_CHECKING:
    import torch

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
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}
"""Name -> `quantization_config`, as in checkpoints of RedHatAI, Qwen and OpenAI. None means bfloat16 weights."""
STD: Final = 0.02
"""Standard deviation of random weights, as in the initialization of most published models."""
_GROUP: Final = 32
"""Number of MXFP4 values per scale."""
_EXPONENT: Final = 127 - 7
"""Scale of random values, as a biased exponent. Uniformly drawn e2m1 values have a standard deviation of 2.9, which 2**-7 scales
to 0.023."""


def weight_shapes(
    form: Annotated[str, typer.Argument(help=f"Weight format: {', '.join(FORMS)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create if missing; its config.json is overwritten.")],
    model: Annotated[str, typer.Option(help="Model: a built-in shape, or a folder with a config.json.")] = "llama-3-8b",
    weights: Annotated[bool, typer.Option(help="Also write random weights (mxfp4 only), using a GPU if available.")] = False,
) -> None:
    """Write the config.json of a model for a different weight format."""
    if form not in FORMS:
        raise ConfigError("form", ", ".join(FORMS), form)
    if weights and form != "mxfp4":
        raise ConfigError("--weights", "mxfp4, whose speed depends on what the router picks", form)
    config = json.loads(read_text(locate(model, weights=False) / "config.json"))
    config.pop("quantization_config", None)
    quantized = FORMS[form]
    full_config = config if quantized is None else {**config, "quantization_config": quantized}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("folder", "a folder that can be made", f"{folder}: {error.strerror}") from error
    write_bytes(f"{json.dumps(full_config, indent=1)}\n".encode(), folder / "config.json")
    if weights:
        _write_weights(folder)
    print(folder)


def _write_weights(folder: Path) -> None:
    """Write model-LAYER.safetensors, and the index of tensors."""
    import torch
    from safetensors.torch import save_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, shape in _parameters(folder):
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", []).append((name, shape))
    index: dict[str, str] = {}
    for file, parameters in files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in parameters:
            tensors.update(_drawn(name, shape, generator))
        save_file(tensors, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    write_bytes(json.dumps({"metadata": {}, "weight_map": index}).encode(), folder / "model.safetensors.index.json")


def _parameters(folder: Path) -> Iterator[tuple[str, torch.Size]]:
    """Yield names and shapes of a model's bfloat16 parameters, as in transformers."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    make: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config, dtype=torch.bfloat16)
    yield from ((name, parameter.shape) for name, parameter in model.named_parameters())


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
    """Return random values of a parameter under the checkpoint's names, on the CPU.

    Norm weights are 1. The experts' [experts, in, out] become NAME_blocks [experts, out, in / 32, 16], two values per byte, and
    NAME_scales [experts, out, in / 32].
    """
    import torch

    device = generator.device
    if name.endswith(("gate_up_proj", "down_proj")):
        experts, inner, outer = shape
        blocks = torch.randint(0, 256, (experts, outer, inner // _GROUP, _GROUP // 2), generator=generator, device=device)
        scales = torch.full((experts, outer, inner // _GROUP), _EXPONENT, dtype=torch.uint8)
        return {f"{name}_blocks": blocks.to(torch.uint8).cpu(), f"{name}_scales": scales}
    if name.endswith("norm.weight"):
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    return {name: (STD * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16).cpu()}


if __name__ == "__main__":
    run_study(weight_shapes)
