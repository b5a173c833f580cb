"""The command line: what it prints where, and that `headway backends` can be read."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

import headway as package
from headway.cli.app import make_app
from headway.cli.engine_options import options_page
from headway.cli.options import parse_attn_options
from headway.engine_args import EngineArgs
from headway.registry import create_registry
from sandbox import Result, run_python

app = make_app()

ROOT = Path(__file__).resolve().parents[2]

Headway = Callable[..., Result]


def test_the_version_is_printed(headway: Headway) -> None:
    assert headway("--version") == Result(0, f"headway {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"), [((), ("generate", "backends", "bench")), (("bench",), ("throughput",))], ids=str
)
def test_a_command_alone_prints_its_help(headway: Headway, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    alone, asked = headway(*arguments), headway(*arguments, "--help")
    assert asked.code == 0
    assert (alone.out + alone.err).strip() == asked.out.strip()
    for word in ("Usage:", *words):
        assert word in asked.out


@pytest.mark.parametrize("command", [("generate",), ("backends",), ("bench", "throughput")], ids=" ".join)
def test_every_option_has_a_help_text(headway: Headway, command: tuple[str, ...]) -> None:
    lines = headway(*command, "--help", columns=200).out.splitlines()
    options = [line.strip("│ ") for line in lines if line.strip("│* ").startswith("--")]
    assert options
    for line in options:
        assert len(line.split("  ")) > 1, line


def test_generate_writes_the_text_to_stdout_and_the_rest_to_stderr(headway: Headway, tiny_model_folder: Path) -> None:
    arguments = ("generate", "--model", str(tiny_model_folder), "--max-tokens", "12", "--ignore-eos")
    first = headway(*arguments, "the quick fox")
    assert first.code == 0, first
    assert first.out.strip()
    assert "tokens/s" not in first.out
    line = r"[\d.,]+ tokens/s \(12 tokens, cut off; first after \d+\.\d\d s\) - prefill: \w+, decode: [\w ]+ - --stats: more"
    assert re.fullmatch(line, first.err.splitlines()[-1])
    options = ("--kv-layout", "vllm_5d", "--block-size", "64", "--dtype", "float32", "--stats")
    second = headway(*arguments, "--attn-backend", "prefill=sdpa,decode=sdpa.math", *options, "the quick fox")
    assert second.out == first.out
    for word in ("tokens/s (12 tokens in ", "; length; loaded in ", "model: computed by "):
        assert word in second.err
    assert "prefill=sdpa, extend=sdpa, decode=sdpa.math; kv_layout=vllm_5d, block_size=64" in second.err


def test_a_prompt_that_begins_with_a_dash_goes_after_two_dashes(headway: Headway, tiny_model_folder: Path) -> None:
    result = headway("generate", "--model", str(tiny_model_folder), "--max-tokens", "2", "--", "--the fox")
    assert result.code == 0, result
    assert "tokens/s" in result.err


def test_generate_prints_json_for_programs(headway: Headway, tiny_model_folder: Path) -> None:
    arguments = ("generate", "--model", str(tiny_model_folder), "--max-tokens", "5", "--ignore-eos")
    result = headway(*arguments, "--json", "the quick fox")
    assert result.code == 0, result
    record = json.loads(result.out)
    assert record["text"].strip() == headway(*arguments, "the quick fox").out.strip()
    assert (record["prompt"], record["output_tokens"], record["finish_reason"]) == ("the quick fox", 5, "length")
    assert len(record["token_ids"]) == 5
    assert record["tokens_per_second"] > 0
    assert record["attention"].startswith("prefill=")


def test_sampled_text_is_repeated_by_its_seed(headway: Headway, tiny_model_folder: Path) -> None:
    arguments = ("generate", "--model", str(tiny_model_folder), "--temperature", "2.5", "--ignore-eos", "--max-tokens", "16")
    one, again, other = (headway(*arguments, "--seed", seed, "the fox") for seed in ("1", "1", "2"))
    assert one.out == again.out
    assert one.out != other.out


def test_json_has_a_row_for_every_backend_with_its_claims(headway: Headway, plugins: Path) -> None:
    result = headway("backends", "--json")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer.keys() == {"backends", "state_backends", "failures"}
    rows = {row["name"]: row for row in answer["backends"]}
    assert list(rows) == list(create_registry().backends)
    for row in rows.values():
        assert {"name", "kind", "summary", "available", "reasons"} <= row.keys()
        assert bool(row["reasons"]) != row["available"]
    toy = rows["toy.decode"]
    assert (toy["kind"], toy["available"], toy["phases"]) == ("headway_toy 1.0", True, ["decode"])
    assert (toy["layouts"], toy["block_multiple"], toy["devices"], toy["features"]) == (["hnd"], 64, ["cpu"], [])
    sdpa = rows["sdpa"]
    assert (sdpa["kind"], sdpa["phases"]) == ("built-in", ["prefill", "extend", "decode"])
    assert sdpa["layouts"] == ["nhd", "hnd", "vllm_5d", "latent", "nhd_int8"]
    assert (sdpa["head_dims"], sdpa["dtypes"]) == (None, ["float32", "bfloat16", "float16"])
    missing = rows["missing_library"]
    assert "libkernel>=2" in missing["reasons"][0]
    assert "compute capability 9.0" in rows["other_machine"]["reasons"][0]


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_of_backends_has_a_line_for_each_and_cuts_nothing_off(headway: Headway, plugins: Path, columns: int) -> None:
    result = headway("backends", columns=columns)
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= columns
    assert "…" not in result.out
    seen = Counter(re.findall(r"[^\s()│]+", result.out))
    for word in ("name", "kind", "phases", "layouts", "dtypes", "'libkernel>=2'", "capability", "ImportError:", "Hopper"):
        assert seen[word], word
    rows = json.loads(headway("backends", "--json").out)["backends"]
    printed = result.out.partition("backends of layers with a state")[0]
    titles = "ready here|not ready|needs an NVIDIA GPU"
    groups = dict(re.findall(rf"^ ({titles}) *\n((?:   .*\S.*\n)+)", printed, re.MULTILINE))
    for row in rows:
        own = re.compile(rf"^   {re.escape(row['name'])} .*$", re.MULTILINE)
        ((title, line),) = ((title, found[0]) for title, lines in groups.items() if (found := own.search(lines)))
        assert (title == "ready here") == row["available"]
        assert (f" {row['name']} is not ready: " in result.out) == (title == "not ready")
        assert row["kind"].split()[0] in line
        assert ("bf16" in line) == ("bfloat16" in row.get("dtypes", ()))


def test_options_of_backends_are_read() -> None:
    texts = ["sdpa.math.a=1", "sdpa.b=x=y", "sdpa.c=", "sdpa.b=2"]
    assert parse_attn_options(texts) == {"sdpa.math": {"a": "1"}, "sdpa": {"b": "2", "c": ""}}
    assert parse_attn_options([]) == {}


HELP = [(), ("bench",), ("table",), ("generate",), ("plan",), ("backends", "explain"), ("bench", "throughput")]


def test_help_and_version_import_no_library_that_takes_seconds() -> None:
    commands = [("--version",), *((*command, "--help") for command in HELP)]
    code = f"""
