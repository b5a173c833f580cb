"""`headway diff A B`: compare two attention backends, or a backend and a float64 reference, on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.engine_options import takes_engine_options
from headway.cli.options import report_written, write_result
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.system.files import read_text
from headway.core.system.terminal import Terminal, progress_bar
from headway.engine_args import EngineArgs

if TYPE_CHECKING:
    import torch

    from headway.bench.diff.results import SideReport
    from headway.bench.diff.sides import DiffModels, Side
    from headway.models.loader import LoadedModel

_NUM_PROMPTS = 4  # Number of built-in prompts to run if the user gives none
_QUANTIZATION = (
    "Quantization of A's weights: fp8 (quantized while loading; B keeps plain weights) or checkpoint (quantized kernels; B "
    "uses the dequantized checkpoint). Loads the model twice."
)
_RANDOM_LENGTHS = (7, 64, 300, 1000)  # Tokens per prompt if the model has no tokenizer


@takes_engine_options(
    *("model", "attn_options", "kv_layout", "block_size", "load_format", "model_impl", "dtype", "device"),
    *("num_threads", "plugins"),
)
def diff(
    a: Annotated[str, typer.Argument(help="Backend to test: NAME, prefill=NAME,decode=NAME, or reference.")],
    engine: dict[str, Any],
    b: Annotated[str, typer.Argument(help="Backend to compare with. reference is attention in float64.")] = "reference",
    prompt: Annotated[list[str] | None, typer.Option(help="Text to run. Repeatable.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="File with one text per line.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Number of tokens that B generates after each text, in decode steps.")
    ] = 16,
    extend: Annotated[bool, typer.Option(help="Split each text in two to compare the extend phase too.")] = True,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Element type of A's KV cache: auto, fp8_e4m3 or int8_per_token_head. B uses the model's.")
    ] = "auto",
    quantization: Annotated[str | None, typer.Option(help=_QUANTIZATION)] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the error of each layer by phase to this .png file.")] = None,
) -> None:
    """Compare the outputs of two backends, layer by layer.

    The report ends with the effect of the difference on the next tokens.

    With --quantization, the weights are compared too.

    The exit code is 0 if the difference is within the declared tolerance, 1 if it is beyond the tolerance, and 2 if the
    comparison failed.
    """
    from headway.bench.diff.results import DiffReport, print_report, to_png
    from headway.bench.diff.run import check_prompts, compare, num_steps
    from headway.bench.diff.sides import SideOptions, check_side, make_side
    from headway.core.contract.spec import DTYPE_NAMES
    from headway.core.select.request import LayerSpecs
    from headway.core.system.json_files import write_bytes
    from headway.core.system.provenance import Origin, command_line
    from headway.tuning.measure.device import identify_device, resolve_device

    if picture is not None:
        _check_picture(picture)
    args = EngineArgs.of(**{**engine, "kv_cache_dtype": kv_cache_dtype})
    options = SideOptions(args.kv_layout, args.block_size, args.attn_options)
    registry = args.make_registry()
    for name in (a, b):
        check_side(name, registry, options)
    texts = _texts(prompt, prompts_file) if prompt or prompts_file else None
    place, err = resolve_device(args.device), Terminal(stderr=True)
    models = _load(args, place, quantization, err)
    loaded, decoder = models.b, models.b.decoder
    side_a = make_side(a, registry, LayerSpecs.of(decoder, kv_cache_dtype, decoder.kv_scales).cached, options)
    side_b = make_side(b, registry, decoder.attention_specs, options)
    prompts = _token_ids(loaded, texts)
    check_prompts(decoder, prompts, max_tokens)
    with progress_bar(err) as bar:
        task = bar.add_task("comparing", total=num_steps(prompts, max_tokens, extend))
        advance = partial(bar.advance, task)
        phases = compare(decoder, side_a, side_b, prompts, max_tokens, extend, advance, model_a=models.a.decoder)
    title_a = a if kv_cache_dtype == "auto" else f"{a} with a {kv_cache_dtype} cache"
    report = DiffReport(
        origin=Origin.here(),
        command=command_line(),
        device=identify_device(place),
        model=loaded.name,
        dtype=DTYPE_NAMES[decoder.dtype],
        a=_side_report(side_a, title_a, models.weights_a, models.products),
        b=_side_report(side_b, b, models.weights_b),
        prompts=len(prompts),
        max_tokens=max_tokens,
        phases=phases,
    )
    print_report(report, Terminal())
    write_result(report, output, err)
    if picture is not None:
        write_bytes(to_png(report), picture)
        report_written(picture, err)
    if not report.within_tolerance:
        raise typer.Exit(1)


def _side_report(side: Side, name: str, weights: str, products: Sequence[str] = ()) -> SideReport:
    from headway.bench.diff.results import SideReport

    return SideReport(name=name, kv_layout=side.layout.name, block_size=side.block_size, weights=weights, products=list(products))


def _load(args: EngineArgs, device: torch.device, quantization: str | None, err: Terminal) -> DiffModels:
    from headway.bench.diff.sides import load_models
    from headway.machine.process import set_threads

    if device.type == "cpu":
        set_threads(args.num_threads)
    with err.status(f"loading {args.model}"):
        return load_models(args.model, args.dtype, device, args.load_format, args.model_impl, quantization)


def _check_picture(path: Path) -> None:
    """Check the file name, and that the chart library is installed, before the comparison begins."""
    from headway.bench.charts import new_figure

    if path.suffix.lower() != ".png":
        raise ConfigError("--picture", "a file name that ends in .png", str(path))
    new_figure(1, 1)


def _texts(prompts: list[str] | None, path: Path | None) -> list[str]:

    texts = list(prompts or [])
    if path is not None:
        need = "a UTF-8 text file with a prompt on each line"
        try:
            lines = read_text(path).splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError("--prompts-file", need, str(path), str(error)) from error
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise ConfigError("--prompts-file", need, f"{path}, which has none")
    for number, text in enumerate(texts):
        if not text:
            raise PromptError(f"prompt {number}", "at least one character", "an empty text")
    return texts


def _token_ids(model: LoadedModel, texts: list[str] | None) -> list[list[int]]:
    """Return the token ids of the texts, or of the first built-in prompts if there are no texts. Without a tokenizer, return
    random ids."""

    from headway.bench.generate.workloads import take_prompts

    if model.tokenizer is not None:
        return [list(model.tokenizer(text)["input_ids"]) for text in texts or take_prompts(_NUM_PROMPTS)]
    if texts:
        raise ConfigError("--prompt", "a model with a tokenizer", model.name, "leave it out: random token ids are taken")
    random, longest = Random(0), model.decoder.max_position_embeddings // 2
    return [[random.randrange(model.decoder.vocab_size) for _ in range(min(length, longest))] for length in _RANDOM_LENGTHS]
