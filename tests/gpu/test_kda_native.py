"""Our KDA prefill kernel on the GPU it is for: each length, each cut, the same bits each time, nothing else written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kda_calls import Args, arguments, expected
from tests.support.kda_numerics import BOUND, HALF_EMPTY, IDS, KINDS, Numbers, error
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kda.providers import PROVIDERS
from vllm_kda_plugin.kernels import kda_native, loader
from vllm_kda_plugin.kernels.kda_native import Schedule, Tensors

pytestmark = pytest.mark.gpu

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
    """From 1 to 600 tokens, and around 16,230; the bytes around each output are guarded."""
    guard, longest = 1 << 12, 16_260
    whole = make((longest,), 1, lower_bound=lower_bound)
    for length in (*range(1, 601), *range(16_200, longest + 1)):
        args = whole | {name: whole[name][:, :length] for name in ("q", "k", "v", "g", "beta")}
        args["cu_seqlens"] = torch.tensor([0, length], device="cuda").int()
        args["checkpoint_offsets"] = torch.tensor([length // 16 * 16], device="cuda").int()
        sizes = {"out": length * 128 * 2, "final_state": 128 * 128 * 4, "checkpoint_state": 128 * 128 * 4}
        buffer = torch.full((sum(sizes.values()) + 4 * guard,), 7, dtype=torch.uint8, device="cuda")
        at, kept = guard, torch.ones_like(buffer, dtype=torch.bool)
        for name, size in sizes.items():
            shape = (1, length, 1, 128) if name == "out" else whole[name].shape
            args[name] = buffer[at : at + size].view(whole[name].dtype).view(shape)
            kept[at : at + size] = False
            at += size + guard
        for cut in (Schedule(1), Schedule(2), Schedule(1, 16 * (1 + length // 160))):
            args["out"].fill_(float("nan"))
            run(args, cut)
            assert bool((buffer[kept] == 7).all()), (length, cut)
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


def test_heads_may_lie_apart() -> None:
    """As slices of one projection whose channels of a head lie together."""
    dense = make((70, 20), 3, lower_bound=BOUND)
    apart = dense | {name: torch.empty_like(dense[name]) for name in ("out", "final_state", "checkpoint_state")}
    mixed = torch.stack([dense[name] for name in "qkvg"], 3)
    apart |= {name: mixed[:, :, :, i] for i, name in enumerate("qkvg")}
    apart["beta"] = dense["beta"].repeat_interleave(2, -1)[..., ::2]
    assert not any(apart[name].is_contiguous() for name in ("q", "k", "v", "g", "beta"))
    for args in (dense, apart):
        kda_prefill(**args)
    for name in ("out", "final_state"):
        assert torch.equal(dense[name], apart[name])


def test_a_negative_row_is_none() -> None:
    args = make((20, 30, 5), 2, lower_bound=BOUND, pool=True)
    args["state_indices"][1:] = -1
    row = int(args["state_indices"][0])
    before = args["initial_state"].clone()
    kda_prefill(**args)
    assert torch.equal(args["initial_state"][row], args["final_state"][0])
    before[row] = args["initial_state"][row]
    assert torch.equal(args["initial_state"], before)


@pytest.mark.parametrize("lower_bound", GATES)
def test_one_long_sequence_among_many_of_one_token(lower_bound: float | None) -> None:
    """As in an engine's step, whose host knows how long it is."""
    lens = [1] * 64 + [5000]
    args = make(lens, 4, lower_bound=lower_bound) | {"max_seqlen": 5000}
    assert kda_native.schedule(sum(lens), len(lens), 4, 132, max_seqlen=5000).segment_tokens
    kda_prefill(**args)
    assert max(errors(args)) < RANDOM


def test_compiled_at_run_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVRTC makes what nvcc makes, to the bit of the results."""
    args = make((100, 33), 2, lower_bound=BOUND)
    run(args, Schedule(1, 32))
    wanted = args["out"].clone()
    monkeypatch.setattr(loader, "FATBINS", tmp_path)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    kda_native._launches.cache_clear()
    try:
        assert loader.load(kda_native.KERNEL, 0).status.state == "runtime"
        run(args, Schedule(1, 32))
    finally:
        kda_native._launches.cache_clear()
    assert torch.equal(args["out"], wanted)
