"""Random paged KV caches and batches, and the plainest gather there is to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "padded", "odd padding", "off by one")
"""Physical orders of vLLM (L layer, B block, H head, N token in block, C K|V), and pages with gaps."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
POISON = 0xA5


@dataclasses.dataclass
class Batch:
    """Arguments of gather_paged_kv, on the CPU unless moved."""

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_starts: torch.Tensor
    out: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows that a gather writes."""
        return int(self.cu_seqlens_k[-1])


def random_bytes(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern, so also NaN with payloads, infinities, -0.0 and denormals."""
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def make_cache(
    layout: str,
    num_blocks: int,
    num_heads: int,
    block_size: int,
    width: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """The logical view ``[num_blocks, num_heads, block_size, width]`` of a random cache in a physical layout."""
    dense = (num_blocks, block_size, num_heads, width)
    page = block_size * num_heads * width
    if layout == "LBNHC":
        return random_bytes(dense, dtype, generator).transpose(1, 2)
    if layout == "LBHNC":
        return random_bytes((num_blocks, num_heads, block_size, width), dtype, generator)
    if layout == "LHBNC":
        return random_bytes((num_heads, num_blocks, block_size, width), dtype, generator).transpose(0, 1)
    if layout == "BLNHC":  # pages of all layers together, this is the second of three layers
        return random_bytes((num_blocks, 3, block_size, num_heads, width), dtype, generator)[:, 1].transpose(1, 2)
    if layout == "BLHNC":
        return random_bytes((num_blocks, 3, num_heads, block_size, width), dtype, generator)[:, 1]
    if layout == "padded":
        padded = random_bytes((num_blocks, page + 2 * num_heads * width), dtype, generator)
        return padded[:, :page].view(dense).transpose(1, 2)
    if layout == "odd padding":
        return random_bytes((num_blocks, page + 3), dtype, generator)[:, :page].view(dense).transpose(1, 2)
    if layout == "off by one":
        flat = random_bytes((num_blocks * page + 1,), dtype, generator)
        return flat[1:].view(dense).transpose(1, 2)
    raise ValueError(layout)


def make_batch(
    kv_cache: torch.Tensor, starts: Sequence[int], lens: Sequence[int], generator: torch.Generator, spare_rows: int = 5
) -> Batch:
    """A batch on random blocks; table entries that no token needs are -1 or name blocks that do not exist."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    needed = [-(-(start + length) // block_size) if length else 0 for start, length in zip(starts, lens, strict=True)]
    table = torch.full((len(lens), max(needed, default=0) + 2), -1, dtype=torch.int32)
    table[:, -1] = 2**31 - 1
    for row, (start, count) in enumerate(zip(starts, needed, strict=True)):
        first = min(start // block_size, count)
        blocks = torch.randint(0, num_blocks, (count - first,), generator=generator)
        table[row, first:count] = blocks.int()
    ends = torch.tensor([0, *lens]).cumsum(0)
    out = poisoned((int(ends[-1]) + spare_rows, num_heads, width), kv_cache.dtype)
    return Batch(kv_cache, table, ends.int(), torch.tensor(starts, dtype=torch.int32), out)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor filled with a byte that tells rows never written."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)


def expected(batch: Batch) -> torch.Tensor:
    """What ``batch.out`` must hold afterwards, token by token."""
    result = poisoned(batch.out.shape, batch.out.dtype)
    block_size = batch.kv_cache.shape[2]
    bounds = batch.cu_seqlens_k.tolist()
    for request, start in enumerate(batch.seq_starts.tolist()):
        for row in range(bounds[request], bounds[request + 1]):
            position = start + row - bounds[request]
            block = int(batch.block_table[request, position // block_size])
            result[row] = batch.kv_cache[block, :, position % block_size]
    return result


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bits."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
