"""Random KV caches and calls of the gather, and the plainest gather there is to compare with.

A call is the arguments of ``gather_cached_kv`` or ``gather_paged_kv`` by name, its outputs poisoned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.support.exact import product_table, without_nan_payloads
from vllm_kda_plugin.kernels import gather
from vllm_kda_plugin.kernels.gather import gather_cached_kv, gather_paged_kv
from vllm_kda_plugin.kernels.gather_plan import plan_slots, plan_table

LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "padded", "odd padding", "off by one")
"""Physical orders of vLLM (L layer, B block, H head, N token in block, C head size), and pages with gaps."""

PAIRS = ("packed", "halves", "apart", "unlike")
"""K and V in one tensor, as views of the halves of one, in a cache each, and in caches of different layouts."""

CLASSIC_LAYOUTS = ("dense", "padded", "dims apart", "off by one", "tokens apart", "tokens alike")
"""The last three are not aligned, or not dense enough, to be read 16 bytes at a time."""

OUTS = ("dense", "sliced", "off by one", "gaps")
"""Outputs: a tensor each; slices of a ``[num_tokens, 3, num_heads, head_size]`` one; misaligned; a gap after a head."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
POISON = 0xA5
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Call = dict[str, Any]
Scales = dict[str, torch.Tensor | None]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern, so also NaN with payloads, infinities, -0.0 and denormals."""
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor filled with a byte that tells rows never written."""
    tensor = torch.empty(shape, dtype=dtype)
    memory(tensor).fill_(POISON)
    return tensor


# ---- Caches ---------------------------------------------------------------------------------------------------------


