"""What a KDA prefill writes besides the layer's own output: four buffers, slices of the engine's workspace manager."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_kda_plugin.kda.prefill import scratch_bytes
from vllm_kda_plugin.kda.providers import Provider

_Spec = tuple[tuple[int, ...], torch.dtype]


class Buffers(NamedTuple):
    """The buffers of one step, contiguous, 256 bytes aligned. The next caller of the manager gets the same bytes."""

    scratch: torch.Tensor
    """Bytes, the ``workspace`` of ``kda_prefill``."""
    final_state: torch.Tensor | None
    """``[N, H, D, D]``, for a kernel that does not write the engine's pool itself."""
    out: torch.Tensor | None
    """``[1, T, H, D]``, for a step whose output cannot be written where the layer wants it."""
    checkpoint_state: torch.Tensor | None
    """``[N, H, D, D]``, for a step that takes checkpoints."""


@dataclass(frozen=True)
class KdaWorkspace:
    """The buffers of one layer for the most that a step can bring; those of layers of one kind are equal.

    Attributes:
        max_tokens: of a step, ``max_num_batched_tokens``.
        max_sequences: of a step, ``max_num_seqs``.
        num_heads: of this rank.
        head_dim: of keys and values.
        dtype: of the output.
        state_dtype: of the states.
        provider: the kernel.
    """

    max_tokens: int
    max_sequences: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    provider: Provider

    def specs(self, num_tokens: int, num_sequences: int) -> tuple[_Spec, ...]:
        """Shape and dtype of each buffer, in the order of :class:`Buffers`.

        Raises:
            ValueError: more tokens or sequences than were reserved.
        """
        if not (0 <= num_tokens <= self.max_tokens and 0 <= num_sequences <= self.max_sequences):
            raise ValueError(
                f"a step of {num_tokens} tokens in {num_sequences} sequences, must be at most {self.max_tokens} tokens "
                f"(--max-num-batched-tokens) in {self.max_sequences} sequences (--max-num-seqs)"
            )
        size = num_tokens, num_sequences, self.num_heads, self.head_dim
        scratch = scratch_bytes(self.provider, *size, self.dtype, self.state_dtype)
        state = (num_sequences, self.num_heads, self.head_dim, self.head_dim)
        return (
            ((scratch,), torch.uint8),
            (state, self.state_dtype),
            ((1, num_tokens, self.num_heads, self.head_dim), self.dtype),
            (state, self.state_dtype),
        )

    def reserve(self, *, checkpoint: bool) -> None:
        """Make the engine's workspace large enough for any step, before it is locked.

        Called when a layer is made and in each profile run, so that the memory is counted and every
        micro-batch's own workspace grows too.

        Args:
            checkpoint: whether a step may take checkpoints.
        """
        sizes = self.max_tokens, self.max_sequences
        self.take(*sizes, final_state=not self.provider.pools, out=True, checkpoint=checkpoint)

    def take(self, num_tokens: int, num_sequences: int, *, final_state: bool, out: bool, checkpoint: bool) -> Buffers:
        """The buffers of a step, all at once; see :meth:`specs` for what is refused.

        Args:
            num_tokens: of the step.
            num_sequences: of the step.
            final_state: whether a buffer for the final states is wanted.
            out: whether one for the output is.
            checkpoint: whether one for checkpoints is.
        """
        scratch, *others = _specs(self, num_tokens, num_sequences)
        wanted = final_state, out, checkpoint
        first, *rest = _manager().get_simultaneous(scratch, *itertools.compress(others, wanted))
        taken = iter(rest)
        return Buffers(first, *(next(taken) if each else None for each in wanted))


@functools.lru_cache(maxsize=64)
def _specs(workspace: KdaWorkspace, num_tokens: int, num_sequences: int) -> tuple[_Spec, ...]:
    """Every layer of a step asks the same."""
    return workspace.specs(num_tokens, num_sequences)


def _manager() -> Any:
    # Not at the top: the other parts of this package are used without vLLM.
    from vllm.v1.worker.workspace import (
        current_workspace_manager,
        init_workspace_manager,
        is_workspace_manager_initialized,
    )

    if not is_workspace_manager_initialized():  # the CPU engine never does
        init_workspace_manager(torch.device("cpu"))
    return current_workspace_manager()
