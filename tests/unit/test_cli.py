"""The `vllm-kda` command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_kda_plugin import cli


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_kda_plugin import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'vllm', 'rich', 'transformers', 'openai', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert "demo" in done.stdout


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_wrong_use_exits_2_with_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: vllm-kda" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["doctor", "demo"])
def test_exit_code_is_the_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"vllm_kda_plugin.{name}.run", lambda: 7)
    assert cli.main([name]) == 7
