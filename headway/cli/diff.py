"""`headway diff A B`: the same tokens through two attention backends, or through one and float64 attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.engine_options import takes_engine_options
from headway.core.system.terminal import Terminal
from headway.engine_args import EngineArgs

if TYPE_CHECKING:
    from headway.models.loader import LoadedModel

_NUM_PROMPTS = 4
"""Of the built-in prompts, where the user brings none."""
_RANDOM_LENGTHS = (7, 64, 300, 1000)
"""Tokens of the prompts where the model has no tokenizer."""


@takes_engine_options(
    *(
        "model",
        "attn_options",
        "kv_layout",
        "block_size",
        "load_format",
        "model_impl",
        "dtype",
        "device",
        "num_threads",
        "plugins",
    )
)
def diff(
    a: Annotated[str, typer.Argument(help="The side in question: a backend, prefill=NAME,decode=NAME, or reference.")],
    engine: dict[str, Any],
    b: Annotated[str, typer.Argument(help="The side to compare with; reference is attention in float64.")] = "reference",
    prompt: Annotated[list[str] | None, typer.Option(help="A text to run. Repeatable.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A file with a text on each line.")] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Tokens that B writes after each text: the decode steps.")] = 16,
    extend: Annotated[bool, typer.Option(help="Cut each text in two, so that EXTEND is compared too.")] = True,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Element type of A's cache: auto, or fp8_e4m3; B keeps the model's.")
    ] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw each layer's error by phase, as a .png.")] = None,
) -> None:
    """Compare attention backend A with B, layer by layer and head by head, and show what the difference does to the next tokens.

    Exit code 0: within the declared tolerance; 1: beyond it; 2: it could not be compared.
    """
    from headway.bench.diff.report import DiffReport, Side
    from headway.bench.diff.run import check_prompts, compare, num_steps
    from headway.bench.diff.sides import SideOptions, check_side, make_side
    from headway.bench.diff.table import print_report
    from headway.core.contract.errors import ConfigError
    from headway.core.contract.spec import DTYPE_NAMES
    from headway.core.engine.specs import cache_specs
    from headway.models.loader import load_model
    from headway.testing.json_files import write_bytes, write_json
    from headway.testing.origin import Origin, command_line
    from headway.threads import set_threads
    from headway.tuning.device import identify_device, resolve_device
    from headway.tuning.progress import progress_bar

    if picture is not None:
        from headway.bench.charts import new_figure

        if picture.suffix.lower() != ".png":
            raise ConfigError("--picture", "a file name that ends in .png", str(picture))
        new_figure(1, 1)  # what a picture needs is missed before the comparison, not after it
    args = EngineArgs.of(**engine, kv_cache_dtype=kv_cache_dtype)
    options = SideOptions(args.kv_layout, args.block_size, args.attn_options)
    registry = args.make_registry()
    for name in (a, b):
        check_side(name, registry, options)
    texts = _texts(prompt, prompts_file) if prompt or prompts_file else None
    place = resolve_device(args.device)
    if place.type == "cpu":
        set_threads(args.num_threads)
    err = Terminal(stderr=True)
    with err.status(f"loading {args.model}"):
        loaded = load_model(args.model, args.dtype, place, args.load_format, model_impl=args.model_impl)
    decoder = loaded.decoder
    specs = decoder.attention_specs
    stored = cache_specs(specs, kv_cache_dtype, decoder.kv_scales)
    side_a, side_b = make_side(a, registry, stored, options), make_side(b, registry, specs, options)
    prompts = _token_ids(loaded, texts)
    check_prompts(decoder, prompts, max_tokens)
    with progress_bar(err) as bar:
        task = bar.add_task("comparing", total=num_steps(prompts, max_tokens, extend))
        phases = compare(decoder, side_a, side_b, prompts, max_tokens, extend, lambda: bar.advance(task))
    titles = (a if kv_cache_dtype == "auto" else f"{a} with a {kv_cache_dtype} cache"), b
    sides = [
        Side(name=title, kv_layout=side.layout.name, block_size=side.block_size)
        for title, side in zip(titles, (side_a, side_b), strict=True)
    ]
    report = DiffReport(
        origin=Origin.here(),
        command=command_line(),
        device=identify_device(place),
        model=loaded.name,
        dtype=DTYPE_NAMES[specs[0].dtype],
        a=sides[0],
        b=sides[1],
        prompts=len(prompts),
        max_tokens=max_tokens,
        phases=phases,
    )
    print_report(report, Terminal())
    if output is not None:
        write_json(report, output)
        err.print(f"written to {output}", highlight=False)
    if picture is not None:
        from headway.bench.diff.picture import to_png

        write_bytes(to_png(report), picture)
        err.print(f"written to {picture}", highlight=False)
    if not report.within_tolerance:
        raise typer.Exit(1)


def _texts(prompts: list[str] | None, path: Path | None) -> list[str]:
    """What to run: the texts given and those of the file."""
    from headway.core.contract.errors import ConfigError, PromptError
    from headway.core.system.files import read_text

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
    """Of the texts, or of the first built-in ones; for a model without a tokenizer random ones."""
    from random import Random

    from headway.bench.generate.prompts import take_prompts
    from headway.core.contract.errors import ConfigError

    if model.tokenizer is not None:
        return [list(model.tokenizer(text)["input_ids"]) for text in texts or take_prompts(_NUM_PROMPTS)]
    if texts:
        raise ConfigError("--prompt", "a model with a tokenizer", model.name, "leave it out: random token ids are taken")
    random, longest = Random(0), model.decoder.max_position_embeddings // 2
    return [[random.randrange(model.decoder.vocab_size) for _ in range(min(length, longest))] for length in _RANDOM_LENGTHS]
