"""Runs a test file as a script under compute-sanitizer, and notes which kernels it launches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_kda_plugin.kernels import loader

ROOT = Path(__file__).resolve().parents[2]
_DONE = "every kernel ran"


def finds_nothing(tool: str, kernels: str, script: str, fatbins: Path) -> None:
    """Assert that a tool of compute-sanitizer has nothing to say of a script, which must pass :func:`launching`.

    Args:
        tool: such as ``memcheck``.
        kernels: part of the names of those that are watched.
        script: a file, given ``fatbins``.
        fatbins: a folder of compiled kernels.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name", f"kernel_substring={kernels}"]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [*command, sys.executable, script, str(fatbins)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert _DONE in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout


@contextmanager
def launching(kernel: str, fatbins: str) -> Iterator[None]:
    """Use these fatbins, and assert that every entry point of a kernel file was launched."""
    loader.FATBINS = Path(fatbins)
    launched = set()
    prepare = loader.Kernel.prepare

    def note(self: loader.Kernel, entry: str, *rest: Any, **options: Any) -> loader.Launch:
        launched.add(entry)
        return prepare(self, entry, *rest, **options)

    loader.Kernel.prepare = note  # type: ignore[method-assign]
    yield
    assert launched == set(loader.KERNELS[kernel]), launched ^ set(loader.KERNELS[kernel])
    print(_DONE)
