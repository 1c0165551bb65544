"""The gather of paged KV on the CPU, and what the CUDA kernel is told, against a loop over tokens."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paged import DTYPES, LAYOUTS, expected, make_batch, make_cache, poisoned, same_bytes
from vllm_kda_plugin.kernels import gather, loader
from vllm_kda_plugin.kernels.gather import gather_paged_kv, gather_rows, paged_slots

# (first token, number of tokens) of each request
BATCHES = {
    "one token": [(0, 1)],
    "empty requests around others": [(0, 0), (3, 7), (0, 0), (0, 0), (0, 33), (9, 0)],
    "all empty": [(0, 0), (5, 0)],
    "starts inside pages": [(1, 1), (7, 20), (16, 16), (31, 2)],
    "whole pages": [(0, 32), (16, 48)],
    "many": [(i % 5, i % 7) for i in range(50)],
    "no request": [],
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_exactly_the_tokens_asked_for(layout: str, requests: list[tuple[int, int]]) -> None:
    cache = make_cache(layout, 11, 2, 16, 24, torch.float32, seeded())
    batch = make_batch(cache, [start for start, _ in requests], [length for _, length in requests], seeded())
    gather_paged_kv(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    assert same_bytes(batch.out, expected(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "block_size", "width"), [(8, 16, 256), (1, 1, 2), (3, 5, 14), (1, 528, 128)])
def test_every_dtype_and_shape(layout: str, dtype: torch.dtype, num_heads: int, block_size: int, width: int) -> None:
    cache = make_cache(layout, 3, num_heads, block_size, width, dtype, seeded())
    batch = make_batch(cache, [0, 3, 2], [1, 17, 2], seeded())
    gather_paged_kv(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    assert same_bytes(batch.out, expected(batch))


shapes = st.tuples(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), st.integers(1, 9).map(lambda half: 2 * half)
)
request_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), shapes, request_lists, st.integers(0, 2**31))
@settings(deadline=None)
def test_any_batch(
    layout: str, dtype: torch.dtype, shape: tuple[int, int, int, int], requests: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(layout, *shape, dtype, generator)
    batch = make_batch(cache, [start for start, _ in requests], [length for _, length in requests], generator)
    gather_paged_kv(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    assert same_bytes(batch.out, expected(batch))


def test_nan_after_the_end_of_a_sequence_stays_there() -> None:
    cache = torch.full((2, 4, 1, 8), float("nan")).transpose(1, 2)
    cache[1, :, :3] = 1.0
    out = torch.full((3, 1, 8), float("nan"))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    gather_paged_kv(cache, table, torch.tensor([0, 3]).int(), torch.tensor([0]).int(), out)
    assert torch.equal(out, torch.ones(3, 1, 8))


def test_slots_are_computed_once_and_serve_every_layer() -> None:
    caches = [make_cache(layout, 7, 2, 4, 6, torch.float16, seeded()) for layout in LAYOUTS]
    batch = make_batch(caches[0], [2, 0, 5], [9, 0, 4], seeded())
    slots = paged_slots(batch.block_table, batch.seq_starts, batch.cu_seqlens_k.diff(), 4)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        int(batch.block_table[request, position // 4]) * 4 + position % 4
        for request, positions in ((0, range(2, 11)), (2, range(5, 9)))
        for position in positions
    ]
    for cache in caches:
        batch.kv_cache = cache
        batch.out = poisoned((batch.tokens + 1, 2, 6), torch.float16)
        gathered = gather_rows(cache, slots, batch.out)
        assert gathered.data_ptr() == batch.out.data_ptr()
        assert gathered.shape == (batch.tokens, 2, 6)
        assert gathered.dtype == torch.float16
        assert same_bytes(batch.out, expected(batch))


def test_gather_rows_returns_the_dtype_of_the_cache() -> None:
    cache = make_cache("LBNHC", 2, 1, 4, 8, torch.float8_e4m3fn, seeded())
    out = poisoned((3, 1, 8), torch.float8_e4m3fn)
    assert gather_rows(cache, torch.tensor([1, 2]), out).dtype == torch.float8_e4m3fn


def test_table_may_be_a_slice_of_a_wider_one() -> None:
    cache = make_cache("LBNHC", 9, 2, 4, 6, torch.float32, seeded())
    batch = make_batch(cache, [0, 0], [12, 9], seeded())
    wide = torch.full((5, 64), -1, dtype=torch.int32)
    wide[1:3, : batch.block_table.shape[1]] = batch.block_table
    table = wide[1:3, : batch.block_table.shape[1]]
    gather_paged_kv(cache, table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    assert same_bytes(batch.out, expected(batch))


def arguments() -> dict[str, Any]:
    cache = make_cache("LBNHC", 6, 2, 4, 8, torch.float32, seeded())
    batch = make_batch(cache, [0, 1], [5, 6], seeded(), spare_rows=0)
    return dict(vars(batch))


BAD = {
    "rank of kv_cache": (lambda a: {"kv_cache": a["kv_cache"][0]}, r"kv_cache has shape \[2, 4, 8\], must be \[num_bl"),
    "strides of kv_cache": (
        lambda a: {"kv_cache": torch.empty(6, 2, 8, 4).transpose(2, 3)},
        r"kv_cache has strides .*must be a view whose last stride is 1",
    ),
    "heads of out": (lambda a: {"out": torch.empty(11, 3, 8)}, r"out has shape \[11, 3, 8\], must be \[tokens, 2, 8\]"),
    "width of out": (lambda a: {"out": torch.empty(11, 2, 9)}, r"out has shape \[11, 2, 9\], must be \[tokens, 2, 8\]"),
    "dtype of out": (lambda a: {"out": a["out"].half()}, r"out is torch.float16 on cpu, must be torch.float32"),
    "strides of out": (lambda a: {"out": torch.empty(11, 2, 16)[..., :8]}, r"out has .* strides .*must be contiguous"),
    "rows of out": (lambda a: {"out": a["out"][:10]}, r"out has 10 rows, must be at least .*11"),
    "device of out": (lambda a: {"out": a["out"].to("meta")}, r"out is torch.float32 on meta, must be .* on cpu"),
    "dtype of block_table": (lambda a: {"block_table": a["block_table"].long()}, r"block_table is torch.int64 .*int32"),
    "rank of block_table": (lambda a: {"block_table": a["block_table"][0]}, r"block_table has shape .*num_reqs, max"),
    "width of block_table": (
        lambda a: {"block_table": a["block_table"][:, :1]},
        r"block_table is 1 blocks of 4 tokens wide, must be wide enough for the longest request, 7 tokens",
    ),
    "a block below": (lambda a: {"block_table": a["block_table"].fill_(-1)}, r"slots contains -4 \(block -1\)"),
    "a block above": (lambda a: {"block_table": a["block_table"].fill_(6)}, r"slots contains \d+ \(block 6\).*to 5\)"),
    "dtype of cu_seqlens_k": (lambda a: {"cu_seqlens_k": a["cu_seqlens_k"].float()}, r"cu_seqlens_k is torch.float32"),
    "length of cu_seqlens_k": (lambda a: {"cu_seqlens_k": a["cu_seqlens_k"][:2]}, r"cu_seqlens_k .*\[2\].*int32 \[3\]"),
    "start of cu_seqlens_k": (lambda a: {"cu_seqlens_k": a["cu_seqlens_k"] + 1}, r"cu_seqlens_k starts with 1"),
    "falling cu_seqlens_k": (
        lambda a: {"cu_seqlens_k": torch.tensor([0, 5, 3]).int()},
        r"seq_lens contains -2, must be 0 or more everywhere",
    ),
    "dtype of seq_starts": (lambda a: {"seq_starts": a["seq_starts"].long()}, r"seq_starts is torch.int64"),
    "length of seq_starts": (lambda a: {"seq_starts": a["seq_starts"][:1]}, r"seq_starts .*\[1\].*must be .*\[2\]"),
    "negative seq_starts": (
        lambda a: {"seq_starts": a["seq_starts"] - 1},
        r"seq_starts contains -1, must be 0 or more",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named_and_nothing_is_written(change: Any, message: str) -> None:
    good = arguments()
    bad = good | change(good)
    before = bad["out"].clone()
    with pytest.raises(ValueError, match=message):
        gather_paged_kv(**bad)
    if bad["out"].device.type == "cpu":
        assert same_bytes(bad["out"].contiguous(), before.contiguous())


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 1]).int(), "slots is 1-dimensional torch.int32"),
        (torch.tensor([[0]]), "slots is 2-dimensional"),
        (torch.tensor([0, 24]), r"slots contains 24 \(block 6\), must be from 0 to 23 \(blocks 0 to 5\)"),
        (torch.zeros(12, dtype=torch.int64), "out has 11 rows, must be at least 12 long"),
    ],
)
def test_bad_slots_are_named(slots: torch.Tensor, message: str) -> None:
    good = arguments()
    with pytest.raises(ValueError, match=message):
        gather_rows(good["kv_cache"], slots, good["out"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 1)}, "block_table is 2-dimensional torch.float32"),
        ({"seq_starts": torch.zeros(3).int()}, "seq_starts has 3 entries, must be 2 long"),
        ({"seq_lens": torch.zeros(2, 1).int()}, "seq_lens is 2-dimensional"),
        ({"seq_lens": torch.zeros(2, device="meta").int()}, "seq_lens is on meta, must be on cpu"),
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
    ],
)
def test_bad_tables_are_named(change: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    good = {"block_table": torch.zeros(2, 1).int(), "seq_starts": zeros, "seq_lens": zeros, "block_size": 4}
    with pytest.raises(ValueError, match=message):
        paged_slots(**(good | change))


def run_like_the_kernel(entry: str, args: list[int], out_bytes: int) -> None:
    """What csrc/gather_paged_kv.cu does with its arguments, in Python, from plain memory."""
    source = Path(loader.__file__).parents[2] / "csrc" / "gather_paged_kv.cu"
    struct = re.search(r"struct Args \{(.*?)\};", source.read_text(encoding="utf-8"), re.DOTALL)
    assert struct is not None
    a = SimpleNamespace(**dict(zip(re.findall(r"(\w+);", struct[1]), args, strict=True)))
    vector = int(entry.removeprefix("gather_paged_kv_"))
    bounds = (ctypes.c_int * (a.num_reqs + 1)).from_address(a.cu_seqlens_k)
    starts = (ctypes.c_int * a.num_reqs).from_address(a.seq_starts)
    row_bytes = a.run_bytes * a.runs
    assert row_bytes * a.out_rows == out_bytes
    for request in range(a.num_reqs):
        table = (ctypes.c_int * a.max_blocks).from_address(a.block_table + 4 * request * a.table_stride)
        for row in range(bounds[request], bounds[request + 1]):
            block, offset = divmod(row - bounds[request] + starts[request], a.block_size)
            for run in range(a.runs):
                within = table[block] * a.block_stride + offset * a.token_stride + run * a.run_stride
                to, copied_from = a.out + row * row_bytes + run * a.run_bytes, a.cache + within
                assert to % vector == 0
                assert copied_from % vector == 0
                assert a.run_bytes % vector == 0
                ctypes.memmove(to, copied_from, a.run_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "block_size", "width"), [(8, 16, 256), (1, 1, 2), (3, 5, 14), (1, 64, 128)])
def test_kernel_arguments_describe_the_copy(
    layout: str, dtype: torch.dtype, num_heads: int, block_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[str, int, int, list[int]]] = []
    kernel = SimpleNamespace(launch=lambda *launch: launches.append(launch))
    monkeypatch.setattr(loader, "load", lambda name, device: kernel)
    cache = make_cache(layout, 3, num_heads, block_size, width, dtype, seeded())
    batch = make_batch(cache, [0, 3, 2], [1, 17, 2], seeded())
    gather._launch(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    [(entry, blocks, threads, args)] = launches
    assert entry in loader.KERNELS["gather_paged_kv"]
    vector = int(entry.rsplit("_", 1)[1])
    assert (blocks - 1) * threads * 4 * vector < batch.out.nbytes <= blocks * threads * 4 * vector
    assert threads == 64
    run_like_the_kernel(entry, args, batch.out.nbytes)
    assert same_bytes(batch.out, expected(batch))


@pytest.mark.parametrize(
    ("layout", "dtype", "width", "vector"),
    [
        ("LBNHC", torch.bfloat16, 256, 16),
        ("LBHNC", torch.float8_e4m3fn, 256, 16),
        ("LBNHC", torch.bfloat16, 6, 4),
        ("odd padding", torch.bfloat16, 256, 2),
        ("odd padding", torch.float8_e5m2, 256, 1),
        ("odd padding", torch.float32, 256, 4),
        ("BLHNC", torch.float16, 12, 8),
    ],
)
def test_kernel_takes_the_widest_aligned_vector(
    layout: str, dtype: torch.dtype, width: int, vector: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[str] = []
    kernel = SimpleNamespace(launch=lambda entry, *_: entries.append(entry))
    monkeypatch.setattr(loader, "load", lambda name, device: kernel)
    cache = make_cache(layout, 3, 1, 4, width, dtype, seeded())
    batch = make_batch(cache, [0], [5], seeded())
    gather._launch(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)
    assert entries == [f"gather_paged_kv_{vector}"]
