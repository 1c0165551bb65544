"""The measurements of ``vllm-kda bench attention --calibrate``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import fa_utils

from vllm_kda_plugin.bench import attention_layers
from vllm_kda_plugin.bench.attention_cases import LAYERS, SHAPES, SHORT_LAYERS, Batch, Case, Shape, Tensors
from vllm_kda_plugin.bench.attention_layers import Backend
from vllm_kda_plugin.bench.attention_steps import Clock, Spans, Step, time_steps
from vllm_kda_plugin.bench.calibrate import CONTEXTS, GATHERED, QUERIES, Cache, Gathers, HostTimes, Point
from vllm_kda_plugin.kernels.gather import gather_paged_kv

_BUDGET_US = 20_000
_ROUNDS = 3, 9
_HOST_ROUNDS = 41
# Calls that split, or do not, what one step holds: two prefills, and a prefill after decodes.
_SPLIT = ([(2048, 4_000)], [(2048, 4_000)]), ([(1, 2_000)] * 32, [(2048, 4_000)])


def measure_points(
    shape: Shape,
    page: int,
    cache: Cache,
    device: torch.device,
    clock: Clock,
    tell: Callable[[str], None],
    queries: tuple[int, ...] = QUERIES,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Iterator[Point]:
    """Measure one kind of layer at every query and context."""
    fp8 = cache == "fp8"
    dtype = "fp8" if fp8 else "auto"
    stock = attention_layers.stock(shape, page, device, dtype)
    ours = attention_layers.ours(shape, page, device, "always", dtype)
    cases = [Case(shape, page, ((query, context),)) for context in contexts for query in queries]
    tensors = Tensors(cases, 1, device, fp8)
    half = {"dtype": torch.bfloat16, "device": device}
    packed = torch.empty(max(queries) + max(contexts), shape.num_kv_heads, 2 * shape.head_size, **half)
    for case in cases:
        tell(f"{shape}, page {page}, {cache}")
        [(query, context)] = case.requests
        batch = tensors.batch(case)
        calls = _calls(stock, ours, batch, packed, fp8)
        us = gpu_us(calls, clock)
        yield Point(
            shape, page, cache, query, context, us["stock"], us["contiguous"], us.get("gather", 0.0), us["ours"]
        )


def gpu_us(calls: Mapping[str, Callable[[], object]], clock: Clock) -> dict[str, float]:
    """Median microseconds of the GPU of each call, one of each a round, without waiting for the host in a round."""
    spans = Spans(clock)

    def once() -> dict[str, float]:
        clock.drain()
        clock.hold()
        for name, call in calls.items():
            with spans.span(name):
                call()
        clock.drain()
        return spans.us()

    once()  # loads kernels, plans, allocates
    first = once()
    rounds = min(max(int(_BUDGET_US / sum(first.values())), _ROUNDS[0]), _ROUNDS[1])
    samples = [once() for _ in range(rounds)]
    return {name: statistics.median(sample[name] for sample in samples) for name in calls}


def measure_gathers(device: torch.device, clock: Clock) -> Gathers:
    """Bytes moved and microseconds of short gathers, of each number of KV heads and head size."""
    found = []
    for shape in dict.fromkeys(Shape(shape.num_kv_heads, shape.num_kv_heads, shape.head_size) for shape in SHAPES):
        cases = [Case(shape, 16, ((1, tokens - 1),)) for tokens in GATHERED]
        tensors = Tensors(cases, 1, device)
        for case in cases:
            batch = tensors.batch(case)
            tokens = case.requests[0][1] + 1
            out = torch.empty(tokens, shape.num_kv_heads, 2 * shape.head_size, dtype=torch.bfloat16, device=device)
            found.append((2 * out.nbytes, gpu_us({"gather": _gather(batch, out, None)}, clock)["gather"]))
    return found


def measure_call_us(device: torch.device, clock: Clock) -> float:
    """Microseconds of the GPU that two attention calls on contiguous K and V take more than one for both.

    The larger of what two prefills and a prefill beside decodes show, the median over shapes.
    """
    return statistics.median(
        max(_split_us(shape, first, second, device, clock) for first, second in _SPLIT) for shape in SHAPES
    )


def measure_host_us(device: torch.device, clock: Clock) -> HostTimes:
    """The host's time a layer, in steps so short that the GPU waits for it; what is planned once a step is in it."""
    shape, page = SHAPES[0], 16
    fresh, cached = Case(shape, page, ((16, 0),)), Case(shape, page, ((16, 256),))
    tensors = Tensors([fresh, cached], LAYERS, device)
    stock = attention_layers.stock(shape, page, device)
    always = attention_layers.ours(shape, page, device, "always")
    ways = {"paged": (stock, cached), "fresh": (always, fresh), "gather": (always, cached)}
    steps = {way: Step(backend, tensors.batch(case), clock, SHORT_LAYERS) for way, (backend, case) in ways.items()}
    for step in steps.values():
        step()
    time_steps(steps, _HOST_ROUNDS)
    return HostTimes(**{way: statistics.median(step.sends) / step.layers for way, step in steps.items()})