def make_cache(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    width: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """A view ``[num_blocks, block_size, num_heads, width]`` of a random cache in a physical layout."""
    dense = (num_blocks, block_size, num_heads, width)
    page = block_size * num_heads * width
    if layout == "LBNHC":
        return random_bytes(dense, dtype, generator)
    if layout == "LBHNC":
        return random_bytes((num_blocks, num_heads, block_size, width), dtype, generator).transpose(1, 2)
    if layout == "LHBNC":
        return random_bytes((num_heads, num_blocks, block_size, width), dtype, generator).permute(1, 2, 0, 3)
    if layout == "BLNHC":  # pages of all layers together, this is the second of three layers
        return random_bytes((num_blocks, 3, block_size, num_heads, width), dtype, generator)[:, 1]
    if layout == "BLHNC":
        return random_bytes((num_blocks, 3, num_heads, block_size, width), dtype, generator)[:, 1].transpose(1, 2)
    if layout == "padded":
        padded = random_bytes((num_blocks, page + 2 * num_heads * width), dtype, generator)
        return padded[:, :page].view(dense)
    if layout == "odd padding":
        return random_bytes((num_blocks, page + 3), dtype, generator)[:, :page].view(dense)
    if layout == "off by one":
        return random_bytes((num_blocks * page + 1,), dtype, generator)[1:].view(dense)
    raise ValueError(layout)


def make_pair(
    pair: str,
    layout: str,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``key_cache`` and ``value_cache``, which is None where both are packed in the first."""
    shape = num_blocks, block_size, num_heads
    if pair in ("packed", "halves"):
        cache = make_cache(layout, *shape, 2 * head_size, dtype, generator)
        return cache.split(head_size, dim=-1) if pair == "halves" else (cache, None)
    other = LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)] if pair == "unlike" else layout
    key_cache = make_cache(layout, *shape, head_size, dtype, generator)
    return key_cache, make_cache(other, *shape, head_size, dtype, generator)


def make_classic(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random caches ``[num_blocks, num_heads, head_size / x, block_size, x]`` and ``[.., head_size, block_size]``."""
    x = 16 // dtype.itemsize
    key_shape = (num_blocks, num_heads, head_size // x, block_size, x)
    value_shape = (num_blocks, num_heads, head_size, block_size)
    page = num_heads * head_size * block_size
    if layout == "dense":
        return random_bytes(key_shape, dtype, generator), random_bytes(value_shape, dtype, generator)
    if layout == "padded":  # K and V of a page together, and room after it
        pages = random_bytes((num_blocks, 2 * page + 4 * x), dtype, generator)
        return pages[:, :page].view(key_shape), pages[:, page : 2 * page].view(value_shape)
    if layout == "off by one":
        key, value = (random_bytes((num_blocks * page + 1,), dtype, generator)[1:] for _ in range(2))
        return key.view(key_shape), value.view(value_shape)
    if layout == "dims apart":
        room = -(-block_size // x) * x
        key = random_bytes((*key_shape[:3], room, x), dtype, generator)[..., :block_size, :]
        return key, random_bytes((*value_shape[:3], room), dtype, generator)[..., :block_size]
    if layout == "tokens apart":
        key = random_bytes((*key_shape[:3], 2 * block_size, x), dtype, generator)[..., 1::2, :]
        return key, random_bytes((*value_shape[:3], 2 * block_size), dtype, generator)[..., ::2]
    if layout == "tokens alike":  # V is expanded: all tokens of a page are one
        value = random_bytes((*value_shape[:3], x), dtype, generator)[..., :1].expand(value_shape)
        return random_bytes(key_shape, dtype, generator), value
    raise ValueError(layout)


def odd_strides(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same tensor; its dimensions of size 1, whose stride says nothing, get this one."""
    strides = [stride if size == 1 else old for size, old in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


# ---- Calls ----------------------------------------------------------------------------------------------------------


def make_outs(
    out: str, num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned ``key`` and ``value``."""
    shape = (num_tokens, num_heads, head_size)
    if out == "dense":
        return poisoned(shape, dtype), poisoned(shape, dtype)
    if out == "sliced":
        _, key, value = poisoned((num_tokens, 3, num_heads, head_size), dtype).unbind(1)
        return key, value
    if out == "off by one":
        key, value = (poisoned((num_tokens * num_heads * head_size + 1,), dtype)[1:].view(shape) for _ in range(2))
        return key, value
    if out == "gaps":
        key, value = (poisoned((num_tokens, num_heads, head_size + 1), dtype)[..., :-1] for _ in range(2))
        return key, value
    raise ValueError(out)


def slots_call(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: str = "dense",
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
) -> Call:
    """Arguments of gather_cached_kv; ``dtype`` is the outputs' where it is not the caches'."""
    classic = key_cache.dim() == 5
    num_heads, head_size = value_cache.shape[1:3] if classic else value_cache.shape[2:]
    key, value = make_outs(out, len(slot_mapping), num_heads, head_size, dtype or key_cache.dtype)
    return {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
        **(scales or {}),
    }


def table_call(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    starts: Sequence[int],
    lens: Sequence[int],
    generator: torch.Generator,
    out: str = "dense",
    dtype: torch.dtype | None = None,
    spare_rows: int = 5,
    scales: Scales | None = None,
) -> Call:
    """Arguments of gather_paged_kv on random blocks; entries no token needs are -1 or no block of the cache."""
    num_blocks, block_size, num_heads, width = key_cache.shape
    needed = [-(-(start + length) // block_size) if length else 0 for start, length in zip(starts, lens, strict=True)]
    table = torch.full((len(lens), max(needed, default=0) + 2), -1, dtype=torch.int32)
    table[:, -1] = 2**31 - 1
    for row, (start, count) in enumerate(zip(starts, needed, strict=True)):
        first = min(start // block_size, count)
        table[row, first:count] = torch.randint(0, max(num_blocks, 1), (count - first,), generator=generator)
    ends = torch.tensor([0, *lens]).cumsum(0)
    key, value = make_outs(out, int(ends[-1]) + spare_rows, num_heads, width, dtype or key_cache.dtype)
    return {
        "key": key,
        "value": None if value_cache is None else value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table,
        "cu_seqlens_k": ends.int(),
        "seq_starts": torch.tensor(starts, dtype=torch.int32),
        **(scales or {}),
    }


def random_slots(
    num_tokens: int, num_slots: int, dtype: torch.dtype, generator: torch.Generator, none: float = 0.2
) -> torch.Tensor:
    """Slots of a cache, some more than once; a part of them, ``none``, is -1."""
    slots = torch.randint(0, num_slots, (num_tokens,), generator=generator)
    slots[torch.rand(num_tokens, generator=generator) < none] = -1
    return slots.to(dtype)


def copied(call: Call, device: str = "cpu") -> Call:
    """The same call on copies of all its memory: strides, gaps, misalignment and shared storage are kept."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = memory(tensor).to(device, copy=True).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())

    return {name: copy(given) if isinstance(given, torch.Tensor) else given for name, given in call.items()}


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def run(call: Call, **options: Any) -> None:
    """Make the call."""
    kind: Any = gather_cached_kv if "slot_mapping" in call else gather_paged_kv
    kind(**call, **options)


def forget_plans() -> None:
    """As in a new process: no launch is planned."""
    plan_slots.cache_clear()
    plan_table.cache_clear()
    gather._LAST.slots = gather._LAST.table = gather._NO_CALL


# ---- What must come out ---------------------------------------------------------------------------------------------


def tokens_of(call: Call) -> Iterator[tuple[int, int, int]]:
    """Row of the output, block and place in the block of every token that a call asks for."""
    if "slot_mapping" in call:
        cache = call["key_cache"]
        block_size = cache.shape[3 if cache.dim() == 5 else 1]
        for row, slot in enumerate(call["slot_mapping"].tolist()):
            if slot != -1:
                yield row, slot // block_size, slot % block_size
        return
    block_size = call["key_cache"].shape[1]
    bounds = call["cu_seqlens_k"].tolist()
    table = call["block_table"].tolist()
    for request, start in enumerate(call["seq_starts"].tolist()):
        for row in range(bounds[request], bounds[request + 1]):
            position = start + row - bounds[request]
            yield row, table[request][position // block_size], position % block_size


def expected(call: Call) -> Call:
    """A copy of the call with what it must leave, token by token."""
    done = copied(call)
    key, value, key_cache, value_cache = (done[name] for name in ("key", "value", "key_cache", "value_cache"))
    if value is None:
        key, value = key.chunk(2, dim=-1)
        key_cache, value_cache = key_cache.chunk(2, dim=-1)
    classic = key_cache.dim() == 5
    for row, block, offset in tokens_of(call):
        if classic:
            key_token = bits(key_cache)[block, :, :, offset].flatten(1)
            value_token = bits(value_cache)[block, :, :, offset]
        else:
            key_token, value_token = bits(key_cache)[block, offset], bits(value_cache)[block, offset]
        for out, token, scale in ((key, key_token, call.get("k_scale")), (value, value_token, call.get("v_scale"))):
            copy = out.dtype == key_cache.dtype
            bits(out)[row] = token if copy else _dequantized(token, key_cache.dtype, scale, out.dtype)
    return done


def _dequantized(codes: torch.Tensor, fp8: torch.dtype, scale: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    scales = [1.0] if scale is None else scale.reshape(-1).tolist()
    tables = [product_table(fp8, scales[head % len(scales)], wide) for head in range(len(codes))]
    return torch.stack([table[codes[head].long()] for head, table in enumerate(tables)])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which can be compared and indexed whatever they hold."""
    return tensor.view(_INTEGER[tensor.dtype.itemsize])


def mismatch(got: Call, want: Call, *names: str) -> str:
    """Which of the named tensors, or of all, differ in a byte of their storage, or ""; NaN from fp8 is any NaN."""
    found = []
    for name in names or got:
        left, right = got[name], want[name]
        if not isinstance(left, torch.Tensor):
            continue
        if left.dtype != got["key_cache"].dtype and name in ("key", "value"):
            left, right = (
                without_nan_payloads(memory(tensor).view(torch.int16), left.dtype) for tensor in (left, right)
            )
        else:
            left, right = memory(left), memory(right)
        wrong = left != right.to(left.device)
        if bool(wrong.any()):
            found.append(f"{name}: {int(wrong.sum())} of {len(wrong)} differ, first {int(wrong.int().argmax())}")
    return "; ".join(found)
