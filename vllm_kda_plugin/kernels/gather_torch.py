"""Gather of paged KV in torch, on any device: the CPU's path, and what the CUDA kernels are compared with."""

from __future__ import annotations

import math

import torch

from vllm_kda_plugin.kernels.checks import refused

_INDEX_DTYPES = (torch.int32, torch.int64)


def gather_slots(
    out: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, *, classic_value: bool
) -> None:
    """One plane, K or V, of :func:`vllm_kda_plugin.kernels.gather.gather_cached_kv`, its arguments checked.

    Args:
        out: ``[num_tokens, num_heads, head_size]``.
        cache: ``[num_blocks, block_size, num_heads, head_size]``, or in the classic layout
            ``[num_blocks, num_heads, head_size / x, block_size, x]`` or, for V,
            ``[num_blocks, num_heads, head_size, block_size]``.
        slots: ``[num_tokens]`` int32 or int64; rows of a negative slot are left as they are.
        scale: float32 ``[1]`` or ``[num_heads]`` for fp8 to fp16 or bf16, else None.
        classic_value: whether ``cache`` is V in the classic layout.
    """
    wanted = slots >= 0
    if not bool(wanted.all()):
        rows = wanted.nonzero()[:, 0]
        part = out.new_empty((len(rows), *out.shape[1:]))
        gather_slots(part, cache, slots[rows], scale, classic_value=classic_value)
        raw_bits(out)[rows] = raw_bits(part)  # index_put knows no fp8
        return
    slots = slots.long()
    bits = raw_bits(cache)
    if cache.dim() == 4 and not classic_value:
        rows = torch.empty(out.shape, dtype=bits.dtype, device=bits.device)
        gather_rows(bits.transpose(1, 2), slots, rows)
    else:
        block_size = cache.shape[3]
        block = slots // block_size
        offset = slots - block * block_size
        rows = (bits[block, :, :, offset]).reshape(out.shape)
    if out.dtype == cache.dtype:
        raw_bits(out).copy_(rows)
        return
    scale = torch.ones(1, device=out.device) if scale is None else scale
    table = dequantized_values(cache.dtype, scale, out.shape[1], out.dtype)
    head = torch.arange(out.shape[1], device=out.device)[:, None]
    out.copy_(table[head, rows.long()])


