"""How a step of attention layers is timed.

A step is what an engine does for all its attention layers of one kind: one build of the metadata, then one forward a
layer. Short steps are run a few in a row, as an engine sends them while the GPU still works on the one before; the time
is the host's clock from an idle GPU to an idle GPU. So what the host does counts wherever the GPU waits for it. In an
engine the GPU has other work between attention layers, which hides some of that: here is the worst case.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vllm_kda_plugin.bench import timing
from vllm_kda_plugin.bench.attention_cases import LAYERS, LONG_LAYERS, LONG_US, SHORT_LAYERS, SHORT_US, Batch
from vllm_kda_plugin.bench.attention_layers import Backend

# Timings of a cell: about this many microseconds of each backend, within these numbers of rounds.
_BUDGET_US = 80_000
_ROUNDS = 3, 41
# Short steps in a row; what precedes a step's first launch is nothing beside a long one.
_REPEATS, _LONG_STEP_US = 3, 20_000
# Layers whose calls are timed on the GPU; the median is taken.
_TIMED_LAYERS = 3
_HOLD_CYCLES = 6_000_000


class Clock:
    """What timing asks of the GPU."""

    def drain(self) -> None:
        """Wait until the GPU is idle."""
        torch.cuda.synchronize()

    def hold(self) -> None:
        """Keep the GPU busy for some milliseconds: what is sent meanwhile runs without waiting for the host."""
        torch.cuda._sleep(_HOLD_CYCLES)

    def event(self) -> Any:
        """A ``torch.cuda.Event`` with a time."""
        return torch.cuda.Event(enable_timing=True)

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        """The replay of a CUDA graph of what ``calls`` does."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        # Not torch.cuda.graph: it empties the allocator's cache each time, which takes longer than what is measured.
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                calls()
            finally:
                graph.capture_end()
        return graph.replay


@dataclasses.dataclass
class Step:
    """One step of one backend; called, it runs, a few times in a row, and returns microseconds of one.

    A step of decodes only is a full CUDA graph in an engine: the metadata is built anew, into the buffers that the
    graph reads, and the forwards are replayed.
    """

    backend: Backend
    batch: Batch
    clock: Clock
    layers: int = LAYERS
    repeats: int = 1
    """Steps in a row."""
    samples: list[float] = dataclasses.field(default_factory=list)
    builds: list[float] = dataclasses.field(default_factory=list)
    """Microseconds of the host's time in build, of each sample."""
    sends: list[float] = dataclasses.field(default_factory=list)
    """Microseconds of the host's time in the forwards, of each sample."""

    def __post_init__(self) -> None:
        self.replay: Callable[[], None] | None = None
        if self.batch.case.decodes_only:
            metadata = self.backend.build(self.batch)
            self._forwards(metadata)  # warm: nothing may be loaded during a capture
            self.clock.drain()
            self.replay = self.clock.capture(lambda: self._forwards(metadata))

    def _forwards(self, metadata: Any) -> None:
        for layer in range(self.layers):
            self.backend.forward(self.batch, layer % len(self.batch.caches), metadata)

    def __call__(self) -> float:
        builds = sends = 0.0
        self.clock.drain()
        begin = time.perf_counter()
        for _ in range(self.repeats):
            start = time.perf_counter()
            metadata = self.backend.build(self.batch)
            built = time.perf_counter()
            if self.replay is None:
                self._forwards(metadata)
            else:
                self.replay()
            builds += built - start
            sends += time.perf_counter() - built
        self.clock.drain()
        microseconds = (time.perf_counter() - begin) * 1e6 / self.repeats
        self.samples.append(microseconds)
        self.builds.append(builds * 1e6 / self.repeats)
        self.sends.append(sends * 1e6 / self.repeats)
        return microseconds


def step_sizes(backend: Backend, batch: Batch, clock: Clock) -> tuple[int, int]:
    """Layers of a step, as many as a model has where that does not take long, and how many short steps in a row."""
    step = Step(backend, batch, clock)
    step()
    us = step() / step.layers
    layers = SHORT_LAYERS if us < SHORT_US else LONG_LAYERS if us > LONG_US else LAYERS
    return layers, _REPEATS if us * layers < _LONG_STEP_US else 1


def time_steps(steps: Mapping[str, Step], rounds: int | None = None) -> dict[str, float]:
    """Median microseconds a layer of each step, timed alternately; of all rounds since it was made.

    Args:
        steps: by name; their forwards have run before.
        rounds: how often each is timed; None for as often as its length suggests, after running once for that.
    """
    if rounds is None:
        longest = max(step() * step.repeats for step in steps.values())
        for step in steps.values():
            for kept in (step.samples, step.builds, step.sends):
                kept.clear()
        rounds = min(max(int(_BUDGET_US / longest), _ROUNDS[0]), _ROUNDS[1])
    timing.interleaved_medians(steps, lambda step: step(), rounds)
    return {name: statistics.median(step.samples) / step.layers for name, step in steps.items()}


def ratio_quartiles(numerator: Step, denominator: Step) -> list[float]:
    """Quartiles of the ratio of two steps, round by round: the median, and how far a single round is to be trusted."""
    ratios = [a / b for a, b in zip(numerator.samples, denominator.samples, strict=True)]
    return statistics.quantiles(ratios, n=4)


@dataclasses.dataclass
class Spans:
    """Times of named calls on the GPU, between events."""

    clock: Clock
    taken: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what is sent to the GPU inside."""
        begin, end = self.clock.event(), self.clock.event()
        begin.record()
        yield
        end.record()
        self.taken.append((name, begin, end))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, each call timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return timed

    def us(self) -> dict[str, float]:
        """Microseconds of each name, summed; forgets them. The GPU must have finished."""
        sums: dict[str, float] = {}
        for name, begin, end in self.taken:
            sums[name] = sums.get(name, 0.0) + begin.elapsed_time(end) * 1e3
        self.taken.clear()
        return sums


def gpu_parts(backend: Backend, batch: Batch, clock: Clock, parts: bool = False) -> dict[str, float]:
    """Microseconds of the GPU in one layer's forward, the host's time left out.

    Args:
        parts: whether to take apart what our implementation calls; for no other one.

    Returns:
        ``all``, and with ``parts`` of what is called: ``gather``, ``attention`` on contiguous K and V, ``merge`` of
        partial results. What is left is in paged calls.
    """
    spans = Spans(clock)
    metadata = backend.build(batch)
    impl = backend.impl
    if parts:
        made = impl.contiguous
        impl.contiguous = dataclasses.replace(
            made,
            flash=spans.around("attention", made.flash),
            gather=spans.around("gather", made.gather),
            merge=spans.around("merge", made.merge),
        )
    try:
        layers = range(min(_TIMED_LAYERS, len(batch.caches)))
        found = []
        backend.forward(batch, 0, metadata)  # plans the step
        for layer in reversed(layers):
            spans.taken.clear()
            clock.drain()
            clock.hold()
            with spans.span("all"):
                backend.forward(batch, layer, metadata)
            clock.drain()
            found.append(spans.us())
    finally:
        if parts:
            impl.contiguous = made
    return {name: statistics.median(us[name] for us in found) for name in found[0]}
