"""What a gather launches: its arguments checked, the kernel chosen, its constants packed. Pure host work."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.checks import refused

KERNEL = "gather_cached_kv"
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_WIDE = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# As csrc/gather_cached_kv.cu has them.
WARP = 32
NARROW_THREADS, NARROW_LOADS = 64, 4
CLASSIC_TOKENS, CLASSIC_THREADS = 8, 6 * WARP
# Vectors that a thread block moves of a token, about: 4 KiB of output.
BLOCK_VECS = 256
# Fewest vectors of a wide token, and of a plane of a dense one: below, too much of a block would be idle.
WIDE_VECS, DENSE_VECS = BLOCK_VECS // 2, BLOCK_VECS * 3 // 4
_TABLE_POINTERS, _SLOTS_POINTERS = 9, 7


class Form(NamedTuple):
    """All of a tensor that a plan depends on, but for its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def byte_strides(self) -> list[int]:
        """Strides in bytes, 0 for a dimension of size 1: there it says nothing and must not spoil the alignment."""
        pairs = zip(self.shape, self.strides, strict=True)
        return [stride * self.dtype.itemsize if length > 1 else 0 for length, stride in pairs]


class Plane(NamedTuple):
    """One of K and V, or both packed."""

    out: Form
    cache: Form

    @property
    def byte_strides(self) -> list[int]:
        """Of the output, then of the cache."""
        return self.out.byte_strides + self.cache.byte_strides


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does: nothing for no tokens, one kernel, or two where K and V differ in strides."""

    launches: tuple[tuple[loader.Launch, bool], ...] = ()
    """Each with whether it is told of V in the place of K."""
    in_torch: bool = False
    num_slots: int = 0

    def run(
        self, key: int, value: int, key_cache: int, value_cache: int, k_scale: int, v_scale: int, *rest: int
    ) -> None:
        """Launch, given the addresses of the tensors; 0 for none."""
        for launch, of_value in self.launches:
            if of_value:
                launch(value, 0, value_cache, 0, v_scale, 0, *rest)
            else:
                launch(key, value, key_cache, value_cache, k_scale, v_scale, *rest)


@functools.lru_cache(maxsize=4096)
def plan_slots(
    key: Form,
    value: Form,
    key_cache: Form,
    value_cache: Form,
    slot_mapping: Form,
    k_scale: Form | None,
    v_scale: Form | None,
    out_alignment: int,
    cache_alignment: int,
    impl: str,
) -> Plan:
    """The plan of one ``gather_cached_kv``; raises ValueError as that does.

    Args:
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale: of its arguments of these names.
        out_alignment, cache_alignment: the lower four bits of the outputs' and the caches' addresses, or-ed.
        impl: its argument.
    """
    key, value, slots = Form(*key), Form(*value), Form(*slot_mapping)
    key_cache, value_cache = Form(*key_cache), Form(*value_cache)
    if impl not in ("auto", "reference", "torch"):
        raise refused("impl", f"is {impl!r}", "'auto', 'reference' or 'torch'")
    _check_out("key", key)
    _check_conversion(key, key_cache)
    _check_same("value", value, "key", key)
    num_tokens, num_heads, _ = key.shape
    classic = len(key_cache.shape) == 5
    if classic:
        _check_classic(key, key_cache, value_cache)
        num_blocks, block_size = key_cache.shape[0], key_cache.shape[3]
    else:
        _check_paged(key, key_cache)
        _check_same("value_cache", value_cache, "key_cache", key_cache)
        num_blocks, block_size = key_cache.shape[:2]
    scale_stride = _check_scales(key, key_cache, num_heads, k_scale, v_scale)
    dense = num_tokens <= 1 or slots.strides == (1,)
    if slots.dtype not in (torch.int32, torch.int64) or slots.shape != (num_tokens,) or not dense:
        found = f"is {slots.dtype} {list(slots.shape)} with strides {slots.strides}"
        allowed = f"torch.int32 or torch.int64 [{num_tokens}] with stride 1, one slot a row of key"
        raise refused("slot_mapping", found, allowed)
    _check_device("slot_mapping", slots, key)

    num_slots = num_blocks * block_size
    if impl == "torch" or not _on_nvidia_gpu(key):
        if impl == "reference":
            raise refused("impl", f"is 'reference' on {key.device}", "'auto' or 'torch' there")
        return Plan(in_torch=True, num_slots=num_slots)
    if math.prod(key.shape) == 0 or num_slots == 0:
        return Plan(num_slots=num_slots)
    planes = [Plane(key, key_cache), Plane(value, value_cache)]
    slots_are_64_bit = int(slots.dtype == torch.int64)
    if classic or impl == "reference":
        plain = impl == "reference"
        launch = _scattered_launch(planes, slots_are_64_bit, scale_stride, out_alignment, cache_alignment, plain)
        return Plan(((launch, False),), num_slots=num_slots)
    tables = [slots_are_64_bit, 0, 0, 0]
    launches = _paged_launches("slots", planes, tables, scale_stride, out_alignment, cache_alignment)
    return Plan(launches, num_slots=num_slots)


@functools.lru_cache(maxsize=4096)
def plan_table(
    key: Form,
    value: Form | None,
    key_cache: Form,
    value_cache: Form | None,
    block_table: Form,
    cu_seqlens_k: Form,
    seq_starts: Form,
    k_scale: Form | None,
    v_scale: Form | None,
    out_alignment: int,
    cache_alignment: int,
    impl: str,
) -> Plan:
    """The plan of one ``gather_paged_kv``; arguments as in :func:`plan_slots`, raises ValueError as that does."""
    key, key_cache, block_table = Form(*key), Form(*key_cache), Form(*block_table)
    if impl not in ("auto", "torch"):
        raise refused("impl", f"is {impl!r}", "'auto' or 'torch'")
    _check_out("key", key)
    _check_conversion(key, key_cache)
    _check_paged(key, key_cache)
    planes = [Plane(key, key_cache)]
    _, num_heads, width = key.shape
    if value is not None and value_cache is not None:
        planes.append(Plane(Form(*value), Form(*value_cache)))
        _check_same("value", planes[1].out, "key", key)
        _check_same("value_cache", planes[1].cache, "key_cache", key_cache)
    elif value is not None or value_cache is not None:
        missing, given = ("value", "value_cache") if value is None else ("value_cache", "value")
        raise refused(missing, "is None", f"a tensor as {given} is; without both, key holds packed K|V")
    elif width % 2:
        raise refused("key", f"has shape {list(key.shape)}", "[tokens, num_heads, 2 * head_size] as value is None")
    if len(block_table.shape) != 2:
        raise refused("block_table", f"has shape {list(block_table.shape)}", "[num_reqs, max_blocks]")
    num_reqs, max_blocks = block_table.shape
    for name, table, shape in (
        ("block_table", block_table, (num_reqs, max_blocks)),
        ("cu_seqlens_k", Form(*cu_seqlens_k), (num_reqs + 1,)),
        ("seq_starts", Form(*seq_starts), (num_reqs,)),
    ):
        dense = table.shape[-1:] <= (1,) or table.strides[-1:] == (1,)
        if table.dtype != torch.int32 or table.shape != shape or not dense:
            found = f"is {table.dtype} {list(table.shape)} with strides {table.strides}"
            raise refused(name, found, f"torch.int32 {list(shape)} with last stride 1")
        _check_device(name, table, key)
    scale_stride = _check_scales(key, key_cache, num_heads, k_scale, v_scale)

    if impl == "torch" or not _on_nvidia_gpu(key):
        return Plan(in_torch=True)
    if num_reqs == 0 or max_blocks == 0 or math.prod(key.shape) == 0 or math.prod(key_cache.shape) == 0:
        return Plan()
    if len(planes) == 1 and _conversion(key_cache, key):  # K and V have a scale each
        half = Plane(*(form._replace(shape=torch.Size((*form.shape[:-1], width // 2))) for form in planes[0]))
        planes = [half, half]
    tables = [0, num_reqs, max_blocks, block_table.strides[0]]
    launches = _paged_launches("table", planes, tables, scale_stride, out_alignment, cache_alignment)
    return Plan(launches)


def _paged_launches(
    source: str,
    planes: list[Plane],
    tables: Sequence[int],
    scale_stride: int,
    out_alignment: int,
    cache_alignment: int,
) -> tuple[tuple[loader.Launch, bool], ...]:
    if len(planes) == 2 and planes[0].byte_strides != planes[1].byte_strides:
        return tuple(
            (_paged_launch(source, plane, 1, tables, scale_stride, out_alignment, cache_alignment), plane is planes[1])
            for plane in planes
        )
    launch = _paged_launch(source, planes[0], len(planes), tables, scale_stride, out_alignment, cache_alignment)
    return ((launch, False),)


def _paged_launch(
    source: str,
    plane: Plane,
    num_planes: int,
    tables: Sequence[int],
    scale_stride: int,
    out_alignment: int,
    cache_alignment: int,
) -> loader.Launch:
    out, cache = plane
    num_blocks, block_size, num_heads, width = cache.shape
    block_stride, token_stride, run_stride, _ = cache.byte_strides
    out_token_stride, out_run_stride, _ = out.byte_strides
    runs, run_bytes, out_run_bytes = num_heads, width * cache.dtype.itemsize, width * out.dtype.itemsize
    conversion = _conversion(cache, out)
    heads_are_one_run = num_heads == 1 or (run_stride == run_bytes and out_run_stride == out_run_bytes)
    if heads_are_one_run and not conversion:  # which needs to know the head, for its scale
        runs, run_bytes, run_stride, out_run_stride = 1, num_heads * run_bytes, 0, 0
    cache_step = math.gcd(cache_alignment, run_bytes, block_stride, token_stride, run_stride)
    out_step = math.gcd(out_alignment, out_token_stride, out_run_stride)
    if conversion:
        vector = 8 if cache_step % 8 == 0 and out_step % 16 == 0 else 1
        name = f"{conversion}_{vector}"
    else:
        vector = math.gcd(16, cache_step, out_step)
        name = str(vector)
    run_vecs = run_bytes // vector
    token_vecs = num_planes * runs * run_vecs
    if token_vecs >= 1 << 31:
        raise refused("key", f"has shape {list(out.shape)}", f"less than 2 GiB a token, in steps of {vector} bytes")
    num_rows = out.shape[0]
    slots_are_64_bit, num_reqs, max_blocks, table_stride = tables
    max_positions = min(max_blocks * block_size, 1 << 32)

    # Each warp searches for its token's request: fewer warps where that takes more than one step.
    loads = 4 if conversion or num_reqs > WARP else 2
    if vector == 16 and runs == 1 and not conversion and run_vecs >= DENSE_VECS:
        shape, pieces = "dense", max(1, round(run_vecs / BLOCK_VECS))
        piece_vecs, row_blocks = -(-run_vecs // pieces), num_planes * pieces
        threads, blocks = -(-piece_vecs // (WARP * loads)) * WARP, num_rows * row_blocks
    elif vector == (8 if conversion else 16) and token_vecs >= WIDE_VECS:
        shape, pieces = "wide", max(1, round(token_vecs / BLOCK_VECS))
        piece_vecs, row_blocks = -(-token_vecs // pieces), pieces
        threads, blocks = -(-piece_vecs // (WARP * loads)) * WARP, num_rows * row_blocks
    else:
        shape, pieces, piece_vecs, row_blocks = "narrow", 1, token_vecs, 1
        loads, threads = NARROW_LOADS, NARROW_THREADS
        blocks = -(-num_rows * token_vecs // (threads * loads))
    constants = [
        *(num_rows, slots_are_64_bit, num_reqs, max_positions, max_blocks, table_stride, num_blocks, block_size),
        *(block_stride, token_stride, run_stride, out_token_stride, out_run_stride, runs, token_vecs, run_vecs),
        *(scale_stride, row_blocks, pieces, piece_vecs, *divmod(threads, run_vecs)),
        *(divisor(number) for number in (row_blocks, token_vecs, run_vecs, block_size)),
    ]
    kernel = loader.load(KERNEL, out.device.index)
    entry = f"gather_{source}_{shape}_{name}_{loads}"
    if source == "slots":  # no cu_seqlens_k, no seq_starts
        constants = [0, 0, *constants]
    num_pointers = _TABLE_POINTERS if source == "table" else _SLOTS_POINTERS
    return kernel.prepare(entry, blocks, threads, num_pointers, constants, comes_early=True)


def _scattered_launch(
    planes: Sequence[Plane],
    slots_are_64_bit: int,
    scale_stride: int,
    out_alignment: int,
    cache_alignment: int,
    plain: bool,
) -> loader.Launch:
    (key, key_cache), (value, value_cache) = planes
    num_tokens, num_heads, head_size = key.shape
    size = key_cache.dtype.itemsize
    classic = len(key_cache.shape) == 5
    if classic:
        num_blocks, _, _, block_size, x = key_cache.shape
        key_block, key_head, key_chunk, key_token, _ = key_cache.byte_strides
        value_block, value_head, value_dim, value_token = value_cache.byte_strides
    else:
        num_blocks, block_size = key_cache.shape[:2]
        x, key_chunk, value_dim = head_size, 0, size
        key_block, key_token, key_head, _ = key_cache.byte_strides
        value_block, value_token, value_head, _ = value_cache.byte_strides
    key_strides = [key_block, key_head, key_chunk, key_token]
    value_strides = [value_block, value_head, value_dim, value_token]
    out_strides = [*key.byte_strides[:2], *value.byte_strides[:2]]
    in_chunks = (
        classic
        and math.gcd(16, cache_alignment, block_size * size, *key_strides, *value_strides[:3]) == 16
        and math.gcd(16, out_alignment, *out_strides[:2]) == 16
        and value_token == size
    )
    # Few heads at a time, that L2 may hold all their tokens; where it cannot, wider stretches of memory are faster.
    head_group = 2 if num_tokens <= 16384 else 4
    if in_chunks and not plain:
        form, threads = "classic", CLASSIC_THREADS
        blocks = -(-num_tokens // CLASSIC_TOKENS) * -(-num_heads // head_group)
    else:
        form, threads, blocks = "elements", min(num_heads * head_size, 512), num_tokens
    constants = [
        *(num_tokens, slots_are_64_bit, num_blocks * block_size, block_size, num_heads, head_size, x),
        *key_strides,
        *value_strides,
        *out_strides,
        scale_stride,
        head_group,
        divisor(block_size),
    ]
    kernel = loader.load(KERNEL, key.device.index)
    entry = f"gather_{form}_{_conversion(key_cache, key) or size}"
    return kernel.prepare(entry, blocks, threads, _SLOTS_POINTERS, constants, comes_early=form == "classic")


def divisor(number: int) -> int:
    """What the kernel needs to divide by ``number``, 1 to 2^31 - 1, any n below 2^31: (n * multiplier) >> shift.

    From Granlund and Montgomery, "Division by invariant integers using multiplication" (1994): 2^shift is at least
    2^31 times ``number``, so rounding the multiplier up errs by less than 1 / number.
    """
    shift = 31 + (number - 1).bit_length()
    multiplier = -(-(1 << shift) // number)
    return multiplier | shift << 32


def _conversion(cache: Form, out: Form) -> str:
    """As the kernels' names say it; "" for a copy."""
    return f"{_FP8[cache.dtype]}_{_WIDE[out.dtype]}" if cache.dtype != out.dtype else ""