def dequantized_values(fp8: torch.dtype, scale: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Every fp8 number times the scale of every head, rounded once, as exact arithmetic would.

    Args:
        fp8: torch.float8_e4m3fn or torch.float8_e5m2.
        scale: float32 ``[1]`` or ``[num_heads]``. Its device is the result's.
        num_heads: heads of the result.
        dtype: torch.float16 or torch.bfloat16.

    Returns:
        ``[num_heads, 256]`` of ``dtype``, by the byte that encodes the fp8 number.
    """
    numbers = torch.arange(256, dtype=torch.uint8, device=scale.device).view(fp8).double()
    exact = scale.double().expand(num_heads)[:, None] * numbers  # 28 bits of 53
    # To odd, then to nearest: one rounding in effect. Torch alone would round to float32 on the way, and twice.
    nearest = exact.float()
    towards_zero = torch.where(
        nearest.double().abs() > exact.abs(), nearest.nextafter(torch.zeros_like(nearest)), nearest
    )
    inexact = (towards_zero.double() != exact).int()
    return (towards_zero.view(torch.int32) | inexact).view(torch.float32).to(dtype)


def paged_slots(
    block_table: torch.Tensor, seq_starts: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slot of every token to gather, request after request.

    Args:
        block_table: ``[num_reqs, max_blocks]`` int32 or int64. Entries past a request's last token are never used.
        seq_starts: ``[num_reqs]`` position of the first token to gather of each request.
        seq_lens: ``[num_reqs]`` number of tokens to gather of each request; 0 gives no slot.
        block_size: tokens a block holds.

    Returns:
        ``[seq_lens.sum()]`` int64 slots on the device of ``block_table``. Reads sizes back to the host, so on
        CUDA it synchronises.

    Raises:
        ValueError: wrong dtype, rank or length, a negative start or length, or a request that needs more
            blocks than the table is wide.
    """
    _check_indices("block_table", block_table, 2)
    _check_indices("seq_starts", seq_starts, 1)
    _check_indices("seq_lens", seq_lens, 1)
    num_reqs, max_blocks = block_table.shape
    for name, values in (("seq_starts", seq_starts), ("seq_lens", seq_lens)):
        if len(values) != num_reqs:
            raise refused(name, f"has {len(values)} entries", f"{num_reqs} long, one entry a request")
        if values.device != block_table.device:
            raise refused(name, f"is on {values.device}", f"on {block_table.device} as block_table is")
    if block_size < 1:
        raise refused("block_size", f"is {block_size}", "at least 1")
    starts, lens = seq_starts.long(), seq_lens.long()
    if num_reqs == 0:
        return lens
    for name, values in (("seq_starts", starts), ("seq_lens", lens)):
        least = int(values.min())
        if least < 0:
            raise refused(name, f"contains {least}", "0 or more everywhere")
    longest = int((starts + lens).where(lens > 0, 0).max())
    if longest > max_blocks * block_size:
        found = f"is {max_blocks} blocks of {block_size} tokens wide"
        raise refused("block_table", found, f"wide enough for the longest request, {longest} tokens")
    ends = lens.cumsum(0)
    total = int(ends[-1])
    request = torch.repeat_interleave(lens, output_size=total)
    position = torch.arange(total, device=lens.device) + (starts - ends + lens)[request]
    logical_block = position // block_size
    return block_table[request, logical_block].long() * block_size + (position - logical_block * block_size)


def gather_rows(kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy the K|V row of every slot into ``out``, in order, with torch. Any device.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, any strides whose last is 1.
        slots: ``[num_tokens]`` int64, each ``block * block_size + offset``.
        out: ``[at least num_tokens, num_kv_heads, 2 * head_size]`` contiguous, dtype of ``kv_cache``. Rows from
            ``num_tokens`` on are left as they are.

    Returns:
        ``out[:num_tokens]``.

    Raises:
        ValueError: an argument of the wrong dtype, device, shape or strides; on the CPU also a slot outside
            the cache (on CUDA torch's own device assertion reports it).
    """
    _check_cache_and_out(kv_cache, out)
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != kv_cache.device:
        found = f"is {slots.dim()}-dimensional {slots.dtype} on {slots.device}"
        raise refused("slots", found, f"1-dimensional torch.int64 on {kv_cache.device} as kv_cache is")
    num_tokens = len(slots)
    if num_tokens > len(out):
        raise refused("out", f"has {len(out)} rows", f"at least {num_tokens} long, a row a slot")
    gathered = out[:num_tokens]
    if gathered.numel() == 0:
        return gathered
    num_blocks, num_heads, block_size, width = kv_cache.shape
    if slots.device.type == "cpu":
        least, most = (int(bound) for bound in slots.aminmax())
        if least < 0 or most >= num_blocks * block_size:
            slot = least if least < 0 else most
            found = f"contains {slot} (block {slot // block_size})"
            allowed = f"from 0 to {num_blocks * block_size - 1} (blocks 0 to {num_blocks - 1})"
            raise refused("slots", found, allowed)

    # index_select copies whole rows at memory speed, from any view of rows a constant stride apart. Rows may
    # overlap, so the greatest common divisor of the strides makes such a view of every layout.
    block_stride, head_stride, token_stride, _ = (
        stride if size > 1 else 0 for size, stride in zip(kv_cache.shape, kv_cache.stride(), strict=True)
    )
    heads_are_one_run = num_heads == 1 or head_stride == width
    row_width = num_heads * width if heads_are_one_run else width
    strides = (block_stride, token_stride) if heads_are_one_run else (block_stride, head_stride, token_stride)
    step = math.gcd(*strides) or 1
    last = (num_blocks - 1) * block_stride + (block_size - 1) * token_stride
    if not heads_are_one_run:
        last += (num_heads - 1) * head_stride
    rows = kv_cache.as_strided((last // step + 1, row_width), (step, 1))

    if block_stride == block_size * token_stride and token_stride == step:
        index = slots
    else:
        block = slots // block_size
        index = block * (block_stride // step) + (slots - block * block_size) * (token_stride // step)
    if not heads_are_one_run:
        head = torch.arange(num_heads, device=slots.device) * (head_stride // step)
        index = (index[:, None] + head).view(-1)
    rows_out = gathered.view(-1, row_width)
    if rows.element_size() == 1:  # index_select knows no fp8
        rows, rows_out = rows.view(torch.uint8), rows_out.view(torch.uint8)
    torch.index_select(rows, 0, index, out=rows_out)
    return gathered


def _check_cache_and_out(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
    if kv_cache.dim() != 4:
        form = "[num_blocks, num_kv_heads, block_size, 2 * head_size]"
        raise refused("kv_cache", f"has shape {list(kv_cache.shape)}", form)
    _, num_heads, _, width = kv_cache.shape
    if kv_cache.stride(3) != 1 and width > 1:
        raise refused("kv_cache", f"has strides {kv_cache.stride()}", "a view whose last stride is 1")
    if out.dim() != 3 or out.shape[1] != num_heads or out.shape[2] != width:
        raise refused("out", f"has shape {list(out.shape)}", f"[tokens, {num_heads}, {width}] to match kv_cache")
    if not out.is_contiguous():
        raise refused("out", f"has shape {list(out.shape)} and strides {out.stride()}", "contiguous")
    if out.dtype != kv_cache.dtype or out.device != kv_cache.device:
        allowed = f"{kv_cache.dtype} on {kv_cache.device} as kv_cache is"
        raise refused("out", f"is {out.dtype} on {out.device}", allowed)


def _check_indices(name: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != rank or tensor.dtype not in _INDEX_DTYPES:
        found = f"is {tensor.dim()}-dimensional {tensor.dtype}"
        raise refused(name, found, f"{rank}-dimensional torch.int32 or torch.int64")


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as unsigned bytes if it holds fp8, which torch can neither index nor compare; else itself."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