def _split_us(
    shape: Shape, first: list[tuple[int, int]], second: list[tuple[int, int]], device: torch.device, clock: Clock
) -> float:
    scale = shape.head_size**-0.5
    requests = [*first, *second]
    tokens, keys = sum(query for query, _ in requests), sum(sum(request) for request in requests)
    half = {"dtype": torch.bfloat16, "device": device}
    query = torch.randn(tokens, shape.num_heads, shape.head_size, **half)
    key, value = torch.randn(keys, shape.num_kv_heads, 2 * shape.head_size, **half).split(shape.head_size, dim=-1)
    out = torch.empty_like(query)
    split = sum(query for query, _ in first), sum(sum(request) for request in first)
    head = _attend(query[: split[0]], key[: split[1]], value[: split[1]], out[: split[0]], first, scale, device)
    tail = _attend(query[split[0] :], key[split[1] :], value[split[1] :], out[split[0] :], second, scale, device)
    whole = _attend(query, key, value, out, requests, scale, device)
    us = gpu_us({"whole": whole, "split": lambda: (head(), tail())}, clock)
    return us["split"] - us["whole"]


def _calls(
    stock: Backend, ours: Backend, batch: Batch, packed: torch.Tensor, fp8: bool
) -> dict[str, Callable[[], object]]:
    [(query, context)] = batch.case.requests
    metadata, planned = stock.build(batch), ours.build(batch)
    size, device = batch.case.shape.head_size, batch.out.device
    queries = batch.query[0]
    if fp8:  # as vLLM's attention layer does before its implementation is called
        queries = queries.to(torch.float8_e4m3fn)
    scale = stock.scales._k_scale.reshape(1) if fp8 else None
    stock_batch = dataclasses.replace(batch, query=[queries])
    calls: dict[str, Callable[[], object]] = {"stock": lambda: stock.forward(stock_batch, 0, metadata)}
    if context:
        rows = packed[: query + context]
        key, value = rows.split(size, dim=-1)
        calls["gather"] = _gather(batch, rows, scale)
    else:
        key, value = (canonicalize_singleton_dim_strides(tensor) for tensor in (batch.key[0], batch.value[0]))
    calls["contiguous"] = _attend(batch.query[0], key, value, batch.out, [(query, context)], stock.impl.scale, device)
    calls["ours"] = lambda: ours.forward(batch, 0, planned)
    return calls


def _gather(batch: Batch, out: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], object]:
    cache = batch.caches[0].transpose(1, 2)
    if scale is not None:
        cache = cache.view(torch.float8_e4m3fn)
    numbers = torch.tensor([0, len(out)], dtype=torch.int32, device=out.device)
    table = batch.common.block_table_tensor
    return lambda: gather_paged_kv(out, None, cache, None, table, numbers, numbers[:1], k_scale=scale, v_scale=scale)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    requests: list[tuple[int, int]],
    scale: float,
    device: torch.device,
) -> Callable[[], object]:
    """The call that our implementation makes on contiguous K and V."""
    queries = torch.tensor([query for query, _ in requests])
    keys = torch.tensor([sum(request) for request in requests])
    bounds = [torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(device) for lens in (queries, keys)]
    version = fa_utils.get_flash_attn_version(head_size=query.shape[-1])
    options: dict[str, Any] = {
        "cu_seqlens_q": bounds[0],
        "cu_seqlens_k": bounds[1],
        "max_seqlen_q": int(queries.max()),
        "max_seqlen_k": int(keys.max()),
        "softmax_scale": scale,
        "causal": True,
        "window_size": [-1, -1],
        "softcap": 0,
        "alibi_slopes": None,
        "return_softmax_lse": False,
        "s_aux": None,
        "fa_version": version,
        "num_splits": 0,
    }
    return lambda: fa_utils.flash_attn_varlen_func(q=query, k=key, v=value, out=out, **options)
