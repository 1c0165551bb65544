"""kda_prefill: what it computes on the torch provider, what it refuses, and that it writes nothing then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import kda_calls
from tests.support.kda_calls import LAYOUTS, TENSORS, Args, expected, refuses, rows_of_pool
from vllm_kda_plugin.kda import prefill
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kda.providers import PROVIDERS, Call, Provider, TorchProvider
from vllm_kda_plugin.kernels.repeat import GUARDED_TORCH

TORCH = PROVIDERS["torch"]
LENS = [5, 0, 17, 1]
HEADS, DIM = 2, 16


class DenseTorch(TorchProvider):
    """Takes dense inputs only, as kernels do, and has scratch."""

    name = "dense"
    dense_inputs = True
    strided_heads = False
    pools = False
    alignment = 16
    checkpoint_step = 16
    seen: list[Call]

    def __init__(self) -> None:
        self.seen = []

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        return 100 * num_tokens

    def run(self, call: Call) -> None:
        assert all(x.is_contiguous() for x in (call.q, call.k, call.v, call.g))
        call.scratch.fill_(255)
        self.seen.append(call)
        super().run(call)


def arguments(*, provider: Provider = TORCH, **options: Any) -> Args:
    if options.get("pool"):
        options = {"state_indices": torch.tensor([4, 0, 8, 2]).int(), **options}
    return kda_calls.arguments(provider, LENS, HEADS, DIM, **options)


@pytest.mark.parametrize("provider", [TORCH, DenseTorch()], ids=["strided", "dense"])
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_writes_what_the_reference_gives(provider: Provider, lower_bound: float | None) -> None:
    args = arguments(provider=provider, lower_bound=lower_bound, padding=3)
    wanted = expected(args, args["initial_state"])
    out, final_state = kda_prefill(**args)
    assert out is args["out"]
    assert final_state is args["final_state"]
    assert torch.equal(out[:, : sum(LENS)], wanted.out[:, : sum(LENS)])
    assert bool((out[:, sum(LENS) :] == 7).all())
    assert torch.equal(final_state, wanted.final_state)
    assert wanted.checkpoint_state is not None
    assert torch.equal(args["checkpoint_state"][2], wanted.checkpoint_state[2])


sequences = st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5)


@given(sequences, st.booleans(), st.booleans(), st.sampled_from([None, -5.0]), st.integers(0, 3))
@settings(max_examples=40)
def test_any_split_is_the_whole(
    pieces: list[list[int]], dense: bool, pool: bool, lower_bound: float | None, padding: int
) -> None:
    """Three calls with a piece of each sequence, which may be empty, and the states that the last one left."""
    provider = DenseTorch() if dense else TORCH
    lens = [sum(piece) for piece in pieces]
    whole = kda_calls.arguments(provider, lens, HEADS, DIM, lower_bound=lower_bound, pool=pool)
    del whole["checkpoint_state"], whole["checkpoint_offsets"]
    states = whole["initial_state"].clone()
    out = torch.full_like(whole["out"], torch.nan)
    starts = whole["cu_seqlens"][:-1].tolist()
    begun = [0] * len(pieces)
    for call in range(3):
        ranges = [
            range(start + at, start + at + piece[call]) for start, at, piece in zip(starts, begun, pieces, strict=True)
        ]
        rows = torch.tensor([row for tokens in ranges for row in tokens], dtype=torch.long)
        args = kda_calls.arguments(provider, list(map(len, ranges)), HEADS, DIM, pool=pool, padding=padding)
        del args["checkpoint_state"], args["checkpoint_offsets"]
        for name in ("q", "k", "v", "g", "beta"):
            args[name][:, : len(rows)] = whole[name][:, rows]
        args |= {name: whole[name] for name in ("A_log", "dt_bias", "lower_bound")} | {"initial_state": states}
        if pool:
            args["state_indices"] = whole["state_indices"]
            args["has_initial_state"] = whole["has_initial_state"] | (call > 0)
        kda_prefill(**args)
        assert bool((args["out"][:, len(rows) :] == 7).all())
        out[:, rows] = args["out"][:, : len(rows)]
        states = states if pool else args["final_state"]
        begun = [at + piece[call] for at, piece in zip(begun, pieces, strict=True)]
    kda_prefill(**whole)
    torch.testing.assert_close(out, whole["out"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, whole["initial_state"] if pool else whole["final_state"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("provider", [TORCH, DenseTorch()], ids=["strided", "dense"])
def test_state_pool(provider: Provider) -> None:
    args = arguments(pool=True, provider=provider)
    rows = args["state_indices"].long()
    # Rows of a page of the engine's cache lie apart.
    pages = torch.full((9, HEADS * DIM * DIM + 40), 3.0)
    pool = pages[:, 8 : 8 + HEADS * DIM * DIM].unflatten(1, (HEADS, DIM, DIM))
    pool.copy_(args["initial_state"])
    wanted = expected(args, rows_of_pool(args))
    before = pool.clone()
    kda_prefill(**(args | {"initial_state": pool}))
    assert torch.equal(args["out"], wanted.out)
    assert torch.equal(args["final_state"], wanted.final_state)
    assert torch.equal(pool[rows], wanted.final_state)
    others = [row for row in range(9) if row not in rows.tolist()]
    assert torch.equal(pool[others], before[others])
    assert bool((pages[:, :8] == 3).all())
    assert bool((pages[:, 8 + HEADS * DIM * DIM :] == 3).all())


def test_a_new_sequence_does_not_see_what_its_row_held() -> None:
    args = arguments(pool=True)
    args["initial_state"][8] = float("nan")
    kda_prefill(**args)
    assert bool(args["out"].isfinite().all())


def test_padding_may_hold_anything() -> None:
    args = arguments(padding=5)
    for name in ("q", "k", "v", "g", "beta"):
        args[name][:, sum(LENS) :] = float("nan")
    kda_prefill(**args)
    assert bool(args["out"].isfinite().all())
    assert bool(args["final_state"].isfinite().all())


def test_row_0_may_be_named_by_all() -> None:
    """As in vLLM's warm-up."""
    args = arguments(pool=True)
    args["state_indices"].zero_()
    kda_prefill(**args)
    assert bool(args["initial_state"].isfinite().all())


