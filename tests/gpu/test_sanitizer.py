"""Every gather kernel under compute-sanitizer, on small tensors that come from the host.

Run as a script, this file is what the sanitizer watches.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.exact import FP8, WIDE
from tests.support.on_gpu import check, some_bad
from tests.support.paged import (
    LAYOUTS,
    OUTS,
    Call,
    Scales,
    make_cache,
    make_classic,
    random_slots,
    seeded,
    slots_call,
    table_call,
)
from vllm_kda_plugin.kernels import loader

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "gather_cached_kv"


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool: str, fatbins: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    # Torch's own kernels are not watched, so initcheck does not see what they write: all data is copied from the host.
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=gather_"]
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


def calls() -> Iterator[tuple[Call, str]]:
    """Calls of every kernel, and the ``impl`` to make each with."""
    slots = some_bad(random_slots(13, 9, torch.int64, seeded()))
    scales: Scales = {"k_scale": torch.tensor([0.1, 0.7]), "v_scale": torch.tensor([3.0, 1e-4])}
    kinds: list[tuple[torch.dtype, torch.dtype, Scales | None]] = [
        *((dtype, dtype, None) for dtype in (torch.uint8, torch.half, torch.float32)),
        *((fp8, wide, scales) for fp8 in FP8 for wide in WIDE),
    ]
    for dtype, out_dtype, given in kinds:
        layouts = LAYOUTS if dtype == torch.uint8 else LAYOUTS[:1]
        for layout, width in itertools.product(layouts, (1, 2, 4, 7, 8, 16, 1024, 2048)):
            key, value = (make_cache(layout, 3, 3, 2, width, dtype, seeded(seed)) for seed in range(2))
            out = OUTS[width % 2]
            for index in (torch.int32, torch.int64):
                yield slots_call(key, value, slots.to(index), out, out_dtype, given), "auto"
            for num_reqs in (1, 40):
                batch = table_call(key, value, [3] * num_reqs, [5] * num_reqs, seeded(), out, out_dtype, scales=given)
                yield batch, "auto"
        key, value = make_classic("dense", 3, 16, 2, 48, dtype, seeded())
        for places in (random_slots(21, 48, torch.int64, seeded()), torch.arange(5, 43)):
            for impl in ("auto", "reference"):
                yield slots_call(key, value, places, "dense", out_dtype, given), impl


def main(fatbins: str) -> None:
    """Make all calls, and check their results too."""
    loader.FATBINS = Path(fatbins)
    launched = set()
    prepare = loader.Kernel.prepare

    def note(self: loader.Kernel, entry: str, *rest: object, **options: object) -> loader.Launch:
        launched.add(entry)
        return prepare(self, entry, *rest, **options)  # type: ignore[arg-type]

    loader.Kernel.prepare = note  # type: ignore[method-assign]
    for call, impl in calls():
        check(call, impl=impl)
    assert launched == set(loader.KERNELS[KERNEL]), launched ^ set(loader.KERNELS[KERNEL])
    print("every kernel ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
