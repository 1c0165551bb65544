"""Counts what the attention backend did in this process and reports it in the log."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from multiprocessing.util import Finalize
from typing import Any

_MARK = "KDA plugin stats: "
REPORT_INTERVAL_S = 10.0


@dataclasses.dataclass
class AttentionStats:
    """Counters of one process.

    ``implementation`` is the class whose forward ran, ``module.qualname``; a *forward* is one layer of one
    step; a *gather* is one copy of paged KV into contiguous K and V, for one layer and one or more
    requests. ``gathered_bytes`` counts K and V once, as payload. The three after it count attention calls by
    what they read: the page table, this step's own K and V, gathered K and V. On CUDA, ``stock_steps`` are steps
    of a group of layers that were left to vLLM's own forward, or to a full CUDA graph: none of the others counts those.
    """

    implementation: str = ""
    forwards: int = 0
    gathers: int = 0
    gathered_tokens: int = 0
    gathered_bytes: int = 0
    paged_calls: int = 0
    fresh_calls: int = 0
    gather_calls: int = 0
    stock_steps: int = 0

    def line(self) -> str:
        """The log line of these counters; :func:`parse_line` reads it back."""
        return _MARK + json.dumps({"pid": os.getpid(), **dataclasses.asdict(self)})


def parse_line(line: str) -> dict[str, Any] | None:
    """The counters in a log line written by :meth:`AttentionStats.line`, else None."""
    _, found, tail = line.partition(_MARK)
    return json.loads(tail) if found else None


STATS = AttentionStats()


class Reporter:
    """Logs :data:`STATS` when the process ends and, if ``periodic``, every 10 s while it works."""

    def __init__(self, periodic: bool) -> None:
        from vllm.logger import init_logger

        self._logger = init_logger("vllm.kda_plugin")
        self.periodic = periodic
        self._next = time.monotonic() + REPORT_INTERVAL_S
        # multiprocessing children skip atexit on some Pythons; Finalize runs in them and in the main process.
        self._final = Finalize(None, self.report, exitpriority=10)

    def forward(self) -> None:
        """Call once a forward."""
        STATS.forwards += 1
        if self.periodic:
            self.tick()

    def tick(self) -> None:
        """Log the counters if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_INTERVAL_S
            self.report()

    def report(self) -> None:
        """Log the counters now, if this process did any attention."""
        if STATS.forwards or STATS.stock_steps:
            self._logger.info("%s", STATS.line())


@functools.cache
def reporter(periodic: bool) -> Reporter:
    """The reporter that all layers of a process share."""
    return Reporter(periodic)