def _on_nvidia_gpu(form: Form) -> bool:
    return form.device.type == "cuda" and torch.version.cuda is not None


def _check_device(name: str, form: Form, key: Form) -> None:
    if form.device != key.device:
        raise refused(name, f"is on {form.device}", f"on {key.device} as key is")


def _check_out(name: str, out: Form) -> None:
    if len(out.shape) != 3:
        raise refused(name, f"has shape {list(out.shape)}", "[num_tokens, num_heads, head_size]")
    if out.shape[2] > 1 and out.strides[2] != 1:
        raise refused(name, f"has strides {out.strides}", "a view whose last stride is 1")
    if any(stride == 0 and length > 1 for length, stride in zip(out.shape, out.strides, strict=True)):
        raise refused(name, f"has shape {list(out.shape)} and strides {out.strides}", "without overlapping rows")


def _check_same(name: str, form: Form, other_name: str, other: Form) -> None:
    """Refuse a V that does not match its K in anything but strides."""
    for what, found, wanted in (
        ("has shape", list(form.shape), list(other.shape)),
        ("is", form.dtype, other.dtype),
        ("is on", form.device, other.device),
    ):
        if found != wanted:
            raise refused(name, f"{what} {found}", f"{wanted} as {other_name}")
    if form.shape[-1] > 1 and form.strides[-1] != 1:
        raise refused(name, f"has strides {form.strides}", "a view whose last stride is 1")
    if len(form.shape) == 3:
        _check_out(name, form)


