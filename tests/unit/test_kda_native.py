"""Our KDA prefill kernel on an emulated GPU: indices, barriers and roundings, against float64; and its schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.kda_calls import Args, arguments, expected, rows_of_pool
from tests.support.kda_emulated import EmulatedProvider
from tests.support.kda_numerics import BOUND, KINDS, LONG, Numbers, check, error
from vllm_kda_plugin.kda import prefill
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kernels import kda_native
from vllm_kda_plugin.kernels.kda_native import Schedule, schedule, steps, workspace_bytes

RANDOM, HARD = 6e-3, 2e-2
"""What errors may be, relative in norm: of random numbers, and of those made to break kernels."""
CUTS = [Schedule(1), Schedule(2), Schedule(1, 16), Schedule(2, 48)]
GATES = [pytest.param(None, id="softplus"), pytest.param(BOUND, id="bounded")]


def make(lens: tuple[int, ...], heads: int = 1, cut: Schedule | None = None, **options: Any) -> Args:
    return arguments(EmulatedProvider(cut), lens, heads, 128, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("lower_bound", GATES)
def test_lengths_and_cuts(lower_bound: float | None, cut: Schedule) -> None:
    """Lengths around a chunk and a segment, a checkpoint in the longest, padding."""
    check(make((0, 1, 97, 15, 16, 33, 0), 1, cut, lower_bound=lower_bound, padding=3), RANDOM)


def test_many_sequences_in_segments() -> None:
    """More than a warp looks at in one step, some of more than two segments."""
    check(make(tuple(i * 7 % 37 for i in range(70)), 1, Schedule(1, 16), lower_bound=BOUND), RANDOM)


@pytest.mark.parametrize("where", [0, 5, 40])
def test_one_long_sequence_among_many_of_one_token(where: int) -> None:
    """As in an engine's step."""
    lens = [1] * 40
    lens.insert(where, 333)
    check(make(tuple(lens), 1, Schedule(1, 48), lower_bound=BOUND), RANDOM)


def test_nothing_is_combined_where_no_sequence_has_more_than_two_segments() -> None:
    cut = Schedule(1, 48, most_segments=2)
    assert [step.entry for step in steps(cut._replace(slots=4), 3, 1, bounded=True)] == [
        "kda_segments_bounded",
        "kda_prefill_bounded_128",
    ]
    check(make((96, 49, 48), 1, cut, lower_bound=BOUND), RANDOM)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lower_bound", GATES)
def test_state_dtypes_and_long_indices(lower_bound: float | None, state_dtype: torch.dtype) -> None:
    args = make((40, 0, 33), lower_bound=lower_bound, state_dtype=state_dtype)
    args["cu_seqlens"], args["checkpoint_offsets"] = args["cu_seqlens"].long(), args["checkpoint_offsets"].long()
    check(args, RANDOM)


HARD_KINDS = [(numbers, bound) for numbers, bound in KINDS if numbers.lens == LONG]


@pytest.mark.parametrize(("numbers", "lower_bound"), HARD_KINDS, ids=lambda value: getattr(value, "name", str(value)))
def test_hard_numbers(numbers: Numbers, lower_bound: float | None) -> None:
    args = make((150, 20), lower_bound=lower_bound, cut=Schedule(2))
    numbers.change(args)
    check(args, HARD)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-4, 3e4, 1e20])
def test_values_of_any_magnitude(magnitude: float) -> None:
    """Products in float16 are of scaled values, so that none overflows and none loses its bits."""
    args = make((70,), lower_bound=BOUND, cut=Schedule(1))
    args["v"] *= magnitude
    args["initial_state"] *= magnitude
    wanted = expected(args, args["initial_state"], torch.float64)
    kda_prefill(**args)
    for found, right in (
        (args["out"][0].transpose(0, 1), wanted.out[0].transpose(0, 1)),
        (args["final_state"][0], wanted.final_state[0]),
    ):
        assert error(found.double() / magnitude, right / magnitude) < RANDOM


def test_values_that_grow_and_shrink() -> None:
    args = make((160,), lower_bound=None, cut=Schedule(1))
    args["v"] *= torch.tensor([1.0, 1e6, 1e-6, 1e3, 1.0]).repeat_interleave(32)[:, None, None].bfloat16()
    wanted = expected(args, args["initial_state"], torch.float64)
    kda_prefill(**args)
    for part in range(5):
        tokens = slice(32 * part, 32 * part + 32)
        assert error(args["out"][0, tokens].transpose(0, 1), wanted.out[0, tokens].transpose(0, 1)) < RANDOM


def test_tiny_values_beside_a_large_state() -> None:
    """The scale that suits the values does not let the state overflow."""
    args = make((96,), lower_bound=BOUND, cut=Schedule(1))
    args["dt_bias"].fill_(-20)  # hardly any decay
    args["v"] *= torch.tensor([1e18, 1e-20, 1.0]).repeat_interleave(32)[:, None, None].bfloat16()
    args["k"][:, 32:64] = 0
    check(args, RANDOM)


def test_small_learning_rates() -> None:
    args = make((64,), lower_bound=BOUND)
    args["beta"].fill_(-11)
    args["initial_state"].zero_()
    args["v"] *= 1e4
    check(args, RANDOM)


