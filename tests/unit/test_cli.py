"""The `vllm-kda` command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kda_plugin import cli


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_kda_plugin import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'vllm', 'rich', 'transformers', 'openai', 'cupy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert "demo" in done.stdout
    assert "bench" in done.stdout


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["doctor", "--no-such-option"], ["bench"], ["bench", "no"]])
def test_wrong_use_exits_2_with_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: vllm-kda" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["doctor", "demo"])
def test_exit_code_is_the_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"vllm_kda_plugin.{name}.run", lambda: 7)
    assert cli.main([name]) == 7


def test_bench_is_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def run(*arguments: object) -> int:
        given.extend(arguments)
        return 3

    monkeypatch.setattr("vllm_kda_plugin.bench.gather.run", run)
    assert cli.main(["bench", "gather", "--json", "a.json", "--num-tokens", "1", "20", "--plot", "b.SVG"]) == 3
    assert cli.main(["bench", "gather"]) == 3
    assert given == [Path("a.json"), Path("b.SVG"), [1, 20], None, None, None]
