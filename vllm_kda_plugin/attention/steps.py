"""A step cut into calls: which requests, which rows, which keys; host numbers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np

from vllm_kda_plugin.attention.planner import Planner, Request, Way


def _nowhere() -> slice:
    return slice(0, 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call of a step."""

    way: Way
    requests: slice
    """Its rows of the block table."""
    tokens: slice
    """Its rows of query, output and fresh K and V."""
    max_query: int
    max_keys: int
    num_keys: int = 0
    """Rows of contiguous K and V, of all its requests."""
    cu_queries: slice = dataclasses.field(default_factory=_nowhere)
    """Where in :attr:`Step.numbers` the running sum of query tokens is, ``[requests + 1]``."""
    cu_keys: slice = dataclasses.field(default_factory=_nowhere)
    """The same of keys."""
    first_keys: slice = dataclasses.field(default_factory=_nowhere)
    """Where the positions of the first keys to gather are, ``[requests]``."""
    part: int | None = None
    """None for a whole result. Parts of one request's keys are merged: 0 is the last keys, causal and with the sink,
    and writes the output; those after it are context, which every query sees."""
    kv_heads: slice | None = None
    """The KV heads that are gathered and attended to, None for all."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The calls of one step for one kind of layer, and the numbers that they read on the GPU."""

    calls: tuple[Call, ...]
    numbers: tuple[int, ...]


class _Numbers(list[int]):
    def add(self, numbers: Sequence[int]) -> slice:
        """Append; returns where they are."""
        self.extend(numbers)
        return slice(len(self) - len(numbers), len(self))


def plan_step(
    planner: Planner,
    query_starts: np.ndarray,
    seq_lens: np.ndarray,
    decode_tokens: int,
    max_query: int,
    prefilling: np.ndarray | None = None,
) -> Step | None:
    """Cut a step into calls: of neighbouring requests that are paged, and of each other one.

    Args:
        planner: for the kind of layer.
        query_starts: ``[requests + 1]`` running sum of query tokens; exact for prefills.
        seq_lens: ``[requests]`` cached and query tokens; likewise.
        decode_tokens: most query tokens of a request that may be a decode or a speculative verification.
        max_query: no request has more query tokens.
        prefilling: ``[requests]``, which requests of more than ``decode_tokens`` are prefills; None for all.

    Returns:
        None where the stock call for the whole step is best.
    """
    if planner.idle or (max_query <= decode_tokens and not planner.layer.must_gather):
        return None
    queries = np.diff(query_starts)
    long: np.ndarray = queries > (0 if planner.layer.must_gather else decode_tokens)
    if prefilling is not None:
        long &= prefilling
    if not long.any():
        return None
    contexts = np.maximum(seq_lens - queries, 0)
    if len(queries) == 1:
        if not planner.may_gain(int(queries[0]), int(contexts[0])):
            return None
    elif not planner.step_may_gain(queries[long], contexts[long]):
        return None
    units = list(_units(queries, contexts, long))
    ways = planner.choose([request for request, _ in units])
    if all(way == "paged" for way in ways):
        return None
    calls: list[Call] = []
    numbers = _Numbers()
    for way, members in _runs(ways, units, planner.shares_calls):
        requests = slice(members[0][1].start, members[-1][1].stop)
        if way == "paged":
            calls.append(_paged(requests, query_starts, seq_lens, decode_tokens))
        elif way == "fresh":
            calls.append(_fresh(requests, query_starts, numbers))
        else:
            for rows in _packed(planner, requests, queries, seq_lens):
                calls.extend(_gathers(planner, rows, query_starts, seq_lens, numbers))
    return Step(tuple(calls), tuple(numbers))


def _runs(
    ways: Sequence[Way], units: Sequence[tuple[Request, slice]], shares: bool
) -> Iterator[tuple[Way, list[tuple[Request, slice]]]]:
    """Neighbours that go the same way, or each alone where it may not share a call."""
    for way, run in groupby(zip(ways, units, strict=True), key=lambda chosen: chosen[0]):
        members = [unit for _, unit in run]
        if way == "paged" or shares:
            yield way, members
        else:
            yield from ((way, [member]) for member in members)


