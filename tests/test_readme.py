"""Every code block of the README runs, or, where it is long, is checked against the Makefile and the command line."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from prehoc import cli

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LONG = "<!-- long: "
_BLOCK = re.compile(r"(?:^(<!-- [^\n]* -->)\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str, text: str | None = None) -> list[tuple[bool, str]]:
    """Return (long, code) of each block in `language`."""
    found = _BLOCK.findall(README.read_text(encoding="utf-8") if text is None else text)
    return [(before.startswith(LONG), code) for before, name, code in found if name == language]


def commands(code: str) -> list[list[str]]:
    joined = code.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def parse(words: list[str]) -> None:
    """Let the command line's parser read a command without running it."""
    command: Any = typer.main.get_command(cli.app)
    context: Any = None
    name = "prehoc"
    while hasattr(command, "get_command"):  # a group: its commands have names
        context = command.make_context(name, words[:1], parent=context)
        name, words = words[0], words[1:]
        command = command.get_command(context, name)
        assert command is not None, f"no such command: {name}"
    command.make_context(name, list(words), parent=context)


def check(words: list[str]) -> None:
    """Check a long command: a make target that exists, or a prehoc command whose options and methods are right."""
    if words[0] == "make":
        assert set(words[1:]) <= targets(), f"no such target: {words}"
        return
    assert words[0] == "prehoc", f"{words[0]}: only make and prehoc commands can be checked"
    parse(words[1:])
    from prehoc.methods import parse_method, parse_pairs

    given = dict(zip(words, words[1:], strict=False))
    extra: dict[str, Any] = dict(parse_pairs([b for a, b in zip(words, words[1:], strict=False) if a == "--set"]))
    extra |= {"budget": given["--budget"]} if "--budget" in given else {}
    if "--method" in given:
        parse_method(given["--method"], extra)
    for method in given.get("--methods", "").split():
        parse_method(method)
    for option in ("--prompt-file", "--text-file"):
        if option in given:
            assert (ROOT / given[option]).is_file()


def test_there_is_no_block_in_another_language() -> None:
    languages = {name for _, name, _ in _BLOCK.findall(README.read_text(encoding="utf-8"))}
    assert languages == {"python", "bash"}, "every block has a language that this file knows how to run"
    assert README.read_text(encoding="utf-8").count("```") == 2 * len(blocks("python") + blocks("bash"))


def test_python_blocks_run_in_order(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for long, code in blocks("python"):
        assert not long, "python blocks always run"
        exec(compile(code, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "retained mass" in shown
    assert not hasattr(names["model"], "_prehoc_session"), "the last block gives the model back"


@pytest.mark.parametrize("code", [code for long, code in blocks("bash") if long])
def test_long_bash_blocks(code: str) -> None:
    for words in commands(code):
        check(words)


@pytest.mark.parametrize("code", [code for long, code in blocks("bash") if not long])
def test_short_bash_blocks_run(code: str, tmp_path: Path) -> None:
    program = tmp_path / "prehoc"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prehoc.cli "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "make demmo",
        "prehoc generat --model x",
        "prehoc generate --model m --prompt-file README.md --budgets 5",
        "prehoc generate --model m --prompt-file README.md --method cis --set tao=1",
        "prehoc generate --prompt-file README.md",
        "prehoc trace --model m --text-file NO-SUCH-FILE --prompt-tokens 1 --steps 1 --method cis --out x",
        "curl somewhere",
    ],
)
def test_a_wrong_command_would_be_found(line: str) -> None:
    with pytest.raises((AssertionError, ValueError, Exception)):
        check(shlex.split(line))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as when it is run
    spec = importlib.util.spec_from_file_location("readme_script", ROOT / "benchmarks" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "benchmarks"))
    yield module


def test_numbers_are_those_of_the_committed_files(script: ModuleType) -> None:
    for path in script.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert script.fill(path, text) == text, "run: python benchmarks/readme.py"


def test_the_picture_is_there(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert str(script.PICTURE.relative_to(ROOT)) in README.read_text(encoding="utf-8")
    pytest.importorskip("matplotlib")
    import json

    monkeypatch.setattr(script, "PICTURE", tmp_path / "new.png")
    script.draw(json.loads((ROOT / "benchmarks" / "demo.json").read_text()))
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")
