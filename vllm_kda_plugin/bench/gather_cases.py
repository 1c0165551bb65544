"""What ``vllm-kda bench gather`` measures: the cases, and random tensors for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch

from vllm_kda_plugin.bench.timing import Call
from vllm_kda_plugin.kernels.gather import gather_cached_kv, gather_paged_kv

SMALL_SIZES = (64, 128, 256, 512, 1024, 2048)
LARGE_SIZES = (8192, 65536)
PAGES = (8, 16, 64, 528)
PagedLayout = Literal["NHD", "HND", "packed"]
_NO_NAN = ~0x40404040  # clears the top bit of the exponent of four fp8 numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """One gather, from random places of a random cache. Sizes in bytes leave the tables out."""

    kind: str
    """Cases of one kind and block size are one line of the plot."""
    layout: Literal["classic"] | PagedLayout
    order: Literal["slots", "pages", "table"]
    """Random slots, or the slots of random pages, for gather_cached_kv; or a block table for gather_paged_kv."""
    tokens_each: int
    block_size: int
    requests: int = 1
    num_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    least_blocks: int = 1

    @property
    def entry(self) -> str:
        return "gather_paged_kv" if self.order == "table" else "gather_cached_kv"

    @property
    def tokens(self) -> int:
        return self.requests * self.tokens_each

    @property
    def pages_each(self) -> int:
        return -(-self.tokens_each // self.block_size)

    @property
    def num_blocks(self) -> int:
        return max(self.least_blocks, self.requests * self.pages_each)

    @property
    def token_elements(self) -> int:
        return 2 * self.num_heads * self.head_size

    @property
    def bytes_written(self) -> int:
        return self.tokens * self.token_elements * self.dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        return self.tokens * self.token_elements * self.cache_dtype.itemsize + self.bytes_written

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.token_elements * self.cache_dtype.itemsize


def cases(on_cpu: bool, num_tokens: Sequence[int] | None) -> Iterator[Case]:
    """Everything that is measured.

    Args:
        on_cpu: leave out what would take long there.
        num_tokens: sizes in place of the usual ones; the million tokens and the thousands of requests are left out.
    """
    sizes = SMALL_SIZES if on_cpu else SMALL_SIZES + LARGE_SIZES
    half = torch.float16  # all as vLLM's first benchmark of this name had it, in 2023
    old = functools.partial(Case, block_size=8, num_heads=40, dtype=half, cache_dtype=half, least_blocks=1024)
    for tokens in num_tokens or sizes:
        yield old("NHD, random slots", "NHD", "slots", tokens)
        yield old("classic, random slots", "classic", "slots", tokens)
        yield old("classic, whole pages", "classic", "pages", tokens)
    if not num_tokens:
        for tokens in sizes[:-1]:
            yield Case("packed", "packed", "table", tokens, 16)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for tokens in num_tokens or sizes[-1:]:
        for layout in get_args(PagedLayout):
            for page in PAGES:
                yield Case(layout, layout, "table", tokens, page)
        yield Case("NHD, e4m3 to bf16", "NHD", "table", tokens, 16, cache_dtype=e4m3)
        yield Case("NHD, e5m2 to bf16", "NHD", "table", tokens, 16, cache_dtype=e5m2)
        yield Case("NHD, e4m3 copied", "NHD", "table", tokens, 16, dtype=e4m3, cache_dtype=e4m3)
    if not num_tokens and not on_cpu:
        yield Case("packed", "packed", "table", 1 << 20, 16)
        yield Case("packed, 4,096 requests", "packed", "table", 17, 16, requests=4096)


@dataclasses.dataclass
class Buffers:
    """The tensors of one call."""

    case: Case
    caches: list[torch.Tensor]
    """K and V, or one that packs both."""
    outs: list[torch.Tensor]
    slots: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    """block_table, cu_seqlens_k and seq_starts; none for gather_cached_kv."""
    scales: list[torch.Tensor] | list[None]

    def gather(self, impl: Literal["auto", "torch", "reference"], outs: Sequence[torch.Tensor]) -> Call:
        """The gather into ``outs``."""
        key, value = (*outs, None)[:2]
        key_cache, value_cache = (*self.caches, None)[:2]
        if self.tables:
            gather = functools.partial(gather_paged_kv, key, value, key_cache, value_cache, *self.tables)
            return functools.partial(gather, k_scale=self.scales[0], v_scale=self.scales[1], impl=impl)
        return functools.partial(gather_cached_kv, key, value, key_cache, value_cache, self.slots, impl=impl)

    def index_select(self, outs: Sequence[torch.Tensor]) -> Call:
        """The same by torch.index_select, once for K and once for V; not for the classic layout or to another dtype."""
        case, index, rows = self.case, self.slots, [cache.flatten(2) for cache in self.caches]
        if case.layout == "HND":  # there a row is a head's
            pages, offsets = index[:, None] // case.block_size, index[:, None] % case.block_size
            heads = torch.arange(case.num_heads, device=index.device)
            index = ((pages * case.num_heads + heads) * case.block_size + offsets).flatten()
            rows = [cache.transpose(1, 2) for cache in self.caches]
        dtype = torch.uint8 if case.dtype.itemsize == 1 else case.dtype  # index_select knows no fp8
        rows = [source.view(dtype).view(-1, source.shape[-1]) for source in rows]
        pairs = [(source, out.view(dtype).view(-1, source.shape[1])) for source, out in zip(rows, outs, strict=True)]

        def select() -> None:
            for source, out in pairs:
                torch.index_select(source, 0, index, out=out)

        return select


def make_buffers(case: Case, count: int, num_caches: int, device: torch.device) -> Iterator[Buffers]:
    """Buffers of ``count`` calls, each with outputs and places of its own, on ``num_caches`` caches in turn."""
    caches = _random_caches(case, num_caches * case.num_blocks, device)
    scales: list[torch.Tensor] | list[None] = [None, None]
    if case.dtype != case.cache_dtype:
        scales = [torch.rand(case.num_heads, device=device) + 0.5 for _ in range(2)]
    shape, width = (case.tokens, case.num_heads), case.head_size * (3 - len(caches))
    page = torch.arange(case.block_size, device=device, dtype=torch.int32)
    for turn in range(count):
        first = turn % num_caches * case.num_blocks
        cut = [cache[first : first + case.num_blocks] for cache in caches]
        blocks = torch.randperm(case.num_blocks, device=device)[: case.requests * case.pages_each].int()
        table = blocks.view(case.requests, case.pages_each)
        slots = (table[:, :, None] * case.block_size + page).flatten(1)[:, : case.tokens_each].flatten()
        if case.order == "table":
            bounds = torch.arange(case.requests + 1, device=device, dtype=torch.int32) * case.tokens_each
            tables = table, bounds, torch.zeros_like(bounds[1:])
            outs = [torch.empty(*shape, width, dtype=case.dtype, device=device) for _ in caches]
            yield Buffers(case, cut, outs, slots, tables, scales)
            continue
        if case.order == "slots":
            slots = torch.randperm(case.num_blocks * case.block_size, device=device)[: case.tokens].int()
        qkv = torch.empty(case.tokens, 3, case.num_heads, case.head_size, dtype=case.dtype, device=device)
        yield Buffers(case, cut, [qkv[:, 1], qkv[:, 2]], slots, (), scales)


def _random_caches(case: Case, blocks: int, device: torch.device) -> list[torch.Tensor]:
    heads, size, page, x = case.num_heads, case.head_size, case.block_size, 16 // case.cache_dtype.itemsize
    if case.layout == "classic":
        shapes = [(blocks, heads, size // x, page, x), (blocks, heads, size, page)]
    elif case.layout == "HND":
        shapes = [(blocks, heads, page, size)] * 2
    elif case.layout == "NHD":
        shapes = [(blocks, page, heads, size)] * 2
    else:
        shapes = [(blocks, page, heads, 2 * size)]
    caches = [_random_bits(shape, case.cache_dtype, device) for shape in shapes]
    return [cache.transpose(1, 2) for cache in caches] if case.layout == "HND" else caches


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    words = torch.empty(math.prod(shape) * dtype.itemsize // 4, dtype=torch.int32, device=device)
    words.random_(-(2**31), 2**31)
    if dtype.itemsize == 1:
        words &= _NO_NAN  # where NaN is dequantised, its bits may be any NaN's
    return words.view(dtype).view(shape)
