"""Our KDA prefill kernel on the GPU it is for: each length, each cut, the same bits each time, nothing else written."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kda_calls import INPUTS, Args, arguments, expected
from tests.support.kda_numerics import BOUND, HALF_EMPTY, IDS, KINDS, Numbers, error
from vllm_kda_plugin.kda.providers import PROVIDERS
from vllm_kda_plugin.kernels import kda_native, loader
from vllm_kda_plugin.kernels.kda_native import Schedule, Tensors

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
RANDOM, HARD = 6e-3, 2e-2
"""What errors may be, relative in norm: of random numbers, and of those made to break kernels."""
GATES = [pytest.param(None, id="softplus"), pytest.param(BOUND, id="bounded")]
CUTS = [Schedule(1), Schedule(2), Schedule(1, 64), Schedule(2, 256)]


@pytest.fixture(autouse=True)
def _needs_hopper(_needs_gpu: None) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    pytest.importorskip("cupy")


def make(lens: Sequence[int], heads: int, **options: Any) -> Args:
    return arguments(PROVIDERS["native"], lens, heads, 128, device="cuda", dtype=torch.bfloat16, **options)


def run(args: Args, cut: Schedule) -> None:
    """The kernels alone, with a cut of our own."""
    num_tokens = args["q"].shape[1]
    if cut.segment_tokens:
        cut = cut._replace(slots=num_tokens // cut.segment_tokens)
    given = {name: args[name] for name in args if name not in ("provider", "lower_bound", "workspace")}
    need = cut.workspace_bytes(args["q"].shape[2])
    workspace = torch.full((need + 4096,), 7, dtype=torch.uint8, device=args["q"].device)
    kda_native.prefill(Tensors(**given), args["lower_bound"], workspace, cut=cut)
    assert bool((workspace[need:] == 7).all()), "written past the workspace"


def errors(args: Args) -> tuple[float, float]:
    """Of the output and of the final state, of the worst head."""
    wanted = expected(args, args["initial_state"], torch.float64)
    tokens = slice(int(args["cu_seqlens"][-1]))
    out = error(args["out"][0, tokens].transpose(0, 1), wanted.out[0, tokens].transpose(0, 1))
    return out, max(map(error, args["final_state"], wanted.final_state))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("numbers", "lower_bound"), KINDS, ids=IDS)
def test_near_to_float64_however_it_is_cut(numbers: Numbers, lower_bound: float | None, cut: Schedule) -> None:
    args = make(numbers.lens, 2, lower_bound=lower_bound)
    numbers.change(args)
    run(args, cut)
    limit = RANDOM if numbers.change.__name__ == "_nothing" else HARD
    assert max(errors(args)) < limit


@pytest.mark.parametrize("lower_bound", GATES)
def test_no_length_hangs_or_writes_elsewhere(lower_bound: float | None) -> None:
    """From 1 to 600 tokens, and around 16,230; the bytes after each output are guarded."""
    guard = 1 << 16
    for length in (*range(1, 601), *range(16_200, 16_261)):
        args = make((length,), 1, lower_bound=lower_bound)
        wide = {}
        for name in ("out", "final_state", "checkpoint_state"):
            size = args[name].numel() * args[name].itemsize
            wide[name] = torch.full((guard + size + guard,), 7, dtype=torch.uint8, device="cuda")
            args[name] = wide[name][guard : guard + size].view(args[name].dtype).view(args[name].shape)
        for cut in (Schedule(1), Schedule(2), Schedule(1, 16 * (1 + length // 160))):
            run(args, cut)
            for name, buffer in wide.items():
                assert bool((buffer[:guard] == 7).all()), (name, length, cut)
                assert bool((buffer[-guard:] == 7).all()), (name, length, cut)
            assert bool(args["out"].isfinite().all()), (length, cut)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("lower_bound", GATES)
def test_a_hundred_runs_are_bit_identical(lower_bound: float | None, cut: Schedule) -> None:
    args = make((700, 300, 0, 1), 12, lower_bound=lower_bound)
    run(args, cut)
    first = {name: args[name].clone() for name in ("out", "final_state", "checkpoint_state")}
    for _ in range(100):
        for name in first:
            args[name].fill_(7)
        run(args, cut)
        assert torch.equal(args["out"], first["out"])
        assert torch.equal(args["final_state"], first["final_state"])


@pytest.mark.parametrize("lower_bound", GATES)
def test_a_batch_invariant_result_does_not_depend_on_the_batch(lower_bound: float | None) -> None:
    whole = make(HALF_EMPTY, 12, lower_bound=lower_bound)
    run(whole, kda_native.schedule(sum(HALF_EMPTY), len(HALF_EMPTY), 12, 132, batch_invariant=True))
    bounds = whole["cu_seqlens"].tolist()
    for n in (0, 6, 14):
        tokens = slice(bounds[n], bounds[n + 1])
        alone = make((HALF_EMPTY[n],), 12, lower_bound=lower_bound)
        alone |= {name: whole[name][:, tokens].clone() for name in ("q", "k", "v", "g", "beta")}
        alone |= {name: whole[name] for name in ("A_log", "dt_bias")}
        alone["initial_state"] = whole["initial_state"][n : n + 1].clone()
        run(alone, kda_native.schedule(HALF_EMPTY[n], 1, 12, 132, batch_invariant=True))
        assert torch.equal(alone["out"], whole["out"][:, tokens])
        assert torch.equal(alone["final_state"][0], whole["final_state"][n])


def test_more_elements_than_32_bits_count() -> None:
    """The last of 190,000 tokens of 96 heads, 2.3 billion elements a tensor, is as near as any."""
    tokens, heads, tail = 190_000, 96, 64
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GB")
    args = {name: torch.zeros(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16) for name in "qkvg"}
    for name in "qkvg":
        args[name][:, -tail:].normal_()
    small = make((tail,), heads, lower_bound=BOUND, checkpoint_state=None, checkpoint_offsets=None)
    small |= {name: args[name][:, -tail:].clone() for name in "qkvg"}
    small["initial_state"].zero_()
    large = small | args
    large["out"] = torch.empty_like(args["q"])
    large["beta"] = torch.zeros(1, tokens, heads, device="cuda", dtype=torch.bfloat16)
    large["beta"][:, -tail:] = small["beta"]
    large["cu_seqlens"] = torch.tensor([0, tokens], device="cuda").int()
    large["final_state"] = torch.empty_like(small["final_state"])
    run(large, kda_native.schedule(tokens, 1, heads, 132))
    wanted = expected(small, small["initial_state"], torch.float64)
    assert error(large["out"][0, -tail:].transpose(0, 1), wanted.out[0].transpose(0, 1)) < RANDOM
    assert error(large["final_state"][0], wanted.final_state[0]) < RANDOM


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
