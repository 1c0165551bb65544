"""What the CUDA kernels are told, by running them in Python on the same arguments."""

from __future__ import annotations

import contextlib
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.exact import FP8, WIDE
from tests.support.paged import (
    CLASSIC_LAYOUTS,
    DTYPES,
    LAYOUTS,
    OUTS,
    PAIRS,
    POISON,
    Call,
    Scales,
    copied,
    expected,
    forget_plans,
    make_cache,
    make_classic,
    make_pair,
    mismatch,
    odd_strides,
    random_slots,
    run,
    seeded,
    slots_call,
    table_call,
)
from tests.support.simulator import SOURCE, Gpu, constant
from vllm_kda_plugin.kernels import gather, gather_plan, loader
from vllm_kda_plugin.kernels.gather_plan import Form, Plan, divisor, plan_slots, plan_table
from vllm_kda_plugin.kernels.repeat import GUARDED_TORCH

CUDA = torch.device("cuda", 0)
INDICES = (torch.int32, torch.int64)
ALIGNED_CLASSIC = ("dense", "padded", "dims apart")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans as for a GPU; the kernels run in Python, on the CPU's memory. No plan is left from before, or after."""
    gpu = Gpu()

    def load(name: str, device: int) -> Gpu:
        assert (name, device) == (gather_plan.KERNEL, 0)
        return gpu

    def form_on_gpu(tensor: torch.Tensor | None) -> Form | None:
        return None if tensor is None else Form(tensor.shape, tensor.stride(), tensor.dtype, CUDA)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(gather, "_form", form_on_gpu)
    forget_plans()
    yield gpu
    forget_plans()


def check(gpu: Gpu, call: Call, **options: Any) -> list[str]:
    """Run the call in Python; its outputs, with all their gaps, must be the loop's. Return what was launched."""
    want = expected(call)
    gpu.call = call
    gpu.launched.clear()
    run(call, **options)
    assert not mismatch(call, want)
    return list(gpu.launched)


# ---- Copies ---------------------------------------------------------------------------------------------------------

# K and V to each other, outputs, heads, tokens a block, head size
FORMS = [
    ("packed", "dense", 8, 16, 128),
    ("packed", "sliced", 3, 5, 7),
    ("halves", "dense", 2, 8, 64),
    ("apart", "sliced", 3, 8, 24),
    ("apart", "off by one", 1, 1, 1),
    ("unlike", "dense", 2, 12, 8),
    ("unlike", "sliced", 1, 528, 32),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_copies(layout: str, dtype: torch.dtype, form: tuple[str, str, int, int, int], gpu: Gpu) -> None:
    pair, out, num_heads, block_size, head_size = form
    key_cache, value_cache = make_pair(pair, layout, 3, block_size, num_heads, head_size, dtype, seeded())
    launched = check(gpu, table_call(key_cache, value_cache, [0, 3, 2], [1, 4, 1], seeded(1), out))
    assert 1 <= len(launched) <= (2 if pair == "unlike" else 1)
    if value_cache is not None:
        for index in INDICES:
            slots = random_slots(7, 3 * block_size, index, seeded(2))
            assert len(check(gpu, slots_call(key_cache, value_cache, slots, out))) == len(launched)


@pytest.mark.parametrize(
    ("pair", "out", "num_heads", "width", "entry"),
    [
        ("packed", "dense", 8, 256, "dense"),
        ("packed", "dense", 4, 256, "wide"),  # 2,048 bytes
        ("apart", "dense", 40, 128, "dense"),  # 2.5 pieces a plane
        ("apart", "sliced", 13, 128, "dense"),
        ("apart", "dense", 8, 128, "wide"),  # 2,048 bytes a plane, 4,096 a token
        ("halves", "dense", 16, 128, "wide"),  # the cache's heads lie apart
    ],
)
def test_dense_tokens(pair: str, out: str, num_heads: int, width: int, entry: str, gpu: Gpu) -> None:
    """Those that are one run of bytes a plane, and 3 KiB or more."""
    key_cache, value_cache = make_pair(
        pair, "LBNHC", 3, 4, num_heads, width // (1 + (pair == "packed")), torch.half, seeded()
    )
    for num_reqs in (1, 40):
        lens = [5] * num_reqs
        call = table_call(key_cache, value_cache, [3] * num_reqs, lens, seeded(1), out)
        assert check(gpu, call) == [f"gather_table_{entry}_16_{2 if num_reqs == 1 else 4}"]
    if value_cache is not None:
        for index in INDICES:
            slots = random_slots(7, 12, index, seeded(2))
            assert check(gpu, slots_call(key_cache, value_cache, slots, out)) == [f"gather_slots_{entry}_16_2"]


def test_two_launches_where_k_and_v_differ_in_strides(gpu: Gpu) -> None:
    key_cache, value_cache = (make_cache(layout, 3, 4, 2, 8, torch.half, seeded()) for layout in ("LBNHC", "LBHNC"))
    slots = random_slots(9, 12, torch.int64, seeded())
    assert len(check(gpu, slots_call(key_cache, key_cache, slots))) == 1
    assert len(check(gpu, slots_call(key_cache, value_cache, slots))) == 2
    assert len(check(gpu, table_call(key_cache, value_cache, [1], [9], seeded()))) == 2


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("layout", CLASSIC_LAYOUTS)
def test_classic_copies(layout: str, dtype: torch.dtype, gpu: Gpu) -> None:
    x = 16 // dtype.itemsize
    for num_heads, block_size, head_size in ((3, 16, 4 * x), (1, 8, x), (2, 12, 3 * x), (1, 1, x), (5, 4, x)):
        caches = make_classic(layout, 4, block_size, num_heads, head_size, dtype, seeded())
        for num_tokens, index, out in zip((1, 11, 9, 5), (*INDICES, *INDICES), OUTS, strict=True):
            slots = random_slots(num_tokens, 4 * block_size, index, seeded(1))
            in_chunks = layout in ALIGNED_CLASSIC and out in ("dense", "sliced") and block_size % x == 0
            form = "classic" if in_chunks else "elements"
            assert check(gpu, slots_call(*caches, slots, out)) == [f"gather_{form}_{dtype.itemsize}"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, *(f"classic {layout}" for layout in CLASSIC_LAYOUTS)])
