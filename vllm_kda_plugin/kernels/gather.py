"""Gather: copy paged KV cache into contiguous K and V.

A *slot* is ``block * block_size + offset``: the place of one token, the same in every layer.

On an NVIDIA GPU the kernels of ``csrc/gather_cached_kv.cu`` run on the current stream, without synchronising;
elsewhere torch does the work. What they are told is planned once for each combination of shapes, strides, dtypes and
alignment, since a step of the engine calls with the same ones for every layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from vllm_kda_plugin.kernels import gather_torch
from vllm_kda_plugin.kernels.checks import debug_checks, refused
from vllm_kda_plugin.kernels.gather_plan import Plan, plan_slots, plan_table
from vllm_kda_plugin.kernels.repeat import never, same_forms

_CHECK = debug_checks()


def gather_cached_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: Literal["auto", "reference", "torch"] = "auto",
) -> None:
    """Copy the cached K and V of every slot into ``key`` and ``value``, in order.

    On the GPU slots outside the cache are never read and leave their rows as they are. With VLLM_KDA_CHECK=1, off the
    GPU and with ``impl="torch"`` they are an error, but for -1. The outputs must not overlap each other or the caches.

    Args:
        key, value: ``[num_tokens, num_heads, head_size]``, last stride 1; slices of a wider tensor will do.
        key_cache, value_cache: paged, ``[num_blocks, block_size, num_heads, head_size]`` with any strides whose last
            is 1; or classic, ``[num_blocks, num_heads, head_size / x, block_size, x]`` with x elements in 16 bytes
            and ``[num_blocks, num_heads, head_size, block_size]``, with any strides but a last one of 1 in K. The
            dtype of ``key`` and ``value``, any of 1, 2 or 4 bytes; or torch.float8_e4m3fn or float8_e5m2 for float16
            or bfloat16 outputs.
        slot_mapping: ``[num_tokens]`` int32 or int64. The row of a slot of -1 is left as it is.
        k_scale, v_scale: float32 ``[1]`` or ``[num_heads]``, by which fp8 is multiplied on its way to fp16 or bf16;
            the product is rounded once, as exact arithmetic would. None is 1.
        impl: "auto"; "reference", the plain kernel of vLLM's first year, one thread block a token; "torch".

    Raises:
        ValueError: an argument of the wrong dtype, device, shape or strides, named; off the GPU and in debug mode
            also a slot outside the cache.
        loader.KernelUnavailable: the kernel cannot be loaded on this GPU.
    """
    tensors: tuple[torch.Tensor | None, ...] = key, value, key_cache, value_cache, slot_mapping
    scaled = k_scale is not None or v_scale is not None
    k_scale_at = v_scale_at = 0
    try:
        if scaled:
            tensors += k_scale, v_scale
            k_scale_at, v_scale_at = _address(k_scale), _address(v_scale)
        key_at, value_at = key.data_ptr(), value.data_ptr()
        key_cache_at, value_cache_at = key_cache.data_ptr(), value_cache.data_ptr()
        slots_at = slot_mapping.data_ptr()
    except AttributeError:
        names = "key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"
        raise _no_tensor(names, tensors) from None
    addresses = key_at, value_at, key_cache_at, value_cache_at, k_scale_at, v_scale_at, slots_at
    if impl == "auto" and not (key_at | value_at | key_cache_at | value_cache_at) & 15:
        given, holds_for, launch = _LAST.slots
        if given == scaled and holds_for(*tensors):
            launch(*addresses)
            return
    options = (key_at | value_at) & 15, (key_cache_at | value_cache_at) & 15, impl
    forms = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    plan = plan_slots(*map(_form, forms), *options)
    if plan.in_torch or (_CHECK and _may_read_back(key)):
        _check_slots(slot_mapping, plan.num_slots)
        if plan.in_torch:
            classic = key_cache.dim() == 5
            gather_torch.gather_slots(key, key_cache, slot_mapping, k_scale, classic_value=False)
            gather_torch.gather_slots(value, value_cache, slot_mapping, v_scale, classic_value=classic)
            return
    plan.run(*addresses)
    _LAST.slots = _last_call(scaled, tensors, options, plan)


def gather_paged_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seq_starts: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: Literal["auto", "torch"] = "auto",
) -> None:
    """Copy the cached K and V of a batch into ``key`` and ``value``, request after request.

    K and V come apart, or packed in one tensor: then ``value`` and ``value_cache`` are None, and ``key`` and
    ``key_cache`` are twice as wide, K in the first half of the last dimension and V in the second.

    On the GPU nothing outside the cache is read whatever the tables hold: rows whose block is not in the cache, or
    past the table's width, are left as they are. With VLLM_KDA_CHECK=1, off the GPU and with ``impl="torch"`` they are
    an error. The outputs must not overlap each other or the caches.

    Args:
        key, value: ``[at least cu_seqlens_k[-1], num_kv_heads, head_size]``, last stride 1; slices of a wider tensor
            will do. Rows from ``cu_seqlens_k[-1]`` on are left as they are.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` with any strides whose last is
            1; dtypes as in :func:`gather_cached_kv`.
        block_table: ``[num_reqs, max_blocks]`` int32. Entries past a request's last token are never used.
        cu_seqlens_k: ``[num_reqs + 1]`` int32: 0, then the running sum of the tokens to gather of each request.
        seq_starts: ``[num_reqs]`` int32: position of the first token to gather of each request.
        k_scale, v_scale: as in :func:`gather_cached_kv`.
        impl: "auto" or "torch".

    Raises:
        ValueError: an argument of the wrong dtype, device, shape or strides, named; off the GPU and in debug mode
            also lengths, starts or blocks that do not fit the tables, the cache or the outputs.
        loader.KernelUnavailable: the kernel cannot be loaded on this GPU.
    """
    tensors: tuple[torch.Tensor | None, ...] = key, key_cache, block_table, cu_seqlens_k, seq_starts
    apart = value is not None or value_cache is not None
    scaled = k_scale is not None or v_scale is not None
    value_at = value_cache_at = k_scale_at = v_scale_at = 0
    try:
        key_at, key_cache_at = key.data_ptr(), key_cache.data_ptr()
        if apart:
            tensors += value, value_cache
            value_at, value_cache_at = _address(value), _address(value_cache)
        elif key.dtype != key_cache.dtype:  # packed, but not copied as one: K and V have a scale each
            half = key.numel() and key.shape[-1] // 2
            value_at, value_cache_at = key_at + half * key.itemsize, key_cache_at + half * key_cache.itemsize
        if scaled:
            tensors += k_scale, v_scale
            k_scale_at, v_scale_at = _address(k_scale), _address(v_scale)
        rows_at = block_table.data_ptr(), cu_seqlens_k.data_ptr(), seq_starts.data_ptr()
    except AttributeError:
        names = ["key", "key_cache", "block_table", "cu_seqlens_k", "seq_starts"]
        names += ["value", "value_cache"] * apart + ["k_scale", "v_scale"] * scaled
        raise _no_tensor(names, tensors) from None
    addresses = key_at, value_at, key_cache_at, value_cache_at, k_scale_at, v_scale_at, *rows_at
    if impl == "auto" and not (key_at | value_at | key_cache_at | value_cache_at) & 15:
        given, holds_for, launch = _LAST.table
        if given == apart + 2 * scaled and holds_for(*tensors):
            launch(*addresses)
            return
    options = (key_at | value_at) & 15, (key_cache_at | value_cache_at) & 15, impl
    forms = (key, value, key_cache, value_cache, block_table, cu_seqlens_k, seq_starts, k_scale, v_scale)
    plan = plan_table(*map(_form, forms), *options)
    if plan.in_torch or (_CHECK and _may_read_back(key)):
        slots = _table_slots(block_table, cu_seqlens_k, seq_starts, key_cache, len(key))
        if plan.in_torch:
            if value is None or value_cache is None:
                key, value = key.chunk(2, dim=-1)
                key_cache, value_cache = key_cache.chunk(2, dim=-1)
            gather_torch.gather_slots(key[: len(slots)], key_cache, slots, k_scale, classic_value=False)
            gather_torch.gather_slots(value[: len(slots)], value_cache, slots, v_scale, classic_value=False)
            return
    plan.run(*addresses)
    _LAST.table = _last_call(apart + 2 * scaled, tensors, options, plan)


class _LastCall(NamedTuple):
    """A call that was planned, so that the next one like it, such as the next layer's, need not be."""

    given: int
    """Which optional tensors it had; -1 for none to go by."""
    holds_for: Callable[..., bool]
    """Whether as many tensors have the forms of the last."""
    launch: Callable[..., object]


_NO_CALL = _LastCall(-1, never, never)


class _LastCalls(threading.local):
    slots = _NO_CALL
    table = _NO_CALL


_LAST = _LastCalls()


def _last_call(
    given: int, tensors: tuple[torch.Tensor | None, ...], options: tuple[int, int, str], plan: Plan
) -> _LastCall:
    there = [tensor for tensor in tensors if tensor is not None]
    usual = options == (0, 0, "auto") and len(there) == len(tensors) and len(plan.launches) == 1
    if _CHECK or not usual:
        return _NO_CALL
    return _LastCall(given, same_forms(there), plan.launches[0][0].of_this_thread())


def _form(tensor: torch.Tensor | None) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None:
    """gather_plan.Form of a tensor, as a plain tuple: that takes less time."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _no_tensor(names: Sequence[str], arguments: Sequence[object]) -> ValueError:
    """The error for the first argument that is no tensor. Scales may be None."""
    for name, found in zip(names, arguments, strict=False):
        if not isinstance(found, torch.Tensor) and not (found is None and "scale" in name):
            return refused(name, f"is a {type(found).__name__}", "a tensor")
    raise AssertionError("all are tensors")


def _may_read_back(tensor: torch.Tensor) -> bool:
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Refuse slots outside the cache. Reads back to the host."""
    bad = (slot_mapping < -1) | (slot_mapping >= num_slots)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        more = int(bad.sum()) - 1
        found = f"contains {int(slot_mapping[row])} at row {row}" + (f" (and {more:,} more such)" if more else "")
        allowed = f"from 0 to {num_slots - 1}, or -1" if num_slots else "-1 as the cache is empty"
        raise refused("slot_mapping", found, f"{allowed} to leave a row as it is")


def _table_slots(
    block_table: torch.Tensor, cu_seqlens_k: torch.Tensor, seq_starts: torch.Tensor, key_cache: torch.Tensor, rows: int
) -> torch.Tensor:
    """Slots of a batch; refuses what does not fit the table, the cache or the output. Reads back to the host."""
    num_blocks, block_size = key_cache.shape[:2]
    if not len(block_table):
        return cu_seqlens_k[:0]
    if block_size == 0:
        raise refused("key_cache", f"has shape {list(key_cache.shape)}", "of at least one token a block")
    first, total = int(cu_seqlens_k[0]), int(cu_seqlens_k[-1])
    if first != 0:
        raise refused("cu_seqlens_k", f"starts with {first}", "0 there")
    falling = cu_seqlens_k.diff() < 0
    if bool(falling.any()):
        request = int(falling.int().argmax())
        found = f"falls from {int(cu_seqlens_k[request])} to {int(cu_seqlens_k[request + 1])} at request {request}"
        raise refused("cu_seqlens_k", found, "a running sum of lengths")
    if total > rows:
        raise refused("key", f"has {rows} rows", f"at least cu_seqlens_k[-1] = {total} long")
    slots = gather_torch.paged_slots(block_table, seq_starts, cu_seqlens_k.diff(), block_size)
    bad = (slots < 0) | (slots >= num_blocks * block_size)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        request = int(torch.searchsorted(cu_seqlens_k, row, right=True)) - 1
        found = f"names block {int(slots[row]) // block_size} for row {row} of the output (request {request})"
        blocks = f"a block from 0 to {num_blocks - 1}" if num_blocks else "no block of the empty cache"
        raise refused("block_table", found, f"{blocks} wherever a token is asked for")
    return slots