def test_inputs_are_made_dense_only_when_needed() -> None:
    provider = DenseTorch()
    mixed = torch.randn(1, sum(LENS), 3, HEADS, DIM)
    args = arguments(provider=provider, q=mixed[:, :, 0], k=mixed[:, :, 1])
    kda_prefill(**args)
    (call,) = provider.seen
    assert call.v.data_ptr() == args["v"].data_ptr()
    workspace = args["workspace"]
    inside = range(workspace.data_ptr(), workspace.data_ptr() + workspace.numel())
    assert call.q.data_ptr() in inside
    assert torch.equal(call.q, args["q"])
    assert torch.equal(args["out"], expected(args, args["initial_state"]).out)


def test_no_initial_state_is_zeros() -> None:
    args = arguments(initial_state=None)
    kda_prefill(**args)
    assert torch.equal(args["out"], expected(args, None).out)


def test_empty() -> None:
    args = arguments()
    args |= {name: args[name][:, :0] for name in ("q", "k", "v", "g", "beta", "out")}
    kda_prefill(**(args | {"cu_seqlens": torch.zeros(5).int(), "checkpoint_offsets": torch.zeros(4).int()}))
    assert torch.equal(args["final_state"], args["initial_state"])


@pytest.mark.parametrize("provider", [TORCH, DenseTorch()], ids=["strided", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_layouts_are_refused_by_name(name: str, layout: str, provider: Provider) -> None:
    args = arguments(provider=provider)
    args[name] = LAYOUTS[layout](args[name])
    assert not args[name].is_contiguous()
    shape, strides = list(args[name].shape), list(args[name].stride())
    refuses(args, rf"^{name} has shape \{str(shape)[:-1]}\] and strides \{str(strides)[:-1]}\], must be ")


@pytest.mark.parametrize("layout", ["sliced", "expanded", "batch slice"])
@pytest.mark.parametrize("name", ["state_indices", "has_initial_state"])
def test_layouts_of_rows_are_refused(name: str, layout: str) -> None:
    args = arguments(pool=True)
    refuses(
        args | {name: LAYOUTS[layout](args[name])}, rf"^{name} has shape \[4\] and strides \[[02]\], must be contig"
    )


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_layouts_of_a_pool_are_refused(layout: str) -> None:
    args = arguments(pool=True)
    args["initial_state"] = LAYOUTS[layout](args["initial_state"])
    refuses(args, r"^initial_state has shape \[9, 2, 16, 16\] and strides .* distance between rows of the pool$")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 23, 2, 16)}, r"^q has shape \[2, 23, 2, 16\] .*must be \[1, T, H, D\]$"),
        ({"k": torch.zeros(1, 23, 2, 8)}, r"^k has shape \[1, 23, 2, 8\] .*must be \[1, 23, 2, 16\]$"),
        ({"beta": torch.zeros(1, 23, 3)}, r"^beta has shape"),
        ({"v": torch.zeros(1, 23, 2, 16).half()}, r"^v is torch.float16, must be torch.float32$"),
        ({"A_log": torch.zeros(2).double()}, r"^A_log is torch.float64, must be torch.float32$"),
        ({"g": torch.zeros(1, 23, 2, 16, device="meta")}, r"^g is on meta, must be on cpu as q is$"),
        ({"cu_seqlens": torch.zeros(5)}, r"^cu_seqlens is torch.float32, must be torch.int32 or torch.int64$"),
        ({"cu_seqlens": torch.zeros(0).int()}, r"^cu_seqlens has shape \[0\]"),
        (
            {"cu_seqlens": torch.tensor([0, 5, 4, 22, 23]).int()},
            r"^cu_seqlens is \[0, 5, 4, 22, 23\], must be ascending",
        ),
        ({"cu_seqlens": torch.tensor([0, 5, 5, 22, 24]).int()}, r"^cu_seqlens is .* at most the 23 tokens of q$"),
        ({"cu_seqlens": torch.tensor([1, 5, 5, 22, 23]).int()}, r"^cu_seqlens is .*ascending from 0"),
        ({"lower_bound": 0.0}, r"^lower_bound is 0.0, must be finite and below 0, or None"),
        ({"lower_bound": float("nan")}, r"^lower_bound is nan"),
        ({"lower_bound": float("-inf")}, r"^lower_bound is -inf"),
        (
            {"final_state": torch.zeros(4, 2, 16, 16).bfloat16()},
            r"^initial_state is torch.float32, must be torch.bfloat16$",
        ),
        ({"final_state": torch.zeros(3, 2, 16, 16)}, r"^final_state has shape"),
        (
            {"final_state": None, "pool": True},
            r"^final_state is None, must be a tensor, but for kernels that write the",
        ),
        ({"final_state": None, "initial_state": None}, r"^final_state is None"),
        ({"out": torch.zeros(1, 22, 2, 16)}, r"^out has shape"),
        (
            {"workspace": torch.zeros(16, dtype=torch.uint8)},
            r"^workspace has 16 bytes, must be at least \d+ for torch$",
        ),
        ({"workspace": torch.zeros(1 << 20)}, r"^workspace is torch.float32, must be torch.uint8$"),
        ({"checkpoint_offsets": None}, r"^checkpoint_offsets is None, must be given together with checkpoint_state$"),
        ({"checkpoint_state": None}, r"^checkpoint_state is None, must be given together with checkpoint_offsets$"),
        ({"checkpoint_offsets": torch.tensor([0, 0, 18, 0]).int()}, r"^checkpoint_offsets is .* from 0 to the lengths"),
        ({"checkpoint_offsets": torch.zeros(4).long()}, r"^checkpoint_offsets is torch.int64, must be torch.int32$"),
        ({"state_indices": torch.arange(4)}, r"^has_initial_state is None, must be given together with state_indices$"),
    ],
)
def test_wrong_arguments_are_refused(changes: Args, message: str) -> None:
    refuses(arguments(**changes), message)


