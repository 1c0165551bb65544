"""``vllm-kda bench attention --calibrate``: the numbers that :mod:`vllm_kda_plugin.attention.planner` plans with.

Each comes from direct measurements on the GPU, host time left out: the stock paged call, the same attention on
contiguous K and V, the gather between them, and our whole forward when it gathers all it can.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_kda_plugin.attention.planner import Calibration, Layer, Planner, Rate
from vllm_kda_plugin.bench.attention_cases import SHAPES, Shape
from vllm_kda_plugin.config import PluginConfig

QUERIES = (512, 2048, 8192)
CONTEXTS = (0, 4_000, 30_000, 120_000)
PAGES = (16, 64, 128, 528)
FP8_PAGES = (16, 128)
GATHERED = (64, 1024, 16_384)
"""Tokens of the gathers that are measured beside those of the points, in bfloat16."""
Cache = Literal["16-bit", "fp8"]
# Long prefills, whose rates are solved for.
_LONG = 2048
_LEAST_US = 0.1


@dataclasses.dataclass(frozen=True)
class Point:
    """One request, measured; microseconds of the GPU."""

    shape: Shape
    page: int
    cache: Cache
    query: int
    context: int
    stock_us: float
    contiguous_us: float
    gather_us: float
    """Of all its keys in one go; 0 without context, where nothing is gathered."""
    ours_us: float
    """Our forward with ``gather`` = always: with context larger than the workspace, in parts that are merged."""

    @property
    def layer(self) -> Layer:
        """As the planner sees it."""
        shape = self.shape
        return Layer(shape.num_heads, shape.num_kv_heads, shape.head_size, self.page, fp8=self.cache == "fp8")

    @property
    def penalty(self) -> float:
        """Stock time over that of contiguous K and V, less 1."""
        return self.stock_us / self.contiguous_us - 1

    @property
    def tflops(self) -> float:
        """Of attention on contiguous K and V."""
        pairs = self.layer.pairs(self.query, self.context)
        return 4 * pairs * self.shape.num_heads * self.shape.head_size / self.contiguous_us / 1e6

    @property
    def moved_bytes(self) -> int:
        """Bytes that its gather reads and writes."""
        return self.layer.keys(self.query, self.context) * self.layer.moved_bytes if self.context else 0

    def as_json(self) -> dict[str, Any]:
        """For the calibration's file."""
        plain = {**dataclasses.asdict(self), **dataclasses.asdict(self.shape)}
        del plain["shape"]
        return {**plain, "penalty": self.penalty, "tflops": self.tflops}


Gathers = Sequence[tuple[int, float]]
"""Bytes read and written by a gather, and its microseconds."""


def places() -> Iterator[tuple[Shape, int, Cache]]:
    """The kinds of layer that are measured."""
    for cache in get_args(Cache):
        for shape in SHAPES:
            for page in PAGES if cache == "16-bit" else FP8_PAGES:
                yield shape, page, cache


class HostTimes(NamedTuple):
    """The host's microseconds in a layer's forward."""

    paged: float
    fresh: float
    gather: float


def solve(gpu: str, points: Sequence[Point], gathers: Gathers, call_us: float, host: HostTimes) -> Calibration:
    """The calibration that fits what was measured.

    The penalties of a head size, group, kind of page and cache are the medians of its long prefills, lowered until the
    planner takes no way that was measured to be slower than the stock call, by the median over pages of a kind.

    Args:
        gpu: what the driver calls it.
        points: of all kinds of layer.
        gathers: beside those of the points.
        call_us: what one more attention call costs.
        host: by what is called.
    """
    measured = [*gathers, *((point.moved_bytes, point.gather_us) for point in points if point.gather_us)]
    tbps, gather_us = _gather_speed(measured)
    speeds = {"gather_tbps": tbps, "gather_us": gather_us, "call_us": max(call_us, _LEAST_US)}
    speeds |= {f"{way}_host_us": us for way, us in host._asdict().items()}
    rates = []
    kinds = dict.fromkeys(_kind(point) for point in points)
    for kind in kinds:
        mine = [point for point in points if _kind(point) == kind]
        tflops = statistics.median(point.tflops for point in _long(mine))
        rate = Rate(*kind, attention_tflops=tflops, paged_penalty=0.0, fresh_penalty=0.0)
        without_rates = Calibration(gpu=gpu, rates=(), **speeds)
        paged, fresh = ([point for point in mine if bool(point.context) is cached] for cached in (True, False))
        rate = _penalized(rate, "paged_penalty", paged, without_rates)
        rates.append(_penalized(rate, "fresh_penalty", fresh, without_rates))
    return Calibration(gpu=gpu, rates=tuple(rates), **speeds)


def _kind(point: Point) -> tuple[int, int, Literal["tile", "other"], Cache]:
    return point.shape.head_size, point.layer.group, point.layer.page, point.cache


