"""Which kernel a step's KDA prefill should take: the one predicted to be fastest, by times measured on this GPU.

No tensor is touched here. Times are microseconds of the GPU.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from vllm_kda_plugin.kda.providers import PROVIDERS, Case, Provider
from vllm_kda_plugin.kernels import kda_native


class Shape(NamedTuple):
    """What a step asks of a layer."""

    num_tokens: int
    num_sequences: int
    num_heads: int
    max_seqlen: int | None
    """No sequence has more tokens; None: all are taken to be equally long."""


class Times(NamedTuple):
    """Of a kernel whose blocks step along whole sequences, or whose launches cost more than its work."""

    start: float
    token: float
    """Of the longest sequence, whose tokens come one after the other."""
    head_token: float
    """One head of one token, where there is work for the whole GPU."""
    head_state: float
    """One head of one sequence: its state, read and written."""

    def us(self, shape: Shape) -> float:
        """Of a call."""
        longest = -(-shape.num_tokens // max(1, shape.num_sequences)) if shape.max_seqlen is None else shape.max_seqlen
        work = shape.num_heads * (self.head_token * shape.num_tokens + self.head_state * shape.num_sequences)
        return self.start + math.hypot(self.token * longest, work)


MEASURED: dict[str, dict[tuple[str, str], Times]] = {
    "NVIDIA H200": {
        ("flashkda", "bounded"): Times(start=10, token=0.0475, head_token=9.3e-4, head_state=0.06),
        ("triton", "bounded"): Times(start=301, token=0, head_token=2.5e-3, head_state=0),
        ("triton", "softplus"): Times(start=500, token=0, head_token=4.1e-3, head_state=0),
    }
}
"""By GPU, kernel and gate; solved from measurements that were made before our kernel was, not beside it."""
NATIVE_MEASURED_ON = frozenset({"NVIDIA H200"})
"""GPUs on which the times in ``kernels/kda_native.py`` were measured."""


def candidates(case: Case, gpu: str) -> tuple[Provider, ...]:
    """The kernels to choose from at each step, our own first.

    Args:
        case: a layer.
        gpu: its name.

    Returns:
        None but those whose times are known and that can run the layer; none at all unless our own is one of them.
    """
    own = PROVIDERS["native"]
    if gpu not in NATIVE_MEASURED_ON or own.why_not(case):
        return ()
    others = [PROVIDERS[name] for name, gate in MEASURED[gpu] if gate == _gate(case)]
    return own, *(provider for provider in others if provider.why_not(case) is None)


@functools.lru_cache(maxsize=4096)
def fastest(among: tuple[Provider, ...], case: Case, gpu: str, multiprocessors: int, shape: Shape) -> Provider:
    """The kernel that a call of this shape should take.

    Args:
        among: some of :func:`candidates`.
        case: the layer.
        gpu: its name.
        multiprocessors: of the GPU.
        shape: of the call, at least one token and sequence.
    """

    def us(provider: Provider) -> float:
        if provider.name == "native":
            num_tokens, num_sequences, num_heads, max_seqlen = shape
            bounded = case.lower_bound is not None
            return kda_native.predicted_us(
                num_tokens, num_sequences, num_heads, multiprocessors, max_seqlen, bounded=bounded
            )
        return MEASURED[gpu][provider.name, _gate(case)].us(shape)

    return among[0] if len(among) == 1 else min(among, key=us)


def _gate(case: Case) -> str:
    return "softplus" if case.lower_bound is None else "bounded"
