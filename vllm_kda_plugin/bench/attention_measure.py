"""Measures attention steps: ours beside vLLM's FLASH_ATTN, and beside its other backends, on the same tensors.

Each backend is called as an engine calls it, through its own metadata builder and implementation; see
:mod:`vllm_kda_plugin.bench.attention_steps` for what is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.bench import attention_layers
from vllm_kda_plugin.bench.attention_cases import LAYERS, Batch, Case, Tensors
from vllm_kda_plugin.bench.attention_layers import Backend
from vllm_kda_plugin.bench.attention_steps import Clock, Step, gpu_parts, ratio_quartiles, step_sizes, time_steps

Row = dict[str, Any]
Tell = Callable[[str], None]

_SPLITS = 1, 4
# Ours may differ from stock by this many times what two stock runs of different split counts differ, or by this part of
# a row's largest value, two roundings to bfloat16, if that is more.
_TIMES, _LEAST = 3.0, 2.0**-6
# Where both send the same calls, a difference of more than this, either way, is looked at for so many times the rounds.
_UNLIKELY, _MORE = 0.02, 2
_PEER_ROUNDS, _PEER_LAYERS = 2, 2
# A peer that has taken longer, compiling most likely, is not measured further.
_PEER_SECONDS = 15.0


def measure_grid(cases: Iterable[Case], device: torch.device, clock: Clock, tell: Tell) -> Iterator[Row]:
    """Measure ours beside stock, case by case.

    Args:
        cases: those of one shape and page side by side.
        device: where.
        clock: of the device.
        tell: is told what is measured next.

    Yields:
        A row of the report for each case.
    """
    for (shape, page), group in _grouped(cases):
        tensors = Tensors(group, LAYERS, device)
        stock, ours = attention_layers.stock(shape, page, device), attention_layers.ours(shape, page, device)
        for case in group:
            tell(describe(case))
            yield _facts(case) | measure(stock, ours, tensors.batch(case), clock)
        del tensors
        _free(device)


def measure(stock: Backend, ours: Backend, batch: Batch, clock: Clock) -> Row:
    """Compare and time one case.

    Returns:
        ``stock_us`` and ``ours_us`` (a step's, divided by its layers), ``ratio`` (the median of the rounds') and its
        ``ratio_quartiles``,
        microseconds of the host a step (``build``, ``send``) and of the GPU a layer (``gpu``), ``path`` and
        ``agreement``; under ``wrong`` why the result is, if it is.
    """
    row: Row = {"path": "", "agreement": agreement(stock, ours, batch)}
    row["path"] = row["agreement"].pop("path")
    if fault := row["agreement"].pop("wrong", None):
        row["wrong"] = fault
    row["layers"], row["steps_in_a_row"] = sizes = step_sizes(stock, batch, clock)
    steps = {"stock": Step(stock, batch, clock, *sizes), "ours": Step(ours, batch, clock, *sizes)}
    us = time_steps(steps)
    if row["path"] == "paged" and abs(ratio_quartiles(steps["stock"], steps["ours"])[1] - 1) > _UNLIKELY:
        us = time_steps(steps, _MORE * len(steps["stock"].samples))
    row |= {f"{name}_us": figure for name, figure in us.items()}
    lower, row["ratio"], upper = ratio_quartiles(steps["stock"], steps["ours"])
    row["ratio_quartiles"] = [lower, upper]
    row["rounds"] = len(steps["stock"].samples)
    row["host_us_per_step"] = {
        name: {"build": statistics.median(step.builds), "send": statistics.median(step.sends)}
        for name, step in steps.items()
    }
    if row["path"] != "paged":
        parts = gpu_parts(ours, batch, clock, parts=True)
        row["gpu_us"] = {"stock": gpu_parts(stock, batch, clock)["all"], "ours": parts.pop("all"), **parts}
    return row


def agreement(stock: Backend, ours: Backend, batch: Batch) -> Row:
    """Compare one layer's output with stock's, and two stock runs of different split counts with each other.

    Returns:
        ``path``: what our forward called; ``ours`` and ``splits``: the largest differences, ``max`` by value and
        ``row`` relative to the largest value of a token's head; ``wrong`` if ours is too far from stock.
    """

    def run(backend: Backend, metadata: Any) -> torch.Tensor:
        batch.out.fill_(torch.nan)
        backend.forward(batch, 0, metadata)
        return batch.out.clone()

    whole = stock.build(batch)
    wanted = run(stock, whole)
    calls = _calls()
    got = run(ours, ours.build(batch))
    path = _path([after - before for before, after in zip(calls, _calls(), strict=True)])
    # FlashAttention 2 cannot be told how many splits to make.
    counts = _SPLITS if stock.impl.vllm_flash_attn_version == 3 else _SPLITS[:1]
    few, many = (
        run(stock, dataclasses.replace(whole, max_num_splits=count, scheduler_metadata=None))
        for count in (counts[0], counts[-1])
    )
    found: Row = {"path": path, "ours": difference(got, wanted), "splits": difference(many, few)}
    allowed = max(_TIMES * found["splits"]["row"], _LEAST)
    if not found["ours"]["row"] <= allowed:  # NaN is wrong
        found["wrong"] = f"differs from stock by {found['ours']['row']:.2g} of a row's largest value, not {allowed:.2g}"
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Largest differences of ``[tokens, heads, head_size]``: by value, and beside the row's largest value."""
    apart = (found.float() - wanted.float()).abs().amax(-1)
    largest = wanted.float().abs().amax(-1).clamp_min(torch.finfo(torch.bfloat16).tiny)
    return {"max": float(apart.max()), "row": float((apart / largest).max())}


