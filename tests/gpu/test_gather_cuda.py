"""The CUDA gathers, bit for bit against the CPU's, on fresh random bytes and poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.exact import FP8, WIDE
from tests.support.on_gpu import check, gpu_bytes, some_bad, untouched
from tests.support.paged import (
    CLASSIC_LAYOUTS,
    DTYPES,
    LAYOUTS,
    OUTS,
    PAIRS,
    POISON,
    Scales,
    bits,
    copied,
    make_cache,
    make_classic,
    make_pair,
    mismatch,
    odd_strides,
    random_bytes,
    random_slots,
    run,
    seeded,
    slots_call,
    table_call,
)
from vllm_kda_plugin.kernels.gather import gather_cached_kv, gather_paged_kv

pytestmark = pytest.mark.gpu

INDICES = (torch.int32, torch.int64)
# heads, tokens a block, head size
SHAPES = [(8, 16, 128), (1, 1, 1), (3, 5, 7), (1, 528, 64), (40, 8, 128), (2, 64, 512), (5, 12, 24), (2, 16, 1000)]
REQUESTS = [(0, 1), (3, 0), (7, 250), (16, 64), (0, 0), (129, 33), (1, 1), (5, 0)]
STARTS, LENS = zip(*REQUESTS, strict=True)


# ---- Copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_of_every_layout_dtype_and_shape(layout: str, dtype: torch.dtype) -> None:
    for index, (num_heads, block_size, head_size) in enumerate(SHAPES):
        for pair, out in zip(PAIRS[index % 2 :: 2], (OUTS[index % 4], OUTS[(index + 1) % 4]), strict=True):
            caches = make_pair(pair, layout, 7, block_size, num_heads, head_size, dtype, seeded(index))
            check(table_call(*caches, STARTS, LENS, seeded(), out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_of_every_layout_dtype_and_shape(layout: str, dtype: torch.dtype) -> None:
    for index, (num_heads, block_size, head_size) in enumerate(SHAPES):
        pair, out = PAIRS[1 + index % 3], OUTS[(index + 1) % 4]
        key_cache, value_cache = make_pair(pair, layout, 7, block_size, num_heads, head_size, dtype, seeded(index))
        assert value_cache is not None
        for index_dtype in INDICES:
            slots = some_bad(random_slots(133, 7 * block_size, index_dtype, seeded()))
            check(slots_call(key_cache, value_cache, slots, out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, *(f"classic {layout}" for layout in CLASSIC_LAYOUTS)])
def test_reference(layout: str, dtype: torch.dtype) -> None:
    for index, (num_heads, block_size, head_size) in enumerate(SHAPES):
        if layout.startswith("classic"):
            width = max(head_size // 16 * 16, 16)
            shape = (7, block_size, num_heads, width)
            caches: Any = make_classic(layout.removeprefix("classic "), *shape, dtype, seeded())
        else:
            caches = make_pair(PAIRS[1 + index % 3], layout, 7, block_size, num_heads, head_size, dtype, seeded())
        slots = some_bad(random_slots(37, 7 * block_size, INDICES[index % 2], seeded()))
        check(slots_call(caches[0], caches[1], slots, OUTS[index % 4]), impl="reference")


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 31, 33, 64, 65])
def test_few_tokens(num_tokens: int) -> None:
    for num_heads, head_size in ((40, 128), (8, 128), (1, 8), (1, 64), (3, 40)):
        caches = make_pair("apart", "LBNHC", 64, 8, num_heads, head_size, torch.float16, seeded())
        assert caches[1] is not None
        check(slots_call(caches[0], caches[1], random_slots(num_tokens, 512, torch.int64, seeded(), none=0)))
        check(table_call(*caches, [5], [num_tokens], seeded(), spare_rows=0))


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    generator = seeded(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    layout, dtype, pair, out = (choices[pick(0, len(choices))] for choices in (LAYOUTS, DTYPES, PAIRS, OUTS))
    num_blocks, block_size = pick(1, 40), pick(1, 70)
    head_size = 8 * pick(1, 33) if pick(0, 2) else pick(1, 130)
    caches = make_pair(pair, layout, num_blocks, block_size, pick(1, 9), head_size, dtype, generator)
    num_reqs = pick(1, 300)
    starts, lens = ([pick(0, 60) for _ in range(num_reqs)] for _ in range(2))
    check(table_call(*caches, starts, lens, generator, out, spare_rows=pick(0, 2000)))
    if caches[1] is not None:
        slots = some_bad(random_slots(pick(0, 9000), num_blocks * block_size, INDICES[pick(0, 2)], generator))
        check(slots_call(caches[0], caches[1], slots, out))


@pytest.mark.parametrize(("pair", "num_heads", "head_size"), [("packed", 2, 64), ("packed", 8, 128), ("apart", 6, 192)])
@pytest.mark.parametrize(("num_reqs", "length"), [(4096, 17), (1, 70_001), (3000, 1), (33, 40), (1000, 0)])
def test_many_short_requests_and_one_long_one(
    num_reqs: int, length: int, pair: str, num_heads: int, head_size: int
) -> None:
    caches = make_pair(pair, "LBNHC", 499, 16, num_heads, head_size, torch.bfloat16, seeded())
    check(table_call(*caches, [i % 31 for i in range(num_reqs)], [length] * num_reqs, seeded()))


@pytest.mark.parametrize("spread", [1, 3, 63, 1000])
def test_empty_requests_between_others(spread: int) -> None:
    lens = [5 * (request % spread == 0) for request in range(2000)]
    for num_heads in (2, 16):
        caches = make_pair("packed", "LBNHC", 99, 16, num_heads, 64, torch.bfloat16, seeded())
        check(table_call(*caches, [i % 31 for i in range(2000)], lens, seeded()))


def test_no_request_and_no_row() -> None:
    caches = make_pair("apart", "LBNHC", 3, 16, 2, 64, torch.bfloat16, seeded())
    assert caches[1] is not None
    check(table_call(*caches, [], [], seeded()))
    check(table_call(*caches, [0], [0], seeded(), spare_rows=0))
    check(slots_call(caches[0], caches[1], torch.empty(0, dtype=torch.int64)))
    check(slots_call(*make_classic("dense", 3, 8, 2, 8, torch.half, seeded()), torch.empty(0, dtype=torch.int32)))


def test_size_one_dimensions_of_any_stride() -> None:
    for stride in (0, 1, 7):
        for dims in ((1, 1, 1, 8), (4, 1, 1, 8), (1, 4, 1, 8), (4, 4, 1, 1), (1, 1, 3, 1)):
            key_cache, value_cache = (make_cache("LBNHC", *dims, torch.half, seeded(seed)) for seed in range(2))
            slots = random_slots(1, dims[0] * dims[1], torch.int64, seeded(), none=0)
            for call in (
                slots_call(key_cache, value_cache, slots),
                table_call(key_cache, value_cache, [0], [1], seeded(), spare_rows=0),
            ):
                moved = copied(call, "cuda")
                for name in ("key", "value", "key_cache", "value_cache"):
                    moved[name] = odd_strides(moved[name], stride)
                run(moved)
                run(call, impl="torch")
                assert not mismatch(moved, call, "key", "value")


# ---- Classic layout -------------------------------------------------------------------------------------------------


def pages(num_tokens: int, num_blocks: int, block_size: int, generator: torch.Generator) -> torch.Tensor:
    """Whole pages, one after the other, in random order."""
    order = torch.randperm(num_blocks, generator=generator)
    slots = (order[:, None] * block_size + torch.arange(block_size)).flatten()
    return slots.repeat(num_tokens // len(slots) + 1)[:num_tokens]


def pages_in_reverse(*shape: Any) -> torch.Tensor:
    return pages(*shape).flip(0)


def one_slot(num_tokens: int, num_blocks: int, block_size: int, generator: torch.Generator) -> torch.Tensor:
    slot = torch.randint(0, num_blocks * block_size, (), generator=generator)
    return slot.repeat(num_tokens)


def across_tiles(num_tokens: int, num_blocks: int, block_size: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of one page after the other, from inside the first, so that runs of tokens start anywhere."""
    first = int(torch.randint(1, block_size, (), generator=generator))
    return pages(num_tokens + first, num_blocks, block_size, generator)[first:]