@pytest.mark.parametrize("rows", [[4, 0, 4, 2], [4, 0, 9, 2], [4, 0, -1, 2]])
def test_wrong_rows_of_the_pool_are_refused(rows: list[int]) -> None:
    refuses(arguments(pool=True) | {"state_indices": torch.tensor(rows)}, r"^state_indices is .* rows from 0 to 8$")


def test_what_a_kernel_cannot_do_is_refused() -> None:
    args = arguments(provider=DenseTorch())
    refuses(args | {"checkpoint_offsets": torch.tensor([5, 0, 16, 0]).int()}, "multiples of 16 from 0")
    buffer = torch.zeros(args["out"].numel() + 1)
    refuses(
        args | {"out": buffer[1:].view_as(args["out"])}, r"^out starts at address 0x.*, must be at a multiple of 16"
    )
    bias = torch.zeros(HEADS * DIM + 1)
    refuses(args | {"dt_bias": bias[1:]}, r"^dt_bias starts at address 0x.*, must be at a multiple of 16")
    refuses(args | {"workspace": args["workspace"].repeat(2)[1:]}, r"^workspace starts at address 0x.*multiple of 16")
    elsewhere = arguments(provider=PROVIDERS["triton"])
    refuses(elsewhere, r"^triton cannot run this call: it needs a GPU, this layer is on cpu$")
    refuses(
        args | {"provider": PROVIDERS["triton"]},
        r"^checkpoint_state was given, must be None: triton takes no checkpoints$",
    )