def _check_paged(key: Form, cache: Form) -> None:
    if len(cache.shape) != 4 or cache.shape[2:] != key.shape[1:]:
        _, num_heads, head_size = key.shape
        allowed = f"[num_blocks, block_size, {num_heads}, {head_size}] to match key"
        raise refused("key_cache", f"has shape {list(cache.shape)}", allowed)
    if cache.shape[3] > 1 and cache.strides[3] != 1:
        raise refused("key_cache", f"has strides {cache.strides}", "a view whose last stride is 1")
    _check_device("key_cache", cache, key)


def _check_classic(key: Form, key_cache: Form, value_cache: Form) -> None:
    _, num_heads, head_size = key.shape
    num_blocks, _, _, block_size, _ = key_cache.shape
    x = 16 // key_cache.dtype.itemsize
    wanted = (num_blocks, num_heads, head_size // x, block_size, x)
    if key_cache.shape != wanted or head_size % x:
        allowed = f"[num_blocks, {num_heads}, {head_size} / {x}, block_size, {x}] to match key, 16 bytes last"
        raise refused("key_cache", f"has shape {list(key_cache.shape)}", allowed)
    if key_cache.strides[4] != 1:
        raise refused("key_cache", f"has strides {key_cache.strides}", "a view whose last stride is 1")
    like_key = [num_blocks, num_heads, head_size, block_size]
    if list(value_cache.shape) != like_key:
        raise refused("value_cache", f"has shape {list(value_cache.shape)}", f"{like_key} to match key_cache")
    if value_cache.dtype != key_cache.dtype:
        raise refused("value_cache", f"is {value_cache.dtype}", f"{key_cache.dtype} as key_cache")
    _check_device("key_cache", key_cache, key)
    _check_device("value_cache", value_cache, key)


def _check_conversion(key: Form, key_cache: Form) -> None:
    if key.dtype == key_cache.dtype:
        if key.dtype.itemsize not in (1, 2, 4):
            raise refused("key", f"is {key.dtype}", "of a dtype of 1, 2 or 4 bytes")
    elif key_cache.dtype not in _FP8 or key.dtype not in _WIDE:
        allowed = f"{key_cache.dtype} as key_cache" + (", or fp16 or bf16" if key_cache.dtype in _FP8 else "")
        raise refused("key", f"is {key.dtype}", allowed)


def _check_scales(key: Form, cache: Form, num_heads: int, k_scale: Form | None, v_scale: Form | None) -> int:
    """Refuse what is no scale; return the entries from one head's to the next."""
    strides = []
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        if given is None:
            continue
        scale = Form(*given)
        if key.dtype == cache.dtype:
            raise refused(name, f"is given, but {cache.dtype} is copied as it is", "None")
        a_head = scale.shape == (num_heads,) and (scale.strides == (1,) or num_heads == 1)
        if scale.dtype != torch.float32 or not (scale.shape in ((), (1,)) or a_head):
            found = f"is {scale.dtype} {list(scale.shape)} with strides {scale.strides}"
            raise refused(name, found, f"torch.float32 [1] or [{num_heads}] with stride 1")
        _check_device(name, scale, key)
        strides.append(int(math.prod(scale.shape) > 1))
    if len(set(strides)) > 1:
        raise refused("v_scale", "has another number of entries than k_scale", "alike, one entry or one a head")
    return strides[0] if strides else 0