import sys
from headway.__main__ import main
for command in {commands!r}:
    sys.argv = ["headway", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print("", end="\\f")
    heavy = sorted({{"torch", "transformers", "triton", "matplotlib", "numpy", "pluggy"}} & set(sys.modules))
    assert not heavy, (command, heavy)
"""
    result = run_python("-c", code, cwd=ROOT)
    assert result.code == 0, result
    said = result.out.split("\f")[:-1]
    assert ["headway" in each for each in said] == [True] * len(commands)


def test_the_page_of_options_is_the_one_that_is_printed() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == options_page()


def test_each_option_of_llm_is_a_flag_of_generate_or_a_python_object(headway: Headway) -> None:
    text = headway("generate", "--help", columns=200).out
    otherwise = {"plugins", "plugin_policy", "backends", "registry", "skip_tokenizer_init", "attn_options", "attention_rules"}
    otherwise |= {"hf_overrides", "logits_processors", "worker_extension_cls"}
    names = set(inspect.signature(EngineArgs).parameters) - otherwise
    for name in (*names, "attn_opt", "attention_rule", "no_autotune", "plugin", "plugins"):
        assert f"--{name.replace('_', '-')} " in text, name


def test_every_help_text_can_be_shown() -> None:
    """Square brackets in a help text are markup to the terminal library: `[/x]` raises."""

    def commands(group: Any) -> Iterator[Any]:
        yield group
        for command in getattr(group, "commands", {}).values():
            yield from commands(command)

    for command in commands(typer.main.get_command(app)):
        for text in (command.help, *(getattr(parameter, "help", "") for parameter in command.params)):
            Text.from_markup(text or "")
