"""Gather or not: what attention will cost, worked out from numbers that the host knows.

No tensor is touched here. Times are microseconds of the GPU; the rates behind them are measured, those of an H200
come with the package, and ``vllm-kda bench attention --calibrate FILE`` writes those of the GPU at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

Way = Literal["paged", "fresh", "gather"]
"""How one request attends: the stock call on the page table; on the K and V that this step computed, without a cache
read; on K and V gathered from the cache."""

Mode = Literal["auto", "always", "never"]


class Parts(NamedTuple):
    """How a request is cut whose K and V may not fit the workspace."""

    calls: int
    """Gathers, 0 where it cannot be gathered."""
    of: Literal["whole", "heads", "keys"] = "whole"
    """All at once; some KV heads at a time, which changes no result; or some keys at a time, whose results are merged:
    where the step's own are fresh, even one gather of all others is such a part."""


Request = tuple[int, int] | None
"""Query tokens of a step and tokens cached before it; None for a run of decodes."""

FORMAT = 1
_CALIBRATED_BY = "vllm-kda bench attention --calibrate"
# Tokens of K that FlashAttention 3 loads at once on Hopper; it reads pages that are a multiple with one bulk copy.
_KV_TILE = {64: 128, 128: 128, 256: 80}
# A way other than the stock one must be predicted to save this part of the stock time.
_MARGIN = 0.01
# The same whatever is chosen for the others.
_DECODES: dict[Way, float] = {"paged": 0.0}
# Queries of a head that a thread block of FlashAttention 3 takes, and thread blocks at once on an H100 or H200.
_QUERY_TILE, _BLOCKS = 128, 132


@dataclasses.dataclass(frozen=True)
class Layer:
    """What about an attention layer, on one GPU, its time depends on."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    """Tokens in a block of the KV cache."""
    fp8: bool = False
    """Whether the cache holds fp8; queries, keys and values of a step are 16-bit always."""
    window: int | None = None
    """Tokens before its own that a query sees, None for all."""
    can_fresh: bool = True
    """Whether the step's own K and V may be attended to: not if the layer uses another's cache."""
    can_chunk: bool = True
    """Whether partial results over a part of the keys can be merged: not with ALiBi."""
    must_gather: bool = False
    """Whether there is no stock call for this cache: e5m2."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page(self) -> Literal["tile", "other"]:
        """Whether a page is a whole number of FlashAttention's tiles."""
        tile = _KV_TILE.get(self.head_size)
        return "tile" if tile is not None and self.page_size % tile == 0 else "other"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's gathered K and V."""
        return self.num_kv_heads * 2 * self.head_size * 2

    @property
    def moved_bytes(self) -> int:
        """Bytes that the gather of one token reads and writes."""
        return self.row_bytes * 3 // 2 if self.fp8 else self.row_bytes * 2

    def keys(self, query: int, context: int) -> int:
        """Tokens that ``query`` tokens after ``context`` others see between them."""
        return query + (context if self.window is None else min(context, self.window))

    def pairs(self, query: int, context: int) -> int:
        """Pairs of a query and a key that it sees."""
        if self.window is None:
            return query * context + query * (query + 1) // 2
        # Query i sees min(context + i, window) + 1 keys: the first few all before them, the others the window.
        growing = max(0, min(query, self.window - context))
        return growing * context + growing * (growing + 1) // 2 + (query - growing) * (self.window + 1)