def _long(points: Sequence[Point]) -> Sequence[Point]:
    return [point for point in points if point.query >= _LONG] or points


def _gather_speed(gathers: Gathers) -> tuple[float, float]:
    """TB/s, and the microseconds of a gather of nothing: the line that is nearest in proportion."""
    moved, us = (np.array(values, dtype=float) for values in zip(*gathers, strict=True))
    columns = np.stack([moved / us, 1 / us], axis=1)
    (per_byte, start), *_ = np.linalg.lstsq(columns, np.ones_like(us), rcond=None)
    if start < _LEAST_US or per_byte <= 0:  # of times that scatter
        start = _LEAST_US
        per_byte = statistics.median((np.maximum(us - start, _LEAST_US) / moved).tolist())
    return 1e-6 / float(per_byte), float(start)


def _penalized(
    rate: Rate, name: Literal["paged_penalty", "fresh_penalty"], points: Sequence[Point], calibration: Calibration
) -> Rate:
    """The rate with the highest penalty, up to the median, that makes no request slower, by the median over pages."""
    if not points:
        return rate
    median = statistics.median(point.penalty for point in _long(points))
    lower = sorted((point.penalty for point in points if point.penalty < median), reverse=True)
    ratios: dict[tuple[Shape, int, int], list[float]] = {}
    for point in points:
        ratios.setdefault((point.shape, point.query, point.context), []).append(point.ours_us / point.stock_us)
    slower = {request for request, found in ratios.items() if statistics.median(found) > 1}
    for penalty in (median, *lower):
        tried = _with(rate, name, penalty)
        with_it = dataclasses.replace(calibration, rates=(tried,))
        if not any(
            (point.shape, point.query, point.context) in slower and _gathers(point, with_it) for point in points
        ):
            return tried
    return _with(rate, name, 0.0)


def _with(rate: Rate, name: Literal["paged_penalty", "fresh_penalty"], penalty: float) -> Rate:
    if name == "paged_penalty":
        return dataclasses.replace(rate, paged_penalty=penalty)
    return dataclasses.replace(rate, fresh_penalty=penalty)


def _gathers(point: Point, calibration: Calibration) -> bool:
    return planner(point, calibration).choose([(point.query, point.context)]) != ["paged"]


def planner(point: Point, calibration: Calibration) -> Planner:
    """What plans the point, with the workspace it was measured with."""
    workspace_mib = PluginConfig.load({}, os.environ).gather_workspace_mib
    return Planner(point.layer, "auto", calibration, workspace_mib << 20)


def show(calibration: Calibration, points: Iterable[Point]) -> None:
    """Print the calibration, and each point as measured and as predicted."""
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    print(
        f"{calibration.gpu}: gather {calibration.gather_tbps:.2f} TB/s read and written, of nothing "
        f"{calibration.gather_us:.1f} us; one more attention call {calibration.call_us:.1f} us"
    )
    print(
        f"host, a layer's forward: stock {calibration.paged_host_us:.1f} us, on fresh K and V "
        f"{calibration.fresh_host_us:.1f} us, gathered {calibration.gather_host_us:.1f} us"
    )
    rates = Table("head size", "heads a KV head", "page", "cache", "TFLOP/s", "paged", "fresh", title="Rates")
    for rate in calibration.rates:
        tflops, *penalties = rate.attention_tflops, rate.paged_penalty, rate.fresh_penalty
        kind = str(rate.head_size), str(rate.group), rate.page, rate.cache
        rates.add_row(*kind, f"{tflops:.0f}", *(f"{penalty:+.3f}" for penalty in penalties))
    console.print(rates)
    table = Table(title="Measured us of the GPU, and in brackets predicted")
    for column in ("heads", "page", "cache", "query after context"):
        table.add_column(column)
    for column in ("stock", "contiguous", "gather", "ours", "penalty", "planned", "stock / planned"):
        table.add_column(column, justify="right")
    for point in points:
        plan = planner(point, calibration)
        costs = plan.costs_us(point.query, point.context)
        [way] = plan.choose([(point.query, point.context)])
        taken = point.stock_us if way == "paged" else point.ours_us
        attention = plan.attention_us(point.query, point.context)
        other = costs.get("fresh" if point.context == 0 else "gather")
        table.add_row(
            str(point.shape),
            str(point.page),
            point.cache,
            f"{point.query:,} after {point.context:,}",
            f"{point.stock_us:,.1f} ({costs['paged']:,.1f})",
            f"{point.contiguous_us:,.1f} ({attention:,.1f})",
            f"{point.gather_us:,.1f}" if point.gather_us else "",
            f"{point.ours_us:,.1f}" + ("" if other is None else f" ({other:,.1f})"),
            f"{point.penalty:+.3f}",
            way,
            f"{point.stock_us / taken:.3f}",
        )
    console.print(table)
