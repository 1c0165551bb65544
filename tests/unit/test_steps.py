"""Random batches cut into calls and run, against plain attention over each request's whole sequence."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.flash import attention, flash_attn_varlen_func, merge_attn_states
from vllm_kda_plugin.attention import planner as planning
from vllm_kda_plugin.attention.calls import Contiguous
from vllm_kda_plugin.attention.planner import H200, Calibration, Layer, Planner, Rate
from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.attention.steps import Step, plan_step
from vllm_kda_plugin.kernels.gather import gather_paged_kv

NAN_BYTE = 0xFF
DECODE_TOKENS = 3  # two drafts


class Workspace:
    """What the engine's workspace manager does, of a fixed size and full of NaN."""

    def __init__(self, num_bytes: int) -> None:
        self.limit = num_bytes
        self.memory = torch.full((2 * num_bytes,), NAN_BYTE, dtype=torch.uint8)

    def __call__(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        made, at, counted = [], 0, 0
        for shape, dtype in shapes:
            size = int(np.prod(shape)) * dtype.itemsize
            made.append(self.memory[at : at + size].view(dtype).view(shape))
            at += -(-size // 256) * 256
            # Partial results are 16-bit, but in these tests.
            size //= 2 if len(shape) == 3 and dtype == torch.float32 else 1
            counted += -(-size // 256) * 256
        assert counted <= -(-self.limit // 256) * 256, f"asks for {counted} bytes of {self.limit}"
        return made


@dataclasses.dataclass
class Batch:
    """Requests with their sequences in a paged cache."""

    queries: list[int]
    contexts: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: list[torch.Tensor]
    """Of each request its K and V, ``[tokens, kv_heads, 2 * head_size]``, as the cache holds them."""
    cache: torch.Tensor
    block_table: torch.Tensor
    scales: tuple[torch.Tensor, ...]

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, *itertools.accumulate(self.queries)], dtype=np.int32)


def make_batch(layer: Layer, queries: list[int], contexts: list[int], generator: torch.Generator) -> Batch:
    """The cache holds NaN wherever no token of a request is."""
    heads, size, page = layer.num_kv_heads, layer.head_size, layer.page_size
    pages = [-(-(query + context) // page) for query, context in zip(queries, contexts, strict=True)]
    free = (torch.randperm(sum(pages) + 3, generator=generator) + 1).tolist()  # block 0 is nobody's
    fp8 = torch.float8_e5m2 if layer.must_gather else torch.float8_e4m3fn
    cache = torch.full((sum(pages) + 4, page, heads, 2 * size), torch.nan)
    table = torch.full((len(queries), max(pages, default=0) + 1), -1, dtype=torch.int32)
    scales = torch.rand(2, heads, generator=generator) + 0.5 if layer.fp8 else None
    sequences, fresh = [], []
    for row, (query, context) in enumerate(zip(queries, contexts, strict=True)):
        exact = torch.randn(query + context, heads, 2 * size, generator=generator).bfloat16().float()
        stored = exact
        if scales is not None:
            stored = (
                (exact / scales.repeat_interleave(size, 1).view(2, heads, size).permute(1, 0, 2).flatten(1))
                .to(fp8)
                .float()
            )
        first = 0 if layer.window is None else max(0, context - layer.window)
        mine = [free.pop() for _ in range(pages[row])]
        for position in range(first, query + context):
            cache[mine[position // page], position % page] = stored[position]
        table[row, : pages[row]] = torch.tensor(mine, dtype=torch.int32)
        table[row, : first // page] = 0  # what the window has passed is given back
        if scales is not None:
            by = torch.cat([scales[0][:, None].expand(-1, size), scales[1][:, None].expand(-1, size)], dim=1)
            stored = (stored * by).bfloat16().float()
        # Fresh keys are the exact ones, which an fp8 cache does not hold.
        sequences.append(torch.cat([stored[:context], exact[context:]]) if layer.fp8 else stored)
        fresh.append(exact[context:])
    packed = torch.cat(fresh)
    return Batch(
        queries,
        contexts,
        torch.randn(sum(queries), layer.num_heads, size, generator=generator).bfloat16(),
        packed[..., :size].bfloat16(),
        packed[..., size:].bfloat16(),
        sequences,
        cache.to(fp8) if layer.fp8 else cache.bfloat16(),
        table,
        () if scales is None else (scales[0].contiguous(), scales[1].contiguous()),
    )


def run(step: Step, layer: Layer, batch: Batch, workspace: Workspace, options: dict[str, Any]) -> torch.Tensor:
    """The step's contiguous calls; rows that none of them writes are NaN."""
    out = torch.full(batch.query.shape, torch.nan)  # float32: rounding is not the subject
    contiguous = Contiguous(
        flash=flash_attn_varlen_func,
        gather=gather_paged_kv,
        merge=merge_attn_states,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        options={
            "softmax_scale": layer.head_size**-0.5,
            "softcap": options["soft_cap"],
            "fa_version": 2 if options["alibi_slopes"] is not None else 3,
            "num_splits": 0,
        },
        window=[-1, -1] if layer.window is None else [layer.window, 0],
        sinks=options["sinks"],
        alibi_slopes=options["alibi_slopes"],
    )
    contiguous.run(
        contiguous.prepare(
            [call for call in step.calls if call.way != "paged"],
            torch.tensor(step.numbers, dtype=torch.int32),
            batch.block_table,
            layer.head_size,
            torch.bfloat16,
            out.dtype,
            workspace,
        ),
        batch.query,
        batch.key if layer.can_fresh else None,
        batch.value if layer.can_fresh else None,
        batch.cache,
        out,
        *batch.scales,
    )
    return out


def expected(layer: Layer, batch: Batch, options: dict[str, Any]) -> list[torch.Tensor]:
    wanted = []
    for i, (start, query) in enumerate(zip(batch.starts, batch.queries, strict=False)):
        sequence = batch.sequences[i]
        result, _ = attention(
            batch.query[start : start + query],
            sequence[..., : layer.head_size],
            sequence[..., layer.head_size :],
            scale=layer.head_size**-0.5,
            window=(-1, -1) if layer.window is None else (layer.window, 0),
            **options,
        )
        wanted.append(result)
    return wanted


def check(planner: Planner, batch: Batch, seed: int = 0, *, sinks: bool = False, soft_cap: float = 0.0) -> Step | None:
    """Plan, run, compare; decodes are paged, and the host thinks that they are longer than they are."""
    layer = planner.layer
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {
        "soft_cap": soft_cap,
        "alibi_slopes": None if layer.can_chunk else torch.rand(layer.num_heads, generator=generator),
        "sinks": torch.randn(layer.num_heads, generator=generator) if sinks else None,
    }
    true = np.array(batch.queries) + np.array(batch.contexts)
    decodes = np.array(batch.queries) <= DECODE_TOKENS
    known = true + (2 * decodes if not layer.must_gather else 0)
    step = plan_step(planner, batch.starts, known.astype(np.int32), DECODE_TOKENS, max(batch.queries))
    if step is None:
        return None
    covered: list[int] = []
    for call in step.calls:
        if call.part in (None, 0) and (call.kv_heads is None or call.kv_heads.start == 0):
            covered += range(call.requests.start, call.requests.stop)
        assert call.max_query > 0
        assert call.tokens == slice(batch.starts[call.requests.start], batch.starts[call.requests.stop])
        if call.way == "paged":
            assert call.max_query >= max(batch.queries[call.requests])
            assert call.max_keys >= true[call.requests].max()
        else:
            assert layer.must_gather or not decodes[call.requests][np.array(batch.queries[call.requests]) > 0].any()
    assert covered == sorted(set(covered))
    assert {i for i, query in enumerate(batch.queries) if query} <= set(covered)

    workspace = Workspace(planner.workspace_bytes)
    out = run(step, layer, batch, workspace, options)
    for call in step.calls:
        for i in range(call.requests.start, call.requests.stop):
            rows = slice(batch.starts[i], batch.starts[i + 1])
            if call.way == "paged":
                assert out[rows].isnan().all()
            else:
                close(out[rows], expected(layer, batch, options)[i], layer)
    return step


def close(got: torch.Tensor, wanted: torch.Tensor, layer: Layer) -> None:
    if layer.fp8:  # this step's tokens come exact when they are fresh, rounded when they were gathered
        assert (got - wanted).abs().mean() < 0.05
        assert not got.isnan().any()
    else:
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def planner_for(layer: Layer, mode: Any, workspace_tokens: int, calibration: Calibration | None = H200) -> Planner:
    return Planner(layer, mode, calibration, workspace_tokens * layer.row_bytes)


BASE = Layer(num_heads=4, num_kv_heads=2, head_size=16, page_size=16)


@pytest.mark.parametrize("seed", range(80))
def test_random_batches(seed: int) -> None:
    random = np.random.default_rng(seed)
    kv_heads = int(random.choice([1, 2, 4]))
    alibi = random.random() < 0.15
    layer = Layer(
        num_heads=kv_heads * int(random.choice([1, 2, 4])),
        num_kv_heads=kv_heads,
        head_size=16,
        page_size=int(random.choice([16, 48, 128])),
        fp8=False,
        window=int(random.integers(0, 60)) if random.random() < 0.35 else None,
        can_fresh=bool(random.random() < 0.75),
        can_chunk=not alibi,
    )
    queries, contexts = [], []
    for _ in range(int(random.integers(1, 7))):
        kind = random.choice(["decode", "verify", "first", "chunk", "none"], p=[0.25, 0.1, 0.25, 0.3, 0.1])
        few = int(random.integers(2, DECODE_TOKENS + 1))
        queries.append({"decode": 1, "verify": few, "none": 0}.get(kind, int(random.integers(4, 90))))
        contexts.append(0 if kind in ("first", "none") else int(random.integers(1, 200)))
    if not any(queries):
        queries[0] = 5
    order = random.permutation(len(queries)) if random.random() < 0.5 else np.argsort(queries)
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(layer, [queries[i] for i in order], [contexts[i] for i in order], generator)
    room = int(random.choice([150, 300, 1000]))
    planner = planner_for(layer, "always", room)
    check(planner, batch, seed, sinks=bool(random.random() < 0.3) and not alibi, soft_cap=float(random.choice([0, 5])))


# One for the layers of these tests, by which gathering gains always.
GAINS = dataclasses.replace(
    H200, rates=(Rate(16, 1, "other", "16-bit", attention_tflops=1e-3, paged_penalty=0.5, fresh_penalty=0.5),)
)
step_layers = st.builds(
    Layer,
    num_heads=st.sampled_from([4, 8, 12]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_size=st.just(16),
    page_size=st.sampled_from([1, 16, 48]),
    window=st.none() | st.integers(0, 200),
    can_fresh=st.booleans(),
    can_chunk=st.booleans(),
    must_gather=st.booleans(),
)
step_requests = st.lists(
    st.tuples(st.integers(0, 4) | st.integers(0, 90), st.integers(0, 300)).map(
        lambda request: request if request[0] else (0, 0)
    ),
    min_size=1,
    max_size=6,
)


@given(step_layers, step_requests, st.sampled_from(["auto", "always"]), st.integers(20, 900), st.integers(1, 2000))
@settings(max_examples=300)
def test_every_query_goes_once_and_sees_every_key_once(
    layer: Layer, requests: list[tuple[int, int]], mode: str, room: int, blocks: int
) -> None:
    planner = Planner(layer, mode, GAINS, room * layer.row_bytes + blocks)  # type: ignore[arg-type]
    queries, contexts = (np.array(numbers) for numbers in zip(*requests, strict=True))
    starts = np.array([0, *queries.cumsum()])
    try:
        step = plan_step(planner, starts, queries + contexts, DECODE_TOKENS, max(1, int(queries.max())))
    except RuntimeError:
        assert layer.must_gather
        return
    if step is None:
        return
    written: np.ndarray = np.zeros((int(starts[-1]), layer.num_kv_heads), dtype=int)
    # By request and KV head: first position and number of keys, in the order of the calls.
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    last_part = None
    for call in step.calls:
        heads = call.kv_heads or slice(0, layer.num_kv_heads)
        rows = range(call.requests.start, call.requests.stop)
        assert call.tokens == slice(starts[rows.start], starts[rows.stop])
        assert call.max_query == max(queries[call.requests]) or call.way == "paged"
        if call.part in (None, 0):
            written[call.tokens, heads] += 1
        else:  # right after the part before it, and only context
            assert (call.way, call.part) == ("gather", last_part + 1 if last_part is not None else None)
        last_part = call.part
        cu_keys, firsts = step.numbers[call.cu_keys], step.numbers[call.first_keys]
        if call.way != "paged":
            assert list(step.numbers[call.cu_queries]) == [0, *queries[call.requests].cumsum()]
            assert cu_keys[-1] == call.num_keys
            assert max(end - start for start, end in itertools.pairwise(cu_keys)) == call.max_keys
        if call.way == "gather":
            a_row = layer.row_bytes * (heads.stop - heads.start) // layer.num_kv_heads
            room_left = planner.workspace_bytes
            if call.part is not None:
                room_left -= planner.partial_bytes(call.max_query)
            assert call.num_keys * a_row <= room_left
        for i, row in enumerate(rows):
            query, context = requests[row]
            if not query:
                continue
            if call.way == "paged":
                keys = context + query - layer.keys(query, context), layer.keys(query, context)
                assert call.max_query >= query
                assert call.max_keys >= context + query
            elif call.way == "fresh":
                assert call.part == 0 or context == 0
                keys = context, query
            else:
                keys = firsts[i], cu_keys[i + 1] - cu_keys[i]
            if call.part == 0:  # it is the causal one
                assert keys[0] <= context
                assert sum(keys) == context + query
            for head in range(heads.start, heads.stop):
                seen.setdefault((row, head), []).append(keys)
    assert (written == 1).all()
    for (row, _), pieces in seen.items():
        query, context = requests[row]
        at = context + query - layer.keys(query, context)
        for first, number in sorted(pieces):
            assert first == at
            at += number
        assert at == context + query


@pytest.mark.parametrize(("can_fresh", "page"), itertools.product([True, False], [16, 48]))
@pytest.mark.parametrize("sinks", [True, False])
def test_context_in_parts(can_fresh: bool, page: int, sinks: bool) -> None:
    """Of keys, since there is one KV head."""
    layer = dataclasses.replace(BASE, num_kv_heads=1, can_fresh=can_fresh, page_size=page)
    batch = make_batch(layer, [1, 40, 20], [9, 700, 30], torch.Generator().manual_seed(1))
    step = check(planner_for(layer, "always", 250), batch, sinks=sinks, soft_cap=4.0)
    assert step is not None
    parts = [call.part for call in step.calls]
    assert parts[:1] == [None]
    assert parts[1] == 0
    assert parts[2] == 1
    assert len(parts) > 5
    assert parts[-1] is None
    assert (step.calls[1].way == "fresh") is can_fresh


@pytest.mark.parametrize("kv_heads", [2, 4, 6])
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize(("alibi", "sinks"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("fp8", [False, True])
def test_some_heads_at_a_time(
    kv_heads: int, window: int | None, alibi: bool, sinks: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_BLOCKS", 1)  # a GPU that few heads keep busy
    layer = dataclasses.replace(BASE, num_heads=12, num_kv_heads=kv_heads, window=window, can_chunk=not alibi, fp8=fp8)
    batch = make_batch(layer, [1, 40, 20], [9, 700, 30], torch.Generator().manual_seed(1))
    step = check(planner_for(layer, "always", 500 if window is None else 350), batch, sinks=sinks, soft_cap=4.0)
    assert step is not None
    sliced = [call.kv_heads for call in step.calls if call.kv_heads is not None]
    assert len(sliced) > 1
    assert [head for heads in sliced for head in range(heads.start, heads.stop)] == list(range(kv_heads))
    assert {call.part for call in step.calls} == {None}


def test_alibi_and_windows_are_never_merged() -> None:
    for changed in ({"can_chunk": False}, {"window": 400}):
        layer = dataclasses.replace(BASE, num_kv_heads=1, **changed)
        batch = make_batch(layer, [40, 20], [700, 0], torch.Generator().manual_seed(1))
        step = check(planner_for(layer, "always", 250), batch)
        assert step is not None
        assert [call.way for call in step.calls] == ["paged", "fresh"]


def test_a_window_gathers_what_it_can_see() -> None:
    layer = dataclasses.replace(BASE, window=31)
    batch = make_batch(layer, [40, 20], [700, 10], torch.Generator().manual_seed(1))
    before = STATS.gathered_tokens
    step = check(planner_for(layer, "always", 1000), batch)
    assert step is not None
    assert STATS.gathered_tokens - before == (31 + 40) + (10 + 20)
    firsts = [step.numbers[at] for call in step.calls for at in range(*call.first_keys.indices(99))]
    assert firsts == [700 - 31, 0]


def test_no_request_is_beside_another_but_where_all_are_gathered() -> None:
    """FlashAttention 3 reads on past the end of a sequence: a neighbour's NaN would be its own."""
    requests = [40, 40, 40, 40], [50, 50, 50, 50]
    batch = make_batch(BASE, *requests, torch.Generator().manual_seed(1))
    step = check(planner_for(BASE, "always", 200), batch)
    assert step is not None
    assert [(call.requests.start, call.requests.stop) for call in step.calls] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    layer = dataclasses.replace(BASE, fp8=True, must_gather=True)
    batch = make_batch(layer, *requests, torch.Generator().manual_seed(1))
    step = check(planner_for(layer, "never", 200), batch)
    assert step is not None
    assert [(call.requests.start, call.requests.stop) for call in step.calls] == [(0, 2), (2, 4)]  # as many as fit


def test_requests_without_tokens_are_nobodys() -> None:
    for queries in ([0, 40, 0, 0, 20, 0], [40, 0, 1, 0]):
        contexts = [0 if query == 0 else 700 for query in queries]
        batch = make_batch(BASE, queries, contexts, torch.Generator().manual_seed(1))
        assert check(planner_for(BASE, "always", 250), batch) is not None
        assert check(planner_for(BASE, "always", 5000), batch) is not None


@pytest.mark.parametrize("must_gather", [True, False])
def test_fp8_is_dequantised(must_gather: bool) -> None:
    layer = dataclasses.replace(BASE, fp8=True, must_gather=must_gather)
    batch = make_batch(layer, [1, 2, 40, 20], [30, 9, 100, 0], torch.Generator().manual_seed(1))
    step = check(planner_for(layer, "always", 1000), batch)
    assert step is not None
    assert step.calls[0].way == ("gather" if must_gather else "paged")
    assert step.calls[0].num_keys == (0 if not must_gather else step.calls[0].num_keys)


def test_pure_decodes_and_padding_are_stock() -> None:
    planner = planner_for(BASE, "always", 1000)
    assert plan_step(planner, np.array([0, 1, 4]), np.array([50, 60]), DECODE_TOKENS, 3) is None
    # A dummy run: padded, lengths that make no sense.
    assert plan_step(planner, np.array([0, 0, 0]), np.array([0, 0]), DECODE_TOKENS, 64) is None


def test_a_whole_prompt_alone_is_fresh_however_short() -> None:
    """Its call costs the host less than the stock one; two would cost more."""
    planner = planner_for(Layer(num_heads=32, num_kv_heads=8, head_size=128, page_size=16), "auto", 10_000)
    alone = plan_step(planner, np.array([0, 16]), np.array([16]), 1, 16)
    assert alone is not None
    assert [call.way for call in alone.calls] == ["fresh"]
    assert plan_step(planner, np.array([0, 16, 32]), np.array([16, 16]), 1, 16) is None
    assert plan_step(planner, np.array([0, 16]), np.array([32]), 1, 16) is None


def test_auto_takes_the_stock_call_where_nothing_is_gained() -> None:
    rate = Rate(16, 1, "other", "16-bit", attention_tflops=1e-3, paged_penalty=0.5, fresh_penalty=0.0)
    batch = make_batch(BASE, [1, 40, 20], [9, 300, 0], torch.Generator().manual_seed(1))
    gains = dataclasses.replace(H200, rates=(rate,))
    step = check(planner_for(BASE, "auto", 1000, gains), batch)
    assert step is not None
    assert [call.way for call in step.calls] == ["paged", "gather", "paged"]
    slow = dataclasses.replace(gains, call_us=1e9)
    assert check(planner_for(BASE, "auto", 1000, slow), batch) is None
