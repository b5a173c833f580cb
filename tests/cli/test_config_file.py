"""--config: options from a file, under those of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from headway.cli.app import Command, make_app
from headway.cli.options import ConfigFile
from headway.core.contract.errors import ConfigError

headway = make_app()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FOUND: dict[str, Any] = {}


@app.command(cls=Command)
def command(
    model: Annotated[str, typer.Argument()] = "smollm2",
    config: ConfigFile = None,
    max_len: Annotated[int, typer.Option(min=1)] = 5,
    name: Annotated[list[str] | None, typer.Option()] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs")] = True,
    log: Annotated[bool, typer.Option("--log")] = False,
) -> None:
    """A command."""
    FOUND.clear()
    FOUND.update(model=model, max_len=max_len, name=name, graphs=graphs, log=log)


def run(path: Path, text: str, *arguments: str) -> dict[str, Any]:
    path.write_text(text)
    done = CliRunner().invoke(app, [*arguments, "--config", str(path)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return dict(FOUND)


def test_a_file_gives_what_the_command_line_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = "model: other\nmax-len: 7\nname: [a, b]\nno-graphs: true\nlog: true\n"
    assert run(path, text) == {"model": "other", "max_len": 7, "name": ["a", "b"], "graphs": False, "log": True}
    assert run(path, text, "mine", "--max-len", "9", "--name", "c", "--graphs") == {
        "model": "mine",
        "max_len": 9,
        "name": ["c"],
        "graphs": True,
        "log": True,
    }
    assert run(path, "max_len: null\n")["max_len"] == 5
    assert run(path, "name: a\n")["name"] == ["a"]
    assert run(path, "# nothing\n")["model"] == "smollm2"


@pytest.mark.parametrize(("arguments", "served"), [(["no/such/one"], "one"), (["--model", "no/such/one"], "one"), ([], "two")])
def test_the_model_of_the_command_line_is_served(tmp_path: Path, arguments: list[str], served: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: no/such/two\n")
    done = CliRunner().invoke(headway, ["serve", *arguments, "--port", "0", "--config", str(path)])
    assert f"model 'no/such/{served}' is unknown" in str(done.exception)


BAD = {
    "an unknown name": ("max-lem: 7", "did you mean max-len"),
    "a list": ("- a", "names and values"),
    "no YAML": ("a: [", "a YAML file"),
    "a mapping": ("name: {a: 1}", "for name"),
    "a list for one value": ("max-len: [7, 8]", "one value for max-len"),
    "itself": ("config: other.yaml", "options of the command"),
    "no truth value": ("no-graphs: 3", "true or false"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        run(tmp_path / "c.yaml", text)
    assert "\n" not in str(caught.value)


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--config", str(tmp_path)])
    assert isinstance(done.exception, IsADirectoryError)
    assert done.exception.filename == str(tmp_path)


def test_values_are_checked_as_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="max-len"):
        run(tmp_path / "c.yaml", "max-len: 0")
    with pytest.raises(AssertionError, match="max-len"):
        run(tmp_path / "c.yaml", "max-len: many")