def measure_peers(cases: Iterable[Case], device: torch.device, clock: Clock, tell: Tell) -> Iterator[Row]:
    """Measure vLLM's other backends beside stock, on the tensors of :func:`measure_grid`.

    Yields:
        Rows with ``name``, ``us`` and ``stock_us`` of the same rounds and their ``ratio`` (stock / peer), or with
        ``error`` in place of these; one without a case where a peer is not to be had or measured no further.
    """
    spent = dict.fromkeys(attention_layers.PEERS, 0.0)
    out: dict[str, str] = {}
    for (shape, page), group in _grouped(cases):
        tensors: Tensors | None = None
        for name in attention_layers.PEERS:
            begin = time.monotonic()
            try:
                peer = None if name in out else attention_layers.peer(name, shape, page, device)
            except ImportError as error:
                out[name] = f"not importable: {_first_line(error)}"
                yield {"name": name, "error": out[name]}
                continue
            except Exception as error:  # whatever another's constructor raises
                yield {"name": name, **_facts(group[0]), "error": _first_line(error)}
                continue
            tensors = tensors or Tensors(group, LAYERS, device)
            stock = attention_layers.stock(shape, page, device)
            for case in group if peer else ():
                tell(f"{name}, {describe(case)}")
                yield {"name": name, **_facts(case), **_measure_peer(stock, peer, tensors.batch(case), clock)}
                if spent[name] + time.monotonic() - begin > _PEER_SECONDS:
                    out[name] = f"measured no further: it has taken more than {_PEER_SECONDS:.0f} s here"
                    yield {"name": name, "error": out[name]}
                    break
            spent[name] += time.monotonic() - begin
        del tensors
        _free(device)


def _measure_peer(stock: Backend, peer: Any, batch: Batch, clock: Clock) -> Row:
    try:
        batch.out.fill_(torch.nan)
        stock.forward(batch, 0, stock.build(batch))
        wanted = batch.out.clone()
        batch.out.fill_(torch.nan)
        peer.forward(batch, 0, peer.build(batch))
        apart = difference(batch.out, wanted)
        steps = {
            name: Step(backend, batch, clock, _PEER_LAYERS) for name, backend in (("stock", stock), ("peer", peer))
        }
        us = time_steps(steps, _PEER_ROUNDS)
        clock.drain()
    except Exception as error:  # a peer's failure is its own
        return {"error": _first_line(error)}
    return {"us": us["peer"], "stock_us": us["stock"], "ratio": us["stock"] / us["peer"], "difference": apart}


def describe(case: Case) -> str:
    """A case in words."""
    return f"{case.shape}, page {case.page}, {size(case)}"


def size(case: Case) -> str:
    """Its requests in words."""
    if len(case.requests) > 1:
        return case.batch
    query, context = case.requests[0]
    return f"{query:,} after {context:,}"


def _facts(case: Case) -> Row:
    query, context = case.requests[0] if len(case.requests) == 1 else (None, None)
    return {
        **dataclasses.asdict(case.shape),
        "page_size": case.page,
        "batch": case.batch,
        "size": size(case),
        "query": query,
        "context": context,
        "requests": len(case.requests),
        "tokens": case.tokens,
        "cuda_graph": case.decodes_only,
    }


def _grouped(cases: Iterable[Case]) -> Iterator[tuple[Any, list[Case]]]:
    for place, group in itertools.groupby(cases, key=lambda case: (case.shape, case.page)):
        yield place, list(group)


def _calls() -> tuple[int, int, int]:
    return STATS.paged_calls, STATS.fresh_calls, STATS.gather_calls


def _path(calls: list[int]) -> str:
    names = zip(calls, ("paged", "fresh", "gather"), strict=True)
    # A step that is left to stock is counted nowhere.
    return " + ".join(name if count == 1 else f"{count} {name}" for count, name in names if count) or "paged"


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