def _units(queries: np.ndarray, contexts: np.ndarray, long: np.ndarray) -> Iterator[tuple[Request, slice]]:
    """Requests to decide about, one by one; those that are always paged, together. Leaves out what has no tokens."""
    at = 0
    for row in [*np.flatnonzero(long).tolist(), len(queries)]:
        used = np.flatnonzero(queries[at:row])
        if len(used):
            yield None, slice(at, at + int(used[-1]) + 1)
        if row < len(queries):
            yield (int(queries[row]), int(contexts[row])), slice(row, row + 1)
        at = row + 1


def _paged(requests: slice, query_starts: np.ndarray, seq_lens: np.ndarray, decode_tokens: int) -> Call:
    longest = int(np.diff(query_starts[requests.start : requests.stop + 1]).max())
    # Adaptive verification moves tokens between verifications on the GPU: one may be longer than the host knows.
    longest = max(longest, decode_tokens) if longest > 1 else longest
    return Call("paged", requests, _tokens(requests, query_starts), longest, int(seq_lens[requests].max()))


def _fresh(requests: slice, query_starts: np.ndarray, numbers: _Numbers) -> Call:
    cu = query_starts[requests.start : requests.stop + 1] - query_starts[requests.start]
    at = numbers.add(cu.tolist())
    longest = int(np.diff(cu).max())
    return Call("fresh", requests, _tokens(requests, query_starts), longest, longest, int(cu[-1]), at, at)


def _packed(planner: Planner, requests: slice, queries: np.ndarray, seq_lens: np.ndarray) -> Iterator[slice]:
    """Neighbours whose keys fit the workspace together; one alone that does not fit."""
    start, tokens = requests.start, 0
    for row in range(requests.start, requests.stop):
        query = int(queries[row])
        keys = planner.layer.keys(query, int(seq_lens[row]) - query) if query else 0
        if keys and row > start and tokens + keys > planner.capacity:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += keys
    yield slice(start, requests.stop)


def _gathers(
    planner: Planner, requests: slice, query_starts: np.ndarray, seq_lens: np.ndarray, numbers: _Numbers
) -> Iterator[Call]:
    tokens = _tokens(requests, query_starts)
    cu = query_starts[requests.start : requests.stop + 1] - query_starts[requests.start]
    queries = np.diff(cu).tolist()
    ends = seq_lens[requests].tolist()
    layer = planner.layer
    lens = [layer.keys(query, end - query) if query else 0 for query, end in zip(queries, ends, strict=True)]
    cu_queries = numbers.add(cu.tolist())
    longest = max(queries)

    def call(starts: list[int], lens: list[int], part: int | None) -> Call:
        cu_keys = numbers.add([0, *accumulate(lens)])
        firsts = numbers.add(starts)
        return Call("gather", requests, tokens, longest, max(lens), sum(lens), cu_queries, cu_keys, firsts, part)

    starts = [end - length for end, length in zip(ends, lens, strict=True)]
    if sum(lens) <= planner.capacity:
        yield call(starts, lens, None)
        return
    # One request, in parts. (Zero-token neighbours take no part: they have no rows.)
    row = next(i for i, query in enumerate(queries) if query)
    query, end = queries[row], ends[row]
    parts = planner.parts(query, end - query)
    if parts.of == "heads":
        whole = call(starts, lens, None)
        for heads in _even(layer.num_kv_heads, parts.calls):
            yield dataclasses.replace(whole, kv_heads=heads)
        return
    requests = slice(requests.start + row, requests.start + row + 1)
    cu_queries = numbers.add([0, query])
    room = planner.chunk_tokens(query)
    if layer.can_fresh:
        context = end - query
        yield Call("fresh", requests, tokens, query, query, query, cu_queries, cu_queries, part=0)
    else:
        context = max(0, end - room)
        # Earlier parts begin with pages; this one takes what is left over, if it is the smaller.
        yield call([context], [end - context], 0)
    for part, start in enumerate(range(0, context, room), start=1):
        yield call([start], [min(room, context - start)], part)


def _even(total: int, parts: int) -> Iterator[slice]:
    """As even slices as there are."""
    size = -(-total // parts)
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _tokens(requests: slice, query_starts: np.ndarray) -> slice:
    return slice(int(query_starts[requests.start]), int(query_starts[requests.stop]))