def test_reference(layout: str, dtype: torch.dtype, gpu: Gpu) -> None:
    for pair, out in zip((*PAIRS[1:], PAIRS[2]), OUTS, strict=True):
        if layout.startswith("classic"):
            caches: Any = make_classic(layout.removeprefix("classic "), 4, 4, 2, 16, dtype, seeded())
        else:
            caches = make_pair(pair, layout, 4, 3, 2, 5, dtype, seeded())
        call = slots_call(caches[0], caches[1], random_slots(6, 12, torch.int64, seeded(1)), out)
        assert check(gpu, call, impl="reference") == [f"gather_elements_{dtype.itemsize}"]


@pytest.mark.parametrize(
    ("layout", "dtype", "num_heads", "width", "vector"),
    [
        ("LBNHC", torch.bfloat16, 1, 256, 16),
        ("LBHNC", torch.float8_e4m3fn, 2, 256, 16),
        ("LBNHC", torch.bfloat16, 1, 6, 4),
        ("LBHNC", torch.bfloat16, 4, 6, 4),
        ("LBNHC", torch.bfloat16, 4, 6, 16),  # all heads in one run
        ("odd padding", torch.bfloat16, 1, 256, 2),
        ("odd padding", torch.float8_e5m2, 1, 256, 1),
        ("odd padding", torch.float32, 1, 256, 4),
        ("off by one", torch.float32, 1, 256, 4),
        ("BLHNC", torch.float16, 1, 12, 8),
    ],
)
def test_widest_aligned_vector(
    layout: str, dtype: torch.dtype, num_heads: int, width: int, vector: int, gpu: Gpu
) -> None:
    cache = make_cache(layout, 3, 4, num_heads, width, dtype, seeded())
    [entry] = check(gpu, table_call(cache, None, [0], [5], seeded()))
    assert entry.split("_")[-2] == str(vector)


