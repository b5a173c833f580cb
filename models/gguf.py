""".gguf files: dequantised by transformers once, kept as a safetensors folder, so that the second start takes seconds."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.folders import cache_folder
from headway.core.system.terminal import Terminal
from headway.models.families import read_decoder_config


def convert(path: Path) -> Path:
    """Folder with the model's float32 weights and tokenizer; made if it is not there yet (SmolLM2-135M: about 20 s).

    The folder appears whole or not at all, so two first starts at once do no harm.

    :raises ModelError: no such file, no gguf reader, or a file transformers cannot read.
    """
    if not path.is_file():
        raise ModelError(f"model {path}: no such file")
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_folder() / "models" / f"{path.stem}-{key}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        Terminal(stderr=True).print(f"converting {path.name} to safetensors, once", highlight=False)
        _convert(path, scratch)
        with suppress(OSError):  # another process was faster: its folder is the same
            os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(path: Path, target: Path) -> None:
    try:
        import accelerate  # noqa: F401  (transformers needs both to read a .gguf file)
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(f"model {path}: needs {error.name} to read .gguf files; pip install 'headway[gguf]'") from error
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_decoder_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))  # before what takes long
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except ModelError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(f"model {path}: transformers cannot read it ({type(error).__name__}: {text})") from error
    # The weights are plain float32 by now, but transformers still calls the model quantised and would refuse to save it.
    for name, value in (("hf_quantizer", None), ("is_quantized", False)):
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.max_length = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