@pytest.mark.skipif(not torch.__version__.startswith(GUARDED_TORCH), reason="not known to work in this torch")
def test_a_call_like_the_last_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = DenseTorch()
    mixed = torch.randn(1, sum(LENS), 3, HEADS, DIM)
    kda_prefill(**arguments(provider=provider, pool=True, q=mixed[:, :, 0]))
    monkeypatch.delattr(prefill, "_check_all")
    again = arguments(provider=provider, pool=True, q=2 * mixed[:, :, 0])
    again["q"] = torch.stack((again["q"], again["k"], again["v"]), 2)[:, :, 0]
    wanted = expected(again, rows_of_pool(again))
    kda_prefill(**again)
    assert torch.equal(again["out"], wanted.out)
    assert torch.equal(again["initial_state"][again["state_indices"].long()], wanted.final_state)


@pytest.mark.parametrize("pool", [False, True])
def test_a_refused_call_is_refused_after_one_like_it_too(pool: bool) -> None:
    provider = DenseTorch()
    for name in TENSORS:
        kda_prefill(**arguments(provider=provider, pool=pool))
        args = arguments(provider=provider, pool=pool)
        layout = "transposed" if name == "initial_state" else "batch slice"
        refuses(args | {name: LAYOUTS[layout](args[name])}, f"^{name} has shape")
    for name, changed in (
        ("lower_bound", {"lower_bound": 1.0}),
        ("checkpoint_offsets", {"checkpoint_offsets": None}),
        ("has_initial_state", {"has_initial_state": None, "state_indices": torch.arange(4).int()}),
        ("beta", {"beta": torch.zeros(1, sum(LENS), HEADS).half()}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 5, 4, 22, 23]).int()}),
    ):
        kda_prefill(**arguments(provider=provider, pool=pool))
        refuses(arguments(provider=provider, pool=pool) | changed, f"^{name} ")
    kda_prefill(**arguments(provider=provider, pool=pool))
    args = arguments(provider=provider, pool=pool)
    shifted = torch.zeros(args["out"].numel() + 1)[1:].view_as(args["out"])
    refuses(args | {"out": shifted}, "^out starts at address")


@pytest.mark.parametrize("name", ["out", "final_state", "workspace", "checkpoint_state"])
def test_what_is_written_has_memory_of_its_own(name: str) -> None:
    args = arguments(pool=True)
    whole = args["initial_state"].view(-1)
    size = args[name].numel() * args[name].itemsize // whole.itemsize
    args[name] = whole[:size].view(args[name].dtype).view(args[name].shape)
    refuses(args, rf"^{name} shares memory with initial_state, must be memory of its own$")


def test_neighbours_in_memory_do_not_share_it() -> None:
    args = arguments()
    sizes = [args[name].numel() for name in ("q", "out", "v")]
    parts = torch.zeros(sum(sizes)).split(sizes)
    for name, part in zip(("q", "out", "v"), parts, strict=True):
        args[name] = part.view(args[name].shape).copy_(args[name])
    kda_prefill(**args)
    assert torch.equal(args["out"], expected(args, args["initial_state"]).out)


def test_no_sequence_and_no_token() -> None:
    args = arguments(pool=True)
    none: Args = {name: args[name][:, :0] for name in ("q", "k", "v", "g", "beta", "out")}
    pool = args["initial_state"].clone()
    kda_prefill(**(args | none | {"cu_seqlens": torch.zeros(5).int(), "checkpoint_offsets": torch.zeros(4).int()}))
    pool[8] = 0  # it has no state yet
    assert torch.equal(args["initial_state"], pool)
    states = ("final_state", "checkpoint_state", "state_indices", "has_initial_state", "checkpoint_offsets")
    none |= {name: args[name][:0] for name in states} | {"cu_seqlens": torch.zeros(1).int()}
    kda_prefill(**(args | none))
    assert torch.equal(args["initial_state"], pool)
