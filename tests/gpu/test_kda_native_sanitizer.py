"""Our KDA prefill kernel under compute-sanitizer, which takes minutes."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_kda_native import HARD, _needs_hopper, errors, make, run  # noqa: F401, a fixture for all tests
from tests.support.kda_calls import INPUTS, Args
from tests.support.kda_numerics import KINDS
from vllm_kda_plugin.kernels import kda_native, loader
from vllm_kda_plugin.kernels.kda_native import Schedule

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool: str, fatbins: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=kda_"]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [*command, sys.executable, __file__, str(fatbins)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every kernel ran" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout


def calls() -> Iterator[tuple[Args, Schedule]]:
    """Calls of every kernel, whose tensors lie each in memory of its own."""
    for (numbers, lower_bound), cut in itertools.product(
        [(numbers, bound) for numbers, bound in KINDS if numbers.name in ("all lengths", "thousands of nats")],
        (Schedule(1), Schedule(2), Schedule(1, 32)),
    ):
        args = make((0, 1, 15, 16, 17, 100), 2, lower_bound=lower_bound)
        numbers.change(args)
        yield args, cut


def main(fatbins: str) -> None:
    """What the sanitizer watches: all calls, whose results are checked too."""
    loader.FATBINS = Path(fatbins)
    launched = set()
    prepare = loader.Kernel.prepare

    def note(self: loader.Kernel, entry: str, *rest: Any, **options: Any) -> loader.Launch:
        launched.add(entry)
        return prepare(self, entry, *rest, **options)

    loader.Kernel.prepare = note  # type: ignore[method-assign]
    for args, cut in calls():
        run(args, cut)
        assert max(errors(args)) < HARD
        assert all(bool(args[name].isfinite().all()) for name in INPUTS[:5])
    assert launched == set(loader.KERNELS[kda_native.KERNEL]), launched ^ set(loader.KERNELS[kda_native.KERNEL])
    print("every kernel ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
