"""The command line as a whole: help, errors, laziness, `prehoc env`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prehoc import cli
from prehoc.cli import _common


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prehoc.cli", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **env},
    )


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["prehoc", *args])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, text in cli.COMMANDS.items():
        assert name in result.stdout
        assert text in result.stdout, "the line must not be cut off"


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['prehoc', '--help']\n"
        "from prehoc.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); print(sorted(heavy), file=sys.stderr)"
    )
    began = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "[]"
    assert time.perf_counter() - began < 5, (
        "far above what it takes (0.2 s), far below importing torch on a busy machine"
    )


def test_a_usage_error_imports_no_torch() -> None:
    lines = [*(f"{name} --no-such-option" for name in cli.COMMANDS), "generate --model m", "bench decode --steps x"]
    code = (
        "import sys\nfrom prehoc.cli import main\n"
        f"for line in {lines}:\n"
        "    sys.argv = ['prehoc', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as stop: assert stop.code == 2, line\n"
        "    assert 'torch' not in sys.modules, line"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("No such option") == len(cli.COMMANDS)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"prehoc.cli.{name}")
    if hasattr(module, "app"):  # a group of commands
        commands = {(name, c.name or c.callback.__name__): c.callback for c in module.app.registered_commands}
    else:
        commands = {(name,): module.command}
    for words, function in commands.items():
        assert function.__doc__, words
        assert call(monkeypatch, *words, "--help") == 0
        assert " ".join(function.__doc__.split())[:40] in " ".join(capsys.readouterr().out.split())


def test_unknown_command_and_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "pul") == 2
    assert "No such command 'pul'" in capsys.readouterr().err
    assert call(monkeypatch, "env", "--jsn") == 2
    assert "--jsn" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_2() -> None:
    result = run("pull", "smollm2-135m-instuct")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown model 'smollm2-135m-instuct'; did you mean 'smollm2-135m-instruct'")
    assert result.stderr.count("\n") == 1


def test_traceback_on_request() -> None:
    result = run("--traceback", "pull", "nothing")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_env_json_is_one_document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run("env", "--json", PREHOC_CACHE=str(tmp_path / "not" / "yet"))
    assert result.returncode == 0
    facts = json.loads(result.stdout)
    assert facts["cache"] == str(tmp_path / "not" / "yet")
    assert facts["cache_free_bytes"] > 0
    assert facts["cpu_count"] >= 1
    import torch
    import transformers

    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["transformers"] == transformers.__version__


def test_env_text_names_every_fact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from prehoc.cli import env

    assert call(monkeypatch, "env") == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == list(env.gather())


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        _common.emit_json({"x": float("nan")})


def test_progress_without_a_terminal_is_a_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with _common.progress() as report:
        for done in range(100):
            report("reading", done, 100)
        report("writing", 0, 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "reading ...\nwriting ...\n"


def test_setup_applies_threads_and_seed() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        _common.setup(threads=1, seed=3)
        assert torch.get_num_threads() == 1
        first = torch.rand(4)
        _common.setup(seed=3)
        assert torch.equal(torch.rand(4), first)
    finally:
        torch.set_num_threads(before)
