"""Gather: copy the paged KV cache of a batch into one contiguous K|V buffer.

The cache is vLLM's logical view ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, K and V packed
last, in any physical order whose last stride is 1. A *slot* is ``block * block_size + offset``: the place of
one token, the same in every layer, so an engine computes slots once a step and gathers with them per layer.
"""

import math

import torch

from vllm_kda_plugin.kernels import loader

_INDEX_DTYPES = (torch.int32, torch.int64)
_KERNEL = "gather_paged_kv"
_THREADS = 64  # as csrc/gather_paged_kv.cu has them
_TILE_VECTORS = 4 * _THREADS


def gather_paged_kv(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Copy the cached K and V of a batch into ``out``, request after request.

    On an NVIDIA GPU the kernel ``csrc/gather_paged_kv.cu`` runs on the current stream, without synchronising;
    elsewhere torch does the work. On the GPU nothing outside the cache is read whatever the tables hold, and the
    rows whose block is not in the cache, or past the table's width, are left as they are.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, any dtype, any strides whose last is 1.
        block_table: ``[num_reqs, max_blocks]`` int32. Entries past a request's last token are never used.
        cu_seqlens_k: ``[num_reqs + 1]`` int32: 0, then the running sum of the tokens to gather of each request.
        seq_starts: ``[num_reqs]`` int32: position of the first token to gather of each request.
        out: ``[at least cu_seqlens_k[-1], num_kv_heads, 2 * head_size]`` contiguous, dtype of ``kv_cache``.
            Rows from ``cu_seqlens_k[-1]`` on are left as they are.

    Raises:
        ValueError: an argument of the wrong dtype, device, shape or strides; off the GPU also lengths, starts or
            blocks that do not fit the tables, the cache or ``out``.
        loader.KernelUnavailable: the kernel cannot be loaded on this GPU.
    """
    _check_cache_and_out(kv_cache, out)
    if block_table.dim() != 2:
        raise _refused("block_table", f"has shape {list(block_table.shape)}", "[num_reqs, max_blocks]")
    num_reqs, max_blocks = block_table.shape
    for name, table, shape in (
        ("block_table", block_table, (num_reqs, max_blocks)),
        ("cu_seqlens_k", cu_seqlens_k, (num_reqs + 1,)),
        ("seq_starts", seq_starts, (num_reqs,)),
    ):
        unit_stride = table.stride(-1) == 1 or table.shape[-1] <= 1
        if table.dtype != torch.int32 or table.shape != shape or table.device != kv_cache.device or not unit_stride:
            found = f"is {table.dtype} {list(table.shape)} with strides {table.stride()} on {table.device}"
            raise _refused(name, found, f"torch.int32 {list(shape)} with last stride 1 on {kv_cache.device}")
    if num_reqs == 0 or out.numel() == 0:
        return
    if kv_cache.is_cuda:
        _launch(kv_cache, block_table, cu_seqlens_k, seq_starts, out)
        return
    first, total = int(cu_seqlens_k[0]), int(cu_seqlens_k[-1])
    if first != 0:
        raise _refused("cu_seqlens_k", f"starts with {first}", "0 there")
    if total > len(out):
        raise _refused("out", f"has {len(out)} rows", f"at least cu_seqlens_k[-1] = {total} long")
    slots = paged_slots(block_table, seq_starts, cu_seqlens_k.diff(), kv_cache.shape[2])
    gather_rows(kv_cache, slots, out)


def _launch(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    device = kv_cache.get_device()
    kernel = loader.load(_KERNEL, device)
    size = kv_cache.element_size()
    num_blocks, num_heads, block_size, width = kv_cache.shape
    # The stride of a dimension of size 1 says nothing and must not spoil the alignment.
    block_stride, head_stride, token_stride = (
        stride * size if length > 1 else 0
        for stride, length in zip(kv_cache.stride()[:3], kv_cache.shape, strict=False)
    )
    head_bytes = width * size
    runs, run_bytes = num_heads, head_bytes
    if num_heads == 1 or head_stride == head_bytes:  # all heads of a token lie in one run
        runs, run_bytes, head_stride = 1, num_heads * head_bytes, 0
    source, destination = kv_cache.data_ptr(), out.data_ptr()
    # The widest vector that every address is a multiple of, up to 16 bytes.
    vector = math.gcd(16, source, destination, run_bytes, head_stride, block_stride, token_stride)
    tiles = -(-out.nbytes // (_TILE_VECTORS * vector))
    args = [
        source,
        destination,
        block_table.data_ptr(),
        cu_seqlens_k.data_ptr(),
        seq_starts.data_ptr(),
        len(block_table),
        block_table.shape[1],
        block_table.stride(0),
        num_blocks,
        block_size,
        block_stride,
        token_stride,
        head_stride,
        run_bytes,
        runs,
        len(out),
    ]
    kernel.launch(f"{_KERNEL}_{vector}", tiles, _THREADS, args)


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
            raise _refused(name, f"has {len(values)} entries", f"{num_reqs} long, one entry a request")
        if values.device != block_table.device:
            raise _refused(name, f"is on {values.device}", f"on {block_table.device} as block_table is")
    if block_size < 1:
        raise _refused("block_size", f"is {block_size}", "at least 1")
    starts, lens = seq_starts.long(), seq_lens.long()
    if num_reqs == 0:
        return lens
    for name, values in (("seq_starts", starts), ("seq_lens", lens)):
        least = int(values.min())
        if least < 0:
            raise _refused(name, f"contains {least}", "0 or more everywhere")
    longest = int((starts + lens).where(lens > 0, 0).max())
    if longest > max_blocks * block_size:
        found = f"is {max_blocks} blocks of {block_size} tokens wide"
        raise _refused("block_table", found, f"wide enough for the longest request, {longest} tokens")
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
        raise _refused("slots", found, f"1-dimensional torch.int64 on {kv_cache.device} as kv_cache is")
    num_tokens = len(slots)
    if num_tokens > len(out):
        raise _refused("out", f"has {len(out)} rows", f"at least {num_tokens} long, a row a slot")
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
            raise _refused("slots", found, allowed)

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
        raise _refused("kv_cache", f"has shape {list(kv_cache.shape)}", form)
    _, num_heads, _, width = kv_cache.shape
    if kv_cache.stride(3) != 1 and width > 1:
        raise _refused("kv_cache", f"has strides {kv_cache.stride()}", "a view whose last stride is 1")
    if out.dim() != 3 or out.shape[1] != num_heads or out.shape[2] != width:
        raise _refused("out", f"has shape {list(out.shape)}", f"[tokens, {num_heads}, {width}] to match kv_cache")
    if not out.is_contiguous():
        raise _refused("out", f"has shape {list(out.shape)} and strides {out.stride()}", "contiguous")
    if out.dtype != kv_cache.dtype or out.device != kv_cache.device:
        allowed = f"{kv_cache.dtype} on {kv_cache.device} as kv_cache is"
        raise _refused("out", f"is {out.dtype} on {out.device}", allowed)


def _check_indices(name: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != rank or tensor.dtype not in _INDEX_DTYPES:
        found = f"is {tensor.dim()}-dimensional {tensor.dtype}"
        raise _refused(name, found, f"{rank}-dimensional torch.int32 or torch.int64")


def _refused(name: str, found: str, allowed: str) -> ValueError:
    return ValueError(f"{name} {found}, must be {allowed}")