@dataclasses.dataclass(frozen=True)
class Rate:
    """What was measured for layers of one head size, group, kind of page and cache."""

    head_size: int
    group: int
    page: Literal["tile", "other"]
    cache: Literal["16-bit", "fp8"]
    attention_tflops: float
    """Of FlashAttention on contiguous K and V in long prefills."""
    paged_penalty: float
    """Stock time with context over that of contiguous K and V, less 1; may be below 0."""
    fresh_penalty: float
    """The same for requests without context."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured on one GPU."""

    gpu: str
    gather_tbps: float
    """TB/s, read and written, of a long gather."""
    gather_us: float
    """Of a gather of nothing."""
    call_us: float
    """What one more attention call costs a step, its tail and its launch."""
    paged_host_us: float
    """The host's time in a layer's forward, with one stock call. A step of less GPU time a layer waits for the host."""
    fresh_host_us: float
    """The same with one call on fresh K and V."""
    gather_host_us: float
    """The same with one gather and one call on what it gathered."""
    rates: tuple[Rate, ...]

    def rate(self, layer: Layer) -> Rate | None:
        """The measurement for a layer: of its group, or else the nearest smaller one, which gains less."""
        cache = "fp8" if layer.fp8 else "16-bit"
        fitting = [
            rate
            for rate in self.rates
            if (rate.head_size, rate.page, rate.cache) == (layer.head_size, layer.page, cache)
            and rate.group <= layer.group
        ]
        return max(fitting, key=lambda rate: rate.group, default=None)

    def save(self, file: Path, points: Sequence[dict[str, Any]] = ()) -> None:
        """Write JSON that :func:`load` reads, with the measurements that it was solved from, for people to look at."""
        content = {"format": FORMAT, **dataclasses.asdict(self), "points": list(points)}
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(file: Path) -> Calibration:
    """Read a calibration.

    Raises:
        ValueError: the file cannot be read or is no calibration; the message says what is wrong and where.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"no calibration can be read from {file}: {error}") from None
    try:
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f'"format" must be {FORMAT}')
        content.pop("points", None)
        rates = tuple(_checked(Rate(**rate)) for rate in content.pop("rates", ()))
        return _checked(Calibration(**content, rates=rates))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is no calibration of this version, write it anew with {_CALIBRATED_BY}: {error}"
        ) from None


def _checked(measured: Any) -> Any:
    """The same, if its numbers are possible."""
    allowed = {"page": ("tile", "other"), "cache": ("16-bit", "fp8")}
    for field in dataclasses.fields(measured):
        value = getattr(measured, field.name)
        if field.name == "rates":
            continue
        if field.name in allowed or field.name == "gpu":
            good = isinstance(value, str) and value in allowed.get(field.name, (value,))
            must = " or ".join(allowed.get(field.name, ("a string",)))
        elif field.name.endswith("_penalty"):
            good, must = _is_number(value) and value > -1, "a number above -1"
        else:
            good, must = _is_number(value) and value > 0, "a number above 0"
        if not good:
            raise ValueError(f'"{field.name}" is {value!r}, must be {must}')
    return measured


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


H200 = Calibration(
    gpu="NVIDIA H200",
    gather_tbps=4.25,
    gather_us=4.2,
    call_us=16.8,
    paged_host_us=63.6,
    fresh_host_us=44.4,
    gather_host_us=57.7,
    # 16-bit caches. An fp8 cache is left to the stock call unless a calibration or the mode says otherwise: its decodes
    # would quantise their 16-bit queries in a kernel of their own.
    rates=(
        Rate(64, 4, "other", "16-bit", attention_tflops=515.0, paged_penalty=0.087, fresh_penalty=0.066),
        Rate(64, 4, "tile", "16-bit", attention_tflops=515.0, paged_penalty=0.014, fresh_penalty=0.008),
        Rate(128, 1, "other", "16-bit", attention_tflops=685.0, paged_penalty=0.104, fresh_penalty=0.085),
        Rate(128, 1, "tile", "16-bit", attention_tflops=683.0, paged_penalty=0.019, fresh_penalty=0.023),
        Rate(128, 4, "other", "16-bit", attention_tflops=701.0, paged_penalty=0.095, fresh_penalty=0.084),
        Rate(128, 4, "tile", "16-bit", attention_tflops=710.0, paged_penalty=0.016, fresh_penalty=0.016),
        Rate(128, 8, "other", "16-bit", attention_tflops=699.0, paged_penalty=0.101, fresh_penalty=0.113),
        Rate(128, 8, "tile", "16-bit", attention_tflops=701.0, paged_penalty=0.015, fresh_penalty=0.034),
        Rate(256, 4, "other", "16-bit", attention_tflops=769.0, paged_penalty=0.052, fresh_penalty=0.034),
    ),
)


def for_gpu(name: str, file: str = "") -> Calibration | None:
    """The calibration to plan with.

    Args:
        name: what the driver calls the GPU.
        file: of a calibration, "" for those that come with the package.

    Returns:
        None where nothing was measured: then nothing is gathered in mode "auto".

    Raises:
        ValueError: the file is no calibration, or of another GPU.
    """
    if not file:
        return H200 if name == H200.gpu else None
    calibration = load(Path(file))
    if calibration.gpu != name:
        raise ValueError(f"{file} was measured on {calibration.gpu}, this is {name}: run {_CALIBRATED_BY} here")
    return calibration


def waiting_pairs(calibration: Calibration, num_heads: int, head_size: int) -> float:
    """Pairs of a query and a key that it sees, so few that the GPU waits for the host whichever way a step goes."""
    host_us = min(calibration.paged_host_us, calibration.fresh_host_us, calibration.gather_host_us)
    rates = [rate for rate in calibration.rates if rate.head_size == head_size]
    if not rates:
        return math.inf
    slowest = min(rate.attention_tflops / (1 + max(0.0, rate.paged_penalty, rate.fresh_penalty)) for rate in rates)
    return host_us * slowest * 1e6 / (4 * num_heads * head_size)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Chooses how the requests of a step attend, for one kind of layer.

    Args:
        layer: the kind of layer.
        mode: "auto" takes what is predicted to be fastest, "always" gathers all that can be, "never" nothing.
        calibration: what was measured on this GPU, None for nothing.
        workspace_bytes: what the gathered K and V, and partial results, may fill.
    """

    layer: Layer
    mode: Mode
    calibration: Calibration | None
    workspace_bytes: int

    @functools.cached_property
    def rate(self) -> Rate | None:
        """What was measured for this layer, None for nothing."""
        return None if self.calibration is None else self.calibration.rate(self.layer)

    @functools.cached_property
    def idle(self) -> bool:
        """Whether nothing but the stock call is ever chosen."""
        if self.layer.must_gather or self.mode == "always":
            return False
        return self.mode == "never" or self.rate is None or max(self._penalties) <= 0

    @property
    def forced(self) -> bool:
        """Whether the stock call is not to be weighed against the others."""
        return self.layer.must_gather or self.mode == "always"

    @functools.cached_property
    def _penalties(self) -> tuple[float, float]:
        return (0.0, 0.0) if self.rate is None else (self.rate.paged_penalty, self.rate.fresh_penalty)

    @property
    def shares_calls(self) -> bool:
        """Whether neighbours on contiguous K and V share a call.

        A tile of FlashAttention 3 reads past the end of a sequence, and multiplies by 0 what it finds there: NaN in the
        next request's V would become NaN in this one's output (https://github.com/Dao-AILab/flash-attention/issues/2374).
        So each has a call of its own, whose tensors end with it. Not so where decodes must be gathered too.
        """
        return self.layer.must_gather

    @functools.cached_property
    def _waiting_pairs(self) -> float:
        if self.forced or self.calibration is None:
            return 0.0
        return waiting_pairs(self.calibration, self.layer.num_heads, self.layer.head_size)

    @functools.cached_property
    def _us_per_pair(self) -> float:
        tflops = 500.0 if self.rate is None else self.rate.attention_tflops
        return 4 * self.layer.num_heads * self.layer.head_size / (tflops * 1e6)

    @functools.cached_property
    def capacity(self) -> int:
        """Tokens whose K and V fit the workspace."""
        return self.workspace_bytes // self.layer.row_bytes

    def partial_bytes(self, query: int) -> int:
        """Workspace that merging partial results of ``query`` tokens takes: one of them, its sums twice, alignment."""
        layer = self.layer
        return 4 * 256 + query * layer.num_heads * (2 * layer.head_size + 2 * 4)

    def chunk_tokens(self, query: int) -> int:
        """Tokens gathered at a time when they do not fit at once: whole pages where possible, 0 for no room."""
        room = max(0, self.workspace_bytes - self.partial_bytes(query)) // self.layer.row_bytes
        return room - room % self.layer.page_size if room >= self.layer.page_size else room

    def parts(self, query: int, context: int) -> Parts:
        """Gathers of a request, as few as the workspace allows; by heads where that leaves the GPU as busy."""
        layer = self.layer
        keys = layer.keys(query, context)
        if keys <= self.capacity:
            return Parts(1)
        heads = self.workspace_bytes // (keys * layer.row_bytes // layer.num_kv_heads)
        by_heads = -(-layer.num_kv_heads // heads) if heads else 0
        by_keys = self._chunks(query, context)
        if by_heads and (not by_keys or self._busy(query, by_heads) >= 0.95 * self._busy(query, 1)):
            return Parts(by_heads, "heads")
        return Parts(by_keys, "keys") if by_keys else Parts(0)

    def _chunks(self, query: int, context: int) -> int:
        """Gathers that are merged, 0 if they cannot be."""
        layer = self.layer
        room = self.chunk_tokens(query)
        # A window's edges move against a part of the keys, which no call can express.
        if not layer.can_chunk or layer.window is not None or room == 0:
            return 0
        if layer.can_fresh:
            return -(-context // room)
        # The step's own tokens are gathered too, and must come in one part: it is the causal one.
        return 0 if query > room else 1 + -(-max(0, context + query - room) // room)

    def _busy(self, query: int, calls: int) -> float:
        """How full the waves of thread blocks are when this many calls share the heads."""
        heads = -(-self.layer.num_kv_heads // calls) * self.layer.group
        waves = heads * -(-query // _QUERY_TILE) / _BLOCKS
        return waves / math.ceil(waves)

    def attention_us(self, query: int, context: int) -> float:
        """Attention of one request on contiguous K and V."""
        return self.layer.pairs(query, context) * self._us_per_pair

    def costs_us(self, query: int, context: int) -> dict[Way, float]:
        """All that a request costs beside the call it shares with its neighbours, for each way that it can go."""
        layer = self.layer
        attention = self.attention_us(query, context)
        costs: dict[Way, float] = {}
        if not layer.must_gather:
            costs["paged"] = attention * (1 + self._penalties[0 if context else 1])
        if context == 0 and layer.can_fresh:
            costs["fresh"] = attention
        parts = self.parts(query, context)
        if parts.calls:
            measured = self.calibration or H200
            moved = layer.keys(query, context) * layer.moved_bytes
            extra = 0.0
            if parts.of != "whole":
                extra = parts.calls * (measured.gather_us + measured.call_us)
                if parts.of == "keys":  # a part's result is written, and read to be merged
                    moved += parts.calls * 3 * self.partial_bytes(query)
            costs["gather"] = attention + moved / (measured.gather_tbps * 1e6) + extra
        return costs

    def choose(self, requests: Sequence[Request]) -> list[Way]:
        """The fastest way for each request of a step, in the order of the batch; see :meth:`cost_of`.

        Neighbours that are paged share a call, so a request may be paged because they are. Where the stock call for all
        is as fast as anything, it is taken.

        Args:
            requests: query tokens and cached tokens of each, None for a run of decodes, which are always paged.

        Raises:
            RuntimeError: the cache has no stock call, and the workspace is too small for a request.
        """
        if self.idle:
            return ["paged"] * len(requests)
        costs = [_DECODES if request is None else self.costs_us(*request) for request in requests]
        stock: list[Way] = ["paged"] * len(requests)

        def step_us(ways: Sequence[Way]) -> float:
            return max(self._gpu_us(costs, ways), self.host_us(requests, ways))

        # Alone, a whole prompt need only be no slower on the GPU: its call costs the host less than the stock one.
        if len(requests) == 1 and not self.forced and costs[0].get("fresh", math.inf) <= costs[0]["paged"]:
            return ["fresh"] if step_us(["fresh"]) < (1 - _MARGIN) * step_us(stock) else stock
        # Fewest microseconds for the requests so far if the last goes this way, and what its neighbour before went.
        best: dict[Way, float] = {"paged": 0.0}
        before: list[dict[Way, Way]] = []
        for request, its_costs in zip(requests, costs, strict=True):
            following: dict[Way, float] = {}
            reached: dict[Way, Way] = {}
            for way, cost in self._weighed_us(its_costs).items():

                def change(last: Way, way: Way = way, first: bool = not before) -> float:
                    return 0.0 if last == way and self._joins(way) else self._change_us(way, first)

                reached[way] = min(best, key=lambda last: best[last] + change(last))
                following[way] = best[reached[way]] + change(reached[way]) + cost
            if not following:
                raise RuntimeError(
                    f"a request of (query, cached) tokens {request} does not fit the gather workspace; raise "
                    f"kda_plugin.gather_workspace_mib (now {self.workspace_bytes >> 20})"
                )
            best = following
            before.append(reached)
        way = min(best, key=lambda last: best[last])
        chosen: list[Way] = []
        for reached in reversed(before):
            chosen.append(way)
            way = reached[way]
        chosen.reverse()
        if self.forced or chosen == stock:
            return chosen
        return stock if step_us(chosen) > (1 - _MARGIN) * step_us(stock) else chosen

    def may_gain(self, query: int, context: int) -> bool:
        """Whether a request could gain that is alone in its step: a quick look, that saves most steps a slow one."""
        if self.forced:
            return True
        layer, (paged_penalty, fresh_penalty) = self.layer, self._penalties
        if context == 0 and layer.can_fresh:
            return fresh_penalty > 0
        penalty = max(paged_penalty, fresh_penalty)
        if self.calibration is None or penalty <= 0 or layer.pairs(query, context) < self._waiting_pairs:
            return False
        gather_us = layer.keys(query, context) * layer.moved_bytes / (self.calibration.gather_tbps * 1e6)
        return self.attention_us(query, context) * penalty > gather_us

    def step_may_gain(self, queries: np.ndarray, contexts: np.ndarray) -> bool:
        """Whether a step of several requests could gain, the same quick look.

        Args:
            queries: ``[prefills]`` query tokens of each.
            contexts: ``[prefills]`` tokens cached before them.
        """
        if self.forced:
            return True
        layer, (paged_penalty, fresh_penalty) = self.layer, self._penalties
        if self.calibration is None or max(paged_penalty, fresh_penalty) <= 0:
            return False
        keys = queries + (contexts if layer.window is None else np.minimum(contexts, layer.window))
        seen = keys - (queries - 1) / 2 if layer.window is None else np.minimum(keys, layer.window + 1)
        pairs = queries * seen  # with a window, at least as many as there are
        if pairs.sum() < self._waiting_pairs:
            return False
        us = pairs * self._us_per_pair
        penalties = np.where(contexts > 0, max(paged_penalty, fresh_penalty), fresh_penalty)
        gather_us = keys * (layer.moved_bytes / (self.calibration.gather_tbps * 1e6))
        if layer.can_fresh:
            gather_us = np.where(contexts > 0, gather_us, 0.0)
        gains = us * penalties - gather_us
        # Each is a call of its own, and one of them may be the step's first.
        call_us = self.calibration.call_us
        most = np.maximum(gains - call_us, 0.0).sum() + min(max(gains.max(), 0.0), call_us)
        return bool(most > _MARGIN * us.sum())

    def host_us(self, requests: Sequence[Request], ways: Sequence[Way]) -> float:
        """The host's time in a layer's forward if each request goes its way."""
        measured = self.calibration or H200
        each: dict[Way, float] = {
            "paged": measured.paged_host_us,
            "fresh": measured.fresh_host_us,
            "gather": measured.gather_host_us,
        }
        total = 0.0
        for i, (request, way) in enumerate(zip(requests, ways, strict=True)):
            parts = self.parts(*request) if way == "gather" and request is not None else Parts(1)
            if i == 0 or ways[i - 1] != way or parts.of != "whole" or not self._joins(way):
                total += each[way] * parts.calls
            if parts.of == "keys" and self.layer.can_fresh:
                total += each["fresh"]
        return total

    def _weighed_us(self, costs: dict[Way, float]) -> dict[Way, float]:
        """Costs of what can be, with the margin; without the stock call where it is not wanted and not needed."""
        if costs is _DECODES:
            return costs
        weighed = dict(costs)
        if not self.forced:
            weighed["paged"] *= 1 - _MARGIN
        elif len(weighed) > 1:
            weighed.pop("paged", None)
        return weighed

    def _joins(self, way: Way) -> bool:
        """Whether a request can be in the call of a neighbour that goes the same way."""
        return way == "paged" or self.shares_calls

    def _change_us(self, way: Way, first: bool) -> float:
        """What a call of its own costs; a step's first attention call costs nothing more than the stock one."""
        measured = self.calibration or H200
        return (0.0 if first else measured.call_us) + (measured.gather_us if way == "gather" else 0.0)

    def cost_of(self, requests: Sequence[Request], ways: Sequence[Way]) -> float:
        """What a step costs if each request goes its way, a call for each run of neighbours that are paged."""
        return self._gpu_us([_DECODES if request is None else self.costs_us(*request) for request in requests], ways)

    def _gpu_us(self, costs: Sequence[dict[Way, float]], ways: Sequence[Way]) -> float:
        total = 0.0
        for i, (its_costs, way) in enumerate(zip(costs, ways, strict=True)):
            total += its_costs.get(way, math.inf)
            if i == 0 or ways[i - 1] != way or not self._joins(way):
                total += self._change_us(way, i == 0)
        return total
