"""Our KDA prefill kernel under compute-sanitizer, which takes minutes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import compile_fatbin
from tests.gpu.test_kda_native import HARD, _needs_hopper, errors, make, run  # noqa: F401, a fixture for all tests
from tests.support.kda_calls import INPUTS, Args
from tests.support.kda_numerics import KINDS
from tests.support.sanitizer import finds_nothing, launching
from vllm_kda_plugin.kernels import kda_native, loader
from vllm_kda_plugin.kernels.kda_native import Schedule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool: str, fatbins: Path, tmp_path: Path) -> None:
    if tool == "racecheck":  # it does not see that what a warp's other lanes did came before one lane's arrival
        name = kda_native.KERNEL
        source = next(path for base in loader.SOURCES if (path := base / f"{name}.cu").exists())
        compile_fatbin(source, tmp_path / f"{name}.fatbin", "90a", "-DVLLM_KDA_ALL_ARRIVE")
        fatbins = tmp_path
    finds_nothing(tool, "kda_", __file__, fatbins)


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
    with launching(kda_native.KERNEL, fatbins):
        for args, cut in calls():
            run(args, cut)
            assert max(errors(args)) < HARD
            assert all(bool(args[name].isfinite().all()) for name in INPUTS[:5])


if __name__ == "__main__":
    main(*sys.argv[1:])