@pytest.mark.parametrize(("out", "vector"), [("dense", 16), ("sliced", 16), ("off by one", 2), ("gaps", 2)])
def test_outputs_decide_too(out: str, vector: int, gpu: Gpu) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 64, torch.half, seeded())
    [entry] = check(gpu, slots_call(cache, cache, torch.tensor([3, 1]), out))
    assert entry.split("_")[-2] == str(vector)


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_strides_of_size_one_dimensions_say_nothing(stride: int, gpu: Gpu) -> None:
    for shape in ((1, 1, 1, 8), (4, 1, 1, 8), (1, 4, 1, 8), (1, 1, 3, 8)):
        key_cache, value_cache = (make_cache("LBNHC", *shape, torch.half, seeded(seed)) for seed in range(2))
        slots = random_slots(1, shape[0] * shape[1], torch.int64, seeded(), none=0)
        for call in (
            slots_call(key_cache, value_cache, slots),
            table_call(key_cache, value_cache, [0], [1], seeded(), spare_rows=0),
        ):
            for name in ("key", "key_cache"):
                call[name] = odd_strides(call[name], stride)
            [entry] = check(gpu, call)
            assert entry.split("_")[-2] == "16"


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(PAIRS),
    st.sampled_from(OUTS),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(1, 9) | st.just(16)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=4) | st.just([(3, 1)] * 33),
    st.sampled_from([(None, False), *((wide, scaled) for wide in WIDE for scaled in (False, True))]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_call(
    gpu: Gpu,
    layout: str,
    pair: str,
    out: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    requests: list[tuple[int, int]],
    wide: tuple[torch.dtype | None, bool],
    seed: int,
) -> None:
    generator = seeded(seed)
    key_cache, value_cache = make_pair(pair, layout, *shape, dtype, generator)
    options: Any = {}
    if dtype in FP8 and wide[0] is not None:
        scales = {name: torch.rand(shape[2], generator=generator) + 0.1 for name in ("k_scale", "v_scale")}
        options = {"dtype": wide[0], "scales": scales if wide[1] else None}
    starts, lens = ([request[i] for request in requests] for i in range(2))
    check(gpu, table_call(key_cache, value_cache, starts, lens, generator, out, **options))
    if value_cache is not None:
        slots = random_slots(sum(lens), shape[0] * shape[1], INDICES[seed % 2], generator)
        check(gpu, slots_call(key_cache, value_cache, slots, out, **options))


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 128),
    st.sampled_from([1, 8, 24, 64, 96, 128, 192, 256, 512, 576]),
    st.sampled_from([torch.half, torch.float32, torch.uint8, *FP8]),
    st.booleans(),
    st.integers(1, 2000),
    st.sampled_from([0, 1, 2, 4, 8]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_launches_reach_every_vector_of_any_size(
    gpu: Gpu, rows: int, heads: int, width: int, dtype: torch.dtype, converts: bool, requests: int, alignment: int
) -> None:
    def form(*shape: int, dtype: torch.dtype = torch.int32) -> Form:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return Form(torch.Size(shape), tuple(strides), dtype, CUDA)

    out_dtype = torch.half if converts and dtype in FP8 else dtype
    key, cache = form(rows, heads, width, dtype=out_dtype), form(10, 16, heads, width, dtype=dtype)
    table, bounds, starts = form(requests, 100), form(requests + 1), form(requests)
    plan = plan_table(key, key, cache, cache, table, bounds, starts, None, None, alignment, alignment, "auto")
    [(launch, _)] = plan.launches
    launched: Any = launch
    a, loads = launched.constants, int(launched.entry.rpartition("_")[2])
    vector = int(launched.entry.split("_")[-2])
    assert alignment % vector == 0
    assert a["token_vecs"] * vector == 2 * heads * width * dtype.itemsize
    assert a["step_runs"] * a["run_vecs"] + a["step_vecs"] == launched.threads
    a_block = launched.threads * loads
    if "narrow" in launched.entry:
        assert (launched.blocks - 1) * a_block < rows * a["token_vecs"] <= launched.blocks * a_block
    else:
        assert launched.blocks == rows * a["row_blocks"]
        assert a["piece_vecs"] <= a_block
        parts = a["pieces"] if "wide" in launched.entry else 2 * a["pieces"]
        assert a["row_blocks"] == parts
        assert parts * a["piece_vecs"] >= a["token_vecs"]


# ---- fp8 to 16 bits -------------------------------------------------------------------------------------------------

SCALES: dict[str, Scales] = {
    "no scale": {},
    "one": {"k_scale": torch.tensor([0.1]), "v_scale": torch.tensor(3.0)},
    "of V only, a head": {"v_scale": torch.tensor([0.1, 0.25, 7.0])},
    "a head": {"k_scale": torch.tensor([1.0, 1e-3, 0.7]), "v_scale": torch.tensor([0.1, 0.25, 7.0])},
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_dequantized(fp8: torch.dtype, wide: torch.dtype, scales: Scales, gpu: Gpu) -> None:
    name = f"{str(fp8).split('_')[1].removesuffix('fn')}_{str(wide).removeprefix('torch.')}"
    for layout, head_size, aligned in (
        ("LBNHC", 64, True),
        ("LBNHC", 192, True),
        ("LHBNC", 8, True),
        ("LBNHC", 12, False),
        ("odd padding", 8, False),
        ("off by one", 8, False),
    ):
        for pair, out in zip(PAIRS, OUTS, strict=True):
            key_cache, value_cache = make_pair(pair, layout, 3, 8, 3, head_size, fp8, seeded())
            calls = [table_call(key_cache, value_cache, [3, 9], [7, 1], seeded(1), out, dtype=wide, scales=scales)]
            if value_cache is not None:
                slots = random_slots(7, 24, torch.int32, seeded(2))
                calls.append(slots_call(key_cache, value_cache, slots, out, dtype=wide, scales=scales))
            for call in calls:
                for entry in check(gpu, call):
                    assert f"_{name}_" in entry
                    if pair != "unlike":
                        assert entry.split("_")[-2] == ("8" if aligned and out in ("dense", "sliced") else "1")
    for layout in CLASSIC_LAYOUTS:
        caches = make_classic(layout, 3, 16, 3, 32, fp8, seeded())
        call = slots_call(*caches, random_slots(9, 48, torch.int64, seeded(2)), "sliced", dtype=wide, scales=scales)
        form = "classic" if layout in ALIGNED_CLASSIC else "elements"
        assert check(gpu, call) == [f"gather_{form}_{name}"]
        assert check(gpu, call, impl="reference") == [f"gather_elements_{name}"]


def test_every_kernel_is_launched_for_something(gpu: Gpu) -> None:
    slots = torch.tensor([3, 11, 0, -1, 7])

    def paged(width: int, cache_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        caches = [make_cache("LBNHC", 3, 4, 1, width, cache_dtype, seeded(seed)) for seed in range(2)]
        check(gpu, slots_call(caches[0], caches[1], slots, dtype=out_dtype))
        for num_reqs in (1, 40):
            check(gpu, table_call(caches[0], caches[1], [3] * num_reqs, [2] * num_reqs, seeded(), dtype=out_dtype))

    def scattered(cache_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        caches = make_classic("dense", 3, 16, 1, 16, cache_dtype, seeded())
        for impl in ("auto", "reference"):
            check(gpu, slots_call(*caches, slots, dtype=out_dtype), impl=impl)

    for width in (1, 2, 4, 8, 16, 2048, 4096):
        paged(width, torch.uint8, torch.uint8)
    for dtype in (torch.uint8, torch.half, torch.float32):
        scattered(dtype, dtype)
    for fp8 in FP8:
        for wide in WIDE:
            scattered(fp8, wide)
            for width in (7, 8, 1024):
                paged(width, fp8, wide)
    assert set(gpu.entries) == set(loader.KERNELS[gather_plan.KERNEL])


# ---- What is not in the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slots_outside_the_cache_are_not_read(index: torch.dtype, gpu: Gpu) -> None:
    bad = [-1, -2, 12, 13, 2**31 - 1, -(2**31)] + [2**31, 2**32, 2**63 - 1, -(2**63)] * (index == torch.int64)
    slots = torch.tensor([11, *bad, 0], dtype=index)
    fine = torch.tensor([11, *[-1] * len(bad), 0], dtype=index)
    paged = make_pair("apart", "LBNHC", 3, 4, 2, 8, torch.half, seeded())
    for caches in (paged, make_classic("dense", 3, 4, 2, 8, torch.half, seeded())):
        assert caches[1] is not None
        want = expected(slots_call(caches[0], caches[1], fine))
        for impl in ("auto", "reference"):
            gpu.call = slots_call(caches[0], caches[1], slots)
            run(gpu.call, impl=impl)
            assert not mismatch(gpu.call, want, "key", "value")


def without(want: Call, *rows: int) -> Call:
    """What must be there if these rows are not written."""
    left = copied(want)
    for row in rows:
        assert bool((left["key"][row].view(torch.uint8) != POISON).any())
        left["key"][row].view(torch.uint8).fill_(POISON)
    return left


def test_blocks_outside_the_cache_or_the_table_are_not_read(gpu: Gpu) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    fresh = partial(table_call, cache, None, [2, 1], [9, 8])
    want = expected(fresh(seeded()))
    for bad in (-1, 3, 2**31 - 1, -(2**31)):
        gpu.call = fresh(seeded())
        gpu.call["block_table"][1, 1] = bad  # positions 4 to 7
        run(gpu.call)
        assert not mismatch(gpu.call, without(want, 12, 13, 14, 15), "key")
    gpu.call = fresh(seeded())
    gpu.call["block_table"] = gpu.call["block_table"][:, :2]  # positions 0 to 7
    run(gpu.call)
    assert not mismatch(gpu.call, without(want, 6, 7, 8, 16), "key")


def test_no_rows_past_the_output_are_written(gpu: Gpu) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    call = table_call(cache, None, [2, 1], [9, 8], seeded())
    want = expected(call)
    gpu.call = call | {"key": call["key"][:12]}
    run(gpu.call)
    assert not mismatch(call, without(want, *range(12, 17)), "key")


def test_debug_mode_names_what_is_wrong(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_pair("apart", "LBNHC", 3, 4, 2, 8, torch.half, seeded())
    assert caches[1] is not None
    slots = slots_call(caches[0], caches[1], torch.tensor([3, 12]))
    table = table_call(*caches, [0], [5], seeded())
    bad = table | {"block_table": torch.full((1, 2), 3, dtype=torch.int32)}
    for checks in (False, True):
        monkeypatch.setattr(gather, "_CHECK", checks)
        forget_plans()
        for good, wrong, message in (
            (slots | {"slot_mapping": torch.tensor([3, 11])}, slots, "slot_mapping contains 12"),
            (table, bad, "block_table names block 3"),
        ):
            assert check(gpu, good)
            gpu.call = wrong
            gpu.launched.clear()
            with pytest.raises(ValueError, match=message) if checks else contextlib.nullcontext():
                run(wrong)
            assert len(gpu.launched) == (0 if checks else 1)


# ---- Plans ----------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_or_launched_for_no_tokens(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loader, "load")
    caches = make_pair("apart", "LBNHC", 3, 4, 2, 8, torch.half, seeded())
    assert caches[1] is not None
    assert not check(gpu, slots_call(caches[0], caches[1], torch.empty(0, dtype=torch.int64)))
    assert not check(gpu, slots_call(*make_classic("dense", 3, 8, 2, 8, torch.half, seeded()), torch.empty(0).int()))
    assert not check(gpu, table_call(*caches, [], [], seeded()))
    assert not check(gpu, table_call(*caches, [0], [0], seeded(), spare_rows=0))


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (3, 0, 2, 8)], ids=str)
def test_caches_without_a_token_are_not_read(shape: tuple[int, int, int, int], gpu: Gpu) -> None:
    cache = torch.empty(shape, dtype=torch.half)
    slots = slots_call(cache, cache, torch.tensor([0, -1, 7]))
    any_cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    table = table_call(any_cache, any_cache, [0], [5], seeded()) | {"key_cache": cache, "value_cache": cache}
    for call in (slots, table):
        gpu.call = call
        before = copied(call)
        run(call)
        assert not mismatch(call, before)
    run(slots, impl="reference")
    assert not gpu.launched


def test_one_plan_serves_every_layer(gpu: Gpu) -> None:
    for seed in range(3):  # other addresses, the same forms
        caches = make_pair("halves", "LBNHC", 3, 4, 2, 8, torch.half, seeded(seed))
        assert caches[1] is not None
        check(gpu, slots_call(caches[0], caches[1], random_slots(9, 12, torch.int64, seeded(seed))))
        check(gpu, table_call(*caches, [1], [9], seeded(seed)))
    assert len(gpu.prepared) == 2
    assert plan_slots.cache_info().currsize == plan_table.cache_info().currsize == 1


def test_other_forms_and_alignments_get_plans_of_their_own(gpu: Gpu) -> None:
    flat = make_cache("LBNHC", 1, 1, 1, 97, torch.half, seeded()).flatten()
    aligned, off = flat[:96].view(3, 4, 1, 8), flat[1:].view(3, 4, 1, 8)
    slots = torch.tensor([3, 7, 11])
    calls = [
        slots_call(aligned, aligned, slots),
        slots_call(off, aligned, slots),
        slots_call(aligned, off, slots),
        slots_call(aligned, aligned, slots, "off by one"),
        slots_call(aligned, aligned, slots, "sliced"),
        slots_call(aligned, aligned, slots.int()),
        slots_call(aligned, aligned, slots[:2]),
        slots_call(aligned[:2], aligned[:2], slots[:2]),
    ]
    for call in calls:
        check(gpu, call)
    assert [entry.split("_")[-2] for entry in gpu.entries] == ["16", "2", "2", "16", "16", "16", "16"]
    assert plan_slots.cache_info().currsize == 7  # K or V off by one is the same to the kernel


def test_a_call_that_is_not_like_the_last_is_not_taken_for_it(gpu: Gpu) -> None:
    """Calls that differ in one thing each, in random order, most of them more than once in a row."""
    flat = make_cache("LBNHC", 1, 1, 1, 400, torch.half, seeded()).flatten()
    cache, off, wide = flat[:192].view(3, 4, 2, 8), flat[1:193].view(3, 4, 2, 8), flat[:384].view(3, 4, 2, 16)
    fp8 = {wanted: make_cache("LBNHC", 3, 4, 2, 8, wanted, seeded()) for wanted in FP8}
    other = make_cache("LBHNC", 3, 4, 2, 8, torch.half, seeded())
    slots = torch.tensor([3, 11, 0, -1, 7])
    one, heads = torch.tensor([0.1]), torch.tensor([0.1, 0.2])
    e4m3 = fp8[torch.float8_e4m3fn]
    calls = [
        slots_call(cache, cache, slots),
        slots_call(cache, cache, slots.int()),
        slots_call(cache, cache, slots[:4]),
        slots_call(cache, cache, slots, "sliced"),
        slots_call(cache, cache, slots, "off by one"),
        slots_call(cache, off, slots),
        slots_call(cache, other, slots),
        slots_call(cache[:2], cache[:2], slots[2:]),
        slots_call(wide[..., :8], wide[..., 8:], slots),
        slots_call(cache.view(torch.bfloat16), cache.view(torch.bfloat16), slots),
        slots_call(*make_classic("dense", 3, 8, 2, 8, torch.half, seeded()), slots),
        *(slots_call(e4m3, e4m3, slots, dtype=dtype) for dtype in (None, *WIDE)),
        *(
            slots_call(e4m3, e4m3, slots, dtype=torch.half, scales=scales)
            for scales in ({"k_scale": one}, {"v_scale": one}, {"k_scale": heads}, {"k_scale": heads, "v_scale": heads})
        ),
        slots_call(fp8[torch.float8_e5m2], fp8[torch.float8_e5m2], slots, dtype=torch.half),
        *(table_call(cache, value, [0, 3], [5, 2], seeded()) for value in (cache, None, other)),
        table_call(cache, cache, [0, 3], [5, 2], seeded(), spare_rows=4),
        table_call(cache, cache, [3], [5], seeded(), spare_rows=7),
        *(table_call(e4m3, value, [0, 3], [5, 2], seeded(), dtype=torch.half) for value in (e4m3, None)),
        table_call(e4m3, None, [0, 3], [5, 2], seeded(), dtype=torch.half, scales={"k_scale": one, "v_scale": one}),
        table_call(e4m3, e4m3, [0, 3], [5, 2], seeded(), dtype=torch.half, scales={"k_scale": one, "v_scale": one}),
    ]
    alone = []
    for call in calls:
        forget_plans()
        alone.append(check(gpu, copied(call)))
    for index in torch.randint(0, len(calls), (300,), generator=seeded()).tolist():
        for _ in range(index % 3 + 1):
            assert check(gpu, copied(calls[index])) == alone[index]
        if "slot_mapping" in calls[index]:
            [entry] = check(gpu, copied(calls[index]), impl="reference")
            assert entry.startswith("gather_elements")
    with torch.inference_mode():
        for call in calls:
            check(gpu, copied(call))
            check(gpu, copied(call))


@pytest.mark.skipif(not torch.__version__.startswith(GUARDED_TORCH), reason="not known to work in this torch")
def test_a_call_like_the_last_is_not_even_looked_up(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(seed: int) -> list[Call]:
        caches = make_pair("apart", "LBNHC", 3, 4, 2, 8, torch.half, seeded(seed))
        assert caches[1] is not None
        slots = random_slots(9, 12, torch.int64, seeded(seed))
        return [slots_call(caches[0], caches[1], slots), table_call(*caches, [1], [9], seeded(seed))]

    for call in calls(0):
        check(gpu, call)
    monkeypatch.delattr(gather, "plan_slots")
    monkeypatch.delattr(gather, "plan_table")
    for call in calls(1):
        check(gpu, call)


def test_a_refused_call_is_refused_after_one_like_it_too(gpu: Gpu) -> None:
    cache = make_cache("LBNHC", 3, 4, 2, 8, torch.half, seeded())
    call = slots_call(cache, cache, torch.tensor([3, 7]))
    for changed in ({"slot_mapping": torch.tensor([3.0, 7.0])}, {"value": call["value"].float()}, {"impl": "fast"}):
        check(gpu, copied(call))
        with pytest.raises(ValueError, match=next(iter(changed))):
            run(copied(call) | changed)
    batch = table_call(cache, None, [3], [5], seeded())
    for changed in ({"seq_starts": torch.tensor([3])}, {"value_cache": cache}, {"k_scale": torch.ones(1)}):
        check(gpu, copied(batch))
        with pytest.raises(ValueError, match=next(iter(changed)).removesuffix("_cache")):
            run(copied(batch) | changed)
    fp8 = make_cache("LBNHC", 3, 4, 2, 8, torch.float8_e5m2, seeded())
    scales: Scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    dequantized = slots_call(fp8, fp8, torch.tensor([3, 7]), dtype=torch.half, scales=scales)
    for name in scales:
        for scale in (torch.ones(1), torch.ones(3), torch.ones(2).double(), torch.ones(4)[::2]):
            check(gpu, copied(dequantized))
            with pytest.raises(ValueError, match=r"^[kv]_scale"):
                run(copied(dequantized) | {name: scale})
    apart = table_call(cache, cache, [3], [5], seeded())
    for name in ("value", "value_cache"):
        check(gpu, copied(apart))
        with pytest.raises(ValueError, match=f"^{name} is None"):
            run(copied(apart) | {name: None})


def test_packed_with_scales_is_not_taken_for_k_and_v_apart(gpu: Gpu) -> None:
    """Both have seven tensors, and nothing else tells the last two from each other."""
    fp8 = make_cache("LBNHC", 3, 4, 2, 16, torch.float8_e5m2, seeded())
    scales: Scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    packed = table_call(fp8, None, [3], [5], seeded(), dtype=torch.half, scales=scales)
    check(gpu, copied(packed))
    wrong = {"value": torch.ones(1), "value_cache": torch.ones(1), "k_scale": None, "v_scale": None}
    with pytest.raises(ValueError, match=r"^value has shape"):
        run(copied(packed) | wrong)
    cache = make_cache("LBNHC", 3, 4, 2, 16, torch.half, seeded())
    apart = table_call(cache, cache.clone(), [3], [5], seeded())
    check(gpu, copied(apart))
    wrong = {"value": None, "value_cache": None, "k_scale": apart["value"], "v_scale": apart["value_cache"]}
    with pytest.raises(ValueError, match=r"^k_scale is given, but torch.float16 is copied"):
        run(copied(apart) | wrong)


def test_kernels_that_come_early_wait_before_they_read() -> None:
    """And read nothing by __ldg, which ptxas moves up past the wait."""
    code = SOURCE.replace("__device__ __forceinline__", "")
    functions = dict(re.findall(r"void (gather_\w+)\(const \w+& a\) \{\n(.*?)\n\}\n", code, re.DOTALL))
    assert set(functions) == {"gather_dense", "gather_wide", "gather_narrow", "gather_classic", "gather_elements"}
    assert "__ldg" in functions.pop("gather_elements")
    for body in functions.values():
        before, wait, _ = body.partition("wait_for_previous_kernel();")
        assert wait
        reads = re.findall(r"read_slot|read_scale|find_\w+|place|\w+\[|__ld\w+|return", before)
        assert set(reads) <= {"sources["}  # declared
    uses = [line for line in SOURCE.splitlines() if "__ldg(" in line]
    assert len(uses) == 2


def form(*shape: int, dtype: torch.dtype = torch.half, strides: tuple[int, ...] | None = None) -> Form:
    size = torch.Size(shape)
    dense = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Form(size, strides or dense, dtype, CUDA)


def slots_plan(tokens: int, cache: Form, slots: torch.dtype = torch.int64, impl: str = "auto") -> Plan:
    out = form(tokens, *(cache.shape[2:] if len(cache.shape) == 4 else (cache.shape[1], cache.shape[2] * 8)))
    value = cache
    if len(cache.shape) == 5:
        value = form(cache.shape[0], *out.shape[1:], cache.shape[3])
    return plan_slots(out, out, cache, value, form(tokens, dtype=slots), None, None, 0, 0, impl)


def test_equal_arguments_are_one_plan(gpu: Gpu) -> None:
    cache = form(1000, 16, 8, 128)
    assert slots_plan(64, cache) is slots_plan(64, form(1000, 16, 8, 128))
    assert slots_plan(64, cache) is not slots_plan(65, cache)
    assert slots_plan(64, cache) is not slots_plan(64, cache, torch.int32)


@pytest.mark.parametrize("tokens", [1, 1000, 2**22])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_sizes_above_4_gib_are_told_in_full(tokens: int, impl: str, gpu: Gpu) -> None:
    pages = 10**6
    paged = form(pages, 16, 8, 128, strides=(60 * 16 * 8 * 256, 8 * 256, 256, 1))
    classic = form(pages, 8, 16, 16, 8)
    for cache in (paged, classic):
        assert len(slots_plan(tokens, cache, impl=impl).launches) == 1
        told = gpu.prepared[-1].constants
        assert told["num_rows"] == tokens
        assert told["block_size"] == 16
        strides = [stride for name, stride in told.items() if name.endswith("block_stride")]
        assert set(strides) == {cache.strides[0] * 2}
        assert told.get("num_slots", told.get("num_blocks", 0) * 16) == pages * 16
        if gpu.prepared[-1].entry.startswith("gather_classic"):
            assert gpu.prepared[-1].blocks == -(-tokens // 8) * -(-8 // told["head_group"])


def test_constants_are_those_of_the_source() -> None:
    for name, value in (
        ("kWarp", gather_plan.WARP),
        ("kNarrowThreads", gather_plan.NARROW_THREADS),
        ("kClassicTokens", gather_plan.CLASSIC_TOKENS),
    ):
        assert constant(name) == value


numbers_below_2_to_31 = st.one_of(
    st.integers(0, 2**31 - 1),
    st.integers(0, 1000),
    st.tuples(st.integers(0, 31), st.integers(-2, 2)).map(lambda power: (1 << power[0]) + power[1]),
).filter(lambda number: 0 <= number < 2**31)


@given(numbers_below_2_to_31.filter(bool), numbers_below_2_to_31)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 2)
@example(2**30 + 1, 2**31 - 1)
@example(1, 2**31 - 1)
@example(7, 2**31 - 1)
def test_division_by_multiplication(by: int, number: int) -> None:
    packed = divisor(by)
    multiplier, shift = packed & 0xFFFFFFFF, packed >> 32
    assert shift < 64
    multiples = {number // by * by, 2**31 // by * by}  # rounding errs at the largest number below one, if anywhere
    for n in {number, *(multiple + i for multiple in multiples for i in (-1, 0))}:
        if 0 <= n < 2**31:
            assert n * multiplier < 2**64
            assert n * multiplier >> shift == n // by
