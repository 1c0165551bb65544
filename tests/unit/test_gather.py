"""Both gathers on the CPU, bit for bit against a loop over tokens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exact import FP8, WIDE
from tests.support.paged import (
    CLASSIC_LAYOUTS,
    DTYPES,
    LAYOUTS,
    OUTS,
    PAIRS,
    Call,
    Scales,
    bits,
    copied,
    expected,
    make_cache,
    make_classic,
    make_pair,
    memory,
    mismatch,
    odd_strides,
    poisoned,
    random_slots,
    run,
    seeded,
    slots_call,
    table_call,
)
from vllm_kda_plugin.kernels.gather import gather_cached_kv, gather_paged_kv

ROOT = Path(__file__).resolve().parents[2]
INDICES = (torch.int32, torch.int64)
CLASSIC_DTYPES = (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint8)

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
# heads, tokens a block, head size
SHAPES = [(8, 16, 128), (1, 1, 1), (3, 8, 7), (5, 12, 40), (1, 528, 64)]


def check(call: Call) -> None:
    """Gather, and compare every byte of every tensor's memory with the loop's, inputs and gaps too."""
    want = expected(call)
    run(call)
    assert not mismatch(call, want)


def split(requests: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in requests], [length for _, length in requests]


# ---- Copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_copies_exactly_the_tokens_asked_for(layout: str, pair: str, requests: list[tuple[int, int]]) -> None:
    caches = make_pair(pair, layout, 11, 16, 2, 12, torch.float32, seeded())
    check(table_call(*caches, *split(requests), seeded(1)))


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("pair", PAIRS[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_copy_exactly_the_tokens_asked_for(layout: str, pair: str, index: torch.dtype) -> None:
    key_cache, value_cache = make_pair(pair, layout, 11, 16, 2, 12, torch.float32, seeded())
    assert value_cache is not None
    for num_tokens in (0, 1, 2, 77):
        check(slots_call(key_cache, value_cache, random_slots(num_tokens, 11 * 16, index, seeded(num_tokens))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_shape(layout: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    num_heads, block_size, head_size = shape
    for pair, out in zip(PAIRS, OUTS, strict=True):
        caches = make_pair(pair, layout, 3, block_size, num_heads, head_size, dtype, seeded())
        check(table_call(*caches, [0, 3, 2], [1, 17, 2], seeded(1), out))
        if caches[1] is not None:
            slots = random_slots(13, 3 * block_size, torch.int64, seeded(2))
            check(slots_call(caches[0], caches[1], slots, out))


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", CLASSIC_DTYPES, ids=str)
@pytest.mark.parametrize("layout", CLASSIC_LAYOUTS)
def test_classic_layout(layout: str, dtype: torch.dtype, index: torch.dtype) -> None:
    x = 16 // dtype.itemsize
    for num_heads, block_size, head_size in ((3, 8, 4 * x), (1, 1, x), (2, 12, 5 * x), (1, 16, 2 * x), (2, 528, 2 * x)):
        caches = make_classic(layout, 5, block_size, num_heads, head_size, dtype, seeded())
        for num_tokens, out in ((0, "dense"), (1, "sliced"), (19, "off by one")):
            check(slots_call(*caches, random_slots(num_tokens, 5 * block_size, index, seeded(1)), out))


def test_every_16_bit_number_survives() -> None:
    numbers = torch.arange(2**16).to(torch.int16).view(256, 1, 2, 128)
    for dtype in (torch.float16, torch.bfloat16):
        cache = numbers.view(dtype)
        call = slots_call(cache, cache.flip(0), torch.arange(256))
        run(call)
        assert torch.equal(bits(call["key"]), numbers[:, 0])
        assert torch.equal(bits(call["value"]), numbers.flip(0)[:, 0])


def test_every_kind_of_32_bit_number_survives() -> None:
    kinds = [0x7FC00001, 0x7F800001, -1, 0x7F800000, -0x800000, -0x80000000, 1, -0x7FFFFFFF, 0x007FFFFF, 0]
    numbers = torch.tensor(kinds, dtype=torch.int32).view(10, 1, 1, 1).expand(10, 1, 1, 4).contiguous()
    key = poisoned((10, 1, 8), torch.float32)
    packed = torch.cat([numbers, numbers.flip(0)], dim=-1).view(torch.float32)
    table = torch.arange(10).int()[:, None]
    gather_paged_kv(key, None, packed, None, table, torch.arange(11).int(), torch.zeros(10).int())
    assert bits(key)[:, 0, 0].tolist() == kinds
    assert bits(key)[:, 0, 7].tolist() == kinds[::-1]
    x_of_4 = numbers.view(10, 1, 1, 1, 4).view(torch.float32)
    call = slots_call(x_of_4, numbers.flip(0).view(10, 1, 4, 1).view(torch.float32), torch.arange(10))
    run(call)
    assert bits(call["key"])[:, 0, 3].tolist() == kinds
    assert bits(call["value"])[:, 0, 3].tolist() == kinds[::-1]


@pytest.mark.parametrize("stride", [0, 1, 7])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (4, 1, 1, 8), (1, 4, 1, 8), (4, 4, 1, 1), (1, 1, 3, 1)], ids=str)
def test_strides_of_size_one_dimensions_say_nothing(shape: tuple[int, int, int, int], stride: int) -> None:
    key_cache, value_cache = (
        odd_strides(make_cache("LBNHC", *shape, torch.float16, seeded(seed)), stride) for seed in range(2)
    )
    num_slots = shape[0] * shape[1]
    one_row = slots_call(key_cache, value_cache, random_slots(1, num_slots, torch.int64, seeded(), none=0))
    many = slots_call(key_cache, value_cache, random_slots(9, num_slots, torch.int32, seeded()))
    by_table = table_call(key_cache, value_cache, [0], [1], seeded(), spare_rows=0)
    for call in (one_row, many, by_table):
        for name in ("key", "value"):
            call[name] = odd_strides(call[name], stride)
        check(call)
    by_table["block_table"] = odd_strides(by_table["block_table"][:, :1], stride)
    check(by_table)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (3, 4, 0, 8), (3, 4, 2, 0)], ids=str)
def test_nothing_to_copy(shape: tuple[int, int, int, int]) -> None:
    cache = torch.empty(shape)
    check(table_call(cache, cache.clone(), [0, 0], [0, 0], seeded()))
    check(table_call(cache, None, [], [], seeded(), spare_rows=0))
    check(slots_call(cache, cache.clone(), torch.full((3,), -1)))
    check(slots_call(cache, cache.clone(), torch.empty(0, dtype=torch.int32)))


def test_table_and_slots_may_be_slices() -> None:
    caches = make_pair("apart", "LBNHC", 9, 4, 2, 6, torch.float32, seeded())
    call = table_call(*caches, [0, 0], [12, 9], seeded())
    width = call["block_table"].shape[1]
    wide = torch.full((5, 64), -1, dtype=torch.int32)
    wide[1:3, :width] = call["block_table"]
    call["block_table"] = wide[1:3, :width]
    check(call)
    assert caches[1] is not None
    check(slots_call(caches[0], caches[1], random_slots(50, 36, torch.int32, seeded())[13:21]))


def test_nan_after_the_end_of_a_sequence_stays_there() -> None:
    cache = torch.full((2, 4, 1, 8), float("nan"))
    cache[1, :3] = 1.0
    out = torch.full((3, 1, 8), float("nan"))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    gather_paged_kv(out, None, cache, None, table, torch.tensor([0, 3]).int(), torch.tensor([0]).int())
    assert torch.equal(out, torch.ones(3, 1, 8))


def test_impl_torch_is_the_cpus() -> None:
    call = slots_call(*make_classic("dense", 4, 8, 2, 16, torch.float16, seeded()), torch.arange(20))
    want = expected(call)
    gather_cached_kv(**call, impl="torch")
    assert not mismatch(call, want)
    call = table_call(*make_pair("packed", "LBNHC", 4, 8, 2, 16, torch.float16, seeded()), [1], [9], seeded())
    want = expected(call)
    gather_paged_kv(**call, impl="torch")
    assert not mismatch(call, want)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 4), st.integers(1, 9))
seeds = st.integers(0, 2**31)


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(PAIRS),
    st.sampled_from(OUTS),
    st.sampled_from(DTYPES),
    shapes,
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8),
    seeds,
)
@settings(deadline=None)
def test_any_table(
    layout: str,
    pair: str,
    out: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    requests: list[tuple[int, int]],
    seed: int,
) -> None:
    generator = seeded(seed)
    check(table_call(*make_pair(pair, layout, *shape, dtype, generator), *split(requests), generator, out))


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(PAIRS[1:]),
    st.sampled_from(OUTS),
    st.sampled_from(DTYPES),
    st.sampled_from(INDICES),
    shapes,
    st.integers(0, 60),
    seeds,
)
@settings(deadline=None)
def test_any_slots(
    layout: str,
    pair: str,
    out: str,
    dtype: torch.dtype,
    index: torch.dtype,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    seed: int,
) -> None:
    generator = seeded(seed)
    key_cache, value_cache = make_pair(pair, layout, *shape, dtype, generator)
    assert value_cache is not None
    check(slots_call(key_cache, value_cache, random_slots(num_tokens, shape[0] * shape[1], index, generator), out))


@given(
    st.sampled_from(CLASSIC_LAYOUTS),
    st.sampled_from(OUTS),
    st.sampled_from(CLASSIC_DTYPES),
    st.sampled_from(INDICES),
    shapes,
    st.integers(0, 60),
    seeds,
)
@settings(deadline=None)
def test_any_slots_of_classic_caches(
    layout: str,
    out: str,
    dtype: torch.dtype,
    index: torch.dtype,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    seed: int,
) -> None:
    generator = seeded(seed)
    num_blocks, block_size, num_heads, chunks = shape
    caches = make_classic(layout, num_blocks, block_size, num_heads, chunks * (16 // dtype.itemsize), dtype, generator)
    check(slots_call(*caches, random_slots(num_tokens, num_blocks * block_size, index, generator), out))


# ---- fp8 to 16 bits -------------------------------------------------------------------------------------------------


def scale(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


SCALES: dict[str, Scales] = {
    "no scale": {},
    "one": {"k_scale": scale(0.1), "v_scale": scale(3.0e-6)},
    "no dimension": {"k_scale": scale(0.1)[0], "v_scale": scale(0.7)[0]},
    "of K only": {"k_scale": scale(0.1), "v_scale": None},
    "of V only": {"k_scale": None, "v_scale": scale(0.3, 1.7e-5, 300.0)},
    "a head": {"k_scale": scale(0.1, 1.0, 1e-38), "v_scale": scale(123.456, 0.017, 1e38)},
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_dequantized_exactly(fp8: torch.dtype, wide: torch.dtype, scales: Scales) -> None:
    for pair, out in zip(PAIRS, OUTS, strict=True):
        for layout in ("LBNHC", "LHBNC", "odd padding"):
            caches = make_pair(pair, layout, 7, 8, 3, 20, fp8, seeded())
            check(table_call(*caches, [3, 0, 9], [17, 0, 1], seeded(1), out, dtype=wide, scales=scales))
            if caches[1] is not None:
                slots = random_slots(30, 56, torch.int32, seeded(2))
                check(slots_call(caches[0], caches[1], slots, out, dtype=wide, scales=scales))
    for layout in CLASSIC_LAYOUTS:
        classic = make_classic(layout, 7, 8, 3, 48, fp8, seeded())
        check(slots_call(*classic, random_slots(30, 56, torch.int64, seeded(2)), "sliced", dtype=wide, scales=scales))


def test_every_code_in_every_head_meets_its_own_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256).expand(1, 4, 3, 256).contiguous()
    scales: Scales = {"k_scale": scale(0.1, 0.2, 0.3), "v_scale": scale(7.0, 1e-7, 0.0)}
    for fp8 in FP8:
        for wide in WIDE:
            cache = codes.view(fp8)
            check(slots_call(cache, cache.clone(), torch.tensor([3, 0]), dtype=wide, scales=scales))
            packed = torch.cat([cache, cache], dim=-1)
            check(table_call(packed, None, [1], [3], seeded(), dtype=wide, scales=scales))


# ---- What is refused ------------------------------------------------------------------------------------------------


def paged_arguments() -> Call:
    caches = make_pair("apart", "LBNHC", 6, 4, 2, 8, torch.float32, seeded())
    return table_call(*caches, [0, 1], [5, 6], seeded(), spare_rows=0)


def slots_arguments() -> Call:
    caches = make_pair("apart", "LBNHC", 6, 4, 2, 8, torch.float32, seeded())
    assert caches[1] is not None
    return slots_call(caches[0], caches[1], torch.tensor([3, 7, -1, 23, 0]))


def classic_arguments() -> Call:
    return slots_call(*make_classic("dense", 6, 4, 2, 8, torch.float32, seeded()), torch.tensor([3, 7, -1, 23, 0]))


def fp8_arguments() -> Call:
    caches = make_pair("apart", "LBNHC", 6, 4, 2, 8, torch.float8_e4m3fn, seeded())
    assert caches[1] is not None
    slots = torch.tensor([3, 7, -1, 23, 0])
    return slots_call(
        caches[0], caches[1], slots, dtype=torch.float16, scales={"k_scale": scale(0.1), "v_scale": scale(0.1)}
    )


# By what is wrong: what to change in arguments that are fine, and what is said.
Bad = dict[str, tuple[dict[str, Any], str]]


def bad_outs_and_caches(good: Call) -> Bad:
    """For either gather of float32 caches [6, 4, 2, 8]."""
    rows = len(good["key"])
    strided = torch.empty(6, 4, 8, 2).transpose(2, 3)
    return {
        "rank of key": ({"key": torch.empty(rows, 16)}, r"key has shape \[\d+, 16\], must be \[num_tokens, num_"),
        "strides of key": (
            {"key": torch.empty(rows, 8, 2).transpose(1, 2)},
            r"key has strides \(16, 1, 2\), must be a view whose last stride is 1",
        ),
        "rows of key that overlap": (
            {"key": torch.empty(1, 2, 8).expand(rows, 2, 8)},
            r"key has shape .* and strides \(0, 8, 1\), must be without overlapping rows",
        ),
        "heads of key": (
            {"key": torch.empty(rows, 3, 8), "value": torch.empty(rows, 3, 8)},
            r"key_cache has shape \[6, 4, 2, 8\], must be \[num_blocks, block_size, 3, 8\] to match key",
        ),
        "head size of key": (
            {"key": torch.empty(rows, 2, 9), "value": torch.empty(rows, 2, 9)},
            r"key_cache has shape \[6, 4, 2, 8\], must be \[num_blocks, block_size, 2, 9\] to match key",
        ),
        "dtype of key": (
            {"key": torch.empty(rows, 2, 8).half(), "value": torch.empty(rows, 2, 8).half()},
            r"key is torch.float16, must be torch.float32 as key_cache$",
        ),
        "dtypes of 8 bytes": (
            {name: good[name].double() for name in ("key", "value", "key_cache", "value_cache")},
            r"key is torch.float64, must be of a dtype of 1, 2 or 4 bytes",
        ),
        "shape of value": (
            {"value": torch.empty(rows + 1, 2, 8)},
            rf"value has shape \[{rows + 1}, 2, 8\], must be \[{rows}, 2, 8\] as key",
        ),
        "strides of value": (
            {"value": torch.empty(rows, 8, 2).transpose(1, 2)},
            r"value has strides \(16, 1, 2\)",
        ),
        "rows of value that overlap": (
            {"value": torch.empty(rows, 1, 8).expand(rows, 2, 8)},
            r"value has shape .* and strides \(8, 0, 1\), must be without overlapping rows",
        ),
        "dtype of value": (
            {"value": good["value"].half()},
            "value is torch.float16, must be torch.float32 as key",
        ),
        "device of value": ({"value": good["value"].to("meta")}, "value is on meta, must be cpu as key"),
        "rank of key_cache": (
            {"key_cache": torch.empty(6, 4, 16), "value_cache": torch.empty(6, 4, 16)},
            r"key_cache has shape \[6, 4, 16\], must be \[num_blocks, block_size, 2, 8\]",
        ),
        "strides of key_cache": (
            {"key_cache": strided},
            r"key_cache has strides \(64, 16, 1, 2\), must be a view whose last stride is 1",
        ),
        "device of key_cache": (
            {"key_cache": good["key_cache"].to("meta"), "value_cache": good["value_cache"].to("meta")},
            "key_cache is on meta, must be on cpu as key is",
        ),
        "shape of value_cache": (
            {"value_cache": good["value_cache"][:5]},
            r"value_cache has shape \[5, 4, 2, 8\], must be \[6, 4, 2, 8\] as key_cache",
        ),
        "strides of value_cache": ({"value_cache": strided}, r"value_cache has strides \(64, 16, 1, 2\)"),
        "dtype of value_cache": (
            {"value_cache": good["value_cache"].int()},
            "value_cache is torch.int32, must be torch.float32 as key_cache",
        ),
        "device of value_cache": (
            {"value_cache": good["value_cache"].to("meta")},
            "value_cache is on meta, must be cpu as key_cache",
        ),
        "scale of a copy": (
            {"v_scale": scale(1.0)},
            "v_scale is given, but torch.float32 is copied as it is, must be None",
        ),
        "impl": ({"impl": "fast"}, r"impl is 'fast', must be 'auto'"),
    }


def bad_tables(good: Call) -> Bad:
    table = good["block_table"]
    assert [tuple(good[name].shape) for name in ("block_table", "cu_seqlens_k", "seq_starts")] == [(2, 4), (3,), (2,)]
    odd = {"key": torch.empty(11, 2, 9), "key_cache": torch.empty(6, 4, 2, 9), "value": None, "value_cache": None}
    return {
        "value without value_cache": ({"value_cache": None}, "value_cache is None, must be a tensor as value is"),
        "value_cache without value": ({"value": None}, "value is None, must be a tensor as value_cache is"),
        "odd width of packed": (
            odd,
            r"key has shape \[11, 2, 9\], must be \[tokens, num_heads, 2 \* head_size\]",
        ),
        "reference": ({"impl": "reference"}, "impl is 'reference', must be 'auto' or 'torch'"),
        "rows of key": (
            {"key": good["key"][:10], "value": good["value"][:10]},
            r"key has 10 rows, must be at least cu_seqlens_k\[-1\] = 11 long",
        ),
        "dtype of block_table": (
            {"block_table": table.long()},
            r"block_table is torch.int64 .*torch.int32 \[2, 4",
        ),
        "rank of block_table": (
            {"block_table": table[0]},
            r"block_table has shape \[4\], must be \[num_reqs, max",
        ),
        "strides of block_table": (
            {"block_table": table.t().contiguous().t()},
            r"block_table is .*strides \(1, 2",
        ),
        "device of block_table": ({"block_table": table.to("meta")}, "block_table is on meta, must be on cpu"),
        "width of block_table": (
            {"block_table": table[:, :1]},
            r"block_table is 1 blocks of 4 tokens wide, must be wide enough for the longest request, 7 tokens",
        ),
        "a block below": (
            {"block_table": torch.tensor([[0, 1, -1, -1], [2, -1, -1, -1]]).int()},
            r"block_table names block -1 for row 8 of the output \(request 1\), must be a block from 0 to 5",
        ),
        "a block above": (
            {"block_table": torch.tensor([[0, 6, -1, -1], [2, -1, -1, -1]]).int()},
            r"block_table names block 6 for row 4 of the output \(request 0\), must be a block from 0 to 5",
        ),
        "dtype of cu_seqlens_k": (
            {"cu_seqlens_k": good["cu_seqlens_k"].float()},
            "cu_seqlens_k is torch.float32",
        ),
        "length of cu_seqlens_k": (
            {"cu_seqlens_k": good["cu_seqlens_k"][:2]},
            r"cu_seqlens_k .*\[2\].*int32 \[3\]",
        ),
        "strides of cu_seqlens_k": (
            {"cu_seqlens_k": torch.zeros(6).int()[::2]},
            r"cu_seqlens_k .*strides \(2,\)",
        ),
        "device of cu_seqlens_k": ({"cu_seqlens_k": good["cu_seqlens_k"].to("meta")}, "cu_seqlens_k is on meta"),
        "start of cu_seqlens_k": (
            {"cu_seqlens_k": good["cu_seqlens_k"] + 1},
            "cu_seqlens_k starts with 1, must be 0",
        ),
        "falling cu_seqlens_k": (
            {"cu_seqlens_k": torch.tensor([0, 5, 3]).int()},
            "cu_seqlens_k falls from 5 to 3 at request 1, must be a running sum of lengths",
        ),
        "dtype of seq_starts": ({"seq_starts": good["seq_starts"].long()}, "seq_starts is torch.int64"),
        "length of seq_starts": ({"seq_starts": good["seq_starts"][:1]}, r"seq_starts .*\[1\].*must be .*\[2\]"),
        "strides of seq_starts": ({"seq_starts": torch.zeros(6).int()[::3]}, r"seq_starts .*strides \(3,\)"),
        "device of seq_starts": ({"seq_starts": good["seq_starts"].to("meta")}, "seq_starts is on meta"),
        "negative seq_starts": (
            {"seq_starts": good["seq_starts"] - 1},
            "seq_starts contains -1, must be 0 or more",
        ),
    }


def bad_slots(good: Call) -> Bad:
    slots = good["slot_mapping"]
    return {
        "reference": ({"impl": "reference"}, "impl is 'reference' on cpu, must be 'auto' or 'torch' there"),
        "dtype of slot_mapping": (
            {"slot_mapping": slots.float()},
            r"slot_mapping is torch.float32 \[5\] with strides \(1,\), must be torch.int32 or torch.int64 \[5\]",
        ),
        "rank of slot_mapping": ({"slot_mapping": slots[:, None]}, r"slot_mapping is torch.int64 \[5, 1\]"),
        "length of slot_mapping": (
            {"slot_mapping": slots[:4]},
            r"slot_mapping is .*\[4\] .*must be .*\[5\] with stride 1",
        ),
        "strides of slot_mapping": (
            {"slot_mapping": torch.zeros(10).int()[::2]},
            r"slot_mapping .*strides \(2,\)",
        ),
        "device of slot_mapping": ({"slot_mapping": slots.to("meta")}, "slot_mapping is on meta, must be on cpu"),
        "a slot above": (
            {"slot_mapping": torch.tensor([0, 24, 23, -1, 25])},
            r"slot_mapping contains 24 at row 1 \(and 1 more such\), must be from 0 to 23, or -1 to leave a row",
        ),
        "a slot below -1": (
            {"slot_mapping": torch.tensor([0, -1, 23, -2, 1]).int()},
            r"slot_mapping contains -2 at row 3,",
        ),
    }


def bad_classic(good: Call) -> Bad:
    cache = good["key_cache"]
    return {
        "heads": (
            {"key_cache": torch.empty(6, 3, 2, 4, 4)},
            r"key_cache has shape \[6, 3, 2, 4, 4\], must be \[",
        ),
        "chunks": (
            {"key_cache": torch.empty(6, 2, 1, 4, 4)},
            r"key_cache has shape .*\[num_blocks, 2, 8 / 4, block",
        ),
        "bytes of a chunk": ({"key_cache": torch.empty(6, 2, 1, 4, 8)}, r"key_cache has shape .*16 bytes last"),
        "strides of key_cache": (
            {"key_cache": torch.empty(6, 2, 2, 4, 8)[..., ::2]},
            r"key_cache has strides .*must be a view whose last stride is 1",
        ),
        "head size of no whole chunk": (
            {"key": torch.empty(5, 2, 9), "value": torch.empty(5, 2, 9), "value_cache": torch.empty(6, 2, 9, 4)},
            r"key_cache has shape .*9 / 4",
        ),
        "shape of value_cache": (
            {"value_cache": cache},
            r"value_cache has shape \[6, 2, 2, 4, 4\], must be \[6, 2, 8, 4\] to match key_cache",
        ),
        "dtype of value_cache": (
            {"value_cache": good["value_cache"].int()},
            "value_cache is torch.int32, must be",
        ),
        "device of key_cache": ({"key_cache": cache.to("meta")}, "key_cache is on meta, must be on cpu"),
        "device of value_cache": ({"value_cache": good["value_cache"].to("meta")}, "value_cache is on meta"),
        "a slot above": ({"slot_mapping": torch.tensor([0, 1, 2, 3, 24])}, "slot_mapping contains 24 at row 4"),
    }


def bad_scales(good: Call) -> Bad:
    wide = {name: torch.empty(5, 2, 8) for name in ("key", "value")}
    return {
        "fp8 to 32 bits": (
            wide,
            r"key is torch.float32, must be torch.float8_e4m3fn as key_cache, or fp16 or bf16",
        ),
        "other fp8": (
            {name: good[name].to(torch.float8_e5m2) for name in ("key", "value")},
            "key is torch.float8_e5m2, must be torch.float8_e4m3fn as key_cache, or fp16 or bf16",
        ),
        "dtype": (
            {"k_scale": scale(1).double()},
            r"k_scale is torch.float64 \[1\] .*must be torch.float32 \[1\] or",
        ),
        "length": (
            {"v_scale": scale(1, 2, 3)},
            r"v_scale is torch.float32 \[3\] .*must be torch.float32 \[1\] or \[2",
        ),
        "rank": (
            {"v_scale": scale(1)[None]},
            r"v_scale is torch.float32 \[1, 1\] .*must be torch.float32 \[1\] or \[2",
        ),
        "strides": (
            {"k_scale": scale(1, 2, 3)[::2]},
            r"k_scale is .*strides \(2,\), must be .*\[2\] with stride 1",
        ),
        "device": ({"v_scale": scale(1).to("meta")}, "v_scale is on meta, must be on cpu as key is"),
        "unlike": ({"v_scale": scale(1, 2)}, "v_scale has another number of entries than k_scale, must be alike"),
    }


BAD = {
    f"{kind}: {what}": (good, changed, message)
    for kind, good, checks in (
        ("table", paged_arguments(), (bad_outs_and_caches, bad_tables)),
        ("slots", slots_arguments(), (bad_outs_and_caches, bad_slots)),
        ("classic", classic_arguments(), (bad_classic,)),
        ("scales", fp8_arguments(), (bad_scales,)),
    )
    for bad in checks
    for what, (changed, message) in bad(good).items()
}


@pytest.mark.parametrize(("good", "changed", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named_and_nothing_is_written(good: Call, changed: dict[str, Any], message: str) -> None:
    check(copied(good))  # fine without the change
    call = good | changed
    before = {name: memory(call[name]).clone() for name in ("key", "value") if call[name] is not None}
    with pytest.raises(ValueError, match=f"^{message}"):
        run(call)
    for name, bytes_before in before.items():
        if call[name].device.type == "cpu":
            assert torch.equal(memory(call[name]), bytes_before)


def test_debug_mode_is_read_from_the_environment() -> None:
    code = "from vllm_kda_plugin.kernels import gather; print(gather._CHECK)"
    env = {**os.environ, "VLLM_KDA_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache", "slot_mapping", "v_scale"])
@pytest.mark.parametrize("found", [[1.0], 0.5, "tensor"], ids=["list", "float", "str"])
def test_no_tensor_for_slots_is_named(name: str, found: object) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    call = slots_call(cache, cache, torch.tensor([3, 7])) | {name: found}
    with pytest.raises(ValueError, match=f"^{name} is a {type(found).__name__}, must be a tensor$"):
        run(call)


@pytest.mark.parametrize("name", ["key", "key_cache", "block_table", "cu_seqlens_k", "seq_starts", "k_scale", "value"])
def test_no_tensor_for_a_table_is_named(name: str) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    call = table_call(cache, cache.clone(), [3], [5], seeded()) | {name: (3, 4)}
    with pytest.raises(ValueError, match=f"^{name} is a tuple, must be a tensor$"):
        run(call)


def test_empty_caches_are_named() -> None:
    cache = torch.empty(0, 4, 2, 8)
    with pytest.raises(
        ValueError, match=r"slot_mapping contains 3 at row 0, must be -1 as the cache is empty to leave"
    ):
        run(slots_call(cache, cache, torch.tensor([3])))
    no_tokens = torch.empty(5, 0, 2, 8)
    with pytest.raises(ValueError, match=r"key_cache has shape \[5, 0, 2, 8\], must be of at least one token a block"):
        run(
            table_call(cache, cache, [], [], seeded())
            | {
                "key_cache": no_tokens,
                "value_cache": no_tokens,
                "block_table": torch.zeros(1, 2, dtype=torch.int32),
                "cu_seqlens_k": torch.tensor([0, 0]).int(),
                "seq_starts": torch.tensor([0]).int(),
            }
        )


def test_example_of_the_readme_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    blocks, offsets = torch.tensor([4] * 11 + [1] * 9), torch.cat((torch.arange(5, 16), torch.arange(9)))
    assert torch.equal(names["key"][30:], names["key_cache"][blocks, offsets])