@pytest.mark.parametrize(("index", "cut"), [(torch.int32, Schedule(2)), (torch.int64, Schedule(1, 16))], ids=str)
def test_pool(index: torch.dtype, cut: Schedule) -> None:
    """States are read from their rows of a pool and written back, whose rows lie apart."""
    args = make((33, 0, 70, 20), 2, cut, lower_bound=BOUND, pool=True)
    args["state_indices"] = args["state_indices"].to(index)
    pool = args["initial_state"]
    pages = torch.zeros(len(pool), pool[0].numel() + 48)
    args["initial_state"] = pages[:, 16 : 16 + pool[0].numel()].unflatten(1, pool.shape[1:]).copy_(pool)
    args["initial_state"][args["state_indices"][2].item()] = float("nan")  # held by one whose sequence starts anew
    check(args, RANDOM)
    assert not pages[:, :16].any()
    assert not pages[:, -32:].any()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [Schedule(2), Schedule(1, 16)], ids=str)
def test_states_are_left_in_the_pool_only(cut: Schedule, state_dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lower_bound": BOUND, "pool": True, "state_dtype": state_dtype}
    args, both = make((33, 0, 70, 20), 2, cut, final_state=None, **options), make((33, 0, 70, 20), 2, cut, **options)
    check(args, RANDOM)
    check(both, RANDOM)
    assert torch.equal(args["initial_state"], both["initial_state"])


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("lens", [(), (0,), (0, 0, 0)], ids=str)
def test_no_tokens(lens: tuple[int, ...], dense: bool) -> None:
    args = make(lens, lower_bound=BOUND, pool=True)
    if not dense:
        args["final_state"] = None
    before = rows_of_pool(args)
    kda_prefill(**args)
    assert not dense or torch.equal(args["final_state"], before)
    assert torch.equal(args["initial_state"][args["state_indices"].long()], before)


def test_rows_that_are_not_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of no row starts from zeros and leaves its state to nobody."""
    monkeypatch.setattr(prefill, "_check_values", lambda *_: None)
    args = make((20, 20), lower_bound=BOUND, pool=True)
    args["state_indices"][:] = torch.tensor([-1, len(args["initial_state"])])
    before = args["initial_state"].clone()
    kda_prefill(**args)
    assert torch.equal(args["initial_state"], before)
    kda_prefill(**args | {"final_state": None})
    assert torch.equal(args["initial_state"], before)
    zeros = torch.zeros(2, *before.shape[1:])
    assert error(args["final_state"][0], expected(args, zeros, torch.float64).final_state[0]) < RANDOM


def test_views_of_wider_tensors() -> None:
    """Tokens may lie apart, and heads too."""
    dense = make((37,), 2, lower_bound=BOUND)
    strided = dense | {name: dense[name].clone() for name in ("out", "final_state", "checkpoint_state")}
    mixed = torch.stack([dense[name] for name in "qkvg"], 3)
    strided |= {name: mixed[:, :, :, i] for i, name in enumerate("qkvg")}
    strided["beta"] = dense["beta"].repeat_interleave(3, -1)[..., ::3]
    kda_prefill(**dense)
    kda_prefill(**strided)
    for name in ("out", "final_state", "checkpoint_state"):
        assert torch.equal(dense[name], strided[name])


@pytest.mark.parametrize("lower_bound", GATES)
def test_the_order_of_warps_does_not_matter(lower_bound: float | None) -> None:
    """Bit-identical under other schedules of warps and other times of arrival of copies."""
    results = []
    for seed in range(3):
        args = make((100,), lower_bound=lower_bound) | {"provider": EmulatedProvider(Schedule(1, 48), seed)}
        kda_prefill(**args)
        results.append(args)
    for args, name in itertools.product(results[1:], ("out", "final_state", "checkpoint_state")):
        assert torch.equal(args[name], results[0][name])


@pytest.mark.parametrize("tokens", [1, 15, 16, 300, 2048, 8192, 32768, 1 << 21])
@pytest.mark.parametrize("heads", [1, 4, 12, 32, 96, 128])
def test_schedules_fit_their_workspace(heads: int, tokens: int) -> None:
    for sequences in (1, 2, 8, 32, 256):
        for longest in (None, 1, tokens // 3, tokens - 1, tokens, 2 * tokens):
            cut = schedule(tokens, sequences, heads, 132, max_seqlen=longest)
            assert cut.workspace_bytes(heads) <= workspace_bytes(tokens, heads) <= workspace_bytes(tokens + 1, heads)
            assert cut.segment_tokens % kda_native.CHUNK == 0
            launched = steps(cut, sequences, heads, bounded=True)
            assert len(launched) <= (3 if cut.slots else 1)
            assert all(step.blocks < 1 << 31 for step in launched)
            if cut.segment_tokens:
                assert cut.slots == tokens // cut.segment_tokens


def test_few_heads_are_cut_and_many_are_not() -> None:
    assert schedule(8192, 1, 4, 132).segment_tokens > 0
    assert schedule(8192, 8, 96, 132) == Schedule(1)
    assert schedule(8192, 1, 4, 132, batch_invariant=True) == Schedule(1)


def test_a_long_sequence_is_cut_though_many_short_ones_fill_the_gpu() -> None:
    for heads in (4, 12, 32):
        alone, among = schedule(8192, 1, heads, 132), schedule(8192 + 64, 65, heads, 132, max_seqlen=8192)
        assert among.segment_tokens > 0
        assert abs(among.segment_tokens - alone.segment_tokens) <= alone.segment_tokens
        assert not schedule(8192 + 64, 65, heads, 132).segment_tokens, "nobody knows"
