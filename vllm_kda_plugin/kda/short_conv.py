"""The causal convolution before KDA, in torch: the CPU's path."""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.no_grad()
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Convolve each channel of each sequence with its past, apply SiLU, remember the last inputs.

    Args:
        x: ``[T, C]``; exactly the tokens of the sequences, ``T = cu_seqlens[-1]``.
        weight: ``[C, W]``; the last column belongs to the token itself.
        pool: ``[P, C, W - 1]`` the last inputs of each sequence, oldest first; updated. Any strides.
        state_indices: ``[N]`` row in the pool of each sequence.
        has_initial_state: ``[N]`` bool, False for a sequence that starts from zeros; None if all have a past.
        cu_seqlens: ``[N + 1]`` first token of each sequence.

    Returns:
        ``[T, C]``, dtype of x. Computed in float32.
    """
    width = weight.shape[1]
    past = width - 1
    rows = state_indices.long()
    bounds = cu_seqlens.long()
    before = pool[rows].mT.float()  # [N, W - 1, C]
    if has_initial_state is not None:
        before.masked_fill_(~has_initial_state[:, None, None], 0)
    # All sequences one after the other, each with its past in front.
    num_sequences, lens = len(rows), bounds.diff()
    sequence = torch.repeat_interleave(torch.arange(num_sequences), lens)
    at = torch.arange(len(x)) + (sequence + 1) * past
    packed = x.new_empty((len(x) + num_sequences * past, x.shape[1]), dtype=torch.float32)
    starts = bounds[:-1] + torch.arange(num_sequences) * past
    packed[starts[:, None] + torch.arange(past)] = before
    packed[at] = x.float()
    out = sum(packed[at - past + tap] * weight[:, tap].float() for tap in range(width))
    ends = bounds[1:] + torch.arange(1, num_sequences + 1) * past
    pool[rows] = packed[ends[:, None] - past + torch.arange(past)].mT.to(pool.dtype)
    return F.silu(out).to(x.dtype)
