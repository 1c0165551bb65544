"""Every gather kernel under compute-sanitizer, on small tensors that come from the host.

Run as a script, this file is what the sanitizer watches.
"""

from __future__ import annotations

import itertools
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
from tests.support.sanitizer import finds_nothing, launching

KERNEL = "gather_cached_kv"


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool: str, fatbins: Path) -> None:
    # Torch's own kernels are not watched, so initcheck does not see what they write: all data is copied from the host.
    finds_nothing(tool, "gather_", __file__, fatbins)


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
    with launching(KERNEL, fatbins):
        for call, impl in calls():
            check(call, impl=impl)


if __name__ == "__main__":
    main(*sys.argv[1:])