def runs_of_tokens(num_tokens: int, num_blocks: int, block_size: int, generator: torch.Generator) -> torch.Tensor:
    """Runs of one to five tokens, forwards, backwards or the same one again."""
    slots: list[int] = []
    while len(slots) < num_tokens:
        start, length, step = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((0, num_blocks * block_size), (1, 6), (-1, 2))
        )
        slots += [(start + i * step) % (num_blocks * block_size) for i in range(length)]
    return torch.tensor(slots[:num_tokens])


def anywhere(num_tokens: int, num_blocks: int, block_size: int, generator: torch.Generator) -> torch.Tensor:
    return some_bad(random_slots(num_tokens, num_blocks * block_size, torch.int64, generator))


PATTERNS: list[Callable[..., torch.Tensor]] = [
    anywhere,
    pages,
    pages_in_reverse,
    one_slot,
    across_tiles,
    runs_of_tokens,
]
# heads, tokens a block, chunks of 16 bytes in a head, layout, outputs. Blocks of 4 and 12 hold no whole chunk of V.
CLASSIC_SHAPES = [
    (8, 16, 16, "dense", "dense"),
    (1, 8, 1, "dense", "sliced"),
    (3, 32, 5, "padded", "dense"),
    (5, 16, 32, "padded", "sliced"),
    (2, 8, 8, "off by one", "dense"),
    (2, 16, 8, "dense", "off by one"),
    (3, 16, 4, "tokens apart", "dense"),
    (2, 16, 8, "dims apart", "gaps"),
    (2, 12, 8, "dims apart", "dense"),
    (2, 4, 3, "dense", "dense"),
    (3, 12, 8, "dense", "sliced"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_classic_layout(pattern: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = 16 // dtype.itemsize
    for num_heads, block_size, chunks, layout, out in CLASSIC_SHAPES:
        caches = make_classic(layout, 9, block_size, num_heads, min(chunks * x, 256), dtype, seeded())
        for num_tokens in (*range(1, 20), 24, 31, 32, 33, 40):
            slots = pattern(num_tokens, 9, block_size, seeded(num_tokens))
            slots = slots if pattern is anywhere or num_tokens % 2 else slots.int()
            check(slots_call(*caches, slots, out))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_classic_layout_of_many_tokens(pattern: Callable[..., torch.Tensor]) -> None:
    caches = make_classic("dense", 256, 8, 40, 128, torch.float16, seeded())
    check(slots_call(*caches, pattern(2048, 256, 8, seeded())))
    caches = make_classic("dense", 64, 32, 7, 64, torch.bfloat16, seeded())
    check(slots_call(*caches, pattern(5001, 64, 32, seeded())))
    check(slots_call(*caches, pattern(16_389, 64, 32, seeded()), "sliced"))


# ---- fp8 to 16 bits -------------------------------------------------------------------------------------------------

SCALES: dict[str, Scales] = {
    "no scale": {},
    "one": {"k_scale": torch.tensor([0.1]), "v_scale": torch.tensor(3.0e-6)},
    "of V only, a head": {"k_scale": None, "v_scale": torch.tensor([0.3, 1.7e-5, 300.0])},
    "a head": {"k_scale": torch.tensor([0.1, 1.0, 1e-38]), "v_scale": torch.tensor([123.456, 0.017, 1e38])},
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_dequantized(fp8: torch.dtype, wide: torch.dtype, scales: Scales) -> None:
    for index, layout in enumerate(LAYOUTS):
        for block_size, head_size in ((16, 128), (16, 1000), (5, 8), (12, 20), (1, 7)):
            pair, out = PAIRS[index % 4], OUTS[(index + block_size) % 4]
            caches = make_pair(pair, layout, 7, block_size, 3, head_size, fp8, seeded(index))
            for starts, lens in (([3, 0, 9], [40, 0, 1]), ([5] * 40, [2] * 40)):
                check(table_call(*caches, starts, lens, seeded(1), out, dtype=wide, scales=scales))
            key_cache, value_cache = make_pair(PAIRS[1 + index % 3], layout, 7, block_size, 3, head_size, fp8, seeded())
            assert value_cache is not None
            slots = some_bad(random_slots(50, 7 * block_size, INDICES[index % 2], seeded(2)))
            for impl in ("auto", "reference"):
                check(slots_call(key_cache, value_cache, slots, out, dtype=wide, scales=scales), impl=impl)
    for layout in CLASSIC_LAYOUTS:
        for block_size in (16, 32, 12):
            classic = make_classic(layout, 7, block_size, 3, 48, fp8, seeded())
            for index, pattern in enumerate(PATTERNS):
                slots = pattern(45, 7, block_size, seeded())
                check(slots_call(*classic, slots, OUTS[index % 2], dtype=wide, scales=scales))


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_every_code_times_thousands_of_scales(fp8: torch.dtype, wide: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).expand(1, 1, 512, 256).contiguous()
    for seed in range(20):
        scale = random_bytes((512,), torch.float32, seeded(seed))
        scale = torch.where(scale.isfinite(), scale, 0.1)
        if seed % 2:  # most of the numbers above are so large or small that all products are infinite or 0
            scale = (torch.randn(512, generator=seeded(seed)) * 6).exp()
        if seed % 4 == 3:  # few bits: many products lie halfway between two results, exactly or, after dividing, nearly
            scale = scale.bfloat16().float()
            scale = scale / 448 if seed % 8 == 3 else scale
        scales: Scales = {"k_scale": scale, "v_scale": scale.flip(0)}
        check(slots_call(codes, codes, torch.tensor([0]), dtype=wide, scales=scales))


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_torch_on_the_gpu_too(fp8: torch.dtype) -> None:
    caches = make_pair("apart", "LBNHC", 7, 16, 3, 24, fp8, seeded())
    assert caches[1] is not None
    slots = random_slots(50, 7 * 16, torch.int64, seeded(2))
    for scales in SCALES.values():
        check(slots_call(caches[0], caches[1], slots, dtype=torch.half, scales=scales), impl="torch")
        check(table_call(*caches, STARTS, LENS, seeded(), dtype=torch.half, scales=scales), impl="torch")
    check(slots_call(*make_classic("dense", 7, 16, 3, 32, fp8, seeded()), slots, dtype=torch.half), impl="torch")
    check(slots_call(caches[0], caches[1], slots), impl="torch")
    check(table_call(*caches, STARTS, LENS, seeded()), impl="torch")


# ---- What is not in the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_blocks_outside_the_cache_are_not_read(pair: str) -> None:
    caches = make_pair(pair, "LBNHC", 4, 16, 2, 64, torch.bfloat16, seeded())
    good = table_call(*caches, [0, 0, 0], [48, 48, 48], seeded())
    want = copied(good)
    run(want, impl="torch")
    untouched_rows = slice(48 + 16, 48 + 32)
    for name in ("key", "value"):
        if want[name] is not None:
            want[name][untouched_rows].view(torch.uint8).fill_(POISON)
    for bad in (-1, 4, 2**31 - 1, -(2**31)):
        moved = copied(good, "cuda")
        moved["block_table"][1, 1] = bad
        run(moved)
        assert not mismatch(moved, want, "key", "value")


def test_lengths_past_the_table_or_out_write_nothing_else() -> None:
    caches = make_pair("packed", "LBNHC", 4, 16, 2, 64, torch.bfloat16, seeded())
    call = table_call(*caches, [0], [64], seeded(), spare_rows=64)
    good = copied(call)
    run(good, impl="torch")
    narrow = copied(call, "cuda")
    narrow["block_table"][:, 4:] = 0
    narrow["block_table"] = narrow["block_table"][:, :2]  # 32 tokens
    run(narrow)
    assert torch.equal(bits(narrow["key"])[:32].cpu(), bits(good["key"])[:32])
    assert untouched(narrow["key"][32:].clone())
    short = copied(call, "cuda")
    whole, short["key"] = short["key"], short["key"][:40]  # 64 tokens for 40 rows
    run(short)
    assert torch.equal(bits(whole)[:40].cpu(), bits(good["key"])[:40])
    assert untouched(whole[40:].clone())
    for nonsense in ([0, -5], [0, 2**31 - 1], [7, 3], [-(2**31), 2**31 - 1]):  # must be harmless
        run(short | {"cu_seqlens_k": torch.tensor(nonsense, dtype=torch.int32, device="cuda")})
    for nonsense in ([-1], [-(2**31)], [2**31 - 1]):
        run(short | {"seq_starts": torch.tensor(nonsense, dtype=torch.int32, device="cuda")})
    torch.cuda.synchronize()
    assert untouched(whole[40:].clone())


# ---- Above 2 and 4 GiB ----------------------------------------------------------------------------------------------


def needs_free(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def test_table_of_more_than_two_to_the_31_elements() -> None:
    needs_free(24)
    num_heads, block_size, width = 8, 16, 256
    num_blocks = 2**31 // (num_heads * block_size * width) + 1000
    cache = gpu_bytes(num_blocks, block_size, num_heads, width)
    assert cache.numel() > 2**31
    order = torch.randperm(num_blocks, device="cuda")
    num_tokens = num_blocks * block_size
    key = torch.zeros(num_tokens + 3, num_heads, width, dtype=torch.bfloat16, device="cuda")
    gather_paged_kv(key, None, cache, None, order.int()[None], indices(0, num_tokens), indices(0))
    copy = bits(key[:-3]).view(num_blocks, block_size, num_heads, width)
    for part in torch.arange(num_blocks, device="cuda").split(4096):
        assert torch.equal(copy[part], bits(cache)[order[part]])
    assert int(key[-3:].count_nonzero()) == 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_slots_of_more_than_two_to_the_31_elements(impl: Any) -> None:
    needs_free(32)
    num_heads, block_size, head_size = 8, 16, 128
    num_blocks = 2**31 // (num_heads * block_size * 2 * head_size) + 1000
    cache = gpu_bytes(num_blocks, block_size, num_heads, 2 * head_size)
    key_cache, value_cache = cache.chunk(2, dim=-1)
    slots = torch.randperm(num_blocks * block_size, device="cuda")
    out = torch.zeros(len(slots), 3, num_heads, head_size, dtype=torch.bfloat16, device="cuda")
    query, key, value = out.unbind(1)
    gather_cached_kv(key, value, key_cache, value_cache, slots, impl=impl)
    assert key.numel() * 2 > 2**31
    assert out.numel() * 2 > 2**32
    rows = bits(cache).view(-1, num_heads, 2 * head_size)
    for part in torch.arange(len(slots), device="cuda").split(1 << 16):
        want = rows[slots[part]]
        assert torch.equal(bits(key)[part], want[..., :head_size])
        assert torch.equal(bits(value)[part], want[..., head_size:])
    assert int(query.count_nonzero()) == 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_classic_caches_above_4_gib(impl: Any) -> None:
    needs_free(32)
    num_heads, block_size, head_size = 8, 16, 128
    num_blocks = 2**31 // (num_heads * block_size * head_size) + 1000
    key_cache = gpu_bytes(num_blocks, num_heads, head_size // 8, block_size, 8)
    value_cache = gpu_bytes(num_blocks, num_heads, head_size, block_size)
    assert key_cache.numel() * 2 > 2**32
    slots = torch.randperm(num_blocks * block_size, device="cuda")[: 2**20 + 2**17]
    slots[-1] = num_blocks * block_size - 1
    key = torch.zeros(len(slots), num_heads, head_size, dtype=torch.bfloat16, device="cuda")
    value = torch.zeros_like(key)
    assert key.numel() * 2 > 2**31
    gather_cached_kv(key, value, key_cache, value_cache, slots, impl=impl)
    for part in torch.arange(len(slots), device="cuda").split(1 << 16):
        block, offset = slots[part] // block_size, slots[part] % block_size
        assert torch.equal(bits(key)[part], bits(key_cache)[block, :, :, offset].flatten(2))
        assert torch.equal(bits(value)[part], bits(value_cache)[block, :, :, offset])


def test_more_than_two_to_the_31_vectors() -> None:
    needs_free(12)
    num_blocks, block_size, width = 2**31 // (16 * 128) + 999, 16, 128
    flat = torch.randint(0, 256, (num_blocks * block_size * width + 1,), dtype=torch.uint8, device="cuda")
    cache = flat[1:].view(num_blocks, block_size, 1, width)  # misaligned: copied byte by byte
    order = torch.randperm(num_blocks, device="cuda")
    num_tokens = num_blocks * block_size
    key = torch.zeros(num_tokens, 1, width, dtype=torch.uint8, device="cuda")
    gather_paged_kv(key, None, cache, None, order.int()[None], indices(0, num_tokens), indices(0))
    assert torch.equal(key.view(num_blocks, -1), cache.reshape(num_blocks, -1)[order])
    key.zero_()
    slots = (order[:, None] * block_size + torch.arange(block_size, device="cuda")).flatten()
    gather_cached_kv(key, torch.zeros_like(key), cache, cache, slots)
    assert torch.equal(key.view(num_blocks, -1), cache.reshape(num_blocks, -1)[order])


def test_slots_and_positions_of_two_to_the_31_and_more() -> None:
    needs_free(12)
    num_blocks = 2**27 + 100
    cache = torch.randint(0, 256, (num_blocks, 16, 1, 1), dtype=torch.uint8, device="cuda")
    slots = torch.randint(0, num_blocks * 16, (100_000,), device="cuda")
    slots[:1600] = torch.arange(num_blocks * 16 - 1600, num_blocks * 16, device="cuda")
    assert int(slots[0]) >= 2**31
    for impl in ("auto", "reference"):
        key, value = (torch.zeros(len(slots), 1, 1, dtype=torch.uint8, device="cuda") for _ in range(2))
        gather_cached_kv(key, value, cache, cache, slots, impl=impl)
        assert torch.equal(key.flatten(), cache.flatten()[slots])
        assert torch.equal(value.flatten(), cache.flatten()[slots])

    cache = gpu_bytes(50, 528, 1, 16)
    table = torch.randint(0, 50, (1, 2**31 // 528 + 2), dtype=torch.int32, device="cuda")
    start, length = 2**31 - 900, 1800
    key = torch.zeros(length, 1, 16, dtype=torch.bfloat16, device="cuda")
    gather_paged_kv(key, None, cache, None, table, indices(0, length), indices(start))
    position = torch.arange(start, start + length, device="cuda")
    position = position[position < table.shape[1] * 528]
    assert int(position[-1]) > 2**31
    want = bits(cache)[table[0, position // 528].long(), position % 528]
    assert torch.equal(bits(key)[: len(position)], want)
    assert int(key[len(position) :].count_nonzero()) == 0


def test_pages_of_all_layers_together_above_4_gib() -> None:
    needs_free(16)
    cache = gpu_bytes(40, 32, 128, 16, 1024)[:, 31, :8].transpose(1, 2)  # of blocks, layers, heads, tokens: 5.4 GB
    assert cache.shape == (40, 16, 8, 1024)
    assert cache.stride(0) * 39 > 2**31
    table = indices(39, 0, 38, 17)[None]
    key = torch.zeros(60, 8, 1024, dtype=torch.bfloat16, device="cuda")
    gather_paged_kv(key, None, cache, None, table, indices(0, 60), indices(2))
    want = bits(cache)[table[0].long()].reshape(64, 8, 1024)[2:62]
    assert torch.equal(bits(key), want)
    key, value = torch.zeros(2, 64, 8, 512, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(39 * 16 + 15, 39 * 16 - 49, -1, device="cuda")
    gather_cached_kv(key, value, cache[..., :512], cache[..., 512:], slots)
    want = bits(cache)[slots // 16, slots % 16]
    assert torch.equal(bits(key), want[..., :512])
    assert torch.equal(bits(value), want[..., 512:])
