"""The parts of the gather in torch: slots of a batch, rows of packed K|V, fp8 numbers times a scale."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.exact import FP8, WIDE, fp8_number, nearest_bits, product_table, without_nan_payloads
from tests.support.paged import DTYPES, LAYOUTS, bits, make_cache, memory, poisoned, seeded, table_call, tokens_of
from vllm_kda_plugin.kernels.gather_torch import dequantized_values, gather_rows, paged_slots

# ---- Slots and rows -------------------------------------------------------------------------------------------------


def test_slots_are_those_of_every_token_in_order() -> None:
    call = table_call(make_cache("LBNHC", 7, 4, 2, 6, torch.float16, seeded()), None, [2, 0, 5], [9, 0, 4], seeded())
    for index in (torch.int32, torch.int64):
        table, starts, lens = (
            tensor.to(index) for tensor in (call["block_table"], call["seq_starts"], call["cu_seqlens_k"].diff())
        )
        slots = paged_slots(table, starts, lens, 4)
        assert slots.dtype == torch.int64
        assert slots.tolist() == [block * 4 + offset for _, block, offset in tokens_of(call)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_batch_serve_every_layer(dtype: torch.dtype) -> None:
    slots = torch.tensor([5, 27, 0, 5, 13])
    for num_heads, width in ((2, 6), (1, 2), (3, 10)):
        for layout in LAYOUTS:
            cache = make_cache(layout, 7, 4, num_heads, width, dtype, seeded())
            out = poisoned((8, num_heads, width), dtype)
            gathered = gather_rows(cache.transpose(1, 2), slots, out)
            assert gathered.data_ptr() == out.data_ptr()
            assert (gathered.shape, gathered.dtype) == ((5, num_heads, width), dtype)
            for row, slot in enumerate(slots.tolist()):
                assert torch.equal(bits(out)[row], bits(cache)[slot // 4, slot % 4])
            assert torch.equal(memory(out[5:].clone()), memory(poisoned((3, num_heads, width), dtype)))


def rows_arguments() -> dict[str, Any]:
    cache = make_cache("LBNHC", 6, 4, 2, 8, torch.float32, seeded()).transpose(1, 2)
    return {"kv_cache": cache, "slots": torch.arange(11), "out": poisoned((11, 2, 8), torch.float32)}


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype of slots": ({"slots": torch.tensor([0, 1]).int()}, "slots is 1-dimensional torch.int32"),
    "rank of slots": ({"slots": torch.tensor([[0]])}, "slots is 2-dimensional"),
    "slot above": (
        {"slots": torch.tensor([0, 24])},
        r"slots contains 24 \(block 6\), must be from 0 to 23 \(blocks 0",
    ),
    "slot below": ({"slots": torch.tensor([0, -4])}, r"slots contains -4 \(block -1\)"),
    "more slots than rows": ({"slots": torch.zeros(12).long()}, "out has 11 rows, must be at least 12 long"),
    "rank of kv_cache": ({"kv_cache": torch.empty(2, 4, 8)}, r"kv_cache has shape \[2, 4, 8\], must be \[num_bl"),
    "strides of kv_cache": (
        {"kv_cache": torch.empty(6, 2, 8, 4).transpose(2, 3)},
        r"kv_cache has strides .*must be a view whose last stride is 1",
    ),
    "heads of out": ({"out": torch.empty(11, 3, 8)}, r"out has shape \[11, 3, 8\], must be \[tokens, 2, 8\]"),
    "width of out": ({"out": torch.empty(11, 2, 9)}, r"out has shape \[11, 2, 9\], must be \[tokens, 2, 8\]"),
    "dtype of out": ({"out": torch.empty(11, 2, 8).half()}, "out is torch.float16 on cpu, must be torch.float32"),
    "strides of out": ({"out": torch.empty(11, 2, 16)[..., :8]}, "out has .* strides .*must be contiguous"),
    "device of out": ({"out": torch.empty(11, 2, 8, device="meta")}, "out is torch.float32 on meta, must be .* on cpu"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_arguments_of_rows_are_named_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    good = rows_arguments()
    gather_rows(**good)
    call = rows_arguments() | change
    before = memory(call["out"]).clone() if call["out"].device.type == "cpu" else None
    with pytest.raises(ValueError, match=f"^{message}"):
        gather_rows(**call)
    assert before is None or torch.equal(memory(call["out"]), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 1)}, "block_table is 2-dimensional torch.float32"),
        ({"seq_starts": torch.zeros(3).int()}, "seq_starts has 3 entries, must be 2 long"),
        ({"seq_lens": torch.zeros(2, 1).int()}, "seq_lens is 2-dimensional"),
        ({"seq_lens": torch.zeros(2, device="meta").int()}, "seq_lens is on meta, must be on cpu"),
        ({"seq_lens": torch.tensor([1, -2]).int()}, "seq_lens contains -2, must be 0 or more everywhere"),
        ({"seq_starts": torch.tensor([1, -2]).int()}, "seq_starts contains -2, must be 0 or more everywhere"),
        (
            {"seq_lens": torch.tensor([1, 5]).int()},
            "block_table is 1 blocks of 4 tokens wide, must be .* 5 tok",
        ),
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
    ],
)
def test_bad_tables_are_named(change: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    good = {"block_table": torch.zeros(2, 1).int(), "seq_starts": zeros, "seq_lens": zeros, "block_size": 4}
    paged_slots(**good)
    with pytest.raises(ValueError, match=message):
        paged_slots(**(good | change))


# ---- fp8 numbers times a scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_the_exact_arithmetic_of_these_tests_reads_fp8_as_torch_does(fp8: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for code, value in enumerate(codes.view(fp8).double().tolist()):
        number = float(fp8_number(code, fp8))
        assert number == value or (math.isnan(number) and math.isnan(value))
    for wide in WIDE:  # every fp8 number is a number of either
        want = without_nan_payloads(codes.view(fp8).to(wide).view(torch.int16), wide)
        assert torch.equal(product_table(fp8, 1.0, wide), want)


@pytest.mark.parametrize(
    ("wide", "magnitude", "nearest"),
    [
        (torch.float16, Fraction(2049), 0x6800),  # a tie, down to even
        (torch.float16, Fraction(2051), 0x6802),  # a tie, up to even
        (torch.float16, Fraction(2049) + Fraction(1, 10**30), 0x6801),  # just above one
        (torch.float16, Fraction(1, 2**25), 0),
        (torch.float16, Fraction(3, 2**25), 2),
        (torch.float16, Fraction(1, 2**25) + Fraction(1, 2**90), 1),
        (torch.float16, Fraction(2**11 - 1, 2**25), 0x0400),  # up to the first number that is no denormal
        (torch.float16, Fraction(65519), 0x7BFF),
        (torch.float16, Fraction(65520), 0x7C00),
        (torch.bfloat16, Fraction(257), 0x4380),
        (torch.bfloat16, Fraction(259), 0x4382),
        (torch.bfloat16, Fraction(2) ** -134, 0),
        (torch.bfloat16, Fraction(2) ** 128 - Fraction(2) ** 119, 0x7F80),
        (torch.bfloat16, Fraction(2) ** 128 - Fraction(2) ** 119 - 1, 0x7F7F),
    ],
)
def test_the_exact_arithmetic_of_these_tests_rounds_half_to_even(
    wide: torch.dtype, magnitude: Fraction, nearest: int
) -> None:
    assert nearest_bits(magnitude, wide) == nearest


def check_values(fp8: torch.dtype, wide: torch.dtype, scales: list[float], num_heads: int) -> None:
    got = dequantized_values(fp8, torch.tensor(scales), num_heads, wide)
    assert (got.shape, got.dtype) == ((num_heads, 256), wide)
    want = torch.stack([product_table(fp8, scales[head % len(scales)], wide) for head in range(num_heads)])
    assert torch.equal(without_nan_payloads(bits(got), wide), want)


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


SCALES = [0.1, 1.0, 448.0, 1 / 448, 3e38, 1e-38, 2**-149, 2**-126, 0.0, -0.0, -0.7, 65504.0, 1 + 2**-23, 2**-25]


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_every_fp8_number_times_a_scale_is_rounded_once(fp8: torch.dtype, wide: torch.dtype) -> None:
    scales = [float32(value) for value in SCALES]
    check_values(fp8, wide, scales, len(scales))
    for value in scales:
        check_values(fp8, wide, [value], 2)


@given(
    st.sampled_from(FP8),
    st.sampled_from(WIDE),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
@example(torch.float8_e4m3fn, torch.float16, float32(0.1))
@settings(deadline=None)
def test_any_scale(fp8: torch.dtype, wide: torch.dtype, scale: float) -> None:
    check_values(fp8, wide, [scale], 1)


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_ties_are_where_rounding_twice_goes_wrong(wide: torch.dtype) -> None:
    """Scales whose product with an fp8 number is a hair from a tie: float32 rounds it onto the tie."""
    generator = seeded()
    wrong = 0
    for _ in range(60):
        mantissa = 7 if wide == torch.bfloat16 else 10
        numerator = int(torch.randint(2**mantissa, 2 ** (mantissa + 1), (), generator=generator)) * 2 + 1  # a tie
        number = float32(1.125 * 2.0 ** int(torch.randint(-3, 3, (), generator=generator)))
        scale = float32(numerator * 2.0**-8 / number)
        code = torch.tensor([number]).to(torch.float8_e4m3fn).view(torch.uint8).item()
        check_values(torch.float8_e4m3fn, wide, [scale], 1)
        twice = (torch.tensor([number]) * scale).to(wide)
        wrong += int(bits(twice).item() != int(product_table(torch.float8_e4m3fn, scale, wide)[int(code)]))
    assert wrong  # else this test tells nothing
