"""KDA prefills of a running engine, each of them held against the reference with what the layer gave it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.kda_calls import Args, expected, rows_of_pool
from vllm_kda_plugin.kda.prefill import kda_prefill

_SIGNATURE = inspect.signature(kda_prefill)
_TINY = 1e-3
"""Root mean square below which a result counts as so large: see ``kda_numerics``."""


class Watch:
    """Holds calls against the reference in float64: outputs, states left in the pool, and checkpoints.

    Errors are relative in norm, of a sequence with all its heads: a single head of a short text may cancel to nothing.

    Attributes:
        limit: of an error.
        calls: that were watched.
        continued: sequences among them that began with a state.
        checkpoints: that were taken.
        worst: error, by what errs.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.calls = self.continued = self.checkpoints = 0
        self.worst: dict[str, float] = {}
        self._wrong: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """All calls that layers make meanwhile."""
        from vllm_kda_plugin.kda import layers

        run = layers.kda_prefill

        def watched(*given: Any, **named: Any) -> Any:
            args = _SIGNATURE.bind(*given, **named).arguments
            before = _initial_states(args)
            wanted = expected(args, before, torch.float64)  # first: nobody has touched the inputs yet
            result = run(*given, **named)
            self._compare(args, before, wanted)
            return result

        layers.kda_prefill = watched
        try:
            yield
        finally:
            layers.kda_prefill = run

    def check(self) -> None:
        """Some calls were watched, and all of them were right."""
        assert self.calls, "no KDA prefill was watched"
        assert not self._wrong, f"{len(self._wrong)} errors in {self.calls} calls:\n" + "\n".join(self._wrong[:20])

    def _compare(self, args: Args, before: torch.Tensor | None, wanted: Any) -> None:
        self.calls += 1
        bounds = args["cu_seqlens"].tolist()
        rows = _tolist(args.get("state_indices"))
        offsets = _tolist(args.get("checkpoint_offsets"))
        started = _tolist(args.get("has_initial_state"))
        pairs: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []
        for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
            pairs.append(("output", n, args["out"][0, begin:end], wanted.out[0, begin:end]))
            if args.get("final_state") is not None:
                pairs.append(("final state", n, args["final_state"][n], wanted.final_state[n]))
            if rows and 0 < rows[n] < len(args["initial_state"]):  # row 0 is nobody's
                pairs.append(("row of the pool", n, args["initial_state"][rows[n]], wanted.final_state[n]))
            if offsets and offsets[n] > 0:
                self.checkpoints += 1
                pairs.append(("checkpoint", n, args["checkpoint_state"][n], wanted.checkpoint_state[n]))
            self.continued += bool(begin < end and before is not None and (not started or started[n]))
        pairs = [pair for pair in pairs if pair[2].numel()]
        if not pairs:
            return
        errors = torch.stack([_error(found, right) for _, _, found, right in pairs]).tolist()
        for (what, n, *_), error in zip(pairs, errors, strict=True):
            self.worst[what] = max(self.worst.get(what, 0.0), error)
            if not error <= self.limit:
                place = f"call {self.calls}, sequence {n} of {bounds[n + 1] - bounds[n]} tokens"
                self._wrong.append(f"{what} errs by {error:.1e}: {place}")


def _error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    least = _TINY * wanted.numel() ** 0.5
    return ((found.double() - wanted).norm() / wanted.norm().clamp(min=least)).nan_to_num(nan=float("inf"))


def _initial_states(args: Args) -> torch.Tensor | None:
    """A copy of them."""
    if args.get("state_indices") is not None:
        return rows_of_pool(args)
    held: torch.Tensor | None = args["initial_state"]
    return None if held is None else held.clone()


def _tolist(x: torch.Tensor | None) -> list[Any]:
    return [] if x is None else x.tolist()
