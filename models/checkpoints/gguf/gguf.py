"""Conversion of .gguf files to safetensors: hybrid models by the `hybrid_*` modules, others by transformers."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy
import torch

from headway.core.contract.errors import ModelError
from headway.core.system.files import cache_folder, new_folder
from headway.core.system.system_errors import is_rust_panic
from headway.core.system.terminal import Terminal, progress_bar
from headway.models.checkpoints.checkpoint import check_bounds, check_sizes
from headway.models.checkpoints.end_tokens import save_gguf_ends
from headway.models.checkpoints.gguf.blocks import write_blocks
from headway.models.checkpoints.gguf.header import Header, refuse_part, refuse_unread_tensors, require_keys, take_rope_scaling
from headway.models.checkpoints.gguf.hybrid_architectures import ARCHITECTURES, architecture_of
from headway.models.checkpoints.gguf.hybrid_convert import write_folder
from headway.models.checkpoints.gguf.layout import check_layout
from headway.models.checkpoints.tensor_files import TensorFiles
from headway.models.families.families import read_decoder_config

log = logging.getLogger("headway")
_MEMMAP: Any = numpy.memmap
_READING = Lock()  # Held while functions of gguf and transformers are replaced: one conversion per process
_UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))  # Errors of writing, not of reading
_TEXTS = ([8], [9, 8])  # .gguf types of a string and of an array of strings
_FORM = "with blocks, scaled positions and ends"
"""Description of a converted folder's contents. Changing it causes every file to be converted again."""


def missing_readers() -> list[str]:
    """Return the packages of the extra `gguf`, needed by transformers to read .gguf files, that are not installed."""
    return [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]


def convert(path: Path) -> Path:
    """Return the folder with the model's float32 weights and tokenizer, converting the file if needed (SmolLM2-135M: about 20 s).

    The folder appears complete or not at all, so concurrent first starts are safe. Truncated folders are converted again,
    and leftovers of killed conversions are removed. Each release of transformers has a separate folder: the tokenizers written by
    releases 5.4 and 5.5 split texts differently.

    :raises ModelError: if no such file exists, no gguf reader is installed, or transformers cannot read the file.
    """
    if not path.is_file():
        raise ModelError(f"model {path}: no such file")
    stat = path.stat()
    made_of = path.resolve(), stat.st_size, stat.st_mtime_ns, importlib.metadata.version("transformers"), _FORM
    key = hashlib.sha256(os.fsencode(" ".join(map(str, made_of)))).hexdigest()[:12]
    target = cache_folder() / "models" / f"{path.stem}-{key}"
    if target.exists():
        damage = _damage(target)
        if not damage:
            return target
        log.warning("model %s: %s is incomplete (%s); converting again", path.name, target, damage)
        shutil.rmtree(target)
    missing = missing_readers()
    if missing:
        raise ModelError(f"model {path}: needs {' and '.join(missing)} to read .gguf files; pip install 'headway[gguf]'")
    with new_folder(target) as scratch:
        Terminal(stderr=True).print(f"converting {path.name} to safetensors, once", highlight=False)
        convert_into(path, scratch)
    return target


def _damage(folder: Path) -> str:
    """Return a description of the first truncated or unreadable file of a converted model; empty if all files are intact."""
    for path in (folder / "config.json", *folder.glob("*.json")):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 64))
                if not file.read().rstrip().endswith(b"}"):
                    return f"{path.name} ends too early"
        except OSError as error:
            return f"{path.name}: {error.strerror}"
    try:
        TensorFiles(folder, torch.device("cpu")).close()
    except ModelError as error:
        return str(error).partition(";")[0]
    return ""


def convert_into(path: Path, target: Path) -> None:
    """Write the checkpoint of a .gguf file into a folder, as safetensors."""
    with _read_by("gguf", path):
        check_layout(path)
        with _read_once(path):
            _convert(path, target)


def _convert(path: Path, target: Path) -> None:
    with _read_by("gguf", path):
        header = Header(path)
        refuse_part(header)
        check_bounds(path, header.sizes, {name: header.shape(name) for name in header.names}, "its header")
        architecture = architecture_of(header)
        if architecture is not None:
            write_folder(header, architecture, target)
            save_gguf_ends(header, target)
            return
    with _read_by("transformers", path, header.architecture):
        _convert_by_transformers(header, target)
    with _read_by("gguf", path):
        write_blocks(path, target)
        save_gguf_ends(header, target)


