"""Installed, the plugin is found; uninstalled, vLLM and the environment are exactly what they were."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import sysconfig
import venv

import pytest

CHECKOUT = pathlib.Path(__file__).parents[2]
FOUND = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
custom = AttentionBackendEnum.CUSTOM
print("found:", custom.get_path() if custom.is_overridden() else "stock")
"""


def run(*command: str) -> str:
    # Not in the checkout: metadata that a build left there would count as installed.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, without byte code, which Python writes when it likes."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.fixture
def python(tmp_path: pathlib.Path) -> pathlib.Path:
    """An environment that has all that this one has but the plugin."""
    venv.create(tmp_path / "venv", symlinks=True)
    everything = tmp_path / "everything"
    everything.mkdir()
    for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
        if "vllm_kda_plugin" not in entry.name:
            (everything / entry.name).symlink_to(entry)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "everything.pth").write_text(str(everything))
    return tmp_path / "venv" / "bin" / "python"


def test_uninstalling_leaves_nothing(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    vllm = pathlib.Path(sysconfig.get_path("purelib")) / "vllm"
    before = files(python.parents[1]), files(vllm)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path), str(CHECKOUT)]
    run(*pip, *build)
    (wheel,) = tmp_path.glob("vllm_kda_plugin-*.whl")

    run(*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel))
    assert run(str(python), "-c", FOUND).splitlines()[-1] == (
        "found: vllm_kda_plugin.attention.backend.GatherTorchBackend"
    )
    run(*pip, "--python", str(python), "uninstall", "-q", "-y", "vllm-kda-plugin")
    assert run(str(python), "-c", FOUND).splitlines()[-1] == "found: stock"
    assert (files(python.parents[1]), files(vllm)) == before
