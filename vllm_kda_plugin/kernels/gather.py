"""Gather: copy the paged KV cache of a batch into one contiguous K|V buffer.

The cache is vLLM's logical view ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, K and V packed
last, in any physical order whose last stride is 1. A *slot* is ``block * block_size + offset``: the place of
one token, the same in every layer, so an engine computes slots once a step and gathers with them per layer.
"""

import math

import torch

_INDEX_DTYPES = (torch.int32, torch.int64)


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
    _check(len(seq_starts) == num_reqs, "seq_starts", f"has {len(seq_starts)} entries", f"{num_reqs}, one a request")
    _check(len(seq_lens) == num_reqs, "seq_lens", f"has {len(seq_lens)} entries", f"{num_reqs}, one a request")
    _check(block_size > 0, "block_size", f"is {block_size}", "at least 1")
    lens, starts = seq_lens.long(), seq_starts.long()
    if num_reqs == 0:
        return lens
    for name, values in (("seq_lens", lens), ("seq_starts", starts)):
        least = int(values.min())
        _check(least >= 0, name, f"contains {least}", "0 or more everywhere")
    longest = int((starts + lens).where(lens > 0, 0).max())
    _check(
        longest <= max_blocks * block_size,
        "block_table",
        f"is {max_blocks} blocks of {block_size} tokens wide",
        f"wide enough for the longest request, {longest} tokens",
    )
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
    _check(slots.dtype == torch.int64 and slots.dim() == 1, "slots", _found(slots), "1-dimensional torch.int64")
    _check(slots.device == kv_cache.device, "slots", f"is on {slots.device}", f"on {kv_cache.device} as kv_cache is")
    num_tokens = len(slots)
    _check(num_tokens <= len(out), "out", f"has {len(out)} rows", f"at least {num_tokens}, one a slot")
    rows_out = out[:num_tokens]
    if num_tokens == 0:
        return rows_out
    num_blocks, num_heads, block_size, width = kv_cache.shape
    if slots.device.type == "cpu":
        least, most = (int(bound) for bound in slots.aminmax())
        _check(
            least >= 0 and most < num_blocks * block_size,
            "slots",
            f"contains {least if least < 0 else most}",
            f"from 0 to {num_blocks * block_size - 1} (num_blocks * block_size - 1)",
        )
    if kv_cache.element_size() == 1:  # index_select knows no fp8
        kv_cache, out = kv_cache.view(torch.uint8), out.view(torch.uint8)
        rows_out = out[:num_tokens]

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
    torch.index_select(rows, 0, index, out=rows_out.view(-1, row_width))
    return out[:num_tokens]


def _check_cache_and_out(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
    form = "[num_blocks, num_kv_heads, block_size, 2 * head_size]"
    _check(kv_cache.dim() == 4, "kv_cache", f"has shape {tuple(kv_cache.shape)}", form)
    _check(
        kv_cache.stride(3) == 1 or kv_cache.shape[3] == 1,
        "kv_cache",
        f"has strides {kv_cache.stride()}",
        "any whose last is 1",
    )
    _, num_heads, _, width = kv_cache.shape
    _check(
        out.dim() == 3 and out.shape[1:] == (num_heads, width),
        "out",
        f"has shape {tuple(out.shape)}",
        f"[tokens, {num_heads}, {width}] to match kv_cache",
    )
    _check(out.is_contiguous(), "out", f"has shape {tuple(out.shape)} and strides {out.stride()}", "contiguous")
    _check(out.dtype == kv_cache.dtype, "out", f"is {out.dtype}", f"{kv_cache.dtype} as kv_cache is")
    _check(out.device == kv_cache.device, "out", f"is on {out.device}", f"on {kv_cache.device} as kv_cache is")


def _check_indices(name: str, tensor: torch.Tensor, rank: int) -> None:
    good = tensor.dim() == rank and tensor.dtype in _INDEX_DTYPES
    _check(good, name, _found(tensor), f"{rank}-dimensional torch.int32 or torch.int64")


def _found(tensor: torch.Tensor) -> str:
    return f"is {tensor.dim()}-dimensional {tensor.dtype}"


def _check(good: bool, name: str, found: str, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} {found}, must be {allowed}")