@contextmanager
def _read_once(path: Path) -> Iterator[None]:
    """Make transformers parse the header once instead of four times (seconds each), and show one progress bar instead of
    three."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.utils import logging

    parse, bars = gguf.GGUFReader, cast("Any", logging)
    with _READING, progress_bar(Terminal(stderr=True)) as progress:
        with _replaced(numpy, memmap=_mapped):
            header, shown = parse(path), bars.is_progress_bar_enabled()

        def reader(of: Any, *options: Any) -> Any:
            return header if Path(of) == path else parse(of, *options)

        def tensors(each: Any, desc: str) -> Any:
            return progress.track(each, description=f"converting {path.name}")

        parse_value = vars(reading)["_gguf_parse_value"]

        values: dict[int, Any] = {}

        def value(part: Any, types: Any) -> Any:
            """Return the value that transformers reads from a header field. The value is cached, because transformers requests it
            three times."""
            if id(part) not in values:  # decode a text without a Python int per byte
                values[id(part)] = part.tobytes().decode() if types in _TEXTS else parse_value(part, types)
            return values[id(part)]

        names = cache(gguf.get_tensor_name_map)
        bars.disable_progress_bar()
        try:
            with (
                _replaced(gguf, GGUFReader=reader, get_tensor_name_map=names),
                _replaced(reading, tqdm=tensors, _gguf_parse_value=value),
            ):
                yield
        finally:
            if shown:
                bars.enable_progress_bar()


def _mapped(path: Path, mode: str) -> numpy.ndarray[Any, Any]:
    """Map a file as a plain array. Slicing a `memmap` takes several times as long, and reading the strings takes 100,000
    slices."""
    mapped: numpy.ndarray[Any, Any] = _MEMMAP(path, mode=mode).view(numpy.ndarray)
    return mapped


@contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Replace functions of a module while the context lasts."""
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


@contextmanager
def _read_by(reader: str, path: Path, architecture: str = "") -> Iterator[None]:
    """Convert errors of a file-reading library into errors that name the file. :raises ModelError: if reading fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            hint = "free some space, or have HEADWAY_CACHE name another folder"
            raise ModelError(
                f"model {path}: its converted form cannot be kept in {cache_folder()}: {error.strerror} ({hint})"
            ) from error
        if architecture and "not supported yet" in text:
            raise ModelError(
                f"model {path}: general.architecture needs {', '.join(ARCHITECTURES)}, or one that transformers "
                f"{importlib.metadata.version('transformers')} reads, got {architecture}; use the model's safetensors folder"
            ) from error
        hint = "; a file that was cut short needs to be fetched again" if reader == "gguf" else ""
        raise ModelError(f"model {path}: {reader} cannot read it ({type(error).__name__}: {text}){hint}") from error


def _convert_by_transformers(header: Header, target: Path) -> None:
    """Convert a file that transformers can read.

    :raises ModelError: if tensors are missing, or transformers ignores a setting or a tensor that changes the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = header.path
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        if "not supported yet" not in str(error):
            require_keys(header)  # its error names the key
        raise
    require_keys(header)
    check_sizes(path, config.to_dict(), "its header")
    take_rope_scaling(header, config)
    read_decoder_config(config)  # before the slow steps
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    made: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        local_files_only=True,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, found = made
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would use random values
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {path}: it has no tensor {missing[0]}{more}, which its header implies")
    for name, got, need in sorted(found["mismatched_keys"]):  # transformers would use random values here too
        raise ModelError(f"model {path}: {name} needs shape {list(need)} by its header, got {list(got)}")
    refuse_unread_tensors(header, model.state_dict())
    if hasattr(config, "rope_parameters"):  # transformers has read the file again, without the scaling
        model.config.rope_parameters = config.rope_parameters
    # The weights are plain float32 by now, but transformers still calls the model quantized and would refuse to save it.
    for name, value in (("hf_quantizer", None), ("is_quantized", False)):
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.max_length = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
