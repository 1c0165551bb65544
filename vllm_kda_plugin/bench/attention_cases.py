"""What ``vllm-kda bench attention`` measures: steps of one attention layer, and random tensors for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

CONTEXTS = (0, 4_000, 30_000, 120_000)
QUERIES = (1, 16, 256, 512, 2048, 8192)
PAGES = (16, 64, 128, 528)
LAYERS = 8
SHORT_LAYERS, SHORT_US = 32, 600.0
LONG_LAYERS, LONG_US = 4, 5000.0
"""A step has as many layers where one takes less than so many microseconds; caches are used in turn."""
_SEED = 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} D{self.head_size}"


SHAPES = (
    Shape(32, 8, 128),
    Shape(8, 1, 128),
    Shape(16, 16, 128),
    Shape(64, 8, 128),
    Shape(32, 8, 64),
    Shape(16, 4, 256),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: its requests, decodes first, as vLLM's model runner V2 orders them."""

    shape: Shape
    page: int
    """Tokens in a block of the KV cache."""
    requests: tuple[tuple[int, int], ...]
    """Query tokens of the step and tokens cached before it, of each request."""
    batch: str = "one request"

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(query for query, _ in self.requests)

    @property
    def blocks(self) -> int:
        """Blocks that the requests fill."""
        return sum(-(-(query + context) // self.page) for query, context in self.requests)

    @property
    def decodes_only(self) -> bool:
        """Whether an engine replays the step as a full CUDA graph."""
        return all(query == 1 for query, _ in self.requests)


def _spread(query: int, count: int, shortest: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Requests of one query length, their contexts evenly spread."""
    return tuple((query, shortest + (longest - shortest) * i // max(count - 1, 1)) for i in range(count))


BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "4 prefills of mixed context": ((2048, 0), (1024, 4_000), (3072, 30_000), (2048, 60_000)),
    "32 decodes, 4 prefills": (
        *_spread(1, 32, 200, 3_000),
        (2048, 0),
        (1024, 4_000),
        (1024, 16_000),
        (4064, 30_000),
    ),
    "255 decodes, 1 prefill": (*_spread(1, 255, 50, 400), (7937, 30_000)),
    "16 first prefills": ((512, 0),) * 16,
    "64 short prefills": _spread(100, 64, 0, 1_500),
    "64 decodes": _spread(1, 64, 100, 3_000),
}
BATCH_PLACES = ((SHAPES[0], 16), (SHAPES[0], 528), (SHAPES[1], 16), (SHAPES[2], 64))
"""Shapes and pages that batches of several requests are measured with."""


def cases() -> Iterator[Case]:
    """The grid: batches of one for every shape, page, context and query, and a few of several requests."""
    for shape in SHAPES:
        for page in PAGES:
            for context in CONTEXTS:
                for query in QUERIES:
                    yield Case(shape, page, ((query, context),))
            if (shape, page) in BATCH_PLACES:
                for name, requests in BATCHES.items():
                    yield Case(shape, page, requests, name)


def peer_cases() -> Iterator[Case]:
    """What vLLM's other backends are measured with."""
    for case in cases():
        if case.page == 16 and len(case.requests) == 1 and case.requests[0][1] >= 30_000:
            yield case


@dataclasses.dataclass
class Batch:
    """The tensors of one step; those with a list have one for each layer, so that none finds another's in the L2 cache.

    ``query``, ``key`` and ``value`` are slices of one tensor, as a fused projection writes them; ``caches`` are what
    vLLM hands a layer by default: ``[blocks, num_kv_heads, page, 2 * head_size]``, a page's heads side by side.
    """

    case: Case
    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    caches: list[torch.Tensor]
    out: torch.Tensor
    common: CommonAttentionMetadata


class Tensors:
    """Random tensors of one shape and page, allocated once for several cases.

    Args:
        cases: of one shape and page; decides how much is allocated.
        layers: how many layers' worth.
        device: where.
        fp8: whether the KV cache holds e4m3, as bytes, in place of bfloat16.
    """

    def __init__(self, cases: Sequence[Case], layers: int, device: torch.device, fp8: bool = False) -> None:
        self.shape, self.page, self.device = cases[0].shape, cases[0].page, device
        heads, kv_heads, size = dataclasses.astuple(self.shape)
        tokens = max(case.tokens for case in cases)
        self.num_blocks = max(case.blocks for case in cases) + 1  # vLLM's block 0 is nobody's
        self.generator = torch.Generator(device).manual_seed(_SEED)
        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.qkv = torch.empty(layers, tokens, heads + 2 * kv_heads, size, **half).normal_(generator=self.generator)
        cache = self.num_blocks, self.page, kv_heads, 2 * size
        self.caches = [
            _stored(torch.empty(cache, **half).normal_(generator=self.generator), fp8) for _ in range(layers)
        ]
        self.fp8 = fp8
        self.out = torch.empty(tokens, heads, size, **half)

    def batch(self, case: Case) -> Batch:
        """The tensors of one case, in random blocks; the cache holds the step's own K and V. Ends the one before."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        queries = torch.tensor([query for query, _ in case.requests], dtype=torch.int32)
        seq_lens = torch.tensor([sum(request) for request in case.requests], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0).int()])
        table, slots = self._places(case)
        heads, kv_heads, size = dataclasses.astuple(self.shape)
        split = [layer[: case.tokens].split([heads, kv_heads, kv_heads], dim=1) for layer in self.qkv]
        for cache, (_, key, value) in zip(self.caches, split, strict=True):
            cache.view(-1, kv_heads, 2 * size)[slots] = _stored(torch.cat([key, value], dim=-1), self.fp8)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self.device),
            num_reqs=len(case.requests),
            num_actual_tokens=case.tokens,
            max_query_len=int(queries.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        query, key, value = (list(tensors) for tensors in zip(*split, strict=True))
        caches = [cache.transpose(1, 2) for cache in self.caches]
        return Batch(case, query, key, value, caches, self.out[: case.tokens], common)

    def _places(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """The block table, on the CPU, and the slots of the step's own tokens, on the device."""
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(_SEED)) + 1
        pages = [-(-(query + context) // self.page) for query, context in case.requests]
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        slots = []
        for row, (mine, (query, context)) in enumerate(
            zip(order[: sum(pages)].split(pages), case.requests, strict=True)
        ):
            table[row, : len(mine)] = mine.int()
            position = torch.arange(context, context + query)
            slots.append(mine[position // self.page] * self.page + position % self.page)
        return table, torch.cat(slots).to(self.device)


def _stored(rows: torch.Tensor, fp8: bool) -> torch.Tensor:
    return rows.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else rows
